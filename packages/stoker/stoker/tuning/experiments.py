"""Experiments that confirm a cause: change one thing of a run for a few dozen steps and measure the speed.

A separate program, so that `stoker why RUN --probe` does not import torch:

    python -m stoker.tuning.experiments runs/mine

It prints a `schemas.Probe` as a JSON line for each experiment, and leaves the run as it is. `trials.py` measures.
"""

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from stoker.config.settings import from_toml
from stoker.tuning.policy import summarize_speed
from stoker.tuning.trials import NUM_IMAGES, TrialError, TrialProcess, Window, measure_in_turn, new_probe
from stoker_watch.errors import StokerError
from stoker_watch.runs.records import CONFIG, last_attempt
from stoker_watch.runs.schemas import PROBE_KINDS, Probe

MAX_EXPERIMENT_S = 40.0
"""After this time an experiment is judged by the pairs that it has."""


def run_experiments(settings: dict[str, Any], attempt: int, log: Path) -> Iterator[Probe]:
    """All experiments, in the order of PROBE_KINDS. settings: of the run; log: gets what the processes print."""
    num_images = sys.maxsize if settings["cache"] == "none" else NUM_IMAGES  # a trial fills its cache first
    for kind in PROBE_KINDS:
        values: dict[str, Any] = {}
        try:
            with contextlib.ExitStack() as stack:
                start = functools.partial(_start, stack, log, num_images, settings)
                before, after, unit = _windows(kind, settings, start)
                found = measure_in_turn(before, after, unit=unit, until_s=time.monotonic() + MAX_EXPERIMENT_S)
                values = {"steps": found.steps, **summarize_speed(found.pairs)}
        except TrialError as error:
            values = {"reason": error.reason}
            if kind == "double_batch":
                values["reason"] += "; a process with the run's batch size ran at the same time"
        yield new_probe(kind, attempt=attempt, **values)


def _start(
    stack: contextlib.ExitStack, log: Path, num_images: int, settings: dict[str, Any], **changes: Any
) -> TrialProcess:
    return stack.enter_context(contextlib.closing(TrialProcess(settings | changes, log, num_images=num_images)))


def _windows(kind: str, settings: dict[str, Any], start: Callable[..., TrialProcess]) -> tuple[Window, Window, int]:
    """(before, after, images that are whole steps for both). Raises TrialError where the experiment does not apply."""
    if kind == "no_allreduce":
        raise TrialError("the run has one process: there is no all-reduce")
    if kind == "compiled" and settings["device"] == "cpu":
        raise TrialError("on a CPU compiling takes minutes")
    base = start()
    if kind == "cached_batch":
        return base.train_after_steps, base.step, base.batch_size
    if kind == "double_batch":
        return base.step, start(batch_size=2 * base.batch_size).step, 2 * base.batch_size
    if kind == "compiled":
        other = start(compile=not settings["compile"])
        before, after = (other, base) if settings["compile"] else (base, other)
        return before.step, after.step, base.batch_size
    base.warm_up()
    used = base.ask("train", base.batch_size).workers
    base.close()
    workers = used + (1 if kind == "more_workers" else -1)
    if workers < 1:
        raise TrialError("the loader has one worker")
    now, other = (start(workers=count) for count in (used, workers))
    for process in (now, other):
        process.warm_up()
    return now.train, other.train, now.batch_size


def main(run: Path) -> None:
    """Repeats steps of a run that is not live with one thing changed at a time; a JSON line for each experiment."""
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        # One process, and speed does not depend on the weights.
        settings = from_toml(run / CONFIG)[0].set_fields() | {"sync": "plain", "shard": False}
        settings["weights"] = "none"
        for result in run_experiments(settings, last_attempt(run), Path(folder, "log")):
            print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
