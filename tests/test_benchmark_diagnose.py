"""The benchmark of the diagnosis: its faults are as large as recorded, and it counts correctly. Not its numbers."""

import argparse
import errno
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stoker_watch.diagnosis.endings import endings
from stoker_watch.diagnosis.engine import CATALOG
from tests.fixtures.benchmarks import run_quick

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")


@pytest.fixture
def modules() -> dict[str, ModuleType]:
    names = ("diagnose_causes", "diagnose_score", "diagnose_inside", "diagnose_outside", "diagnose_driver", "diagnose")
    return {name: importlib.import_module(f"benchmarks.diagnosis.{name}") for name in names}


def an_outcome(modules: dict[str, ModuleType], named: str | None, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "cause": "slow_storage", "strength": "strong", "kind": "watch", "run": 0, "level": 0.5, "named": named,
        "accepts": ("slow_storage",),
    }  # fmt: skip
    return modules["diagnose_score"].Outcome(**(fields | changes))


def test_a_run_is_correct_with_an_accepted_finding_or_healthy_without_one(modules: dict[str, ModuleType]) -> None:
    healthy = {"cause": "healthy", "strength": "", "accepts": ()}
    outcomes = [
        an_outcome(modules, "slow_storage", injected_s=4.0, named_s=5.0),
        an_outcome(modules, "slow_decode", injected_s=4.0, named_s=4.0),
        an_outcome(modules, None, reason="not permitted"),
        an_outcome(modules, "nothing", **healthy),
        an_outcome(modules, "python_bound", **healthy),
        an_outcome(modules, "no answer", **healthy),
    ]
    assert [o.correct for o in outcomes] == [True, False, False, True, False, False]
    assert [o.loss_error for o in outcomes] == [0.25, None, None, None, None, None]
    score = modules["diagnose_score"]
    assert score.fraction_correct(outcomes[:3]) == (1, 2), "a run that could not be made does not count"
    first, second = score.cells(outcomes)
    assert (first["right"], first["named instead"], first["n/a"]) == (
        "1 of 2",
        "1 × slow_decode (watch)",
        "not permitted",
    )
    assert first["loss named, off by"] == 0.25
    assert second["right"] == "1 of 3"


def test_the_interval_is_wilsons(modules: dict[str, ModuleType]) -> None:
    wilson = modules["diagnose_score"].wilson
    assert wilson(9, 10) == pytest.approx((0.596, 0.982), abs=1e-3)  # Newcombe 1998's method 3, by hand
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == pytest.approx(1)


def test_every_accepted_id_exists(modules: dict[str, ModuleType]) -> None:
    for cause in modules["diagnose_causes"].CAUSES.values():
        known = CATALOG.keys() | endings().keys() | {modules["diagnose_causes"].PLACE}
        assert set(cause.accepts) <= known, cause.name
        assert bool(cause.accepts) == (cause.name != "healthy")


@pytest.mark.parametrize(
    ("line", "name"), [("recv(2)", "the place"), ("def log_to_server", "the place"), ("import os", "heavy_place")]
)
def test_a_place_is_right_in_the_lines_of_the_fault(line: str, name: str, modules: dict[str, ModuleType]) -> None:
    file = modules["diagnose_inside"].__file__
    assert file is not None
    number = next(n for n, text in enumerate(Path(file).read_text().splitlines(), 1) if line in text)
    finding = {"cause": "heavy_place", "place": f"benchmarks/diagnosis/diagnose_inside.py:{number}"}
    assert modules["diagnose_causes"].CAUSES["host_wait"].name_of(finding) == name


def test_the_seed_draws_levels_and_order(modules: dict[str, ModuleType]) -> None:
    main, causes = modules["diagnose"], modules["diagnose_causes"].CAUSES
    asked = argparse.Namespace(
        runs=3, quick=False, only=None, kinds=["watch", "stoker"], strengths=None, seed=5
    )  # fmt: skip
    first = main.tasks(asked)
    assert first == main.tasks(asked)
    assert len(set(first)) == len(first)
    for task in first:
        low, high = causes[task.cause].strong if task.strength == "strong" else causes[task.cause].weak
        assert low <= main.level_of(task, 5) <= high
    asked.seed = 6
    assert main.tasks(asked) != first
    assert set(main.tasks(asked)) == set(first)


def test_each_cell_has_three_runs_and_every_kind_of_job(modules: dict[str, ModuleType]) -> None:
    main, causes = modules["diagnose"], modules["diagnose_causes"].CAUSES
    every = main.tasks(main.parser().parse_args(["--seed", "9"]))
    for cause in causes.values():
        for strength in ("weak", "strong") if cause.name != "healthy" else ("",):
            kinds = [task.kind for task in every if (task.cause, task.strength) == (cause.name, strength)]
            assert len(kinds) >= 3
            assert set(kinds) == set(cause.kinds)


