"""Whether the GPU can be used, and whether anything about it would slow a training down.

Three sources are compared: what shows that a GPU is there, what the driver says
(`stoker_watch/recording/telemetry/gpu.py`), and a trial in a process of its own, which really multiplies and convolves
(`hardware/cuda_trial.py`). `check_gpu` collects them as `GpuFacts`, from which each rule makes its findings; those
about versions and about each GPU are in `gpu_rules.py`. Whether the model fits the memory is tried in
`planning/check.py`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from stoker.hardware import cuda_trial
from stoker.hardware.cuda_trial import STAGE, TorchFacts, gpu_evidence
from stoker.hardware.device import Device
from stoker.preflight import gpu_rules
from stoker.preflight.catalog import describe, run_program
from stoker.preflight.gpu_rules import GpuFacts, TrialResult
from stoker_watch.diagnosis.endings import line_patterns
from stoker_watch.findings.finding import Finding
from stoker_watch.recording.telemetry.environment import detect_container
from stoker_watch.recording.telemetry.gpu import VERSION_MISMATCH, DriverState, in_host_pid_namespace, read_driver
from stoker_watch.recording.telemetry.machine import TimeoutWorker, list_process_tree, read_kernel_lines
from stoker_watch.report import format as fmt

TRIAL_TIMEOUT_S = 30.0
"""Importing torch takes 3 s, on a busy machine with a cold disk 20 s and more; CUDA's first start takes 5 s, with many
GPUs that are not in persistence mode 20 s."""
IMPORTING = "importing torch"
TRIAL_SECONDS, DEEP_TRIAL_SECONDS = 0.3, 20.0
"""Seconds of timed matrix products on each GPU. A clock that heat lowers needs longer to show."""
SHORT_DRIVER_TIMEOUT_S = 1.5
TENSORFLOW_TIMEOUT_S = 20.0
TENSORFLOW_PROGRAM = (
    "import json, tensorflow as tf; info = tf.sysconfig.get_build_info(); "
    "print(json.dumps([tf.__version__, bool(tf.test.is_built_with_cuda()), len(tf.config.list_physical_devices('GPU')),"
    " str(info.get('cuda_version')), str(info.get('cudnn_version'))]))"
)
CONTAINER_FIXES = {
    "kubernetes": "request one: resources.limits nvidia.com/gpu: 1, on a node with NVIDIA's device plugin",
    "singularity": "start it with --nv",
    "podman": "start it with --device nvidia.com/gpu=all",
}
"""Container → how it gets a GPU."""


def check_gpu(
    *,
    device: str | None = None,
    env: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    deep: bool = False,
    read_state: Callable[[Mapping[str, str]], DriverState] = read_driver,
    trial_command: Sequence[str] = (sys.executable, "-m", "stoker.hardware.cuda_trial"),
    timeout_s: float = TRIAL_TIMEOUT_S,
    kernel_log: Path = Path("/dev/kmsg"),
) -> list[Finding]:
    """device: as `--device`; root: with /sys, /proc, /dev; the other arguments stand for the machine in tests."""
    if device == "cpu":
        text, evidence = "training on the CPU was asked for", "--device cpu: GPUs are not looked at"
        return [describe("device", text=text, evidence=evidence)]
    seconds = DEEP_TRIAL_SECONDS if deep else TRIAL_SECONDS
    command = [*trial_command, str(seconds), *([device] if device else [])]
    limit_s = timeout_s + (10 * DEEP_TRIAL_SECONDS if deep else 0.0)
    driver, trial = _observe(command, limit_s, TimeoutWorker(lambda: read_state(env), name="driver"))
    lines = None if driver is None or not driver.num_gpus else read_kernel_lines(log=kernel_log)
    facts = GpuFacts(device=device, env=env, root=root, driver=driver, trial=trial, kernel_lines=lines)
    rules = (device_findings, gpu_rules.version_findings, gpu_rules.gpu_findings, gpu_rules.xid_findings)
    return [finding for rule in rules for finding in rule(facts)]


def _observe(
    command: Sequence[str], timeout_s: float, worker: TimeoutWorker[DriverState]
) -> tuple[DriverState | None, TrialResult]:
    """The driver before the trial, with clocks and links as they were while the GPU was busiest, and the trial."""
    state = worker.call(gpu_rules.DRIVER_TIMEOUT_S)
    busiest = state

    def watch(_errors: str) -> bool:
        nonlocal busiest
        if state is not None and state.gpus and (now := worker.call(1.0)) is not None:
            busiest = max(busiest or now, now, key=lambda driver: sum(g.sample.utilization or 0.0 for g in driver.gpus))
        return True

    trial = run_trial(command, timeout_s, watch)
    worker.stop()
    if state is None or busiest is None or len(busiest.gpus) != len(state.gpus):
        return state, trial
    gpus = []
    for gpu, under_load in zip(state.gpus, busiest.gpus, strict=True):  # memory and processes: before the trial
        under_load.sample.memory_used_bytes = gpu.sample.memory_used_bytes
        gpus.append(msgspec.structs.replace(gpu, sample=under_load.sample))
    return msgspec.structs.replace(state, gpus=gpus), trial


def run_trial(command: Sequence[str], timeout_s: float, watch: Callable[[str], bool]) -> TrialResult:
    """Runs the trial program, and kills it after a time. watch: as for `run_program`."""
    try:
        ended = run_program(command, timeout_s, watch=watch)
    except subprocess.TimeoutExpired as expired:
        stage = _last_stage((expired.stderr or b"").decode(errors="replace"))
        return TrialResult(facts=None, stage=stage, error=f"was still {stage} after {timeout_s:.0f} s", timed_out=True)
    stage = _last_stage(ended.errors)
    try:
        return TrialResult(facts=msgspec.json.decode(ended.last_line, type=TorchFacts), stage=stage)
    except msgspec.DecodeError:
        return TrialResult(facts=None, stage=stage, error=ended.reason)


def _last_stage(errors: str) -> str:
    return next((line.removeprefix(STAGE) for line in reversed(errors.splitlines()) if line.startswith(STAGE)), "")


def fix_for(error: str) -> str | None:
    """What the diagnosis of dead jobs advises for such a message."""
    lowered = error.lower()
    for pattern in line_patterns():
        is_decisive = not pattern.harmless and pattern.traceback_end is None
        if is_decisive and pattern.literal in lowered and pattern.regex.search(error):
            return pattern.ending.fix
    return None


def device_findings(facts: GpuFacts) -> Iterator[Finding]:
    """Training silently on the CPU, with the exact reason; or the GPUs that torch has used."""
    trial, found = facts.trial, facts.trial.facts
    is_early = trial.stage in ("", IMPORTING)
    if trial.timed_out and not gpu_evidence(facts.env, facts.root):
        yield describe("no_gpu", evidence=f"torch did not answer in time: a process {trial.error}")
    elif trial.timed_out:
        yield describe("torch_slow" if is_early else "gpu_hangs", stage=trial.stage, error=trial.error)
    elif found is None:
        fix = fix_for(trial.error) or f"{sys.executable} -m stoker.hardware.cuda_trial 0.3 shows the whole output"
        id = "torch_fails" if is_early else "kernel_fails/process"
        yield describe(id, stage=trial.stage, error=trial.error, fix=fix)
    elif found.devices:
        yield from map(_used_device, found.devices)
    elif found.num_gpus:
        gpus = fmt.plural(found.num_gpus, "GPU")
        yield describe("gpu_index_invalid", device=facts.device, gpus=gpus, last=found.num_gpus - 1)
    elif found.accelerator == (facts.device or "").partition(":")[0] != "":
        yield describe("device", text=f"torch uses {found.accelerator}", evidence=f"torch {found.torch}")
    else:
        finding = silent_cpu(found, facts.driver, env=facts.env, root=facts.root)
        if facts.device is not None:  # training would not fall back to the CPU, but end
            title = finding.title.replace("training would run on the CPU", f"--device {facts.device} does not exist")
            finding = msgspec.structs.replace(finding, title=title, severity="blocker")
        yield finding


def _used_device(device: cuda_trial.CudaGpu) -> Finding:
    place = f"cuda:{device.index}"
    if device.wrong:
        return describe("gpu_wrong_results", place, name=device.name, error=device.error)
    if device.error:
        fix = fix_for(device.error) or "update the driver and torch together"
        return describe("kernel_fails/device", place, name=device.name or "the GPU", error=device.error, fix=fix)
    speed = "" if device.tflops is None else f"; {device.tflops:,.0f} TFLOP/s in 16-bit matrix products"
    return describe("kernel", place, name=device.name, speed=speed)


def silent_cpu(
    found: TorchFacts, driver: DriverState | None, *, env: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> Finding:
    """Why torch has no GPU to use, with the exact fix: a blocker, but of a machine without one. Also for the short form
    in `stoker train`."""
    shown, visible = gpu_evidence(env, root), env.get("CUDA_VISIBLE_DEVICES")
    files, module = cuda_trial.device_files(root), cuda_trial.kernel_driver(root)
    container, promised = detect_container(env, root), cuda_trial.promised_by(env)
    old = gpu_rules.driver_is_too_old(found, (driver.version if driver else None) or module)
    reason = found.error or (driver.reason if driver else None)
    seen = f"the driver has {fmt.plural(driver.num_gpus or 0, 'GPU')}" if driver else ""
    hides_all = visible is not None and driver is not None and driver.num_gpus and not driver.gpus
    cases: tuple[tuple[object, str, str | None], ...] = (  # whether it holds, the finding, what else shows it
        (found.accelerator not in (None, "cuda"), "accelerator_untested", ""),
        (not shown, "no_gpu", ""),
        (found.cuda is None and found.rocm is None, "cpu_only_build", ""),
        (hides_all, "gpus_hidden", seen),
        (visible is not None and visible.strip() in ("", "-1"), "gpus_hidden", ""),
        (driver is not None and driver.error == VERSION_MISMATCH, "driver_mismatch", driver.reason if driver else ""),
        (container and not files and not (root / cuda_trial.WSL_LIBRARY).exists(), "container_without_gpu", ""),
        (module is None and cuda_trial.pci_gpus(root), "driver_missing", ""),
        (old, "driver_old/cpu", found.error),
        (module is None and not files and promised, "gpu_not_usable/promised", reason),
        (True, "gpu_not_usable/torch", reason),
    )
    id, more = next((id, more) for holds, id, more in cases if holds)
    docker = "start it with `docker run --gpus all` (NVIDIA Container Toolkit)"
    fixes = {
        "container_without_gpu": CONTAINER_FIXES.get(container or "", docker),
        "driver_old/cpu": gpu_rules.driver_fix(found),
        "gpu_not_usable/torch": fix_for(found.error) or "`nvidia-smi` says what the driver finds",
    }
    evidence = "; ".join(filter(None, (f"torch {found.torch} finds no GPU", *shown, more)))
    place = "CUDA_VISIBLE_DEVICES" if id == "gpus_hidden" else ""
    texts = {"name": found.accelerator, "visible": visible, "container": container, "old": old, "promised": promised}
    return describe(id, place, evidence=evidence, fix=fixes.get(id, ""), **texts)


def check_tensorflow(
    *,
    needed: bool,
    gpu_is_there: bool,
    command: Sequence[str] = (sys.executable, "-c", TENSORFLOW_PROGRAM),
    timeout_s: float = TENSORFLOW_TIMEOUT_S,
) -> list[Finding]:
    """Whether TensorFlow sees the GPU, for jobs that use it. needed: such a job is to run, so it is a blocker."""
    try:
        ended = run_program(command, timeout_s)
        version, with_cuda, num_gpus, cuda, cudnn = msgspec.json.decode(
            ended.last_line, type=tuple[str, bool, int, str, str]
        )
    except subprocess.TimeoutExpired:
        return [describe("tensorflow/slow", seconds=timeout_s)]
    except msgspec.DecodeError:
        return [describe("tensorflow/fails", reason=ended.reason)]
    if num_gpus or not gpu_is_there:
        return [describe("tensorflow", version=version, gpus=fmt.plural(num_gpus, "GPU"), cuda=cuda)]
    id = "tensorflow_no_gpu/cuda" if with_cuda else "tensorflow_no_gpu/cpu"
    return [describe(id, severity="blocker" if needed else "warning", version=version, cuda=cuda, cudnn=cudnn)]


# The part of the short form in `stoker train` (`short.py`): without a process, on the device that training has.


def find_reason(env: Mapping[str, str], root: Path) -> Finding | None:
    """Why torch does not use the GPU of this machine; None: it has another accelerator, which is used by name."""
    found = msgspec.convert(cuda_trial.describe_torch() | {"error": cuda_trial.cuda_error()}, TorchFacts)
    return None if found.accelerator not in (None, "cuda") else silent_cpu(found, ask_driver(env), env=env, root=root)


def quick_gpu_findings(device: Device, env: Mapping[str, str], root: Path) -> list[Finding]:
    """Versions, condition and other users of the GPU that training uses."""
    present = cuda_trial.present_device(device.torch_device)
    found = msgspec.convert(cuda_trial.describe_torch() | {"devices": [present]}, TorchFacts)
    driver = ask_driver(env)
    facts = GpuFacts(
        device=str(device.torch_device),
        env=env,
        root=root,
        driver=None if driver is None else without_own(driver, present.index),
        trial=TrialResult(facts=found),
        kernel_lines=read_kernel_lines(),
    )
    return [*gpu_rules.version_findings(facts), *gpu_rules.gpu_findings(facts), *gpu_rules.xid_findings(facts)]


def without_own(driver: DriverState, index: int) -> DriverState:
    """Only the GPU of the training, with the processes of others; none in a container with PIDs of its own."""
    own = set(list_process_tree(os.getpid())) if in_host_pid_namespace() else None
    gpus = []
    for state in driver.gpus[index : index + 1]:
        others = [] if own is None else [process for process in state.processes or [] if process.pid not in own]
        sample = state.sample if others else msgspec.structs.replace(state.sample, memory_used_bytes=None)
        gpus.append(msgspec.structs.replace(state, processes=others, sample=sample))
    return msgspec.structs.replace(driver, gpus=gpus)


def ask_driver(env: Mapping[str, str]) -> DriverState | None:
    worker = TimeoutWorker(lambda: read_driver(env), name="driver")
    state = worker.call(SHORT_DRIVER_TIMEOUT_S)
    worker.stop()
    return state
