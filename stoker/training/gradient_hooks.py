"""How DistributedDataParallel exchanges gradients with `--sync bf16`, `fp16`, `powersgd` and `hierarchical`.

The compression is torch's own (`torch.distributed.algorithms.ddp_comm_hooks`). Added is what these hooks leave to the
user: PowerSGD's state survives a checkpoint and a step with gradients that are not finite, which would otherwise stay
in its error feedback for ever, and its first steps, also the one before a continued run, are not compressed.

The signals of a step (`replica.py`) are not compressed: they are exchanged on their own after the gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stoker.config.sync_method import SyncMethod
from stoker.errors import ConfigError
from stoker.training.ranks import Ranks

POWERSGD_START = 10
"""Steps before the first compressed one. torch's guide takes a tenth of the training, which on a slow link would cost
more than all others; 2 is the smallest number that DistributedDataParallel allows."""
ONE_BUCKET_MIB = 1 << 20


class GradientHook:
    """An exchange without a state. Every method is called by all ranks at the same step."""

    def __init__(self, method: SyncMethod, ranks: Ranks) -> None:
        self._method = method
        self._node = Node(ranks) if method.kind == "hierarchical" else None

    def bucket_mib(self, *, is_cpu: bool) -> int | None:
        """MiB of a bucket of gradients; None: DistributedDataParallel's default."""
        del is_cpu
        return None if self._node is not None else self._method.number

    def register(self, ddp: DistributedDataParallel) -> None:
        """Makes it the exchange of a model."""
        if self._node is not None:
            ddp.register_comm_hook(self._node, _reduce_by_node)
        else:
            hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            ddp.register_comm_hook(None, hooks[self._method.kind])

    def pause(self, is_paused: bool) -> None:
        """Whether the next exchanges leave no trace in the state."""

    def finish_step(self, found_inf: Tensor) -> None:
        """After the update of the weights, which was skipped if `found_inf` is 1."""

    def equalize(self) -> None:
        """Makes what this rank keeps from step to step the same in all ranks."""

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps, after `equalize`; None: nothing."""
        return None

    def load(self, state: dict[str, Any] | None) -> None:
        """Restores what `state` returned; None: the state before the first step."""


class PowerSgd(GradientHook):
    """Vogels et al. 2019: each matrix of gradients as a product of two with few columns, and the error is added to the
    next step's gradients."""

    def __init__(self, method: SyncMethod, ranks: Ranks) -> None:
        super().__init__(method, ranks)
        self._ranks = ranks
        self._is_paused = False
        self._good_factors: dict[int, Tensor] = {}
        self.load(None)

    def bucket_mib(self, *, is_cpu: bool) -> int | None:
        """With gloo, what the hook does after its first exchange runs in threads, whose order ranks would not share
        with several buckets."""
        return ONE_BUCKET_MIB if is_cpu else None

    def register(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(None, self._exchange)

    def pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def finish_step(self, found_inf: Tensor) -> None:
        for bucket, factor in self._powersgd.q_memory_dict.items():
            good = self._good_factors.get(bucket)
            if good is None or good.shape != factor.shape:
                good = self._good_factors[bucket] = torch.ones_like(factor)  # is made orthogonal before it is used
            torch.where(found_inf > 0, good, factor, out=good)
            factor.copy_(good)
            error = self._powersgd.error_dict[bucket]
            error.copy_(torch.where(found_inf > 0, 0.0, error))

    def equalize(self) -> None:
        """The errors become their mean: together, the ranks still add what was left out so far."""
        for bucket in sorted(self._powersgd.error_dict):
            error = self._powersgd.error_dict[bucket]
            dist.all_reduce(error)
            error.div_(self._ranks.world_size)

    def state(self) -> dict[str, Any]:
        kept = self._powersgd
        return {
            "steps": kept.iter,
            "errors": dict(kept.error_dict),
            "p": dict(kept.p_memory_dict),
            "q": dict(kept.q_memory_dict),
        }

    def load(self, state: dict[str, Any] | None) -> None:
        self._good_factors.clear()
        self._powersgd = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self._method.number,
            start_powerSGD_iter=POWERSGD_START,
            compression_stats_logging_frequency=1 << 60,
        )
        if state is not None and "errors" in state:
            self._powersgd.iter = state["steps"]
            self._powersgd.error_dict = dict(state["errors"])
            self._powersgd.p_memory_dict = dict(state["p"])
            self._powersgd.q_memory_dict = dict(state["q"])

    def _exchange(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        if self._is_paused:
            return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]
        self._fit(bucket)
        return powerSGD_hook.powerSGD_hook(self._powersgd, bucket)

    def _fit(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Moves restored tensors to the device; forgets those of another arrangement of buckets."""
        kept, number, buffer = self._powersgd, bucket.index(), bucket.buffer()
        error = kept.error_dict.get(number)
        if error is None or (error.shape == buffer.shape and error.device == buffer.device):
            return
        tables = (kept.error_dict, kept.p_memory_dict, kept.q_memory_dict)
        for table in tables:
            if error.shape != buffer.shape:
                table.pop(number, None)
            else:
                table[number] = table[number].to(buffer.device)


def make_hook(method: SyncMethod, ranks: Ranks) -> GradientHook | None:
    """The hook of a method that exchanges gradients in its own way; None for the others."""
    if method.kind == "plain" or method.is_local:
        return None
    return PowerSgd(method, ranks) if method.kind == "powersgd" else GradientHook(method, ranks)


class Node:
    """The process groups of a rank: those of its machine, and the first ranks of all machines."""

    def __init__(self, ranks: Ranks) -> None:
        self.world_size = ranks.world_size
        machines = find_machines(ranks)
        groups: list[Any] = [dist.new_group(machine) for machine in machines]
        leaders = [machine[0] for machine in machines]
        self.leaders: Any = dist.new_group(leaders)
        number = next(n for n, machine in enumerate(machines) if ranks.rank in machine)
        self.group, self.leader = groups[number], leaders[number]
        self.is_leader = ranks.rank == self.leader


def find_machines(ranks: Ranks) -> list[list[int]]:
    """The ranks of each machine. Raises ConfigError if they are not numbered machine by machine."""
    local_ranks = ranks.gather_all(ranks.local_rank)
    machines: list[list[int]] = []
    for rank, local_rank in enumerate(local_ranks):
        if local_rank == 0:
            machines.append([])
        if not machines or local_rank != len(machines[-1]):
            raise ConfigError(
                "--sync hierarchical needs ranks that are numbered machine by machine.",
                cause=f"the local ranks are {', '.join(map(str, local_ranks))}",
                fix="torchrun numbers them so, Slurm with --distribution=block; or --sync plain",
            )
        machines[-1].append(rank)
    return machines


def _reduce_by_node(node: Node, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Within the machine to its first rank, between these, and back. On a CPU the backward pass waits meanwhile: what
    the three exchanges do in which order is the same in all ranks then."""
    buffer = bucket.buffer().div_(node.world_size)
    add_by_node(node, buffer)
    future: Future[Tensor] = Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])
    future.set_result(buffer)
    return future


def add_by_node(node: Node, buffer: Tensor) -> None:
    """Adds up the tensors of all ranks, in place."""
    dist.reduce(buffer, dst=node.leader, group=node.group)
    if node.is_leader:
        dist.all_reduce(buffer, group=node.leaders)
    dist.broadcast(buffer, src=node.leader, group=node.group)
