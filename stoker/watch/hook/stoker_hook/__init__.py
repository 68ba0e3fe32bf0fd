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

AFTER = {
    "torch.utils.data.dataloader": ("torch_loop", "loaders"),
    "torch.optim.optimizer": ("torch_loop", "optimizers"),
    "torch.autograd": ("torch_loop", "backward"),
    "torch.serialization": ("torch_loop", "saving"),
    "torch._dynamo.callback": ("torch_loop", "compilation"),
    "safetensors.torch": ("torch_loop", "safetensors"),
    "torch.distributed.checkpoint.state_dict_saver": ("torch_loop", "saving"),
    "torch.distributed.distributed_c10d": ("torch_comm", "collectives"),
    "pytorch_lightning.trainer.trainer": ("torch_loop", "lightning"),
    "lightning.pytorch.trainer.trainer": ("torch_loop", "lightning"),
    "transformers.trainer": ("torch_loop", "transformers"),
    "keras.src.trainers.epoch_iterator": ("keras_loop", "waits"),
    "keras.src.models.model": ("keras_loop", "saving"),
    "keras.src.backend.torch.trainer": ("keras_loop", "torch_trainer"),
    "keras.src.backend.tensorflow.trainer": ("keras_loop", "tensorflow_trainer"),
}  # fmt: skip
"""Module of a framework → what is done when it has been imported."""


FRAMEWORKS = ("torch", "tensorflow", "keras")
"""Their import is the begin of a training's start, of which it may take most."""


class Finder:
    """Finds what the others find; and has a function called when one of the modules of AFTER has run."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        after = AFTER.get(name)
        if after is None:
            if name in FRAMEWORKS:
                _show()
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                _run_after(spec.loader, name, *after)
                return spec
        return None


def _show() -> None:
    """Opens the cell, except in children of multiprocessing: these only when they train, most are loader workers."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        try:
            from .clock import clock

            clock.show()
        except Exception as error:  # noqa: BLE001 (the job goes on, untimed)
            say("clock", error)


def _run_after(loader: "Any", name: str, module: str, function: str) -> None:
    execute: Callable[[ModuleType], None] | None = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(ran: "ModuleType") -> None:
        del loader.exec_module  # it is this function only once
        execute(ran)
        try:
            getattr(__import__(__name__ + "." + module, fromlist=["x"]), function)(ran)
        except Exception as error:  # noqa: BLE001 (the job's import has worked: it goes on, untimed)
            say(name, error)

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader without attributes of its own (a frozen or built-in module): not timed
        return


FOLDER = ""
_said: "set[str]" = set()


def say(where: str, error: BaseException) -> None:
    """Writes down once what failed."""
    if where in _said or len(_said) > 20:
        return
    _said.add(where)
    try:
        with open(os.path.join(FOLDER, "said-%d" % os.getpid()), "a") as file:  # noqa: UP031 (quick to import)
            file.write(f"{where}: {type(error).__name__}: {error}\n")
    except OSError:  # the watcher has gone, or the disk is full: nobody could read it
        return


def start(folder: str) -> None:
    """Marks that Python has come by, and waits for a framework."""
    global FOLDER
    FOLDER = folder
    try:
        os.close(os.open(os.path.join(folder, "seen"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        pass
    except OSError:  # the watcher has gone, or this is another machine: nobody would read
        return
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type, unused-ignore]
