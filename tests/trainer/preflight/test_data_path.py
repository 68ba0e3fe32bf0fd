"""The speed of reading: measured on real files and servers behind a bad network, judged on constructed measurements."""

import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from stoker.data.index import Index, open_index
from stoker.preflight import data_path
from stoker.preflight.data_path import ReadRate, check_data_path, drop_pages, judge, mounted_bucket
from stoker_watch.findings.finding import Finding
from stoker_watch.storage.fetcher import MAX_IN_FLIGHT
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.drawn import draw
from tests.trainer.preflight.metadata_server import NOWHERE, MetadataServer, google
from tests.watch.storage.servers import Conditions, Proxy, Server, apply, google_server

SECONDS = 0.4
RATE = ReadRate(images=1000, total_bytes=100_000_000, seconds=4.0, concurrency=8, cold=True)
"""250 img/s of 100 kB."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("set") / "boxes", train=30, val=4)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with google_server() as google:
        yield google


@pytest.fixture
def index(folder: Path) -> Index:
    return open_index(folder)


def rate_of(findings: list[Finding]) -> Finding:
    return next(finding for finding in findings if finding.id == "data_rate")


def rate_in_time(index: Index, *, demand_images_per_s: float | None) -> Finding:
    """The rate; measured for longer where this machine is too busy for an image to arrive."""
    for seconds in (SECONDS, 2.0, 10.0):
        finding = rate_of(check_data_path(index, demand_images_per_s=demand_images_per_s, seconds=seconds, env=NOWHERE))
        if finding.severity in ("ok", "warning"):
            break
    return finding


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_path, "MIN_S", 0.0)
    before = contents(folder)
    fast = rate_of(check_data_path(open_index(folder), demand_images_per_s=0.001, seconds=SECONDS, env=NOWHERE))
    assert fast.severity in ("ok", "unknown"), fast  # unknown where the kernel keeps the pages
    slow = rate_of(check_data_path(open_index(folder), demand_images_per_s=1e9, seconds=SECONDS, env=NOWHERE))
    assert slow.severity == "warning"
    assert slow.title.endswith("the GPU takes 1000000000: 100 % idle")
    assert slow.fix
    unknown_demand = rate_in_time(open_index(folder), demand_images_per_s=None)
    assert unknown_demand.severity == "ok"
    assert contents(folder) == before


def test_threads_end_with_the_measurement(index: Index) -> None:
    before = set(threading.enumerate())
    data_path._measure_reads(index, data_path._sample_order(index), 0.1)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before


def test_a_result_costs_the_same_with_many_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement is not slower than what it measures: to take a result, no other is looked at."""
    monkeypatch.setattr(data_path, "MIN_S", 0.0)
    touched = submitted = 0
    waiting: deque[Future[bytes]] = deque()

    class Watched(Future[bytes]):
        def __getattribute__(self, name: str) -> object:
            nonlocal touched
            touched += name == "_condition"
            return super().__getattribute__(name)

    def submit(_: int) -> Future[bytes]:
        nonlocal submitted
        submitted += 1
        waiting.append(future := Watched())
        if submitted == 1 or len(waiting) == 100:
            waiting.popleft().set_result(b"x")
        return future

    data_path._measure(list(range(2000)), 0.3, submit, lambda: 100)
    assert submitted > 200
    assert touched < 20 * submitted


@pytest.fixture
def bucket(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Proxy]]:
    with server.bucket().through() as (served, proxy):
        apply(monkeypatch, {**served.environment, **NOWHERE})
        store = open_store(parse_uri(served.uri))
        for path in folder.rglob("*"):
            if path.is_file():
                store.write(f"set/{path.relative_to(folder)}", path.read_bytes())
        yield f"{served.uri}/set", proxy


def test_bucket(bucket: tuple[str, Proxy], server: Server) -> None:
    """Latency of the network bounds what the same server delivers; nothing is written."""
    uri, proxy = bucket
    index = open_index(uri)
    name = parse_uri(uri).bucket
    before = dict(server.objects.buckets[name])
    near = rate_in_time(index, demand_images_per_s=0.001)
    assert near.severity == "ok", near
    assert near.title.startswith("bucket delivers ")
    proxy.conditions = Conditions(latency_s=0.05)
    far = rate_in_time(index, demand_images_per_s=1e9)
    assert far.severity == "warning"
    assert far.place == uri
    assert 0 < float(far.title.split()[2]) < MAX_IN_FLIGHT / 0.05  # however fast the machine is
    assert server.objects.buckets[name] == before
    assert {request.method for request in proxy.requests[-20:]} == {"GET"}


def test_bucket_that_refuses(bucket: tuple[str, Proxy], server: Server) -> None:
    uri, _ = bucket
    index = open_index(uri)
    server.objects.denied.add("GET")
    try:
        finding = rate_of(check_data_path(index, demand_images_per_s=10.0, seconds=10.0, env=NOWHERE))
    finally:
        server.objects.denied.clear()
    assert finding.severity == "blocker"
    assert "no permission to read" in finding.title


def test_objects_that_are_gone(bucket: tuple[str, Proxy], server: Server) -> None:
    uri, _ = bucket
    index = open_index(uri)
    objects = server.objects.buckets[parse_uri(uri).bucket]
    for key in [key for key in objects if key.endswith(".jpg")][:20]:
        del objects[key]
    finding = rate_in_time(index, demand_images_per_s=None)
    assert finding.severity == "ok"
    assert "are missing" in finding.evidence_text


