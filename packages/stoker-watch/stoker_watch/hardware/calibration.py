"""The user's own measurements of training steps, and the predictions of `stoker plan`, in a file of the cache folder.

Each training adds a line about its steps when it ends; `stoker plan` computes with those of the same device, and adds a
line for each of its predictions (`stoker/planning/`), which the training that follows looks up. What is damaged is
skipped, and the file may be deleted at any time.
"""

import contextlib
import fcntl
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker_watch.storage.local_files import cache_folder, write_atomic

FILE = "calibration.jsonl"
MAX_FILE_BYTES = 512 * 1024
"""From this size on, the oldest half of the lines is dropped; a line has about 700 bytes."""
MAX_LINE_BYTES = 16 * 1024

STEP_FIELDS = frozenset(
    {"model", "backbone_norm", "trainable_backbone_layers", "anchor_sizes", "anchor_scales", "aspect_ratios",
     "fg_iou_thresh", "bg_iou_thresh", "focal_alpha", "focal_gamma", "box_loss", "reduced_tail", "nms_free",
     "depthwise", "queries", "class_loss", "activation_checkpointing", "image_size", "hflip", "brightness", "contrast",
     "saturation", "hue", "mosaic", "optimizer", "backbone_lr_mult", "momentum", "weight_decay", "clip_grad_norm",
     "ema_decay", "precision"}
)  # fmt: skip
"""Settings that decide which operators a step consists of."""


class _Step(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    t: float
    """Unix time."""
    model: str
    image_size: tuple[int, int]
    batch_size: int
    """Images per device and step."""
    precision: str
    step_s: float
    """Measured: median over the windows of steps.jsonl of the seconds of `compute` a step."""
    peak_bytes: int | None = None
    """Measured: what torch had allocated on the device; None on a CPU."""


class MeasuredStep(_Step, frozen=True, kw_only=True, tag="measured"):
    """The steps of a training on one device."""

    micro_batches: int
    device: str
    """Its name, as the driver reports it."""
    threads: int = 0
    """Threads that a CPU computed with; 0: not a CPU."""
    compiled: bool = False
    """Whether by torch.compile or as a CUDA graph."""
    steps: int
    settings: dict[str, Any]
    """Those of STEP_FIELDS."""
    num_classes: int
    max_boxes: int


class PredictedStep(_Step, frozen=True, kw_only=True, tag="predicted"):
    """What `stoker plan` predicted for a step."""

    accelerator: str
    device_pattern: str
    """Regular expression for the name of the device."""
    step_error: float
    """Relative half-width of the band."""


Line = MeasuredStep | PredictedStep


def path() -> Path:
    """The file, which need not exist."""
    return cache_folder() / FILE


def append(*lines: Line) -> None:
    """Adds lines; too large a file loses its oldest half. Raises OSError: no space, no permission, or no locks."""
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{FILE}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other writers need a millisecond each
        content = _content()
        if content and not content.endswith(b"\n"):  # a line that a kill or a full disk cut off
            content += b"\n"
        if len(content) > MAX_FILE_BYTES:
            content = content[-MAX_FILE_BYTES // 2 :].partition(b"\n")[2]
        write_atomic(file, content + data)


def _content() -> bytes:
    """The file, or the end of one that is too large; empty where it cannot be read."""
    try:
        with path().open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - 2 * MAX_FILE_BYTES))
            return file.read(2 * MAX_FILE_BYTES)
    except OSError:  # there is none: nothing is known about this device
        return b""


def read_steps() -> list[Line]:
    """All lines that can be read, the newest last."""
    decoder, lines = msgspec.json.Decoder(Line), []
    for line in _content().split(b"\n"):
        if 0 < len(line) <= MAX_LINE_BYTES:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # damaged, or newer
                lines.append(decoder.decode(line))
    return lines


def measured_steps(is_device: Callable[[str], bool], *, threads: int = 0) -> list[MeasuredStep]:
    """Those of the devices whose name fits, eager ones only, the newest first."""
    lines = [line for line in reversed(read_steps()) if isinstance(line, MeasuredStep) and is_device(line.device)]
    eager = (line for line in lines if line.threads == threads and not line.compiled)
    return [line for line in eager if 0 < line.step_s < math.inf]


def find_prediction(
    *, model: str, image_size: tuple[int, int], batch_size: int, precision: str, device: str
) -> PredictedStep | None:
    """The newest prediction for such a training on a device of this name."""
    wanted = (model, tuple(image_size), batch_size, precision)
    for line in reversed(read_steps()):
        if isinstance(line, PredictedStep) and wanted == (
            line.model, line.image_size, line.batch_size, line.precision,
        ):  # fmt: skip
            with contextlib.suppress(re.error):  # a damaged line
                if re.fullmatch(line.device_pattern, device, re.IGNORECASE):
                    return line
    return None


def step_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sorted(settings.items()) if name in STEP_FIELDS}
