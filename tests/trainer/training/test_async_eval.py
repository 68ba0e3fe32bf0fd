"""Metrics that come late, early, or not at all: the run decides and writes the same."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.config.settings import Config, from_fields
from stoker.training import evaluator, loop, recorder
from stoker.training.evaluator import Evaluator
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker_watch.errors import Preempted
from stoker_watch.runs.records import (
    BEST,
    CHECKPOINTS,
    EVALUATION,
    EVENTS,
    FINAL,
    read_lines,
)
from stoker_watch.runs.schemas import Event
from tests.drawn import draw
from tests.fixtures.training_run import patch_ap
from tests.fixtures.training_stability import RATE, make_gradients_nan


def settings(data: Path, **changes: object) -> Config:
    usual: dict[str, object] = {
        "data": str(data), "model": "retinanet_tiny_fpn", "image_size": (64, 64), "batch_size": 4, "max_duration": "16",
        "precision": "fp32", "eval_every": "6", "checkpoint_every": "4", "workers": 2,
    }  # fmt: skip
    return from_fields(usual | changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(settings(data), TrainOptions(run_dir=str(tmp_path_factory.mktemp("runs") / "whole"))).run


class Gate:
    """Blocks the computation of metrics until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        score = evaluator.compute_coco_result

        def held(*arguments: Any) -> Any:
            self.opened.wait()
            return score(*arguments)

        patch.setattr(evaluator, "compute_coco_result", held)


def after_step(patch: pytest.MonkeyPatch, at: int, act: Callable[[loop.Training], None]) -> None:
    step = loop.Training.step

    def step_and_act(self: loop.Training) -> None:
        step(self)
        if self.state.step == at:
            act(self)

    patch.setattr(loop.Training, "step", step_and_act)


def make_metrics_late(patch: pytest.MonkeyPatch) -> None:
    """Metrics are computed when the training thread waits for them."""
    asked = threading.Event()
    score, collect = evaluator.compute_coco_result, Evaluator.collect

    def held(*arguments: Any) -> Any:
        asked.wait()
        asked.clear()
        return score(*arguments)

    def ask(self: Evaluator) -> None:
        if self._task is not None:
            asked.set()
        collect(self)

    patch.setattr(evaluator, "compute_coco_result", held)
    patch.setattr(Evaluator, "collect", ask)


def make_metrics_early(patch: pytest.MonkeyPatch) -> None:
    """Metrics are complete before the training thread does anything else."""
    start = Evaluator.start

    def start_and_wait(self: Evaluator, *arguments: Any) -> None:
        start(self, *arguments)
        assert self._task is not None
        wait([self._task.metrics])

    patch.setattr(Evaluator, "start", start_and_wait)


def evaluation_state(run: Path) -> dict[str, dict[str, Any]]:
    """The state of evaluations in the checkpoints of a run."""
    names = ("best_ap", "evals_since_best", "evaluated_step", "pending_eval")
    states = {
        path.parent.name: torch.load(path, weights_only=True) for path in run.glob(f"{CHECKPOINTS}/step-*/state.pt")
    }
    return {step: {name: state[name] for name in names} for step, state in states.items()}


def scores(run: Path) -> dict[int | None, Any]:
    return {e.step: e.data["metrics"] for e in read_lines(run, EVENTS, Event) if e.kind == "evaluated"}


def assert_same(one: Path, two: Path) -> None:
    for name in (BEST, FINAL):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert (one / EVALUATION).read_text() == (two / EVALUATION).read_text()
    assert scores(one) == scores(two)
    assert evaluation_state(one) == evaluation_state(two)


@pytest.mark.slow
@pytest.mark.parametrize(("patience", "steps"), [pytest.param(0, 16, marks=pytest.mark.slow), (2, 9)])
def test_late_and_early_metrics_give_the_same_run(data: Path, tmp_path: Path, patience: int, steps: int):
    """The first evaluation, at step 3, is the best; at 9 patience ends the run, with the second one after it."""
    ends = []
    for name, when in (("late", make_metrics_late), ("early", make_metrics_early)):
        with pytest.MonkeyPatch.context() as patch:
            patch_ap(patch, 0.2)
            when(patch)
            config = settings(
                data, eval_every="3", checkpoint_every="6", patience=patience, lr=1e-9, warmup_steps=0, ema_decay=0.0
            )
            ends.append(train(config, TrainOptions(run_dir=str(tmp_path / name))))
    assert [end.steps for end in ends] == [steps, steps]
    assert_same(ends[0].run, ends[1].run)


@pytest.mark.slow
def test_training_continues_while_metrics_are_computed(undisturbed: Path, data: Path, tmp_path: Path):
    """The metrics of step 6 come after step 7; the checkpoint of step 8 waits for them."""
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        seen: list[int] = []

        def record_and_open(_: loop.Training) -> None:
            seen.extend(e.step or 0 for e in read_lines(tmp_path / "run", EVENTS, Event) if e.kind == "evaluated")
            gate.opened.set()

        after_step(patch, 7, record_and_open)
        run = train(settings(data), TrainOptions(run_dir=str(tmp_path / "run"))).run
    assert seen == []
    assert_same(undisturbed, run)
    order = [(e.kind, e.step) for e in read_lines(run, EVENTS, Event) if e.kind in ("evaluated", "checkpoint_saved")]
    assert order.index(("evaluated", 6)) < [text for text, _ in order].index("checkpoint_saved", 1)


