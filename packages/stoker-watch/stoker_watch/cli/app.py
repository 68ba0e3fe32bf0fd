"""The command line: the app and the exit codes. The commands are in `runs.py`; the trainer adds its own (`trainer.py`).

An error of the exception tree becomes a message and its exit code; any other exception is a bug and has its traceback.
"""

import contextlib
import io
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from cyclopts import App, CycloptsError, UnusedCliTokensError

from stoker_watch.cli import PARAMETER, trainer
from stoker_watch.cli.runs import compare, report, watch, why
from stoker_watch.errors import Preempted, StokerError, UsageError, system_limit
from stoker_watch.printable import print_text

END_TIMEOUT_S = 60.0
"""The longest that Python's own end may take, after a command has done everything."""

app = App(
    name="stoker",
    help="Watches training jobs, and shows where every GPU-second went.",
    version_flags=["--version"],
    help_epilogue="Start with `stoker watch -- python train.py`, then `stoker why RUN`. Exit codes: 0 done, 1 another "
    "error, 2 usage; `watch`: that of the job.",
    default_parameter=PARAMETER,
    help_format="plaintext",  # markdown would cost a tenth of a second at every start
    suppress_keyboard_interrupt=False,  # `main` prints it
)
app.command(watch, sort_key=2, usage="Usage: stoker watch [--run-dir DIR] -- CMD ARGS… | stoker watch --pid N")
app.command(why, sort_key=2)
app.command(compare, sort_key=2)
app.command(report, sort_key=5)
app.register_install_completion_command(help="Installs completion for your shell.", sort_key=7)
if trainer.IS_INSTALLED:
    trainer.require("stoker").add_to(app)


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
        from stoker_watch.report.console import redirect_to_devnull

        for stream in (sys.stdout, sys.stderr):
            redirect_to_devnull(stream)
        code = 141  # the reader ended (`| head`): like other programs that SIGPIPE ends
    if trainer.IS_INSTALLED and "torch" in sys.modules and trainer.require("stoker").is_rank():
        sys.stderr.flush()
        os._exit(code)  # a thread of gloo that frees a tensor while Python ends aborts it (PyTorch issue 190489)
    _exit_codes.append(code)
    if len(_exit_codes) == 1:
        threading.Thread(target=_end_soon, daemon=True).start()
    sys.exit(code)


_exit_codes: list[int] = []
"""The codes of each `main` of this process: a program of another may catch its SystemExit."""


def _end_soon() -> None:
    """Ends the process if Python waits for threads or exit handlers that never end, as a tracker may leave behind."""
    threading.main_thread().join()
    time.sleep(END_TIMEOUT_S)
    os._exit(_exit_codes[-1])


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    import traceback

    for line in "".join(traceback.format_exception(kind, error, trace)).splitlines():
        print_text(line, file=sys.stderr)


def _run(arguments: list[str]) -> int:
    try:
        if trainer.IS_INSTALLED:
            prepared = trainer.require("stoker").prepare(app, arguments)
            if prepared is None:
                return 0
            arguments = prepared
        elif arguments and arguments[0] in trainer.COMMANDS:
            trainer.require(f"`stoker {arguments[0]}`")
        app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        words = " ".join(["stoker", *error.command_chain]) if error.command_chain else "stoker"
        text = " ".join(str(error).split())
        if isinstance(error, UnusedCliTokensError):
            text = f"Too many arguments: {shlex.join(error.unused_tokens or ())}."
        return _print_error(UsageError(text, fix=f"`{words} --help` lists what it takes"))
    except (StokerError, OSError, RuntimeError) as error:
        shown = system_limit(error) or error
        if not isinstance(shown, StokerError):
            raise
        return _print_error(shown)
    except KeyboardInterrupt as error:
        print(f"stoker: interrupted {error}".rstrip(), file=sys.stderr)
        return 130
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def _print_error(error: StokerError) -> int:
    """Prints an error and returns its exit code."""
    with contextlib.suppress(OSError):  # stderr is closed or full; schedulers decide by the exit code
        print(f"stoker: {error}", file=sys.stderr)
    return error.exit_code
