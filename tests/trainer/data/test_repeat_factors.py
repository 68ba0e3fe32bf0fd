"""Repeat-factor sampling: how often an image comes, and that nothing but (seed, epoch, index) decides it."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stoker.config.settings import Config
from stoker.data.loading.repeat_factors import class_fractions, repeat_factors, repeated_order
from stoker_watch.errors import CheckpointError
from tests.trainer.data.loading import image_indices_of, make, take
from tests.trainer.data.memory_index import InMemoryIndex


def long_tail() -> SimpleNamespace:
    """100 images: all have class 0, four have class 1, one (the last) only a crowd of it and nothing else."""
    labels, offsets, crowd = [], [0], []
    for n in range(100):
        own = [0] if n < 99 else [1]
        own += [1, 1] if n < 4 else []
        labels += own
        crowd += [n == 99] * len(own)
        offsets.append(len(labels))
    return SimpleNamespace(
        labels=np.array(labels, np.int32), offsets=np.array(offsets), crowd=np.array(crowd), class_names=("a", "b", "c")
    )


def test_the_factor_of_an_image_is_that_of_its_rarest_class() -> None:
    index, images = long_tail(), np.arange(100)
    assert class_fractions(index, images).tolist() == pytest.approx([0.99, 0.04, 0.0])
    factors = repeat_factors(index, images, 0.16)
    assert factors[:4].tolist() == pytest.approx([math.sqrt(0.16 / 0.04)] * 4)
    assert set(factors[4:].tolist()) == {1.0}


def test_an_epoch_stays_as_long_and_has_each_image_as_often_as_its_factor_says() -> None:
    factors = repeat_factors(long_tail(), np.arange(100), 0.16)
    counts = np.zeros((200, 100))
    for epoch in range(200):
        order = repeated_order(factors, 7, epoch)
        assert len(order) == 100
        counts[epoch] = np.bincount(order, minlength=100)
    expected = factors * 100 / factors.sum()
    assert (np.abs(counts - expected) < 1).all(), "rounded down or up"
    assert counts.mean(0) == pytest.approx(expected, abs=0.12)
    assert (repeated_order(factors, 7, 3) == repeated_order(factors, 7, 3)).all()
    assert (repeated_order(factors, 7, 3) != repeated_order(factors, 8, 3)).any()
    assert sorted(repeated_order(np.ones(50), 0, 0).tolist()) == list(range(50)), "without rare classes each image once"


def test_a_loader_repeats_goes_on_after_a_resume_and_refuses_another_threshold(tmp_path: Path) -> None:
    index = InMemoryIndex(tmp_path, 12)
    index.class_names = ("common", "rare")
    index.labels = np.zeros(int(index.offsets[-1]), np.int32)
    index.labels[index.offsets[5]] = 1
    index.crowd = np.zeros(len(index.labels), np.bool_)
    with make(index, repeat_thresh=0.75) as loader:
        batches = take(loader, 3)
        state = loader.state_dict()
        after = image_indices_of(take(loader, 9))
    images = image_indices_of(batches) + after
    assert images.count(5) >= 2 * max(images.count(n) for n in range(12) if n != 5), "sqrt(0.75 / (1 / 12)) = 3"
    with make(index, repeat_thresh=0.75) as loader:
        loader.load_state_dict(state)
        assert image_indices_of(take(loader, 9)) == after
    with make(index) as loader, pytest.raises(CheckpointError, match="repeat-thresh"):
        loader.load_state_dict(state)


def test_the_setting_has_bounds() -> None:
    from stoker.config.settings import check_config
    from stoker_watch.errors import ConfigError

    with pytest.raises(ConfigError, match="repeat-thresh"):
        check_config(Config().replace(repeat_thresh=2.0))
