"""The one training loop, top to bottom: a step, then whatever is due after it.

Nothing in a step waits for the device: losses and norms are summed on it (`Meter`) and read once their copy is there.
The ledger is told what the thread does; steps.jsonl gets a line per second. What a step decides is `optim.py`, what is
due at the start is `start.py`. Errors end the run as the exception tree says; a signal saves first and exits with 75.
"""

import contextlib
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
from torch import Tensor

from stoker.config.settings import Config, parse_duration, rows_of
from stoker.data.augment.device import augment_batch
from stoker.errors import Preempted, StokerError, StorageError
from stoker.evaluation.metrics import Metrics
from stoker.hardware.device import Ready, out_of_memory_as_error
from stoker.monitor.monitor import monitoring
from stoker.monitor.options import Monitoring
from stoker.profiling.ledger import Account, Ledger
from stoker.profiling.telemetry.sampler import Witness
from stoker.profiling.trace import Tracer
from stoker.report.tensorboard import Board
from stoker.report.terminal import Screen
from stoker.runs.records import BEST, FINAL, STEPS, WARNING_KINDS
from stoker.runs.schemas import StepWindow
from stoker.training import bucket_run, checkpoint, run_selection, start
from stoker.training.async_eval import Scorer, Unscored, find_boxes
from stoker.training.defaults.dry_run import worst_case
from stoker.training.forward import compile_now, forward_backward, losses_of
from stoker.training.input_probe import FullRing
from stoker.training.optim import NO_STEPS, Reading, rate_at
from stoker.training.recovery import (
    SLOWDOWN,
    Stop,
    go_back,
    stop_on_signals,
    stopped,
    watch_of,
)
from stoker.training.start import Job
from stoker.training.triggers import Due

WINDOW_S = 1.0


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished training leaves. metrics: of the final weights, on the validation split."""

    run: Path
    steps: int
    metrics: Metrics


def train(
    asked: Config, *, run: str | None = None, resume: str | None = None, started_s: float | None = None,
    trace: bool = False, monitor: Monitoring = Monitoring(), log: Literal["text", "json"] = "text",  # noqa: B008  # frozen
) -> Result:  # fmt: skip
    """Trains until the asked length is reached.

    run: folder of the run (`--run`); resume: an unfinished run to continue, with its own settings; started_s: the
    moment of `time.perf_counter` from which on the ledger counts, default now; trace: keep Chrome traces of some steps;
    monitor: who is told of what, while it lives; log: json writes JSON lines to stdout, what a person reads to stderr.
    Raises StokerError; `Preempted` after a signal, when everything is saved.
    """
    started_s = time.perf_counter() if started_s is None else min(started_s, time.perf_counter())
    monitor.check()
    screen = Screen(sys.stderr if log == "json" else None)
    with stop_on_signals() as stop, screen, contextlib.ExitStack() as stack:
        remote = bucket_run.join(run, resume, stop=stop, stack=stack, note=screen.note)
        if remote is not None:
            run, resume = (str(remote.folder), None) if resume is None else (None, str(remote.folder))
        path, asked, said = run_selection.choose(run_selection.with_absolute_paths(asked), run, resume, stack)
        with out_of_memory_as_error("looking for the batch that fits"):
            settled = start.settle(asked, path)
        stop.check()
        folder = run_selection.open_folder(settled.config, settled.reasons, path, run, stack, said)
        if remote is not None:
            said += remote.said
            stack.push(remote.finish)
        stack.callback(run_selection.conclude, folder, screen.warning)
        stack.enter_context(monitoring(folder, monitor, stop=lambda: stop.ask("an alert"), log=log))
        job: Job | None = None

        def say(kind: str, text: str, /, **data: Any) -> None:
            """A line for the person and the same line in the run's events."""
            (screen.warning if kind in WARNING_KINDS else screen.note)(text)
            folder.event(kind, text, step=None if job is None else job.step, **data)

        try:
            with out_of_memory_as_error("training"), bucket_run.uploading(remote, stop, say):
                screen.settings(rows_of(settled.config, settled.reasons))
                for line in said:
                    say("note", line)
                job = start.build(settled, folder, say)
                stack.callback(job.loader.close)
                stop.check()
                metrics = Training(job, screen, stop, started_s, say, trace).run()
        except StokerError as error:
            kind = "preempted" if isinstance(error, Preempted) else "failed"
            folder.event(kind, str(error), step=None if job is None else job.step, exit_code=error.exit_code)
            raise
        except BaseException as error:
            folder.event("failed", f"{type(error).__name__}: {error}", step=None if job is None else job.step)
            raise
        return Result(folder.path, job.step, metrics)


