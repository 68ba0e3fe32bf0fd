"""One run of `shard_loading.py` in a separate process: batches of one loader, from its server or from local files.

    python shard_loading_child.py {stoker,webdataset,streaming} PORT WHAT COUNT SIDE [--random]
    python shard_loading_child.py pack-mds FOLDER OUT

Each makes shuffled uint8 batches of 16 images, squashed to SIDE × SIDE, with two workers, as its documentation
recommends; the peers decode and resize with OpenCV, as stoker does. CPU time is that of the process and of all that it
started. Prints JSON. WHAT: the folder below the bucket, or for stoker a local path.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BATCH, WORKERS = 16, 2
SAMPLE_S = 0.25


def tree_cpu_s(root: int) -> float:
    """CPU time of a process and of its descendants, and of those that they have waited for, by /proc (proc(5))."""
    fields_of = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields_of[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    ticks, pending = 0, {root}
    while pending:
        ticks += sum(int(ticks) for pid in pending if pid in fields_of for ticks in fields_of[pid][11:15])
        pending = {pid for pid, fields in fields_of.items() if int(fields[1]) in pending}
    return ticks / os.sysconf("SC_CLK_TCK")


def stoker(arguments: argparse.Namespace, began_s: float) -> Iterator[int]:
    import numpy as np

    from stoker.data.index import open_index
    from stoker.data.loading.loader import Loader, LoaderSpec, compute_max_boxes
    from stoker.data.loading.shard_order import choose_buffer
    from stoker.hardware.selection import select_device
    from stoker_watch.hardware.cgroup import host_memory

    index = open_index(arguments.what if arguments.port == 0 else f"s3://bucket/{arguments.what}")
    image_indices = index.image_indices("train")
    limit, used = host_memory()
    buffer, reason = choose_buffer(
        index.image_ranges(image_indices),
        is_in_bucket=index.remote_object(int(image_indices[0])) is not None,
        batch_size=BATCH,
        num_ranks=1,
        memory_bytes=limit - used,
    )
    if arguments.buffer:
        buffer = arguments.buffer
    if arguments.random:
        buffer = 0
    print(f"buffer {buffer}: {reason}; opened after {time.perf_counter() - began_s:.2f} s", file=sys.stderr)
    spec = LoaderSpec(
        device=select_device("cpu"), batch_size=BATCH, image_size=(arguments.side, arguments.side), resize="squash",
        max_boxes=compute_max_boxes(index, image_indices), seed=0, workers=WORKERS, shuffle_buffer=buffer,
    )  # fmt: skip
    with Loader(index, np.asarray(image_indices), spec) as loader:
        for batch in loader:
            yield len(batch.images)
            if loader.state_dict()["quarantined"]:
                raise RuntimeError("the loader left images out")


def resize(data: Any, side: int) -> Any:
    import cv2
    import numpy as np

    image = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    return cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA)


class Resized:
    """A picklable function of a sample."""

    def __init__(self, side: int, name: str) -> None:
        self.side, self.name = side, name

    def __call__(self, sample: Any) -> Any:
        return resize(sample[self.name], self.side)


def one_thread_each(_worker: int) -> None:
    import cv2

    cv2.setNumThreads(0)


def webdataset(arguments: argparse.Namespace, _began_s: float) -> Iterator[int]:
    import webdataset as package

    url = f"http://127.0.0.1:{arguments.port}/bucket/{arguments.what}/train-{{00000..{arguments.shards - 1:05d}}}.tar"
    name = "jpg" if "photos" in arguments.what else "bmp"
    images = package.WebDataset(url, shardshuffle=100, seed=0).shuffle(1000).map(Resized(arguments.side, name))
    loader = package.WebLoader(
        images.batched(BATCH, collation_fn=stacked), batch_size=None, num_workers=WORKERS,
        worker_init_fn=one_thread_each, persistent_workers=True,
    )  # fmt: skip
    while True:
        for batch in loader:
            yield len(batch)


def stacked(images: Any) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.stack(images))


def streaming(arguments: argparse.Namespace, _began_s: float) -> Iterator[int]:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    os.environ["S3_ENDPOINT_URL"] = f"http://127.0.0.1:{arguments.port}"
    local = tempfile.mkdtemp(dir="/dev/shm")
    side = arguments.side

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: int) -> Any:
            return resize(super().__getitem__(at)["image"], side)

    try:
        images = Images(
            remote=f"s3://bucket/{arguments.what}-mds", local=local, shuffle=True, batch_size=BATCH,
            cache_limit=arguments.cache_limit or None,
        )  # fmt: skip
        for stream in images.streams:  # the workers would share its open connection, and get the data of one another
            stream._downloader.clean_up()
        loader = DataLoader(
            images, BATCH, num_workers=WORKERS, collate_fn=stacked, worker_init_fn=one_thread_each,
            persistent_workers=True,
        )  # fmt: skip
        while True:
            for batch in loader:
                yield len(batch)
    finally:
        shutil.rmtree(local, ignore_errors=True)


def pack_mds(folder: Path, out: Path) -> None:
    """The images of a folder in the shards of MosaicML Streaming."""
    from streaming import MDSWriter

    with MDSWriter(out=str(out), columns={"image": "bytes"}, size_limit=1 << 26) as writer:
        for path in sorted(folder.glob("[0-9]*")):  # not the annotations
            writer.write({"image": path.read_bytes()})


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def server_s(arguments: argparse.Namespace) -> float:
    return tree_cpu_s(arguments.server) if arguments.server else 0.0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The first batches, `--warm`, are not part of the rates."""
    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1")
    if arguments.port:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{arguments.port}"
    began_s = time.perf_counter()
    batches = {"stoker": stoker, "webdataset": webdataset, "streaming": streaming}[arguments.who](arguments, began_s)
    first_s, seen, counted, memory, last_s = 0.0, 0, 0, [], began_s
    start_s, start_cpu_s, server_cpu_s = began_s, 0.0, server_s(arguments)
    for size in batches:
        now_s = time.perf_counter()
        first_s = first_s or now_s - began_s
        seen += size
        if seen <= arguments.warm:
            start_s, start_cpu_s, server_cpu_s = now_s, tree_cpu_s(os.getpid()), server_s(arguments)
        else:
            counted += size
        if now_s - last_s > SAMPLE_S:
            memory.append(rss_bytes())
            last_s = now_s
        if seen >= arguments.count + arguments.warm:
            break
    took_s = time.perf_counter() - start_s
    used_s = tree_cpu_s(os.getpid()) - start_cpu_s
    server_cores = (server_s(arguments) - server_cpu_s) / max(1e-9, took_s)
    batches.close()
    quarter = memory[len(memory) // 4] if memory else rss_bytes()
    return {
        "images/s": counted / max(1e-9, took_s),
        "CPU ms": used_s / max(1, counted) * 1e3,
        "server cores": server_cores,
        "first batch s": first_s,
        "RSS MiB": (memory[-1] if memory else rss_bytes()) / 2**20,
        **({"series": [round(one / 2**20) for one in memory]} if arguments.series else {}),
        "RSS growth": (memory[-1] if memory else rss_bytes()) / quarter,
    }


def main() -> None:
    if sys.argv[1] == "pack-mds":
        pack_mds(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=["stoker", "webdataset", "streaming"])
    parser.add_argument("port", type=int)
    parser.add_argument("what")
    parser.add_argument("count", type=int)
    parser.add_argument("side", type=int)
    parser.add_argument("--server", type=int, default=0, help="its process; its use of the cores is measured, too")
    parser.add_argument("--warm", type=int, default=256)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--buffer", type=int, default=0)
    parser.add_argument("--cache-limit", default="")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--series", action="store_true", help="the memory of the process every 0.25 s, too")
    print(json.dumps(measure(parser.parse_args())), flush=True)
    os._exit(0)  # workers of peers that still read are not waited for


if __name__ == "__main__":
    main()
