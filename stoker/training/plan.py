"""`stoker train --dry-run`: what a training would do, without doing it. Writes nothing but caches.

Data warnings come first, because they decide whether the rest matters; then the settings that matter, and the plan.
Settings are derived as for a training, which includes the trials of the batch size. Not here: the steps with which
these trials measure (`defaults/dry_run.py`).
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

from stoker.config.durations import parse_duration
from stoker.config.settings import Config, settings_table
from stoker.data.index import Index
from stoker.models import get_architecture
from stoker.report.format import count, duration, plural
from stoker.report.terminal import Screen
from stoker.storage.uri import display_path, is_uri
from stoker.training import run_selection, start
from stoker.training.cluster import Devices
from stoker.training.defaults.derive import total_steps
from stoker.training.defaults.model_choice import estimate_images_per_second

IMPORTANT_SETTINGS = frozenset(
    {
        "data", "model", "weights", "image-size", "augment", "max-duration", "batch-size", "grad-accum-steps", "lr",
        "optimizer", "precision", "device", "eval-every", "checkpoint-every", "classes",
    }
)  # fmt: skip
"""Always shown; others only if the user set them."""


@dataclass(frozen=True)
class Plan:
    """What a training would do."""

    warnings: list[str]
    notes: list[str]
    settings: list[tuple[str, object, str | None]]
    """Name, value, reason (None: the user set it), the important ones first."""
    num_hidden: int
    """Settings that are left out."""
    lines: list[str]


def make_plan(
    user_config: Config,
    *,
    run_dir: str | None = None,
    resume: str | None = None,
    all_settings: bool = False,
    num_devices: int = 1,
) -> Plan:
    """Derives everything that `train` would. Raises StokerError where `train` would before its first step.

    num_devices: how many devices of this machine train together."""
    with contextlib.ExitStack() as stack:  # holds the lock of a run that would be continued
        user_config = run_selection.with_absolute_paths(user_config)
        path: Path | None = None
        messages: list[str] = []
        if not any(name is not None and is_uri(name) for name in (run_dir, resume)):
            path, user_config, messages = run_selection.choose_run(user_config, run_dir, resume, stack)
        resolved = start.resolve_run(user_config, path, devices=Devices(num_devices, num_devices))
    config, index = resolved.config, resolved.index
    data_messages = start.describe_data(index)
    warnings = [text for kind, text in data_messages if kind == "warning"] + start.warn_about_settings(resolved)
    rows = settings_table(config, resolved.reasons)
    shown = [row for row in rows if all_settings or row[2] is None or row[0] in IMPORTANT_SETTINGS]
    return Plan(
        warnings=warnings,
        notes=[text for kind, text in data_messages if kind != "warning"],
        settings=shown,
        num_hidden=len(rows) - len(shown),
        lines=[*messages, *_plan_lines(config, index, is_cpu=resolved.device.is_cpu), _run_line(path, run_dir)],
    )


def _plan_lines(config: Config, index: Index, *, is_cpu: bool) -> list[str]:
    run = config.run
    lines = []
    for split, verb in (("train", "trains on"), ("val", "is evaluated on")):
        image_indices = index.image_indices(split)
        num_boxes = int((index.offsets[image_indices + 1] - index.offsets[image_indices]).sum())
        boxes = plural(num_boxes, "box", "boxes")
        lines.append(f"{verb} {plural(len(image_indices), 'image')} with {boxes}")
    lines[0] += f" of {plural(len(index.class_names), 'class', 'classes')}"
    num_images = len(index.image_indices("train"))
    length = parse_duration(run.max_duration)
    steps = total_steps(length, num_images, run.batch_size)
    if steps is None:
        lines.append(f"for {length.value:g} minutes, in batches of {run.batch_size}")
    else:
        epochs = steps * run.batch_size / num_images
        lines.append(f"{count(steps)} steps of {run.batch_size} images: each image is seen {epochs:.3g} times")
    for name, text, verb in (
        ("eval-every", run.eval_every, "evaluates"),
        ("checkpoint-every", run.checkpoint_every, "saves"),
    ):
        interval = parse_duration(text, name)
        times = _times(interval.value, interval.unit, steps, num_images, run.batch_size)
        when = f"every {interval.value:g} {interval.unit}{times}" if interval.value > 0 else "at the end only"
        lines.append(f"{verb} {when}")
    if is_cpu and steps is not None:
        speed = estimate_images_per_second(get_architecture(config.model.model), config.data.image_size)
        lines.append(f"takes very roughly {duration(steps * run.batch_size / speed)} on this CPU, without evaluations")
    return lines


def _times(value: float, unit: str, steps: int | None, num_images: int, batch_size: int) -> str:
    if steps is None or unit == "minutes" or value <= 0:
        return ""
    interval = value if unit == "steps" else value * num_images / batch_size
    return f", {plural(math.ceil(steps / max(1.0, interval)), 'time')}"


def _run_line(path: Path | None, run_dir: str | None) -> str:
    if path is not None:
        return f"continues {display_path(path)}"
    return f"writes into {run_dir}" if run_dir is not None else "writes into a new folder below runs/"


def print_plan(plan: Plan) -> None:
    """Prints the warnings, the notes, the settings and the plan."""
    with Screen() as screen:
        for text in plan.warnings:
            screen.warning(text)
        for text in plan.notes:
            screen.note(text)
        screen.settings(plan.settings)
        if plan.num_hidden:
            screen.note(f"{plural(plan.num_hidden, 'other setting')} have their defaults: --all-settings shows them")
        screen.note("plan:")
        for line in plan.lines:
            screen.note(f"- {line}")
        screen.note("nothing was trained or written (--dry-run)")
