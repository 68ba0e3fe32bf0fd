"""`stoker check`: asks every probe, each within its time, and puts what they found in order.

A probe that hangs or raises becomes a finding `unknown`: the others are still asked. The probes are in
`stoker/preflight/`, but for the worst-case batch of a training: it is tried as the training does it
(`defaults/dry_run.py`), in a process of its own (`python -m stoker.planning.check config.toml`). On an accelerator its
speed is then measured; a CPU's memory is counted, and its speed estimated.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.config.settings import Config, from_toml, to_toml
from stoker.data.index import REQUIRED_SPLITS, Index, find_refusals, open_index_of
from stoker.hardware.cuda_trial import gpu_evidence
from stoker.planning import CheckRequest
from stoker.preflight.access import check_writable
from stoker.preflight.catalog import make_finding, refused, run_program, unknown
from stoker.preflight.cloud import check_cloud
from stoker.preflight.data_path import check_data_path
from stoker.preflight.gpu import check_gpu, check_tensorflow
from stoker.preflight.host import Host, check_host, estimate_checkpoint_bytes
from stoker.preflight.network import check_network
from stoker.preflight.static import check_sources
from stoker.preflight.tpu import check_tpu, concerns_tpu
from stoker.preflight.variables import check_variables
from stoker.training.cluster import find_place
from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, OutOfMemoryError, StokerError
from stoker_watch.findings.finding import Finding, worst_first
from stoker_watch.recording.telemetry.machine import TimeoutWorker
from stoker_watch.report import format as fmt
from stoker_watch.storage.uri import is_uri

TOTAL_S, DEEP_TOTAL_S = 55.0, 900.0
"""Seconds for all probes; what is left is for imports and printing."""
DEEP_FACTOR = 6
"""Time limits of the probes with `--deep`, relative to those without."""
DATA_PATH_S, NETWORK_S = 5.0, 10.0
"""Seconds of measuring."""
_IMPORTS_TENSORFLOW = re.compile(r"^\s*(?:import|from)\s+(?:tensorflow|keras|tf_keras)\b", re.MULTILINE)


class ProbeTime(msgspec.Struct, frozen=True, kw_only=True):
    probe: str
    seconds: float
    complete: bool
    """Whether it answered in its time."""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `stoker check` found."""

    findings: list[Finding]
    """The worst first."""
    probes: list[ProbeTime]
    seconds: float

    @property
    def blocked(self) -> bool:
        """Whether training would fail, or would not do what was asked."""
        return any(finding.severity == "blocker" for finding in self.findings)


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
    """The worst-case batch of a training, which fits its device."""

    text: str
    """retinanet_resnet50_fpn on NVIDIA L4 takes."""
    is_cpu: bool
    image_side: int
    images_per_s: float
    """Images per second of all devices; measured on one, except on a CPU."""
    checkpoint_bytes: int
    decode_core_s: float | None = None
    """Core-seconds to decode and resize an image; None: could not be measured."""


class Prober:
    """Asks probes one after the other, so that they do not disturb each other's measurements."""

    def __init__(self, total_s: float, *, factor: float = 1.0, on_probe: Callable[[str], None] | None = None) -> None:
        self.findings: list[Finding] = []
        self.times: list[ProbeTime] = []
        self._end_s, self._factor = time.monotonic() + total_s, factor
        self._on_probe = on_probe

    def left_s(self, limit_s: float) -> float:
        """Seconds that a probe with this limit may take now."""
        return min(limit_s * self._factor, self._end_s - time.monotonic())

    def ask(self, name: str, limit_s: float, probe: Callable[[], list[Finding]]) -> None:
        """Adds what the probe finds; or why it found nothing."""
        if self._on_probe is not None:
            self._on_probe(name)
        left_s, start_s = self.left_s(limit_s), time.monotonic()
        id = name.replace(" ", "_")
        if left_s <= 0:
            self.findings += [unknown(id, f"{name}: was not asked: the time was over", "", "`--deep` takes the time")]
            return
        worker, is_complete = TimeoutWorker(probe, name=f"check: {name}"), True
        try:
            found = worker.call(left_s)
        except Exception as error:  # noqa: BLE001 (a probe that fails must not hide what the others find)
            evidence = f"{type(error).__name__}: {error}".partition("\n")[0]
            found = [unknown(id, f"{name}: could not be checked", evidence)]
        if found is None:
            found = [unknown(id, f"{name}: did not answer within {left_s:.0f} s", "", "`--deep` waits longer")]
            is_complete = False
        worker.stop()
        self.findings += found
        self.times.append(ProbeTime(probe=name, seconds=time.monotonic() - start_s, complete=is_complete))


