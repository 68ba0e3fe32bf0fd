"""The cache of decoded images returns only complete images of the present files, whichever writer was killed."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.data import geometry
from stoker.data.images import pixel_cache
from stoker.data.images.decode import decode
from stoker.data.images.pixel_cache import (
    BLOCK_BYTES,
    HEADER_BYTES,
    CachedImageSpec,
    PixelCache,
    cache_file_path,
    compute_entry_offsets,
    open_cache,
    open_cache_file,
)
from stoker.data.index import Index, open_index
from tests.fixtures.data_pixel_cache import PLENTY, SIDES, SPEC, cache_of, draw, fill, make
from tests.trainer.data import tfrecords


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return draw(tmp_path / "set")


def in_a_process(source: str, *arguments: object) -> subprocess.Popen[str]:
    """Runs a script in which the names of this module are known."""
    command = [
        sys.executable,
        "-c",
        f"from tests.trainer.data.test_pixel_cache import *\n{source}",
        *map(str, arguments),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# What is kept.


def test_what_comes_back_is_what_was_kept(index: Index) -> None:
    cache = cache_of(index)
    assert [cache.get(image_index) for image_index in range(len(index))] == [None] * len(index)
    made = fill(cache, index)
    for image_index, pixels in enumerate(made):
        assert cache.contains(image_index)
        actual = cache.get(image_index)
        assert actual is not None
        assert np.array_equal(actual, pixels)
        assert actual.shape[:2] == cache.shape(image_index) == ((96, 128) if image_index % 3 else (40, 50))


def test_an_image_that_is_not_made_smaller_is_kept_as_it_decodes(index: Index) -> None:
    assert np.array_equal(make(cache_of(index), index, 0), decode(index.read(0), index.path(0)))


@given(
    st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    st.tuples(st.integers(32, 1400), st.integers(32, 1400)),
    st.sampled_from(["letterbox", "squash"]),
    st.one_of(st.just(1.0), st.floats(1.25, 1.5)),
)
def test_an_image_is_kept_as_small_as_covers_what_is_shown(
    size: tuple[int, int], image_size: tuple[int, int], resize: str, factor: float
) -> None:
    kept = CachedImageSpec(image_size, resize, factor).cached_sizes(np.array([size], np.int32))[0]
    scales = np.array(image_size) / size
    wanted = np.minimum(size, factor * np.array(size) * (scales.min() if resize == "letterbox" else scales))
    assert (kept >= np.floor(wanted)).all()
    assert (kept <= np.ceil(wanted) + (wanted < 1)).all()
    assert (kept >= 1).all()
    # A whole kept image is shown in as many pixels as the whole image is, but for rounding.
    shown = geometry.compute_resize_geometry(size, image_size, resize).resized_size
    again = geometry.compute_resize_geometry((int(kept[0]), int(kept[1])), image_size, resize).resized_size
    assert again == pytest.approx(shown, abs=2, rel=0.02) or min(kept) < 50
    assert factor > 1 or again == shown


@pytest.mark.parametrize(
    ("scale_jitter_prob", "scale_range", "factor"),
    [(0.5, (0.7, 1.5), 1.5), (0.5, (1, 1.4), 1.4), (0.5, (0.5, 4), 1.5), (0.5, (0.5, 1.1), 1.25), (0, (0.5, 4), 1.0)],
)
def test_images_are_kept_as_large_as_crops_want_them(
    scale_jitter_prob: float, scale_range: tuple[float, float], factor: float
) -> None:
    assert (
        CachedImageSpec.for_augmentation(
            (64, 64), "letterbox", scale_jitter_prob=scale_jitter_prob, scale_range=scale_range
        ).factor
        == factor
    )


def test_images_whose_size_is_unknown_have_no_place(tmp_path: Path) -> None:
    index = draw(tmp_path / "set", sized=False)
    cache = cache_of(index)
    assert not index.original_size.any()
    assert [cache.shape(k) for k in range(6)] == [None] * 6
    cache.put(0, np.zeros((2, 2, 3), np.uint8))
    assert cache.get(0) is None
    assert cache_file_path(index, SPEC).stat().st_size == 0


def test_entries_do_not_overlap_and_begin_on_pages() -> None:
    kept = np.array([[100, 100], [0, 0], [1, 1], [40, 50]], np.int32)
    begins = compute_entry_offsets(kept)
    assert (begins % BLOCK_BYTES == 0).all()
    assert (np.diff(begins) >= np.where(kept.prod(1) > 0, kept.prod(1) * 3 + HEADER_BYTES, 0)).all()
    assert begins[1] == begins[2]


def test_another_size_or_other_images_are_another_file(index: Index, tmp_path: Path) -> None:
    forms = [
        SPEC,
        CachedImageSpec((96, 64), "letterbox", 1.5),
        CachedImageSpec((64, 96), "squash", 1.5),
        CachedImageSpec((64, 96), "letterbox", 1.25),
    ]
    files = {cache_file_path(index, spec) for spec in forms} | {cache_file_path(draw(tmp_path / "2"), SPEC)}
    (tmp_path / "set" / "0.jpg").rename(tmp_path / "set" / "zero.jpg")
    text = (tmp_path / "set" / "_annotations.coco.json").read_text()
    (tmp_path / "set" / "_annotations.coco.json").write_text(text.replace("0.jpg", "zero.jpg"))
    files.add(cache_file_path(open_index(tmp_path / "set"), SPEC))
    (tmp_path / "set" / "_annotations.coco.json").write_text(text.replace('"width": 200', '"width": 400'))
    files.add(cache_file_path(open_index(tmp_path / "set"), SPEC))
    assert len(files) == 7
    (tmp_path / "set" / "_annotations.coco.json").write_text(text.replace("0.jpg", "zero.jpg"))
    assert cache_file_path(open_index(tmp_path / "set", val_fraction=0.4), SPEC) in files


def test_memory_is_a_cache_without_a_file(index: Index) -> None:
    cache = open_cache("ram", index, np.arange(6), SPEC, print)
    assert cache is not None
    made = fill(cache, index)
    assert all(np.array_equal(cache.get(k), made[k]) for k in range(6))
    assert not cache_file_path(index, SPEC).exists()
    other = open_cache("ram", index, np.arange(6), SPEC, print)
    assert other is not None
    assert other.get(0) is None


# What is not returned.


def test_a_replaced_image_is_noticed_by_the_next_process(index: Index) -> None:
    cache = cache_of(index)
    old = fill(cache, index)
    path = index.path(1)
    changed = path.stat().st_mtime_ns
    cv2.imwrite(str(path), np.full((*SIDES, 3), 7, np.uint8))
    os.utime(path, ns=(changed, changed + 1))
    assert np.array_equal(cache.get(1), old[1])
    again = cache_of(index)
    assert again.get(1) is None
    assert not again.contains(1)
    new = fill(again, index)
    assert (np.abs(new[1].astype(int) - 7) < 3).all()
    assert np.array_equal(cache_of(index).get(1), new[1])


def test_one_of_the_same_time_but_another_length_is_noticed(index: Index) -> None:
    fill(cache_of(index), index)
    stat = index.path(1).stat()
    with index.path(1).open("ab") as file:
        file.write(b"\0")
    os.utime(index.path(1), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cache_of(index).get(1) is None


def test_an_image_that_is_gone_is_not_found_either(index: Index) -> None:
    fill(cache_of(index), index)
    index.path(2).unlink()
    assert cache_of(index).get(2) is None


def test_an_image_inside_another_file_changes_with_it(tmp_path: Path) -> None:
    box = ("thing", 1, 0.1, 0.1, 0.5, 0.5)
    shades = [tfrecords.jpeg(200, 100, 40 * n) for n in range(1, 4)]
    images = [tfrecords.image_features(f"{n}.jpg", [box], image__encoded=[shade]) for n, shade in enumerate(shades)]
    shard = tfrecords.write(tmp_path / "train.tfrecord", *images)
    index = open_index(shard)
    made = fill(cache_of(index), index)
    assert len({pixels.tobytes() for pixels in made}) == 3
    cache = cache_of(index)
    assert all(np.array_equal(cache.get(k), made[k]) for k in range(3))
    os.utime(shard, ns=(1, 1))
    assert cache_of(index).get(0) is None


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 96 * 128 * 3 + HEADER_BYTES - 1), st.integers(1, 255))
def test_a_flipped_byte_is_noticed(index: Index, at: int, flip: int) -> None:
    made = fill(cache_of(index), index)
    begin = int(compute_entry_offsets(SPEC.cached_sizes(index.original_size))[1])
    with cache_file_path(index, SPEC).open("r+b") as file:
        file.seek(begin + at)
        (byte,) = file.read(1)
        file.seek(begin + at)
        file.write(bytes([byte ^ flip]))
    actual = cache_of(index).get(1)
    unused = HEADER_BYTES - 4 <= at < HEADER_BYTES
    assert np.array_equal(actual, made[1]) if unused else actual is None
    assert np.array_equal(fill(cache_of(index), index)[1], made[1])


@pytest.mark.parametrize("length", [0, 10, 5000, 20_000])
def test_a_file_that_was_cut_off_is_filled_again(index: Index, length: int) -> None:
    made = fill(cache_of(index), index)
    os.truncate(cache_file_path(index, SPEC), length)
    again = fill(cache_of(index), index)
    assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))
    cache = cache_of(index)
    assert all(cache.get(k) is not None for k in range(6))


def test_what_others_wrote_there_is_not_taken_for_an_image(index: Index) -> None:
    path = cache_file_path(index, SPEC)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"another program's file" * 9999)
    assert cache_of(index).get(0) is None


# Several processes, and their deaths.

FILL = """
index = open_index(sys.argv[1])
print("began", flush=True)
sys.stdin.readline()
fill(cache_of(index), index)
print(sum(cache_of(index).get(row) is not None for row in range(len(index))))
"""


@pytest.mark.slow
def test_processes_that_fill_at_once_share_one_file(tmp_path: Path) -> None:
    index = draw(tmp_path / "set", 40)
    command = [
        sys.executable,
        "-c",
        f"from tests.trainer.data.test_pixel_cache import *\n{FILL}",
        str(tmp_path / "set"),
    ]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
    for process in both:
        assert process.communicate("\n", timeout=60)[0] == "40\n"
    cache = cache_of(index)
    assert all(np.array_equal(cache.get(k), make(cache, index, k)) for k in range(40))


ENDLESS = """
index = open_index(sys.argv[1])
cache = cache_of(index, LARGE)
made = [make(cache, index, row) for row in range(len(index))]
for n in range(10**9):
    for row, pixels in enumerate(made):
        cache.put(row, pixels)
    if n == 0:
        print("wrote", flush=True)
