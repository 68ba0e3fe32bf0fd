"""The part of the short form that is about GPUs: why torch finds none, and the condition of the one that it uses."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stoker.hardware import cuda_trial
from stoker.hardware.cuda_trial import TorchFacts
from stoker.hardware.device import Device
from stoker.preflight.findings import CheckFinding
from stoker.preflight.gpu import silent_cpu
from stoker.preflight.gpu_condition import gpu_findings, xid_findings
from stoker.preflight.gpu_facts import GpuFacts, Trial
from stoker.preflight.gpu_versions import version_findings
from stoker.profiling.telemetry.gpu import DriverState, in_host_pid_namespace, read_driver
from stoker.profiling.telemetry.kernel_log import read_kernel_lines
from stoker.profiling.telemetry.processes import list_process_tree
from stoker.profiling.telemetry.timeouts import TimeoutWorker

DRIVER_TIMEOUT_S = 1.5


def find_reason(env: Mapping[str, str], root: Path) -> CheckFinding | None:
    """Why torch does not use the GPU of this machine; None: it has another accelerator, which is used by name."""
    found = msgspec.convert(cuda_trial.describe_torch() | {"error": cuda_trial.cuda_error()}, TorchFacts)
    return None if found.accelerator not in (None, "cuda") else silent_cpu(found, _ask_driver(env), env=env, root=root)


def quick_gpu_findings(device: Device, env: Mapping[str, str], root: Path) -> list[CheckFinding]:
    """Versions, condition and other users of the GPU that training uses."""
    facts = _facts_of(device, env, root)
    return [*version_findings(facts), *gpu_findings(facts), *xid_findings(facts)]


def _facts_of(device: Device, env: Mapping[str, str], root: Path) -> GpuFacts:
    present = cuda_trial.present_device(device.torch_device)
    found = msgspec.convert(cuda_trial.describe_torch() | {"devices": [present]}, TorchFacts)
    driver = _ask_driver(env)
    return GpuFacts(
        device=str(device.torch_device),
        env=env,
        root=root,
        driver=None if driver is None else without_own(driver, present.index),
        trial=Trial(facts=found),
        kernel_lines=read_kernel_lines(),
    )


def without_own(driver: DriverState, index: int) -> DriverState:
    """Only the GPU of the training, with the processes that are not part of it. In a container with PIDs of its own,
    they cannot be told apart: none is kept."""
    own = set(list_process_tree(os.getpid())) if in_host_pid_namespace() else None
    gpus = []
    for state in driver.gpus[index : index + 1]:
        others = [] if own is None else [process for process in state.processes or [] if process.pid not in own]
        sample = state.sample if others else msgspec.structs.replace(state.sample, memory_used_bytes=None)
        gpus.append(msgspec.structs.replace(state, processes=others, sample=sample))
    return msgspec.structs.replace(driver, gpus=gpus)


def _ask_driver(env: Mapping[str, str]) -> DriverState | None:
    worker = TimeoutWorker(lambda: lambda: read_driver(env), name="driver")
    state = worker.call(DRIVER_TIMEOUT_S)
    worker.stop()
    return state