def run_checks(request: CheckRequest, *, on_probe: Callable[[str], None] | None = None) -> CheckReport:
    """Asks all probes that apply. on_probe: called with the name of each one before it is asked."""
    start_s = time.monotonic()
    total_s, factor = (DEEP_TOTAL_S, DEEP_FACTOR) if request.deep else (TOTAL_S, 1)
    prober = Prober(total_s, factor=factor, on_probe=on_probe)
    if request.driver is not None and not re.fullmatch(r"\d{3}(\.\d{1,4}){0,2}", request.driver):
        raise ConfigError(f"--driver {request.driver!r} is not the version of a driver.", choices=["535", "535.104.05"])
    files = {name: getattr(request, name) for name in ("dockerfile", "requirements", "script", "job")}
    if any(files.values()):
        prober.ask("files", 5.0, lambda: check_sources(**files, driver=request.driver))
    if not any(files.values()) or "data" in request.config.set_fields():  # else it is the CI of an image
        _check_machine_and_data(request, prober)
    seconds = time.monotonic() - start_s
    return CheckReport(findings=worst_first(prober.findings), probes=prober.times, seconds=seconds)


def _check_machine_and_data(request: CheckRequest, prober: Prober) -> None:
    config, env, deep = request.config, request.env, request.deep
    data, device = config.set_fields().get("data"), config.set_fields().get("device")
    # First: the ranks of a job ask together, and a process alone needs no time for it.
    prober.ask("network", 50.0, lambda: check_network(NETWORK_S, find_place=find_place, env=env))
    if concerns_tpu(device):
        prober.ask("tpu", 5.0, lambda: check_tpu(device=device))
    else:
        prober.ask("gpu", 35.0, lambda: check_gpu(device=device, env=env, deep=deep))
    if device != "cpu" and importlib.util.find_spec("tensorflow") is not None:
        needed = request.script is not None and _imports_tensorflow(request.script)
        prober.ask("tensorflow", 22.0, lambda: check_tensorflow(needed=needed, gpu_is_there=bool(gpu_evidence(env))))
    prober.ask("variables", 5.0, lambda: check_variables(env))
    prober.ask("cloud", 5.0, lambda: check_cloud(env, run_dir=request.run_dir))
    run_dir = request.run_dir or env.get("AIP_CHECKPOINT_DIR") or "runs"
    prober.ask("access", 10.0, lambda: [check_writable(run_dir)])
    num_gpus = sum(finding.id == "kernel" for finding in prober.findings)
    opened: list[Index] = []
    fits: list[MemoryFit] = []
    if data is not None:
        prober.ask("data", 30.0, lambda: _open_data(config, opened))
    if opened:

        def check_memory() -> list[Finding]:
            answer = ask_memory_fit(config, prober.left_s(36.0) - 1, request.devices)
            fits.extend(filter(None, [answer.fit]))
            return [answer.finding]

        if num_gpus or device is not None:  # else there is nothing to try it on; `stoker plan` predicts it
            prober.ask("memory fit", 36.0, check_memory)
        fit = fits[0] if fits else None
        text = "the model takes" if fit is None else fit.text
        demand = None if fit is None else fit.images_per_s
        seconds = DATA_PATH_S * (DEEP_FACTOR if deep else 1)
        side = {} if fit is None else {"max_side": fit.image_side}
        prober.ask("data path", 15.0, lambda: check_data_path(
            opened[0], demand_images_per_s=demand, demand_text=text, seconds=seconds, env=env, **side
        ))  # fmt: skip
    host = _describe_host(request, num_gpus, fits[0] if fits else None)
    prober.ask("host", 15.0, lambda: check_host(host))


def _imports_tensorflow(script: Path) -> bool:
    try:
        return _IMPORTS_TENSORFLOW.search(regular_files.read_text(script, errors="replace")) is not None
    except OSError:  # the probe of the files reports it
        return False


def _open_data(config: Config, opened: list[Index]) -> list[Finding]:
    """Opens the data as a training does; a data set that it would refuse is a blocker."""
    try:
        index = open_index_of(config.data)
        limits = config.data.max_bad_fraction, config.data.max_bad_boxes
        for error in find_refusals(index, max_bad_fraction=limits[0], max_bad_boxes=limits[1]):
            raise error
    except StokerError as error:
        return [refused("data", error)]
    opened.append(index)
    sizes = {split: len(index.image_indices(split)) for split in REQUIRED_SPLITS}
    counts = ", ".join(f"{fmt.plural(size, 'image')} in {split}" for split, size in sizes.items())
    problems = sum(problem.count for problem in index.problems)
    evidence = f"{index.format}, {fmt.plural(problems, 'problem')} in the annotations"
    return [make_finding("data", "ok", f"the data set opens: {counts}", evidence, place=index.source)]


