"""Benchmarks run and write their results. Their numbers are not tested here."""

import importlib
import json
import os
import runpy
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from stoker.hardware.device import SideStream
from stoker.hardware.selection import select_device
from tests.fixtures.benchmarks import FOLDER, run_quick


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    ["index", "ledger", "cache", "evaluate", "storage", "gil", "plan"],
)
def test_a_quick_run_writes_its_results(script: str, tmp_path: Path) -> None:
    assert run_quick(script, tmp_path / "result.json")["bars"]


@pytest.mark.slow
def test_the_parts_of_the_startup_add_up(tmp_path: Path) -> None:
    content = run_quick("startup", tmp_path / "result.json")
    rows = {row["what"]: row["s"] for row in content["rows"]}
    parts = [s for what, s in rows.items() if what.startswith("second start") and not what.endswith("all")]
    assert sum(parts) == pytest.approx(rows["second start, all"])
    assert all(s > 0 for s in parts)
    assert [bar["value"] for bar in content["bars"]] == [rows["second start, all"]]


@pytest.mark.slow
def test_a_compiled_step_has_the_arithmetic_of_an_eager_one_and_moves_less(tmp_path: Path) -> None:
    content = run_quick("roofline", tmp_path / "result.json", "--only", "separate", "--tflops", "2", "1")
    rows = {row["what"]: row for row in content["rows"]}
    eager, compiled = (rows[f"{mode}, separate kernels: all"] for mode in ("eager", "compiled"))
    assert compiled["convolutions TFLOP"] == pytest.approx(eager["convolutions TFLOP"])
    assert compiled["others GB"] < eager["others GB"]
    for mode in ("eager", "compiled"):
        *parts, whole = [row for what, row in rows.items() if what.startswith(mode)]
        for column in ("operators", "convolutions GB", "others GB", "least ms"):
            assert whole[column] == pytest.approx(sum(part[column] for part in parts))
        # So slow that every convolution takes its FLOPs: of four images, at 1 and at 2 TFLOP/s.
        for word, tflops, tbps in (("least", 1, 3.6), ("most", 2, 4.0)):
            seconds = whole["convolutions TFLOP"] / tflops + whole["others GB"] / tbps / 1e3
            assert whole[f"{word} img/s"] == pytest.approx(4 / seconds)


