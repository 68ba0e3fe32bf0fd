"""Each rank has a part of the batch and the rows of each parameter (`--shard`, `shard.py`).

Gradients come averaged, row by row, after each micro-batch. The norm of all of them takes an exchange of its own, with
which the signals go.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from stoker.data.batch import Batch
from stoker.hardware.device import ReadyEvent
from stoker.training.checkpoint import HostSnapshot
from stoker.training.several import Several


class Fsdp(Several):
    """Ranks among which a model is divided: all take part in a checkpoint, and rank 0 writes it."""

    saves_together = True

    @contextlib.contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        sharding = self.optimizer.sharding
        assert sharding is not None
        sharding.collect(model)
        try:
            yield
        finally:
            sharding.reshard(model)

    def reserve_snapshots(self, state: dict[str, Any]) -> None:
        """Whole tensors come from other ranks, and are made on the host."""

    def take_snapshot(self, state: dict[str, Any], *, ap: float | None) -> HostSnapshot | None:
        sharding = self.optimizer.sharding
        assert sharding is not None
        weights, state = sharding.gather((self.optimizer.ema_model.state_dict(), state))
        if not self.ranks.is_main:
            return None
        return HostSnapshot(self.setup.state.step, self.metadata(ap), weights, state, ReadyEvent(None))

    def warm_up(self, make_batch: Callable[[], Batch]) -> None:
        """Divided parameters have no buckets that would be rearranged."""
        del make_batch