"""


LARGE = CachedImageSpec((1000, 1400), "letterbox", 1.5)


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_no_damaged_image_that_is_returned(tmp_path: Path, rounds: int) -> None:
    index = draw(tmp_path / "set", 3, sides=(1500, 2000))
    made = [make(PixelCache(index, LARGE, None), index, k) for k in range(3)]
    for _ in range(rounds):
        process = in_a_process(ENDLESS, tmp_path / "set")
        assert process.stdout is not None
        assert process.stdout.readline() == "wrote\n"
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        after = cache_of(index, LARGE)
        actual = [after.get(k) for k in range(3)]
        assert all(
            pixels is None or np.array_equal(pixels, made[image_index]) for image_index, pixels in enumerate(actual)
        )
        assert sum(pixels is not None for pixels in actual) >= 2  # one was being written


# Disks.


def test_a_write_error_is_reported_once_and_reading_continues(index: Index) -> None:
    messages: list[str] = []
    cache = cache_of(index, messages=messages.append)
    cache.put(0, make(cache, index, 0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        made = fill(cache, index)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(made) == 6
    assert messages == ["the cache of decoded images is no longer filled: writing failed: File too large"]
    assert cache.get(0) is not None
    assert fill(cache, index)[5] is not None
    assert cache.get(5) is None  # not tried again


FULL = """
import shutil
index = open_index(sys.argv[1])
messages = []
pixel_cache.RESERVE_FRACTION = 0.0  # the write itself fails
cache = cache_of(index, messages=messages.append)
first = fill(cache, index)
kept = [row for row in range(len(index)) if cache.get(row) is not None]
assert all(np.array_equal(cache.get(row), first[row]) for row in kept)
assert shutil.disk_usage(os.environ["STOKER_CACHE_DIR"]).total < 1 << 20
print(json.dumps([messages, len(kept)]))
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    draw(tmp_path / "set", 60)
    (tmp_path / "small").mkdir()
    script = f"from tests.trainer.data.test_pixel_cache import *\n{FULL}"
    inner = f'mount -t tmpfs -o size=512k none {tmp_path}/small && exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", inner, "sh", sys.executable, "-c", script, str(tmp_path / "set")]
    environment = os.environ | {"STOKER_CACHE_DIR": str(tmp_path / "small")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    messages, kept = json.loads(done.stdout)
    assert messages == ["the cache of decoded images is no longer filled: writing failed: No space left on device"]
    assert 0 < kept < 60


def test_a_cache_takes_no_more_than_it_may(index: Index) -> None:
    messages: list[str] = []
    cache = cache_of(index, max_bytes=60_000, messages=messages.append)
    fill(cache, index)
    assert 0 < cache_file_path(index, SPEC).stat().st_blocks * 512 <= 60_000
    assert len(messages) == 1
    assert "its limit" in messages[0]


@pytest.mark.parametrize(
    ("num_blocks", "free_bytes", "is_kept"),
    [
        (2**31, 2**31 + 2**20, True),  # 8 TiB: not more than 2 GiB stays free
        (2**31, 2**31 + 2**12, False),  # not with the image
        (2**20, 2**30 // 5, False),  # 4 GiB: 5 %
        (2**20, 2**30 // 5 + 2**20, True),
        (0, 0, True),  # memory
    ],
)
def test_some_of_the_disk_is_left_free(
    num_blocks: int, free_bytes: int, is_kept: bool, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_blocks=num_blocks, f_bavail=free_bytes // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "fstatvfs", lambda _: disk)
    messages: list[str] = []
    handle = open_cache_file(cache_file_path(index, SPEC))
    cache = PixelCache(index, SPEC, handle, max_bytes=PLENTY, on_error=messages.append)
    fill(cache, index)
    assert (cache_file_path(index, SPEC).stat().st_blocks > 0) == is_kept
    assert is_kept or "nearly full" in messages[0]


def test_a_slow_write_is_followed_by_a_pause(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixel_cache, "SLOW_WRITE_S", -1.0)
    monkeypatch.setattr(pixel_cache, "PAUSE_FACTOR", 10**9)
    cache = cache_of(index)
    fill(cache, index)
    assert [image_index for image_index in range(6) if cache.get(image_index) is not None] == [0]


def test_a_cache_that_cannot_be_opened_is_reported_and_images_keep_their_size(index: Index) -> None:
    cache_file_path(index, SPEC).mkdir(parents=True)
    messages: list[str] = []
    cache = open_cache("disk", index, np.arange(6), SPEC, lambda kind, text: messages.append(f"{kind}: {text}"))
    assert cache is not None
    assert "Is a directory" in messages[0]
    assert make(cache, index, 1).shape == (96, 128, 3)
    assert cache.get(1) is None
    cache.put(1, make(cache, index, 1))
    assert cache.get(1) is None
