"""Reads of objects of 110 KB from a bucket, without decoding: bandwidth used, CPU cost, tail latency.

The server (`object_server.py`) and each run of a client (`storage_child.py`) are separate processes. The rows without
a link show that the server is many times faster than the link. Bars: the fraction of a link of 50 MB/s with 20 ms of
latency, at the fetcher's own concurrency; CPU per object on that link, where each response arrives alone and
wakes its reader, which costs more than at full speed; p99 when 2 % of the requests take 500 ms, without and with
hedging. Compared with plain obstore, and with s3fs if the peers are installed (`peers.py`), both at concurrency 32.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.loading.object_server import running_server
from benchmarks.processes import python_path
from benchmarks.report import Bar, Report, options, publish

SIZE_BYTES = 110_000
LINK_MB_PER_S, LATENCY_MS = 50.0, 20.0
FOLDER = Path(__file__).resolve().parent
SERVERS = {
    "link": ("--latency-ms", str(LATENCY_MS), "--mb-per-s", str(LINK_MB_PER_S)),
    "free": (),
    "tail": ("--latency-ms", str(LATENCY_MS), "--slow-fraction", "0.02", "--slow-ms", "500"),
}
CASES = {
    "stoker, 50 MB/s and 20 ms": ("stoker", "link", 1000, ()),
    "s3fs, 50 MB/s and 20 ms": ("s3fs", "link", 300, ()),
    "obstore, 50 MB/s and 20 ms": ("obstore", "link", 1000, ()),
    "stoker, no link": ("stoker", "free", 2000, ("--concurrency", "32")),
    "obstore, no link": ("obstore", "free", 2000, ("--concurrency", "32")),
    "s3fs, no link": ("s3fs", "free", 300, ("--concurrency", "32")),
    "stoker, slow tail, hedged": ("stoker", "tail", 500, ("--concurrency", "32")),
    "stoker, slow tail, not hedged": ("stoker", "tail", 500, ("--concurrency", "32", "--no-hedge")),
}
"""Row: (client, server, number of objects, options)."""


def one_run(python: str, who: str, port: int, count: int, how: tuple[str, ...]) -> dict[str, float]:
    command = [python, str(FOLDER / "storage_child.py"), who, str(port), str(count), str(SIZE_BYTES), *how]
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(FOLDER.parents[1]),
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{who} failed: {done.stderr[-500:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def run(arguments: argparse.Namespace) -> Report:
    n = 2 if arguments.quick else 5
    divisor = 2 if arguments.quick else 1
    absent = peers.missing("s3fs")
    pythons = {
        "stoker": sys.executable,
        "obstore": sys.executable,
        "s3fs": None if absent else str(peers.interpreter()),
    }
    results: dict[str, list[dict[str, float]]] = {what: [] for what in CASES}
    with contextlib.ExitStack() as stack:
        size = ("--size-bytes", str(SIZE_BYTES))
        ports = {name: stack.enter_context(running_server(*size, *link))[0] for name, link in SERVERS.items()}
        for _ in range(n):
            for what, (who, where, count, how) in CASES.items():
                if python := pythons[who]:
                    results[what].append(one_run(python, who, ports[where], count // divisor, how))
    report = Report(
        f"reads of objects of 110 KB; s3fs: {absent or peers.versions('s3fs')['s3fs']}", n, packages=["obstore"]
    )
    report.rows = [{"what": what, **(medians(runs) or {"n/a": absent})} for what, runs in results.items()]
    rows = {row["what"]: row for row in report.rows}
    on_link, plain = rows["stoker, 50 MB/s and 20 ms"], rows["obstore, 50 MB/s and 20 ms"]
    tails = [rows[f"stoker, slow tail, {how}"]["p99 ms"] for how in ("not hedged", "hedged")]
    report.bars = [
        Bar.at_least("fraction of the link", on_link["MB/s"] / LINK_MB_PER_S, 0.9),
        Bar.at_most("CPU ms per object, no link", rows["stoker, no link"]["CPU ms"], 0.2),
        Bar.at_most("CPU ms per object, on the link", on_link["CPU ms"], 0.2),
        Bar.at_most("CPU / CPU of plain obstore, on the link", on_link["CPU ms"] / plain["CPU ms"], 1.25),
        Bar.at_least("p99 without hedging / p99 with", tails[0] / tails[1], 2.0),
        Bar.at_most("extra requests", rows["stoker, slow tail, hedged"]["extra"], 0.05),
        Bar.at_least("server throughput / link throughput", rows["stoker, no link"]["MB/s"] / LINK_MB_PER_S, 2.0),
    ]
    if results["s3fs, 50 MB/s and 20 ms"]:
        cost = rows["s3fs, 50 MB/s and 20 ms"]["CPU ms"] / on_link["CPU ms"]
        report.bars.append(Bar.at_least("CPU of s3fs / CPU of stoker, on the link", cost, 4.0))
    return report


def medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each number; empty without runs."""
    if not runs:
        return {}
    return {name: statistics.median(one[name] for one in runs) for name in runs[0]} | {
        "MB/s min": min(one["MB/s"] for one in runs),
        "MB/s max": max(one["MB/s"] for one in runs),
    }


if __name__ == "__main__":
    publish(run, options(__doc__))
