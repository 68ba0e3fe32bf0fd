"""How long the training thread, or its device's stream, waits for other ranks in torch.distributed.

Three places see it (torch 2.11 to 2.15):

* `Work.wait`: every collective and every send and receive that is called from Python comes by there, `barrier` and the
  collectives of objects included, asked for with `async_op` or not. With gloo the thread waits in it; with NCCL it
  returns at once and the stream waits.
* `_broadcast_coalesced`: DistributedDataParallel copies its buffers (of batch norm) in C++ before each forward pass.
* the end of the backward pass: DistributedDataParallel waits for its buckets in a callback of autograd's engine. These
  run in the order in which they were queued, on the streams of whoever called backward. So one that is queued with the
  first gradient runs before that wait, and one that this one queues runs after it; between them lies the exchange that
  no computing hid.

Not seen: what compiled graphs exchange, and FSDP, which waits between streams as it goes. `trace.py` sees those.
"""

import functools
from collections.abc import Callable
from typing import Any

from stoker.profiling.patching import Patch

OnEnd = Callable[[], None]
OnBegin = Callable[[], OnEnd]
"""Called when a wait begins; what it returns is called when it ends, in the same thread."""


def patch_collectives(on_begin: OnBegin, is_training_thread: Callable[[], bool]) -> list[Patch]:
    """Calls `begins` around each wait, until all are put back. Needs torch.distributed.

    is_ours: whether this thread is the one that trains; the waits of others hold up nobody. `begins` may come from one
    of autograd's threads, for which the one that trains then waits.
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
            if open_waits:  # the exchange raised
                exchange_done()

    return backward
