"""`stoker data pack --on ray`: each shard is one task of a Ray cluster, so a lost node repeats only its own shards.

The nodes need stoker and, at the same paths, the data set and the destination, or both in buckets. A shard has the same
bytes wherever it is made (`data/packing.py`), and its record is written after it, so a start that was
stopped is continued with or without Ray.
"""

import dataclasses
import functools
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stoker.config.settings import DataSettings
from stoker.data import packing
from stoker.data.index import Index, open_index_of
from stoker.data.packing import Destination, Plan, PlannedShard, RunShards, ShardRecord, open_destination
from stoker.errors import DataError, PreflightError, needs_package
from stoker.storage.uri import expand_variables, is_uri

CONNECT_S = 10.0
"""How long the cluster may take to accept a connection; Ray itself tries for minutes."""


def on_ray(settings: DataSettings, address: str | None) -> RunShards:
    """Makes shards on the cluster at `address`: host:6379, ray://host:10001; None: RAY_ADDRESS, else the cluster that
    runs on this machine. Raises PreflightError if Ray is not installed or cannot be reached."""

    def run(
        _index: Index, plan: Plan, shards: Sequence[PlannedShard], destination: Destination
    ) -> Iterator[ShardRecord]:
        with needs_package("stoker[ray]", "--on ray"):
            import ray
        _connect(address)
        try:
            # A lost worker or node is not the task's fault, so such a task is repeated as often as needed.
            task = ray.remote(max_retries=-1, num_cpus=1, scheduling_strategy="SPREAD")(_write_shard)
            shared = ray.put(msgspec.structs.replace(plan, shards=()))
            absolute = _absolute(settings)
            pending = [task.remote(absolute, shared, shard, destination.text) for shard in shards]
            while pending:
                done, pending = ray.wait(pending, num_returns=1)
                try:
                    yield msgspec.json.decode(ray.get(done[0]), type=ShardRecord)
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause
                    raise cause if isinstance(cause, Exception) else error from error
        finally:
            ray.shutdown()

    return run


def _connect(address: str | None) -> None:
    import ray

    if address is None and os.environ.get("RAY_ADDRESS", "http").startswith("http"):
        address = "auto"  # an address of the dashboard is that of `stoker launch ray`
    try:
        host, _, port = (address or "").removeprefix("ray://").rpartition(":")
        if port.isdecimal():
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise PreflightError(
            "The Ray cluster cannot be reached.",
            cause=str(error).splitlines()[0],
            fix="--address HOST:6379 or ray://HOST:10001, or RAY_ADDRESS; without --on ray, this machine packs",
        ) from error


def _absolute(settings: DataSettings) -> DataSettings:
    """The settings for another working folder."""

    def absolute(path: str) -> str:
        location = expand_variables(path)
        return location if is_uri(location) or path == "demo" else str(Path(location).absolute())

    def found(path: str) -> str:
        # an annotation file may be relative to the data set, which does not depend on the working folder
        return absolute(path) if path and Path(path).exists() else path

    return dataclasses.replace(
        settings,
        data=absolute(settings.data),
        train=found(settings.train),
        val=found(settings.val),
        splits=found(settings.splits),
    )


def _write_shard(settings: DataSettings, plan: Plan, shard: PlannedShard, destination: str) -> bytes:
    """On a node: makes and writes a shard; its record as JSON."""
    index = _open_index(settings)
    if _plan_id(settings, plan.options) != plan.id:
        raise DataError(
            "A node of the cluster sees another data set.",
            location=index.source,
            cause="its images, boxes or classes differ from those of the driver",
            fix="give every node the same data at the same path, or use a bucket",
        )
    return msgspec.json.encode(packing.write_shard(index, plan, shard, open_destination(destination)))


@functools.cache
def _open_index(settings: DataSettings) -> Index:
    """Once per worker process."""
    return open_index_of(settings)


@functools.cache
def _plan_id(settings: DataSettings, options: packing.PackOptions) -> str:
    return packing.plan_id(_open_index(settings), options)
