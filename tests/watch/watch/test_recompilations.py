"""Why functions are compiled again, as the hook takes it from JAX, TensorFlow and torch."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from stoker_watch.recording.hook.stoker_hook import jax_loop, tensorflow_loop, torch_loop

# as jax 0.10.2 logs them
SHAPES = """TRACING CACHE MISS at /job/train.py:12:19 (<module>):
  for update defined at /job/train.py:10
  all previously seen cache keys differ. For the closest previous key:
  different input types:
  * at x, now f32[4] and before f32[3]"""
STATIC = """TRACING CACHE MISS at /job/train.py:9:19 (<module>):
  for update defined at /job/train.py:7
  all previously seen cache keys differ. For the closest previous key:
  different input pytree:
  * at input path [0][1], now <class 'jax._src.tree_util.Static'> with pytree metadata Static(val=2) and before \
<class 'jax._src.tree_util.Static'> with pytree metadata Static(val=0), so the pytree node metadata does not match"""
AGAIN = """TRACING CACHE MISS at /job/train.py:14:4 (<module>):
  never seen function:
    <lambda> id=139952873566784 defined at /job/train.py:14
  but seen another function defined on the same line; maybe the function is
  being re-defined repeatedly, preventing caching?"""
FIRST = """TRACING CACHE MISS at /job/train.py:9:19 (<module>):
  never seen function:
    update id=139953287070880 defined at /job/train.py:7"""


class Config(SimpleNamespace):
    def update(self, name: str, value: bool) -> None:
        setattr(self, name, value)


@pytest.fixture
def misses(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = jax_loop._Misses()
    monkeypatch.setitem(jax_loop.modules, "jax", SimpleNamespace(config=Config(jax_explain_cache_misses=False)))
    yield made
    for name in jax_loop.MISS_LOGGERS:
        logging.getLogger(name).removeFilter(made)


def test_jax_tells_what_differs_and_prints_nothing(misses: Any, caplog: pytest.LogCaptureFixture) -> None:
    misses.ask()
    logger = logging.getLogger(jax_loop.MISS_LOGGERS[0])
    for text in (FIRST, SHAPES):
        logger.warning(text)
    assert misses.why == {"update": "at x, now f32[4] and before f32[3] (called at train.py:12)"}
    for text in (STATIC, AGAIN):
        logger.warning(text)
    assert misses.why == {
        "update": "at input path [0][1], now Static(val=2) and before Static(val=0) (called at train.py:9)",
        "<lambda>": "another function of the same line was compiled before (called at train.py:14)",
    }
    assert not caplog.records
    logger.warning("other text")
    assert [record.message for record in caplog.records] == ["other text"]


def test_jax_is_asked_for_a_while_only(misses: Any) -> None:
    config = jax_loop.modules["jax"].config
    misses.ask()
    for number in range(jax_loop.MAX_MISSES):
        assert config.jax_explain_cache_misses, number
        logging.getLogger(jax_loop.MISS_LOGGERS[0]).warning(SHAPES)
    misses.ask()
    assert not config.jax_explain_cache_misses


def test_what_a_job_has_asked_jax_for_is_printed(misses: Any, caplog: pytest.LogCaptureFixture) -> None:
    jax_loop.modules["jax"].config.update("jax_explain_cache_misses", True)
    misses.ask()
    logging.getLogger(jax_loop.MISS_LOGGERS[0]).warning(SHAPES)
    assert [record.message for record in caplog.records] == [SHAPES]


def test_traces_of_tensorflow_differ_in_an_argument_or_in_the_function() -> None:
    before, now = {"0": "TensorSpec(shape=(3,))", "rate": "0.1"}, {"0": "TensorSpec(shape=(3,))", "rate": "0.2"}
    assert tensorflow_loop._difference(1, now, 1, before) == "argument rate: now 0.2, before 0.1"
    assert tensorflow_loop._difference(2, now, 1, now) == "another tf.function of the same code was traced before"


def test_torch_tells_the_guard_of_the_function_that_is_compiled_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch._dynamo.utils.get_compilation_metrics` of torch 2.14."""
    guard = "0/0: n == 0.5                                                 #   # <stdin>:10 in f\nUser stack trace:"
    size = "1/0: tensor 'x' size mismatch at index 0. expected 3, actual 4"
    compiled = [("f", None), ("f", guard), ("g", None), ("g", size), ("f", guard)]
    listed = [SimpleNamespace(co_name=name, recompile_reason=why, co_filename="/job/train.py", co_firstlineno=9)
              for name, why in compiled]  # fmt: skip
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(torch_loop, "clock", SimpleNamespace(set_recompiled=lambda *words: told.append(words)))
    utils = SimpleNamespace(get_compilation_metrics=lambda: listed)
    monkeypatch.setitem(torch_loop.modules, "torch._dynamo.utils", utils)
    assert torch_loop._note_recompilations(torch_loop.Counter(), 0) == 5
    assert told == [
        ("f (train.py:9)", "a guard failed: n == 0.5"),
        ("g (train.py:9)", "a guard failed: tensor 'x' size mismatch at index 0. expected 3, actual 4"),
        ("f (train.py:9)", "a guard failed: n == 0.5"),
    ]
