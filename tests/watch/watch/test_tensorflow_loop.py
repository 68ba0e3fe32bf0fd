"""Loops of TensorFlow that users write, with TensorFlow's classes replaced by ones that take a known time."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker_watch.recording.hook.stoker_hook import clock as hook
from stoker_watch.recording.hook.stoker_hook import tensorflow_loop
from stoker_watch.recording.hook.stoker_hook.instruments import timed
from tests.fixtures.watch_clock import Timed


class OutOfRangeError(Exception):
    """As TensorFlow's at the end of a dataset."""


class TensorFlow:
    """What the hook patches. A batch takes 1 s, a trace 5 s, a run of a function 2 s."""

    def __init__(self, time: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
        tensorflow = self

        class OwnedIterator:
            def __init__(self, batches: int) -> None:
                self._left = batches

            def _next_internal(self) -> Any:
                if not self._left:
                    raise OutOfRangeError
                self._left -= 1
                time.takes(1.0)
                return SimpleNamespace(shape=(8, 3))

        class Function:
            def __init__(self, python_function: Callable[..., None]) -> None:
                self.python_function = python_function
                self._traces: set[object] = set()

            def __call__(self, key: object = None) -> None:
                if key not in self._traces:
                    self._traces.add(key)
                    tensorflow.func_graph.func_graph_from_py_func(self.python_function)
                time.takes(2.0)

        class GradientTape:
            def gradient(self) -> None:
                pass

        class Checkpoint:
            def save(self) -> None:
                tensorflow.func_graph.func_graph_from_py_func(lambda: None)

            write = save

        def func_graph_from_py_func(python_function: Callable[..., None]) -> None:
            time.takes(5.0)
            python_function()

        self.iterators = SimpleNamespace(OwnedIterator=OwnedIterator)
        self.functions = SimpleNamespace(Function=Function, __name__=__name__)
        self.func_graph = SimpleNamespace(func_graph_from_py_func=func_graph_from_py_func)
        self.backprop = SimpleNamespace(GradientTape=GradientTape)
        self.checkpoint = SimpleNamespace(Checkpoint=Checkpoint)
        self.state = tensorflow_loop.LoopState()
        for module in (hook, tensorflow_loop):
            monkeypatch.setattr(module, "clock", time.clock)
        monkeypatch.setattr(tensorflow_loop, "state", self.state)
        monkeypatch.setattr(tensorflow_loop.sampler, "_next_s", float("inf"))  # there is no profiler
        tensorflow_loop.patch_next(self.iterators, "OwnedIterator", "_next_internal")
        tensorflow_loop.patch_functions(self.functions)
        tensorflow_loop.patch_tracing(self.func_graph)
        tensorflow_loop.patch_gradients(self.backprop)
        hook.patch_timed(self.checkpoint, "checkpoint", "Checkpoint.save", "Checkpoint.write")

    def batches(self, number: int) -> Iterator[Any]:
        iterator = self.iterators.OwnedIterator(number)
        while True:
            try:
                yield iterator._next_internal()
            except OutOfRangeError:
                return

    def train_function(self) -> Any:
        def step() -> None:
            self.func_graph.func_graph_from_py_func(lambda: None)  # a condition in the graph: a nested trace
            self.backprop.GradientTape().gradient()

        return self.functions.Function(step)


@pytest.fixture
def time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Timed:
    return Timed(monkeypatch, tmp_path)


@pytest.fixture
def tensorflow(time: Timed, monkeypatch: pytest.MonkeyPatch) -> TensorFlow:
    return TensorFlow(time, monkeypatch)


def counts(time: Timed) -> tuple[float, ...]:
    return tuple(time.clock.values[slot] for slot in (hook.STEPS, hook.BATCHES, hook.IMAGES, hook.RECOMPILES))


def test_a_custom_loop(time: Timed, tensorflow: TensorFlow) -> None:
    step, test = tensorflow.train_function(), tensorflow.functions.Function(lambda: None)
    for _ in range(2):
        for _ in tensorflow.batches(3):
            step()
        time.takes(0.25)
        for _ in tensorflow.batches(2):
            test()
        tensorflow.checkpoint.Checkpoint().save()
    assert counts(time) == (6, 6, 48, 0)
    # the first batch, trace and run of `step` are startup
    assert time.seconds() == {
        "startup": 1 + 10 + 2, "input_wait": 5, "compute": 10, "host": 0.5, "eval": 4 * (1 + 2) - 2, "compile": 5 + 2,
        "checkpoint": 10,
    }  # fmt: skip


@pytest.mark.parametrize("is_new", [False, True])
def test_a_second_trace_of_the_same_code_is_a_recompilation(time: Timed, tensorflow: TensorFlow, is_new: bool) -> None:
    step = tensorflow.train_function()
    for i, _ in enumerate(tensorflow.batches(4)):
        step(i)
        if is_new:  # created again for each step
            step = tensorflow.functions.Function(step.python_function)
    assert counts(time) == (4, 4, 32, 3)
    assert time.seconds()["compile"] == 3 * (10 + 2)


def test_two_functions_in_a_step(time: Timed, tensorflow: TensorFlow) -> None:
    first, second = tensorflow.train_function(), tensorflow.train_function()
    for _ in tensorflow.batches(3):
        first()
        second()
    assert counts(time)[:2] == (3, 3)
    assert time.seconds()["compute"] == 2 * (2 + 2)
    assert "host" not in time.seconds()


def test_gradients_and_updates_outside_of_graphs(time: Timed, tensorflow: TensorFlow) -> None:
    class TFOptimizer:
        def apply(self) -> None:
            time.takes(0.5)

    tensorflow_loop.patch_apply(SimpleNamespace(TFOptimizer=TFOptimizer), "TFOptimizer", "apply")
    optimizer = TFOptimizer()
    for _ in tensorflow.batches(3):
        time.takes(2.0)
        tensorflow.backprop.GradientTape().gradient()
        optimizer.apply()
    assert counts(time)[:2] == (3, 3)
    assert time.seconds()["compute"] == 2 * 2.5


def test_inside_fit_only_traces_are_timed(time: Timed, tensorflow: TensorFlow) -> None:
    step = tensorflow.train_function()

    def fit() -> None:
        for i, _ in enumerate(tensorflow.batches(3)):
            step(i)

    timed(fit, tensorflow_loop.begin_fit)()
    assert counts(time) == (0, 0, 0, 2)
    assert not tensorflow.state.in_fit


def test_a_step_that_is_given_an_iterator_fetches_in_its_graph(time: Timed, tensorflow: TensorFlow) -> None:
    step, iterator = tensorflow.train_function(), tensorflow.iterators.OwnedIterator(9)
    for _ in range(4):
        step(iterator)
    assert time.seconds()["graph"] == 3 * 2
    assert counts(time)[0] == 4


def test_errors_and_other_threads(time: Timed, tensorflow: TensorFlow) -> None:
    def fails() -> None:
        raise ValueError("of the job")

    with pytest.raises(ValueError, match="of the job"):
        tensorflow.functions.Function(fails)()
    assert tensorflow.state.function is None
    assert time.clock.is_outside_phases()
    step = tensorflow.train_function()
    thread = threading.Thread(target=lambda: [step() for _ in tensorflow.batches(2)])
    thread.start()
    thread.join()
    assert counts(time)[:2] == (0, 0)


def test_a_module_without_the_expected_class_is_an_attribute_error() -> None:
    """`__init__.py` reports it in the data sources of the run, and the job goes on."""
    with pytest.raises(AttributeError):
        tensorflow_loop.patch_next(SimpleNamespace(), "OwnedIterator", "_next_internal")
    tensorflow_loop.patch_functions(SimpleNamespace(Function=dict, __name__="an old name"))
