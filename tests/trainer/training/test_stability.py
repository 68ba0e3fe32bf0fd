"""Gradients that stay non-finite: rollback at a lower learning rate, the same after any kill. And the stability
alerts."""

import dataclasses
import math
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from stoker.data.batch import Batch
from stoker.data.index import open_index_of
from stoker.training import checkpoint, evaluator, recorder
from stoker.training.local_ranks import TrainOptions
from stoker.training.loss_sums import StepStats
from stoker.training.optim import OptimizerStep
from stoker.training.recorder import MIN_SPIKE_WINDOWS, SPIKE_RATIO, SPIKE_WINDOWS, StabilityAlerts, Suspects, is_spike
from stoker.training.run import train
from stoker.training.step import PlainStep
from stoker_watch.diagnosis.engine import diagnose
from stoker_watch.errors import DivergedError
from stoker_watch.runs.records import EVENTS, STEPS, RunFolder, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from tests.drawn import draw
from tests.fixtures.training_stability import LENGTH, RATE, Killed, events_of, killing, make_gradients_nan, settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


def diverges_at_the_full_lr(step: int, rate: float) -> bool:
    """Divergence that a third of the learning rate avoids."""
    return 20 <= step < 40 and rate > 0.8 * RATE


def diverges_above_a_ninth_of_the_lr(step: int, rate: float) -> bool:
    """It diverges again, before a checkpoint is saved."""
    return 20 <= step < 40 and rate > 0.2 * RATE