@pytest.mark.slow
def test_a_signal_saves_a_pending_evaluation_and_the_resumed_run_computes_it(
    undisturbed: Path, data: Path, tmp_path: Path
):
    """The metrics never come; the resumed run computes them from the checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        after_step(patch, 7, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted, match="at step 7"):
            train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    gate.opened.set()  # the canceled task must not write anything
    join_scorer_threads()
    assert scores(tmp_path / "run") == {}
    assert not (tmp_path / "run" / BEST).exists()
    assert evaluation_state(tmp_path / "run")["step-00000007"]["pending_eval"]["step"] == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "detect", only_steps_12_and_16(evaluator.detect))
        run = train(settings(data), TrainOptions(run_dir=str(tmp_path / "run"))).run
    assert_same(undisturbed, run)


@pytest.mark.slow
def test_a_rollback_does_not_count_a_pending_evaluation_twice(data: Path, tmp_path: Path):
    """Back to the checkpoint of a signal with the best evaluation: counted twice, patience 1 would end the run."""
    config = settings(
        data, patience=1, checkpoint_every="0", lr=RATE, warmup_steps=0, max_skipped_steps=3, lr_scheduler="constant"
    )
    with pytest.MonkeyPatch.context() as patch:
        Gate(patch)
        patch.setattr(Evaluator, "collect", lambda _: None)  # patience 1 waits for every score
        after_step(patch, 7, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted, match="at step 7"):
            train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    with pytest.MonkeyPatch.context() as patch:
        patch_ap(patch, 0.2)
        make_gradients_nan(patch, lambda step, rate: step >= 8 and rate > 0.8 * RATE)
        patch.setattr(recorder, "WINDOW_S", 0.0)
        run = train(config, TrainOptions(run_dir=str(tmp_path / "run"))).run
    events = [(e.kind, e.step) for e in read_lines(run, EVENTS, Event) if e.kind in ("evaluated", "rolled_back")]
    assert events[:2] == [("evaluated", 6), ("rolled_back", 11)]
    assert ("evaluated", 6) not in events[2:]
    assert ("evaluated", 12) in events


def join_scorer_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "stoker-scorer":
            thread.join()


def only_steps_12_and_16(detect: Callable[..., Any]) -> Callable[..., Any]:
    """`detect` for the evaluations of steps 12 and 16: that of step 6 is not done again."""
    left = [12, 16]

    def counted(*arguments: Any, **named: Any) -> Any:
        left.pop()
        return detect(*arguments, **named)

    return counted


@pytest.mark.slow
def test_a_signal_while_the_final_metrics_are_awaited(undisturbed: Path, data: Path, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        Gate(patch)
        collect = Evaluator.collect

        def stopped(self: Evaluator) -> None:
            if self._task is not None and self._task.pending.step == 16:
                os.kill(os.getpid(), signal.SIGTERM)
            collect(self)

        patch.setattr(Evaluator, "collect", stopped)
        with pytest.raises(Preempted, match="at step 16"):
            train(settings(data, eval_every="0"), TrainOptions(run_dir=str(tmp_path / "run")))
    result = train(settings(data, eval_every="0"), TrainOptions(run_dir=str(tmp_path / "run")))
    assert (result.run / FINAL).read_bytes() == (undisturbed / FINAL).read_bytes()
    assert list(scores(result.run)) == [16]


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from stoker.training import evaluator as scoring, loop
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from tests.trainer.training.test_async_eval import settings

scoring.compute_coco_result = lambda *_: threading.Event().wait()
step = loop.Training.step

def step_and_die(self):
    step(self)
    if self.state.step == 7:
        os.kill(os.getpid(), signal.SIGKILL)

loop.Training.step = step_and_die
train(settings(Path(sys.argv[1])), TrainOptions(run_dir=sys.argv[2]))
"""


@pytest.mark.slow
def test_a_kill_between_an_evaluation_and_its_metrics(undisturbed: Path, data: Path, tmp_path: Path):
    """The run continues from the checkpoint of step 4, before the evaluation of step 6, which is made again."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(data), str(tmp_path / "run")], cwd=Path(__file__).parents[3]
    )
    assert done.returncode == -signal.SIGKILL
    assert list(evaluation_state(tmp_path / "run")) == ["step-00000004"]
    assert scores(tmp_path / "run") == {}
    assert_same(undisturbed, train(settings(data), TrainOptions(run_dir=str(tmp_path / "run"))).run)


def test_an_error_in_computing_metrics_ends_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise ArithmeticError("no metrics today")

    monkeypatch.setattr(evaluator, "compute_coco_result", fail)
    with pytest.raises(ArithmeticError, match="no metrics today"):
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    last = list(read_lines(tmp_path / "run", EVENTS, Event))[-1]
    assert (last.kind, last.step) == ("failed", 8), "the checkpoint of step 8 waits for the metrics of step 6"
