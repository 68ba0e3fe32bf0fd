"""Where the time of a real run went: known delays are attributed to their phase, and almost nothing is unattributed.

The delays are measured around the delayed calls by the same clock, so a busy machine changes both alike. The same with
an injected clock is in `tests/watch/recording/test_ledger.py`.
"""

import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.data.loading.loader import Loader
from stoker.training import checkpoint, evaluator, loop, parallel, recorder, start, trace
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.runs.records import EVENTS, STEPS, TRACE_FILES, TRACES, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from tests.drawn import draw
from tests.fixtures.training_ledger_of_a_run import settings
from tests.timing import undisturbed_once

DELAYS = {
    "input_wait": 0.05,
    "eval": 1.5,
    "checkpoint": 0.4,
    "startup": 2.0,
    "compile": 2.0,
    "idle": 2.0,
    "recovery": 0.2,
}


def delayed(
    spent: dict[str, float], phase: str, call: Callable[..., Any], *, by: float | None = None
) -> Callable[..., Any]:
    """`call` with the phase's delay before it (or `by` seconds); what both take is added to `spent`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        time.sleep(DELAYS[phase] if by is None else by)
        try:
            return call(*args, **kwargs)
        finally:
            spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - began

    return wrapper


@pytest.mark.slow
@undisturbed_once
def test_known_delays_are_attributed_to_their_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = draw(tmp_path / "data")
    spent: dict[str, float] = {}
    next_batch = Loader.__next__
    slow_next = delayed(spent, "input_wait", next_batch)
    # only of training: evaluation has a loader of its own
    monkeypatch.setattr(Loader, "__next__", lambda self: (slow_next if self._samples.train else next_batch)(self))
    monkeypatch.setattr(evaluator, "detect", delayed(spent, "eval", evaluator.detect))
    # the rest of an evaluation, where training waits for it
    monkeypatch.setattr(evaluator.Evaluator, "collect", delayed(spent, "eval", evaluator.Evaluator.collect, by=0.0))
    monkeypatch.setattr(checkpoint, "snapshot", delayed(spent, "checkpoint", checkpoint.snapshot))
    monkeypatch.setattr(
        checkpoint.CheckpointWriter, "wait", delayed(spent, "checkpoint", checkpoint.CheckpointWriter.wait, by=0.0)
    )
    result = train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    summed = read_run(result.run).totals
    for phase, seconds in spent.items():
        assert seconds >= {"input_wait": 60, "eval": 3, "checkpoint": 3}[phase] * DELAYS[phase]
        assert summed.phases[phase] == pytest.approx(seconds, rel=0.05), phase

    windows = list(read_lines(result.run, STEPS, StepWindow))
    for window in windows:
        assert min(window.phases.values()) >= 0
        assert sum(window.phases.values()) == pytest.approx(window.wall_s, rel=1e-6)
    steady = [window for window in windows if window.window_steps]
    wall = sum(window.wall_s for window in steady)
    assert sum(window.phases.get("unattributed", 0.0) for window in steady) <= 0.03 * wall
    assert sum(window.window_steps for window in windows) == 60
    assert sum(window.num_images for window in windows) == 240


@pytest.mark.slow
@undisturbed_once
def test_a_slow_disk_does_not_delay_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One save in the middle takes a second to write; the training thread only waits for it at the next save."""
    data = draw(tmp_path / "data")
    spent: dict[str, float] = {}
    monkeypatch.setattr(checkpoint, "write_atomic", delayed(spent, "checkpoint", checkpoint.write_atomic))
    config = settings(data).replace(checkpoint_every="10", eval_every="0", max_duration="15")
    result = train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    middle = [w for w in read_lines(result.run, STEPS, StepWindow) if 10 <= w.step < 15]
    charged = sum(window.phases.get("checkpoint", 0.0) for window in middle)
    assert spent["checkpoint"] > 3 * DELAYS["checkpoint"]
    assert charged < DELAYS["checkpoint"]


