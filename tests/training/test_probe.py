"""Experiments: with known speeds, on a real run, and on runs that cannot be probed."""

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.data.images import decode
from stoker.errors import UsageError
from stoker.profiling.ledger import Ledger
from stoker.report.explain import describe_probe, run_probes
from stoker.runs.records import EVENTS, PROBES, RunFolder, locked, read_lines
from stoker.runs.schemas import PROBE_KINDS, Event, Probe, StepWindow
from stoker.training import input_probe
from stoker.training.input_probe import PrefetchedInputProbe, summarize_pairs
from stoker.training.ranks import Ranks
from stoker.training.state import TrainState
from tests.drawn import draw
from tests.timing import undisturbed_once

speeds = st.floats(1e-4, 10)


@given(st.lists(st.tuples(speeds, speeds), min_size=1, max_size=9))
def test_the_ratio_lies_in_its_interval(pairs: list[tuple[float, float]]) -> None:
    found = summarize_pairs("cached_batch", pairs, steps=8, attempt=1)
    assert found.ratio_low <= found.ratio <= found.ratio_high
    assert min(a / b for a, b in pairs) <= found.ratio_low
    faster = summarize_pairs("cached_batch", [(a, b / 2) for a, b in pairs], steps=8, attempt=1)
    assert faster.ratio == pytest.approx(2 * found.ratio)
    assert faster.after_img_per_s == pytest.approx(2 * found.after_img_per_s)


@dataclasses.dataclass
class Machine:
    """A training on a clock of its own: a step takes a second, and a batch that is not ready three more."""

    now_s: float = 0.0
    ready: int = 0
    depth: int = 4
    paused_s: float = 0.0

    def train(
        self, path: Path, steps: int, *, total: int, wait_s: float, evaluate_every: int = 0
    ) -> PrefetchedInputProbe:
        folder = RunFolder(path, attempt=1)
        path.mkdir(exist_ok=True)
        stats = lambda: SimpleNamespace(prefetch_depth=self.depth, ready=8 * self.ready)  # noqa: E731
        state = TrainState()
        setup: Any = SimpleNamespace(
            state=state,
            folder=folder,
            writer=SimpleNamespace(saved_step=None),
            device=SimpleNamespace(synchronize=lambda: None),
            config=SimpleNamespace(run=SimpleNamespace(batch_size=8)),
            loader=SimpleNamespace(stats=stats),
            ranks=Ranks(),
        )
        evaluated_steps: list[int] = []
        clock: Any = SimpleNamespace(on_host=True)
        ledger = Ledger(clock, start_s=0.0, now=self.now)
        probe = PrefetchedInputProbe(
            setup, ledger, lambda kind, text, **data: folder.event(kind, text, **data), lambda: len(evaluated_steps)
        )
        for _ in range(steps):
            probe.before_step(state.step / total)
            waits = 0.0 if self.ready else wait_s
            self.ready = max(0, self.ready - 1)
            self.now_s += 1.0 + waits
            state.step, state.trained_s = state.step + 1, state.trained_s + 1.0 + waits
            phases = {"compute": 1.0, "input_wait": waits}
            window = StepWindow(
                t=self.now_s,
                attempt=1,
                step=state.step,
                window_steps=1,
                num_images=8,
                wall_s=1.0 + waits,
                devices=1,
                phases=phases,
            )
            probe.observe(window)
            if evaluate_every and state.step % evaluate_every == 0:
                self.now_s += 1000.0
                evaluated_steps.append(state.step)
        folder.close()
        return probe

    def now(self) -> float:
        return self.now_s

    def sleep(self, _: float) -> None:
        self.now_s, self.ready, self.paused_s = self.now_s + 3.0, self.ready + 1, self.paused_s + 3.0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(input_probe, "time", SimpleNamespace(time=time.time, perf_counter=made.now, sleep=made.sleep))
    monkeypatch.setattr(input_probe, "MAX_PAUSE_S", 60.0)
    return made


