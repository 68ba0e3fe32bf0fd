"""The loader: one stream whatever the threads, and exact state."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.data.loading.loader import compute_max_boxes
from stoker_watch.errors import CheckpointError
from tests.fixtures.data_loader import (  # noqa: F401
    index,
    test_a_batch_keeps_the_contract,
    test_a_batch_larger_than_the_data_set,
    test_a_batch_on_the_cpu_stays_until_the_next_but_one,
    test_a_real_data_set,
    test_an_abandoned_evaluation_starts_again,
    test_an_evaluation_batch_maps_back_to_the_original,
    test_evaluation_on_ranks_has_as_many_batches_on_each,
    test_evaluation_shows_every_row_once_in_order,
    test_every_epoch_shows_every_image_once_in_another_order,
    test_image_indices_at_equals_what_was_handed_out,
    test_load_state_dict_goes_back,
    test_more_boxes_than_max_boxes_is_an_error_with_the_path,
    test_stats_tell_reading_from_decoding_and_waiting,
    test_the_stream_does_not_depend_on_batch_depth_or_ranks,
)
from tests.trainer.data.loading import assert_same, image_indices_of, loader_threads, make, stream, take


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not loader_threads()


# What a batch is.


def test_max_boxes_is_the_largest_count_rounded_up(index):
    index.offsets = np.array([0, 3, 3, 20])
    assert compute_max_boxes(index, np.arange(3)) == 24
    assert compute_max_boxes(index, np.array([0])) == 8
    assert compute_max_boxes(index, np.array([1])) == 8


# The stream.


@pytest.mark.parametrize("workers", [2, 4])
def test_the_stream_does_not_depend_on_the_threads(index, workers):
    assert_same(stream(index, 12, workers=workers), stream(index, 12, workers=1))


def test_only_the_given_images_are_shown(index):
    image_indices = np.array([2, 5, 11])
    assert (
        sorted(image_indices_of(stream(index, 3, image_indices=image_indices, batch_size=1))) == image_indices.tolist()
    )


def test_seeds_differ(index):
    assert image_indices_of(stream(index, 4, seed=1)) != image_indices_of(stream(index, 4, seed=2))


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


def test_the_state_of_another_stream_is_refused(index):
    state = make(index).state_dict()
    with pytest.raises(CheckpointError, match="seed is 4"):
        make(index, seed=4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="number of training images is 5"):
        make(index, image_indices=np.arange(5)).load_state_dict(state)
