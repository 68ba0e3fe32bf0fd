"""A rank of `test_ranks.py`: steps of a compiled model with DistributedDataParallel, against those of one that is not.

Prints JSON in rank 0: the largest difference of weights and statistics after two steps, and the order in which the last
of them ran its backward graphs and began to exchange buckets of gradients.
"""

import json
from typing import Any

from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from stoker.config.sync_method import parse_sync
from stoker.training import step
from stoker.training.cluster import find_place
from stoker.training.ddp import Ddp
from stoker.training.ranks import Ranks
from stoker.training.state import Signals
from tests.trainer.models.samples import make_batch
from tests.trainer.training.parallels import ignore, make_setup, step_of
from tests.trainer.training.rank_gradients import BOXES, CPU, make_step, part_of, states

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
    setup = make_setup(model, optimizer, ranks, CPU)
    setup.config.run.compile = compile
    ddp = Ddp(setup, ignore, parse_sync("plain:1"))
    ddp._ddp.register_comm_hook(None, allreduce_recorded)
    batch = make_batch(BOXES, (64, 64), 3)
    batch = part_of(batch._replace(images=batch.images.double(), boxes=batch.boxes.double()), ranks.rank, 2)
    ddp.warm_up(lambda: batch)
    for _ in range(2):
        order.clear()
        step_of(ddp, batch, 0.1)
        ddp.agree(Signals())
    return states(model)


if __name__ == "__main__":
    ranks = Ranks(find_place())
    ranks.connect()
    step.COMPILE_BACKEND = aot_autograd(fw_compiler=run_forward, bw_compiler=run_backward)
    expected, found = (train_twice(ranks, compile=compile) for compile in (False, True))
    difference = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    if ranks.is_main:
        print(json.dumps({"difference": difference, "order": order}))
    ranks.close(orderly=True)
