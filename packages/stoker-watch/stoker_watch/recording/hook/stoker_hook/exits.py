"""An exception that a program handles only to end: `except Exception as error: print(error); sys.exit(1)`.

Python prints no traceback then, and often the message alone says nothing (`'acc'` of a KeyError). So what is handled
while `sys.exit`, `exit` or `quit` is called with a failure in the main thread goes into the state directory, as
PID.exit: the exit status, and a traceback without lines of source, since no file of the job is read while it ends.
"""

import os
import sys
from _thread import get_ident

from . import failures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_FRAMES, MAX_CHAINED, MAX_CHARS = 40, 3, 400
"""Innermost frames of each error, errors of a chain from the last one on, characters of a line."""
_main_thread = 0


def patch_exits() -> None:
    """In a process that has just started: `sys.exit`, and where Python has them, `exit` and `quit`."""
    import builtins

    global _main_thread
    _main_thread = get_ident()
    sys.exit = _Exit()  # type: ignore[assignment, unused-ignore]
    quitter = type(getattr(builtins, "exit", None))
    if quitter.__module__ == "_sitebuiltins":
        call = quitter.__call__

        def report_and_call(self, code=None):  # type: ignore[no-untyped-def]
            _note(code)
            return call(self, code)

        quitter.__call__ = report_and_call  # type: ignore[method-assign, unused-ignore]


class _Exit:
    """`sys.exit`, which is no function, since that would become a method as an attribute of a class."""

    __module__, __name__, __qualname__ = "sys", "exit", "exit"
    __doc__, __annotations__ = sys.exit.__doc__, {}  # type: ignore[assignment, unused-ignore]
    __slots__ = ()
    _exit = sys.exit

    def __call__(self, *args):  # type: ignore[no-untyped-def]
        _note(args[0] if args else None)
        type(self)._exit(*args)

    def __reduce__(self) -> str:
        return "exit"

    def __repr__(self) -> str:
        return "<built-in function exit>"


def _note(status: "Any") -> None:
    """Writes the error that is handled now, if this is a failure; else removes what an earlier call wrote."""
    try:
        if get_ident() != _main_thread:
            return
        error, path = sys.exc_info()[1], os.path.join(failures.STATE_DIR, "%d.exit" % os.getpid())  # noqa: UP031
        code = status if isinstance(status, int) else 0 if status is None else 1
        if code and isinstance(error, Exception):
            with open(path + ".new", "w", errors="replace") as file:
                file.write("\n".join([str(int(code)), *_describe(error)]) + "\n")
            os.replace(path + ".new", path)
        elif os.path.exists(path):
            os.remove(path)
    except Exception as failure:  # noqa: BLE001 (the job ends as it would)
        failures.report_failure("exit", failure)


def _describe(error: BaseException) -> "Iterator[str]":
    """Lines as Python prints them, the first error of the chain first."""
    chain = [error]
    while len(chain) < MAX_CHAINED:
        last = chain[-1]
        before = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if before is None or before in chain:
            break
        chain.append(before)
    for number, each in enumerate(reversed(chain)):
        if number:
            yield from ("", "During handling of the above exception, another exception occurred:", "")
        yield "Traceback (most recent call last):"
        frames = []
        entry = each.__traceback__
        while entry is not None:  # `traceback` may be a file of the job
            frames.append((entry.tb_frame.f_code, entry.tb_lineno))
            del frames[:-MAX_FRAMES]
            entry = entry.tb_next
        for code, line in frames:
            yield ('  File "%s", line %d, in %s' % (code.co_filename, line, code.co_name))[:MAX_CHARS]  # noqa: UP031
        name, module = type(each).__qualname__, type(each).__module__
        text = (name if module in ("builtins", "__main__") else module + "." + name) + ": " + str(each)
        yield text[:MAX_CHARS].partition("\n")[0].rstrip(" :")
