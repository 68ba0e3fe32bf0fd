"""A rank of `test_ranks.py`: steps of a compiled model with DistributedDataParallel, against those of one that is not.

Prints JSON in rank 0: the largest difference of weights and statistics after two steps, and the order in which the last
of them ran its backward graphs and began to exchange buckets of gradients.
"""

import json
from types import SimpleNamespace
from typing import Any

from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from stoker.config.sync_method import parse_sync
from stoker.training import forward
from stoker.training.cluster import find_place
from stoker.training.forward import make_loss_fn
from stoker.training.optim import LossAccumulator
from stoker.training.ranks import Ranks
from stoker.training.replica import Replica
from stoker.training.state import TrainState
from stoker.training.triggers import Due
from tests.models.samples import make_batch
from tests.training.rank_gradients import BOXES, CPU, make_step, part_of, states

order: list[str] = []


def run_forward(graph: fx.GraphModule, _: list[Tensor]) -> Any:
    return make_boxed_func(graph.forward)


def run_backward(graph: fx.GraphModule, _: list[Tensor]) -> Any:
    def backward(*args: Any) -> Any:
        order.append("graph")
        return graph.forward(*args)

    return make_boxed_func(backward)


def allreduce_recorded(group: Any, bucket: GradBucket) -> Future[Tensor]:
    order.append("exchange")
    return allreduce_hook(group, bucket)


def train_twice(ranks: Ranks, *, compile: bool) -> dict[str, Tensor]:
    model, optimizer = make_step("retinanet_tiny_fpn", {"backbone_norm": "sync_bn"})
    setup: Any = SimpleNamespace(
        model=model, optimizer=optimizer, loss_accumulator=LossAccumulator(CPU, max_skipped_steps=20), ranks=ranks,
        device=CPU, state=TrainState(),
    )  # fmt: skip
    replica = Replica(setup, make_loss_fn(model, compile=compile), parse_sync("plain:1"))
    assert replica._ddp is not None
    replica._ddp.register_comm_hook(None, allreduce_recorded)
    batch = make_batch(BOXES, (64, 64), 3)
    batch = part_of(batch._replace(images=batch.images.double(), boxes=batch.boxes.double()), ranks.rank, 2)
    autocast = CPU.autocast("fp32")
    replica.warm_up(batch, autocast)
    for step in range(2):
        order.clear()
        optimizer.set_scalars(0.1, step)
        replica.train_step(batch, 1, autocast, stop=False, due=Due(evaluation=False))
        replica.agree(1.0)
    return states(model)


if __name__ == "__main__":
    ranks = Ranks(find_place())
    ranks.connect()
    forward.COMPILE_BACKEND = aot_autograd(fw_compiler=run_forward, bw_compiler=run_backward)
    expected, found = (train_twice(ranks, compile=compile) for compile in (False, True))
    difference = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    if ranks.is_main:
        print(json.dumps({"difference": difference, "order": order}))
    ranks.close(orderly=True)
