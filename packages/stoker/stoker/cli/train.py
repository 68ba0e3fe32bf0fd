"""`stoker train`, its help on one screen, and `stoker import`, which makes its settings of those of another tool."""

import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from stoker.cli.quick_import import quick_imports
from stoker.config.settings import Config, from_toml
from stoker.knowledge import read_toml
from stoker_watch.cli import PARAMETER, described
from stoker_watch.durations import join_length
from stoker_watch.errors import CaptureFailed
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.printable import print_json, print_text

if TYPE_CHECKING:
    from stoker.training.local_ranks import Result


def flags_of(command: App) -> dict[str, bool]:
    """The long flags of a command, without `--`, and whether each is a switch."""
    arguments = [a for a in command.assemble_argument_collection(default_parameter=PARAMETER) if a.parse]
    flags = {name[2:]: argument.hint is bool for argument in arguments for name in argument.names if name[:2] == "--"}
    return flags | {"help-all": True}


@described
def train(
    data: str | None = None,
    /,
    *,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008  # frozen
    epochs: Annotated[float | None, Parameter(group="Run")] = None,
    steps: Annotated[int | None, Parameter(group="Run")] = None,
    max_time: Annotated[str | None, Parameter(group="Run")] = None,
    run_dir: Annotated[str | None, Parameter(group="Run")] = None,
    resume: Annotated[str | None, Parameter(group="Run")] = None,
    config_file: Annotated[Path | None, Parameter(name="--config", group="Run")] = None,
    accept_changed_data: Annotated[bool, Parameter(group="Run", negative="")] = False,
    devices: Annotated[int | None, Parameter(group="Run")] = None,
    restarts: Annotated[int, Parameter(group="Run")] = 0,
    dry_run: Annotated[bool, Parameter(group="Run", negative="")] = False,
    verbose: Annotated[bool, Parameter(group="Run", negative="")] = False,
    trace: Annotated[bool, Parameter(group="Run", negative="")] = False,
    log_format: Annotated[Literal["text", "json"], Parameter(group="Monitoring")] = "text",
    monitor: Annotated[MonitoringOptions, Parameter(name="*", group="Monitoring")] = MonitoringOptions(),  # noqa: B008  # frozen
) -> None:
    """Trains a detector. A setting that is not set is derived from data and device, and printed with its reason.

    The same command again continues an unfinished run, and starts a new one after a finished one.
    """
    if restarts and not dry_run:
        from stoker.training.supervisor import Supervisor, without_restarts

        command = [sys.executable, "-m", "stoker", *without_restarts(sys.argv[1:])]
        sys.exit(Supervisor(command, restarts).run())
    starts_ranks = False
    if devices is not None:
        from stoker.training.local_ranks import RankRequest, must_start_ranks, run_ranks

        starts_ranks = not dry_run and must_start_ranks(devices)
    if not starts_ranks:
        with quick_imports():
            from stoker.training.run import train as train_loop
            from stoker.training.supervisor import replace_process
            from stoker_watch.recording.telemetry.host import process_start_s

    user_config = join_settings(config, config_file, data, epochs=epochs, steps=steps, max_time=max_time)
    if dry_run:
        from stoker.training.run import print_plan

        monitor.validate()
        print_plan(user_config, run_dir=run_dir, resume=resume, verbose=verbose, num_devices=devices or 1)
        return
    from stoker.training.local_ranks import TrainOptions

    options = TrainOptions(
        run_dir=run_dir, resume=resume, accept_changed_data=accept_changed_data, trace=trace, monitor=monitor,
        log_format=log_format, verbose=verbose,
    )  # fmt: skip
    result: Result
    if starts_ranks:
        result = run_ranks(devices or 1, RankRequest(settings=user_config.set_fields(), options=options))
    else:
        try:
            result = train_loop(user_config, options, started_s=process_start_s(), exit_when_hung=True)
        except CaptureFailed:
            replace_process("a CUDA graph could not be captured")
            raise
    from stoker.training.cluster import find_place

    place = find_place()
    if place is not None and place.rank:
        return  # of ranks or machines that train together, the first one prints
    if log_format == "json":
        return  # its last line is the event `finished`

    from stoker.report.terminal import print_metrics
    from stoker_watch.report.console import redirect_to_devnull
    from stoker_watch.storage.uri import display_path

    run = display_path(result.run)
    try:
        print_metrics(result.metrics)
        print_text(f"results: {run} (`stoker why {run}` shows where the time went)")
        print_text(f"`stoker report {run}` makes one page of everything")
        print(f"AP50 {0.0 if result.metrics.ap50 is None else result.metrics.ap50:.3f}", flush=True)
    except OSError:  # the reader is gone, or the disk is full; the run has all of it, and the training succeeded
        redirect_to_devnull(sys.stdout)


