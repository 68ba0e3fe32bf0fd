"""Parameters divided among the ranks (`--shard`), for models whose weights and optimizer do not fit one device.

torch's FSDP2 (`fully_shard`) keeps of every parameter the rows of this rank, collects the whole parameters of a part of
the model before it computes, and frees them afterwards; gradients come averaged and divided in the same way, after each
micro-batch. The optimizer and the EMA work on the rows alone (`optim.py`), as plain tensors: a rank has 1/N of weights,
gradients and moments. Buffers are whole in every rank. The rest is here: which parts are collected together, the way
between rows and the whole tensors of checkpoints, and the step.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from stoker.data.batch import Batch
from stoker.hardware.device import ReadyEvent
from stoker.training.checkpoint import HostSnapshot, map_tensors
from stoker.training.ranks import Ranks
from stoker.training.several import MultiProcess

MAX_PART_BYTES = 2**25
"""Parameters that are collected together, as far as modules allow it: a little more than a bucket of
DistributedDataParallel (25 MiB). Not measured on GPUs."""
MIN_PART_BYTES = 2**20
"""Smaller modules are collected with the rest of the model."""


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Which rows of a parameter are this rank's: those of the rank-th of `torch.chunk`'s pieces, which may be empty."""

    ranks: Ranks
    mesh: DeviceMesh

    @classmethod
    def over(cls, ranks: Ranks, device: torch.device) -> "Sharding":
        """Divides models among all ranks, which compute on devices of this kind."""
        # Of modules that return views; no model changes one in place (test_shard.py has all families).
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        return cls(ranks, init_device_mesh(device.type, (ranks.world_size,)))

    def shard(self, model: nn.Module, *, max_part_bytes: int = MAX_PART_BYTES) -> None:
        """Divides the parameters of a model, in place, and moves it to the device, one part after the other. Only its
        root stays whole after a forward pass, until the backward pass or `reshard`: losses may use its parameters."""
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP accepts no other memory format
        _shard_parts(model, self.mesh, max_part_bytes)
        fully_shard(model, mesh=self.mesh, reshard_after_forward=False)

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor, as a view."""
        size = -(-whole.shape[0] // self.ranks.world_size)
        return whole[self.ranks.rank * size : (self.ranks.rank + 1) * size]

    def distributed(self, rows: Tensor, like: DTensor) -> DTensor:
        """This rank's rows as a part of a tensor of the same shape as `like`."""
        return DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())

    def load(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """`model.load_state_dict` of whole tensors."""
        own = {
            name: self.distributed(self.rows(weights[name]).to(target.device), target)
            if isinstance(target, DTensor)
            else weights[name]
            for name, target in model.state_dict().items()
        }
        model.load_state_dict(own)

    def reshard(self, model: nn.Module) -> None:
        """Frees what a forward pass without a backward pass left whole; it would be used again after an update."""
        assert isinstance(model, FSDPModule)
        model.reshard()

    def gather(self, tree: Any) -> Any:
        """A tree with whole host tensors, in rank 0. Called by all ranks. Waits for the device."""
        return map_tensors(tree, self._gather)

    def _gather(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach().to("cpu", copy=True)
        rows = tensor.to_local().detach().cpu()
        size = -(-tensor.shape[0] // self.ranks.world_size)
        padded = torch.zeros(size, *tensor.shape[1:], dtype=rows.dtype)
        padded[: len(rows)] = rows
        pieces = [torch.empty_like(padded) for _ in range(self.ranks.world_size)] if self.ranks.is_main else None
        dist.gather(padded, pieces, dst=0, group=self.ranks.host_group)
        return rows if pieces is None else torch.cat(pieces)[: tensor.shape[0]]


def _shard_parts(module: nn.Module, mesh: DeviceMesh, max_bytes: int) -> None:
    """Makes parts of at most `max_bytes` of the modules inside `module`, the outermost that are small enough. Segments
    of activation checkpointing stay in one: they are computed again with the parameters that they had."""
    for child in module.children():
        size = sum(parameter.nbytes for parameter in child.parameters())
        if size < min(MIN_PART_BYTES, max_bytes):
            continue
        is_checkpointed = "forward" in vars(child)
        has_forward = is_checkpointed or type(child).forward is not nn.Module.forward
        if (size > max_bytes and not is_checkpointed) or not has_forward:
            _shard_parts(child, mesh, max_bytes)
        if has_forward and any(not isinstance(parameter, DTensor) for parameter in child.parameters()):
            fully_shard(child, mesh=mesh, reshard_after_forward=True)


class Fsdp(MultiProcess):
    """Ranks among which a model is divided: all take part in a checkpoint, and rank 0 writes it."""

    saves_together = True

    @contextlib.contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        sharding = self.optimizer.sharding
        assert sharding is not None
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
