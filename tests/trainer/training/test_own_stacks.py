"""A training of stoker's own is sampled: each of its parts, also the short ones, and its loader."""

import collections
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.training import checkpoint, evaluator, loop, start
from stoker.training.own_stacks import OwnStacks, _as_frames
from stoker.training.run import train
from stoker_watch.cli import app
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.recording.frames import find_part, is_job_code
from stoker_watch.report.explain import explain_run
from stoker_watch.runs import records
from stoker_watch.runs.records import FINAL, STACKS, read_lines
from stoker_watch.runs.schemas import StackWindow
from tests.drawn import draw
from tests.fixtures.training_ledger_of_a_run import settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "data")


class Sampled:
    """Lets the training thread wait for samples, so that a test needs no luck to have them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._counts: collections.Counter[str] = collections.Counter()
        sample = OwnStacks._sample

        def counted(stacks: OwnStacks, count: int) -> None:
            sample(stacks, count)
            with self._changed:
                self._counts.update(stacks._counts.keys())
                self._changed.notify_all()

        monkeypatch.setattr(OwnStacks, "_sample", counted)

    def wait(self, role: str = "training", count: int = 3) -> None:
        with self._changed:
            wanted = self._counts[role] + count
            assert self._changed.wait_for(lambda: self._counts[role] >= wanted, timeout=60)

    def before(self, call: Callable[..., Any], role: str = "training") -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            self.wait(role)
            return call(*args, **kwargs)

        return waiting


def read_windows(run: Path) -> list[StackWindow]:
    return list(read_lines(run, STACKS, StackWindow))


def test_frames_of_both_packages_are_no_code_of_the_job() -> None:
    stack = (
        ("RunFolder.append", records.__file__, 9),
        ("Training.run_steps", loop.__file__, 5),
        ("main", app.__file__, 1),
    )
    frames = _as_frames(stack)
    assert [frame.function for frame in frames] == ["RunFolder.append", "Training.run_steps"]
    assert not any(is_job_code(frame) for frame in frames)
    assert find_part(frames) == "records"


@pytest.mark.slow
def test_every_part_of_a_short_run_is_sampled(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes three samples, far less than a window; what runs there is this file's, called by stoker."""
    sampled = Sampled(monkeypatch)
    for module, name in ((evaluator, "detect"), (checkpoint, "snapshot"), (start, "report_preflight")):
        monkeypatch.setattr(module, name, sampled.before(getattr(module, name)))
    config = settings(data).replace(max_duration="6", eval_every="0", checkpoint_every="0")
    run = train(config, run_dir=str(tmp_path / "run")).run
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
    assert "heavy_place" not in {finding.id for finding in explanation.findings}


@pytest.mark.slow
def test_threads_of_worker_processes_are_sampled(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = Sampled(monkeypatch)
    monkeypatch.setattr(evaluator, "detect", sampled.before(evaluator.detect, "worker"))
    config = settings(data).replace(max_duration="6", eval_every="0", checkpoint_every="0", worker_processes=2)
    windows = read_windows(train(config, run_dir=str(tmp_path / "run")).run)
    places = [place for window in windows if window.role == "worker" for place in window.places]
    assert sum(place.samples for place in places) >= 3
    assert {place.part for place in places} == {"loader"}


@pytest.mark.slow
def test_samples_do_not_change_the_training(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(data).replace(max_duration="12", eval_every="6")
    sampled = train(config, run_dir=str(tmp_path / "sampled")).run
    monkeypatch.setattr(OwnStacks, "start", lambda _: None)
    monkeypatch.setattr(OwnStacks, "stop", lambda _: None)
    without = train(config, run_dir=str(tmp_path / "without")).run
    assert read_windows(sampled)
    assert not (without / STACKS).exists()
    assert (sampled / FINAL).read_bytes() == (without / FINAL).read_bytes()


def test_the_rate_follows_the_cost_of_the_own_thread() -> None:
    stacks = OwnStacks()
    rates = []
    for cost in (0.005, 0.03, 0.03, 0.03, 0.0004, 1.0):  # of a core, at the rate before
        stacks._follow_cost(cost)
        rates.append(stacks.rate_hz)
    assert rates == pytest.approx([10, 10 / 3, 10 / 9, 1, 10, 1])


def test_a_sample_counts_for_the_times_at_which_none_could_be_taken() -> None:
    stacks = OwnStacks()
    stacks._sample(1)
    stacks._sample(7)
    assert sum(stacks._counts["training"].values()) == 8
    (stack, *_) = stacks._counts["training"]
    assert any(function.endswith("test_a_sample_counts_for_the_times_at_which_none_could_be_taken")
               for function, _, _ in stack)  # fmt: skip