def join_settings(config: Config, config_file: Path | None, data: str | None, **length: float | str | None) -> Config:
    """The settings of the command line, with those of a file that it does not set. length: the flags for it."""
    config = config.replace(**join_length({**length, "max_duration": config.run.max_duration}))
    if config_file is not None:
        stored, reasons = from_toml(config_file)  # a value with a reason was derived, and is derived again
        config = stored.replace(**dict.fromkeys(reasons)).replace(**config.set_fields())
    return config if data is None else config.replace(data=data)


def short_help(app: App, name: str) -> str | None:
    """The help on one screen of a command that takes the settings of a training: common flags with the first clause of
    their descriptions, and examples. None: it has none."""
    page = read_toml("commands.toml")["help"].get(name)
    if page is None:
        return None
    command = app[name]
    arguments = command.assemble_argument_collection(default_parameter=app.default_parameter, parse_docstring=True)
    texts = {name: argument.parameter.help or "" for argument in arguments for name in argument.names}
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    lines = [
        f"Usage: {page['usage']}",
        "",
        *textwrap.wrap(page["text"], width),
        "",
    ]
    for flag in page["flags"]:
        clause = re.split(r"(?<=[\w)])[.;](?:\s|$)", " ".join(texts[f"--{flag}"].split()), maxsplit=1)[0]
        lines.append(textwrap.shorten(clause, width - 17, placeholder=" …"))
        lines[-1] = f"  --{flag:<12} {lines[-1]}"
    lines += ["", "Examples:"]
    longest = max(map(len, page["examples"]))
    lines += [f"  {example:<{longest}}  # {comment}"[:width] for example, comment in page["examples"].items()]
    lines += ["", f"stoker {name} --help-all lists all settings; docs/settings.md describes them."]
    return "\n".join(lines)


@described
def import_pipeline(
    pipeline: Path,
    /,
    *,
    out: Path = Path("config.toml"),
    data: str | None = None,
    run: bool = False,
    run_dir: str | None = None,
    all_: Annotated[bool, Parameter(name="--all", negative="")] = False,
    json: bool = False,
) -> None:
    """Imports a pipeline.config of the TensorFlow Object Detection API, without TensorFlow.

    Writes the settings, and reports each field of the file: carried over exactly, with a substitute, or not. See
    docs/migrate.md.
    """
    from stoker.migration.pipeline import import_pipeline as read_pipeline
    from stoker.migration.pipeline import print_import, write_config
    from stoker_watch.errors import UsageError

    config, report = read_pipeline(pipeline, data=data)
    write_config(config, report, out)
    if json:
        print_json(report)
    else:
        print_import(report, show_exact=all_)
        source = "" if config.data.data is not None else "DATA "
        print_text(f"written: {out}; `stoker train {source}--config {out}` trains with it")
    if not run:
        return
    if config.data.data is None:
        raise UsageError("What should be trained on?", cause="the file has no path of records", fix="--data FOLDER")
    train(config=config, run_dir=run_dir)
