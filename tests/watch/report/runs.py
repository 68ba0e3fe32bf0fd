"""Run folders for tests, written as a training writes them."""

import json
from pathlib import Path
from typing import Any

from stoker_watch.runs.records import CONFIG, DEVICES, ENVIRONMENT, STEPS, RunFolder
from stoker_watch.runs.schemas import DeviceSample, GpuSample, StepWindow

GIB = 2**30
START_T = 1_780_000_000.0
"""2026-05-28, UTC."""


def write_run(
    path: Path,
    *,
    phases: dict[str, float] | None = None,
    stages: dict[str, float] | None = None,
    windows: int = 2,
    devices: int = 1,
    num_images: int = 1600,
    end: str | None = "finished",
    message: str = "done",
    start_t: float = START_T,
    settings: str = "",
    environment: dict[str, Any] | None = None,
    ap: float | None = None,
    samples: int = 0,
    sample: dict[str, Any] | None = None,
    gpu: dict[str, Any] | None = None,
) -> Path:
    """Writes a run. phases: device-seconds of each window, which give its length; a window has 100 steps. samples:
    number of lines of devices.jsonl, one per second from the start; sample, gpu: their fields."""
    phases = {"compute": 900.0, "input_wait": 100.0} if phases is None else phases
    wall_s = sum(phases.values()) / devices
    path.mkdir(parents=True)
    folder = RunFolder(path, 1)
    folder.event("started")
    for number in range(1, windows + 1):
        folder.append(STEPS, StepWindow(t=start_t + number * wall_s, attempt=1, step=100 * number, window_steps=100,
                                        num_images=num_images, wall_s=wall_s, devices=devices, phases=phases,
                                        input_wait_stages=stages or {}))  # fmt: skip
    for number in range(samples):
        gpus = [GpuSample(index=index, **gpu) for index in range(devices)] if gpu is not None else []
        folder.append(DEVICES, DeviceSample(t=start_t + number + 0.5, attempt=1, gpus=gpus, **(sample or {})))
    if ap is not None:
        folder.event("evaluated", step=100, metrics={"ap": ap})
    if end is not None:
        folder.event(end, message)
    folder.close()
    if settings:
        (path / CONFIG).write_text(settings)
    if environment is not None:
        (path / ENVIRONMENT).write_text(json.dumps(environment))
    return path
