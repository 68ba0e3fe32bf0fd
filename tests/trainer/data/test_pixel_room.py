"""Whether decoded images are kept, where, and what has to go for them."""

import dataclasses
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from stoker.data.images import pixel_cache
from stoker.data.images.pixel_cache import (
    CachedImageSpec,
    CachePolicyInputs,
    cache_file_path,
    choose_cache,
    compute_free_disk_bytes,
    estimate_decode_s,
    evict_cache_files,
    find_network_file_system,
    open_cache,
)
from stoker_watch.errors import ConfigError
from tests.fixtures.data_pixel_cache import SPEC, cache_of, draw, fill

GB = 10**9
USUAL = CachePolicyInputs(
    cached_bytes=10 * GB,
    num_images=10_000,
    decode_s=1e-3,
    is_downscaled=False,
    max_scale=1.5,
    epochs=12,
    is_remote=False,
    free_memory_bytes=64 * GB,
    free_disk_bytes=100 * GB,
    network_file_system=None,
)
LARGER_THAN_MEMORY = {"cached_bytes": 80 * GB, "num_images": 80_000}


@pytest.mark.parametrize(
    ("changes", "kind", "why"),
    [
        ({}, "disk", "10 GB: as a file that stays in memory, as half of the free memory is 32 GB"),
        ({"epochs": None}, "disk", "stays in memory"),
        ({"num_images": 0, "cached_bytes": 0, "decode_s": 0.0}, "none", "have no image sizes"),
        ({"epochs": 2.9}, "none", "2.9 epochs"),
        ({"epochs": 3}, "disk", "stays in memory"),
        ({"max_scale": 2.0}, "disk", "stays in memory"),  # none is made smaller: nothing is lost
        ({"max_scale": 2.0, "is_downscaled": True}, "none", "zoom in up to 2 times; images kept at 1.5 times"),
        ({"decode_s": 1e-4}, "none", "only about 0.1 ms per image"),
        ({"decode_s": 1e-4, "is_remote": True}, "disk", "stays in memory"),
        ({"free_disk_bytes": 9 * GB}, "ram", "half of the free memory is 32 GB; the cache may take 9 GB of the disk"),
        ({"network_file_system": "nfs4"}, "ram", "network file system (nfs4)"),
        (
            {"network_file_system": "nfs4", "free_memory_bytes": 19 * GB},
            "none",
            "half of the free memory is 9.5 GB; the cache folder",
        ),
        ({"free_memory_bytes": 19 * GB, "free_disk_bytes": 9 * GB}, "none", "9 GB of the disk"),
        (LARGER_THAN_MEMORY, "none", "decoding is as fast as most disks"),
        (LARGER_THAN_MEMORY | {"is_remote": True}, "disk", "saves the requests to the bucket"),
        (LARGER_THAN_MEMORY | {"is_remote": True, "free_disk_bytes": 79 * GB}, "none", "79 GB of the disk"),
    ],
)
def test_the_choice_and_its_reason(changes: dict[str, object], kind: str, why: str) -> None:
    actual, reason = choose_cache(dataclasses.replace(USUAL, **changes))  # type: ignore[arg-type]
    assert (actual, why in reason) == (kind, True), reason


def test_what_decoding_takes_is_estimated_from_the_sizes() -> None:
    """As measured: about 1 ms for 640 × 480, 15 to 22 ms for 4,000 × 3,000 at an image size of 800."""
    for size, low, high in (((480, 640), 0.7e-3, 1.3e-3), ((3000, 4000), 14e-3, 22e-3)):
        sizes = np.array([size], np.int32)
        kept = CachedImageSpec((800, 800), "letterbox", 1.5).cached_sizes(sizes)
        assert low < estimate_decode_s(sizes, kept, 1.5) < high


