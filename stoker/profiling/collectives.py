"""Measures how long the training thread, or its device's stream, waits for other ranks in torch.distributed.

Three functions are wrapped (torch 2.11 to 2.15):

* `Work.wait`: every collective, send and receive that is called from Python passes here, also `barrier`, collectives of
  objects and `async_op` ones. With gloo the thread waits in it; with NCCL it returns at once and the stream waits.
* `_broadcast_coalesced`: DistributedDataParallel copies its buffers (of batch norm) in C++ before each forward pass.
* `torch.autograd.backward`: DistributedDataParallel waits for its buckets in a callback of the autograd engine. Such
  callbacks run in the order in which they were queued, on the streams of the caller of backward. So a callback that is
  queued with the first gradient runs before that wait, and one that it queues in turn runs after it. The time between
  the two is the communication that no computation hid.

Not measured: communication inside compiled graphs, and FSDP, which waits between streams. `trace.py` shows both.
Neighbors: `measure/torch_hooks.py`, which assigns the intervals to a phase.
"""

import functools
from collections.abc import Callable
from typing import Any

OnEnd = Callable[[], None]
OnBegin = Callable[[], OnEnd]
"""Called when a wait begins; returns the function to call when it ends, in the same thread."""


class Patch:
    """Replaces `owner.name` by `wrap(original)` until `restore`."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._wrapped = wrap(self._original)
        setattr(owner, name, self._wrapped)

    def restore(self) -> None:
        """Does nothing if other code has wrapped the function since: then this wrapper stays below that one."""
        if getattr(self._owner, self._name) is self._wrapped:
            setattr(self._owner, self._name, self._original)


def patch_collectives(on_begin: OnBegin, is_training_thread: Callable[[], bool]) -> list[Patch]:
    """Calls `on_begin` before each wait and its result after it, until the patches are restored. Needs
    torch.distributed.

    is_training_thread: waits of other threads are ignored. `on_begin` may be called in a thread of autograd, for which
    the training thread waits meanwhile.
    """
    import torch
    import torch.distributed as dist

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not is_training_thread():
                return original(*args, **kwargs)
            on_end = on_begin()
            try:
                return original(*args, **kwargs)
            finally:
                on_end()

        return wrapper

    return [
        Patch(dist.Work, "wait", wrap),
        Patch(dist, "_broadcast_coalesced", wrap),
        Patch(torch.autograd, "backward", lambda original: _wrap_backward(original, on_begin, is_training_thread)),
    ]


def _wrap_backward(
    original: Callable[..., Any], on_begin: OnBegin, is_training_thread: Callable[[], bool]
) -> Callable[..., Any]:
    import torch

    engine: Any = torch.autograd.Variable._execution_engine

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        root: Any = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else tensors
        if not isinstance(root, torch.Tensor) or not root.requires_grad or not is_training_thread():
            return original(tensors, *args, **kwargs)
        open_waits: list[OnEnd] = []

        def gradients_done() -> None:
            open_waits.append(on_begin())
            engine.queue_callback(exchange_done)

        def exchange_done() -> None:
            open_waits.pop()()

        hook = root.register_hook(lambda _: engine.queue_callback(gradients_done))  # type: ignore[no-untyped-call]
        try:
            return original(tensors, *args, **kwargs)
        finally:
            hook.remove()
            if open_waits:  # the communication raised
                exchange_done()

    return backward
