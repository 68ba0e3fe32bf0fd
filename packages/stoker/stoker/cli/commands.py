"""The commands of the trainer, and the translation of flags of other tools. Each command imports its code when it runs,
so that `stoker --help` starts at once."""

import contextlib
import sys

from cyclopts import App

from stoker.cli.data import data_app
from stoker.cli.launch import launch_app
from stoker.cli.models import evaluate, export, list_models, predict
from stoker.cli.planning import check, plan
from stoker.cli.search import search
from stoker.cli.train import flags_of, import_pipeline, short_help, train
from stoker.cli.tune import tune
from stoker.config.flag_names import translate
from stoker_watch.errors import StokerError
from stoker_watch.printable import print_text


def add_to(app: App) -> None:
    app.help = (
        "Trains object detectors, keeps the device busy, survives faults, and shows where every device-second went."
    )
    app.help_epilogue = (
        "Start with `stoker train demo`, then `stoker train FOLDER`. Exit codes: 0 done, 1 another error, 2 usage, "
        "3 pre-flight failed, 4 data, 5 out of memory, 6 diverged, 7 hung, 75 preempted (state saved, run the same "
        "command again)."
    )
    app.command(train, sort_key=1)
    app.command(check, sort_key=1)
    app.command(plan, sort_key=1)
    app.command(launch_app)
    app.command(tune, sort_key=1)
    app.command(search, sort_key=1)
    app.command(evaluate, name="eval", sort_key=3)
    app.command(predict, sort_key=4)
    app.command(export, sort_key=5)
    app.command(import_pipeline, name="import", sort_key=6)
    app.command(data_app)
    app.command(list_models, name="models", sort_key=6)


def find_flags(app: App, arguments: list[str]) -> dict[str, bool] | None:
    """The flags of the command that the arguments name; None: none is named, or its flags are of another command."""
    names, apps, _ = app.parse_commands(arguments)
    has_own = bool(names) and names[0][:1] != "-" and names[0] not in ("watch", "launch")
    return flags_of(apps[-1]) if has_own and apps[-1].default_command is not None else None


def prepare(app: App, arguments: list[str]) -> list[str] | None:
    """The arguments with stoker's names for flags of other tools, which it says; None: it has printed the help."""
    arguments, notes = translate(arguments, lambda words: find_flags(app, words))
    for note in notes:
        print_text(f"stoker: {note}", file=sys.stderr)
    name = arguments[0] if arguments else ""
    if {"--help", "-h"} & set(arguments) and (text := short_help(app, name)) is not None:
        print(text)
        return None
    if name != "watch":  # of a watched job, the flag is the job's own
        arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    return arguments


def is_rank() -> bool:
    """Whether a launcher started this process as one of several that train together."""
    from stoker.training.cluster import find_place

    with contextlib.suppress(StokerError):  # malformed variables: the command has reported them
        return find_place() is not None
    return False
