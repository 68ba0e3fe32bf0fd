"""What must hold for the diagnosis of any run, tried on recorded jobs of other makers, and on damaged records."""

import ast
import itertools
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.diagnosis import diagnose_recorded
from stoker_watch.diagnosis import engine
from stoker_watch.diagnosis.engine import CATALOG, explain_costs, run_rules
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.knowledge import parse_toml
from stoker_watch.report.explain import PHASE_MEANINGS
from stoker_watch.runs.records import DEVICES, STACKS, STEPS

PATHS = sorted(diagnose_recorded.FOLDER.rglob(f"*{diagnose_recorded.SUFFIX}"))
PACKAGE = Path(engine.__file__).parents[1]


def damage(run: Path, number: int) -> None:
    """Loses a tenth of the lines of a file, cuts one short in the middle of a line, and moves some."""
    rng = random.Random(number)
    for name in (STEPS, STACKS, DEVICES):
        path = run / name
        if not path.exists():
            continue
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if rng.random() > 0.1]
        if len(lines) > 3:
            index = rng.randrange(len(lines) - 1)
            lines[index], lines[index + 1] = lines[index + 1], lines[index]
        path.write_bytes(b"".join(lines)[: -rng.randrange(1, 40) or None])


@pytest.fixture(scope="module")
def runs() -> list[tuple[str, RunRecords]]:
    """Each recording as it is, and damaged."""
    found = []
    for number, path in enumerate(PATHS):
        recording = diagnose_recorded.load(path)
        for is_damaged in (False, True):
            with diagnose_recorded.unpacked(recording) as run:
                if is_damaged:
                    damage(run, number)
                records = read_run(run)
                output = records.read_output()
                records.__dict__["read_output"] = itertools.repeat(output).__next__  # the folder is gone then
                found.append((f"{recording.name}{', damaged' * is_damaged}", records))
    return found


def test_there_are_recordings() -> None:
    assert len(PATHS) >= 30
    assert all(path.stat().st_size <= diagnose_recorded.MAX_BYTES for path in PATHS)
    assert sum(path.stat().st_size for path in PATHS) <= 12_000_000


def test_the_costs_of_a_rank_are_all_of_its_time(runs: list[tuple[str, RunRecords]]) -> None:
    for name, run in runs:
        for rank, phases in run.rank_phases.items():
            costs = [cost.seconds for cost in run.costs if cost.rank == rank]
            assert min(costs, default=0.0) >= 0, name
            assert sum(costs) == pytest.approx(sum(phases.values()), rel=0.01, abs=0.05), name
        for cost in run.costs:
            assert cost.steady_s <= cost.seconds * (1 + 1e-9) + 1e-9, name


def test_no_second_is_in_two_findings(runs: list[tuple[str, RunRecords]]) -> None:
    """Nor is more lost than there was besides the steps, but for what is lost in steps, which a rule says itself."""
    count = 0
    for name, run in runs:
        lost = [found.lost_device_s or 0.0 for found in explain_costs(run) if found.severity != "info"]
        explained = {phase for found in explain_costs(run) for phase in CATALOG[found.id].explains}
        open_s = sum(
            cost.seconds for cost in run.costs if cost.place is not None or cost.phase in explained or "*" in explained
        )
        assert sum(lost) <= open_s * 1.01 + 0.05, name
        count += len(lost)
    assert count > 20


def test_the_order_of_the_rules_does_not_matter(
    runs: list[tuple[str, RunRecords]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [[(found.id, found.lost_device_s, found.title) for found in run_rules(run)] for _, run in runs]
    rules = list(engine.RULES)
    random.Random(7).shuffle(rules)
    monkeypatch.setattr(engine, "RULES", tuple(rules))
    assert [[(found.id, found.lost_device_s, found.title) for found in run_rules(run)] for _, run in runs] == before


def test_no_rule_writes_to_the_records(runs: list[tuple[str, RunRecords]]) -> None:
    for name, run in runs:
        before = pickle.dumps({key: value for key, value in run.__dict__.items() if key != "read_output"})
        run_rules(run)
        assert pickle.dumps({key: value for key, value in run.__dict__.items() if key != "read_output"}) == before, name
        with pytest.raises(AttributeError):
            run.num_ranks = 3


def test_the_scores_do_not_fall() -> None:
    """`scores.toml` has the numbers of right answers that the last change of the rules left, by set."""
    floor = parse_toml(diagnose_recorded.SCORES.read_text(encoding="utf-8"))
    now = diagnose_recorded.by_series(diagnose_recorded.read_all(PATHS))
    for series, least in floor.items():
        for name, count in least.items():
            is_right_answer = name not in ("faults", "healthy", "timed")
            assert (now[series][name] >= count) if is_right_answer else (now[series][name] == count), (series, name)


def texts_in(path: Path) -> Iterator[tuple[str, Any]]:
    """(the text, the node) of all texts of a file that are no docstrings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node


def test_code_names_a_cause_only_in_the_file_of_its_rule() -> None:
    """So nobody has to know the other causes to add one. A row may name others: what it is more exact than. Phases have
    some of these names."""
    home = {cause.id: Path(rule.__code__.co_filename) for cause, rule in engine.RULES if cause.id not in PHASE_MEANINGS}
    others = [
        (path.name, text)
        for path in sorted((PACKAGE / "diagnosis").rglob("*.py"))
        for text, _ in texts_in(path)
        if text in home and home[text] != path
    ]
    assert others == []
