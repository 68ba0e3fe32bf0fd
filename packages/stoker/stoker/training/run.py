"""A training from its first line to its last: chooses or opens the run, builds it, trains (`loop.py`), records its end.

What is chosen is in `run_selection.py`, what is built in `start.py`. Errors end the run with the exit codes of
`errors.py`, each as an event; after a signal the state is saved, and the exit code is 75. `--dry-run` only says what a
training would do (`print_plan`); its settings are derived as for a training, with the trials of the batch size.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from stoker.config.settings import Config, settings_table
from stoker.data.index import Index
from stoker.hardware.device import Device
from stoker.hardware.memory_errors import out_of_memory_as_error
from stoker.models import get_architecture
from stoker.models.weights.hub import find_weights
from stoker.report.terminal import Screen
from stoker.training import bucket_run, run_selection, start
from stoker.training.bucket_run import VertexFolders, copying_results, vertex_folders
from stoker.training.checkpoint import LoadedCheckpoint
from stoker.training.cluster import Devices, find_place
from stoker.training.defaults.derive import total_steps
from stoker.training.defaults.model_choice import STEP_OVERHEAD_S, estimate_images_per_second
from stoker.training.local_ranks import Result, TrainOptions
from stoker.training.loop import Training
from stoker.training.ranks import Ranks, joined
from stoker.training.recorder import open_folder
from stoker.training.state import TrainSetup
from stoker.training.stopper import NoticeWatcher, StopRequest, stop_on_signals
from stoker_watch.durations import parse_duration
from stoker_watch.errors import Preempted, StokerError
from stoker_watch.monitor.alerts import RecordLine
from stoker_watch.monitor.monitor import monitoring
from stoker_watch.recording.own_stacks import TrainingStacks
from stoker_watch.recording.run_writer import exit_code_for
from stoker_watch.report.format import count, duration, plural
from stoker_watch.runs.records import WARNING_KINDS, RunFolder
from stoker_watch.storage.uri import display_path, is_uri

IMPORTANT_SETTINGS = (
    "data", "model", "weights", "image-size", "max-duration", "batch-size", "lr", "precision", "device", "workers",
)  # fmt: skip
"""Settings that are always printed; others only if the user set them, or with `--verbose`."""


def train(
    user_config: Config,
    options: TrainOptions = TrainOptions(),  # noqa: B008  # frozen
    *,
    started_s: float | None = None,
    exit_when_hung: bool = False,
    after_evaluation: Callable[[], str | None] | None = None,
    callbacks: Sequence[Callable[[RecordLine], object]] = (),
) -> Result:
    """Trains until the requested length is reached.

    started_s: the moment of `time.perf_counter` from which the ledger counts, default now; exit_when_hung: end the
    process with code 7 if the training hangs, instead of only recording it; after_evaluation: called by a thread when
    an evaluation is in the run's events, the reason that it returns stops the training as a signal does. Raises
    StokerError; `Preempted` after a signal, when everything is saved.
    """
    started_s = time.perf_counter() if started_s is None else min(started_s, time.perf_counter())
    options.monitor.validate()
    if options.run_dir is None and options.resume is None:
        options = msgspec.structs.replace(options, run_dir=vertex_folders().checkpoints)
    place = find_place()
    finished = None  # a machine that is started again after all have finished must not wait for the others
    if place is not None and not place.is_one_machine:
        finished = run_selection.find_finished(user_config, options.run_dir, options.resume)
    with joined(place, finished) as ranks, stop_on_signals() as stop_request, contextlib.ExitStack() as stack:
        stop_request.after_evaluation = after_evaluation
        run = _OpenRun(options, ranks, stop_request, stack, callbacks)
        run.open(user_config)
        return run.train(started_s, os._exit if exit_when_hung else None)


class _OpenRun:
    """A run while this process trains it. stack: closes what is opened."""

    resolved: start.ResolvedRun
    folder: RunFolder
    messages: list[str]
    """Messages for the run's events."""

    def __init__(
        self,
        options: TrainOptions,
        ranks: Ranks,
        stop_request: StopRequest,
        stack: contextlib.ExitStack,
        callbacks: Sequence[Callable[[RecordLine], object]] = (),
    ) -> None:
        self.callbacks = callbacks
        self.options, self.ranks, self.stop_request, self.stack = options, ranks, stop_request, stack
        output: TextIO | None = sys.stderr if options.log_format == "json" else None
        if not ranks.is_main:  # rank 0 has the terminal
            output = stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115
        self.screen = stack.enter_context(Screen(output))
        self.stacks = TrainingStacks(Path(__file__).parents[1])
        stack.callback(self.stacks.stop)
        self.remote: bucket_run.BucketRun | None = None
        self.setup: TrainSetup | None = None

    def open(self, user_config: Config) -> None:
        """Chooses the run, completes its settings, and opens its folder."""
        ranks = self.ranks
        path, user_config, self.messages = ranks.share(lambda: self._choose(user_config))
        with out_of_memory_as_error("looking for the batch that fits"):
            self.resolved = start.resolve_run(user_config, path, ranks)
        check_stop(self.stop_request, ranks)
        config, reasons = self.resolved.config, self.resolved.reasons
        self.folder = open_folder(
            ranks,
            lambda: run_selection.open_run_folder(
                config,
                reasons,
                path,
                self.options.run_dir,
                self.stack,
                self.messages,
                ranks.world_size,
                self.resolved.extension,
            ),
        )
        self.stacks.write_to(self.folder)
        if self.remote is not None:
            self.messages += self.remote.messages
            self.stack.push(self.remote.finish)
        if ranks.is_main:
            self.stack.callback(run_selection.write_diagnosis, self.folder, self.screen.warning)

    def _choose(self, user_config: Config) -> tuple[Path | None, Config, list[str]]:
        """Chooses the run, in rank 0. A run in a bucket is its working copy from here on."""
        config = run_selection.with_absolute_paths(user_config)
        config, resume, messages = run_selection.find_meant_run(config, self.options.resume)
        self.options = options = msgspec.structs.replace(self.options, resume=resume)
        self.remote = bucket_run.join_bucket_run(
            options.run_dir, options.resume, config,
            stop_request=self.stop_request, stack=self.stack, note=self.screen.note,
        )  # fmt: skip
        if self.remote is not None:
            local = str(self.remote.local_dir)
            places = {"run_dir": local} if options.resume is None else {"run_dir": None, "resume": local}
            self.options = options = msgspec.structs.replace(options, **places)
        path, config, more = run_selection.choose_run(config, options.run_dir, options.resume, self.stack)
        return path, config, messages + more

    def train(self, started_s: float, on_hang: Callable[[int], object] | None) -> Result:
        """Trains, and records the end."""
        try:
            if self.ranks.is_main:
                stop = functools.partial(self.stop_request.request, "an alert")
                watch = monitoring(
                    self.folder,
                    self.options.monitor,
                    stop=stop,
                    log=self.options.log_format,
                    say=self.screen.warning,
                    callbacks=self.callbacks,
                )
                self.stack.enter_context(watch)
            vertex = vertex_folders() if self.ranks.is_main else VertexFolders()
            with (
                self.ranks.explaining(),
                out_of_memory_as_error("training"),
                contextlib.nullcontext()
                if self.remote is None
                else self.remote.uploading(self.stop_request, self.log_event),
                copying_results(self.folder.path, vertex, self.log_event),
            ):
                setup, loaded = self._build()
                training = Training(
                    setup, loaded, self.screen, self.stop_request, started_s, self.log_event,
                    trace=self.options.trace, on_hang=on_hang, stop_stacks=self.stacks.stop,
                    adapted=frozenset(self.resolved.reasons),
                )  # fmt: skip
                loaded = None  # its memory is free from here on
                metrics = training.run()
        except BaseException as error:
            kind = "preempted" if isinstance(error, Preempted) else "failed"
            text = str(error) if isinstance(error, StokerError) else f"{type(error).__name__}: {error}"
            self.folder.event(kind, text, step=self._step(), exit_code=exit_code_for(error))
            raise
        return Result(self.folder.path, setup.state.step, metrics)

    def _build(self) -> tuple[TrainSetup, LoadedCheckpoint | None]:
        """Builds what the loop works with, and watches for notices of a preemption from then on."""
        _print_settings(self.screen, self.resolved, verbose=self.options.verbose)
        for line in self.messages:
            self.log_event("info", line)
        processes = start.start_worker_processes(self.resolved, self.log_event, stack_reader=self.stacks.pid)
        if processes is not None:
            self.stack.callback(processes.close)
            self.stacks.note_workers(processes.pids)
        self.setup, loaded = start.build(
            self.resolved, self.folder, self.log_event, processes, accept_changed_data=self.options.accept_changed_data
        )
        self.stack.callback(self.setup.loader.close)
        self.stack.callback(self.stacks.stop)
        notices = NoticeWatcher(
            lambda notice: self.stop_request.request(notice.reason, grace_s=notice.grace_s), self.log_event
        )
        self.stack.callback(notices.stop)
        notices.start()
        check_stop(self.stop_request, self.ranks)
        return self.setup, loaded

    def _step(self) -> int | None:
        return None if self.setup is None else self.setup.state.step

    def log_event(self, kind: str, text: str, /, **data: Any) -> None:
        """Prints a line and writes the same line into the run's events."""
        (self.screen.warning if kind in WARNING_KINDS else self.screen.note)(text)
        self.folder.event(kind, text, step=self._step(), **data)


