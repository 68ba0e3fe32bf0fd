"""What `stoker train` checks before its first step: it refuses to fall back to the CPU, and says what else it sees."""

import os
from pathlib import Path

import msgspec
import pytest
import torch

from stoker.config.settings import from_fields
from stoker.hardware import cuda_trial
from stoker.hardware.device import Device
from stoker.preflight import gpu as probes
from stoker.preflight import host
from stoker.preflight.gpu import without_own
from stoker.preflight.short import quick_findings, require_meant_device
from stoker.training import start
from stoker_watch.errors import PreflightError
from stoker_watch.recording.telemetry.gpu import DriverState, GpuProcess, GpuState
from stoker_watch.runs.schemas import GpuSample

CPU = Device(torch.device("cpu"))


def with_gpu(root: Path) -> Path:
    folder = root / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x10de\n")
    (folder / "class").write_text("0x030000\n")
    return root


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_training_does_not_fall_back_to_the_cpu_where_there_is_a_gpu(tmp_path: Path):
    root = with_gpu(tmp_path)
    with pytest.raises(PreflightError) as refused:
        require_meant_device(CPU, None, env={}, root=root)
    assert refused.value.exit_code == 3
    assert "--device cpu" in str(refused.value.fix)
    assert "0000:3b:00.0" in str(refused.value.cause)
    require_meant_device(CPU, "cpu", env={}, root=root)
    require_meant_device(CPU, None, env={}, root=tmp_path / "without")
    with pytest.raises(PreflightError):
        require_meant_device(CPU, None, env={"NVIDIA_VISIBLE_DEVICES": "all"}, root=tmp_path / "without")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_a_training_asks_before_it_opens_its_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    with pytest.raises(PreflightError, match="CPU"):
        start.resolve_run(from_fields({"data": "absent"}), None)


def test_what_a_training_on_a_cpu_is_told(tmp_path: Path):
    assert [found for found in quick_findings(CPU, tmp_path, env={}) if found.severity == "ok"] == []
    threads = {found.id for found in quick_findings(CPU, tmp_path, env={"OMP_NUM_THREADS": "4096"})}
    assert "threads" in threads


def test_a_training_asks_for_the_room_of_its_own_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As `stoker check` does, which counts the weights of the model; not for those of a large one."""
    monkeypatch.setattr(host.machine, "free_bytes", lambda _: 30 * 2**20)
    found = {finding.id: finding for finding in quick_findings(CPU, tmp_path, env={})}
    assert "needs 2.0 GiB" in found["disk"].title
    size = host.estimate_checkpoint_bytes(631_640, "muon")
    assert size == 4 * 4 * 631_640
    found = {finding.id: finding for finding in quick_findings(CPU, tmp_path, size, env={})}
    assert "needs 38.6 MiB" in found["disk"].title
    assert host.estimate_checkpoint_bytes(631_640, "sgd") == 3 * 4 * 631_640


def test_a_training_on_a_gpu_asks_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    present = cuda_trial.CudaGpu(index=0, name="NVIDIA T4", capability=(7, 5))
    facts = {"torch": "2.11.0", "cuda": "13.0", "num_gpus": 1, "arch_list": ["sm_75"], "accelerator": "cuda"}
    state = DriverState(version="535.1", num_gpus=1, gpus=[GpuState(sample=GpuSample(index=0, throttle_reasons=0x40))])
    monkeypatch.setattr(cuda_trial, "present_device", lambda _: present)
    monkeypatch.setattr(cuda_trial, "describe_torch", lambda: facts)
    monkeypatch.setattr(probes, "ask_driver", lambda _: state)
    found = {
        finding.id: finding.severity for finding in quick_findings(Device(torch.device("cuda", 0)), tmp_path, env={})
    }
    assert found["driver_old"] == "warning"
    assert found["throttled_heat"] == "warning"
    assert "ok" not in found.values()


def test_the_trainings_own_context_is_not_another_user(monkeypatch: pytest.MonkeyPatch):

    processes = [GpuProcess(pid=os.getpid(), memory_bytes=10**9), GpuProcess(pid=1, memory_bytes=10**9)]
    sample = GpuSample(index=0, memory_used_bytes=2 * 10**9, memory_total_bytes=16 * 10**9)
    states = [GpuState(sample=sample, processes=processes), GpuState(sample=msgspec.structs.replace(sample, index=1))]
    driver = DriverState(gpus=states)
    monkeypatch.setattr(probes, "in_host_pid_namespace", lambda: True)
    (gpu,) = without_own(driver, 0).gpus
    assert [process.pid for process in gpu.processes or []] == [1]
    monkeypatch.setattr(probes, "in_host_pid_namespace", lambda: False)
    (gpu,) = without_own(driver, 0).gpus
    assert gpu.processes == []
    assert gpu.sample.memory_used_bytes is None
