"""A worker of a search: takes the next trial of the study, trains it in its run folder, and tells how it ended.

Any number of workers share a study. One that is killed at any moment loses nothing: the next one continues its run, or
records the end of a run that had ended.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.config.settings import Config, from_fields
from stoker.search.space import Metric
from stoker.search.study import MAX_STARTS, Claim, Outcome, Study
from stoker_watch.errors import ConfigError, DivergedError, OutOfMemoryError, Preempted
from stoker_watch.report import format as fmt
from stoker_watch.runs.records import BEST, EVENTS, STEPS, is_finished, read_lines
from stoker_watch.runs.schemas import Event, StepWindow

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

POLL_S = 1.0
"""How often a worker without a trial looks whether its round has begun."""
LATENCY_REPEATS = 20
Objective = Callable[[Study, Claim], Outcome]


def work(folder: Path, objective: Objective | None = None, *, poll_s: float = POLL_S) -> int:
    """Trials until none is left; returns how many this worker ended. objective: ends a trial that may have been begun;
    default `train_trial`. Raises StokerError; `Preempted` after a signal, when the trial is saved."""
    study, count = Study(folder), 0
    while (claim := study.claim()) is not None:
        if isinstance(claim, str):
            time.sleep(poll_s)
            continue
        if study.starts(claim) > MAX_STARTS:
            outcome = Outcome({}, (), 0, failure=f"its worker ended {MAX_STARTS} times before it did")
        else:
            outcome = (objective or train_trial)(study, claim)
        study.finish(claim, outcome)
        count += 1
    return count


def trial_config(study: Study, number: int) -> Config:
    """The settings of a trial. Raises ConfigError."""
    params: dict[str, Any] = study.trials()[number].params
    return from_fields(study.spec.settings | params)


def train_trial(study: Study, claim: Claim) -> Outcome:
    """Trains, or continues, a trial until it ends or is pruned. Raises StokerError where the next would fail, too."""
    from stoker.training.local_ranks import TrainOptions
    from stoker.training.run import train

    run, number = study.run_dir(claim.number), claim.number

    def prune() -> str | None:
        return "the pruner of the search" if study.is_pruned(number, read_history(run)) else None

    if not is_finished(run) and prune() is None:
        try:
            options = TrainOptions(run_dir=str(run))
            train(trial_config(study, number), options, exit_when_hung=True, after_evaluation=prune)
        except (OutOfMemoryError, DivergedError) as error:
            return Outcome({}, read_history(run), last_step(run), failure=str(error))
        except ConfigError as error:
            if number == 0:  # the settings themselves are wrong, not their combination with what is tried
                raise
            return Outcome({}, (), 0, failure=str(error))
        except Preempted:
            if prune() is None:
                raise
    return read_outcome(study, number, read_history(run), pruned=not is_finished(run))


def read_outcome(study: Study, number: int, history: Sequence[float], *, pruned: bool) -> Outcome:
    """How a trial ended, from its run folder. A metric that was not measured is absent; an objective must not be."""
    run = study.run_dir(number)
    metrics: dict[str, float] = {}
    if history:
        metrics["ap"] = max(history)
    windows = list(read_lines(run, STEPS, StepWindow))
    if windows:
        metrics["step_s"] = statistics.median(w.wall_s / w.window_steps for w in windows if w.window_steps)
    peaks = [window.memory_peak_bytes for window in windows if window.memory_peak_bytes is not None]
    if peaks:
        metrics["memory_gib"] = max(peaks) / 2**30
    wanted: set[Metric] = {*study.spec.objectives, *study.spec.space.limits}  # type: ignore[arg-type]
    if "latency_ms" in wanted and not pruned and (run / BEST).exists():
        metrics["latency_ms"] = measure_latency_ms(run, study.spec.settings.get("device"))
    missing = "" if pruned else ", ".join(sorted(wanted - set(metrics)))
    return Outcome(
        metrics, history, last_step(run), failure=f"not measured: {missing}" if missing else "", pruned=pruned
    )


def read_history(run: Path) -> list[float]:
    """AP of each evaluation of a run, ascending in step; one that was repeated after a resume counts once."""
    values = {
        event.step: ap
        for event in read_lines(run, EVENTS, Event)
        if event.kind == "evaluated" and event.step is not None
        if (ap := event.data.get("metrics", {}).get("ap")) is not None
    }
    return [values[step] for step in sorted(values)]


def last_step(run: Path) -> int:
    """Optimizer steps that a run did, those that it repeated counted once."""
    return max((event.step for event in read_lines(run, EVENTS, Event) if event.step is not None), default=0)


def measure_latency_ms(run: Path, device: str | None) -> float:
    """Median of one prediction of a gray image of the model's input size, with decoding of boxes and NMS."""
    import numpy as np

    from stoker.inference.model import load

    model = load(run, device=device)
    image = np.full((*model.image_size, 3), 124, np.uint8)
    times = []
    for _ in range(LATENCY_REPEATS + 3):
        start_s = time.perf_counter()
        model.predict(image)
        times.append(time.perf_counter() - start_s)
    return 1e3 * statistics.median(times[3:])  # the first ones choose kernels


def describe(trial: "FrozenTrial") -> str:
    values = ", ".join(f"{name} {fmt.setting(value)}" for name, value in trial.params.items())
    metrics = trial.user_attrs.get("metrics", {})
    ap = f"AP {metrics['ap']:.3f}" if "ap" in metrics else trial.user_attrs.get("failure", "").partition("\n")[0]
    steps = trial.user_attrs.get("steps", 0)
    return f"trial {trial.number} {trial.state.name.lower()}: {ap} after {steps} steps: {values}"
