"""Pictures that cannot be used: named, replaced, the same ones in every run, and too many of them are an error."""

import itertools

import cv2
import numpy as np
import pytest
import torch

from stoker.data.loading import samples
from stoker.errors import DataError
from tests.data.loading import Pictures, assert_same, ids, loader_threads, make, stream, take, wait_until_full


@pytest.fixture
def pictures(tmp_path):
    return Pictures(tmp_path, 13)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not loader_threads()


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
    assert expected[0].original_size[0].tolist() == sizes[expected[0].image_index[0]].tolist()


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
            raise DataError("The disk hiccuped.", location=path)
        real(data, path, **rest)

    monkeypatch.setattr(samples.decode, "decode_into", once_broken)
    told = []
    with make(index, batch=1, depth=12, threads=1, on_quarantine=told.append) as loader:
        found = take(loader, 1)
        wait_until_full(loader, 14)  # four epochs and a half
        assert not told
        assert next(tries) >= 4  # it was tried, and worked, at later places before its failure was known
        found += take(loader, 29)
        assert ids(found) == loader.image_indices_at(0, 30)
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
