"""How fast images come from where the data is, against what the device takes.

A few seconds of the loader's own reads, with as many at once as the loader would come to use: threads that read local
files (whose pages are dropped from the page cache before), or requests of the fetcher to a bucket. Decoding is measured
on the images that were read. Each image is read once, in an order that differs from check to check, so that the second
check does not measure the caches that the first one filled.
"""

import contextlib
import dataclasses
import errno
import itertools
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.images.decode import thumbnail
from stoker.data.index import Index
from stoker.data.loading.stats import MAX_WORKERS, WORKERS_PER_CORE
from stoker.preflight.catalog import describe, refused, severity_of_refusal
from stoker.preflight.cloud import check_region, read_machine
from stoker_watch import regular_files
from stoker_watch.errors import DataError, ObjectMissing, StokerError
from stoker_watch.findings.finding import Finding
from stoker_watch.hardware.cgroup import host_cores
from stoker_watch.recording.telemetry.environment import describe_storage
from stoker_watch.storage.fetcher import Fetcher
from stoker_watch.storage.store import Store
from stoker_watch.storage.uri import parse_uri

MAX_BYTES = 2**30
"""Read at most, per check: traffic between regions is billed."""
MAX_DECODED, DECODE_S = 24, 2.0
"""Images that are decoded to measure it, and the time for that, in seconds."""
MAX_SIDE = 800
"""Longer side of the decoded images, if the caller does not tell: the usual model input."""
MARGIN = 1.1
"""The loader needs some more than the mean rate, because reads and decoding vary."""
NO_ANSWER = "no image arrived in the time of this check"
MIN_COUNTED = 16
"""Images in the second half of the time, or all of it counts."""
MIN_S = 1.0
"""Shortest measurement: the images of a small data set are read several times."""

BUCKET_PROGRAMS = ("gcsfuse", "s3", "goofys", "rclone", "geesefs")
"""Parts of the names of programs that show a bucket as a folder."""


@dataclass(frozen=True, kw_only=True)
class ReadRate:
    images: int
    total_bytes: int
    seconds: float
    concurrency: int
    """Reads at a time, at the end."""
    cold: bool | None
    """Whether the bytes came from the storage. False: the page cache could not be dropped; None: not known."""
    throttled: int = 0
    """Responses of the store that asked for fewer requests."""
    missing: int = 0
    """Images that could not be read, which training would replace."""

    @property
    def per_s(self) -> float:
        return self.images / self.seconds if self.seconds > 0 else 0.0

    @property
    def mean_bytes(self) -> float:
        return self.total_bytes / self.images if self.images else 0.0


