"""Each finding about GPUs, red and green: fake trees of /sys, /proc and /dev, the stub of the driver library, and trial
processes that answer, hang or die."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from stoker.hardware import cuda_trial
from stoker.hardware.cuda_trial import CudaGpu, TorchFacts, gpu_evidence, runs_on
from stoker.hardware.selection import select_device
from stoker.preflight.gpu import check_gpu, check_tensorflow, silent_cpu
from stoker.preflight.gpu_rules import GpuFacts, TrialResult, version_findings, xid_findings
from stoker_watch.errors import PreflightError
from stoker_watch.findings.finding import Finding
from stoker_watch.recording.telemetry.gpu import VERSION_MISMATCH, DriverState, GpuState
from stoker_watch.recording.telemetry.machine import KernelLine
from stoker_watch.runs.schemas import GpuSample
from tests.nvml import driver_library

H200 = CudaGpu(index=0, name="NVIDIA H200", capability=(9, 0), tflops=700.0)
TORCH = TorchFacts(
    torch="2.11.0",
    cuda="13.0",
    accelerator="cuda",
    num_gpus=1,
    arch_list=["sm_80", "sm_90", "compute_90"],
    devices=[H200],
    cudnn=91002,
    cudnn_required="9.10.2.21",
    libraries=["/usr/lib/libcuda.so.1", "/venv/nvidia/cudnn/lib/libcudnn.so.9"],
)
BLIND = TorchFacts(torch="2.11.0", cuda="13.0")
"""A torch with CUDA that finds no GPU."""
ONE_GPU = DriverState(version="580.95.05", num_gpus=1, gpus=[GpuState(sample=GpuSample(index=0), name="NVIDIA H200")])


def machine(
    root: Path, *, pci: bool = False, files: bool = False, module: str = "", container: bool = False, more: str = ""
) -> Path:
    """A tree with what shows a GPU."""
    if pci:
        write(root / "sys/bus/pci/devices/0000:3b:00.0", vendor="0x10de\n", **{"class": "0x030200\n"})
    write(root / "sys/bus/pci/devices/0000:00:02.0", vendor="0x1af4\n", **{"class": "0x030000\n"})
    if files:
        write(root / "dev", nvidia0="", nvidiactl="")
    if module:
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {module}  Release Build\n"
        write(root / "proc/driver/nvidia", version=text)
    if container:
        write(root, **{".dockerenv": ""})
    if more:
        write((root / more).parent, **{Path(more).name: ""})
    return root


def write(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)


def by_id(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings}


# --- training on the CPU


@pytest.mark.parametrize(
    ("tree", "found", "env", "driver", "id", "words"),
    [
        ({}, BLIND, {}, None, "no_gpu", "`--device cpu`"),
        ({"pci": True, "files": True, "module": "580.1"}, TorchFacts(torch="2.11.0+cpu"), {}, None, "cpu_only_build",
         "built for CUDA"),
        ({"pci": True, "files": True, "module": "580.1"}, BLIND, {"CUDA_VISIBLE_DEVICES": ""}, None, "gpus_hidden",
         "unset CUDA_VISIBLE_DEVICES"),
        ({"files": True}, BLIND, {"CUDA_VISIBLE_DEVICES": "3"}, DriverState(num_gpus=2), "gpus_hidden", "unset CUDA"),
        ({"files": True, "module": "580.1"}, BLIND, {}, DriverState(reason="mismatch", error=VERSION_MISMATCH),
         "driver_mismatch", "restart the machine"),
        ({"pci": True, "module": "580.1", "container": True}, BLIND, {}, None, "container_without_gpu", "--gpus all"),
        ({"container": True}, BLIND, {"NVIDIA_VISIBLE_DEVICES": "all"}, None, "container_without_gpu", "--gpus all"),
        ({"pci": True}, BLIND, {}, None, "driver_missing", "install NVIDIA's driver"),
        ({"pci": True, "files": True, "module": "470.1"}, BLIND, {}, None, "driver_old", "580 or newer"),
        ({"files": True, "module": "580.1"},
         msgspec.structs.replace(BLIND, error="CUDA driver initialization failed, you might not have a CUDA gpu."), {},
         ONE_GPU, "gpu_not_usable", ""),
        ({}, BLIND, {"SLURM_JOB_GPUS": "0"}, None, "gpu_not_usable", "a node with a GPU"),
        ({}, msgspec.structs.replace(BLIND, accelerator="mps"), {}, None, "accelerator_untested", "--device mps"),
    ],
)  # fmt: skip
def test_training_silently_on_the_cpu_is_a_blocker_with_its_reason(
    tmp_path: Path,
    tree: dict[str, Any],
    found: TorchFacts,
    env: dict[str, str],
    driver: DriverState | None,
    id: str,
    words: str,
):
    finding = silent_cpu(found, driver, env=env, root=machine(tmp_path, **tree))
    assert (finding.severity, finding.id) == ("warning" if id == "no_gpu" else "blocker", id)
    assert words in finding.fix
    assert "--device cpu" in finding.fix
    assert "CPU" in finding.title or id == "driver_mismatch"


@pytest.mark.parametrize(
    ("env", "shown"),
    [({}, False), ({"NVIDIA_VISIBLE_DEVICES": "void"}, False), ({"SLURM_GPUS_ON_NODE": "0"}, False),
     ({"NVIDIA_VISIBLE_DEVICES": "0"}, True), ({"SLURM_GPUS_ON_NODE": "2"}, True),
     ({"CUDA_VISIBLE_DEVICES": ""}, False)],
)  # fmt: skip
def test_what_promises_a_gpu(tmp_path: Path, env: dict[str, str], shown: bool):
    assert bool(gpu_evidence(env, machine(tmp_path))) is shown
    assert gpu_evidence(env, machine(tmp_path, pci=True))


# --- the trial process


def trial(tmp_path: Path, program: str, *, device: str | None = None, **options: Any) -> list[Finding]:
    options = {"read_state": lambda _: ONE_GPU, "env": {}, "kernel_log": tmp_path / "absent"} | options
    root = machine(tmp_path, pci=True, files=True, module="580.95.05")
    return check_gpu(device=device, root=root, trial_command=[sys.executable, "-c", program], **options)


def answering(facts: TorchFacts) -> str:
    return f"print({msgspec.json.encode(facts).decode()!r})"


def with_device(**changes: Any) -> TorchFacts:
    return msgspec.structs.replace(TORCH, devices=[msgspec.structs.replace(H200, **changes)])


STAGES = "import sys; print('stage: convolution on cuda:0', file=sys.stderr, flush=True); "


@pytest.mark.parametrize(
    ("program", "id", "severity", "words"),
    [
        (answering(TORCH), "kernel", "ok", "700 TFLOP/s"),
        (STAGES + "import signal; signal.pause()", "gpu_hangs", "blocker", "convolution on cuda:0"),
        (STAGES + "import os; os.abort()", "kernel_fails", "blocker", "convolution on cuda:0"),
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "torch_fails", "blocker", "libcudart"),
        (answering(with_device(error="CUDA error: no kernel image is available for execution on the device")),
         "kernel_fails", "blocker", "no kernel image"),
        (answering(with_device(error="relative errors of 3", wrong=True)), "gpu_wrong_results", "blocker", "of 3"),
        (answering(BLIND), "gpu_not_usable", "blocker", ""),
    ],
)  # fmt: skip
def test_a_trial_that_answers_hangs_or_dies(tmp_path: Path, program: str, id: str, severity: str, words: str):
    found = by_id(trial(tmp_path, program, timeout_s=0.5 if "pause" in program else 25.0))
    assert found[id].severity == severity
    assert words in found[id].title + found[id].evidence_text
    assert severity == "ok" or "kernel" not in found
    assert severity == "ok" or found[id].fix


def test_a_machine_that_is_slow_is_not_a_gpu_that_hangs(tmp_path: Path):
    program = "import signal, sys; print('stage: importing torch', file=sys.stderr, flush=True); signal.pause()"
    assert by_id(trial(tmp_path, program, timeout_s=0.3))["torch_slow"].severity == "unknown"
    root = machine(tmp_path / "without")
    (found,) = check_gpu(
        env={}, root=root, trial_command=[sys.executable, "-c", STAGES + "import signal; signal.pause()"],
        read_state=lambda _: DriverState(reason="no library"), timeout_s=0.3,
    )  # fmt: skip
    assert (found.id, found.severity) == ("no_gpu", "warning")


def test_a_device_that_does_not_exist_is_named(tmp_path: Path):
    facts = msgspec.structs.replace(TORCH, devices=[], num_gpus=2)
    assert by_id(trial(tmp_path, answering(facts), device="cuda:5"))["gpu_index_invalid"].severity == "blocker"
    found = by_id(trial(tmp_path, answering(BLIND), device="cuda"))["gpu_not_usable"]
    assert found.title.startswith("--device cuda does not exist")


def test_a_cpu_that_was_asked_for_is_in_order(tmp_path: Path):
    assert [finding.severity for finding in trial(tmp_path, "raise SystemExit(1)", device="cpu")] == ["ok"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU of NVIDIA")
def test_what_this_torch_says_without_a_gpu():
    facts = msgspec.json.decode(msgspec.json.encode(cuda_trial.run_trial(0.0, None)), type=TorchFacts)
    assert facts.torch == str(torch.__version__)
    assert (facts.num_gpus, facts.devices) == (0, [])
    assert bool(facts.error) is (facts.cuda is not None)
    assert cuda_trial.loaded_libraries() == [path for path in cuda_trial.loaded_libraries() if "libcud" in path]


# --- versions


def versions(tmp_path: Path, torch: TorchFacts, *, driver: str | None = "580.95.05") -> dict[str, Finding]:
    state = DriverState(version=driver, num_gpus=1)
    trial = TrialResult(facts=torch)
    facts = GpuFacts(device=None, env={}, root=tmp_path, driver=state, trial=trial, kernel_lines=None)
    return by_id(list(version_findings(facts)))


def test_matching_versions_are_in_order(tmp_path: Path):
    assert {finding.severity for finding in versions(tmp_path, TORCH).values()} == {"ok"}


@pytest.mark.parametrize(
    ("cuda", "driver", "old"),
    [("13.0", "579.99", True), ("13.2", "580.65.06", False), ("12.8", "524.9", True), ("12.1", "525.60.13", False),
     ("11.8", "449.0", True), ("11.8", "450.80.02", False), ("14.0", "580.1", False)],
)  # fmt: skip
def test_the_driver_must_be_new_enough_for_the_runtime(tmp_path: Path, cuda: str, driver: str, old: bool):
    broken = with_device(error="CUDA driver version is insufficient for CUDA runtime version")
    for built, severity in ((TORCH, "warning"), (broken, "blocker")):
        found = versions(tmp_path, msgspec.structs.replace(built, cuda=cuda), driver=driver)
        assert ("driver_old" in found) is old
        if old:
            assert found["driver_old"].severity == severity
            assert "install driver" in found["driver_old"].fix


def test_forward_compatibility_packages(tmp_path: Path):
    libraries = ["/usr/local/cuda-13.0/compat/libcuda.so.580.95.05"]
    found = versions(tmp_path, msgspec.structs.replace(TORCH, libraries=libraries), driver="535.1")
    assert found["driver"].severity == "ok"
    assert "forward-compatibility" in found["driver"].title
    assert versions(tmp_path / "none", TORCH, driver=None)["driver"].severity == "unknown"


@pytest.mark.parametrize(
    ("arches", "capability", "runs"),
    [(["sm_80", "sm_90"], (8, 9), True), (["sm_80", "sm_90"], (12, 0), False), (["sm_90", "compute_90"], (12, 0), True),
     (["sm_90a"], (9, 0), True), (["compute_90a"], (9, 0), True), (["sm_90a"], (10, 0), False),
     (["sm_75", "sm_80"], (7, 0), False), (["sm_100", "sm_120"], (12, 0), True), (["sm_86"], (8, 0), False),
     ([], (9, 0), True)],
)  # fmt: skip
def test_architectures(tmp_path: Path, arches: list[str], capability: tuple[int, int], runs: bool):
    assert runs_on(arches, capability) is runs
    torch = msgspec.structs.replace(with_device(capability=capability), arch_list=arches)
    assert ("arch_missing" in versions(tmp_path, torch)) is not runs


@pytest.mark.parametrize(
    ("name", "capability", "fix"),
    [("Tesla V100-SXM2-16GB", (7, 0), "CUDA 12.6"), ("NVIDIA Next", (13, 0), "newest CUDA")],
)
def test_a_training_on_a_gpu_without_kernels_is_refused_before_it_computes(
    name: str, capability: tuple[int, int], fix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    properties = types.SimpleNamespace(name=name, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
    with pytest.raises(PreflightError, match=name) as caught:
        select_device("cuda")
    assert "sm_75 sm_80" in (caught.value.cause or "")
    found = msgspec.structs.replace(with_device(capability=capability), arch_list=["sm_80"])
    for text in (caught.value.fix, versions(tmp_path, found)["arch_missing"].fix):
        assert fix in (text or "")


def test_cudnn_old_loaded_twice_or_not_the_one_it_was_built_for(tmp_path: Path):
    replace = msgspec.structs.replace
    old = versions(tmp_path, replace(TORCH, cudnn=90100))["cudnn_old"]
    assert old.severity == "warning"
    assert "9.1.0 is older than the 9.10.2" in old.title
    assert "8.9.7" in versions(tmp_path, replace(TORCH, cudnn=8907))["cudnn_old"].title
    both = [*TORCH.libraries, "/usr/lib/x86_64-linux-gnu/libcudnn_ops.so.8"]
    assert versions(tmp_path, replace(TORCH, libraries=both))["cudnn_twice"].severity == "warning"
    mismatch = replace(TORCH, cudnn=None, cudnn_error="PyTorch was compiled against (9, 1, 0) but found (8, 9, 7)")
    assert versions(tmp_path, mismatch)["cudnn_mismatch"].severity == "blocker"


# --- what the driver says, through the real nvidia-ml-py and a stub of the driver's library


HEALTHY = """
-1 count 1
-1 driver 580.95.05
0 name NVIDIA H200
0 bus_id 00000000:3B:00.0
0 utilization 90
0 memory_total 150000000000
0 memory_used 500000000
0 throttle 0x4
0 sm_clock 1500
0 sm_clock_max 1980
0 temperature 60
0 pcie_width 16
0 pcie_width_max 16
0 pcie_generation 5
0 pcie_generation_max 5
0 ecc_uncorrected 0
0 mig_mode 0
0 virtualization 0
0 persistence 1
0 compute_mode 0
0 rows_pending 0
0 rows_failed 0
0 processes none
"""
SCENES = {
    "healthy": ("", "gpu_state", "ok", ""),
    "lost": ("0 fail.nvmlDeviceGetHandleByIndex 15", "gpu_lost", "blocker", "does not answer"),
    "in_use": (f"0 processes {os.getpid()}:9000000000,999999\n0 memory_used 140000000000", "gpu_in_use", "warning",
               f"PID {os.getpid()} holds 8.4 GiB, "),
    "defunct": ("0 memory_used 140000000000", "gpu_in_use", "warning", "no process is named"),
    "exclusive": (f"0 processes {os.getpid()}\n0 compute_mode 3", "gpu_in_use", "blocker", "one process only"),
    "prohibited": ("0 compute_mode 2", "compute_mode", "blocker", "forbids"),
    "mig": ("0 mig_mode 1\n0.0 uuid MIG-1\n0.0 memory_total 20000000000\n0.0 memory_used 1\n0.0 name H200 MIG 1g\n"
            "0.0 processes none\n0.0 instance 1", "mig", "warning", "18.6 GiB"),
    "vgpu": ("0 virtualization 2", "vgpu", "warning", "vGPU"),
    "ecc": ("0 ecc_uncorrected 2", "ecc_errors", "warning", "2 uncorrected memory errors"),
    "rows pending": ("0 rows_pending 1", "ecc_errors", "warning", "waits for a reset"),
    "rows failed": ("0 rows_failed 1", "ecc_errors", "warning", "cannot be replaced"),
    "heat": ("0 throttle 0x40", "throttled_heat", "warning", "60 °C"),
    "brake": ("0 throttle 0x80", "throttled_power", "warning", "power brake"),
    "set clocks": ("0 throttle 0x2", "clocks_set", "warning", "set by someone"),
    "lanes": ("0 pcie_width 4", "pcie_degraded", "warning", "25 %"),
    "generation": ("0 pcie_generation 3", "pcie_degraded", "warning", "25 %"),
    "idle link": ("0 pcie_generation 1\n0 utilization 0", "gpu_state", "ok", ""),
    "persistence": ("0 persistence 0", "persistence", "warning", "nvidia-smi -pm 1"),
    "mismatch": ("-1 fail.nvmlInit 18", "driver_mismatch", "blocker", "restart"),
    "hangs": ("-1 hang.nvmlDeviceGetCount 1", "driver_hangs", "blocker", "does not answer"),
}  # fmt: skip
"""Lines after HEALTHY; the finding, its severity, and words of it."""

ASK = """
import json, pathlib, sys, msgspec
from stoker.preflight import gpu
from stoker.hardware.cuda_trial import TorchFacts
import os
given = json.loads(sys.argv[1])
gpu.DRIVER_TIMEOUT_S = 2.0
answers = {}
for name, (scene, program, timeout_s) in given["scenes"].items():
    if name == "hangs":
        gpu.DRIVER_TIMEOUT_S = 0.2
    pathlib.Path(os.environ["NVML_STUB"]).write_text(scene)
    found = gpu.check_gpu(
        env={}, root=pathlib.Path(given["root"]), trial_command=[sys.executable, "-S", "-c", program],
        timeout_s=timeout_s, kernel_log=pathlib.Path("/absent"),
    )
    answers[name] = msgspec.to_builtins(found)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Finding]]:
    """The findings in each of SCENES: one process asks in all of them."""
    library = driver_library(tmp_path_factory.mktemp("driver"))
    if library is None:
        pytest.skip("needs Linux and a C compiler to build the stub of NVIDIA's driver library")
    folder = tmp_path_factory.mktemp("scenes")
    (folder / "root").mkdir()
    write(folder / "root/dev", nvidia0="")
    (folder / "root/proc").symlink_to("/proc")
    programs = {name: answering(TORCH) for name in SCENES}
    programs["mismatch"], programs["hangs"] = answering(BLIND), STAGES + "import signal; signal.pause()"
    given = {
        "root": str(folder / "root"),
        "scenes": {
            name: (HEALTHY + lines + "\n", programs[name], 0.5 if name == "hangs" else 25.0)
            for name, (lines, *_) in SCENES.items()
        },
    }
    clean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env = clean | {"LD_LIBRARY_PATH": str(library), "NVML_STUB": str(folder / "scene")}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(given)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    return {name: by_id(msgspec.convert(found, list[Finding])) for name, found in answers.items()}


