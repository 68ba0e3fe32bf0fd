"""`stoker tune --lr`: a range test, then short trainings that the validation split scores, by successive halving.

What to try next is in `training/lr_policy.py`. The range test is a trial process (`training/trial.py`), a training is
`stoker train` in a folder of its own, one after the other. A killed search continues, also in the middle of a training.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType

from stoker.config.settings import to_toml
from stoker.training import lr_policy
from stoker.training.defaults.derive import choose_warmup_steps, total_steps
from stoker.training.lr_policy import Score
from stoker.training.start import ResolvedRun
from stoker.tuning import policy
from stoker.tuning.levers import Facts
from stoker.tuning.runner import LOG, TuneRequest, collect_facts, open_folder, resolve, train_briefly
from stoker.tuning.trials import TrialError, TrialProcess, TrialRecords, new_probe
from stoker_watch.durations import parse_duration
from stoker_watch.errors import DataError, UsageError
from stoker_watch.report.console import print_renderables, table
from stoker_watch.runs import records
from stoker_watch.runs.records import CONFIG, EVENTS, STEPS
from stoker_watch.runs.schemas import Event, Probe, StepWindow
from stoker_watch.storage.local_files import write_atomic
from stoker_watch.storage.uri import display_path

RANGE_TEST, TRAINING = "range_test", "lr"
RAMP_STEPS = 60
RAMP_LOW, RAMP_HIGH = 1e-3, 1e2
"""Times the learning rate of the settings: five decades, twelve steps each. The recipe's is within two of the best."""
BATCH_RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)


class LrResult(msgspec.Struct, kw_only=True):
    folder: str
    machine: str
    config: str
    """File of the settings with the learning rate."""
    lr: float
    lr_before: float
    reason: str
    rule: str
    """The rule of `advice` for this optimizer."""
    schedule: str
    advice: list[dict[str, float]]
    """What other batch sizes would need."""
    trials: list[Probe]


def tune_lr(request: TuneRequest, on_progress: Callable[[str], None]) -> LrResult:
    """Searches, or continues a search that was killed. on_progress: called with lines of text. Raises UsageError for
    levers with it, too short a budget, or a folder of other settings; DataError for a folder of other data, data
    without a validation split, or a model that diverges at every learning rate."""
    if request.levers or request.allow_accuracy:
        raise UsageError("--lr finds the learning rate only.", fix="leave out --levers and --allow, or --lr")
    if request.budget_s < policy.MIN_BUDGET_S:
        raise UsageError(f"--budget: {request.budget_s:.0f} s are too short for a range test.", fix="--budget 30min")
    resolved = resolve(request)
    if "val" not in resolved.index.splits or not len(resolved.index.image_indices("val")):
        what = "The learning rate is judged by the validation split, and there is none."
        raise DataError(what, location=request.target, fix="add one: `stoker data split` makes it")
    facts = collect_facts(resolved, request)
    with open_folder(request, resolved, facts, on_progress, "tune-lr") as trials:
        return _Search(request, resolved, facts, trials, on_progress).run()


