"""The part of `stoker watch` in each Python process of a job: a clock that records the phase of the training.

`start` waits for the import of a framework (a finder in `sys.meta_path`); only then are the modules imported that time
it: `torch_loop.py`, `tensorflow_loop.py`, which is also for Keras, and `jax_loop.py`. They report to `clock.py`, whose
values are in shared memory that the watcher reads (`stoker_watch/watch/hook_reader.py`). Only the standard library and
syntax of Python 3.8; nothing of stoker. An error here is written to a file once (`failures.py`), and the job goes on.
"""

import os
import sys

from . import exits, failures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "patches.txt")) as _file:
    PATCHES = {row[0]: row[1:] for row in (line.split() for line in _file if not line.startswith("#"))}
"""Module of a framework → module of the hook, function, its further arguments."""
TRAINERS = ("pytorch_lightning", "lightning", "ultralytics", "transformers", "accelerate", "timm", "mmengine")
"""Packages with a training loop of their own, or parts of one: their names are published besides their framework's."""
FRAMEWORKS = ("torch", "tensorflow", "keras")
"""Their import begins the startup of a training, and may take most of it."""


class PatchingFinder:
    """Finds modules by the other finders, and patches the modules in PATCHES after their import."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in PATCHES and name not in FRAMEWORKS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                _wrap_import(spec.loader, name)
                return spec
        return None


def _publish_clock() -> None:
    """Publishes the clock. Children of multiprocessing, mostly loader workers, publish it only when they train."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or not (
        # spawn and forkserver import a job's modules while `parent_process` is not set yet
        process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)
    ):
        try:
            from .clock import clock

            clock.publish()
        except Exception as error:  # noqa: BLE001 (the job goes on without timing)
            failures.report_failure("clock", error)


def _wrap_import(loader: "Any", name: str) -> None:
    """Publishes the clock before a framework is loaded (many programs only look for it), patches others after that."""
    execute: Callable[[ModuleType], None] | None = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(imported: "ModuleType") -> None:
        del loader.exec_module  # this function replaces it only once
        if name in FRAMEWORKS:
            _publish_clock()
        execute(imported)
        if name not in PATCHES:
            return
        try:
            module, function, *args = PATCHES[name]
            getattr(__import__(__name__ + "." + module, fromlist=["x"]), function)(imported, *args)
            if name.partition(".")[0] in TRAINERS:
                from .clock import clock

                if clock.is_published:
                    clock.publish(name.partition(".")[0])
        except Exception as error:  # noqa: BLE001 (the job's import succeeded: it goes on without timing)
            failures.report_failure(name, error)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader without own attributes (of a frozen or built-in module): not timed
        return


def start(directory: str) -> None:
    """Marks that a Python process has loaded the hook, and waits for a framework."""
    failures.STATE_DIR = directory
    try:
        os.close(os.open(os.path.join(directory, "loaded"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        pass
    except OSError:  # the watcher is gone, or this is another machine
        return
    exits.patch_exits()
    sys.meta_path.insert(0, PatchingFinder())  # type: ignore[arg-type, unused-ignore]
