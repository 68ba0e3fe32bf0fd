"""Images that cannot be used: named, replaced, the same ones in every run, and too many of them are an error."""

import itertools

import numpy as np
import pytest

from stoker.data.loading import samples
from stoker_watch.errors import DataError
from tests.fixtures.data_loader_quarantine import (  # noqa: F401
    DAMAGE,
    index,
    test_a_bad_image_is_quarantined_by_name_and_replaced,
    test_a_missing_dataset_stops_the_run,
    test_a_resumed_run_repeats_a_replacement_though_the_file_is_back,
    test_an_image_is_used_up_to_the_position_from_which_it_is_quarantined,
    test_evaluation_leaves_a_bad_image_out_and_reports_it,
)
from tests.trainer.data.loading import (
    InMemoryIndex,
    assert_same,
    image_indices_of,
    loader_threads,
    make,
    stream,
    take,
    wait_until_full,
)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not loader_threads()


def test_the_sizes_that_disagree_are_both_named(index):
    index.original_size[5] = index.original_size[5][::-1] + np.array([0, 1])
    height, width = index.original_size[5]
    reported = []
    stream(index, 4, on_quarantine=reported.append)
    assert f"say {width} × {height} pixels, the file has {height} × {width - 1}" in reported[0].error


def test_a_size_that_the_source_does_not_say_is_read_from_the_file(index):
    sizes = index.original_size.copy()
    expected = stream(index, 4)
    index.original_size[:] = 0
    assert_same(stream(index, 4), expected)
    assert expected[0].original_size[0].tolist() == sizes[expected[0].image_index[0]].tolist()


def test_an_image_read_ahead_before_it_failed_is_not_used(tmp_path, monkeypatch):
    """Three images, a deep ring: one is decoded several times ahead, and only the first try fails."""
    index = InMemoryIndex(tmp_path, 3)
    image_index = image_indices_of(stream(index, 3, batch_size=1))[2]
    real, tries = samples.decode.decode_into, itertools.count()

    def once_broken(data, path, **rest):
        if path == index.path_text(image_index) and next(tries) == 0:
            raise DataError("The disk hiccuped.", location=path)
        real(data, path, **rest)

    monkeypatch.setattr(samples.decode, "decode_into", once_broken)
    reported = []
    with make(index, batch_size=1, prefetch_depth=12, workers=1, on_quarantine=reported.append) as loader:
        actual = take(loader, 1)
        wait_until_full(loader, 14)  # four epochs and a half
        assert not reported
        assert next(tries) >= 4  # it was tried, and worked, at later places before its failure was known
        actual += take(loader, 29)
        assert image_indices_of(actual) == loader.image_indices_at(0, 30)
    assert [one.sample_position for one in reported] == [2]
    assert image_index not in image_indices_of(actual)
    # The same stream as that of a run which could never read it.
    index.path(image_index).unlink()
    assert_same(stream(index, 30, batch_size=1), actual)


def many(tmp_path, bad, count=300):
    """An index of `count` rows over a few files, of which `bad` rows have none."""
    index = InMemoryIndex(tmp_path, 4)
    index.original_size = np.tile(index.original_size, (count // 4, 1))
    index.offsets = np.zeros(count + 1, np.int64)
    path = index.path
    index.path = lambda image_index: (
        path(image_index % 4) if image_index not in bad else tmp_path / f"gone-{image_index}.jpg"
    )
    return index


def test_up_to_a_hundredth_of_the_images_may_be_bad(tmp_path):
    index = many(tmp_path, {17, 100, 299})
    reported = []
    actual = image_indices_of(stream(index, 80, batch_size=8, on_quarantine=reported.append))
    assert {one.image_index for one in reported} == {17, 100, 299}
    assert not set(actual) & {17, 100, 299}


@pytest.mark.parametrize("train", [True, False])
def test_more_bad_images_stop_the_run_and_are_named(tmp_path, train):
    bad = {17, 100, 200, 299}
    index = many(tmp_path, bad)
    reported = []
    with make(index, batch_size=8, train=train, on_quarantine=reported.append) as loader:
        with pytest.raises(DataError) as caught:
            take(loader, 80)
        with pytest.raises(DataError):  # and stays stopped
            next(loader)
    assert caught.value.exit_code == 4
    text = str(caught.value)
    assert "4 of 300 images" in text
    assert all(f"gone-{image_index}.jpg: No such file" in text for image_index in bad)
    assert "fix:" in text
    assert {one.image_index for one in reported} == bad


def test_where_it_stops_does_not_depend_on_the_threads(tmp_path):
    index = many(tmp_path, {17, 100, 200, 299})
    ends = set()
    for workers in (1, 2, 4):
        reported = []
        with make(index, batch_size=8, workers=workers, on_quarantine=reported.append) as loader:
            with pytest.raises(DataError):
                take(loader, 80)
            ends.add((loader.position, tuple(reported)))
    assert len(ends) == 1


def test_the_only_image_is_bad(tmp_path):
    index = InMemoryIndex(tmp_path, 1)
    index.path(0).unlink()
    with make(index) as loader, pytest.raises(DataError, match="None of the 1 images tried"):
        next(loader)


def test_no_images_at_all(index):
    with pytest.raises(DataError, match="no image"):
        make(index, image_indices=np.array([], np.int64))
