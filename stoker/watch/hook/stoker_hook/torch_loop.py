"""PyTorch's side of the clock: batches of a DataLoader, backward passes, optimizer steps, checkpoints, compilation.

A function per module of torch, called when that module has been imported. Steps need torch 2.0 or newer.
"""

from _thread import get_ident

from .clock import CHECKPOINT, COMPILE, EVAL, MAYBE_WAIT, Source, clock, timed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SOURCE = "_stoker_source"
"""Attribute of an iterator."""


def _used() -> None:
    """Says in the cell, where there is one, which torch it is."""
    import sys

    if clock.is_shown():
        clock.show(f"torch {getattr(sys.modules.get('torch'), '__version__', '')}".rstrip())


def loaders(module: "Any") -> None:
    """torch.utils.data.dataloader: the training thread's time in iterators is waiting for input."""
    from sys import modules

    iterators = module._BaseDataLoaderIter
    following = iterators.__next__
    grad_enabled = modules["torch"].is_grad_enabled

    def __next__(self: "Any") -> "Any":
        if not clock.is_free():
            return following(self)
        source = self.__dict__.get(SOURCE)
        if source is None:
            source = self.__dict__[SOURCE] = Source(workers_of(self))
        clock.wait_begins(source, not grad_enabled())
        try:
            batch = following(self)
        except BaseException as error:
            clock.source_ends(source, failed=not isinstance(error, StopIteration))
            raise
        clock.wait_ends(source, pictures_in(batch))
        return batch

    __next__.__wrapped__ = following  # type: ignore[attr-defined]
    iterators.__next__ = __next__
    # the start of its workers; an evaluation's until it is known what the iterator is for
    module.DataLoader.__iter__ = timed(MAYBE_WAIT, module.DataLoader.__iter__)
    _used()


def workers_of(iterator: "Any") -> int:
    workers = getattr(iterator, "_num_workers", None)
    return workers if isinstance(workers, int) else -1


def pictures_in(batch: "Any") -> int:
    """Samples in a batch, 0 where its form does not say: the first tensor's length; of detection, `(pictures,
    targets)` as tuples of one each, that of the first tuple."""
    for _ in range(4):
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else 0
        if isinstance(batch, (list, tuple)) and batch:
            first = batch[0]
            if len(batch) > 2 and len(getattr(first, "shape", ())) == 3 and _all_pictures(batch):
                return len(batch)  # a list of pictures of different sizes
            if isinstance(first, (list, tuple)) and first and not isinstance(first[0], (list, tuple)):
                return len(first)
            batch = first
        elif hasattr(batch, "values") and hasattr(batch, "keys") and len(batch):
            batch = next(iter(batch.values()))
        else:
            return 0
    return 0


def _all_pictures(batch: "Any") -> bool:
    return all(len(getattr(one, "shape", ())) == 3 for one in batch)


def optimizers(module: "Any") -> None:
    """torch.optim.optimizer: steps of the optimizer; those that a GradScaler leaves out do not come by."""

    def after_step(optimizer: "Any", *_: "Any") -> None:
        groups = optimizer.param_groups
        clock.stepped(optimizer, groups[0].get("lr") if groups else None)

    module.register_optimizer_step_post_hook(after_step)
    _used()


def backward(module: "Any") -> None:
    """torch.autograd: a backward says that the batches before it were for training; its end is where DDP waits."""
    from functools import wraps

    original = module.backward

    @wraps(original)
    def wrapper(tensors: "Any", *words: "Any", **named: "Any") -> "Any":
        if get_ident() != clock.thread:
            return original(tensors, *words, **named)
        clock.trains()
        end = None if at_end is None else at_end(tensors)
        try:
            return original(tensors, *words, **named)
        finally:
            if end is not None:
                end()

    module.backward = wrapper


at_end: "Any" = None
"""Set by `torch_comm.py` where several processes train: called with the tensors, returns what the end is told to."""


def saving(module: "Any") -> None:
    module.save = timed(CHECKPOINT, module.save)


def safetensors(module: "Any") -> None:
    module.save_file = timed(CHECKPOINT, module.save_file)


def lightning(module: "Any") -> None:
    module.Trainer.save_checkpoint = timed(CHECKPOINT, module.Trainer.save_checkpoint)


def transformers(module: "Any") -> None:
    module.Trainer._save_checkpoint = timed(CHECKPOINT, module.Trainer._save_checkpoint)
    module.Trainer.evaluate = timed(EVAL, module.Trainer.evaluate)


def compilation(module: "Any") -> None:
    """torch._dynamo.callback: from the start to the end of a compilation, also a late one of the backward."""
    inside = [False]

    def begins(*_: "Any") -> None:
        inside[0] = clock.enter(COMPILE)

    def ends(*_: "Any") -> None:
        if inside[0] and get_ident() == clock.thread:
            inside[0] = False
            clock.leave()

    module.callback_handler.register_start_callback(begins)
    module.callback_handler.register_end_callback(ends)