def test_an_interrupted_benchmark_continues_with_its_seed(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    main, partial = modules["diagnose"], tmp_path / "partial.jsonl"
    mark = {"catalog": "abc", "seconds": 8.0, "ignored": []}
    assert main.seed_of(7, partial, mark) == 7
    asked = [main.Task("slow_storage", "strong", "watch", run) for run in range(2)]
    assert main.before(partial, mark | {"seed": 7}, asked) == []
    done = an_outcome(modules, "slow_storage")
    with partial.open("a") as file:
        file.write(json.dumps(done.as_dict()) + "\n" + '{"cause": "slow_st')
    assert main.seed_of(None, partial, mark) == 7
    assert main.before(partial, mark | {"seed": 7}, asked) == [done]
    other = mark | {"catalog": "def"}
    assert main.seed_of(None, partial, other) != 7
    assert main.before(partial, other | {"seed": 7}, asked) == [], "thresholds have changed since"


def test_a_debt_is_paid_in_full(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    debt = modules["diagnose_inside"].Debt(0.75, tmp_path / "job.0.json")
    debt.pay(lambda: pytest.fail("nothing is owed"))
    debt.owe(0.01)
    began = time.perf_counter()
    debt.pay(lambda: time.sleep(0.004))
    assert debt.total_s <= time.perf_counter() - began
    assert debt.total_s >= 3 * 0.01 - debt.owed_s - 1e-9
    assert debt.total_s + debt.owed_s == pytest.approx(0.03)
    debt.write(min_interval_s=0.0, steps=3)
    assert json.loads((tmp_path / "job.0.json").read_text()) == {"injected_s": debt.total_s, "steps": 3}


def run(around: Any, script: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [*around.before, sys.executable, "-c", script, *words]
    return subprocess.run(command, env={**os.environ, **around.variables}, capture_output=True, text=True)


@pytest.mark.slow
def test_slow_files_are_as_slow_as_recorded(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    job = tmp_path / "job"
    (job / "slow").mkdir(parents=True)
    (job / "slow" / "a").write_bytes(b"x" * 100)
    (job / "fast").write_bytes(b"x" * 100)
    script = """
import sys, time, pathlib
for name in ("slow/a", "fast"):
    began = time.perf_counter()
    for _ in range(5):
        pathlib.Path(sys.argv[1], name).read_bytes()
    print(time.perf_counter() - began)
"""
    with modules["diagnose_outside"].slow_files(job, "/job/slow/", 0.02) as around:
        done = run(around, script, str(job))
        slow_s, _ = map(float, done.stdout.split())
        assert 0.1 <= around.injected_s() <= slow_s


@pytest.mark.slow
@needs_root
def test_a_quota_withholds_what_it_reports(modules: dict[str, ModuleType]) -> None:
    outside = modules["diagnose_outside"]
    script = "import time; t = time.thread_time() + 0.1\nwhile time.thread_time() < t: pass"
    try:
        with outside.cpu_quota(0.05) as around:
            assert run(around, script).returncode == 0
            facts = around.facts()
    except outside.NotPermitted as error:
        pytest.skip(str(error))
    assert facts["throttled_periods"] > 3
    assert facts["throttled_s"] > 0.2


@pytest.mark.slow
@needs_root
def test_a_small_disk_is_full(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    outside = modules["diagnose_outside"]
    try:
        with outside.small_disk(tmp_path / "disk", 100_000), pytest.raises(OSError, match="No space") as raised:
            (tmp_path / "disk" / "file").write_bytes(b"x" * 200_000)
    except outside.NotPermitted as error:
        pytest.skip(str(error))
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.slow
@needs_root
def test_a_slow_link_has_the_requested_speed(modules: dict[str, ModuleType]) -> None:
    outside = modules["diagnose_outside"]
    script = """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
other, _ = server.accept()
threading.Thread(target=lambda: client.sendall(bytes(6_000_000)), daemon=True).start()
got, began = 0, time.perf_counter()
while got < 6_000_000:
    got += len(other.recv(1 << 20))
print(got / (time.perf_counter() - began))
"""
    try:
        with outside.slow_link(10e6) as around:
            done = run(around, script)
    except outside.NotPermitted as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(10e6, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "level", "field", "value"), [
    ("nothing", 0.0, "throttle_reasons", 0), ("hot", 1.0, "throttle_reasons", 0x20),
    ("pcie_degraded", 1.0, "pcie_width", 8), ("underfilled", 0.9, "sm_active", 0.1),
])  # fmt: skip
def test_the_simulated_driver_reports_the_fault(
    modules: dict[str, ModuleType], tmp_path: Path, wrong: str, level: float, field: str, value: float
) -> None:
    scene = modules["diagnose_driver"].scene(getattr(modules["diagnose_driver"], wrong), level, 3)
    script = f"""
import time
from stoker_watch.recording.telemetry.gpu import GpuSampler
gpus = GpuSampler()
gpus.sample()
time.sleep(0.1)
print(gpus.sample()[0].{field})
"""
    (tmp_path / "job").mkdir()
    with modules["diagnose_outside"].driver(tmp_path / "job", scene) as around:
        done = run(around, script)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(value)


@pytest.mark.slow
def test_a_small_part_of_it_runs_from_end_to_end(tmp_path: Path) -> None:
    content = run_quick(
        "diagnose", tmp_path / "result.json", "--only", "Xid (simulated)", "healthy", "--kinds", "simulated",
        "--seed", "1", "--seconds", "7",
    )  # fmt: skip
    rows = {row["what"]: row for row in content["rows"]}
    assert rows["Xid (simulated), strong"]["right"] in ("2 of 2", "1 of 2", "0 of 2")
    assert {"injected: healthy", "injected: Xid (simulated)"} <= rows.keys()
    assert not (tmp_path / "result.partial.jsonl").exists()
