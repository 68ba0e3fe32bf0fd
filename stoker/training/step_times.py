"""What the steps of a run were predicted to take, and what they took, for `stoker plan` and `stoker why`.

The file is that of `hardware/calibration.py`; without it nothing is predicted, and nothing here can fail a run.
"""

import statistics
import time

import torch

from stoker.config.settings import Config
from stoker.hardware import calibration
from stoker.hardware.device import Device
from stoker.runs.records import STEPS, read_lines
from stoker.runs.schemas import StepWindow
from stoker.training.state import EventLogger, TrainSetup

MIN_WINDOWS = 5
"""Windows with steps, after the first, without which a run says nothing about the time of a step."""


def log_prediction(config: Config, device: Device, log_event: EventLogger) -> None:
    """An event with what `stoker plan` predicted for such a training on this device, if it did."""
    predicted = calibration.find_prediction(
        model=config.model.model,
        image_size=config.data.image_size,
        batch_size=config.run.batch_size,
        precision=config.run.precision,
        device=device.name,
    )
    if predicted is not None:
        log_event(
            "info",
            f"`stoker plan` predicted {predicted.step_s:.3g} s a step ± {100 * predicted.step_error:.0f} %",
            facts={"predicted_step_s": predicted.step_s, "predicted_step_error": predicted.step_error},
        )


def log_measured_steps(setup: TrainSetup, log_event: EventLogger) -> None:
    """Adds the steps of this attempt to the calibration file, if one device trained and there were enough."""
    if not setup.ranks.alone:
        return
    config, device = setup.config, setup.device
    windows = [
        window
        for window in read_lines(setup.folder.path, STEPS, StepWindow)
        if window.attempt == setup.folder.attempt and window.window_steps
    ][1:]  # kernels are chosen and caches filled in the first
    if len(windows) < MIN_WINDOWS:
        return
    measured = calibration.MeasuredStep(
        t=time.time(),
        model=config.model.model,
        image_size=config.data.image_size,
        batch_size=config.run.batch_size,
        micro_batches=config.optim.grad_accum_steps,
        precision=config.run.precision,
        device=device.name,
        threads=torch.get_num_threads() if device.is_cpu else 0,
        compiled=config.run.compile or config.run.cuda_graph,
        step_s=statistics.median(
            window.phases.get("compute", 0.0) / window.window_steps / window.devices for window in windows
        ),
        steps=sum(window.window_steps for window in windows),
        peak_bytes=None if device.is_cpu else device.memory().peak,
        settings=calibration.step_settings(config.set_fields()),
        num_classes=len(setup.index.class_names),
        max_boxes=setup.max_boxes,
    )
    try:
        calibration.append(measured)
    except OSError as error:
        log_event("info", f"the time of a step was not added to {calibration.path()}: {error.strerror}")
