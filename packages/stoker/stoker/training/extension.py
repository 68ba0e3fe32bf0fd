"""How a finished run is trained further: `stoker train --resume RUN --epochs 50` after 20 epochs.

Weights, optimizer, EMA and the order of the images continue from the last checkpoint. The schedule begins again for
what is added: the learning rate rises from its end to its peak and falls once more, and strong augmentation is used
until its last part. At the rate at which a schedule ends, further steps change next to nothing: of 300 steps on BCCD
with 300 more (two seeds, AP 0.389 before), the full peak made 0.422, a third of it 0.406, a tenth 0.395; 600 at once
0.433. The new length, and the peak if one is given, become the run's settings; the event `resumed` says since when
(`extended`).
"""

import shlex
from pathlib import Path
from typing import Any

from stoker.config.settings import EXTENDABLE, PER_ATTEMPT, Config, flag_of, flag_words, format_flags, from_toml
from stoker.training.defaults.derive import total_steps
from stoker.training.state import Extension
from stoker_watch.durations import parse_duration
from stoker_watch.errors import RunFinished, UsageError
from stoker_watch.report.format import duration, plural
from stoker_watch.runs.records import CONFIG, EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from stoker_watch.storage.uri import display_path

REWARMING = 0.05
"""Fraction of what is added in which the rate rises from its end to its peak: as long as the usual warm-up of a run
(Ibrahim et al. 2024, arXiv 2403.08763, find that its length hardly matters)."""


def extended_settings(path: Path, given: Config, location: object) -> dict[str, Any]:
    """The settings that change if the run `path` is resumed with what the user gives; empty: none. Raises UsageError if
    the run is not finished, or if others are given; RunFinished if it has this length already."""
    config, finished = from_toml(path / CONFIG)[0], _find_end(path)
    if finished is not None:  # its own length: that of the settings may be of an extension that a kill has prevented
        config = config.replace(max_duration=finished.data.get("max_duration", config.run.max_duration))
    of_run = dict(config.items())
    wanted = {name: value for name, value in given.set_fields().items() if name not in PER_ATTEMPT}
    changed = {name: value for name, value in wanted.items() if value != of_run[name]}
    resume = f"stoker train --resume {location}"
    if others := sorted(changed.keys() - EXTENDABLE):
        flags = ", ".join(f"--{flag_of(name)}" for name in sorted(PER_ATTEMPT))
        raise UsageError(
            "--resume takes its settings from the run.",
            cause=f"given as well: {format_flags(changed, others)}",
            fix=f"{resume}, which may have {flags}, and --epochs, --steps or --max-time if the run is finished; or "
            f"start a new run from its weights: --weights {location}",
        )
    if finished is None:
        if changed:
            length = " ".join(flag_words("max_duration", config.run.max_duration))
            raise UsageError(
                "The run is unfinished: its schedule is that of the length that it was started with.",
                location=location,
                cause=f"given as well: {format_flags(changed, sorted(changed))}; it was started with {length}",
                fix=f"{resume}, which finishes it; afterwards a length that is longer extends it",
            )
        return {}
    if "max_duration" not in changed:
        raise make_run_finished(location, config.run.max_duration)
    return changed


def _find_end(path: Path) -> Event | None:
    """The event `finished` of the run `path`; None: it is unfinished, or was extended since."""
    ends = [event for event in read_lines(path, EVENTS, Event) if event.kind in ("finished", "resumed")]
    return ends[-1] if ends and ends[-1].kind == "finished" else None


def make_run_finished(location: object, length: str = "") -> RunFinished:
    """The error of a run that is to be continued and is finished."""
    resume = f"stoker train --resume {location} --epochs N"
    return RunFinished(
        "The run is finished: nothing is left to do.",
        location=location,
        cause=f"its length is {shlex.join(flag_words('max_duration', length))}" if length else None,
        fix=f"`stoker why {location}` shows it; `{resume}` trains it further, up to N epochs in all; to train from the "
        "beginning, another --run-dir",
    )


def plan_extension(path: Path, config: Config, num_images: int) -> Extension | None:
    """The extension of the run `path`, None if it is unfinished. config: with the new length; num_images: of the
    training split. Raises UsageError if it is no longer than what was trained."""
    finished = _find_end(path)
    if finished is None:
        return None
    step, trained_s = finished.step or 0, float(finished.data.get("trained_s", 0.0))
    length, batch_size = parse_duration(config.run.max_duration), config.run.batch_size
    steps = total_steps(length, num_images, batch_size)
    if steps is None and "trained_s" not in finished.data:
        raise UsageError(
            "How long this run was trained is not known: it is of an earlier version.",
            location=display_path(path),
            fix="--epochs N or --steps N: the length in all",
        )
    if (60 * length.value <= trained_s) if steps is None else steps <= step:
        epochs = step * batch_size / num_images
        raise UsageError(
            f"The run has {plural(step, 'step')} already: {epochs:.3g} epochs, {duration(trained_s)}.",
            location=display_path(path),
            cause=f"{shlex.join(flag_words('max_duration', config.run.max_duration))} is not longer",
            fix="give a longer length: it is that of the whole run",
        )
    before = finished.data.get("max_duration") or from_toml(path / CONFIG)[0].run.max_duration
    return Extension(step, trained_s, before, config.run.max_duration)


def extended_rate(rate: float, progress: float) -> float:
    """The learning rate of an extension at `progress`, 0 … 1 of what is added, where its schedule has `rate`."""
    return rate * min(1.0, max(0.01, progress / REWARMING))
