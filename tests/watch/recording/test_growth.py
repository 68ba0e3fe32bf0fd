"""What holds memory that grows: jobs whose lists grow by real tensors and arrays, looked at from inside."""

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker_watch.recording.calls import describe_growth, find_growing_line
from stoker_watch.recording.hook.stoker_hook import growth
from stoker_watch.recording.hook.stoker_hook.growth import GrowthFinder
from tests.needs import needs

MIB = 1 << 20
HEAD = "import collections\nimport numpy as np\nimport torch\n"
GRAPH = HEAD + (
    "def train(after_step):\n    losses, w = [], torch.ones(3, requires_grad=True)\n    for n in range(60):\n"
    "        loss = (w * n).sum()\n        losses.append(loss)\n        after_step()\n"
)
ARRAYS = HEAD + (
    "seen = []\ndef train(after_step):\n    for n in range(60):\n"
    "        seen.append(np.ones(1 << 18))\n        after_step()\n"
)
CACHE = HEAD + (
    "class Trainer:\n    def __init__(self):\n        self.cache = {}\n    def step(self, n, after_step):\n"
    "        self.cache[n] = np.ones(1 << 18)\n        after_step()\n"
    "def train(after_step):\n    trainer = Trainer()\n    for n in range(60):\n        trainer.step(n, after_step)\n"
)
HISTORY = HEAD + (
    "def train(after_step):\n    history = {'out': collections.deque()}\n    for n in range(60):\n"
    "        history['out'].append(torch.ones(1 << 19))\n        after_step()\n"
)
NESTED = HEAD + (
    "class Stats:\n    def __init__(self):\n        self.values = {'conv': []}\n    def hook(self, out):\n"
    "        self.values['conv'].append(out)\n"
    "def train(after_step):\n    stats, w = Stats(), torch.ones(3, requires_grad=True)\n    for n in range(60):\n"
    "        stats.hook(w * n)\n        after_step()\n"
)
FLOATS = HEAD + (
    "def train(after_step):\n    losses = []\n    for n in range(60):\n"
    "        losses.append(float(n))\n        after_step()\n"
)


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MAX_LOOK_S", 60.0)  # the machine may be busy


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Runs a script with a step each five seconds, and returns the last report. memory: bytes by number of the step."""
    reports: list[list[dict[str, Any]]] = []

    def run(source: str, memory: Callable[[int], int] = lambda n: 2 * MIB * n * 5) -> list[dict[str, Any]]:
        file = tmp_path / "job.py"
        file.write_text(source)
        module = types.ModuleType("growing_job")
        module.__file__ = str(file)
        sys.modules["growing_job"] = module
        exec(compile(source, str(file), "exec"), module.__dict__)
        count = 0
        finder = GrowthFinder(reports.append, lambda: memory(count))

        def after_step() -> None:
            nonlocal count
            count += 1
            finder.check(1000.0 + 5 * count)

        module.train(after_step)
        return describe_growth(reports[-1]) if reports else []

    yield run
    sys.modules.pop("growing_job", None)


@needs("torch", "numpy")
@pytest.mark.parametrize(
    ("source", "name", "line", "graph"),
    [
        (GRAPH, "losses", 8, True),
        (ARRAYS, "seen", 7, False),
        (CACHE, "self.cache", 8, False),
        (HISTORY, "history['out']", 7, False),
        (NESTED, "stats.values['conv']", 8, True),
    ],
)
def test_the_holder_is_named_with_the_line_that_adds_to_it(
    source: str, name: str, line: int, graph: bool, job: Callable[..., list[dict[str, Any]]]
) -> None:
    first, *_ = job(source)
    assert (first["name"], first["place"], first["graph"]) == (name, f"job.py:{line}", graph)
    if not graph:  # 2 MiB a step
        added = int(first["text"].partition("entries")[2].partition(", ")[2].partition(" more")[0])
        assert first["bytes"] == pytest.approx(2 * MIB * added, rel=0.01)


@needs("torch", "numpy")
@pytest.mark.parametrize(
    ("source", "memory"),
    [
        (GRAPH, lambda _: 500 * MIB),
        (GRAPH, lambda n: 900 * MIB if n > 30 else 500 * MIB),
        (GRAPH, lambda n: 500 * MIB + (n % 2) * 40 * MIB),
        (FLOATS, lambda n: 10 * MIB * n),
    ],
    ids=["flat", "at once", "up and down", "floats beside other growth"],
)
def test_nothing_is_said_of_lists_that_do_not_hold_it(
    source: str, memory: Callable[[int], int], job: Callable[..., list[dict[str, Any]]]
) -> None:
    assert job(source, memory) == []


def test_no_reference_is_kept_to_what_was_looked_at() -> None:
    class Thing:
        pass

    finder = GrowthFinder(lambda _: None, lambda: 0)

    def step() -> "weakref.ref[Thing]":
        things = [Thing()]
        finder._lengths = finder._look()[0]
        alive = weakref.ref(things[0])
        del things
        assert alive() is None, "the frame is not left, and its copy of the locals is empty"
        return alive

    assert any("things" in key for key in (step(), finder._lengths)[1])
    gc.collect()


def test_code_of_the_job_is_not_called_and_its_errors_do_not_reach_it() -> None:
    calls: list[str] = []

    class Hostile(list[int]):
        def __len__(self) -> int:
            calls.append("len")
            raise RuntimeError

        def __iter__(self) -> Iterator[int]:
            calls.append("iter")
            raise RuntimeError

        def __getattribute__(self, name: str) -> object:
            calls.append(name)
            raise RuntimeError

    class Proxy:
        def __getattr__(self, name: str) -> object:
            calls.append(name)
            raise RuntimeError

        @property
        def __class__(self) -> type:  # type: ignore[override]
            calls.append("class")
            raise RuntimeError

    reports: list[object] = []
    hostile, proxy, used = Hostile(), Proxy(), 0
    finder = GrowthFinder(reports.append, lambda: used)
    for n in range(40):
        list.append(hostile, n)
        used += 10 * MIB
        finder.check(5.0 * n)
    assert calls == []
    assert finder._lengths, "it has looked"
    del proxy


def test_a_trace_function_switches_looks_off() -> None:
    """A debugger may have changed the copies of locals that a look would read."""
    used = 0
    finder = GrowthFinder(lambda _: None, lambda: used)
    old = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        for n in range(20):
            used += 10 * MIB
            finder.check(5.0 * n)
    finally:
        sys.settrace(old)
    assert not finder._lengths


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("a = []\nb.x.append(1)\na.append(2)\n", "a", 3),
        ("self.x.y.update(z)\n", "trainer.y", 1),
        ("a = []\nprint(a)\n", "a", 0),
        ("a = []\na += [1]\n", "a", 2),
        ("a['k'].extend(x)\n", "a['k']", 1),
        ("a.append(1)\n", "history.train loss", 0),  # of SimpleNamespace(**{"train loss": []})
    ],
)
def test_the_line_that_adds_is_found_by_the_last_name(text: str, name: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(text)
    assert find_growing_line(str(tmp_path / "job.py"), name) == line
