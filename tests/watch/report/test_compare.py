"""`stoker why A --compare B`: the differences, the largest first."""

import io
import json
from pathlib import Path

import msgspec
import pytest

from stoker_watch.errors import UsageError
from stoker_watch.report.compare import Comparison, compare, print_comparison
from stoker_watch.report.sizing import comparable
from tests.watch.report.runs import write_run

MACHINE = {"hostname": "one", "packages": {"torch": "2.14.0", "numpy": None}, "cores": 8, "memory_limit_bytes": 2**34,
           "gpu": {"driver": "550.1", "gpus": [{"name": "Tesla T4", "uuid": "GPU-1"}] * 2},
           "variables": {"OMP_NUM_THREADS": "1", "MASTER_PORT": "1234"}, "argv": ["stoker", "train", "a"]}  # fmt: skip


def printed(comparison: Comparison) -> str:
    file = io.StringIO()
    print_comparison(comparison, file)
    return file.getvalue()


def test_a_run_does_not_differ_from_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", environment=MACHINE, settings="[run]\nworkers = 4\n", ap=0.3)
    comparison = compare(run, run)
    assert comparison.statement == ["The records do not differ."]
    assert (comparison.settings, comparison.environment, comparison.removed_causes, comparison.added_causes) == (
        [],
        [],
        [],
        [],
    )
    assert all(row.before_s == row.after_s for row in comparison.phases)


def test_jobs_of_others_with_other_commands_are_said_to_be_others(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, environment={**MACHINE, "argv": ["python", name]}) for name in ("hf.py", "light.py")
    ]
    assert compare(*runs).statement[-1] == "The commands differ: python hf.py → python light.py"
    assert compare(runs[0], runs[0]).statement == ["The records do not differ."]


def test_differences_with_the_largest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), phases={"compute": 600.0, "input_wait": 400.0}, environment=MACHINE, ap=0.3,
              settings="[run]\nworkers = 1\nprice_per_device_hour = 3.6\n[reasons]\nworkers = 'x'\n")  # fmt: skip
    other = {**MACHINE, "packages": {"torch": "2.15.0"}, "argv": ["stoker", "train", "b"],
             "variables": {"OMP_NUM_THREADS": "1", "MASTER_PORT": "99", "NCCL_DEBUG": "INFO"}}  # fmt: skip
    write_run(Path("b"), phases={"compute": 600.0, "input_wait": 20.0}, environment=other, ap=0.31,
              settings="[run]\nworkers = 8\nprice_per_device_hour = 3.6\n")  # fmt: skip
    assert (
        printed(compare("a", "b"))
        == """\
first   a
second  b

The second took 38 % less time per step: 10 s → 6.2 s.
The largest difference is input_wait: 4 s → 0.2 s per step.
AP 0.300 → 0.310.
Removed findings: input_bound.
Settings: 1 value changed: workers.
Machine and versions: 2 values changed: packages.torch, variables.NCCL_DEBUG.

time, s per step
phase       first  second  change  fraction, first  second
input_wait      4     0.2    −3.8             40 %   3.2 %
compute         6       6       0             60 %    97 %
total          10     6.2    −3.8            100 %   100 %
img/s         1.6    2.58
AP          0.300   0.310

settings
workers  1  8

machine and versions
packages.torch        2.14.0  2.15.0
variables.NCCL_DEBUG  n/a     INFO
"""
    )
    backwards = compare("b", "a")
    assert (backwards.added_causes, backwards.removed_causes) == (["input_bound"], [])
    assert backwards.statement[0] == "The second took 1.61 times as much time per step: 6.2 s → 10 s."


def test_runs_with_different_batch_sizes_are_compared_per_image(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", phases={"compute": 100.0}, num_images=800)
    b = write_run(tmp_path / "b", phases={"compute": 150.0}, num_images=1600)
    comparison = compare(a, b)
    assert comparison.unit == "1,000 images"
    assert comparison.total_s == pytest.approx((125.0, 93.75))
    assert "25 % less time per 1,000 images" in comparison.statement[0]


def test_the_same_time_in_different_phases(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", phases={"compute": 60.0, "input_wait": 40.0})
    b = write_run(tmp_path / "b", phases={"compute": 60.0, "sync": 40.0})
    assert compare(a, b).statement[0] == "The largest difference is input_wait: 0.4 s → 0 s per step."


def test_more_devices_are_compared_per_device(tmp_path: Path) -> None:
    """A step that takes a second on each device takes a second."""
    a = write_run(tmp_path / "a", phases={"compute": 100.0}, devices=1)
    b = write_run(tmp_path / "b", phases={"compute": 800.0}, devices=8)
    assert compare(a, b).total_s == pytest.approx((1.0, 1.0))


def test_runs_without_a_step_or_any_record(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", windows=0, end="failed", message="no data")
    comparison = compare(a, b)
    assert comparison.statement[0] == "Only the first did a step; times cannot be compared."
    assert "The first is finished, the second failed." in comparison.statement
    assert comparison.phases == []
    assert printed(comparison)
    assert compare(b, b).statement == ["The records do not differ."]


def test_the_json_holds_the_same(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", environment=MACHINE), write_run(tmp_path / "b", phases={"compute": 1.0})
    comparison = compare(a, b)
    assert msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison) == comparison
    assert json.loads(msgspec.json.encode(comparison))["settings"] == []


def test_values_that_differ_in_every_run_are_not_compared() -> None:
    environment = comparable(MACHINE)
    assert environment["gpu"] == "2 × Tesla T4"
    assert environment["memory_limit_bytes"] == "16.0 GiB"
    assert "GPU-1" not in str(environment)
    assert comparable({"storage": {"run": {"kind": "nfs", "network": True}}})["storage.run.kind"] == "nfs"
    variables = {"STOKER_RANK_REPORTS": "/tmp/stoker-ranks-x/reports", "STOKER_NVTX": "1"}
    assert comparable({"variables": variables}) == {"variables.STOKER_NVTX": "1"}
    assert not {"argv", "variables.MASTER_PORT", "packages.numpy"} & set(environment)


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", settings='[run]\nx = "\\u001b[2Jgone"\n')
    text = printed(compare(a, write_run(tmp_path / "b", settings='[run]\nx = "here"\n')))
    assert "gone" in text
    assert "\x1b" not in text


def test_an_external_job_has_no_settings_to_compare(tmp_path: Path) -> None:
    ours = write_run(tmp_path / "a", settings="[run]\nworkers = 1\n")
    other = write_run(tmp_path / "b")
    message = "The {} has no settings; they are not compared."
    assert (compare(ours, other).settings, compare(other, ours).settings) == ([], [])
    assert message.format("second") in compare(ours, other).statement
    assert message.format("first") in compare(other, ours).statement


def test_a_folder_that_is_not_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run"):
        compare(write_run(tmp_path / "a"), tmp_path / "nothing")
