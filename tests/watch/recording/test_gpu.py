"""The driver's numbers through the real nvidia-ml-py, against a driver library of our own that has no GPU behind it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker_watch.recording.telemetry import gpu as gpu_module
from stoker_watch.recording.telemetry.gpu import (
    INITIAL_PID_NAMESPACE_INODE,
    SLOW_SAMPLE_EVERY,
    Gpu,
    GpuSampler,
)
from stoker_watch.runs.schemas import GpuSample
from tests.nvml import Scene, driver_library

TWO_GPUS = """
-1 count 2
-1 driver 580.95.05
-1 cuda 13000
* name NVIDIA H200
* memory_total 150754820096
0 uuid GPU-aaaa0000-1111
1 uuid GPU-bbbb0000-1111
0 utilization 37
0 memory_used 1000000000
0 power_mw 412500
0 power_limit_mw 700000
0 sm_clock 1980
0 temperature 61
0 throttle 0x4
1 utilization 0
1 memory_used 0
"""

H200 = {"name": "NVIDIA H200", "memory_bytes": 150_754_820_096, "mig": None, "vgpu": None,
        "pcie_generation_max": None, "pcie_width_max": None}  # fmt: skip

SAMPLE_THRICE = """
import json, os, pathlib, msgspec
from stoker_watch.recording.telemetry import gpu as gpu_module
from stoker_watch.recording.telemetry.gpu import INITIAL_PID_NAMESPACE_INODE, SLOW_SAMPLE_EVERY, Gpu, GpuSampler
from stoker_watch.runs.schemas import GpuSample
from tests.nvml import Scene, driver_library
gpus = GpuSampler()
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
    library = driver_library(tmp_path_factory.mktemp("driver"))
    if library is None:
        pytest.skip("needs Linux and a C compiler to build the stub of NVIDIA's driver library")
    return library


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
            "index": 0, "utilization": 0.37, "memory_used_bytes": 1_000_000_000, "memory_total_bytes": 150_754_820_096,
            "power_w": 412.5, "power_limit_w": 700.0, "sm_clock_mhz": 1980, "temperature_c": 61, "throttle_reasons": 4,
        },
        {"index": 1, "utilization": 0.0, "memory_used_bytes": 0, "memory_total_bytes": 150_754_820_096},
    ]  # fmt: skip
    assert description == {
        "driver": "580.95.05",
        "cuda_driver": "13.0",
        "gpus": [
            {**H200, "index": 0, "uuid": "GPU-aaaa0000-1111", "power_limit_w": 700.0},
            {**H200, "index": 1, "uuid": "GPU-bbbb0000-1111", "power_limit_w": None},
        ],
    }


VISIBLE = {
    "1": [1],
    "1,0": [1, 0],
    "GPU-bbbb": [1],
    "GPU-bbbb0000-1111,0": [1, 0],
    "0,7,1": [0],
    "0,-1,1": [0],
    "": [],
    "GPU-": [],
    "MIG-cccc": [1],
    "MIG-dddd": [],
}
"""CUDA_VISIBLE_DEVICES → indices of the GPUs that CUDA uses, of TWO_GPUS with one MIG slice."""

SAMPLE_VISIBLE = """
import json, sys
from stoker_watch.recording.telemetry.gpu import GpuSampler
for visible in sys.argv[1:]:
    gpus = GpuSampler({"CUDA_VISIBLE_DEVICES": visible})
    sampled, described = ([gpu.index for gpu in gpus.sample()], [gpu["index"] for gpu in gpus.describe()["gpus"]])
    print(json.dumps([sampled, described, gpus.reason]))
"""


def test_only_the_gpus_that_cuda_may_use_are_sampled(driver: Path, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene", TWO_GPUS + "1.0 uuid MIG-cccc\n1.0 instance 7\n")
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE_VISIBLE, *VISIBLE],
        env=os.environ | scene.variables(driver),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (visible, indices), line in zip(VISIBLE.items(), done.stdout.splitlines(), strict=True):
        sampled, described, reason = json.loads(line)
        assert sampled == described == indices, visible
        assert (reason is None) == bool(indices)
        assert indices or "CUDA_VISIBLE_DEVICES" in reason


def test_a_gpu_that_is_lost_during_the_run_is_a_value(driver: Path, tmp_path: Path) -> None:
    lost = "0 fail.nvmlDeviceGetUtilizationRates 15\n"
    back = "0 fail.nvmlDeviceGetUtilizationRates 0\n"
    _, _, _, after, reason, later, later_reason = ask(driver, tmp_path, TWO_GPUS, after=lost, later=back)
    assert after[0] == {"index": 0}
    assert after[1]["utilization"] == 0.0
    assert reason == later_reason == "GPU 0 does not answer any more: GPU is lost"
    assert later == after, "it is not asked again"


def test_a_gpu_that_was_lost_before_leaves_the_others(driver: Path, tmp_path: Path) -> None:
    sample, reason, description, *_ = ask(driver, tmp_path, TWO_GPUS + "0 fail.nvmlDeviceGetHandleByIndex 15\n")
    assert sample[0] == {"index": 0}
    assert sample[1]["utilization"] == 0.0
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
    gpus = GpuSampler({"CUDA_VISIBLE_DEVICES": ""})
    assert gpus.sample() == []
    assert gpus.reason


# --- everything that a GPU can say

