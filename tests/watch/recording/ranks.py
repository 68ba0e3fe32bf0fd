"""A training loop of several ranks, for the tests: `python -m tests.watch.recording.ranks RUN HOW`.

HOW: `slow rank`: rank 1 sleeps SLEEP_S in each step; `slow link`: each exchange of gradients takes SLEEP_S more, and
the process group is made inside the block; `crash`: rank 1 raises in the middle.
"""

import atexit
import os
import sys
import threading
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stoker_watch

STEPS, SLEEP_S = 40, 0.03


def slow_exchange(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    work = dist.all_reduce(bucket.buffer(), async_op=True)

    def arrives() -> None:
        time.sleep(SLEEP_S)
        work.wait()
        future.set_result(bucket.buffer())

    threading.Thread(target=arrives).start()
    return future


def main(run: str, how: str) -> None:
    warnings.simplefilter("error", RuntimeWarning)
    if how != "slow link":
        dist.init_process_group("gloo")
    with stoker_watch.measure(run) as m:
        if how == "slow link":
            dist.init_process_group("gloo")
        model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)))
        if how == "slow link":
            model.register_comm_hook(None, slow_exchange)
        dist.barrier()
        for number in range(STEPS):
            with m.step(num_images=8):
                if how == "slow rank" and dist.get_rank() == 1:
                    time.sleep(SLEEP_S)
                if how == "crash" and dist.get_rank() == 1 and number == STEPS // 2:
                    raise ValueError("rank one is tired")
                model(torch.randn(8, 16)).pow(2).mean().backward()
        m.log(loss=1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    code = 0
    try:
        main(*sys.argv[1:])
    except Exception:  # noqa: BLE001  # as Python would print it
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads live as long as the model, and may abort Python as it ends (PyTorch issue 190489)
