"""One run of `storage.py`, in a process of its own: fetches objects from its server and prints what that took, as JSON.

    python storage_child.py {stoker,s3fs} PORT COUNT SIZE_BYTES [--depth N] [--no-hedge]

stoker: through `Fetcher`; without --depth as a consumer that always waits, at the depth that the fetcher finds. s3fs:
by a Python that has it, with N requests under way. CPU is the whole process's, from the first request to the last byte.
"""

import argparse
import asyncio
import json
import os
import resource
import time
from collections import deque

DEMAND_PER_S = 600.0
"""What the consumer would take: more than the link's 50 MB/s carry, as a GPU's loader would on such a link."""
NOTE_EVERY = 8
WARM = 32


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def stoker(arguments: argparse.Namespace) -> dict[str, float]:
    from stoker.storage.address import parse
    from stoker.storage.fetcher import Fetcher
    from stoker.storage.store import open_store

    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{arguments.port}", AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret"
    )
    store = open_store(parse("s3://bucket"))
    latencies_s: list[float] = []
    with Fetcher(hedge=arguments.hedge) as fetcher:
        for future in [fetcher.submit(store, "warm", length=arguments.size_bytes) for _ in range(WARM)]:
            future.result()
        requests = store.counts.requests
        began, cpu = time.perf_counter(), cpu_s()
        flying: deque = deque()
        submitted = taken = 0
        while taken < arguments.count:
            depth = arguments.depth or fetcher.ahead
            while submitted < arguments.count and len(flying) < depth:
                at = time.perf_counter()
                future = fetcher.submit(store, f"data/{submitted}", length=arguments.size_bytes)
                future.add_done_callback(lambda _, at=at: latencies_s.append(time.perf_counter() - at))
                flying.append(future)
                submitted += 1
            if len(flying.popleft().result()) != arguments.size_bytes:
                raise RuntimeError("an object came short")
            taken += 1
            if taken % NOTE_EVERY == 0:
                fetcher.note(DEMAND_PER_S, True)
        took_s, cpu = time.perf_counter() - began, cpu_s() - cpu
        extra = (store.counts.requests - requests) / arguments.count - 1
        depth = arguments.depth or fetcher.ahead
    return result(arguments, took_s, cpu, latencies_s) | {"extra": extra, "depth": depth}


def s3fs(arguments: argparse.Namespace) -> dict[str, float]:
    import s3fs as package

    latencies_s: list[float] = []

    async def run() -> tuple[float, float]:
        files = package.S3FileSystem(
            key="key", secret="secret", endpoint_url=f"http://127.0.0.1:{arguments.port}", asynchronous=True,
            config_kwargs={"max_pool_connections": 256})  # fmt: skip
        await files.set_session()
        gate = asyncio.Semaphore(arguments.depth or 32)

        async def one(key: str) -> None:
            async with gate:
                at = time.perf_counter()
                if len(await files._cat_file(key)) != arguments.size_bytes:
                    raise RuntimeError("an object came short")
                latencies_s.append(time.perf_counter() - at)

        await asyncio.gather(*(one("bucket/warm") for _ in range(WARM)))
        latencies_s.clear()
        began, cpu = time.perf_counter(), cpu_s()
        await asyncio.gather(*(one(f"bucket/data/{number}") for number in range(arguments.count)))
        return time.perf_counter() - began, cpu_s() - cpu

    took_s, cpu = asyncio.run(run())
    return result(arguments, took_s, cpu, latencies_s)


def result(arguments: argparse.Namespace, took_s: float, cpu: float, latencies_s: list[float]) -> dict[str, float]:
    latencies_s.sort()
    return {
        "MB/s": arguments.count * arguments.size_bytes / took_s / 1e6,
        "CPU ms": cpu / arguments.count * 1e3,
        "p50 ms": latencies_s[len(latencies_s) // 2] * 1e3,
        "p99 ms": latencies_s[int(len(latencies_s) * 0.99)] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=["stoker", "s3fs"])
    parser.add_argument("port", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("size_bytes", type=int)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--no-hedge", dest="hedge", action="store_false")
    arguments = parser.parse_args()
    print(json.dumps({"stoker": stoker, "s3fs": s3fs}[arguments.who](arguments)))


if __name__ == "__main__":
    main()