def check_data_path(
    index: Index,
    *,
    demand_images_per_s: float | None,
    demand_text: str = "the GPU takes",
    seconds: float = 10.0,
    max_side: int = MAX_SIDE,
    env: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """Images per second from where the data is, against the demand, and the region of its bucket.

    demand_images_per_s: what the device takes; None: not known. demand_text: the clause before that number, "the GPU
    takes". seconds: for reading. max_side: of the model input.
    """
    try:
        images = _sample_order(index)
        rate, encoded = _measure_reads(index, images, seconds)
        decode_s = _measure_decoding(index, encoded, max_side)
    except StokerError as error:
        place = error.location or index.source
        return [refused("data_rate", error, place, severity=severity_of_refusal(error))]
    except Exception as error:  # noqa: BLE001  (a probe reports what it could not find out)
        name = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        reason = f"{name}{getattr(error, 'strerror', None) or f'{type(error).__name__}: {error}'}"
        return [describe("data_rate/unknown", index.source, reason=reason)]
    findings = [judge(index, rate, decode_s, demand_images_per_s, demand_text)]
    source = index.source if "://" in index.source else mounted_bucket(index.root)
    if source:
        epoch_bytes = rate.mean_bytes * len(images)
        findings += check_region(parse_uri(source), read_machine(env), epoch_bytes=epoch_bytes, env=env)
    return findings


def judge(
    index: Index, rate: ReadRate, decode_s: float | None, demand_images_per_s: float | None, demand_text: str
) -> Finding:
    """The finding from the measurements. decode_s: CPU-seconds per image; None: nothing could be decoded."""
    kind, label = _describe_place(index)
    cores = host_cores()
    decode_per_s = cores / decode_s if decode_s else float("inf")
    supply = min(rate.per_s, decode_per_s)
    parts = [
        f"read {rate.images} images of {_bytes(rate.mean_bytes)} in {rate.seconds:.1f} s, {rate.concurrency} at a "
        f"time: {_rate(rate.per_s)} img/s, {_bytes(rate.per_s * rate.mean_bytes)}/s",
        f"{rate.missing} are missing or cannot be read" if rate.missing else "",
        f"{cores} cores decode {_rate(decode_per_s)} img/s" if decode_s else "",
        f"the store refused {rate.throttled} requests (too many)" if rate.throttled else "",
        {
            True: "",
            False: "the page cache could not be dropped, so the storage may be slower",
            None: "whether the page cache was dropped is not known",
        }[rate.cold],
    ]
    texts: dict[str, Any] = {"label": label, "rate": _rate(supply), "evidence": "; ".join(filter(None, parts))}
    if demand_images_per_s is None:
        return describe("data_rate", index.source, **texts, compared="")
    compared = f"{demand_text} {_rate(demand_images_per_s)}"
    if supply >= demand_images_per_s * MARGIN and rate.cold is False:
        return describe("data_rate/cached", index.source, **texts, compared=compared)
    if supply >= demand_images_per_s * MARGIN:
        return describe("data_rate", index.source, **texts, compared=f", {compared}")
    idle = max(0.0, 1 - supply / demand_images_per_s)
    outcome = f"{100 * idle:.0f} % idle" if idle >= 0.005 else "no reserve"
    limit = "decoding" if decode_per_s < rate.per_s else "reading"
    if limit == "decoding":
        kind = limit
    elif rate.throttled:
        kind = "throttled"
    texts |= {"cores": cores, "uri": mounted_bucket(index.root) or "gs://… or s3://…"}
    return describe(f"data_rate/{kind}", index.source, **texts, compared=compared, outcome=outcome, limit=limit)


def _describe_place(index: Index) -> tuple[str, str]:
    """(kind, label) of where the images are. Kind: remote, bucket (shown as a folder by a program), mount (another
    network file system), disk. Label: the subject of the finding."""
    remote = index.remote_object(int(index.image_indices(index.splits[0])[0]))
    if remote is not None:
        return "remote", "bucket"
    storage = describe_storage(index.root)
    if not storage["network"]:
        return "disk", "disk"
    program = str(storage["kind"]).removeprefix("fuse.")
    return "bucket" if any(name in program for name in BUCKET_PROGRAMS) else "mount", f"{program} mount"


def mounted_bucket(path: Path) -> str:
    """The URI of a bucket that Vertex AI mounts at /gcs/BUCKET (cloud.google.com/vertex-ai/docs/training/cloud-storage-
    file-system); empty for any other path."""
    parts = path.parts
    return "gs://" + "/".join(parts[2:]) if len(parts) > 2 and parts[1] == "gcs" else ""


def _sample_order(index: Index) -> list[int]:
    """The training images, in an order that differs from call to call. Raises DataError if there are none."""
    if not index.splits:
        raise DataError("There is no image to read.", location=index.source)
    images = index.image_indices("train" if "train" in index.splits else index.splits[0])
    order: list[int] = np.random.default_rng().permutation(images).tolist()
    return order


def _measure_reads(index: Index, images: list[int], seconds: float) -> tuple[ReadRate, list[tuple[int, bytes]]]:
    """The rate, and the first images that were read. Raises what a read raises."""
    remote = index.remote_object(images[0])
    if remote is None:
        cold: list[bool | None] = []
        num_threads = min(MAX_WORKERS, WORKERS_PER_CORE * host_cores())
        with _disk_reader(index, num_threads, cold) as read:
            rate, encoded = _measure(images, seconds, read, lambda: num_threads)
        return dataclasses.replace(rate, cold=_all_cold(index, cold)), encoded
    store = remote[0]
    throttled = _throttled(store)
    with Fetcher() as fetcher:  # the loader's

        def submit(image: int) -> "Future[bytes]":
            location = index.remote_object(image)
            assert location is not None
            of_image, key, start, length = location
            return fetcher.submit(of_image, key, start=start, length=length)

        rate, encoded = _measure(images, seconds, submit, lambda: fetcher.target_in_flight)
    return dataclasses.replace(rate, throttled=_throttled(store) - throttled), encoded


@contextlib.contextmanager
def _disk_reader(index: Index, num_threads: int, cold: list[bool | None]) -> "Iterator[Callable[[int], Future[bytes]]]":
    """Reads files in as many threads as the loader would come to, daemons: a storage that hangs is left behind. cold:
    gets whether each file was."""
    requests: queue.SimpleQueue[tuple[int, Future[bytes]] | None] = queue.SimpleQueue()

    def work() -> None:
        while (request := requests.get()) is not None:
            image, future = request
            cold.append(drop_pages(index, image))
            try:
                future.set_result(index.read(image))
            except Exception as error:  # noqa: BLE001  (raised where the result is read)
                future.set_exception(error)

    def submit(image: int) -> "Future[bytes]":
        future: Future[bytes] = Future()
        requests.put((image, future))
        return future

    for _ in range(num_threads):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield submit
    finally:
        for _ in range(num_threads):
            requests.put(None)  # each thread ends after its read


def _measure(
    images: list[int], seconds: float, submit: Callable[[int], "Future[bytes]"], target: Callable[[], int]
) -> tuple[ReadRate, list[tuple[int, bytes]]]:
    """Reads, `target()` at a time, until time or bytes are spent, or every image was read once (in MIN_S at least). The
    rate is that of the second half of the time, when the target has settled. Raises the error of a read that training
    would not survive, or if all fail."""
    encoded: list[tuple[int, bytes]] = []
    errors: dict[int, Exception] = {}
    done: list[tuple[float, int]] = []  # (end of the read, bytes)
    order = itertools.cycle(images)
    started = pending = total_bytes = 0
    results: queue.SimpleQueue[Future[bytes]] = queue.SimpleQueue()
    image_of: dict[Future[bytes], int] = {}
    start_s = now_s = time.perf_counter()
    while now_s < start_s + seconds:
        is_complete = started >= len(images) and now_s - start_s >= MIN_S
        while pending < (target() if done else 1) and total_bytes < MAX_BYTES and not is_complete:
            image = next(order)
            started, pending = started + 1, pending + 1
            future = submit(image)
            image_of[future] = image
            future.add_done_callback(results.put)
        if not pending:
            break
        with contextlib.suppress(queue.Empty):
            future = results.get(timeout=start_s + seconds - now_s)
            image, pending = image_of.pop(future), pending - 1
            try:
                data = future.result()
            except (ObjectMissing, OSError) as error:
                errors[image] = error  # each image counts once, however often it was read
            else:
                done.append((time.perf_counter(), len(data)))
                total_bytes += len(data)
                if len(encoded) < 2 * MAX_DECODED:
                    encoded.append((image, data))
        now_s = time.perf_counter()
    if not done:
        raise next(iter(errors.values()), None) or TimeoutError(errno.ETIMEDOUT, NO_ANSWER)
    begin_s = (start_s + now_s) / 2
    if sum(time_s > begin_s for time_s, _ in done) < MIN_COUNTED:
        begin_s = start_s
    sizes = [size for time_s, size in done if time_s > begin_s]
    rate = ReadRate(
        images=len(sizes),
        total_bytes=sum(sizes),
        seconds=max(1e-6, now_s - begin_s),
        concurrency=target(),
        cold=True,
        missing=len(errors),
    )
    return rate, encoded


def _all_cold(index: Index, cold: list[bool | None]) -> bool | None:
    """False if most reads came from the page cache, but of a file system in memory. None: the kernel does not tell."""
    known = [was_cold for was_cold in cold if was_cold is not None]
    if not known:
        return None
    return sum(known) > len(known) / 2 or describe_storage(index.root)["kind"] in ("tmpfs", "ramfs")


def drop_pages(index: Index, image: int) -> bool | None:
    """Drops an image's pages from the page cache of the kernel; whether they are gone. None: not known."""
    byte_range = index.byte_range(image)
    path = index.path(image)
    try:
        fd = regular_files.open_fd(path if byte_range is None else path.parent)
    except OSError:
        return None  # the read itself reports it
    try:
        start, length = byte_range or (0, os.fstat(fd).st_size)
        if not hasattr(os, "posix_fadvise") or length == 0:
            return None
        first = start // os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PAGE_SIZE")  # parts of pages are not dropped
        os.posix_fadvise(fd, first, 0 if byte_range is None else length + start - first, os.POSIX_FADV_DONTNEED)
        os.preadv(fd, [bytearray(1)], start + length // 2, os.RWF_NOWAIT)
    except (OSError, AttributeError) as error:  # AttributeError: no RWF_NOWAIT on this system
        return True if isinstance(error, BlockingIOError) else None
    else:
        return False
    finally:
        os.close(fd)


def _throttled(store: Store) -> int:
    return sum(count for name, count in store.counters.failures.items() if name.startswith(("503", "429")))


def _measure_decoding(index: Index, encoded: list[tuple[int, bytes]], max_side: int) -> float | None:
    """CPU-seconds of one image; None if none could be decoded. Others are skipped: `stoker data check` names them."""
    spent: list[float] = []
    end_s = time.perf_counter() + DECODE_S
    for image, data in encoded[:MAX_DECODED]:
        start_s = time.thread_time()
        try:
            thumbnail(data, index.path_text(image), max_side)
        except DataError:
            continue
        spent.append(time.thread_time() - start_s)
        if time.perf_counter() > end_s:
            break
    return statistics.fmean(spent) if spent else None


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s >= 10 else f"{per_s:.1f}"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
