"""Host memory near its limit: batches ahead and the cache are given back, with an event, before the kernel kills."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stoker.data.images.pixel_cache import CachedImageSpec, PixelCache
from stoker.training import loop, out_of_memory
from stoker.training.local_ranks import TrainOptions
from stoker.training.out_of_memory import HostMemoryGuard
from stoker.training.run import train
from stoker_watch.hardware import cgroup
from stoker_watch.hardware.cgroup import HostLimit, nearest_memory_limit
from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.drawn import draw
from tests.fixtures.training_out_of_memory import settings

GIB = 2**30


class Releasing:
    """In place of a loader."""

    def __init__(self, *texts: str | None) -> None:
        self.release_batches, self.release_cache = (lambda text=text: text for text in texts)


@pytest.mark.parametrize(
    ("used", "limit", "is_low"),
    [(7.5, 8, False), (7.7, 8, True), (62, 64, False), (63.1, 64, True), (1, 8, False)],
)
def test_what_is_near_the_limit(used: float, limit: float, is_low: bool) -> None:
    events: list[tuple[str, str, dict[str, object]]] = []
    guard = HostMemoryGuard(
        Releasing("3 → 1 batches ahead", None),  # type: ignore[arg-type]
        lambda kind, text, /, **data: events.append((kind, text, data)),
        read=lambda: HostLimit("the cgroup", int(limit * GIB), int(used * GIB)),
    )
    guard.poll()
    guard.poll()  # within the same second
    assert [kind for kind, _, _ in events] == (["low_host_memory"] if is_low else [])
    if is_low:
        assert "of the cgroup; 3 → 1 batches ahead" in events[0][1]
        assert events[0][2]["limit_bytes"] == limit * GIB


def test_one_thing_after_the_other_until_nothing_is_left() -> None:
    now, texts = [0.0], []
    guard = HostMemoryGuard(
        Releasing("batches", "cache"),  # type: ignore[arg-type]
        lambda _kind, text, /, **_data: texts.append(text.rpartition("; ")[2]),
        read=lambda: HostLimit("the machine", GIB, GIB),
        clock=lambda: now[0],
    )
    for _ in range(30):
        guard.poll()
        now[0] += 1
    assert texts == ["batches", "cache"]


def test_a_run_gives_back_batches_and_a_cache_and_sees_the_same_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = draw(tmp_path / "data")
    whole = train(settings(data, max_duration="20", cache="ram"), TrainOptions(run_dir=str(tmp_path / "whole"))).run
    monkeypatch.setattr(out_of_memory, "POLL_S", 0.0)
    monkeypatch.setattr(
        loop, "HostMemoryGuard", lambda *rest: HostMemoryGuard(*rest, read=lambda: HostLimit("the cgroup", GIB, GIB))
    )
    run = train(settings(data, max_duration="20", cache="ram"), TrainOptions(run_dir=str(tmp_path / "run"))).run
    texts = [event.text for event in read_lines(run, EVENTS, Event) if event.kind == "low_host_memory"]
    assert "batches ahead" in texts[0]
    assert "decoded images dropped" in texts[1]
    assert (run / "final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()


def test_a_freed_cache_is_not_filled_again_by_any_process(tmp_path: Path) -> None:
    """A second object on the same file stands for that of a worker process."""

    class Index:
        original_size = np.full((4, 2), 64, np.int32)

        def byte_range(self, _: int) -> None:
            return None

        def path(self, _: int) -> Path:
            return Path(__file__)

    fd = os.memfd_create("cache", os.MFD_ALLOW_SEALING)
    spec = CachedImageSpec.for_augmentation((64, 64), "letterbox", scale_jitter_prob=0.0, scale_range=(1.0, 1.0))
    mine, workers = (PixelCache(Index(), spec, f, max_bytes=GIB) for f in (fd, os.dup(fd)))  # type: ignore[arg-type]
    shape = mine.shape(0)
    assert shape is not None
    pixels = np.ones((*shape, 3), np.uint8)
    for image_index in range(3):
        workers.put(image_index, pixels)
    assert mine.get(1) is not None
    assert mine.release_memory() >= 3 * pixels.nbytes
    workers.put(1, pixels)
    mine.put(2, pixels)
    assert mine.get(1) is None
    assert workers.get(2) is None
    assert os.fstat(fd).st_blocks == 0
    with (tmp_path / "on a disk").open("w+b") as file:
        assert PixelCache(Index(), spec, os.dup(file.fileno()), max_bytes=GIB).release_memory() == 0  # type: ignore[arg-type]


def test_the_nearest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_virtual_memory_limit", lambda: None)
    assert nearest_memory_limit().name in ("the machine", "the cgroup")
    monkeypatch.setattr(cgroup, "_virtual_memory_limit", lambda: HostLimit("ulimit -v", 10, 9))
    assert nearest_memory_limit() == HostLimit("ulimit -v", 10, 9)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_limit_of_the_address_space() -> None:
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))\n"
        "from stoker_watch.hardware.cgroup import _virtual_memory_limit\n"
        "limit = _virtual_memory_limit()\n"
        "assert limit.limit_bytes == 2**36 and 2**22 < limit.used_bytes < 2**36, limit\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
