"""Hooks for torch.distributed: rank and number of processes, and the waits for other ranks (`instruments.py`).

On a GPU, two events on the training stream measure the part of DDP's all-reduce that the backward does not hide: the
stream waits for the communication.
"""

from functools import wraps

from .clock import COMM, RANK, WORLD, clock
from .instruments import patch_collectives as time_collectives

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def patch_collectives(module: "Any") -> None:
    """torch.distributed.distributed_c10d, before torch.distributed imports its names."""
    if not hasattr(module, "all_reduce"):  # a torch without distributed
        return
    original = module.init_process_group
    patches: list[Any] = []

    @wraps(original)
    def init_process_group(*args: "Any", **kwargs: "Any") -> "Any":
        result = original(*args, **kwargs)
        try:
            clock.values[WORLD] = float(module.get_world_size())
            if clock.values[RANK] < 0:  # else the rank within this machine is known already
                clock.values[RANK] = float(module.get_rank())
            if clock.values[WORLD] > 1 and not patches:
                patches.extend(time_collectives(lambda: clock.begin(COMM), clock.is_outside_phases, _begin_exchange))
        except Exception as error:  # noqa: BLE001
            clock.disable("init_process_group", error)
        return result

    module.init_process_group = init_process_group


def _begin_exchange() -> "Any":
    if clock.device_events is None:
        return clock.begin(COMM)
    clock.device_events.comm_begins()
    return clock.device_events.comm_ends