@pytest.mark.slow
def test_loaders_use_the_same_images_and_missing_ones_are_listed(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere" / "python")
    content = run_quick("loader", tmp_path / "result.json", STOKER_PEERS_PYTHON=missing)
    rows = {row["what"].rpartition(": ")[2]: row for row in content["rows"] if row["what"].startswith("4,000")}
    assert all("make peers" in rows[name]["n/a"] for name in ("WebDataset, tensor resize", "tf.data", "SPDL"))
    assert str(tmp_path) not in json.dumps(content["rows"])
    # The speed does not come from inaccurate pixels: the filters of Pillow differ by 0.3 to 0.5 of 255 levels.
    assert rows["stoker"]["difference"] < 0.5
    assert rows["DataLoader, tensor resize"]["difference"] < 0.01
    assert all(row["peak MiB"] > 0 for row in rows.values() if "n/a" not in row)
    # For each size: the speed relative to one DataLoader, and the memory relative to both.
    assert len(content["bars"]) == 2 + 2 * 2


@pytest.mark.slow
def test_training_is_measured_with_and_without_loader(tmp_path: Path) -> None:
    content = run_quick("end_to_end", tmp_path / "result.json", "--device", "cpu")
    real, cached, _ = content["rows"]
    assert [real["what"], cached["what"]] == [f"retinanet_tiny_fpn, {name}" for name in ("real loader", "cached batch")]
    assert real["input_wait fraction"] > cached["input_wait fraction"] >= 0
    for row in (real, cached):
        assert 0.5 < row["compute fraction"] <= 1
    assert content["bars"] == []


@pytest.mark.slow
def test_the_quality_benchmark_has_no_local_paths_and_repeats_nothing(tmp_path: Path, real_data: Path) -> None:
    result = tmp_path / "result.json"
    first = run_quick("quality", result, "--only", "theirs", "--shared", str(real_data))
    runs = [row for row in first["rows"] if "seed" in row]
    assert [row["what"] for row in runs] == ["theirs"]
    assert "../shared/data/weights" in runs[0]["command"]
    assert str(real_data) not in json.dumps(first["rows"])
    second = run_quick("quality", result, "--only", "theirs", "--shared", str(tmp_path / "absent"))
    assert second["rows"] == first["rows"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    model = "retinanet_mobilenet_v2_fpn"
    content = run_quick("gpu", tmp_path / "result.json", "--device", "cpu", "--only", model, "machine", timeout_s=1700)
    rows = {row["what"]: row for row in content["rows"]}
    assert not [what for what in rows if what.endswith("failed")]
    row = rows[model]
    assert row["eager skipped"] == 0
    assert min(row[f"{how} img/s"] for how in ("eager", "compiled", "graph", "eager graph")) > 0
    assert rows["machine"]["torch"] == torch.__version__
    for how in ("eager", "compiled", "compiled fused"):
        kernels = [row["name"] for row in content["rows"] if row["what"] == f"{model}, {how}, kernel"]
        assert kernels
        assert any("stoker::" in name for name in kernels) is ("fused" in how), kernels
    # a line for each window
    windows = [line for line in (tmp_path / "result.jsonl").read_text().splitlines() if '"img/s"' in line]
    assert len(windows) == 4 * 2


@pytest.fixture
def quality() -> ModuleType:
    return importlib.import_module("benchmarks.accuracy.quality")


def make_row(what: str, seed: int, ap: float, *, steps: int = 512) -> dict[str, Any]:
    return {"what": what, "seed": seed, "steps": steps, "AP": ap, "AP50": ap + 0.3, "CPU s": 1000.0 + seed}


def conclude(quality: ModuleType, rows: list[dict[str, Any]]) -> Any:
    report = quality.Report("", 1)
    done = {(row["what"], row["seed"], row["steps"]): row for row in rows}
    quality.conclude(report, done, {"budget": 1800, "ours": 512, "theirs": 512})
    return report


def test_the_bar_at_equal_steps_is_in_pooled_standard_deviations(quality: ModuleType) -> None:
    ours = [make_row("ours", seed, 0.50 + 0.01 * seed) for seed in range(3)]
    theirs = [make_row("theirs", seed, 0.53 + 0.01 * seed) for seed in range(3)]
    (bar,) = conclude(quality, ours + theirs).bars
    assert bar.value == pytest.approx(-3)
    assert not bar.ok
    assert conclude(quality, ours[:1] + theirs).bars == []


def test_means_are_over_trainings_of_one_length(quality: ModuleType) -> None:
    runs = [
        make_row("budget", 0, 0.56, steps=1800),
        make_row("budget", 1, 0.58, steps=1800),
        make_row("budget", 0, 0.1, steps=4),
    ]
    report = conclude(quality, runs)
    (mean,) = [row for row in report.rows if "mean" in row["what"]]
    assert mean["AP"] == pytest.approx(0.57)
    assert [(bar.value, bar.ok) for bar in report.bars] == [
        (1001.0, True),
        (pytest.approx(0.57), True),
        (pytest.approx(0.87), True),
    ]
    assert [row for row in report.rows if row["what"].startswith("before")] == quality.BEFORE


@pytest.mark.slow
def test_decoding_on_the_device_is_compared_with_the_host(tmp_path: Path) -> None:
    pytest.importorskip("torchcodec", reason="the package torchcodec is not installed")
    content = run_quick("nvjpeg", tmp_path / "result.json", "--device", "cpu")
    rows = {row["what"]: row for row in content["rows"]}
    assert rows["640 × 480, cpu"]["device thread busy"] == 0
    assert rows["640 × 480, nvjpeg"]["device thread busy"] > 0
    assert rows["640 × 480, chosen"]["jpeg_decoder"] == "cpu"


def test_child_processes_keep_the_python_path_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = importlib.import_module("benchmarks.processes")
    monkeypatch.setenv("PYTHONPATH", f"first{os.pathsep}second")
    assert processes.child_environment()["PYTHONPATH"].split(os.pathsep)[:3] == ["first", "second", str(FOLDER.parent)]
    monkeypatch.delenv("PYTHONPATH")
    assert processes.child_environment()["PYTHONPATH"] == processes.python_path(FOLDER.parent)


@pytest.fixture
def gpu_case() -> ModuleType:
    return importlib.import_module("benchmarks.gpu.gpu_case")


@pytest.mark.slow
def test_a_timed_step_copies_and_augments_another_batch_each_time(
    gpu_case: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = gpu_case.Case("retinanet_tiny_fpn", 3, 2, (64, 64), precision="fp32", slots=4)
    work = gpu_case.Work(case, select_device("cpu"))
    copied: list[Any] = []
    trained: list[Any] = []
    to_device = SideStream.to_device

    def recording_to_device(stream: SideStream, tensors: Any) -> Any:
        copied.append(tensors)
        return to_device(stream, tensors)

    monkeypatch.setattr(SideStream, "to_device", recording_to_device)
    rate = work.per_s(trained.append, 3)
    assert rate > 0
    assert len(copied) == 1 + 3  # the next batch is copied while the device works on this one
    for batch, source in zip(trained, copied, strict=False):
        assert batch.images.shape == source.images.shape
        assert not torch.equal(batch.images, source.images)  # color and flip
    assert not torch.equal(copied[0].images, copied[1].images)


def test_idle_time_is_attributed_to_the_kernel_before_it(gpu_case: ModuleType) -> None:
    spans = [(10.0, 20.0, "a"), (12.0, 15.0, "b"), (26.0, 30.0, "b"), (33.0, 40.0, "a")]
    assert gpu_case.idle_us(spans) == {"a": 6.0, "b": 3.0}
    assert gpu_case.idle_fraction(spans) == pytest.approx(9 / 30)
    assert gpu_case.idle_fraction([]) is None


def test_results_older_than_their_code_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = runpy.run_path(str(FOLDER.parent / "scripts" / "stale_results.py"))
    assert set(stale["MEASURES"]) <= set(importlib.import_module("benchmarks.__main__").scripts())
    assert all(list(FOLDER.parent.glob(f"packages/*/{path}")) for paths in stale["MEASURES"].values() for path in paths)

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    measured = tmp_path / "packages/some" / stale["MEASURES"]["ledger"][0]
    measured.parent.mkdir(parents=True)
    git("init", "--quiet")
    measured.write_text("first")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    content = {"command": "python -m benchmarks ledger --json x.json", "commit": git("rev-parse", "HEAD")}
    for name, change in (("ledger", {}), ("other", {"command": "python benchmarks/other.py --json x"})):
        (tmp_path / f"{name}-cpu.json").write_text(json.dumps(content | change))
    monkeypatch.setitem(stale["git"].__globals__, "ROOT", tmp_path)
    (line,) = stale["stale_results"](tmp_path)
    assert line.startswith("other-cpu.json: ")
    measured.write_text("second")
    git("commit", "--quiet", "-am", "second")
    old, _ = stale["stale_results"](tmp_path)
    assert old.startswith("ledger-cpu.json: ")
    assert "1 later commits" in old