def test_store_that_hangs(bucket: tuple[str, Proxy]) -> None:
    uri, proxy = bucket
    index = open_index(uri)
    proxy.conditions = Conditions(plan=lambda *_: "hang")
    finding = rate_of(check_data_path(index, demand_images_per_s=10.0, seconds=SECONDS, env=NOWHERE))
    assert finding.severity == "unknown"
    assert (finding.evidence_text, finding.place) == (data_path.NO_ANSWER, uri)


def test_region_of_the_bucket(bucket: tuple[str, Proxy]) -> None:
    uri, _ = bucket
    index = open_index(uri)
    with MetadataServer(google()) as metadata:
        findings = check_data_path(index, demand_images_per_s=1.0, seconds=SECONDS, env=metadata.google_env)
    assert [finding.id for finding in findings] == ["data_rate", "bucket_region"]
    assert findings[1].severity == "unknown"  # this server has no locations


def test_missing_images_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_path, "MIN_S", 0.0)
    index = open_index(draw(tmp_path / "set", train=12, val=2))
    for path in list((tmp_path / "set/train").glob("*.jpg"))[:6]:
        path.unlink()
    some = rate_of(check_data_path(index, demand_images_per_s=None, seconds=SECONDS, env=NOWHERE))
    assert some.severity == "ok"
    assert "6 are missing" in some.evidence_text
    for path in (tmp_path / "set/train").glob("*.jpg"):
        path.unlink()
    none = rate_of(check_data_path(index, demand_images_per_s=None, seconds=SECONDS, env=NOWHERE))
    assert none.severity == "unknown"
    assert "No such file" in none.evidence_text


@pytest.mark.parametrize(
    ("changes", "decode_s", "demand", "severity", "says"),
    [
        ({}, 1e-6, 100.0, "ok", ""),
        ({}, 1e-6, 410.0, "warning", "limited by reading"),
        ({}, 1.0, 410.0, "warning", "limited by decoding"),
        ({"throttled": 7}, 1e-6, 410.0, "warning", "refused 7 requests"),
        ({"cold": False}, 1e-6, 100.0, "unknown", "page cache could not be dropped"),
        ({"cold": False}, 1e-6, 410.0, "warning", "page cache could not be dropped"),
        ({"cold": None}, 1e-6, 100.0, "ok", "not known"),
        ({}, None, 100.0, "ok", ""),
        ({}, 1e-6, 240.0, "warning", "limited by reading"),
    ],
)
def test_verdict(
    index: Index, changes: dict[str, object], decode_s: float | None, demand: float, severity: str, says: str
) -> None:
    finding = judge(index, dataclasses.replace(RATE, **changes), decode_s, demand, "the GPU takes")
    assert finding.severity == severity
    assert says in finding.evidence_text
    assert bool(finding.fix) == (severity != "ok")


def test_the_figures_of_the_title(index: Index) -> None:
    rate = dataclasses.replace(RATE, images=960)
    title = judge(index, rate, None, 410.0, "the GPU takes").title
    assert title.endswith(" delivers 240 img/s, the GPU takes 410: 41 % idle")
    assert judge(index, rate, None, 230.0, "RetinaNet on an L4 takes").title.endswith("takes 230: no reserve")


@pytest.mark.parametrize(
    ("kind", "network", "limit_fix"),
    [
        ("fuse.gcsfuse", True, "train from the bucket itself"),
        ("nfs4", True, "copy the images"),
        ("ext4", False, "NVMe"),
    ],
)
def test_fix_names_the_kind_of_storage(
    index: Index, monkeypatch: pytest.MonkeyPatch, kind: str, network: bool, limit_fix: str
) -> None:
    storage = {"kind": kind, "network": network}
    monkeypatch.setattr(data_path, "describe_storage", lambda _: storage)
    finding = judge(index, RATE, 1e-6, 410.0, "the GPU takes")
    assert limit_fix in finding.fix
    assert ("gcsfuse mount delivers" in finding.title) == (kind == "fuse.gcsfuse")


def test_vertex_mounts() -> None:
    assert mounted_bucket(Path("/gcs/bucket/sets/boats")) == "gs://bucket/sets/boats"
    assert mounted_bucket(Path("/gcs")) == mounted_bucket(Path("/data/gcs/x")) == ""


def test_pages_are_dropped_or_not_known(index: Index) -> None:
    """Where the kernel tells, the pages of a file on a disk are gone; a file that is gone is not known."""
    image = int(index.image_indices("train")[0])
    os.sync()  # dirty pages are kept
    index.read(image)
    for _ in range(50):  # pages that this machine is still writing, or has not put in its lists, stay
        if (dropped := drop_pages(index, image)) is not False:
            break
        time.sleep(0.1)
    assert dropped in (True, None)
    os.rename(index.path(image), f"{index.path(image)}.away")
    try:
        assert drop_pages(index, image) is None
    finally:
        os.rename(f"{index.path(image)}.away", index.path(image))


def test_every_image_once_in_an_order_of_its_own(index: Index) -> None:
    orders = [data_path._sample_order(index) for _ in range(4)]
    assert all(np.array_equal(sorted(order), index.image_indices("train")) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