def test_the_situation_is_that_of_the_training_images(tmp_path: Path) -> None:
    index = draw(tmp_path / "set")
    image_indices = np.array([1, 2, 4])
    actual = pixel_cache.collect_cache_inputs(index, image_indices, SPEC, max_scale=1.5, epochs=5)
    assert (actual.num_images, actual.is_downscaled, actual.is_remote) == (3, True, False)
    assert actual.cached_bytes == 3 * 40_960  # 96 × 128 × 3 and the header, in whole pages
    assert 0 < actual.free_memory_bytes <= psutil.virtual_memory().total
    assert 0 < actual.free_disk_bytes <= psutil.disk_usage(str(tmp_path)).free
    assert not pixel_cache.collect_cache_inputs(index, np.array([0, 3]), SPEC, max_scale=1.5, epochs=5).is_downscaled


def test_unused_cache_files_are_removed_least_recently_used_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [draw(tmp_path / str(n), 12) for n in range(4)]
    files = [cache_file_path(index, SPEC) for index in sets]
    caches = [cache_of(index) for index in sets[:3]]
    for cache, index in zip(caches, sets, strict=False):
        fill(cache, index)
    taken = files[0].stat().st_blocks * 512
    for n, used in enumerate((1, 3, 2)):
        os.utime(files[n], (used, used))
    del caches[1:], cache
    monkeypatch.setenv(pixel_cache.LIMIT_ENV_VAR, str(3 * taken / 2**30))
    assert compute_free_disk_bytes(files[3]) == 2 * taken
    assert evict_cache_files(files[3], taken) == [files[2]]
    assert evict_cache_files(files[3], 3 * taken) == [files[1]]
    assert files[0].exists()
    assert all(caches[0].get(k) is not None for k in range(12))


def test_a_file_that_is_removed_while_it_is_opened_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes would each fill a file of their own, one of them without a name."""
    path, lock, removed = tmp_path / "x.pixels", fcntl.flock, list[Path]()

    def flock(handle: int, how: int) -> None:
        if not removed:
            path.unlink()
            removed.append(path)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    handle = pixel_cache.open_cache_file(path)
    assert removed
    assert os.path.samestat(os.fstat(handle), path.stat())
    os.close(handle)


def test_opening_a_cache_frees_space_and_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = draw(tmp_path / "old", 12), draw(tmp_path / "new", 12)
    fill(cache_of(old), old)
    taken = cache_file_path(old, SPEC).stat().st_blocks * 512
    monkeypatch.setenv(pixel_cache.LIMIT_ENV_VAR, str(1.5 * taken / 2**30))
    messages: list[str] = []
    cache = open_cache("disk", new, np.arange(12), SPEC, lambda kind, text: messages.append(f"{kind}: {text}"))
    assert cache is not None
    fill(cache, new)
    assert len(messages) == 1
    assert messages[0].startswith("info: removed decoded images of another data set or size to free space")
    assert cache_file_path(old, SPEC).name in messages[0]
    assert all(cache.get(k) is not None for k in range(12))


def test_a_part_is_kept_where_not_all_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = draw(tmp_path / "set", 12)
    monkeypatch.setenv(pixel_cache.LIMIT_ENV_VAR, str(100_000 / 2**30))
    messages: list[str] = []
    cache = open_cache("disk", index, np.arange(12), SPEC, lambda kind, text: messages.append(f"{kind}: {text}"))
    assert cache is not None
    fill(cache, index)
    assert "may take 100 kB of the disk; all images need 36" in messages[0]
    assert 0 < cache_file_path(index, SPEC).stat().st_blocks * 512 <= 100_000


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(pixel_cache.LIMIT_ENV_VAR, text)
    with pytest.raises(ConfigError, match=pixel_cache.LIMIT_ENV_VAR):
        compute_free_disk_bytes(tmp_path / "x.pixels")


@pytest.mark.parametrize(
    ("kind", "actual"), [("nfs4", "nfs4"), ("fuse.gcsfuse", "fuse.gcsfuse"), ("fuseblk", None), ("overlay", None)]
)
def test_a_cache_folder_across_a_network_is_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, actual: str | None
) -> None:
    parts = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)  # noqa: ARG005
    assert find_network_file_system(tmp_path / "cache" / "num_images" / "x.pixels") == actual
    assert find_network_file_system(Path("/elsewhere/x.pixels")) is None
