"""What `stoker watch` has in each Python process of a job: a clock that says in which phase of training it is.

`start` waits for a framework to be imported (a finder in `sys.meta_path`); only then are modules loaded that time it:
`torch_loop.py` (loaders, optimizers, checkpoints, compilation), `torch_comm.py` (collectives), `keras_loop.py` (`fit`)
and `tensorflow_input.py` (waits inside its graphs). All of them tell `clock.py`, whose numbers lie in shared memory
that the watcher reads (`stoker/watch/hook_state.py`). Only the standard library, syntax of Python 3.8; nothing of
stoker. Whatever fails here is said once in a file beside the numbers, and the job goes on.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

PATCHES = {
    "torch.utils.data.dataloader": ("torch_loop", "patch_dataloader"),
    "torch.optim.optimizer": ("torch_loop", "patch_optimizers"),
    "torch.autograd": ("torch_loop", "patch_backward"),
    "torch.serialization": ("torch_loop", "patch_save"),
    "torch._dynamo.callback": ("torch_loop", "patch_compilation"),
    "safetensors.torch": ("torch_loop", "patch_safetensors"),
    "torch.distributed.checkpoint.state_dict_saver": ("torch_loop", "patch_save"),
    "torch.distributed.distributed_c10d": ("torch_comm", "patch_collectives"),
    "pytorch_lightning.trainer.trainer": ("torch_loop", "patch_lightning"),
    "lightning.pytorch.trainer.trainer": ("torch_loop", "patch_lightning"),
    "transformers.trainer": ("torch_loop", "patch_transformers"),
    "keras.src.trainers.epoch_iterator": ("keras_loop", "patch_epoch_iterator"),
    "keras.src.models.model": ("keras_loop", "patch_save"),
    "keras.src.backend.torch.trainer": ("keras_loop", "patch_torch_trainer"),
    "keras.src.backend.tensorflow.trainer": ("keras_loop", "patch_tensorflow_trainer"),
}  # fmt: skip
"""Module of a framework → what is done when it has been imported."""


FRAMEWORKS = ("torch", "tensorflow", "keras")
"""Their import is the begin of a training's start, of which it may take most."""


class PatchingFinder:
    """Finds what the others find; and has a function called when one of the modules of AFTER has run."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        patch = PATCHES.get(name)
        if patch is None:
            if name in FRAMEWORKS:
                _publish_clock()
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                _patch_after_import(spec.loader, name, *patch)
                return spec
        return None


def _publish_clock() -> None:
    """Opens the cell, except in children of multiprocessing: these only when they train, most are loader workers."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        try:
            from .clock import clock

            clock.publish()
        except Exception as error:  # noqa: BLE001 (the job goes on, untimed)
            report_failure("clock", error)


def _patch_after_import(loader: "Any", name: str, module: str, function: str) -> None:
    execute: Callable[[ModuleType], None] | None = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(imported: "ModuleType") -> None:
        del loader.exec_module  # it is this function only once
        execute(imported)
        try:
            getattr(__import__(__name__ + "." + module, fromlist=["x"]), function)(imported)
        except Exception as error:  # noqa: BLE001 (the job's import has worked: it goes on, untimed)
            report_failure(name, error)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader without attributes of its own (a frozen or built-in module): not timed
        return


STATE_DIR = ""
_reported: "set[str]" = set()


def report_failure(location: str, error: BaseException) -> None:
    """Writes down once what failed."""
    if location in _reported or len(_reported) > 20:
        return
    _reported.add(location)
    try:
        with open(os.path.join(STATE_DIR, "errors-%d" % os.getpid()), "a") as file:  # noqa: UP031 (quick to import)
            file.write(f"{location}: {type(error).__name__}: {error}\n")
    except OSError:  # the watcher has gone, or the disk is full: nobody could read it
        return


def start(directory: str) -> None:
    """Marks that Python has come by, and waits for a framework."""
    global STATE_DIR
    STATE_DIR = directory
    try:
        os.close(os.open(os.path.join(directory, "loaded"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        pass
    except OSError:  # the watcher has gone, or this is another machine: nobody would read
        return
    sys.meta_path.insert(0, PatchingFinder())  # type: ignore[arg-type, unused-ignore]
