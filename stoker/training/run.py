"""A training from its first line to its last: chooses or opens the run, builds it, trains (`loop.py`), records its end.

What is chosen is in `run_selection.py`, what is built in `start.py`. Errors end the run with the exit codes of
`errors.py`, each as an event; after a signal the state is saved, and the exit code is 75.
"""

import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

from stoker.config.settings import Config, settings_table
from stoker.errors import Preempted, StokerError
from stoker.hardware.device import out_of_memory_as_error
from stoker.monitor.monitor import monitoring
from stoker.monitor.options import MonitoringOptions
from stoker.report.terminal import Screen
from stoker.runs.records import WARNING_KINDS
from stoker.training import bucket_run, run_selection, start
from stoker.training.cluster import find_place
from stoker.training.local_ranks import Result
from stoker.training.loop import Options, Training
from stoker.training.ranks import Ranks, joined
from stoker.training.recorder import open_folder
from stoker.training.state import TrainSetup
from stoker.training.stopper import NoticeWatcher, StopRequest, stop_on_signals
from stoker.training.uploads import VertexFolders, copying_results, vertex_folders


def train(
    user_config: Config,
    *,
    run_dir: str | None = None,
    resume: str | None = None,
    accept_changed_data: bool = False,
    started_s: float | None = None,
    trace: bool = False,
    monitor: MonitoringOptions = MonitoringOptions(),  # noqa: B008  # frozen
    log_format: Literal["text", "json"] = "text",
    exit_when_hung: bool = False,
) -> Result:
    """Trains until the requested length is reached.

    run_dir: folder or URI of the run; resume: an unfinished run to continue, with its own settings;
    accept_changed_data: continue a run also if its data set changed; started_s: the moment of `time.perf_counter` from
    which the ledger counts, default now; trace: keep Chrome traces of some steps; monitor: alerts and metrics while it
    runs; log_format: json writes JSON lines to stdout and text to stderr; exit_when_hung: end the process with code 7
    if the training hangs, instead of only recording it.
    Raises StokerError; `Preempted` after a signal, when everything is saved.
    """
    started_s = time.perf_counter() if started_s is None else min(started_s, time.perf_counter())
    monitor.validate()
    place = find_place()
    vertex = vertex_folders()
    if run_dir is None and resume is None:
        run_dir = vertex.checkpoints
    with (
        joined(place) as ranks,
        stop_on_signals() as stop_request,
        contextlib.ExitStack() as stack,
    ):
        screen = stack.enter_context(make_screen(ranks, log_format, stack))
        remote: bucket_run.BucketRun | None = None

        def choose_run() -> tuple[Path | None, Config, list[str]]:
            nonlocal remote, run_dir, resume
            given = run_selection.with_absolute_paths(user_config)
            remote = bucket_run.join_bucket_run(
                run_dir, resume, given, stop_request=stop_request, stack=stack, note=screen.note
            )
            if remote is not None:
                run_dir, resume = (str(remote.local_dir), None) if resume is None else (None, str(remote.local_dir))
            return run_selection.choose_run(given, run_dir, resume, stack)

        path, user_config, messages = ranks.share(choose_run)
        with out_of_memory_as_error("looking for the batch that fits"):
            resolved = start.resolve_run(user_config, path, ranks)
        check_stop(stop_request, ranks)
        folder = open_folder(
            ranks,
            lambda: run_selection.open_run_folder(
                resolved.config, resolved.reasons, path, run_dir, stack, messages, ranks.world_size
            ),
        )
        if remote is not None:
            messages += remote.messages
            stack.push(remote.finish)
        if ranks.is_main:
            stop = functools.partial(stop_request.request, "an alert")
            stack.callback(run_selection.write_diagnosis, folder, screen.warning)
            stack.enter_context(monitoring(folder, monitor, stop=stop, log=log_format))
        setup: TrainSetup | None = None

        def current_step() -> int | None:
            return None if setup is None else setup.state.step

        def log_event(kind: str, text: str, /, **data: Any) -> None:
            """Prints a line and writes the same line into the run's events."""
            (screen.warning if kind in WARNING_KINDS else screen.note)(text)
            folder.event(kind, text, step=current_step(), **data)

        try:
            with (
                ranks.explaining(),
                out_of_memory_as_error("training"),
                bucket_run.uploading(remote, stop_request, log_event),
                copying_results(folder.path, vertex if ranks.is_main else VertexFolders(), log_event),
            ):
                screen.settings(settings_table(resolved.config, resolved.reasons))
                for line in messages:
                    log_event("info", line)
                processes = start.start_worker_processes(resolved.config, resolved.index, resolved.device, log_event)
                if processes is not None:
                    stack.callback(processes.close)
                setup, loaded = start.build(
                    resolved, folder, log_event, processes, accept_changed_data=accept_changed_data, ranks=ranks
                )
                stack.callback(setup.loader.close)
                notices = NoticeWatcher(
                    lambda notice: stop_request.request(notice.reason, grace_s=notice.grace_s), log_event
                )
                stack.callback(notices.stop)
                notices.start()
                check_stop(stop_request, ranks)
                options = Options(
                    trace=trace,
                    on_hang=os._exit if exit_when_hung else None,
                    notice_grace_s=notices.grace_s,
                )
                training = Training(setup, loaded, screen, stop_request, started_s, log_event, options)
                loaded = None  # its memory is free from here on
                metrics = training.run()
        except BaseException as error:
            kind = "preempted" if isinstance(error, Preempted) else "failed"
            text, exit_code = (
                (str(error), {"exit_code": error.exit_code})
                if isinstance(error, StokerError)
                else (f"{type(error).__name__}: {error}", {})
            )
            folder.event(kind, text, step=current_step(), **exit_code)
            raise
        return Result(folder.path, setup.state.step, metrics)


def make_screen(ranks: Ranks, log_format: Literal["text", "json"], stack: contextlib.ExitStack) -> Screen:
    """The terminal; of rank 0 only. stack: closes what the others write to."""
    if not ranks.is_main:
        return Screen(stack.enter_context(Path(os.devnull).open("w")))
    return Screen(sys.stderr if log_format == "json" else None)


def check_stop(stop_request: StopRequest, ranks: Ranks) -> None:
    """Raises Preempted, or the error, if this rank or another was asked to stop. Before the first step."""
    if ranks.any(stop_request.requested_by is not None):
        stop_request.request("a signal to another rank")
        stop_request.check()