@pytest.mark.parametrize("evaluate_every", [0, 7])
def test_a_run_measures_once_how_fast_it_would_be_without_waiting(
    machine: Machine, tmp_path: Path, evaluate_every: int
) -> None:
    machine.train(tmp_path, 400, total=100_000, wait_s=3.0, evaluate_every=evaluate_every)
    if evaluate_every:  # too often for eight steps in a row: no result rather than a wrong one
        assert not list(read_lines(tmp_path, PROBES, Probe))
        return
    assert machine.paused_s == input_probe.MAX_PAIRS * 3.0 * machine.depth
    (found,) = read_lines(tmp_path, PROBES, Probe)
    assert found.automatic
    assert found.ratio == pytest.approx(4.0)
    assert (found.before_img_per_s, found.after_img_per_s) == pytest.approx((2.0, 8.0))


def test_interrupted_rounds_stay_within_the_budget(machine: Machine, tmp_path: Path) -> None:
    machine.train(tmp_path, 3000, total=10_000, wait_s=3.0, evaluate_every=7)
    assert 0 < machine.paused_s < input_probe.MAX_PAUSE_FRACTION * 10_000 * 4.0 + 3.0
    (note,) = read_lines(tmp_path, EVENTS, Event)
    assert "could not measure" in note.text


def test_a_short_run_and_one_that_never_waits_are_not_probed(machine: Machine, tmp_path: Path) -> None:
    machine.train(tmp_path / "short", 400, total=1000, wait_s=3.0)
    machine.train(tmp_path / "fast", 400, total=100_000, wait_s=0.01)
    assert not (tmp_path / "short" / PROBES).exists()
    assert not (tmp_path / "fast" / PROBES).exists()


def test_runs_that_cannot_be_probed_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, attempt=1)
    folder.event("started")
    with pytest.raises(UsageError, match=r"need a run of `stoker train`"):
        run_probes(str(tmp_path), print)
    (tmp_path / "config.toml").write_text("")
    with locked(tmp_path), pytest.raises(UsageError, match="still running"):
        run_probes(str(tmp_path), print)
    folder.close()


@pytest.mark.slow
@undisturbed_once
def test_the_experiment_of_a_run_changes_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slow images: the same weights, bit for bit, as without the experiment."""
    data, decode_into = draw(tmp_path / "data"), decode.decode_into

    def slowly(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.04)
        return decode_into(*arguments, **named)

    monkeypatch.setattr(decode, "decode_into", slowly)
    monkeypatch.setattr(input_probe, "MAX_PAIRS", 3)
    monkeypatch.setattr(input_probe, "MAX_PAUSE_FRACTION", 1.0)
    ends: list[bytes] = []
    for name, after_s in (("with", 0.5), ("without", 1e9)):
        monkeypatch.setattr(input_probe, "WARMUP_S", after_s)
        settings: dict[str, Any] = {
            "batch_size": 4,
            "image_size": (64, 64),
            "model": "retinanet_tiny_fpn",
            "workers": 1,
        }
        run = stoker.train(
            str(data), max_duration="80", eval_every="0", mosaic=0.4, run_dir=str(tmp_path / name), **settings
        ).run
        ends.append((run / "final.safetensors").read_bytes())
    found = list(read_lines(tmp_path / "with", PROBES, Probe))
    assert [one.ratio > 1.2 for one in found] == [True], "it measured that images come slowly"
    assert not (tmp_path / "without" / PROBES).exists()
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_experiments_on_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = stoker.train(
        "demo", max_duration="3", batch_size=4, image_size=(64, 64), eval_every="0", workers=2, run_dir="run"
    ).run
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    said: list[str] = []
    run_probes("run", said.append)
    found = list(read_lines(run, PROBES, Probe))
    assert [one.probe for one in found] == list(PROBE_KINDS)
    assert [one.probe for one in found if one.reason] == ["no_allreduce", "compiled"]
    assert all(one.before_img_per_s > 0 and one.steps >= 6 for one in found if not one.reason)
    assert said == [describe_probe(one) for one in found]
    assert all(path.read_bytes() == content for path, content in before.items())
    assert stoker_why(run)["probes"]


def stoker_why(run: Path) -> dict[str, Any]:
    from stoker.report.explain import explain_run

    return json.loads(msgspec.json.encode(explain_run(run)))