@pytest.mark.parametrize("name", SCENES)
def test_what_the_driver_says_of_a_gpu(scenes: dict[str, dict[str, Finding]], name: str):
    _, id, severity, words = SCENES[name]
    finding = scenes[name][id]
    assert finding.severity == severity
    assert words in " ".join((finding.title, finding.evidence_text, finding.fix))
    red = {other for other, found in scenes[name].items() if found.severity in ("blocker", "warning")}
    if name not in ("hangs", "exclusive", "mig"):
        assert red == ({id} if severity != "ok" else set())
    assert "kernel" in scenes[name] or name in ("mismatch", "hangs")


def test_a_process_on_the_gpu_is_named_with_its_owner(scenes: dict[str, dict[str, Finding]]):
    evidence = scenes["in_use"]["gpu_in_use"].evidence_text
    assert "holds 8.4 GiB" in evidence
    assert psutil.Process().cmdline()[0] in evidence
    assert "PID 999999, not visible from here" in evidence


def test_errors_of_the_gpu_in_the_kernels_log(tmp_path: Path):
    def found(lines: list[KernelLine] | None) -> dict[str, Finding]:
        facts = GpuFacts(
            device=None, env={}, root=tmp_path, driver=ONE_GPU, trial=TrialResult(facts=TORCH), kernel_lines=lines
        )
        return by_id(list(xid_findings(facts)))

    fallen = KernelLine(1.0, "xid", "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.")
    of_a_program = KernelLine(2.0, "xid", "NVRM: Xid (PCI:0000:3b:00): 13, pid=7, Graphics Exception")
    assert found([fallen, of_a_program])["xid"].severity == "warning"
    assert "fallen off the bus" in found([fallen])["xid"].title
    assert found([of_a_program])["xid"].severity == "ok"
    assert found(None)["xid"].severity == "unknown"


# --- TensorFlow


@pytest.mark.parametrize(
    ("answer", "needed", "there", "severity"),
    [(["2.16.1", True, 1, "12.3", "8"], True, True, "ok"), (["2.16.1", True, 0, "12.3", "8"], True, True, "blocker"),
     (["2.16.1", False, 0, "None", "None"], False, True, "warning"),
     (["2.16.1", True, 0, "12.3", "8"], True, False, "ok"),
     (None, True, True, "unknown")],
)  # fmt: skip
def test_tensorflow_sees_the_gpu(answer: list[object] | None, needed: bool, there: bool, severity: str):
    program = f"print('log'); print({json.dumps(answer)!r})" if answer else "raise ImportError('libcudnn.so.8')"
    command = [sys.executable, "-S", "-c", program]
    (finding,) = check_tensorflow(needed=needed, gpu_is_there=there, command=command)
    assert finding.severity == severity