FULL = {
    "count": 1, "name": "H200", "uuid": "GPU-1", "memory_total": 1000, "memory_used": 100, "utilization": 97,
    "memory_utilization": 40, "power_mw": 500_000, "power_limit_mw": 700_000, "energy_mj": 5_000_000, "sm_clock": 1755,
    "memory_clock": 3201, "sm_clock_max": 1980, "temperature": 70, "throttle": "0x8", "pcie_generation": 4,
    "pcie_generation_max": 5, "pcie_width": 8, "pcie_width_max": 16, "ecc_corrected": 3, "ecc_uncorrected": 1,
    "mig_mode": 0, "virtualization": 2, "gpm": 1, "gpm.2": 50, "gpm.3": 33, "gpm.5": 25, "gpm.10": 101, "gpm.20": 2,
    "gpm.21": 4000, "gpm.60": "nan",
}  # fmt: skip

TRACED = """
import json, sys, msgspec, os, pynvml
calls = []
find = pynvml._nvmlGetFunctionPointer
pynvml._nvmlGetFunctionPointer = lambda name: (calls.append(name), find(name))[1]
from stoker_watch.recording.telemetry.gpu import GpuSampler
gpus = GpuSampler()
for _ in range(int(sys.argv[1])):
    calls.clear()
    print(json.dumps([[msgspec.to_builtins(gpu) for gpu in gpus.sample()], calls, os.getpid()]), flush=True)
"""


def samples(driver: Path, scene: Scene, count: int) -> list[tuple[list[GpuSample], list[str], int]]:
    """Of each sample: the GPUs, the driver's functions that were called, the process that asked."""
    clean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", TRACED, str(count)]
    done = subprocess.run(command, env=clean | scene.variables(driver), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return [(msgspec.convert(gpus, list[GpuSample]), calls, pid) for gpus, calls, pid in lines]


def scene_of(tmp_path: Path, gpu: str = "0", **values: object) -> Scene:
    scene = Scene(tmp_path / "scene").say("-1", count=1)
    for key, value in values.items():
        scene.say(gpu, **{key: value})
    return scene


def test_all_values_of_a_new_gpu_have_their_units(driver: Path, tmp_path: Path) -> None:
    (first, _, _), (second, _, _) = samples(driver, scene_of(tmp_path, **FULL), 2)
    expected = GpuSample(
        index=0, utilization=0.97, memory_used_bytes=100, memory_total_bytes=1000, power_w=500.0, power_limit_w=700.0,
        sm_clock_mhz=1755, temperature_c=70, throttle_reasons=8, sm_clock_max_mhz=1980,
        pcie_generation=4, pcie_generation_max=5, pcie_width=8, pcie_width_max=16,
        ecc_corrected=3, ecc_uncorrected=1, mig=False, vgpu=True,
    )  # fmt: skip
    assert first == [expected], "the counters need two samples"
    counted = {
        "sm_active": 0.5, "tensor_active": 0.25, "dram_active": 1.0,
    }  # fmt: skip
    assert second == [msgspec.structs.replace(expected, **counted)], "what is no number, or absent, is None"


def test_an_unsupported_query_is_not_repeated(driver: Path, tmp_path: Path) -> None:
    sampled = samples(driver, scene_of(tmp_path, utilization=5), SLOW_SAMPLE_EVERY + 2)
    assert len(set(sampled[0][1])) > 15
    assert {name for _, calls, _ in sampled[1:] for name in calls} == {"nvmlDeviceGetUtilizationRates"}


def test_costly_values_are_read_rarely_and_repeated_in_between(driver: Path, tmp_path: Path) -> None:
    sampled = samples(driver, scene_of(tmp_path, **FULL), 2 * SLOW_SAMPLE_EVERY)
    for name in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetMigMode"):
        assert [number for number, (_, calls, _) in enumerate(sampled) if name in calls] == [0, SLOW_SAMPLE_EVERY]
    assert [gpus[0].ecc_corrected for gpus, _, _ in sampled] == [3] * 2 * SLOW_SAMPLE_EVERY
    assert max(len(calls) for _, calls, _ in sampled[1:SLOW_SAMPLE_EVERY]) <= 15


def test_a_mig_slice_has_its_own_memory_and_counters(driver: Path, tmp_path: Path) -> None:
    scene = scene_of(tmp_path, **FULL | {"mig_mode": 1})
    scene.say("0.2", uuid="MIG-1", instance=9, memory_total=40, memory_used=4, gpm=1, gpm__2=50)
    sampled = [gpus[0] for gpus, _, _ in samples(driver, scene, 2)][1]
    assert (sampled.mig, sampled.memory_total_bytes, sampled.memory_used_bytes) == (True, 40, 4)
    assert sampled.sm_active == 0.5
    assert sampled.utilization is None, "the driver has none of a slice"
    assert (sampled.sm_clock_mhz, sampled.power_w, sampled.index) == (1755, 500.0, 0)


@pytest.mark.skipif(
    not Path("/proc/self/ns/pid").exists() or Path("/proc/self/ns/pid").stat().st_ino != INITIAL_PID_NAMESPACE_INODE,
    reason="process numbers are a container's here",
)
def test_processes_of_other_users_are_counted(driver: Path, tmp_path: Path) -> None:
    """Ours are the asking process and its children; the tests' own process is a stranger to it."""
    scene = scene_of(tmp_path, processes=f"{os.getpid()},{os.getppid()}")
    ((gpu,), _, _), *_ = samples(driver, scene, 1)
    assert gpu.other_processes == 2
    gpus_of_our_tree = "from stoker_watch.recording.telemetry.gpu import GpuSampler; import os; "
    gpus_of_our_tree += f"print(GpuSampler(pid={os.getpid()}).sample()[0].other_processes)"
    done = subprocess.run(
        [sys.executable, "-c", gpus_of_our_tree],
        env=os.environ | scene.variables(driver),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1\n", done.stderr


def test_in_a_container_processes_cannot_be_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "INITIAL_PID_NAMESPACE_INODE", 1)
    assert not gpu_module.in_host_pid_namespace()
    assert gpu_module._count_other_processes(Gpu(0, None), None) is None
