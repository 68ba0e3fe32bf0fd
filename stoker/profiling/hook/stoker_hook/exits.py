"""An exception that a program handles only to end: `except Exception as error: print(error); sys.exit(1)`.

Python prints no traceback then, and often the message alone says nothing (`'acc'` of a KeyError). So the traceback of
what is handled while `sys.exit`, `exit` or `quit` is called with a failure goes into the state directory, as PID.exit.
The name and the signature of these functions stay.
"""

import os
import sys

from . import failures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_LINES = 60
"""Last lines of the traceback that are kept."""


def patch_exits() -> None:
    """In a process that has just started: `sys.exit`, and where Python has them, `exit` and `quit`."""
    import builtins

    sys.exit = _reporting(sys.exit)
    quitter = type(getattr(builtins, "exit", None))
    if quitter.__module__ == "_sitebuiltins":
        quitter.__call__ = _reporting(quitter.__call__)  # type: ignore[method-assign, unused-ignore]


def _reporting(leave: "Callable[..., Any]") -> "Callable[..., Any]":
    def report_and_leave(*args: "Any", **kwargs: "Any") -> "Any":
        error = sys.exc_info()[1]
        status = kwargs.get("code", args[-1] if args else None)
        is_failure = isinstance(status, str) or (isinstance(status, int) and status != 0)
        if is_failure and isinstance(error, Exception):
            try:
                _write(error)
            except Exception as failure:  # noqa: BLE001 (the job ends as it would)
                failures.report_failure("exit", failure)
        return leave(*args, **kwargs)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # functools would take longer to import
        setattr(report_and_leave, name, getattr(leave, name))
    return report_and_leave


def _write(error: BaseException) -> None:
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    lines = text.splitlines()
    kept = lines if len(lines) <= MAX_LINES else [lines[0], *lines[1 - MAX_LINES :]]
    with open(os.path.join(failures.STATE_DIR, "%d.exit" % os.getpid()), "w", errors="replace") as file:  # noqa: UP031
        file.write("\n".join(kept) + "\n")
