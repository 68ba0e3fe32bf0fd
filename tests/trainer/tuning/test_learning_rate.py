"""`stoker tune --lr`: the ramp of a trial process, and the search with trainings that compute nothing."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.config.settings import Config, from_toml
from stoker.data.index import open_index_of
from stoker.hardware.selection import select_device
from stoker.training.start import resolve_run
from stoker.training.trial import Request, Trial
from stoker.tuning import learning_rate
from stoker.tuning.learning_rate import LrResult, tune_lr
from stoker.tuning.runner import TuneRequest
from stoker.tuning.trials import TrialError
from stoker_watch.errors import UsageError
from stoker_watch.runs.records import PROBES, STEPS, RunFolder, read_lines
from stoker_watch.runs.schemas import Probe, StepWindow

FAKE = (sys.executable, str(Path(__file__).with_name("fake_lr_trial.py")))
SMALL = Config().replace(batch_size=4, workers=1, worker_processes=0, image_size=(64, 64), max_duration="2000")


@pytest.mark.slow
def test_a_ramp_is_undone_to_the_bit() -> None:
    config = resolve_run(SMALL.replace(data="demo"), None).config
    trial = Trial(config, open_index_of(config.data), select_device("cpu"), 16)
    try:
        first = trial.answer(Request(do="ramp", lr=1e-3)).losses
        assert trial._before_ramp is not None
        before = trial._before_ramp
        ramp = first + [trial.answer(Request(do="ramp", lr=lr)).losses[0] for lr in (1e-2, 1e-1)]
        assert trial.loader.state_dict() != before["loader"]
        trial.answer(Request(do="restore"))
        after = trial._state()
        assert after["loader"] == before["loader"]
        assert torch.equal(after["generator"], before["generator"])
        for one, two in ((after["ema"], before["ema"]), (after["optimizer"]["model"], before["optimizer"]["model"])):
            assert all(torch.equal(one[name], two[name]) for name in two)
        moments = before["optimizer"]["optimizer"]["state"]
        for number, state in after["optimizer"]["optimizer"]["state"].items():
            assert all(torch.equal(state[name], moments[number][name]) for name in state)
        again = [trial.answer(Request(do="ramp", lr=lr)).losses[0] for lr in (1e-3, 1e-2, 1e-1)]
        assert again == ramp
    finally:
        trial.loader.close()


def test_groups_keep_the_ratio_of_their_rates_in_a_ramp() -> None:
    config = resolve_run(SMALL.replace(data="demo", backbone_lr_mult=0.1), None).config
    trial = Trial(config, open_index_of(config.data), select_device("cpu"), 16)
    try:
        ratios = set()
        for lr in (1e-4, 1e-3):
            trial.answer(Request(do="ramp", lr=lr))
            rates = [group["lr"] / lr for group in trial.optimizer._optimizer.param_groups]
            ratios.add(tuple(round(rate, 9) for rate in rates))
        assert len(ratios) == 1
        assert set(*ratios) == {0.1, 1.0}
    finally:
        trial.loader.close()


class Trainings:
    """Stands for `train_briefly`: the AP is highest at `best`; above 0.05 it diverges."""

    def __init__(self, best: float) -> None:
        self.best, self.done = best, list[tuple[float, int]]()
        self.fail_at = -1

    def __call__(self, settings: dict[str, Any], steps: int, run: Path, _devices: int = 1) -> float:
        if len(self.done) == self.fail_at:
            raise KeyboardInterrupt
        self.done.append((settings["lr"], steps))
        run.mkdir(exist_ok=True)
        folder = RunFolder(run, 1)
        ap = 0.5 / (1 + abs(math.log10(settings["lr"] / self.best)))
        if settings["lr"] > 0.05:
            folder.event("rolled_back", "", lr=settings["lr"] / 3)
            folder.close()
            raise TrialError("exit code 6")
        folder.append(STEPS, StepWindow(
            t=1.0, attempt=1, step=steps, window_steps=steps, num_images=1, wall_s=1.0, devices=1, phases={},
            losses={"total": 1.0},
        ))  # fmt: skip
        folder.event("finished", "", metrics={"ap": ap, "ap50": ap})
        folder.close()
        return ap


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Trainings:
    made = Trainings(3e-5)
    monkeypatch.setattr(learning_rate, "train_briefly", made)
    return made


@pytest.fixture
def request_(tmp_path: Path) -> TuneRequest:
    return TuneRequest(target="demo", config=SMALL, out=tmp_path / "tune", command=FAKE)


def search(request: TuneRequest) -> LrResult:
    return tune_lr(request, lambda _: None)


@pytest.mark.usefixtures("trainings")
def test_the_validation_split_decides_and_not_the_range_test(request_: TuneRequest) -> None:
    result = search(request_)
    assert result.lr == pytest.approx(3e-5, rel=0.6)  # the range test places the grid three decades higher
    assert "range test alone suggests" in result.reason
    config, reasons = from_toml(Path(result.config))
    assert config.optim.lr == result.lr
    assert reasons["lr"] == result.reason
    ratio = {row["batch_size"]: row for row in result.advice}
    assert ratio[8]["lr_linear"] == pytest.approx(2 * result.lr)
    assert ratio[8]["lr_square_root"] == pytest.approx(math.sqrt(2) * result.lr)


def test_a_training_that_diverges_has_no_score(trainings: Trainings, request_: TuneRequest) -> None:
    trainings.best = 1.0
    result = search(request_)
    assert result.lr < 0.05
    assert any(trial.reason == "diverged" and not trial.scores for trial in result.trials if trial.probe == "lr")


def test_a_killed_search_continues(trainings: Trainings, request_: TuneRequest) -> None:
    trainings.fail_at = 5
    with pytest.raises(KeyboardInterrupt):
        search(request_)
    trainings.fail_at = -1
    result = search(request_)
    assert len(set(trainings.done)) == len(trainings.done), "no training is done twice"
    assert request_.out is not None
    lines = list(read_lines(request_.out, PROBES, Probe))
    assert sum(line.probe == "range_test" and line.state == "passed" for line in lines) == 1
    assert search(request_).lr == result.lr


def test_named_errors_before_anything_is_trained(trainings: Trainings, request_: TuneRequest) -> None:

    with pytest.raises(UsageError, match="--lr finds"):
        search(dataclasses.replace(request_, levers=("workers",)))
    with pytest.raises(UsageError, match="too short for a range test"):
        search(dataclasses.replace(request_, budget_s=10.0))
    with pytest.raises(UsageError, match="too short for the trainings") as caught:
        search(dataclasses.replace(request_, budget_s=100.0))
    assert "min" in str(caught.value.fix)
    assert not trainings.done
    (lone,) = [trial for trial in search(request_).trials if trial.probe == "range_test"]
    assert lone.reason.startswith("diverged at")