def _describe_host(request: CheckRequest, num_gpus: int, fit: MemoryFit | None) -> Host:
    run_dir = request.run_dir or "runs"
    demand_cores, text = None, ""
    if fit is not None and fit.decode_core_s is not None and not fit.is_cpu:
        demand_cores = fit.images_per_s * fit.decode_core_s
        text = f"{fit.images_per_s:,.0f} img/s of {fmt.duration(fit.decode_core_s)} of a core each"
    return Host(
        run_dir=None if is_uri(run_dir) else Path(run_dir),
        num_gpus=min(num_gpus, request.devices),
        demand_cores=demand_cores,
        demand_text=text,
        checkpoint_bytes=None if fit is None else fit.checkpoint_bytes,
        env=request.env,
    )


# Whether the batch fits


class MemoryFitResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the process prints. fit: None unless a batch was tried and fits."""

    finding: Finding
    fit: MemoryFit | None = None


def ask_memory_fit(config: Config, timeout_s: float, devices: int = 1) -> MemoryFitResult:
    """Tries the batch in a process of its own. devices: how many train together."""
    title = "whether the batch fits the memory"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config, {}))
        try:
            ended = run_program([sys.executable, "-m", "stoker.planning.check", str(path), str(devices)], timeout_s)
        except subprocess.TimeoutExpired:
            evidence = f"the trial did not end within {timeout_s:.0f} s"
            return MemoryFitResult(finding=unknown("memory_fit", title, evidence, "--deep waits longer"))
    try:
        return msgspec.json.decode(ended.last_line, type=MemoryFitResult)
    except msgspec.DecodeError:
        return MemoryFitResult(finding=unknown("memory_fit", title, f"the trial failed: {ended.reason}"))


def try_batch(user_config: Config, num_devices: int = 1) -> MemoryFitResult:
    """Derives the settings of so many devices, which tries the batch of one, and measures it. Raises StokerError where
    training would."""
    from stoker.hardware.selection import select_device
    from stoker.models import get_architecture
    from stoker.planning.predict import loader_demand
    from stoker.training.cluster import Devices
    from stoker.training.defaults.derive import derive
    from stoker.training.defaults.dry_run import DryRun, try_sizes
    from stoker.training.defaults.model_choice import estimate_images_per_second

    device = select_device(user_config.run.device)
    index = open_index_of(user_config.data)
    asked = user_config.replace(jpeg_decoder="cpu", compile=False)
    config, reasons = derive(asked, index, device, Devices(num_devices, num_devices))
    dry_run = DryRun(config, index, device)
    model, (height, width) = config.model.model, config.data.image_size
    batch_size, micro_batches = config.run.batch_size, config.optim.grad_accum_steps
    images_per_s = estimate_images_per_second(get_architecture(model), config.data.image_size)
    used, tried, speed, about = "", "counted", "", " about"
    if not device.is_cpu:
        trials, end = try_sizes(dry_run, [batch_size // num_devices // micro_batches])
        if not trials:
            raise StokerError("The batch that fitted at first does not fit again.", cause=end)
        images_per_s = num_devices / trials[0].seconds_per_image
        used, about = f": {fmt.memory(trials[0].peak_bytes, dry_run.budget_bytes)}", ""
        tried, speed = "tried on the device", f"; {images_per_s:,.0f} img/s"
    parameters = sum(parameter.numel() for parameter in dry_run.optimizer.model.parameters())
    try:
        decode_core_s = loader_demand(config, index).seconds
    except StokerError:  # no image can be decoded: another probe reports that
        decode_core_s = None
    name = device.name if num_devices == 1 else f"{num_devices} × {device.name}"
    micro = "" if micro_batches == 1 else f" in {micro_batches} micro-batches"
    reason = reasons.get("batch_size") or reasons.get("grad_accum_steps") or ""
    finding = make_finding(
        "memory_fit",
        "ok",
        f"a batch of {batch_size}{micro} fits the memory of {name}{used}",
        f"{model}, {width}x{height}, {config.run.precision}, worst case {tried}; {reason}{speed}",
    )
    fit = MemoryFit(
        text=f"{model} on {name} takes{about}",
        is_cpu=device.is_cpu,
        image_side=max(height, width),
        images_per_s=images_per_s,
        checkpoint_bytes=estimate_checkpoint_bytes(parameters, config.optim.optimizer),
        decode_core_s=decode_core_s,
    )
    return MemoryFitResult(finding=finding, fit=fit)


def main(config_toml: Path, num_devices: int) -> None:
    try:
        answer = try_batch(from_toml(config_toml)[0], num_devices)
    except StokerError as error:
        id = "memory_fit" if isinstance(error, OutOfMemoryError) else "settings"
        answer = MemoryFitResult(finding=refused(id, error))
    print(msgspec.json.encode(answer).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
