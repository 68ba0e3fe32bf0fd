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
from tests.data.loading import CANVAS, PADDING, Pictures, assert_same, ids, loader_threads, make, stream, take


@pytest.fixture
def pictures(tmp_path):
    return Pictures(tmp_path, 13)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not loader_threads()


# What a batch is.


def test_a_batch_keeps_the_contract(pictures):
    for batch in stream(pictures, 8):
        assert batch.images.shape == (4, 3, *CANVAS)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert [t.dtype for t in batch] == [
            torch.uint8, torch.float32, torch.int64, torch.bool, torch.int32, torch.float32, torch.int32, torch.int64,
            torch.float32,
        ]  # fmt: skip
        assert batch.boxes.shape == (4, 8, 4)
        assert batch.rand.shape == (4, NUM_RAND)
        for k, row in enumerate(batch.image_index.tolist()):
            height, width = batch.resized_size[k].tolist()
            assert batch.original_size[k].tolist() == pictures.size[row].tolist()
            padding = torch.ones(CANVAS, dtype=torch.bool)
            padding[:height, :width] = False
            assert torch.equal(batch.images[k][:, padding].T.unique(dim=0), PADDING[: int(padding.any())])
            assert (batch.boxes[k][~batch.valid[k]] == 0).all()


def test_an_evaluation_batch_maps_back_to_the_original(pictures):
    for batch in stream(pictures, 9, train=False):
        for k, row in enumerate(batch.image_index.tolist()):
            if row < 0:
                continue
            boxes = pictures.boxes[pictures.offsets[row] : pictures.offsets[row + 1]]
            back = batch.boxes[k][batch.valid[k]] / batch.scale[k].flip(0).repeat(2)
            assert back.numpy() == pytest.approx(boxes, abs=1e-3)


def test_box_slots_are_the_most_boxes_rounded_up(pictures):
    pictures.offsets = np.array([0, 3, 3, 20])
    assert compute_max_boxes(pictures, np.arange(3)) == 24
    assert compute_max_boxes(pictures, np.array([0])) == 8
    assert compute_max_boxes(pictures, np.array([1])) == 8


def test_more_boxes_than_slots_is_an_error_with_the_name(pictures):
    with make(pictures, boxes=1) as loader, pytest.raises(RuntimeError, match=r"\d+\.(png|jpg).*box slots"):
        take(loader, 9)


