"""A checkpoint of divided parameters (`--shard`): gathered in rank 0, against torch.distributed.checkpoint.

Two ranks of gloo with half of the rows each: weights, EMA and two moments of RetinaNet-R50, without a training. Seconds
until one file of whole tensors is on the disk: `Sharding.gather` and `torch.save`; `dcp.save`, which writes a file for
each rank, and `dcp_to_torch_save`, which makes one file of them. They alternate.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import child_environment
from benchmarks.report import Bar, Report, options, publish, spread

MODEL, RANKS = "retinanet_resnet50_fpn", 2
KINDS = ("weights", "EMA", "first moments", "second moments")


def serve_rank(folder: Path, n: int) -> None:
    """A rank; rank 0 prints the seconds."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.tensor import DTensor, Shard

    from stoker.models import build
    from stoker.training.cluster import find_place
    from stoker.training.fsdp import Sharding
    from stoker.training.ranks import Ranks
    from tests.models.samples import settings_of

    ranks = Ranks(find_place())
    ranks.connect()
    sharding = Sharding.over(ranks, torch.device("cpu"))
    state: dict[str, Any] = {}
    for name, parameter in build(settings_of(MODEL), 80).named_parameters():
        whole = parameter.detach().contiguous()
        for kind in KINDS:
            state[f"{kind}.{name}"] = DTensor.from_local(
                sharding.rows(whole).clone(), sharding.mesh, [Shard(0)], run_check=False, shape=whole.shape,
                stride=whole.stride(),
            )  # fmt: skip

    def gather() -> None:
        whole = sharding.gather(state)
        if ranks.is_main:
            torch.save(whole, folder / "gathered.pt")

    def save_parts() -> None:
        dcp.save(state, checkpoint_id=folder / "parts", process_group=ranks.host_group)

    def join_parts() -> None:
        if ranks.is_main:
            dcp_to_torch_save(folder / "parts", folder / "joined.pt")

    seconds: dict[str, list[float]] = {}
    for _ in range(n):
        if ranks.is_main:
            shutil.rmtree(folder / "parts", ignore_errors=True)
        for name, work in (("gather", gather), ("dcp.save", save_parts), ("dcp_to_torch_save", join_parts)):
            ranks.barrier()
            start_s = time.perf_counter()
            work()
            ranks.barrier()
            seconds.setdefault(name, []).append(time.perf_counter() - start_s)
    if ranks.is_main:
        whole = torch.load(folder / "joined.pt", weights_only=False)
        assert all(torch.equal(whole[k], v) for k, v in torch.load(folder / "gathered.pt").items())
        print(json.dumps({"bytes": sum(tensor.numel() * 4 for tensor in state.values()), "seconds": seconds}))
    ranks.close(orderly=True)


def measure(arguments: argparse.Namespace) -> Report:
    from stoker.training.local_ranks import find_free_port

    n = 1 if arguments.quick else 3
    place = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(find_free_port()), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, sys.argv[0], "--rank", folder, str(n)],
                env=child_environment() | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank failed")
    found = json.loads(outputs[0].splitlines()[-1])
    seconds = found["seconds"]
    rows = [{"what": f"{name}, s", **spread(values)} for name, values in seconds.items()]
    rows.append({"what": "bytes of the state", "median": found["bytes"]})
    ratios = [(save + join) / own for own, save, join in zip(*seconds.values(), strict=True)]
    bar = Bar.at_least("one file: dcp.save and dcp_to_torch_save / gather", statistics.median(ratios), 1.0)
    return Report(what=f"a checkpoint of {MODEL}, divided by {RANKS}", n=n, rows=rows, bars=[bar], packages=("torch",))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve_rank(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        publish(measure, options(__doc__))