@dataclasses.dataclass(frozen=True)
class _Search:
    request: TuneRequest
    resolved: ResolvedRun
    facts: Facts
    records: TrialRecords
    on_progress: Callable[[str], None]

    @property
    def total(self) -> int | None:
        """Steps of the run; None: its length is a time."""
        run = self.resolved.config.run
        return total_steps(parse_duration(run.max_duration), self.facts.num_images, run.batch_size)

    def run(self) -> LrResult:
        """Does the range test and the trainings; returns what follows from them."""
        known = self.records.newest()
        ramp = next((line for line in known if line.probe == RANGE_TEST and line.state == "passed"), None)
        ramp = ramp or self._do(RANGE_TEST, 0, {}, self._range_test)
        if ramp.state != "passed":
            raise DataError("The range test failed.", location=self.records.path / LOG, cause=ramp.reason)
        center = lr_policy.grid_center(ramp.lrs, ramp.losses)
        step_s = ramp.seconds / ramp.steps
        first = lr_policy.first_steps(step_s, self.request.budget_s, self.total)
        if first < lr_policy.MIN_STEPS:
            rounds, trainings = lr_policy.cost()
            needed = rounds * lr_policy.MIN_STEPS * step_s + trainings * lr_policy.START_S
            what = f"--budget: {self.request.budget_s:.0f} s are too short for the trainings after the range test."
            cause = f"a step takes {step_s:.2g} s here, and each training has {lr_policy.MIN_STEPS} steps at least"
            fix = f"--budget {math.ceil(needed / 60)}min; the range test is not repeated"
            raise UsageError(what, cause=cause, fix=fix)
        self.on_progress(f"trainings of {first}, {2 * first} and {4 * first} steps around {center:.2g}")
        while (action := lr_policy.next_trial(center, self._done(first))) is not None:
            steps, lr = first * 2 ** action[0], action[1]
            self._do(TRAINING, steps, {"lr": lr}, functools.partial(self._train, steps, lr))
        done = self._done(first)
        best = lr_policy.best_of(center, done)
        if best is None:
            what, fix = "Training diverges at every learning rate.", "look for broken boxes: `stoker data check`"
            raise DataError(what, location=self.records.path, fix=fix)
        return self._write(best, center, done)

    def _do(self, kind: str, steps: int, changes: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> Probe:
        trial = max((line.trial for line in self.records.lines), default=0) + 1
        probe = self.records.run(new_probe(kind, steps=steps, trial=trial, changes=changes), measure)
        self.on_progress(describe(probe))
        return probe

    def _range_test(self) -> dict[str, Any]:
        lr = self.resolved.config.optim.lr
        lrs = lr_policy.ramp(RAMP_LOW * lr, RAMP_HIGH * lr, RAMP_STEPS)
        settings, request = self.resolved.config.set_fields(), self.request
        log = self.records.path / LOG
        process = TrialProcess(settings, log, request.command, request.budget_s, request.devices)
        losses: list[float] = []
        seconds = 0.0
        with contextlib.closing(process):
            for lr in lrs:
                reply = process.ask("ramp", lr=lr)
                seconds += reply.seconds
                losses.append(reply.losses[0] if reply.losses else math.nan)
                if lr_policy.has_diverged(losses):
                    break
            process.ask("restore")
        steps, finite = len(losses), [loss for loss in losses if math.isfinite(loss)]
        if not finite:
            raise TrialError("the first loss is not finite, at the lowest learning rate")
        reason = f"diverged at {lrs[steps - 1]:.2g}" if lr_policy.has_diverged(losses) else "did not diverge"
        return {"state": "passed", "reason": reason, "lrs": lrs[:steps], "losses": finite, "steps": steps,
                "seconds": seconds}  # fmt: skip

    def _train(self, steps: int, lr: float) -> dict[str, Any]:
        """Trains shortly, with a warm-up and a schedule that fit the length."""
        run = self.records.path / f"lr-{lr:.3g}-{steps}"
        try:
            settings = self.resolved.config.set_fields() | {"lr": lr}
            train_briefly(settings, steps, run, self.request.devices)
        except TrialError:
            if not _events(run, "rolled_back"):
                raise
        if _events(run, "rolled_back"):  # what follows is of a lower learning rate
            return {"state": "passed", "reason": "diverged"}
        losses = [line.losses["total"] for line in records.read_lines(run, STEPS, StepWindow) if "total" in line.losses]
        last = losses[-max(1, len(losses) // 3) :]
        metrics = _events(run, "finished")[-1].data["metrics"]
        if not last or not math.isfinite(sum(last)):
            return {"state": "passed", "reason": "diverged"}
        scores = {"ap": metrics["ap"], "ap50": metrics["ap50"], "loss": sum(last) / len(last)}
        return {"state": "passed", "scores": scores}

    def _done(self, first: int) -> dict[tuple[int, float], Score]:
        """The trainings of this length; those that failed count as diverged, those of another budget do not."""
        numbers = {first * 2**number: number for number in range(lr_policy.RUNGS)}
        return {
            (numbers[line.steps], line.changes["lr"]): Score(
                line.changes["lr"], line.scores.get("ap"), line.scores.get("loss", math.inf)
            )
            for line in self.records.newest()
            if line.probe == TRAINING and line.steps in numbers and line.state not in ("planned", "run")
        }

    def _write(self, best: Score, center: float, done: lr_policy.Done) -> LrResult:
        """Writes config.toml; returns the result."""
        resolved, path, trials = self.resolved, self.records.path, self.records.newest()
        config, optimizer = resolved.config, resolved.config.optim.optimizer
        assert best.ap is not None
        steps = max(line.steps for line in trials if line.changes.get("lr") == best.lr)
        others = sorted({score.lr for score in done.values()})
        at_edge = best.lr in (others[0], others[-1])
        reason = (
            f"AP {best.ap:.3f} on the validation split after {steps} steps, the best of {len(others)} from "
            f"{others[0]:.2g} to {others[-1]:.2g} by successive halving; a range test alone suggests {center:.2g}"
        ) + ("; it is at the edge of what was tried" if at_edge else "")
        if best.ap < lr_policy.MIN_AP:
            reason += f"; no AP is above {lr_policy.MIN_AP:g}, so that the training loss decided: give more --budget"
        target = path / CONFIG
        reasons = {name: text for name, text in resolved.reasons.items() if name != "lr"} | {"lr": reason}
        write_atomic(target, to_toml(config.replace(lr=best.lr), reasons).encode())
        batch = config.run.batch_size
        advice: list[dict[str, float]] = []
        for ratio in BATCH_RATIOS:
            if (size := round(batch * ratio)) and math.isclose(size, batch * ratio):
                total = None if self.total is None else max(1, round(self.total / ratio))
                linear, root = (lr_policy.scale_lr(best.lr, ratio, name) for name in ("sgd", "adamw"))
                warmup = choose_warmup_steps(total, size / self.facts.recipe_batch_size)[0]
                advice.append({"batch_size": size, "lr_linear": linear, "lr_square_root": root, "warmup_steps": warmup})
        schedule = f"{config.optim.lr_scheduler}, after {config.optim.warmup_steps} steps of warm-up"
        return LrResult(
            folder=display_path(path), machine=self.facts.machine, config=display_path(target),
            lr=best.lr, lr_before=config.optim.lr, reason=reason, schedule=schedule, advice=advice, trials=trials,
            rule="linear" if optimizer == "sgd" else "square root",
        )  # fmt: skip


def _events(run: Path, kind: str) -> list[Event]:
    return [event for event in records.read_lines(run, EVENTS, Event) if event.kind == kind]


def describe(probe: Probe) -> str:
    """A trial in one line."""
    if probe.state != "passed":
        return f"{probe.probe}: {probe.state}: {probe.reason}"
    if probe.probe == RANGE_TEST:
        return f"range test: {probe.steps} steps from {probe.lrs[0]:.2g}: {probe.reason}"
    if not probe.scores:
        return f"lr {probe.changes['lr']:.3g}, {probe.steps} steps: {probe.reason}"
    return (
        f"lr {probe.changes['lr']:.3g}, {probe.steps} steps: AP {probe.scores['ap']:.3f}, "
        f"training loss {probe.scores['loss']:.3g}"
    )


def print_lr_result(result: LrResult) -> None:
    """Prints the table of the trainings, the suggestion, and advice."""
    rows = [
        (f"{line.changes['lr']:.3g}", str(line.steps), f"{line.scores['ap']:.3f}" if line.scores else "n/a",
         f"{line.scores['loss']:.3g}" if line.scores else line.reason)
        for line in result.trials if line.probe == TRAINING
    ]  # fmt: skip
    advice = [[f"{value:.2g}" if "lr" in name else str(value) for name, value in row.items()] for row in result.advice]
    lines: list[RenderableType] = [
        "", table("lr", "steps", "AP", "training loss", right=(0, 1, 2), rows=rows), "",
        f"lr {result.lr:.3g} instead of {result.lr_before:.3g}: {result.reason}.",
        f"Schedule: {result.schedule}.", "",
        table("batch size", "lr, linear", "lr, square root", "warm-up steps", right=(0, 1, 2, 3), rows=advice),
        f"The {result.rule} rule is that of this optimizer. `stoker train --config {result.config}` trains with it.",
    ]  # fmt: skip
    print_renderables(lines)