def check_stop(stop_request: StopRequest, ranks: Ranks) -> None:
    """Raises Preempted, or the error, if this rank or another was asked to stop. Before the first step."""
    if ranks.any(stop_request.requested_by is not None):
        stop_request.request("a signal to another rank")
        stop_request.check()


def _print_settings(screen: Screen, resolved: start.ResolvedRun, *, verbose: bool) -> None:
    """Prints what the user set and what matters; the rest is in config.toml."""
    rows = settings_table(resolved.config, resolved.reasons)
    shown = [row for row in rows if verbose or row[2] is None or row[0] in IMPORTANT_SETTINGS]
    screen.settings(shown)
    if len(shown) < len(rows):
        others = plural(len(rows) - len(shown), "other setting")
        screen.note(f"{others} have their defaults: --verbose shows them, config.toml of the run keeps them")


def print_plan(
    user_config: Config, *, run_dir: str | None, resume: str | None, verbose: bool, num_devices: int
) -> None:
    """Derives everything that `train` would, and prints data warnings, the settings that matter, and the plan. Writes
    nothing but caches. num_devices: of this machine, which train together. Raises StokerError where `train` would
    before its first step."""
    with contextlib.ExitStack() as stack, Screen() as screen:  # the stack holds the lock of a run to be continued
        user_config = run_selection.with_absolute_paths(user_config)
        user_config, resume, messages = run_selection.find_meant_run(user_config, resume)
        path: Path | None = None
        if not is_uri(run_dir or resume or ""):
            path, user_config, more = run_selection.choose_run(user_config, run_dir, resume, stack)
            messages += more
        resolved = start.resolve_run(user_config, path, devices=Devices(num_devices, num_devices), fetch=None)
        url = get_architecture(resolved.config.model.model).urls.get(resolved.config.model.weights)
        if url is not None and find_weights(url) is None:
            messages.append(f"downloads {url} first; without a network, --weights none or a file")
        elif path is None:  # a file of another model is refused, as in a training
            start.build_initial_model(resolved.config, resolved.index, resolved.device, lambda *_, **__: None)
        data_messages = start.describe_data(resolved.index)
        data_messages += [("warning", text) for text in start.warn_about_settings(resolved)]
        for kind, text in sorted(data_messages, key=lambda message: message[0] != "warning"):
            (screen.warning if kind == "warning" else screen.note)(text)
        _print_settings(screen, resolved, verbose=verbose)
        messages += _describe_training(resolved.config, resolved.index, resolved.device)
        new = f"writes into {run_dir or 'a new folder below runs/'}"
        messages.append(new if path is None else f"continues {display_path(path)}")
        screen.note("plan:")
        for line in messages:
            screen.note(f"- {line}")
        screen.note("nothing was trained or written (--dry-run)")


