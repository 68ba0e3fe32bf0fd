"""Each rank has a part of the batch and the rows of each parameter (`--shard`, `shard.py`).

Gradients come averaged, row by row, after each micro-batch. The norm of all of them takes an exchange of its own, with
which the signals go.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from stoker.data.batch import Batch
from stoker.hardware.device import ReadyEvent, SideStream
from stoker.hardware.host_arena import HostArenas
from stoker.training.checkpoint import HostSnapshot
from stoker.training.several import Several


class Fsdp(Several):
    """Ranks among which a model is divided: all take part in a checkpoint, and rank 0 writes it."""

    saves_together = True
    has_whole_weights = False

    @contextlib.contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        sharding = self.optimizer.sharding
        assert sharding is not None
        sharding.collect(model)
        try:
            yield
        finally:
            sharding.reshard(model)

    def reserve_arenas(self, weights: dict[str, Tensor], state: dict[str, Any]) -> HostArenas | None:
        del weights, state  # whole tensors come from other ranks
        return None

    def snapshot(self, stream: SideStream, **content: Any) -> HostSnapshot | None:
        del stream  # whole tensors are made on the host
        sharding = self.optimizer.sharding
        assert sharding is not None
        weights, state = sharding.gather((content["weights"], content["state"]))
        if not self.ranks.is_main:
            return None
        return HostSnapshot(content["step"], content["metadata"], weights, state, ReadyEvent(None))

    def warm_up(self, make_batch: Callable[[], Batch]) -> None:
        """Divided parameters have no buckets that would be rearranged."""
        del make_batch