def assert_same_end(one: Path, two: Path) -> None:
    for name in ("final.safetensors", "best.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    ends = [events_of(run, "finished")[0].data["metrics"] for run in (one, two)]
    assert ends[0] == ends[1]


# --- going back ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rolled_back_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "WINDOW_S", 0.0)
        make_gradients_nan(patch, diverges_at_the_full_lr)
        return train(settings(data), TrainOptions(run_dir=str(tmp_path_factory.mktemp("runs") / "one"))).run


@pytest.mark.slow
def test_a_run_that_diverges_once_continues_at_a_third_of_the_learning_rate(rolled_back_run: Path):
    (rollback,) = events_of(rolled_back_run, "rolled_back")
    assert rollback.data["failed_at"] == 24, "the fifth step in a row, counted from 0"
    assert rollback.data["rollback_step"] == 18, "the checkpoint at 24 is of skipped steps"
    assert rollback.data["lr"] == pytest.approx(RATE / 3)
    windows = [window for window in read_lines(rolled_back_run, STEPS, StepWindow) if window.window_steps]
    rates = {window.step: window.lr for window in windows}
    assert rates[18] == pytest.approx(RATE)
    assert all(rates[step] == pytest.approx(RATE / 3) for step in range(19, LENGTH + 1))
    assert any("recovery" in window.phases for window in windows)
    last = list(read_lines(rolled_back_run, EVENTS, Event))[-1]
    assert (last.kind, last.step) == ("finished", LENGTH)
    (finding,) = [found for found in diagnose(rolled_back_run) if found.id == "unstable_training"]
    assert finding.command == "--lr 0.001"


@pytest.mark.slow
def test_detecting_divergence_late_changes_no_weight(rolled_back_run: Path, data: Path, tmp_path: Path):
    """A second behind: more steps, checkpoints of skipped steps and of steps after them are undone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "WINDOW_S", 0.0)
        make_gradients_nan(patch, diverges_at_the_full_lr)
        read = recorder.Recorder.read_stats

        def read_seldom(self: recorder.Recorder, *, wait: bool = False) -> None:
            if wait or self._setup.state.step % 35 == 0:
                read(self, wait=wait)

        patch.setattr(recorder.Recorder, "read_stats", read_seldom)
        late = train(settings(data), TrainOptions(run_dir=str(tmp_path / "late"))).run
    assert_same_end(rolled_back_run, late)


@pytest.mark.slow
def test_a_second_divergence_from_a_checkpoint_rolls_back_to_the_one_before(data: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    make_gradients_nan(monkeypatch, diverges_above_a_ninth_of_the_lr)
    run = train(settings(data), TrainOptions(run_dir=str(tmp_path / "run"))).run
    assert [event.data["rollback_step"] for event in events_of(run, "rolled_back")] == [18, 12]
    last = [window for window in read_lines(run, STEPS, StepWindow) if window.window_steps][-1]
    assert last.lr == pytest.approx(RATE / 9)


@pytest.mark.slow
def test_images_without_finite_gradients_end_the_run_and_are_named(data: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    make_gradients_nan(monkeypatch, lambda step, _: step >= 20)
    with pytest.raises(DivergedError) as caught:
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert caught.value.exit_code == 6
    text = str(caught.value)
    assert text.count("train-") == 4
    assert "also at a ninth of the learning rate" in text
    assert "step-00000018/weights.safetensors" in text, "healthy, and of the last try"
    assert [event.data["count"] for event in events_of(tmp_path / "run", "rolled_back")] == [1, 2]
    with pytest.raises(DivergedError):  # the same command again: its two tries are used up
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert len(events_of(tmp_path / "run", "rolled_back")) == 2


@pytest.mark.slow
def test_divergence_before_the_first_checkpoint_restarts_from_step_0(data: Path, tmp_path: Path, monkeypatch):
    """As a run that had a third of the rate from the beginning."""
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    changes: dict[str, Any] = {"checkpoint_every": "0", "eval_every": "0", "max_duration": "30"}
    third = train(settings(data, **changes, lr=RATE / 3), TrainOptions(run_dir=str(tmp_path / "third"))).run
    with monkeypatch.context() as patch:
        make_gradients_nan(patch, lambda step, rate: step >= 8 and rate > 0.8 * RATE)
        run = train(settings(data, **changes), TrainOptions(run_dir=str(tmp_path / "run"))).run
    assert [event.data["rollback_step"] for event in events_of(run, "rolled_back")] == [0]
    assert (run / "final.safetensors").read_bytes() == (third / "final.safetensors").read_bytes()


@pytest.mark.slow
def test_a_rollback_keeps_the_best_weights_and_resets_patience(data: Path, tmp_path: Path, monkeypatch):
    """The evaluation of step 21 is undone with its steps; its weights are in best.safetensors. Of the three before it,
    the checkpoint that training goes back to counts two against patience."""
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    scored, aps = evaluator.compute_coco_result, iter([0.3, 0.1, 0.1, 0.5, *[0.2] * 20])

    def score(*args: Any) -> Any:
        found = scored(*args)
        return dataclasses.replace(found, metrics=msgspec.structs.replace(found.metrics, ap=next(aps)))

    monkeypatch.setattr(evaluator, "compute_coco_result", score)
    make_gradients_nan(monkeypatch, lambda step, rate: step >= 22 and rate > 0.8 * RATE)
    run = train(settings(data, eval_every="6", checkpoint_every="19"), TrainOptions(run_dir=str(tmp_path / "run"))).run
    steps = [event.step for event in events_of(run, "evaluated")]
    assert steps[:5] == [6, 12, 18, 24, 24]
    assert events_of(run, "rolled_back")[0].data["best_ap"] == 0.5
    state = checkpoint.load_newest(run, lambda *_: None)
    assert state is not None
    assert state.state["best_ap"] == 0.5
    assert state.state["evals_since_best"] == len(steps[4:-1])  # the last is of the final weights, after the checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("moment", [
    "after the line", pytest.param("before the line", marks=pytest.mark.slow),
    pytest.param("in the streak", marks=pytest.mark.slow), pytest.param("on the lower rate", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rollback_that_is_killed_and_resumed_ends_with_the_same_weights(
    rolled_back_run: Path, data: Path, tmp_path: Path, moment: str
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "WINDOW_S", 0.0)
        make_gradients_nan(patch, diverges_at_the_full_lr)
        with patch.context() as kill:
            if moment == "in the streak":
                kill.setattr(OptimizerStep, "update", killing(OptimizerStep.update, 24))
            elif moment == "before the line":
                kill.setattr(checkpoint, "healthy_steps", killing(checkpoint.healthy_steps, 0))
            elif moment == "after the line":
                kill.setattr(checkpoint, "discard_checkpoints", killing(checkpoint.discard_checkpoints, 0))
            else:
                kill.setattr(OptimizerStep, "update", killing(OptimizerStep.update, 25 + 4))
            with pytest.raises(Killed):
                train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
        run = train(settings(data), TrainOptions(run_dir=str(tmp_path / "run"))).run
    (rollback,) = events_of(run, "rolled_back")
    assert rollback.data["failed_at"] == 24, "skipped steps before the kill count too"
    assert_same_end(rolled_back_run, run)


SCRIPT = """
import os, random, signal, sys, threading, time
from pathlib import Path
import pytest
from stoker.training.recorder import MIN_SPIKE_WINDOWS, SPIKE_RATIO, SPIKE_WINDOWS, StabilityAlerts, is_spike
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from tests.trainer.training import test_stability as tests
with pytest.MonkeyPatch.context() as patch:
    tests.make_gradients_nan(patch, tests.diverges_above_a_ninth_of_the_lr)
    if sys.argv[3] != "never":
        def kill():
            run = Path(sys.argv[2])
            while not list(run.glob("checkpoints/step-*")): time.sleep(0.001)
            time.sleep(float(sys.argv[3]))
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=kill, daemon=True).start()
    train(tests.settings(Path(sys.argv[1])), TrainOptions(run_dir=sys.argv[2]))
