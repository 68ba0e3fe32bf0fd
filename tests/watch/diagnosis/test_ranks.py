"""Runs of several ranks: seconds are those of all of them, fractions those of one. And sums of many samples."""

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker_watch.diagnosis.causes.shared import binomial_tail
from stoker_watch.diagnosis.engine import apply_probe_result, run_rules
from stoker_watch.diagnosis.notes import collect_notes
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.findings.finding import Finding
from stoker_watch.runs.schemas import Place, Probe
from tests.watch.diagnosis.built import FACTS, NATIVE_CONFIG, make_run
from tests.watch.diagnosis.test_places import window

WATCHED: dict[str, Any] = {"external": True, "config": None, "seconds": 45}


def write_stacks(run: Path, rank: int, *places: Place, role: str = "training") -> None:
    """Four lines of ten seconds."""
    file = run / (f"ranks/{rank:04d}/stacks.jsonl" if rank else "stacks.jsonl")
    samples = sum(place.samples for place in places)
    fields = {"attempt": 1, "pid": 10 * rank + len(role), "frames": {}, "role": role, "wall_s": 10.0}
    with file.open("ab") as lines:
        for number in range(1, 5):
            line = window(number, *places, samples=samples) | fields
            lines.write(msgspec.json.encode(line) + b"\n")


def findings_of(run: Path) -> dict[str, Finding]:
    return {finding.id: finding for finding in run_rules(read_run(run))}


@pytest.mark.parametrize(("successes", "count", "fraction"), [(0, 9, 0.3), (4, 9, 0.3), (9, 9, 0.3), (40, 60, 0.5)])
def test_the_tail_of_a_binomial_is_exact(successes: int, count: int, fraction: float) -> None:
    p = Fraction(fraction)
    exact = sum(math.comb(count, n) * p**n * (1 - p) ** (count - n) for n in range(successes, count + 1))
    assert binomial_tail(successes, count, fraction) == pytest.approx(float(exact), rel=1e-9)


def test_the_tail_of_thousands_of_samples() -> None:
    assert binomial_tail(2500, 5000, 0.5) == pytest.approx(0.5 + 0.5 / math.sqrt(math.pi * 2500), abs=1e-4)
    assert binomial_tail(60_000, 100_000, 0.5) < 1e-100
    assert [binomial_tail(3, 5, fraction) for fraction in (0.0, 1.0)] == [0.0, 1.0]


def test_ranks_with_many_samples_in_one_line_are_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **WATCHED, fractions={"host": 0.5}, ranks=[{"host": 0.5}])
    for rank in range(2):
        line = Place(line="train.py:9", function="main", call="sorted", kind="python", samples=300)
        write_stacks(run, rank, line, Place(line="train.py:12", kind="compute", samples=300))
    assert "straggler" not in findings_of(run)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_seconds_of_a_line_in_all_ranks_are_those_of_all(num_ranks: int, tmp_path: Path) -> None:
    """Evidence and finding agree, and none is larger than the time that there is."""
    run = make_run(tmp_path / "run", **WATCHED, fractions={"host": 0.5}, ranks=[{"host": 0.5}] * (num_ranks - 1))
    for rank in range(num_ranks):
        line = Place(line="train.py:9", function="main", call="sorted", kind="python", samples=20)
        write_stacks(run, rank, line, Place(line="train.py:12", kind="compute", samples=20))
    found = findings_of(run)
    lost_s = [finding.lost_device_s for finding in found.values() if finding.id in ("python_bound", "heavy_place")]
    assert lost_s
    for seconds in lost_s:
        assert seconds == pytest.approx(num_ranks * 22.5, rel=0.15)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_line_of_the_workers_of_all_ranks_explains_their_wait(num_ranks: int, tmp_path: Path) -> None:
    waits = {"input_wait": 0.8}
    run = make_run(tmp_path / "run", **WATCHED, fractions=waits, ranks=[waits] * (num_ranks - 1))
    for rank in range(num_ranks):
        write_stacks(run, rank, Place(line="train.py:5", call="torch.utils.data.x", kind="input_wait", samples=32),
                     Place(line="train.py:12", kind="compute", samples=8))  # fmt: skip
        write_stacks(run, rank, Place(line="data.py:7", function="load", call="pandas.read_csv", kind="python",
                                      samples=36), Place(kind="idle", samples=4), role="worker")  # fmt: skip
    found = findings_of(run)
    finding = found["heavy_place"]
    assert "input_bound" not in found
    assert finding.lost_device_s == pytest.approx(num_ranks * 0.8 * 45, rel=0.15)
    told, of = map(float, re.search(r"was there ([\d,]+) s of ([\d,]+)", finding.evidence[0].text).groups())
    assert told <= of


def test_a_step_of_one_of_many_ranks_is_not_divided_among_them(tmp_path: Path) -> None:
    """Two images for each of eight GPUs, as DETR trains, and 0.25 s a step: launching takes a hundredth of that."""
    chosen = NATIVE_CONFIG.replace('batch_size = "the recipe\'s"\n', "")
    facts = FACTS | {"predicted_step_s": 0.25, "predicted_step_error": 0.1}
    records = read_run(make_run(tmp_path / "run", gpus=1, steps=4, num_images=8, ranks=[{}] * 7, facts=facts,
                                config=chosen, gpu=lambda *_: {"memory_used_bytes": 2**30}))  # fmt: skip
    assert "batch_too_small" not in {finding.id for finding in run_rules(records)}
    note = next(note for note in collect_notes(records, []) if note.id == "predicted_step")
    assert "measured 0.25 s" in note.title


def test_a_cold_cache_of_several_ranks(tmp_path: Path) -> None:
    """Each of two ranks reads half of the data set in an epoch, and waits for it in the first one only."""

    def fetch(second: int) -> dict[str, Any]:
        waits = 0.9 if second < 12 else 0.01
        return {
            "phases": {"input_wait": waits, "compute": 1 - waits},
            "input_wait_stages": {"fetch": waits},
            "ranks": 2,
        }

    facts = FACTS | {"num_images": 2 * 4 * 6}
    run = make_run(tmp_path / "run", steps=1, num_images=4, window=fetch, ranks=[{"input_wait": 0.15}],
                   stages={"fetch": 1.0}, facts=facts, seconds=60)  # fmt: skip
    assert read_run(run).first_epoch_fetch_s == pytest.approx(2 * 6 * 0.9)


def test_later_compilations_of_other_ranks_are_no_start(tmp_path: Path) -> None:
    compiles = {"compile": 0.9}
    run = make_run(tmp_path / "run", **WATCHED, fractions=compiles, ranks=[compiles] * 3)
    assert "startup_heavy" not in findings_of(run)


@pytest.mark.parametrize(("high", "is_refuted"), [(1.1, True), (1.7, False)])
def test_a_probe_refutes_by_the_lost_fraction(high: float, is_refuted: bool, tmp_path: Path) -> None:
    """A device that is idle for half of the time could be up to twice as fast."""
    run = make_run(tmp_path / "run", gpus=1, gpu=lambda *_: {"utilization": 0.5})
    finding = findings_of(run)["host_bound_steps"]
    result = Probe(t=1.0, attempt=1, probe="cached_batch", steps=30, before_img_per_s=100.0, after_img_per_s=105.0,
                   ratio=1.05, ratio_low=1.0, ratio_high=high)  # fmt: skip
    tried = apply_probe_result(finding, {kind: result for kind in ("cached_batch", "double_batch", "compile")})
    assert (tried.probe_result or "").startswith("refuted") is is_refuted
