"""Whether the GPU can be used, and whether anything about it would slow a training down.

Three sources are compared: what shows that a GPU is there (`hardware/gpu_evidence.py`), what the driver says
(`telemetry/gpu.py`), and a trial in a process of its own, which really multiplies and convolves
(`hardware/cuda_trial.py`). `check_gpu` collects them as `GpuFacts`, from which each rule makes its findings: those
about versions are in `gpu_versions.py`, those about each GPU in `gpu_condition.py`. Whether the model fits the memory
is tried in `planning/memory_fit.py`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from stoker.hardware.cuda_trial import STAGE, TorchFacts
from stoker.hardware.gpu_evidence import (
    WSL_LIBRARY,
    device_files,
    gpu_evidence,
    kernel_driver,
    pci_gpus,
    promised_by,
)
from stoker.preflight.findings import CheckFinding, make_finding, ok, unknown
from stoker.preflight.gpu_condition import gpu_findings, xid_findings
from stoker.preflight.gpu_facts import DRIVER_TIMEOUT_S, GpuFacts, Trial, fix_for
from stoker.preflight.gpu_versions import driver_fix, driver_is_too_old, version_findings
from stoker.preflight.programs import kill_program, start_program
from stoker.profiling.telemetry.environment import detect_container
from stoker.profiling.telemetry.gpu import VERSION_MISMATCH, DriverState, read_driver
from stoker.profiling.telemetry.kernel_log import read_kernel_lines
from stoker.profiling.telemetry.timeouts import TimeoutWorker
from stoker.report import format as fmt

STAGE_TIMEOUT_S, TRIAL_TIMEOUT_S = 20.0, 32.0
"""Of one stage of the trial, and of all. Importing torch takes 3 s, on a busy machine with a cold disk 20 s and more;
CUDA's first start takes 5 s, with many GPUs that are not in persistence mode 20 s."""
IMPORTING = "importing torch"
TRIAL_SECONDS, DEEP_TRIAL_SECONDS = 0.3, 20.0
"""Of timed matrix products on each GPU. A clock that heat lowers needs longer to show."""
NO_GPU_FIX = "use a machine with a GPU; or `--device cpu`, if training on the CPU is meant"
CPU_INSTEAD = "; or `--device cpu`, if training on the CPU is meant"


def check_gpu(
    *,
    device: str | None = None,
    env: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    deep: bool = False,
    read_state: Callable[[Mapping[str, str]], DriverState] = read_driver,
    trial_command: Sequence[str] = (sys.executable, "-m", "stoker.hardware.cuda_trial"),
    stage_timeout_s: float = STAGE_TIMEOUT_S,
    kernel_log: Path = Path("/dev/kmsg"),
) -> list[CheckFinding]:
    """device: as `--device`; root: with /sys, /proc, /dev; the other arguments stand for the machine in tests."""
    if device == "cpu":
        return [ok("device", "training on the CPU was asked for", "--device cpu: GPUs are not looked at")]
    seconds = DEEP_TRIAL_SECONDS if deep else TRIAL_SECONDS
    command = [*trial_command, str(seconds), *([device] if device else [])]
    longer_s = 10 * DEEP_TRIAL_SECONDS if deep else 0.0
    timeouts_s = (stage_timeout_s + longer_s, TRIAL_TIMEOUT_S + longer_s)
    driver, trial = _observe(command, timeouts_s, env, read_state)
    lines = None if driver is None or not driver.num_gpus else read_kernel_lines(log=kernel_log)
    facts = GpuFacts(device=device, env=env, root=root, driver=driver, trial=trial, kernel_lines=lines)
    return [finding for rule in RULES for finding in rule(facts)]


def _observe(
    command: Sequence[str],
    timeouts_s: tuple[float, float],
    env: Mapping[str, str],
    read_state: Callable[[Mapping[str, str]], DriverState],
) -> tuple[DriverState | None, Trial]:
    """The driver before the trial, with clocks and links as they were while the GPU was busiest, and the trial."""
    worker = TimeoutWorker(lambda: lambda: read_state(env), name="driver")
    state = worker.call(DRIVER_TIMEOUT_S)
    busiest = state

    def watch() -> None:
        nonlocal busiest
        if state is not None and state.gpus and (now := worker.call(1.0)) is not None:
            busiest = max(busiest or now, now, key=_utilization)

    trial = run_trial(command, *timeouts_s, watch)
    worker.stop()
    if state is None or busiest is None or len(busiest.gpus) != len(state.gpus):
        return state, trial
    gpus = [
        msgspec.structs.replace(
            gpu, sample=msgspec.structs.replace(under_load.sample, memory_used_bytes=gpu.sample.memory_used_bytes)
        )
        for gpu, under_load in zip(state.gpus, busiest.gpus, strict=True)
    ]  # memory and processes: before the trial
    return msgspec.structs.replace(state, gpus=gpus), trial


