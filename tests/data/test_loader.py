"""The loader: one stream whatever the threads, and exact state."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.data.batch import NUM_RAND, Batch
from stoker.data.index import open_index
from stoker.data.loading.loader import BUFFERS_IN_USE, PREFETCH_DEPTH, compute_max_boxes
from stoker.errors import CheckpointError
from tests.data.loading import (
    IMAGE_SIZE,
    PADDING,
    InMemoryIndex,
    assert_same,
    image_indices_of,
    loader_threads,
    make,
    stream,
    take,
)


@pytest.fixture
def index(tmp_path):
    return InMemoryIndex(tmp_path, 13)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not loader_threads()


# What a batch is.


def test_a_batch_keeps_the_contract(index):
    for batch in stream(index, 8):
        assert batch.images.shape == (4, 3, *IMAGE_SIZE)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert [t.dtype for t in batch] == [
            torch.uint8,
            torch.float32,
            torch.int64,
            torch.bool,
            torch.int32,
            torch.float32,
            torch.int32,
            torch.int64,
            torch.float32,
        ]
        assert batch.boxes.shape == (4, 8, 4)
        assert batch.rand.shape == (4, NUM_RAND)
        for k, image_index in enumerate(batch.image_index.tolist()):
            height, width = batch.resized_size[k].tolist()
            assert batch.original_size[k].tolist() == index.original_size[image_index].tolist()
            padding = torch.ones(IMAGE_SIZE, dtype=torch.bool)
            padding[:height, :width] = False
            assert torch.equal(batch.images[k][:, padding].T.unique(dim=0), PADDING[: int(padding.any())])
            assert (batch.boxes[k][~batch.valid[k]] == 0).all()


def test_an_evaluation_batch_maps_back_to_the_original(index):
    for batch in stream(index, 9, train=False):
        for k, image_index in enumerate(batch.image_index.tolist()):
            if image_index < 0:
                continue
            boxes = index.boxes[index.offsets[image_index] : index.offsets[image_index + 1]]
            back = batch.boxes[k][batch.valid[k]] / batch.scale[k].flip(0).repeat(2)
            assert back.numpy() == pytest.approx(boxes, abs=1e-3)


def test_max_boxes_is_the_largest_count_rounded_up(index):
    index.offsets = np.array([0, 3, 3, 20])
    assert compute_max_boxes(index, np.arange(3)) == 24
    assert compute_max_boxes(index, np.array([0])) == 8
    assert compute_max_boxes(index, np.array([1])) == 8


def test_more_boxes_than_max_boxes_is_an_error_with_the_path(index):
    with make(index, max_boxes=1) as loader, pytest.raises(RuntimeError, match=r"\d+\.(png|jpg).*max_boxes is 1"):
        take(loader, 9)


def test_a_real_data_set(tmp_path, monkeypatch):
    """COCO on disk → the index → a batch: the loader needs nothing that the index does not say."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "coco").mkdir()
    InMemoryIndex(tmp_path / "coco", 6)
    records = [{"id": 50 + n, "file_name": f"{n:03}.{'jpg' if n % 2 else 'png'}"} for n in range(6)]
    boxes = [{"id": n, "image_id": 50 + n, "category_id": 7, "bbox": [1, 2, 4, 5], "iscrowd": 0} for n in range(6)]
    text = json.dumps({"images": records, "annotations": boxes, "categories": [{"id": 7, "name": "cell"}]})
    (tmp_path / "coco" / "_annotations.coco.json").write_text(text)
    index = open_index(tmp_path / "coco", val_fraction=0.2)
    image_indices = index.image_indices("train")
    batch = stream(index, 1, image_indices=image_indices, train=False, batch_size=8)[0]
    assert batch.image_index.tolist() == image_indices.tolist() + [-1] * (8 - len(image_indices))
    scale = batch.scale[: len(image_indices)].flip(1).repeat(1, 2)
    assert torch.allclose(batch.boxes[: len(image_indices), 0] / scale, torch.tensor([1.0, 2, 5, 7]), atol=1e-4)


# The stream.


@pytest.mark.parametrize("workers", [2, 4])
def test_the_stream_does_not_depend_on_the_threads(index, workers):
    assert_same(stream(index, 12, workers=workers), stream(index, 12, workers=1))


def test_the_stream_does_not_depend_on_batch_depth_or_ranks(index):
    def flat(parts):
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    expected = flat(stream(index, 12, batch_size=4))
    actual = {
        "one by one": flat(stream(index, 48, batch_size=1)),
        "depth 1": flat(stream(index, 12, prefetch_depth=1)),
    }
    ranks = [stream(index, 8, batch_size=2, rank=rank, world_size=3) for rank in range(3)]
    actual["ranks"] = flat([part for parts in zip(*ranks, strict=True) for part in parts])
    for how, tensors in actual.items():
        for name, x, y in zip(Batch._fields, tensors, expected, strict=True):
            assert torch.equal(x, y), (how, name)