def _describe_training(config: Config, index: Index, device: Device) -> list[str]:
    run, lines = config.run, []
    for split, verb in (("train", "trains on"), ("val", "is evaluated on")):
        indices = index.image_indices(split)
        num_boxes = int((index.offsets[indices + 1] - index.offsets[indices]).sum())
        lines.append(f"{verb} {plural(len(indices), 'image')} with {plural(num_boxes, 'box', 'boxes')}")
    lines[0] += f" of {plural(len(index.class_names), 'class', 'classes')}"
    num_images, length = len(index.image_indices("train")), parse_duration(run.max_duration)
    steps = total_steps(length, num_images, run.batch_size)
    if steps is None:
        lines.append(f"for {length.value:g} minutes, in batches of {run.batch_size}")
    else:
        epochs = steps * run.batch_size / num_images
        lines.append(f"{count(steps)} steps of {run.batch_size} images: each image is seen {epochs:.3g} times")
    intervals = ("evaluates", "eval-every", run.eval_every), ("saves", "checkpoint-every", run.checkpoint_every)
    for verb, name, text in intervals:
        interval = parse_duration(text, name)
        when = f"every {interval.value:g} {interval.unit}" if interval.value else "at the end only"
        lines.append(f"{verb} {when}")
    if steps is not None and (predicted := start.find_prediction(config, device)) is not None:
        error = f"± {100 * predicted.step_error:.0f} %, as `stoker plan` predicts a step"
        lines.append(f"takes about {duration(steps * predicted.step_s)} ({error}), without evaluations")
    elif steps is not None and device.is_cpu:
        speed = estimate_images_per_second(get_architecture(config.model.model), config.data.image_size)
        took_s = steps * (run.batch_size / speed + STEP_OVERHEAD_S)
        lines.append(f"takes very roughly {duration(took_s)} on this CPU, without evaluations")
    return lines
