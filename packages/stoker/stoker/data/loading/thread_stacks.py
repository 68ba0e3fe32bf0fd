"""Python stacks of threads of this process, as plain values; standard library only.

`training/own_stacks.py` counts and records them; worker processes of the loader send it theirs.
`stoker_watch/recording/frames.py` says what a stack means; `stacks.py` beside it samples other programs from outside.
"""

import sys
import threading
from collections.abc import Iterable

Stack = tuple[tuple[str, str, int], ...]
"""(function with its class, file, line), the innermost frame first."""
LOADER_THREAD = "stoker-loader"
"""Name of the threads that load images."""


def read_stacks(thread_ids: Iterable[int]) -> list[Stack]:
    """Returns the stack of each thread, empty for one that has ended. Costs some 20 µs for each. The frames are not
    kept: they would keep the local variables of their functions."""
    found: list[Stack] = []
    frames = sys._current_frames()
    for thread_id in thread_ids:
        frame, rows = frames.pop(thread_id, None), list[tuple[str, str, int]]()
        while frame is not None:
            code = frame.f_code
            rows.append((code.co_qualname, code.co_filename, frame.f_lineno or code.co_firstlineno))
            frame = frame.f_back
        found.append(tuple(rows))
    return found


def next_loader_thread(turn: int) -> list[int]:
    """Returns the loader thread whose turn it is; empty: this process has none."""
    ids = [thread.ident for thread in threading.enumerate() if thread.name == LOADER_THREAD and thread.ident]
    return [ids[turn % len(ids)]] if ids else []
