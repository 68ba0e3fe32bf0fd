"""Injects one fault into a `stoker train` and the processes that it starts: with this folder on PYTHONPATH, Python runs
this file first. The variable STOKER_CHAOS is JSON:

    {"target": "stoker.training.make_step:train_step", "call": 5, "fault": "out_of_memory", "attempt": 1}

STOKER_CHAOS_CLOCK=1 makes time.time() jump by a day forth and back every 50 calls.

target: module and attribute whose n-th call (from 0) meets the fault; attempt: of the supervisor, from 1; absent: in
every attempt; rank: only in this rank. Faults: see `_FAULTS`. The module is patched after it is imported, so that
nothing is imported earlier than without the fault.
"""

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import threading
import time


def _raise_out_of_memory():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _raise_error():
    raise ZeroDivisionError("injected")


def _hang():
    threading.Event().wait()


def _hold_the_lock():
    import ctypes

    ctypes.PyDLL(None).sleep(100_000)  # a C call that keeps the GIL


_FAULTS = {
    "out_of_memory": _raise_out_of_memory,
    "error": _raise_error,
    "hang": _hang,
    "hold_the_lock": _hold_the_lock,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "user_signal": lambda: os.kill(os.getpid(), signal.SIGUSR1),
}


def _patch(module, attribute, number, fault):
    holder = module
    *path, name = attribute.split(".")
    for part in path:
        holder = getattr(holder, part)
    call, calls = getattr(holder, name), iter(range(10**9))

    def wrapper(*arguments, **named):
        if next(calls) == number:
            with open(os.path.join(os.environ["STOKER_CHAOS_FOLDER"], "fault-time"), "w") as file:
                file.write(str(time.time()))
            _FAULTS[fault]()
        return call(*arguments, **named)

    setattr(holder, name, wrapper)


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, chaos):
        self._chaos = chaos
        self._module, _, self._attribute = chaos["target"].partition(":")

    def find_spec(self, name, path, target=None):
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _patch(module, self._attribute, self._chaos["call"], self._chaos["fault"])

        spec.loader.exec_module = exec_module
        return spec


def _let_the_clock_jump():
    import itertools
    import time

    now, calls = time.time, itertools.count()
    time.time = lambda: now() + 86_400.0 * (-1 if next(calls) // 50 % 2 else 1)


def _applies(chaos):
    restart = json.loads(os.environ.get("STOKER_RESTART", "{}"))
    if "attempt" in chaos and chaos["attempt"] != restart.get("number", 0) + 1:
        return False
    return "rank" not in chaos or os.environ.get("RANK") == str(chaos["rank"])


if "STOKER_CHAOS_CLOCK" in os.environ:
    _let_the_clock_jump()
if "STOKER_CHAOS" in os.environ:
    _chaos = json.loads(os.environ["STOKER_CHAOS"])
    if _applies(_chaos):
        sys.meta_path.insert(0, _PatchAfterImport(_chaos))