def test_a_real_data_set(tmp_path, monkeypatch):
    """COCO on disk → the index → a batch: the loader needs nothing that the index does not say."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "coco").mkdir()
    Pictures(tmp_path / "coco", 6)
    records = [{"id": 50 + n, "file_name": f"{n:03}.{'jpg' if n % 2 else 'png'}"} for n in range(6)]
    boxes = [{"id": n, "image_id": 50 + n, "category_id": 7, "bbox": [1, 2, 4, 5], "iscrowd": 0} for n in range(6)]
    text = json.dumps({"images": records, "annotations": boxes, "categories": [{"id": 7, "name": "cell"}]})
    (tmp_path / "coco" / "_annotations.coco.json").write_text(text)
    index = open_index(tmp_path / "coco", val_fraction=0.2)
    rows = index.image_indices("train")
    batch = stream(index, 1, rows=rows, train=False, batch=8)[0]
    assert batch.image_index.tolist() == rows.tolist() + [-1] * (8 - len(rows))
    scale = batch.scale[: len(rows)].flip(1).repeat(1, 2)
    assert torch.allclose(batch.boxes[: len(rows), 0] / scale, torch.tensor([1.0, 2, 5, 7]), atol=1e-4)


# The stream.


@pytest.mark.parametrize("threads", [2, 4])
def test_the_stream_does_not_depend_on_the_threads(pictures, threads):
    assert_same(stream(pictures, 12, threads=threads), stream(pictures, 12, threads=1))


def test_the_stream_does_not_depend_on_batch_depth_or_ranks(pictures):
    def flat(parts):
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    expected = flat(stream(pictures, 12, batch=4))
    found = {
        "one by one": flat(stream(pictures, 48, batch=1)),
        "depth 1": flat(stream(pictures, 12, depth=1)),
    }
    ranks = [stream(pictures, 8, batch=2, rank=rank, ranks=3) for rank in range(3)]
    found["ranks"] = flat([part for parts in zip(*ranks, strict=True) for part in parts])
    for how, tensors in found.items():
        for name, x, y in zip(Batch._fields, tensors, expected, strict=True):
            assert torch.equal(x, y), (how, name)


def test_every_epoch_shows_every_picture_once_in_another_order(pictures):
    seen = ids(stream(pictures, 13, batch=4))  # 52 positions are 4 epochs of 13: batches straddle them
    epochs = [seen[at : at + 13] for at in range(0, 52, 13)]
    assert all(sorted(epoch) == list(range(13)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_only_the_rows_given_are_shown(pictures):
    rows = np.array([2, 5, 11])
    assert sorted(ids(stream(pictures, 3, rows=rows, batch=1))) == rows.tolist()


def test_a_batch_larger_than_the_data_set(pictures):
    seen = ids(stream(pictures, 1, rows=np.array([4, 7]), batch=6))
    assert sorted(seen) == [4, 4, 4, 7, 7, 7]


def test_seeds_differ(pictures):
    assert ids(stream(pictures, 4, seed=1)) != ids(stream(pictures, 4, seed=2))


@pytest.mark.parametrize("batch", [1, 4, 13, 16])
def test_evaluation_shows_every_row_once_in_order(pictures, batch):
    rows = np.array([7, 3, 12, 0, 5])
    with make(pictures, rows=rows, train=False, batch=batch) as loader:
        for _ in range(2):  # each `iter` is a whole pass
            found = take(loader, 99)
            assert [row for row in ids(found) if row >= 0] == rows.tolist()
            assert len(ids(found)) == -(-5 // batch) * batch
            assert loader.position == 5
            for part in found:
                fill = part.image_index < 0
                assert not part.valid[fill].any()
                assert (part.images[fill].permute(0, 2, 3, 1) == PADDING).all()
        with pytest.raises(StopIteration):
            next(loader)


def test_evaluation_on_ranks_has_as_many_batches_on_each(pictures):
    parts = [stream(pictures, 99, rows=np.arange(5), train=False, batch=2, rank=r, ranks=3) for r in range(3)]
    assert [ids(part) for part in parts] == [[0, 1], [2, 3], [4, -1]]


def test_an_abandoned_evaluation_starts_anew(pictures):
    with make(pictures, train=False) as loader:
        take(loader, 1)
        assert [row for row in ids(take(loader, 99)) if row >= 0] == list(range(13))


def test_a_batch_on_the_cpu_stays_until_the_next_but_one(pictures):
    with make(pictures) as loader:
        kept = None
        for batch in itertools.islice(loader, 20):
            copies = [tensor.clone() for tensor in batch]
            if kept is not None:
                assert all(torch.equal(now, then) for now, then in zip(*kept, strict=True))
            kept = (list(batch), copies)


# State.


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 14), st.integers(1, 4), st.integers(1, 4))
def test_a_run_stopped_anywhere_goes_on_bit_for_bit(pictures, stop, threads, threads_after):
    with make(pictures, threads=threads) as loader:
        take(loader, stop)
        state = loader.state_dict()
        assert loader.position == state["position"] == 4 * stop
        expected = take(loader, 5)
    with make(pictures, threads=threads_after) as loader:
        loader.load_state_dict(state)
        assert_same(take(loader, 5), expected)


def test_a_loader_can_be_set_back(pictures):
    with make(pictures) as loader:
        first = loader.state_dict()
        expected = take(loader, 5)
        loader.load_state_dict(first)
        assert_same(take(loader, 5), expected)


def test_the_state_of_another_stream_is_refused(pictures):
    state = make(pictures).state_dict()
    with pytest.raises(CheckpointError, match="seed is 4"):
        make(pictures, seed=4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="number of training pictures is 5"):
        make(pictures, rows=np.arange(5)).load_state_dict(state)


def test_rows_of_names_what_was_handed_out(pictures):
    pictures.path(6).write_bytes(b"")
    with make(pictures) as loader:
        found = take(loader, 9)
        assert loader.image_indices_at(0, 36) == ids(found)


def test_stats_tell_reading_from_decoding_and_waiting(pictures):
    with make(pictures) as loader:
        take(loader, 6)
        ahead = loader.stats()
    total = loader.stats()
    assert 24 <= ahead.decode.num_images <= total.decode.num_images <= 4 * (6 + PREFETCH_DEPTH + BUFFERS_IN_USE)
    assert total.fetch.bytes >= 24 * min(pictures.path(row).stat().st_size for row in range(13))
    assert min(total.fetch.seconds, total.decode.seconds, total.idle_s, total.wait_s) > 0
    assert total.fetch.seconds >= ahead.fetch.seconds