class Training:
    """The state of the loop between steps."""

    def __init__(
        self, job: Job, screen: Screen, stop: Stop, started_s: float, say: start.Say, trace: bool = False
    ) -> None:
        self.job, self.screen, self.stop, self.say = job, screen, stop, say
        run, optim = job.config.run, job.config.optim
        self.ledger = Ledger(job.device.make_clock(), started_s=started_s, ranges=job.device.make_ranges())
        job.loader.on_copy_awaited = self.ledger.copy_awaited
        self.tracer = Tracer(job.device, job.folder, self.ledger, say, chrome=trace)
        self.board = Board(job.folder.path, purge_step=job.step, on_error=lambda text: say("warning", text))
        self.stream = job.device.make_stream()
        self.scorer = Scorer(job, screen, self.board, say)
        self.length = parse_duration(run.for_)
        self.eval_due = Due(parse_duration(run.eval_every, "eval-every"), len(job.rows), run.batch)
        self.save_due = Due(parse_duration(run.checkpoint_every, "checkpoint-every"), len(job.rows), run.batch)
        self.parts = optim.accumulate
        self.compute = losses_of(job.model, eager=run.eager)
        self.copying: Ready | None = None
        self.reading: tuple[list[Tensor], Ready, int] | None = None
        self.read_steps = job.step
        self.window_s = -math.inf  # the first step has a line of its own: where the loss began
        self.rate, self.remarked = 0.0, False
        self.hopeless_at = job.hopeless_at
        """Step whose skip made too many in a row; the run goes back then."""
        self.watch = watch_of(job)
        self.full_ring = FullRing(job, self.ledger, say)

    def run(self) -> Metrics:
        """Steps until the length is reached, then scores and saves. Returns the final weights' metrics."""
        job = self.job
        with Witness(job.folder), contextlib.closing(self.board), contextlib.closing(self):
            if not job.config.run.eager and self.progress() < 1:
                self.compile()
            self.write_window(self.ledger.window(0.0), NO_STEPS, 0)
            self.learn()
            while self.hopeless_at is not None:
                self.go_back(self.hopeless_at)
                self.learn()
            if self.stalled() and self.progress() < 1:
                self.say("note", f"stopped at step {job.step:,}: {job.stale} evaluations without an AP above "
                         f"{job.best_ap:.3f}, whose weights are {BEST}")  # fmt: skip
            self.save()
            metrics = self.score_final()
            with self.ledger.phase("checkpoint"):
                job.writer.wait()
            self.read_all()
            if job.writer.failed is not None:
                raise StorageError(
                    "The final weights could not be saved.",
                    place=job.folder.path,
                    cause=job.writer.failed,
                    fix=f"make room; then `stoker train --resume {job.folder.path}` ends the run",
                )
        job.folder.event("finished", f"{job.step:,} steps", step=job.step, metrics=msgspec.to_builtins(metrics))
        return metrics

    def learn(self) -> None:
        """Steps, and what is due after each, until the length is reached or too many in a row were skipped."""
        job = self.job
        self.scorer.go_on()
        self.take_in()
        if job.evaluated_step != job.step and self.evaluation_due():
            self.score()  # what had come between the checkpoint of this step and its evaluation: a signal, a kill
        while self.hopeless_at is None and self.progress() < 1 and not self.stalled():
            self.full_ring.before_step(self.progress())
            self.step()
            self.tracer.between_steps(job.step)
            self.read()
            self.heed_signals()
            if self.save_due.now(job.step):
                self.save()
            if self.evaluation_due():
                self.score()
        self.catch_up()

    def evaluation_due(self) -> bool:
        """Whether to evaluate now: in the middle of the length, and not on a way that leads back."""
        if not self.eval_due.now(self.job.step) or self.progress() >= 1:
            return False
        self.catch_up()  # also so that an evaluation has windows of its own
        return self.hopeless_at is None

    def go_back(self, failed_at: int) -> None:
        """Begins again from the last sound state, at a lower rate."""
        self.take_in()
        with self.ledger.phase("recovery"):
            go_back(self.job, failed_at, self.rate, self.say)
        self.read_steps, self.hopeless_at = self.job.step, self.job.hopeless_at
        self.copying = self.scorer.metrics = None
        self.watch = watch_of(self.job)

    def compile(self) -> None:
        """Makes the program of the step, before its first picture is loaded."""
        job, run = self.job, self.job.config.run
        self.screen.note("compiling the model; --eager does without")
        with self.ledger.phase("compile"):
            case = worst_case(run.batch // self.parts, canvas=job.config.data.canvas, slots=job.slots,
                              classes=len(job.index.class_names), device=job.device)  # fmt: skip
            compile_now(job.model, self.compute, job.stepper, case, job.device.autocast(run.precision))

    def step(self) -> None:
        """One optimizer step: its pictures, forward, losses, backward, the weights' move."""
        job, config = self.job, self.job.config
        began = time.perf_counter()
        with self.ledger.phase("input_wait"):
            batch = next(job.loader)
            self.ledger.split(job.loader.last_wait)
        with self.ledger.compute(again=job.step < job.redo_until):
            if self.copying is not None:  # a snapshot is being copied: the weights may move only after it
                self.copying.block_device()
                self.copying = None
            batch = augment_batch(batch, config.data, self.progress())
            losses = forward_backward(
                self.compute, job.stepper, batch, self.parts, job.device.autocast(config.run.precision)
            )
            self.rate = rate_at(config.optim, job.step, self.progress()) / SLOWDOWN**job.slowed
            norm, bad = job.stepper.step(self.rate, job.step)
            job.meter.add(losses, norm, bad, job.step)
        job.step += 1
        job.trained_s += time.perf_counter() - began

    def progress(self) -> float:
        """Share of the length that is done, 0 … 1."""
        if self.job.total_steps is not None:
            return self.job.step / self.job.total_steps
        return self.job.trained_s / (60 * self.length.value)

    def stalled(self) -> bool:
        """Whether the last `patience` evaluations in a row brought no better AP."""
        return 0 < self.job.config.run.patience <= self.job.stale

    def read(self, *, wait: bool = False) -> None:
        """Writes a window's line once a second, with the losses of the steps whose copy has arrived; wait: now."""
        job = self.job
        if self.reading is None:
            if not wait and time.perf_counter() - self.window_s < WINDOW_S:
                return
            self.window_s = time.perf_counter()
            tensors, ready = self.stream.to_host(job.meter.take())
            self.reading = (tensors, ready, job.step - self.read_steps)
            self.read_steps = job.step
        tensors, ready, steps = self.reading
        if not wait and not ready.done():
            return
        ready.wait()
        self.reading = None
        reading = job.meter.read(tensors, steps)
        self.write_window(self.ledger.window(0.0), reading, steps)
        if reading.hopeless_at is not None:
            self.hopeless_at = reading.hopeless_at

    def catch_up(self) -> None:
        """Writes the lines of all steps so far: waits for the device, so only where it is waited for anyway."""
        while self.reading is not None or self.job.step > self.read_steps:
            self.read(wait=True)

    def read_all(self) -> None:
        """The last lines: all steps, and what the device did after them."""
        self.catch_up()
        self.job.device.wait()
        self.write_window(self.ledger.finish(), NO_STEPS, 0)

    def write_window(self, account: Account | None, reading: Reading, steps: int) -> None:
        """A line of steps.jsonl, and the same for the screen and TensorBoard."""
        job = self.job
        if account is None or account.wall_s <= 0:
            return
        window = StepWindow(
            t=time.time(),
            attempt=job.folder.attempt,
            step=self.read_steps,
            steps=steps,
            pictures=steps * job.config.run.batch,
            wall_s=account.wall_s,
            devices=1,
            phases=account.phases,
            input=account.input,
            losses=reading.losses,
            rate=self.rate if steps else None,
            grad_norm=reading.norm,
            skipped=reading.skipped,
            memory_peak_bytes=job.device.memory().peak,
            starved=account.starved,
            cpu=account.cpu,
        )
        job.folder.append(STEPS, window)
        self.board.window(window)
        self.full_ring.seen(window)
        if steps:
            self.show(window)
            for alarm in self.watch.see(window, self.progress()):
                self.say(alarm.kind, alarm.text, **alarm.data)

    def show(self, window: StepWindow) -> None:
        done, memory = self.progress(), self.job.device.memory()
        left = self.job.trained_s * (1 - done) / done if 0 < done < 1 else None
        self.screen.progress(window, done=min(1.0, done), total_steps=self.job.total_steps, eta_s=left,
                             memory=(memory.peak, memory.total))  # fmt: skip

    def save(self, unscored: Unscored | None = None) -> None:
        """Starts saving a checkpoint, unless this step's is there; the files are written in the background.

        unscored: what the continued run shall score first; else a score that is under way is waited for.
        """
        job = self.job
        self.take_in()
        with self.ledger.phase("checkpoint"):
            job.writer.wait()
            if job.writer.saved_step == job.step:
                return
            pending = None if unscored is None else unscored.as_state()
            snapshot = self.snapshot(start.state_of(job) | {"unscored": pending}, ap=None)
            job.writer.save(snapshot)
        self.copying = snapshot.ready
        self.save_due.done()

    def snapshot(self, state: dict[str, Any], *, ap: float | None) -> checkpoint.Snapshot:
        """The averaged weights with their card, and a state to continue from (empty for the weights alone)."""
        job = self.job
        job.card.step, job.card.ap = job.step, ap
        weights = job.stepper.averaged.state_dict()
        return checkpoint.snapshot(self.stream, step=job.step, card=job.card.header(), weights=weights, state=state)

    def score(self, *, at_once: bool = False) -> None:
        """Runs the averaged weights over the validation split. How good they are is found out beside training, or at
        once where that is asked for, could end the run, or lacks the memory."""
        job = self.job
        self.take_in()
        with self.ledger.phase("eval"):
            found = find_boxes(job, self.heed_signals)
        with self.ledger.phase("checkpoint"):
            weights = self.snapshot({}, ap=None)
        self.copying = weights.ready
        self.scorer.start(Unscored(job.step, found, weights))
        job.evaluated_step = job.step
        self.eval_due.done()
        if not self.remarked and (remark := job.model.remark()) is not None:  # the device has been waited for
            self.say("warning", remark)
            self.remarked = True
        if at_once or 0 < job.config.run.patience <= job.stale + 1 or not self.scorer.has_room(found):
            self.take_in()
        self.write_window(self.ledger.window(0.0), NO_STEPS, 0)

    def take_in(self) -> None:
        """Before something else than steps: takes in a score that is there; a signal meanwhile saves at once."""
        self.tracer.abandon()
        with self.ledger.phase("eval"):
            self.scorer.take_in(self.heed_signals)

    def score_final(self) -> Metrics:
        """Scores and saves the final weights, if patience has not ended the run after their score."""
        job = self.job
        if self.scorer.metrics is None or job.evaluated_step != job.step:
            self.score(at_once=True)
        metrics = self.scorer.metrics
        assert metrics is not None
        with self.ledger.phase("checkpoint"):
            snapshot = self.snapshot({}, ap=metrics.ap)
            job.writer.save_weights(snapshot, [FINAL])
        return metrics

    def heed_signals(self) -> None:
        """Where a signal has come, the training is saved and ends; after SIGUSR2 the next steps are traced."""
        if self.stop.trace_asked:
            self.stop.trace_asked = False
            self.tracer.ask()
        if self.stop.requested:
            self.preempt()

    def preempt(self) -> None:
        """Saves and leaves with exit code 75; without saving where the run is not ours any more."""
        job = self.job
        if self.stop.error is not None:
            raise self.stop.error
        self.say("note", f"{self.stop.requested}: saving")
        self.save(self.scorer.give_up())
        with self.ledger.phase("checkpoint"):
            job.writer.wait()
        self.read_all()
        raise stopped(job, self.stop)

    def close(self) -> None:
        """Ends what goes on beside, whatever ended the training; a score that nobody took in has no checkpoint."""
        self.scorer.give_up()
        self.tracer.close()
        self.job.writer.wait()
        left, self.read_steps = self.job.step - self.read_steps, self.job.step
        if left:  # an error ended it: the time of these steps is known, their losses are not
            with contextlib.suppress(RuntimeError):  # of a device that is gone: it is not to hide the error
                self.write_window(self.ledger.window(0.0), NO_STEPS, left)
