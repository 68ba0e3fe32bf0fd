"""The driver's numbers through the real nvidia-ml-py, against a driver library of our own that has no GPU behind it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.measuring.gpu import Gpus

TWO_GPUS = """
-1 count 2
-1 driver 580.95.05
-1 cuda 13000
* name NVIDIA H200
* memory_total 150754820096
0 uuid GPU-aaaa0000-1111
1 uuid GPU-bbbb0000-1111
0 utilisation 37
0 memory_used 1000000000
0 power_mw 412500
0 power_limit_mw 700000
0 sm_clock 1980
0 temperature 61
0 throttle 0x4
1 utilisation 0
1 memory_used 0
"""

SAMPLE_THRICE = """
import json, os, pathlib, msgspec
from stoker.measuring.gpu import Gpus
gpus = Gpus()
answers = [msgspec.to_builtins(gpus.sample()), gpus.reason]
answers.append(gpus.describe())
for change in ("AFTER", "LATER"):
    with pathlib.Path(os.environ["NVML_STUB"]).open("a") as file:
        file.write(os.environ[change])
    answers += [msgspec.to_builtins(gpus.sample()), gpus.reason]
print(json.dumps(answers))
"""


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libnvidia-ml.so.1 that answers from a file."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler to build the stub of NVIDIA's driver library")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("nvml_stub.c")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", target, source], check=True)
    return folder


def ask(driver: Path, tmp_path: Path, scene: str, *, after: str = "", later: str = "", **environment: str) -> list[Any]:
    """[sample, reason, describe, sample and reason after one change of the scene, and after another]"""
    scene_file = tmp_path / "scene"
    scene_file.write_text(scene)
    clean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    stub = {"LD_LIBRARY_PATH": str(driver), "NVML_STUB": str(scene_file), "AFTER": after, "LATER": later}
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE_THRICE], env=clean | stub | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_counters_have_their_units_and_missing_is_not_zero(driver: Path, tmp_path: Path) -> None:
    sample, reason, description, *_ = ask(driver, tmp_path, TWO_GPUS)
    assert reason is None
    assert sample == [
        {
            "index": 0, "utilisation": 0.37, "memory_used_bytes": 1_000_000_000, "memory_total_bytes": 150_754_820_096,
            "power_w": 412.5, "power_limit_w": 700.0, "sm_clock_mhz": 1980, "temperature_c": 61, "throttle_reasons": 4,
        },
        {"index": 1, "utilisation": 0.0, "memory_used_bytes": 0, "memory_total_bytes": 150_754_820_096},
    ]  # fmt: skip
    assert description == {
        "driver": "580.95.05",
        "cuda_driver": "13.0",
        "gpus": [
            {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-aaaa0000-1111", "memory_bytes": 150_754_820_096},
            {"index": 1, "name": "NVIDIA H200", "uuid": "GPU-bbbb0000-1111", "memory_bytes": 150_754_820_096},
        ],
    }


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-bbbb", [1]),
        ("GPU-bbbb0000-1111,0", [1, 0]),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
        ("", []),
        ("GPU-", []),
        ("MIG-cccc", [1]),
        ("MIG-dddd", []),
    ],
)
def test_only_the_gpus_that_cuda_may_use_are_sampled(
    driver: Path, tmp_path: Path, visible: str, indices: list[int]
) -> None:
    scene = TWO_GPUS + "1 mig MIG-cccc\n"
    sample, reason, description, *_ = ask(driver, tmp_path, scene, CUDA_VISIBLE_DEVICES=visible)
    assert [gpu["index"] for gpu in sample] == indices
    assert [gpu["index"] for gpu in description["gpus"]] == indices
    assert (reason is None) == bool(indices)
    if not indices:
        assert "CUDA_VISIBLE_DEVICES" in reason


def test_a_gpu_that_is_lost_during_the_run_is_a_value(driver: Path, tmp_path: Path) -> None:
    lost = "0 fail.nvmlDeviceGetUtilizationRates 15\n"
    back = "0 fail.nvmlDeviceGetUtilizationRates 0\n"
    _, _, _, after, reason, later, later_reason = ask(driver, tmp_path, TWO_GPUS, after=lost, later=back)
    assert after[0] == {"index": 0}
    assert after[1]["utilisation"] == 0.0
    assert reason == later_reason == "GPU 0 does not answer any more: GPU is lost"
    assert later == after, "it is not asked again"


def test_a_gpu_that_was_lost_before_leaves_the_others(driver: Path, tmp_path: Path) -> None:
    sample, reason, description, *_ = ask(driver, tmp_path, TWO_GPUS + "0 fail.nvmlDeviceGetHandleByIndex 15\n")
    assert sample[0] == {"index": 0}
    assert sample[1]["utilisation"] == 0.0
    assert reason == description["reason"] == "GPU 0 does not answer"


def test_a_driver_that_does_not_run_has_a_reason(driver: Path, tmp_path: Path) -> None:
    sample, reason, description, *_ = ask(driver, tmp_path, "-1 fail.nvmlInit 9\n")
    assert sample == []
    assert reason == "NVML does not open: Driver Not Loaded"
    assert description == {"gpus": [], "reason": reason}


def test_a_machine_without_a_driver_has_a_reason(tmp_path: Path) -> None:
    """The library is one of the wrong kind, which the loader refuses as it does one that is absent."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    sample, reason, *_ = ask(tmp_path, tmp_path, "")
    if sys.platform == "linux":
        assert sample == []
        assert reason.startswith("NVML does not open")


def test_in_this_process_it_never_raises() -> None:
    gpus = Gpus({"CUDA_VISIBLE_DEVICES": ""})
    assert gpus.sample() == []
    assert gpus.reason
