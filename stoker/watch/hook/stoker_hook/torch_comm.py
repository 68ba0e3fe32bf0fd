"""Hooks for torch.distributed: the time in collectives, and the part of DDP's all-reduce that the backward does not
hide.

DDP exchanges gradients while the backward still computes, and waits for the rest in a callback at its end. A callback
that was queued before DDP's own runs just before that wait: the time from there to the end of the backward is exposed.
On a GPU two events on the training stream measure it, which waits for the communication.
"""

from functools import wraps

from . import torch_loop
from .clock import COMM, RANK, WORLD, clock, wrap_timed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "_all_gather_base",
    "all_gather_object", "all_gather_coalesced", "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "_reduce_scatter_base", "scatter", "scatter_object_list", "send", "recv",
)  # fmt: skip


def patch_collectives(module: "Any") -> None:
    """torch.distributed.distributed_c10d, before torch.distributed imports its names."""
    if not hasattr(module, "all_reduce"):  # a torch without distributed
        return
    for name in COLLECTIVES:
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, wrap_timed(COMM, original))
    module.Work.wait = wrap_timed(COMM, module.Work.wait)
    original_init = module.init_process_group

    @wraps(original_init)
    def init_process_group(*args: "Any", **kwargs: "Any") -> "Any":
        result = original_init(*args, **kwargs)
        try:
            clock.values[WORLD] = float(module.get_world_size())
            if clock.values[RANK] < 0:  # else the rank within this machine is known already
                clock.values[RANK] = float(module.get_rank())
            if clock.values[WORLD] > 1:
                torch_loop.on_backward = _time_exposed_comm
        except Exception as error:  # noqa: BLE001
            clock.disable("init_process_group", error)
        return result

    module.init_process_group = init_process_group


def _time_exposed_comm(tensors: "Any") -> "Callable[[], None] | None":
    """Call it before a backward, and its result after it."""
    try:
        root = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
        if not clock.is_outside_phases() or not getattr(root, "requires_grad", False):
            return None
        entered: list[bool] = []

        def on_gradients_done() -> None:  # in the engine, before DDP's wait
            if clock.device_events is not None:
                clock.device_events.comm_begins()
                entered.append(False)
            else:
                entered.append(clock.enter(COMM))

        def on_first_gradient(_: "Any") -> None:
            engine.queue_callback(on_gradients_done)

        engine = _autograd_engine()
        handle = root.register_hook(on_first_gradient)
    except Exception as error:  # noqa: BLE001
        clock.disable("backward", error)
        return None

    def on_end() -> None:
        handle.remove()
        if clock.device_events is not None and entered:
            clock.device_events.comm_ends()
        elif any(entered):
            clock.leave()

    return on_end


def _autograd_engine() -> "Any":
    from sys import modules

    return modules["torch.autograd"].Variable._execution_engine  # type: ignore[attr-defined, unused-ignore]
