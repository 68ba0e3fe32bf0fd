"""One run of `storage.py` in a separate process: reads objects from its server and prints the measurements as JSON.

    python storage_child.py {stoker,obstore,s3fs} PORT COUNT SIZE_BYTES [--concurrency N] [--no-hedge]

stoker: through `Fetcher`, by a consumer that takes batches of 16 and always waits, as a loader does; without
--concurrency at the fetcher's own. obstore: as in its documentation, the minimum cost of reads from
Python. s3fs: by a Python that has it. Both with N requests in flight. CPU is user and system time of all threads of the
process, from the first request to the last byte.
"""

import argparse
import asyncio
import json
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future

"""Demand of the consumer: more than a link of 50 MB/s provides, like the loader of a GPU on such a link."""
BATCH = 16
WARM = 32


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve_from(port: int) -> None:
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret"
    )


def stoker(arguments: argparse.Namespace) -> dict[str, float]:
    from stoker_watch.storage.fetcher import Fetcher
    from stoker_watch.storage.store import open_store
    from stoker_watch.storage.uri import parse_uri

    serve_from(arguments.port)
    store = open_store(parse_uri("s3://bucket"))
    latencies_s: list[float] = []

    def batch(first: int, size: int) -> tuple[threading.Event, list[Future[bytes]]]:
        """Submits `size` reads; the event is set when all are finished."""
        whole, began_s, left = threading.Event(), time.perf_counter(), size

        def on_done(_: Future[bytes]) -> None:
            nonlocal left
            latencies_s.append(time.perf_counter() - began_s)
            left -= 1
            if not left:
                whole.set()

        futures = [
            fetcher.submit(store, f"data/{first + number}", length=arguments.size_bytes) for number in range(size)
        ]
        for future in futures:
            future.add_done_callback(on_done)
        return whole, futures

    with Fetcher(hedge=arguments.hedge) as fetcher:
        for future in [fetcher.submit(store, "warm", length=arguments.size_bytes) for _ in range(WARM)]:
            future.result()
        requests = store.counters.requests
        began, cpu = time.perf_counter(), cpu_s()
        batches: deque[tuple[threading.Event, list[Future[bytes]]]] = deque()
        submitted = taken = 0
        while taken < arguments.count:
            concurrency = arguments.concurrency or fetcher.target_in_flight
            # in addition to the batch that the consumer waits for
            while submitted < arguments.count and submitted - taken < concurrency + BATCH:
                batches.append(batch(submitted, min(BATCH, arguments.count - submitted)))
                submitted += len(batches[-1][1])
            whole, futures = batches.popleft()
            whole.wait()
            if any(len(future.result()) != arguments.size_bytes for future in futures):
                raise RuntimeError("an object was too short")
            taken += len(futures)
        took_s, cpu = time.perf_counter() - began, cpu_s() - cpu
        extra = (store.counters.requests - requests) / arguments.count - 1
        concurrency = arguments.concurrency or fetcher.target_in_flight
    return result(arguments, took_s, cpu, latencies_s) | {"extra": extra, "concurrency": concurrency}


def obstore(arguments: argparse.Namespace) -> dict[str, float]:
    import obstore as package
    from obstore.store import S3Store

    serve_from(arguments.port)
    store = S3Store("bucket", region="us-east-1", client_options={"allow_http": True})

    async def get(key: str) -> int:
        return len((await package.get_range_async(store, key, start=0, length=arguments.size_bytes)).to_bytes())

    async def run() -> dict[str, float]:
        return await many(arguments, get)

    return asyncio.run(run())


def s3fs(arguments: argparse.Namespace) -> dict[str, float]:
    import s3fs as package

    async def run() -> dict[str, float]:
        files = package.S3FileSystem(
            key="key", secret="secret", endpoint_url=f"http://127.0.0.1:{arguments.port}", asynchronous=True,
            config_kwargs={"max_pool_connections": 256})  # fmt: skip
        await files.set_session()

        async def get(key: str) -> int:
            return len(await files._cat_file(f"bucket/{key}"))

        return await many(arguments, get)

    return asyncio.run(run())


async def many(arguments: argparse.Namespace, get: Callable[[str], Awaitable[int]]) -> dict[str, float]:
    """Reads all objects by `get`, which returns the size, with `--concurrency` or 32 at a time."""
    latencies_s: list[float] = []

    async def worker(keys: Iterator[str]) -> None:
        for key in keys:
            at = time.perf_counter()
            if await get(key) != arguments.size_bytes:
                raise RuntimeError("an object was too short")
            latencies_s.append(time.perf_counter() - at)

    async def all_of(keys: Iterator[str]) -> None:
        await asyncio.gather(*(worker(keys) for _ in range(arguments.concurrency or 32)))

    await all_of(iter(["warm"] * WARM))
    latencies_s.clear()
    began, cpu = time.perf_counter(), cpu_s()
    await all_of(f"data/{number}" for number in range(arguments.count))
    return result(arguments, time.perf_counter() - began, cpu_s() - cpu, latencies_s)


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
    parser.add_argument("who", choices=["stoker", "obstore", "s3fs"])
    parser.add_argument("port", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("size_bytes", type=int)
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--no-hedge", dest="hedge", action="store_false")
    arguments = parser.parse_args()
    print(json.dumps({"stoker": stoker, "obstore": obstore, "s3fs": s3fs}[arguments.who](arguments)), flush=True)
    if arguments.who == "obstore":
        os._exit(0)  # a thread of obstore that is in Python when the interpreter ends aborts the process


if __name__ == "__main__":
    main()