def test_every_epoch_shows_every_image_once_in_another_order(index):
    seen = image_indices_of(stream(index, 13, batch_size=4))  # 52 positions are 4 epochs of 13: batches straddle them
    epochs = [seen[at : at + 13] for at in range(0, 52, 13)]
    assert all(sorted(epoch) == list(range(13)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_only_the_given_images_are_shown(index):
    image_indices = np.array([2, 5, 11])
    assert (
        sorted(image_indices_of(stream(index, 3, image_indices=image_indices, batch_size=1))) == image_indices.tolist()
    )


def test_a_batch_larger_than_the_data_set(index):
    seen = image_indices_of(stream(index, 1, image_indices=np.array([4, 7]), batch_size=6))
    assert sorted(seen) == [4, 4, 4, 7, 7, 7]


def test_seeds_differ(index):
    assert image_indices_of(stream(index, 4, seed=1)) != image_indices_of(stream(index, 4, seed=2))


@pytest.mark.parametrize("batch", [1, 4, 13, 16])
def test_evaluation_shows_every_row_once_in_order(index, batch):
    image_indices = np.array([7, 3, 12, 0, 5])
    with make(index, image_indices=image_indices, train=False, batch_size=batch) as loader:
        for _ in range(2):  # each `iter` is a whole pass
            actual = take(loader, 99)
            assert [
                image_index for image_index in image_indices_of(actual) if image_index >= 0
            ] == image_indices.tolist()
            assert len(image_indices_of(actual)) == -(-5 // batch) * batch
            assert loader.position == 5
            for part in actual:
                fill = part.image_index < 0
                assert not part.valid[fill].any()
                assert (part.images[fill].permute(0, 2, 3, 1) == PADDING).all()
        with pytest.raises(StopIteration):
            next(loader)


def test_evaluation_on_ranks_has_as_many_batches_on_each(index):
    parts = [
        stream(index, 99, image_indices=np.arange(5), train=False, batch_size=2, rank=r, world_size=3) for r in range(3)
    ]
    assert [image_indices_of(part) for part in parts] == [[0, 1], [2, 3], [4, -1]]


def test_an_abandoned_evaluation_starts_again(index):
    with make(index, train=False) as loader:
        take(loader, 1)
        assert [image_index for image_index in image_indices_of(take(loader, 99)) if image_index >= 0] == list(
            range(13)
        )


def test_a_batch_on_the_cpu_stays_until_the_next_but_one(index):
    with make(index) as loader:
        kept = None
        for batch in itertools.islice(loader, 20):
            copies = [tensor.clone() for tensor in batch]
            if kept is not None:
                assert all(torch.equal(now, then) for now, then in zip(*kept, strict=True))
            kept = (list(batch), copies)


# State.


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 14), st.integers(1, 4), st.integers(1, 4))
def test_a_run_stopped_anywhere_goes_on_bit_for_bit(index, stop, workers, threads_after):
    with make(index, workers=workers) as loader:
        take(loader, stop)
        state = loader.state_dict()
        assert loader.position == state["position"] == 4 * stop
        expected = take(loader, 5)
    with make(index, workers=threads_after) as loader:
        loader.load_state_dict(state)
        assert_same(take(loader, 5), expected)


def test_load_state_dict_goes_back(index):
    with make(index) as loader:
        first = loader.state_dict()
        expected = take(loader, 5)
        loader.load_state_dict(first)
        assert_same(take(loader, 5), expected)


def test_the_state_of_another_stream_is_refused(index):
    state = make(index).state_dict()
    with pytest.raises(CheckpointError, match="seed is 4"):
        make(index, seed=4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="number of training images is 5"):
        make(index, image_indices=np.arange(5)).load_state_dict(state)


def test_image_indices_at_equals_what_was_handed_out(index):
    index.path(6).write_bytes(b"")
    with make(index) as loader:
        actual = take(loader, 9)
        assert loader.image_indices_at(0, 36) == image_indices_of(actual)


def test_stats_tell_reading_from_decoding_and_waiting(index):
    with make(index) as loader:
        take(loader, 6)
        ahead = loader.stats()
    total = loader.stats()
    assert 24 <= ahead.total.num_images <= total.total.num_images <= 4 * (6 + PREFETCH_DEPTH + BUFFERS_IN_USE)
    assert min(total.total.read_s, total.total.decode_s, total.wait_s) > 0
    assert total.total.read_s >= ahead.total.read_s
