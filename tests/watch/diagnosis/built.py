"""Builds run folders as a healthy run would write them, second by second, with the changes that a test asks for."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stoker_watch.runs.records import (
    CONFIG,
    DEVICES,
    PROBES,
    QUARANTINE,
    STACKS,
    STEPS,
    TRACES,
    RunFolder,
)
from stoker_watch.runs.schemas import (
    DeviceSample,
    GpuSample,
    Place,
    Probe,
    Quarantined,
    StackWindow,
    StepWindow,
    TraceWindow,
)

GIB = 2**30
MIB = 2**20
T0 = 1_000_000.0
STARTUP = 6
"""Seconds before the first step."""

Change = Callable[[int], dict[str, Any]]

HEALTHY_HOST: dict[str, Any] = {
    "cpu_core_utilization": [0.5, 0.4, 0.5, 0.4],
    "process_cpu": 1.7,
    "rss_bytes": 2 * GIB,
    "memory_used_bytes": 4 * GIB,
    "memory_limit_bytes": 16 * GIB,
    "psi_cpu": 0.05,
    "psi_memory": 0.0,
    "psi_io": 0.0,
    "throttled_s": 0.0,
    "cpu_limit_cores": 4.0,
    "threads_running": 3.0,
    "swap_used_bytes": 0,
    "disk_free_bytes": 50 * GIB,
    "net_received_bytes_s": 1e4,
    "shm_used_bytes": 10 * MIB,
    "shm_total_bytes": 2 * GIB,
    "open_fds": 90,
    "max_fds": 1024,
    "oom_kills": 0,
}

HEALTHY_GPU: dict[str, Any] = {
    "utilization": 0.97,
    "memory_used_bytes": 60 * GIB,
    "memory_total_bytes": 80 * GIB,
    "power_w": 600.0,
    "power_limit_w": 700.0,
    "sm_clock_mhz": 1900,
    "sm_clock_max_mhz": 1980,
    "temperature_c": 62,
    "throttle_reasons": 0x4,
    "sm_active": 0.8,
    "tensor_active": 0.3,
    "dram_active": 0.4,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "ecc_corrected": 3,
    "ecc_uncorrected": 0,
    "other_processes": 0,
    "mig": False,
}

NATIVE_CONFIG = """\
[data]
data = "/data/set"
image_size = [512, 512]
scale_range = [0.7, 1.5]
mosaic = 0.0
brightness = 0.125
contrast = 0.125
saturation = 0.125
hue = 0.0
[model]
weights = "coco"
backbone_norm = "frozen_bn"
trainable_backbone_layers = 3
fg_iou_thresh = 0.5
[run]
max_duration = "12ep"
batch_size = 16
precision = "bf16"
workers = "auto"
cache = "none"
device = "DEVICE"
price_per_device_hour = 0.0
[reasons]
batch_size = "the recipe's"
weights = "a detector's own"
"""
FACTS = {
    "num_images": 400,
    "boxes": 2000,
    "median_pixels": 512 * 512,
    "anchor_coverage": 0.95,
    "pretrained": ["coco", "imagenet"],
}


def falling(second: int) -> dict[str, float]:
    return {"total": 2.0 * 0.97**second + 0.3}


def make_run(
    path: Path,
    *,
    seconds: int = 40,
    fractions: dict[str, float] | None = None,
    stages: dict[str, float] | None = None,
    window: Change | None = None,
    losses: Callable[[int], dict[str, float]] | None = falling,
    steps: int = 8,
    num_images: int = 128,
    host: Change | None = None,
    gpus: int = 0,
    gpu: Callable[[int, int], dict[str, Any]] | None = None,
    devices: int = 1,
    startup: int = STARTUP,
    events: Iterable[tuple[str, str, dict[str, Any]]] = (),
    event_t: Callable[[int], float] = lambda _: T0,
    config: str | None = NATIVE_CONFIG,
    facts: dict[str, Any] | None = None,
    external: bool = False,
    ranks: Iterable[dict[str, float]] = (),
    stacks: Iterable[dict[str, Any]] = (),
    traces: Iterable[dict[str, Any]] = (),
    probes: Iterable[dict[str, Any]] = (),
    quarantined: Iterable[str] = (),
    silent: int = 0,
    attempts: int = 1,
    end: str | None = "finished",
    price: float | None = None,
) -> Path:
    """A run of `startup` seconds before its first step and `seconds` after it; each second is a window and a sample.

    fractions: of the time after the start by phase, the rest is compute; stages: of the input_wait. window(s), host(s)
    and gpu(s, index): fields of that second that differ. silent: seconds with samples and without steps at the end.
    ranks: `fractions` of each further rank.
    """
    path.mkdir(parents=True)
    for attempt in range(1, attempts + 1):
        folder = RunFolder(path, attempt)
        start_data = {"coverage": {"driver": "recorded"}} if external else {}
        folder.event("started" if attempt == 1 else "resumed", **start_data)
        if facts is not None:
            folder.event("info", "data", facts=facts)
        t0 = T0 + (attempt - 1) * (startup + seconds)
        for second in range(startup + seconds + silent):
            t = t0 + second + 1
            working = startup <= second < startup + seconds
            fields = HEALTHY_HOST | (host(second) if host is not None else {})
            gpu_samples = [
                GpuSample(index=n, **(HEALTHY_GPU | (gpu(second, n) if gpu is not None else {}))) for n in range(gpus)
            ]
            folder.append(DEVICES, DeviceSample(t=t, attempt=attempt, gpus=gpu_samples, **fields))
            if second >= startup + seconds:
                continue
            for rank, rank_fractions in enumerate((fractions or {}, *ranks)):
                phases = _phases(rank_fractions, devices) if working else {"startup": float(devices)}
                waited = phases.get("input_wait", 0.0)
                line: dict[str, Any] = {
                    "t": t,
                    "attempt": attempt,
                    "step": (second - startup + 1) * steps if working else 0,
                    "window_steps": steps if working else 0,
                    "num_images": num_images if working else 0,
                    "wall_s": 1.0,
                    "devices": devices,
                    "phases": phases,
                    "input_wait_stages": {name: fraction * waited for name, fraction in (stages or {}).items()},
                    "losses": losses(second - startup) if losses is not None and working else {},
                    "lr": 0.01 if working else None,
                    "grad_norm": 2.0 * 0.99**second if working else None,
                }
                line |= window(second) if window is not None and working and rank == 0 else {}
                name = STEPS if rank == 0 else f"ranks/{rank:04d}/{STEPS}"
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                folder.append(name, StepWindow(**line))
        for number, (kind, text, data) in enumerate(events):
            folder.event(kind, text, **data)
            _set_t(folder, number, event_t)
        if end is not None and attempt == attempts:
            folder.event(end, "done")
        folder.close()
    end_t = T0 + startup + seconds
    for stack in stacks:
        defaults = {"t": end_t, "attempt": 1, "pid": 7, "wall_s": 10.0, "samples": 10}
        line = defaults | stack
        kinds = line.get("main_thread", {})
        line.setdefault("places", [
            Place(kind=kind, samples=round(fraction * line["samples"])) for kind, fraction in kinds.items()
        ])  # fmt: skip
        folder.append(STACKS, StackWindow(**line))
    for trace in traces:
        defaults = {"t": end_t, "attempt": 1, "step": 9, "window_steps": 5, "wall_s": 1.0, "busy_s": 0.97}
        folder.append(TRACES, TraceWindow(**defaults | trace))
    for probe in probes:
        folder.append(PROBES, Probe(**{"t": end_t, "attempt": 1, "steps": 30} | probe))
    for name in quarantined:
        folder.append(
            QUARANTINE,
            Quarantined(
                t=end_t, attempt=1, image_index=1, path=name, error="truncated", sample_position=1, replaced_by=2
            ),
        )
    folder.close()
    if config is not None:
        text = config.replace("DEVICE", "cuda" if gpus else "cpu")
        if price is not None:
            text = text.replace("price_per_device_hour = 0.0", f"price_per_device_hour = {price}")
        (path / CONFIG).write_text(text)
    return path


def _phases(fractions: dict[str, float], devices: int) -> dict[str, float]:
    rest = 1.0 - sum(fractions.values())
    return {name: fraction * devices for name, fraction in {"compute": rest, **fractions}.items() if fraction > 0}


def _set_t(folder: RunFolder, number: int, event_t: Callable[[int], float]) -> None:
    """Changes the time of the newest event."""
    path = folder.path / "events.jsonl"
    lines = path.read_text().splitlines()
    head, _, rest = lines[-1].partition(",")
    lines[-1] = f'{{"t":{event_t(number)},{rest}'
    assert head.startswith('{"t"')
    path.write_text("\n".join(lines) + "\n")
