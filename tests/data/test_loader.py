"""The loader: one stream whatever the threads, exact state, nothing lost, nothing swallowed, nothing overwritten."""

import errno
import gc
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.batch import DRAWS, Batch
from stoker.data import samples
from stoker.data.index import open_index
from stoker.data.loader import DEPTH, HELD, Loader, box_slots
from stoker.device import Device
from stoker.errors import CheckpointError, DataError, OutOfMemoryError

CPU = Device(torch.device("cpu"))
CANVAS = (32, 64)
PADDING = torch.tensor([samples.PADDING], dtype=torch.uint8)


class Pictures:
    """An index in memory, as docs/structure.md has it, of small pictures that are really there."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.source = root, str(root)
        rng = np.random.default_rng(count)
        self.size = rng.integers(8, 60, (count, 2)).astype(np.int32)
        self.image_id = np.arange(count) * 10
        self.offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, count))])
        corners = np.sort(rng.random((self.offsets[-1], 2, 2)), axis=1)
        sides = np.repeat(self.size[:, ::-1], np.diff(self.offsets), axis=0)[:, None]
        self.boxes = (corners * sides).reshape(-1, 4).astype(np.float32)
        self.labels = rng.integers(0, 5, self.offsets[-1]).astype(np.int32)
        self.crowd = np.zeros(self.offsets[-1], bool)
        for row, (height, width) in enumerate(self.size):
            assert cv2.imwrite(str(self.path(row)), rng.integers(0, 255, (height, width, 3), np.uint8))

    def read(self, row: int) -> bytes:
        return self.path(row).read_bytes()

    def remote(self, _row: int) -> None:
        return None

    def place(self, row: int) -> str:
        return str(self.path(row))

    def path(self, row: int) -> Path:
        return self.root / f"{row:03}.{'jpg' if row % 2 else 'png'}"


@pytest.fixture
def pictures(tmp_path):
    return Pictures(tmp_path, 13)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not loader_threads()


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("stoker-loader")]


def make(index, *, rows=None, **changes):
    rows = np.arange(len(index.size)) if rows is None else rows
    options = {
        "device": CPU, "batch": 4, "canvas": CANVAS, "resize": "letterbox", "crop": 0.5, "zoom": (0.5, 2.0),
        "boxes": box_slots(index, rows), "seed": 3, "threads": 2,
    }  # fmt: skip
    return Loader(index, rows, **options | changes)


def take(loader, count):
    """Copies of the next batches (on a CPU they alias the ring)."""
    return [Batch(*(tensor.clone() for tensor in batch)) for batch in itertools.islice(loader, count)]


def wait_until_full(loader, places=4 * (DEPTH + HELD)):
    """Until the threads have filled every place of the ring that they were given at first."""
    while loader.stats().decode.pictures < places:
        assert loader_threads()


def stream(index, count, **changes):
    with make(index, **changes) as loader:
        return take(loader, count)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name, x, y in zip(Batch._fields, a, b, strict=True):
            assert torch.equal(x, y), name


def ids(batches):
    return torch.cat([batch.image_id for batch in batches]).tolist()


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
        assert batch.draw.shape == (4, DRAWS)
        for k, row in enumerate(batch.image_id.tolist()):
            height, width = batch.content[k].tolist()
            assert batch.size[k].tolist() == pictures.size[row].tolist()
            padding = torch.ones(CANVAS, dtype=torch.bool)
            padding[:height, :width] = False
            assert torch.equal(batch.images[k][:, padding].T.unique(dim=0), PADDING[: int(padding.any())])
            assert (batch.boxes[k][~batch.valid[k]] == 0).all()


def test_an_evaluation_batch_maps_back_to_the_original(pictures):
    for batch in stream(pictures, 9, train=False):
        for k, row in enumerate(batch.image_id.tolist()):
            if row < 0:
                continue
            boxes = pictures.boxes[pictures.offsets[row] : pictures.offsets[row + 1]]
            back = batch.boxes[k][batch.valid[k]] / batch.scale[k].flip(0).repeat(2)
            assert back.numpy() == pytest.approx(boxes, abs=1e-3)


def test_box_slots_are_the_most_boxes_rounded_up(pictures):
    pictures.offsets = np.array([0, 3, 3, 20])
    assert box_slots(pictures, np.arange(3)) == 24
    assert box_slots(pictures, np.array([0])) == 8
    assert box_slots(pictures, np.array([1])) == 8


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
    rows = index.rows("train")
    batch = stream(index, 1, rows=rows, train=False, batch=8)[0]
    assert batch.image_id.tolist() == rows.tolist() + [-1] * (8 - len(rows))
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
                fill = part.image_id < 0
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
        assert loader.rows_of(0, 36) == ids(found)


# Quarantine.

DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "no picture": lambda path: path.write_bytes(b"<html>" * 30),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another size": lambda path: cv2.imwrite(str(path), np.zeros((70, 71, 3), np.uint8)),
}


@pytest.mark.parametrize("row", [4, 5])
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_bad_picture_is_quarantined_by_name_and_replaced(pictures, row, damage, threads):
    healthy = stream(pictures, 12)
    DAMAGE[damage](pictures.path(row))
    told = []
    with make(pictures, threads=threads, on_quarantine=told.append) as loader:
        found = take(loader, 12)
        state = loader.state_dict()
    assert row not in ids(found)
    assert len(told) == 1  # once, though the picture comes four times
    first = ids(healthy).index(row)
    assert told[0].row == row
    assert told[0].place == str(pictures.path(row))
    assert told[0].position == first
    assert told[0].replaced_by == ids(found)[first]
    assert told[0].error
    assert state["quarantined"] == {row: first}
    # All other samples are what they were.
    for k, expected in enumerate(ids(healthy)):
        if expected != row:
            assert torch.equal(found[k // 4].images[k % 4], healthy[k // 4].images[k % 4])


def test_the_sizes_that_disagree_are_both_named(pictures):
    pictures.size[5] = pictures.size[5][::-1] + np.array([0, 1])
    height, width = pictures.size[5]
    told = []
    stream(pictures, 4, on_quarantine=told.append)
    assert f"say {width} × {height} pixels, the file has {height} × {width - 1}" in told[0].error


def test_a_size_that_the_source_does_not_say_is_read_from_the_file(pictures):
    sizes = pictures.size.copy()
    expected = stream(pictures, 4)
    pictures.size[:] = 0
    assert_same(stream(pictures, 4), expected)
    assert expected[0].size[0].tolist() == sizes[expected[0].image_id[0]].tolist()


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_resumed_run_repeats_a_replacement_though_the_file_is_back(pictures, stop):
    path, hidden = pictures.path(4), pictures.root / "hidden"
    path.rename(hidden)
    with make(pictures, on_quarantine=lambda _: hidden.rename(path)) as loader:  # it fails once, then never again
        before = take(loader, 4)  # an epoch and a bit: the picture has failed
        assert path.exists()
        state_at = {4: loader.state_dict()}
        after = take(loader, 8)
    assert 4 not in ids(after)
    with make(pictures) as loader:
        loader.load_state_dict(state_at[4])
        assert_same(take(loader, 8), after)
    # From an earlier state, with what quarantine.jsonl knows of the time after it.
    with make(pictures) as loader:
        loader.load_state_dict({"position": 4 * stop, "quarantined": state_at[4]["quarantined"]})
        assert_same(take(loader, 12 - stop), (before + after)[stop:])


def test_a_picture_is_used_up_to_the_position_from_which_it_is_quarantined(pictures):
    healthy = stream(pictures, 13, batch=4)
    with make(pictures) as loader:
        loader.load_state_dict({"position": 0, "quarantined": {4: 26}})
        found = take(loader, 13)
    assert ids(found)[:26] == ids(healthy)[:26]
    assert 4 in ids(found)[:26]
    assert 4 not in ids(found)[26:]


def test_a_picture_read_ahead_before_it_failed_is_not_used(tmp_path, monkeypatch):
    """Three pictures, a deep ring: one is decoded several times ahead, and only the first try fails."""
    index = Pictures(tmp_path, 3)
    row = ids(stream(index, 3, batch=1))[2]
    real, tries = samples.decode.decode_into, itertools.count()

    def once_broken(data, path, **rest):
        if path == index.path(row) and next(tries) == 0:
            raise DataError("The disk hiccuped.", place=path)
        real(data, path, **rest)

    monkeypatch.setattr(samples.decode, "decode_into", once_broken)
    told = []
    with make(index, batch=1, depth=12, threads=1, on_quarantine=told.append) as loader:
        found = take(loader, 1)
        wait_until_full(loader, 14)  # four epochs and a half
        assert not told
        assert next(tries) >= 4  # it was tried, and worked, at later places before its failure was known
        found += take(loader, 29)
        assert ids(found) == loader.rows_of(0, 30)
    assert [one.position for one in told] == [2]
    assert row not in ids(found)
    # The same stream as that of a run which could never read it.
    index.path(row).unlink()
    assert_same(stream(index, 30, batch=1), found)


def many(tmp_path, bad, count=300):
    """An index of `count` rows over a few files, of which `bad` rows have none."""
    index = Pictures(tmp_path, 4)
    index.size = np.tile(index.size, (count // 4, 1))
    index.offsets = np.zeros(count + 1, np.int64)
    path = index.path
    index.path = lambda row: path(row % 4) if row not in bad else tmp_path / f"gone-{row}.jpg"
    return index


def test_up_to_a_hundredth_of_the_pictures_may_be_bad(tmp_path):
    index = many(tmp_path, {17, 100, 299})
    told = []
    found = ids(stream(index, 80, batch=8, on_quarantine=told.append))
    assert {one.row for one in told} == {17, 100, 299}
    assert not set(found) & {17, 100, 299}


@pytest.mark.parametrize("train", [True, False])
def test_more_bad_pictures_stop_the_run_and_are_named(tmp_path, train):
    bad = {17, 100, 200, 299}
    index = many(tmp_path, bad)
    told = []
    with make(index, batch=8, train=train, on_quarantine=told.append) as loader:
        with pytest.raises(DataError) as caught:
            take(loader, 80)
        with pytest.raises(DataError):  # and stays stopped
            next(loader)
    assert caught.value.exit_code == 4
    text = str(caught.value)
    assert "4 of 300 pictures" in text
    assert all(f"gone-{row}.jpg: No such file" in text for row in bad)
    assert "fix:" in text
    assert {one.row for one in told} == bad


def test_where_it_stops_does_not_depend_on_the_threads(tmp_path):
    index = many(tmp_path, {17, 100, 200, 299})
    ends = set()
    for threads in (1, 2, 4):
        told = []
        with make(index, batch=8, threads=threads, on_quarantine=told.append) as loader:
            with pytest.raises(DataError):
                take(loader, 80)
            ends.add((loader.position, tuple(told)))
    assert len(ends) == 1


def test_a_data_set_that_has_gone_stops_the_run(pictures):
    for row in range(13):
        pictures.path(row).unlink()
    with make(pictures) as loader, pytest.raises(DataError, match=r"None of the \d+ pictures tried"):
        next(loader)


def test_the_only_picture_is_bad(tmp_path):
    index = Pictures(tmp_path, 1)
    index.path(0).unlink()
    with make(index) as loader, pytest.raises(DataError, match="None of the 1 pictures tried"):
        next(loader)


def test_evaluation_leaves_a_bad_picture_out_and_says_so(pictures):
    pictures.path(4).unlink()
    told = []
    with make(pictures, train=False, on_quarantine=told.append) as loader:
        for _ in range(2):
            assert ids(take(loader, 99)) == [0, 1, 2, 3, -1, 5, 6, 7, 8, 9, 10, 11, 12, -1, -1, -1]
    assert [(one.row, one.position, one.replaced_by) for one in told] == [(4, 4, -1)]


def test_no_pictures_at_all(pictures):
    with pytest.raises(DataError, match="no picture"):
        make(pictures, rows=np.array([], np.int64))


# Bugs and ends.


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("oops"), RuntimeError),
        (MemoryError(), OutOfMemoryError),
        (OSError(errno.EMFILE, "Too many open files"), RuntimeError),  # says nothing about the picture
    ],
)
def test_an_unexpected_exception_surfaces_with_the_name(pictures, monkeypatch, error, kind):
    real = samples.decode.decode_into

    def broken(data, path, **rest):
        if path == pictures.path(8):
            raise error
        real(data, path, **rest)

    monkeypatch.setattr(samples.decode, "decode_into", broken)
    with make(pictures) as loader:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                take(loader, 9)
            assert str(pictures.path(8)) in str(caught.value)
            assert caught.value.__cause__ is error
        assert not loader.state_dict()["quarantined"]


@pytest.mark.parametrize("batches", [0, 1, 5])
@pytest.mark.parametrize("threads", [1, 4])
def test_close_joins_all_threads_in_the_middle_of_an_epoch(pictures, batches, threads):
    before = set(threading.enumerate())
    loader = make(pictures, threads=threads)
    take(loader, batches)
    assert len(loader_threads()) == (threads if batches else 0)
    loader.close()
    assert set(threading.enumerate()) == before
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_close_joins_threads_that_wait_on_a_full_ring(pictures):
    loader = make(pictures)
    next(loader)
    wait_until_full(loader)
    loader.close()
    assert not loader_threads()
    assert loader.stats().decode.pictures == 4 * (DEPTH + HELD)


def test_close_from_another_thread_ends_a_wait(pictures, monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def stuck(*_, **__):
        entered.set()
        assert leave.wait(60)

    monkeypatch.setattr(samples.decode, "decode_into", stuck)
    loader = make(pictures)
    caught = []

    def ask():
        try:
            next(loader)
        except RuntimeError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert entered.wait(60)
    closing = threading.Thread(target=loader.close)
    closing.start()
    asking.join(60)  # ends although the threads are stuck
    assert not asking.is_alive()
    leave.set()
    closing.join(60)
    assert "closed" in str(caught[0])


def test_a_forgotten_loader_ends_its_threads(pictures):
    loader = make(pictures)
    next(loader)
    threads = loader_threads()
    del loader
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert not loader_threads()


def test_a_forgotten_loader_does_not_hold_up_the_interpreter(pictures):
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import pathlib, test_loader
index = test_loader.Pictures(pathlib.Path({str(pictures.root)!r}), 13)
loaders = [test_loader.make(index, threads=4, depth=50) for _ in range(4)]
for loader in loaders:
    next(loader)  # and leaves the threads at work: one that returned into a dying interpreter would abort it
print("out")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "out", "")


def test_stats_tell_reading_from_decoding_and_waiting(pictures):
    with make(pictures) as loader:
        take(loader, 6)
        ahead = loader.stats()
    total = loader.stats()
    assert 24 <= ahead.decode.pictures <= total.decode.pictures <= 4 * (6 + DEPTH + HELD)
    assert total.fetch.bytes >= 24 * min(pictures.path(row).stat().st_size for row in range(13))
    assert min(total.fetch.seconds, total.decode.seconds, total.idle_s, total.wait_s) > 0
    assert total.fetch.seconds >= ahead.fetch.seconds


# A device.


class LateDevice:
    """A device whose copies are done late: what it reads from the host is read when the copy ends, not when it starts.

    `polls`: how often `done` says no before the copy ends by itself; None: only the host's wait, or `finish`, ends it.
    """

    is_cpu = False

    def __init__(self, polls):
        self.polls, self.copies, self.waits, self.blocked = polls, [], 0, []

    def empty_host(self, shape, dtype):
        return torch.zeros(tuple(shape), dtype=dtype)

    def make_stream(self):
        return self

    def to_device(self, tensors):
        copy = LateCopy(self, list(tensors))
        self.copies.append(copy)
        return copy.targets, copy

    def finish(self):
        for copy in self.copies:
            copy.end()


class LateCopy:
    def __init__(self, device, sources):
        self.device, self.sources, self.ended, self.asked = device, sources, False, 0
        self.targets = [torch.full_like(tensor, 1) for tensor in sources]

    def end(self):
        if not self.ended:
            for source, target in zip(self.sources, self.targets, strict=True):
                target.copy_(source)
            self.ended = True

    def done(self):
        self.asked += 1
        if self.device.polls is not None and self.asked > self.device.polls:
            self.end()
        return self.ended

    def wait(self):
        self.device.waits += 1
        self.end()

    def block_device(self):
        self.device.blocked.append(self)


@pytest.mark.parametrize("polls", [0, 1, 3, None])
def test_a_slot_is_never_overwritten_before_its_copy_is_done(pictures, polls):
    device = LateDevice(polls)
    with make(pictures, device=device) as loader:
        found = list(itertools.islice(loader, 25))
        device.finish()
    assert_same(found, stream(pictures, 25))
    assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in found)
    assert len(device.blocked) == 25  # the device waits for every batch it is given
    if polls == 0:
        assert device.waits == 0  # the host for none, where the copies keep up


def test_the_next_batch_is_copied_while_the_device_has_this_one(pictures):
    device = LateDevice(0)
    with make(pictures, device=device) as loader:
        next(loader)
        wait_until_full(loader)
        next(loader)
        assert len(device.copies) == 3
        assert loader.position == 8  # which is not handed out yet
        assert device.blocked == device.copies[:2]


def test_an_early_copy_does_not_bring_forward_what_is_committed(pictures):
    """A failure in the batch after next is told when that one is handed out, and its state is not ahead either."""
    expected = ids(stream(pictures, 12))
    row = expected[9]
    pictures.path(row).unlink()
    told = []
    with make(pictures, device=LateDevice(0), on_quarantine=told.append) as loader:
        for batch in range(3):
            assert bool(told) == (batch > 2)
            assert loader.state_dict()["quarantined"] == {}
            next(loader)
            wait_until_full(loader)
        assert [one.position for one in told] == [9]
        assert loader.state_dict()["quarantined"] == {row: 9}


def test_a_device_loader_set_back_keeps_its_hands_off_running_copies(pictures):
    device = LateDevice(None)
    with make(pictures, device=device) as loader:
        start = loader.state_dict()
        found = list(itertools.islice(loader, 3))
        loader.load_state_dict(start)
        found += list(itertools.islice(loader, 6))
        device.finish()
    expected = stream(pictures, 6)
    assert_same(found, expected[:3] + expected)