@pytest.mark.slow
def test_slow_metrics_do_not_delay_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A score in the middle takes as long as five steps, whichever those are: the thread that trains waits for none."""
    data = draw(tmp_path / "data")
    gate = threading.Event()
    score, step = evaluator.compute_coco_result, loop.Training.step

    def after_five_steps(*args: Any) -> Any:
        gate.wait()
        return score(*args)

    def step_and_open(self: loop.Training) -> None:
        step(self)
        if self.state.step == 15:
            gate.set()

    monkeypatch.setattr(evaluator, "compute_coco_result", after_five_steps)
    monkeypatch.setattr(loop.Training, "step", step_and_open)
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    config = settings(data).replace(checkpoint_every="0", eval_every="10", max_duration="18")
    result = train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    (line,) = [
        event for event in read_lines(result.run, EVENTS, Event) if event.kind == "evaluated" and event.step == 10
    ]
    between = [w for w in read_lines(result.run, STEPS, StepWindow) if 10 < w.step <= 14]
    assert sum(window.window_steps for window in between) == 4
    assert all(window.t < line.t for window in between)
    assert sum(window.phases.get("eval", 0.0) for window in between) == 0


@pytest.mark.slow
@undisturbed_once
def test_known_delays_of_startup_compile_profiler_and_redone_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also those of a profiler, and of steps that a crash lost and that are done again."""
    data = draw(tmp_path / "data")
    spent: dict[str, float] = {}
    step, augment = loop.Training.step, parallel.SingleProcess.augment

    def dying(self: loop.Training) -> None:
        if self.state.step == 17:
            raise RuntimeError("dies here")
        if self.state.step == 5:
            self.tracer.request()
        step(self)

    class SlowProfile(trace.profile):
        def __enter__(self) -> Any:
            return delayed(spent, "idle", super().__enter__)()

        def __exit__(self, *args: Any) -> Any:
            return delayed(spent, "idle", super().__exit__)(*args)

    monkeypatch.setattr(trace, "profile", SlowProfile)
    monkeypatch.setattr(start, "build", delayed(spent, "startup", start.build))
    monkeypatch.setattr(parallel.SingleProcess, "rehearse", delayed(spent, "compile", lambda *_: None))
    make_loss_fn = parallel.make_loss_fn
    monkeypatch.setattr(parallel, "make_loss_fn", lambda model, **_: make_loss_fn(model, compile=False))
    monkeypatch.setattr(loop.Training, "step", dying)
    config = settings(data).replace(checkpoint_every="10", eval_every="0", max_duration="24", compile=True)
    with pytest.raises(RuntimeError, match="dies here"):
        train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    next_batch, slow_augment = Loader.__next__, delayed(spent, "recovery", augment)
    redone: dict[str, float] = {"step": 0.0, "input_wait": 0.0}

    def timed(key: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                redone[key] += time.perf_counter() - began

        return wrapper

    def step_again(self: loop.Training) -> None:
        """Measures the seven steps that the crash lost, and what they waited for images."""
        with pytest.MonkeyPatch.context() as patch:
            if self.state.step < 17:
                patch.setattr(parallel.SingleProcess, "augment", slow_augment)
                patch.setattr(Loader, "__next__", timed("input_wait", next_batch))
                timed("step", step)(self)
            else:
                step(self)

    monkeypatch.setattr(loop.Training, "step", step_again)
    result = train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    summed = read_run(result.run).totals
    assert summed.attempts == 2
    assert summed.phases["startup"] >= spent["startup"] >= 2 * DELAYS["startup"]
    for phase in ("compile", "idle"):
        assert spent[phase] >= 2 * DELAYS[phase]
        assert summed.phases[phase] == pytest.approx(spent[phase], rel=0.05), phase
    assert spent["recovery"] >= 7 * DELAYS["recovery"]
    assert summed.phases["recovery"] == pytest.approx(redone["step"] - redone["input_wait"], rel=0.05)
    assert summed.phases.get("unattributed", 0.0) <= 0.03 * summed.wall_s
    assert sum(summed.phases.values()) == pytest.approx(summed.device_s)


@pytest.mark.slow
def test_sigusr2_traces_the_next_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = draw(tmp_path / "data")
    step = loop.Training.step

    def signalled(self: loop.Training) -> None:
        step(self)
        if self.state.step == 8:
            os.kill(os.getpid(), signal.SIGUSR2)

    monkeypatch.setattr(loop.Training, "step", signalled)
    config = settings(data).replace(eval_every="0", checkpoint_every="0", max_duration="20")
    result = train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    assert result.steps == 20, "it goes on"
    (path,) = (result.run / TRACE_FILES).iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::convolution_backward" for event in events) > 5 * 10
    assert path.stat().st_size < 2**20
    assert not (result.run / TRACES).exists(), "a CPU has no kernels"
    assert any(TRACE_FILES in event.text for event in read_lines(result.run, EVENTS, Event))
