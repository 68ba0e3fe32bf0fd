"""A training of stoker's own is sampled: each of its parts, also the short ones, and its loader."""

import collections
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stoker.training.run
from stoker.training import checkpoint, evaluator, start
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.recording.own_stacks import TrainingStacks
from stoker_watch.report.explain import explain_run
from stoker_watch.runs.records import EVENTS, FINAL, STACKS, read_lines
from stoker_watch.runs.schemas import Event, StackWindow
from tests.drawn import draw
from tests.fixtures.training_ledger_of_a_run import settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "data")


class Sampled:
    """Lets the training thread wait for samples, so that a test needs no luck to have them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pid = 0

        def make(package: Path) -> TrainingStacks:
            stacks = TrainingStacks(package)
            self._pid = stacks.pid
            return stacks

        monkeypatch.setattr(stoker.training.run, "TrainingStacks", make)

    def _wakeups(self) -> int:
        """How often the sampling process ran: once for each sample, and once a second."""
        threads = Path(f"/proc/{self._pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[2]) for path in threads)

    def wait(self) -> None:
        wanted = self._wakeups() + 40
        while self._wakeups() < wanted:
            time.sleep(0.01)

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            return call(*args, **kwargs)

        return waiting


def read_windows(run: Path) -> list[StackWindow]:
    return list(read_lines(run, STACKS, StackWindow))


@pytest.mark.slow
def test_every_part_of_a_short_run_is_sampled(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes three samples, far less than a window; what runs there is this file's, called by stoker."""
    sampled = Sampled(monkeypatch)
    for module, name in ((evaluator, "detect"), (checkpoint, "snapshot"), (start, "report_preflight")):
        monkeypatch.setattr(module, name, sampled.before(getattr(module, name)))
    config = settings(data).replace(max_duration="6", eval_every="0", checkpoint_every="0")
    run = train(config, TrainOptions(run_dir=str(tmp_path / "run"))).run
    windows = read_windows(run)
    parts: collections.Counter[tuple[str, str]] = collections.Counter()
    for window in windows:
        for place in window.places:
            parts[window.role, place.part] += place.samples
            assert bool(place.line) == ("test_own_stacks" in place.line), "only lines of this file are the user's"
            assert place.line or not place.part or "(" in place.function
    for part in ("start", "evaluation", "checkpoint"):
        assert parts["training", part] >= 3, part
    assert parts["training", "training step"]
    assert parts["worker", "loader"]
    training = [window for window in windows if window.role == "training"]
    for before, after in itertools.pairwise(training):
        assert after.t - after.wall_s == pytest.approx(before.t, abs=0.5), "there is no gap"
    records = read_run(run)
    assert records.stacks.samples == 0, "the ledger has the phases"
    assert {"training", "worker"} == {role for role, _ in records.place_totals}
    explanation = explain_run(run)
    assert {tree.name.partition(",")[0] for tree in explanation.place_trees} == {
        "training thread",
        "each loader worker",
    }
    heavy = [finding for finding in explanation.findings if finding.id == "heavy_place"]
    assert all("test_own_stacks" in str(finding) for finding in heavy), "only what waits in this file is the user's"


@pytest.mark.slow
def test_threads_of_worker_processes_are_sampled(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = Sampled(monkeypatch)
    monkeypatch.setattr(evaluator, "detect", sampled.before(evaluator.detect))
    config = settings(data).replace(max_duration="6", eval_every="0", checkpoint_every="0", worker_processes=2)
    windows = read_windows(train(config, TrainOptions(run_dir=str(tmp_path / "run"))).run)
    places = [place for window in windows if window.role == "worker" for place in window.places]
    assert sum(place.samples for place in places) >= 3
    assert {place.part for place in places} == {"loader"}


@pytest.mark.slow
def test_samples_do_not_change_the_training(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(data).replace(max_duration="12", eval_every="6")
    sampled = train(config, TrainOptions(run_dir=str(tmp_path / "sampled"))).run
    monkeypatch.setattr(sys, "executable", "")
    without = train(config, TrainOptions(run_dir=str(tmp_path / "without"))).run
    assert read_windows(sampled)
    assert not (without / STACKS).exists()
    texts = [event.text for event in read_lines(without, EVENTS, Event)]
    assert "stacks: not recorded: this Python was started inside of another program" in texts
    assert (sampled / FINAL).read_bytes() == (without / FINAL).read_bytes()
