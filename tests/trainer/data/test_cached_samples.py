"""Batches made with a cache of decoded images: the same whatever it holds, and little different from others."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.data.batch import Batch
from stoker.data.images.pixel_cache import CachedImageSpec, PixelCache, cache_file_path, open_cache
from stoker.data.index import Index, open_index
from stoker.data.loading.loader import Loader
from stoker.hardware.device import Device
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.fixtures.data_pixel_cache import draw
from tests.fixtures.data_upright import red_where, write
from tests.trainer.data import loading, tfrecords
from tests.trainer.data.loading import assert_same, take
from tests.watch.storage.servers import apply, google_server

CPU = Device(torch.device("cpu"))
IMAGE_SIZE = (64, 96)
RECIPE = {"scale_jitter_prob": 0.5, "scale_range": (0.7, 1.5)}


def cache_of(index: Index, kind: str = "disk", image_size: tuple[int, int] = IMAGE_SIZE) -> PixelCache:
    form = CachedImageSpec.for_augmentation(image_size, "letterbox", **RECIPE)
    cache = open_cache(kind, index, np.arange(len(index)), form, pytest.fail)  # type: ignore[arg-type]
    assert cache is not None
    return cache


def make(index: Index, cache: PixelCache | None, **changes: object) -> Loader:
    return loading.make(index, cache=cache, **{"image_size": IMAGE_SIZE} | RECIPE | changes)


def stream(index: Index, cache: PixelCache | None, count: int = 9, **changes: object) -> list[Batch]:
    with make(index, cache, **changes) as loader:
        return take(loader, count)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return draw(tmp_path / "set", 12)


def test_batches_do_not_depend_on_what_the_cache_holds(index: Index) -> None:
    empty = stream(index, cache_of(index))
    full = stream(index, cache_of(index))
    assert_same(full, empty)
    path = cache_file_path(index, CachedImageSpec.for_augmentation(IMAGE_SIZE, "letterbox", **RECIPE))
    with path.open("r+b") as file:  # some torn, some gone
        file.write(os.urandom(150_000))
    assert_same(stream(index, cache_of(index), workers=3), empty)
    path.unlink()
    assert_same(stream(index, cache_of(index), workers=1), empty)
    assert_same(stream(index, cache_of(index, "ram")), empty)


def test_a_stream_goes_on_as_it_was_without_its_cache(index: Index) -> None:
    with make(index, cache_of(index)) as loader:
        for _ in range(4):
            next(loader)
        state = loader.state_dict()
        expected = take(loader, 5)
    cache_file_path(index, CachedImageSpec.for_augmentation(IMAGE_SIZE, "letterbox", **RECIPE)).unlink()
    with make(index, cache_of(index)) as loader:
        loader.load_state_dict(state)
        actual = take(loader, 5)
    assert_same(actual, expected)


def test_hits_and_misses_are_counted(index: Index) -> None:
    with make(index, cache_of(index), prefetch_depth=1) as loader:
        for _ in range(9):  # three epochs of 12
            next(loader)
    stats = loader.stats()  # of threads that have ended: they count one thing after the other
    assert stats.total.cache_misses >= 12
    assert stats.total.cache_hits + stats.total.cache_misses == stats.total.num_images >= 36
    assert stats.total.cache_hits >= 12
    with make(index, cache_of(index)) as loader:
        next(loader)
        assert loader.stats().total.cache_misses == 0
    with make(index, None) as loader:
        next(loader)
        assert (loader.stats().total.cache_hits, loader.stats().total.cache_misses) == (0, 0)


def test_a_hit_reads_no_image(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stream(index, cache_of(index))
    monkeypatch.setattr(Index, "read", lambda *_: pytest.fail("a image was read"))
    assert_same(stream(index, cache_of(index)), expected)


def test_boxes_are_in_the_same_places_as_without(index: Index) -> None:
    """Windows begin on whole pixels of what is kept: a box moves by less than one, and may be cut off a little less."""
    flipped = 0
    for with_cache, without in zip(stream(index, cache_of(index)), stream(index, None), strict=True):
        assert torch.equal(with_cache.image_index, without.image_index)
        assert torch.equal(with_cache.original_size, without.original_size)
        assert torch.equal(with_cache.rand, without.rand)
        assert (with_cache.resized_size - without.resized_size).abs().max() <= 1
        assert torch.allclose(with_cache.scale, without.scale, rtol=0.02)
        both = with_cache.valid & without.valid
        assert (with_cache.boxes - without.boxes)[both].abs().max() < 1.5
        flipped += int((with_cache.valid ^ without.valid).sum())
    assert flipped <= 2


@pytest.mark.parametrize("sized", [True, False])
def test_images_of_which_the_size_is_unknown_are_loaded_as_without(tmp_path: Path, sized: bool) -> None:
    index = draw(tmp_path / "set", 6, sized=sized, sides=(40, 50))
    with make(index, cache_of(index)) as loader:
        actual = take(loader, 9)
        assert (loader.stats().total.cache_misses > 0) == sized
    assert_same(actual, stream(index, None))  # none is made smaller: the same pixels


@pytest.mark.parametrize("resize", ["letterbox", "squash"])
def test_without_crops_images_are_the_same_as_without_a_cache(tmp_path: Path, resize: str) -> None:
    index = draw(tmp_path / "set", 12, sides=(151, 211))
    expected = stream(index, None, scale_jitter_prob=0.0, resize=resize)
    form = CachedImageSpec.for_augmentation(
        IMAGE_SIZE, resize, scale_jitter_prob=0.0, scale_range=RECIPE["scale_range"]
    )  # type: ignore[arg-type]
    for _ in ("misses", "hits"):
        cache = open_cache("disk", index, np.arange(12), form, pytest.fail)  # type: ignore[arg-type]
        assert_same(stream(index, cache, scale_jitter_prob=0.0, resize=resize), expected)


def test_a_missing_image_is_replaced_whether_or_not_the_cache_had_it(index: Index) -> None:
    stream(index, cache_of(index))
    index.path(5).unlink()
    with_cache = stream(index, cache_of(index), max_bad_fraction=0.5)
    cache_file_path(index, CachedImageSpec.for_augmentation(IMAGE_SIZE, "letterbox", **RECIPE)).unlink()
    assert_same(stream(index, cache_of(index), max_bad_fraction=0.5), with_cache)
    assert all(5 not in batch.image_index.tolist() for batch in with_cache)


@pytest.mark.parametrize("annotated", ["upright", "stored"])
@pytest.mark.parametrize("image_size", [(160, 160), (64, 64)])
def test_turned_images_lie_under_their_boxes(tmp_path: Path, annotated: str, image_size: tuple[int, int]) -> None:
    index = write(tmp_path, annotated=annotated, kind="JPEG")
    for _ in ("misses", "hits"):
        for batch in stream(
            index, cache_of(index, image_size=image_size), 2, image_size=image_size, scale_jitter_prob=0.0
        ):
            for k, image_index in enumerate(batch.image_index.tolist()):
                if annotated == "stored" and int(index.path(image_index).name) < 5:
                    continue  # its size does not tell that it is meant as it is stored
                x0, y0, x1, y1 = red_where(batch.images[k].permute(1, 2, 0).numpy())
                assert batch.boxes[k, 0].tolist() == pytest.approx([x0, y0, x1, y1], abs=1.6)


def test_images_inside_other_files(tmp_path: Path) -> None:
    images = [
        tfrecords.image_features(
            f"{n}.jpg", [("thing", 1, 0.1, 0.1, 0.5, 0.5)], image__encoded=[tfrecords.jpeg(200, 100, 20 * n)]
        )
        for n in range(8)
    ]
    index = open_index(tfrecords.write(tmp_path / "train.tfrecord", *images))
    expected = stream(index, cache_of(index))
    assert_same(stream(index, cache_of(index)), expected)
    for batch in expected:
        for k, image_index in enumerate(batch.image_index.tolist()):
            height, width = batch.resized_size[k].tolist()
            red = batch.images[k, 0, :height, :width].float().mean()
            assert red == pytest.approx(20 * int(index.path(image_index).stem), abs=3)


@pytest.mark.slow
def test_images_of_a_bucket_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = draw(tmp_path / "set", 12)
    with google_server() as server, server.bucket().through() as (place, proxy):
        apply(monkeypatch, place.environment)
        store = open_store(parse_uri(place.uri))
        for path in (tmp_path / "set").iterdir():
            store.write(f"set/{path.name}", path.read_bytes())
        index = open_index(f"{place.uri}/set")
        expected = stream(local, cache_of(local))
        before = len(proxy.requests)
        assert_same(stream(index, cache_of(index)), expected)
        assert len(proxy.requests) >= before + 12
        before = len(proxy.requests)
        cache = cache_of(index)
        with make(index, cache) as loader:
            for batch in expected:
                assert_same([next(loader)], [batch])
            assert loader.stats().total.cache_misses == 0
        assert len(proxy.requests) == before
        # Another image under the old name, of the same length: only its etag tells.
        data = bytearray(local.path(1).read_bytes())
        data[-20] ^= 0x55
        store.write("set/1.jpg", bytes(data))
        again = cache_of(open_index(f"{place.uri}/set"))
        assert [again.contains(k) for k in range(12)] == [image_index != 1 for image_index in range(12)]


def test_photographs_look_the_same(real_data: Path) -> None:
    """Resizing twice costs little: at least 34 dB between the images with and without, most of which are cropped."""
    index = open_index(real_data / "bccd")
    image_indices = index.image_indices("train")[:16]
    image_size = (192, 256)
    form = CachedImageSpec.for_augmentation(image_size, "letterbox", **RECIPE)
    batches = []
    for cache in (open_cache("ram", index, image_indices, form, pytest.fail), None):  # type: ignore[arg-type]
        changes = {"image_indices": image_indices, "batch_size": 16, "image_size": image_size, "seed": 1}
        batches += stream(index, cache, 1, **changes)
    with_cache, without = batches
    decibels = []
    for k in range(16):
        height, width = torch.minimum(with_cache.resized_size[k], without.resized_size[k]).tolist()
        a, b = (batch.images[k, :, :height, :width].float() for batch in batches)
        assert (a - b).abs().mean() < 3
        decibels.append(float(10 * torch.log10(255**2 / (a - b).square().mean())))
    print(sorted(round(value, 1) for value in decibels))
    assert np.median(decibels) > 34
