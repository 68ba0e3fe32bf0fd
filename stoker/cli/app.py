"""The command line: the app, the exit codes, and the translation of flags of other tools.

The commands are in the modules beside it. Each imports its code when it runs, so that `stoker --help` and `stoker why`
start at once, also where torch is not installed. An error of the exception tree becomes a message and its exit code;
any other exception is a bug and keeps its traceback.
"""

import contextlib
import io
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from cyclopts import App

from stoker.cli.data import data_app
from stoker.cli.launch import launch_app
from stoker.cli.models import evaluate, export, list_models, predict
from stoker.cli.planning import check, plan
from stoker.cli.runs import report, watch, why
from stoker.cli.search import search
from stoker.cli.train import PARAMETER, flags_of, import_pipeline, train, train_help
from stoker.cli.tune import compare, tune
from stoker.config.flag_names import translate
from stoker.errors import Preempted, StokerError, system_limit
from stoker.printable import print_text

if TYPE_CHECKING:
    from rich.console import Console

app = App(
    name="stoker",
    help="Trains object detectors on cloud GPUs at full utilization, and shows where every GPU-second went.",
    version_flags=["--version"],
    help_epilogue="Start with `stoker train demo`, then `stoker train FOLDER`. Exit codes: 0 done, 1 another "
    "error, 2 usage, 3 pre-flight failed, 4 data, 5 out of memory, 6 diverged, 7 hung, 75 preempted (state saved, run "
    "the same command again).",
    default_parameter=PARAMETER,
    help_format="plaintext",  # markdown would cost a tenth of a second at every start
    suppress_keyboard_interrupt=False,  # `main` prints it
)
app.command(train, sort_key=1)
app.command(check, sort_key=1)
app.command(plan, sort_key=1)
app.command(launch_app)
app.command(tune, sort_key=1)
app.command(search, sort_key=1)
app.command(watch, sort_key=2, usage="Usage: stoker watch [--run-dir DIR] -- CMD ARGS… | stoker watch --pid N")
app.command(why, sort_key=2)
app.command(compare, sort_key=2)
app.command(evaluate, name="eval", sort_key=3)
app.command(predict, sort_key=4)
app.command(export, sort_key=5)
app.command(report, sort_key=5)
app.command(import_pipeline, name="import", sort_key=6)
app.command(data_app)
app.command(list_models, name="models", sort_key=6)
app.register_install_completion_command(help="Installs completion for your shell.", sort_key=7)


def main() -> None:
    """The entry point; never returns."""
    if os.getpid() == 1:  # of a container without an init: the kernel gives it no SIGTERM that it does not handle
        signal.signal(signal.SIGTERM, lambda *_: os._exit(Preempted.exit_code))  # until the training handles it
    if sys.stdout is None:  # the process was started without stdout (`>&-`)
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the encoding of a terminal lacks becomes `?`
    sys.excepthook = _print_traceback
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()  # a closed pipe is noticed here, not when Python exits
    except BrokenPipeError:
        from stoker.report.terminal import redirect_to_devnull

        for stream in (sys.stdout, sys.stderr):
            redirect_to_devnull(stream)
        code = 141  # the reader ended (`| head`): like other programs that SIGPIPE ends
    if "torch" in sys.modules and _is_rank():
        sys.stderr.flush()
        os._exit(code)  # a thread of gloo that frees a tensor while Python ends aborts it (PyTorch issue 190489)
    sys.exit(code)


def _is_rank() -> bool:
    """Whether a launcher started this process as one of several that train together."""
    from stoker.training.cluster import find_place

    with contextlib.suppress(StokerError):  # malformed variables: the command has reported them
        return find_place() is not None
    return False


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for line in "".join(traceback.format_exception(kind, error, trace)).splitlines():
        print_text(line, file=sys.stderr)


def _error_console(arguments: list[str]) -> "Console | None":
    """A console that cleans the arguments that the parser's messages quote; None: they need no cleaning."""
    if "".join(arguments).isprintable():
        return None
    from stoker.report.console import make_console, supports_cursor

    return make_console(sys.stderr, terminal=supports_cursor(sys.stderr), width=shutil.get_terminal_size().columns)


def find_flags(arguments: list[str]) -> dict[str, bool] | None:
    """The flags of the command that the arguments name; None: none is named, or its flags are of another command."""
    names, apps, _ = app.parse_commands(arguments)
    has_own = bool(names) and names[0][:1] != "-" and names[0] not in ("watch", "launch")
    return flags_of(apps[-1]) if has_own and apps[-1].default_command is not None else None


def _run(arguments: list[str]) -> int:
    """Runs the command; returns the exit code."""
    try:
        arguments, notes = translate(arguments, find_flags)
        for note in notes:
            print_text(f"stoker: {note}", file=sys.stderr)
        if arguments[:1] == ["train"] and {"--help", "-h"} & set(arguments):
            print(train_help(app))
            return 0
        if arguments[:1] == ["train"]:  # of a watched job, the flag is the job's own
            arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
        app(arguments, error_console=_error_console(arguments))
    except (StokerError, OSError, RuntimeError) as error:
        shown = system_limit(error) or error
        if not isinstance(shown, StokerError):
            raise
        with contextlib.suppress(OSError):  # stderr is closed or full; schedulers decide by the exit code
            print(f"stoker: {shown}", file=sys.stderr)
        return shown.exit_code
    except KeyboardInterrupt as error:
        print(f"stoker: interrupted {error}".rstrip(), file=sys.stderr)
        return 130
    except SystemExit as error:  # raised by the parser, after its message
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0