def _utilization(state: DriverState) -> float:
    return sum(gpu.sample.utilization or 0.0 for gpu in state.gpus)


def run_trial(
    command: Sequence[str], stage_timeout_s: float, timeout_s: float, watch: Callable[[], None] = lambda: None
) -> Trial:
    """Runs the trial program, which is killed if one stage of it takes longer than `stage_timeout_s`, or all of them
    take longer than `timeout_s`. watch: called several times a second meanwhile."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_program(command, output.fileno(), errors.fileno())
        timed_out, start_s, stage = False, time.monotonic(), ""
        stage_start_s = start_s
        try:
            while True:
                try:
                    process.wait(0.1)
                    break
                except subprocess.TimeoutExpired:
                    now_s = time.monotonic()
                    if stage != (reached := _last_stage(errors)):
                        stage, stage_start_s = reached, now_s
                    if timed_out := now_s - stage_start_s > stage_timeout_s or now_s - start_s > timeout_s:
                        break
                    watch()
        finally:
            kill_program(process)
        stage, took_s = _last_stage(errors), time.monotonic() - stage_start_s
        if timed_out:
            return Trial(facts=None, stage=stage, error=f"was still {stage} after {took_s:.0f} s", timed_out=True)
        output.seek(0)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
        try:
            return Trial(facts=msgspec.json.decode(output.read().splitlines()[-1], type=TorchFacts), stage=stage)
        except (IndexError, msgspec.DecodeError):
            last = next((line for line in reversed(lines) if line.strip() and not line.startswith(STAGE)), "no output")
            return Trial(facts=None, stage=stage, error=f"exit code {process.returncode}: {last.strip()}")


def _last_stage(errors: IO[bytes]) -> str:
    size = os.fstat(errors.fileno()).st_size
    text = os.pread(errors.fileno(), size, 0).decode(errors="replace")  # the process writes at its own position
    return next((line.removeprefix(STAGE) for line in reversed(text.splitlines()) if line.startswith(STAGE)), "")


def device_findings(facts: GpuFacts) -> Iterator[CheckFinding]:
    """Training silently on the CPU, with the exact reason; or the GPUs that torch has used."""
    trial, found = facts.trial, facts.trial.facts
    if trial.timed_out and not gpu_evidence(facts.env, facts.root):
        yield _no_gpu(f"torch did not answer in time: a process {trial.error}")
    elif trial.timed_out and trial.stage in ("", IMPORTING):
        yield unknown(
            "torch_slow", "whether the GPU can be used: torch did not start in time", f"a process {trial.error}",
            "check again when the machine is less busy; `--deep` waits longer",
        )  # fmt: skip
    elif trial.timed_out:
        yield make_finding(
            id="gpu_hangs",
            severity="blocker",
            title=f"the GPU does not answer: {trial.stage} did not end",
            evidence=f"a process that uses it {trial.error}",
            fix="restart the machine or reset the GPU (`nvidia-smi --gpu-reset`); if it comes again, use another "
            "machine" + CPU_INSTEAD,
        )
    elif found is None:
        fails_early = trial.stage in ("", IMPORTING)
        title = "torch does not start" if fails_early else f"{trial.stage} ended the process"
        yield make_finding(
            id="torch_fails" if fails_early else "kernel_fails",
            severity="blocker",
            title=title,
            evidence=trial.error,
            fix=fix_for(trial.error) or f"{sys.executable} -m stoker.hardware.cuda_trial 0.3 shows the whole output",
        )
    elif found.devices:
        yield from _used_devices(found)
    elif found.num_gpus:
        yield make_finding(
            id="gpu_index_invalid",
            severity="blocker",
            title=f"there is no device {facts.device}",
            evidence=f"torch finds {fmt.plural(found.num_gpus, 'GPU')}, numbered from 0",
            fix=f"--device cuda:0 … cuda:{found.num_gpus - 1}",
        )
    elif found.accelerator == (facts.device or "").partition(":")[0] != "":
        yield ok("device", f"torch uses {found.accelerator}", f"torch {found.torch}")
    else:
        finding = silent_cpu(found, facts.driver, env=facts.env, root=facts.root)
        if facts.device is not None:  # training would not fall back to the CPU, but end
            title = finding.title.replace("training would run on the CPU", f"--device {facts.device} does not exist")
            finding = msgspec.structs.replace(finding, title=title)
        yield finding


def _used_devices(found: TorchFacts) -> Iterator[CheckFinding]:
    for device in found.devices:
        where = f"cuda:{device.index}"
        if device.wrong:
            yield make_finding(
                id="gpu_wrong_results",
                severity="blocker",
                title=f"{device.name} computes wrong results",
                evidence=f"compared with the CPU: {device.error}",
                fix="use another machine, and report this one (nvidia-bug-report.sh)",
                place=where,
            )
        elif device.error:
            yield make_finding(
                id="kernel_fails",
                severity="blocker",
                title=f"{device.name or 'the GPU'} does not compute",
                evidence=device.error,
                fix=fix_for(device.error) or "update the driver and torch together",
                place=where,
            )
        else:
            speed = "" if device.tflops is None else f"; {device.tflops:,.0f} TFLOP/s in 16-bit matrix products"
            evidence = f"a matrix product and a convolution agree with the CPU's{speed}"
            yield ok("kernel", f"{device.name} computes", evidence, where)


def silent_cpu(
    found: TorchFacts, driver: DriverState | None, *, env: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> CheckFinding:
    """Why torch has no GPU to use, a blocker, with the exact fix. Also for the short form in `stoker train`."""
    evidence = "; ".join([f"torch {found.torch} finds no GPU", *gpu_evidence(env, root)])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    files, module, container = device_files(root), kernel_driver(root), detect_container(env, root)

    def blocker(id: str, title: str, fix: str, place: str = "", more: str = "") -> CheckFinding:
        text = evidence if not more else f"{evidence}; {more}"
        return make_finding(
            id=id, severity="blocker", title=title, evidence=text, fix=fix + CPU_INSTEAD, place=place
        )  # fmt: skip

    if found.accelerator not in (None, "cuda"):
        name = found.accelerator
        fix = f"`--device {name}` trains on it, untested; `--device cpu` says that the CPU is meant"
        title = f"training would run on the CPU: {name} is used only if it is named"
        return make_finding(id="accelerator_untested", severity="blocker", title=title, evidence=evidence, fix=fix)
    if not gpu_evidence(env, root):
        return _no_gpu(evidence)
    if found.cuda is None and found.rocm is None:
        fix = "install torch and torchvision built for CUDA: pytorch.org/get-started/locally has the command"
        return blocker("cpu_only_build", "training would run on the CPU: torch is a CPU build", fix)
    if visible is not None and driver is not None and driver.num_gpus and not driver.gpus:
        title = f"training would run on the CPU: CUDA_VISIBLE_DEVICES={visible!r} hides the GPUs"
        fix, more = "unset CUDA_VISIBLE_DEVICES", f"the driver has {fmt.plural(driver.num_gpus, 'GPU')}"
        return blocker("gpus_hidden", title, fix, "CUDA_VISIBLE_DEVICES", more)
    if visible is not None and visible.strip() in ("", "-1"):
        title = f"training would run on the CPU: CUDA_VISIBLE_DEVICES={visible!r} hides the GPUs"
        return blocker("gpus_hidden", title, "unset CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    if driver is not None and driver.error == VERSION_MISMATCH:
        title = "the driver was updated, and the old one is still loaded"
        return blocker("driver_mismatch", title, "restart the machine", more=str(driver.reason))
    if container is not None and not files and not (root / WSL_LIBRARY).exists():
        title = f"training would run on the CPU: this {container} container has no GPU"
        fix = {
            "kubernetes": "request one: resources.limits nvidia.com/gpu: 1, on a node with NVIDIA's device plugin",
            "singularity": "start it with --nv",
            "podman": "start it with --device nvidia.com/gpu=all",
        }.get(container, "start it with `docker run --gpus all` (NVIDIA Container Toolkit)")
        return blocker("container_without_gpu", title, fix)
    if module is None and pci_gpus(root):
        title = "training would run on the CPU: the GPU has no driver"
        fix = "install NVIDIA's driver (Ubuntu: `sudo ubuntu-drivers install`); on a cloud, take an image that has it"
        return blocker("driver_missing", title, fix)
    version = (None if driver is None else driver.version) or module
    if old := driver_is_too_old(found, version):
        title = f"training would run on the CPU: {old}"
        return blocker("driver_old", title, driver_fix(found, root), more=found.error)
    title = "training would run on the CPU: torch cannot use the GPU"
    fix = fix_for(found.error) or "`nvidia-smi` says what the driver finds"
    if module is None and not files and (promised := promised_by(env)):
        title = f"training would run on the CPU: {promised} promises a GPU, and there is none"
        fix = "start the container with `--gpus all`, or the job on a node with a GPU"
    reason = found.error or ("" if driver is None else driver.reason or "")
    return blocker("gpu_not_usable", title, fix, more=reason)


def _no_gpu(evidence: str) -> CheckFinding:
    title = "training would run on the CPU: this machine shows no GPU"
    evidence += "; there is no GPU of NVIDIA on the PCI bus, no /dev/nvidia0, no driver"
    return make_finding(id="no_gpu", severity="blocker", title=title, evidence=evidence, fix=NO_GPU_FIX)


RULES: tuple[Callable[[GpuFacts], Iterator[CheckFinding]], ...] = (
    device_findings,
    version_findings,
    gpu_findings,
    xid_findings,
)