"""


def run_script(data: Path, run: Path, after_s: float | None) -> int:
    """Trains in a process of its own, which kills itself some time after there is a checkpoint."""
    arguments = [sys.executable, "-c", SCRIPT, str(data), str(run), "never" if after_s is None else str(after_s)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=root, timeout=240, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))  # `make soak` draws more
def test_sigkill_at_random_moments_around_rollbacks(data: Path, tmp_path: Path, seed: int):
    """As the slow test of `test_resume.py`, with two rollbacks in between."""
    rng = random.Random(seed)
    assert run_script(data, tmp_path / "whole", None) == 0
    kills = sum(run_script(data, tmp_path / "killed", rng.uniform(0, 2.0)) != 0 for _ in range(4) if not
                events_of(tmp_path / "killed", "finished"))  # fmt: skip
    assert kills
    if not events_of(tmp_path / "killed", "finished"):
        assert run_script(data, tmp_path / "killed", None) == 0
    assert [event.data["rollback_step"] for event in events_of(tmp_path / "killed", "rolled_back")] == [18, 12]
    assert_same_end(tmp_path / "whole", tmp_path / "killed")


# --- alerts ----------------------------------------------------------------------------------------------------------


def alerts_of(losses: list[float], *, skipped: int = 0, tolerated_skips: int = 0) -> list[Event]:
    """The alerts of windows of ten steps with these losses."""
    found: list[Event] = []

    def log_event(kind: str, text: str, /, **data: Any) -> None:
        found.append(Event(t=0.0, attempt=1, kind=kind, text=text, data=data))

    alerts = StabilityAlerts(log_event, 0.01)
    for n, loss in enumerate(losses, start=1):
        window = StepWindow(
            t=0.0, attempt=1, step=10 * n, window_steps=10, num_images=10, wall_s=1.0, devices=1, phases={},
            losses={"total": loss}, lr=0.01, grad_norm=2.0, skipped_steps=skipped,
        )  # fmt: skip
        alerts.check(window, tolerated_skips=tolerated_skips)
    return found


positive = st.floats(1e-3, 1e3)
before = st.lists(positive, min_size=MIN_SPIKE_WINDOWS, max_size=SPIKE_WINDOWS)


@given(before, positive, st.sampled_from([2.0**-20, 0.5, 2.0**20]), st.randoms(use_true_random=False))
def test_spikes_do_not_depend_on_the_unit_or_order_of_losses(
    before: list[float], loss: float, unit: float, rng: random.Random
):
    shuffled = rng.sample(before, len(before))
    # A hair apart from the threshold, where rounding may decide.
    assert is_spike(loss * 1.0001, before) >= is_spike(loss * unit, [value * unit for value in shuffled])
    assert is_spike(loss * unit * 1.0001, [value * unit for value in before]) >= is_spike(loss, before)


@given(before, positive, st.floats(1, 1e3))
def test_spikes_are_monotonic_and_the_median_is_none(before: list[float], loss: float, more: float):
    assert is_spike(loss * more, before) >= is_spike(loss, before)
    assert not is_spike(sorted(before)[len(before) // 2] * SPIKE_RATIO * 0.99, before)


@pytest.mark.slow
def test_a_noisy_falling_loss_hardly_ever_raises_an_alert():
    """From single steps of small batches (half its size) to windows of hundreds of steps: at most 1 run of 100."""
    choose = random.Random(0)
    alarming = []
    for seed in range(200):
        noise, fall = choose.uniform(0.0, 0.5), choose.uniform(0.5, 3.0)
        rng = random.Random(seed)
        losses = [(1 + 2 * math.exp(-fall * 8 * n / 300)) * rng.lognormvariate(0, noise) for n in range(300)]
        if alerts_of(losses):
            alarming.append((seed, noise, fall))
    assert len(alarming) <= 2, alarming


@given(st.integers(0, 10**6), st.floats(0.02, 0.3), st.integers(MIN_SPIKE_WINDOWS, 90))
@example_settings(max_examples=40)
def test_one_spike_is_one_alert_with_its_numbers(seed: int, noise: float, at: int):
    rng = random.Random(seed)
    losses = [2 * rng.lognormvariate(0, noise) for _ in range(100)]
    for n in range(at, min(at + 5, 100)):
        losses[n] = 200.0
    (alarm,) = [one for one in alerts_of(losses) if one.kind == "loss_spike"]
    assert (alarm.data["at"], alarm.data["loss"], alarm.data["suggested_lr"]) == (10 * (at + 1), 200.0, 0.0033)
    assert alarm.data["baseline"] == pytest.approx(2, rel=1.5 * noise + 0.01)
    assert "--lr 0.0033" in alarm.text


@pytest.mark.parametrize(
    ("norms", "clip", "named", "limit"),
    [
        ([1.0, 90.0, 1.2], 0.0, "b", 4.0),  # the gradients of windows before: 2.0
        ([1.0, 90.0, 1.2], 3.0, "b", None),  # clipped already
        ([40.0, 40.0, 40.0], 0.0, None, 4.0),  # all of them
        ([1.1, 1.2, 0.9], 0.0, None, None),
    ],
)
def test_a_spike_names_images_layer_and_setting(
    norms: list[float], clip: float, named: str | None, limit: float | None
):
    found: list[tuple[str, dict[str, Any]]] = []
    suspects = Suspects(["a", "b", "c"], lambda step: f"the images of {step}", clip)
    alerts = StabilityAlerts(lambda _kind, text, /, **data: found.append((text, data)), 0.01, suspects)
    for n in range(30):
        loss = 9.0 if n == 29 else 1.0 + 0.01 * (n % 3)
        window = StepWindow(
            t=0.0, attempt=1, step=10 * n, window_steps=10, num_images=10, wall_s=1.0, devices=1, phases={},
            losses={"total": loss}, lr=0.01, grad_norm=2.0, skipped_steps=0,
        )  # fmt: skip
        stats = StepStats(window.losses, 2.0, 0, None, 10 * n - 3, norms if n == 29 else [1.0] * 3, [1.0] * 3)
        alerts.check(window, stats, tolerated_skips=0)
    ((text, data),) = found
    assert (data["worst_step"], data["images"]) == (288, "the images of 287")
    assert "in step 288 with the images the images of 287" in text
    assert (data.get("parameter"), data.get("suggested_clip_grad_norm")) == (named, limit)
    assert ("the gradient of b was 90 times its mean" in text) == (named is not None)
    assert text.endswith("--lr 0.0033" + (f" or --clip-grad-norm {limit:g}" if limit else ""))


@pytest.mark.parametrize(("ratio", "named"), [(0.0423, "b"), (0.029, None)])
def test_a_spike_names_a_weight_that_a_step_changes_much(ratio: float, named: str | None):
    found: list[tuple[str, dict[str, Any]]] = []
    suspects = Suspects(["a", "b"], str, 0.0, lambda: {"a": 0.001, "b": ratio})
    alerts = StabilityAlerts(lambda _kind, text, /, **data: found.append((text, data)), 0.01, suspects)
    for n in range(30):
        loss = 9.0 if n == 29 else 1.0
        window = StepWindow(
            t=0.0, attempt=1, step=n, window_steps=1, num_images=1, wall_s=1.0, devices=1, phases={},
            losses={"total": loss}, lr=0.01, grad_norm=1.0, skipped_steps=0,
        )  # fmt: skip
        stats = StepStats(window.losses, 1.0, 0, None, n, [1.0, 1.0], [1.0, 1.0])
        alerts.check(window, stats, tolerated_skips=0)
    ((text, data),) = found
    assert data.get("fastest_parameter") == named
    assert ("a step changes b by 4.2%" in text) == (named is not None)


@pytest.mark.slow
def test_a_spike_of_a_training_names_what_caused_it(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[int]] = []
    named: list[str] = []
    forward_backward = PlainStep.forward_backward

    def poisoned(self: PlainStep, batch: Batch) -> dict[str, torch.Tensor]:
        losses = forward_backward(self, batch)
        seen.append(batch.image_index.tolist())
        if len(seen) != 41:
            return losses
        kernels = [row for row in self.optimizer.model.named_parameters() if row[1].dim() > 1]
        name, weight = [row for row in kernels if row[1].grad is not None][10]
        weight.grad *= 1e4
        named.append(name)
        return {name: 100 * loss for name, loss in losses.items()}

    monkeypatch.setattr(PlainStep, "forward_backward", poisoned)
    run = trained(
        data, tmp_path / "run", monkeypatch, max_duration="60", auto_batch=False, clip_grad_norm=0.0, optimizer="sgd"
    )
    (spike,) = events_of(run, "loss_spike")
    first = len(seen) - 60
    index = open_index_of(settings(data).data)
    assert spike.data["worst_step"] == 41 - first
    assert spike.data["images"].split(", ") == [index.display_source(n) for n in seen[40]]
    assert [spike.data["parameter"]] == named
    assert [spike.data["fastest_parameter"]] == named
    assert spike.data["update_ratio"] > 0.3


def test_skipped_steps_are_said_when_they_have_doubled():
    found = alerts_of([3 - n / 200 for n in range(400)], skipped=2)
    said = [one.data["skipped"] for one in found if one.kind == "warning"]
    assert said == [2 * 2**n for n in range(len(said))]
    assert len(said) == 9
    assert alerts_of([1.0] * 4, skipped=1, tolerated_skips=1) == []


def trained(data: Path, run: Path, patch: pytest.MonkeyPatch, **changes: object) -> Path:
    """A run of 90 steps that has a window for each."""
    patch.setattr(recorder, "WINDOW_S", 0.0)
    usual: dict[str, object] = {
        "max_duration": "90",
        "eval_every": "0",
        "checkpoint_every": "0",
        "lr_scheduler": "cosine",
    }
    return train(settings(data, **(usual | changes)), TrainOptions(run_dir=str(run))).run


@pytest.mark.parametrize(("rate", "kinds"), [(RATE, set()), pytest.param(1e-8, {"lr_too_low"}, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_real_trainings_have_no_alerts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, kinds: set[str]
):
    run = trained(data, tmp_path / "run", monkeypatch, lr=rate, warmup_steps=8)
    news = {"rolled_back", "loss_spike", "warning"}
    assert {event.kind for event in read_lines(run, EVENTS, Event)} & news == set()
    assert {found.command for found in diagnose(run) if found.id in kinds} == ({"--lr 1e-07"} if kinds else set())


@pytest.mark.slow
def test_rollbacks_are_counted_where_their_events_cannot_be_written(data: Path, tmp_path: Path, monkeypatch):
    """On a full disk the event is lost: the rate is lowered all the same, and the run ends after two rollbacks."""
    event = RunFolder.event

    def lost(self: RunFolder, kind: str, *arguments: Any, **named: Any) -> None:
        if kind != "rolled_back":
            event(self, kind, *arguments, **named)

    rates: list[float] = []
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    monkeypatch.setattr(RunFolder, "event", lost)
    make_gradients_nan(monkeypatch, lambda step, rate: (rates.append(rate), step >= 20)[1])
    with pytest.raises(DivergedError, match="also at a ninth of the learning rate"):
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert min(rates[-5:]) == pytest.approx(RATE / 9)
