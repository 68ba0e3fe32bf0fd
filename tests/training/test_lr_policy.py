import math

import pytest

from stoker.training import lr_policy
from stoker.training.lr_policy import Score


def test_a_ramp_is_exponential():
    assert lr_policy.ramp(1e-6, 1e-1, 6) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])


def test_smoothing_keeps_a_constant_from_the_first_value_on():
    assert lr_policy.smooth([3.0] * 5) == pytest.approx([3.0] * 5)


def test_divergence_is_a_non_finite_loss_or_four_times_the_best_mean():
    assert not lr_policy.has_diverged([])
    assert lr_policy.has_diverged([1.0, math.nan])
    assert not lr_policy.has_diverged([1.0] * 20 + [5.0])  # one batch: its mean is 1.46 times the best
    assert lr_policy.has_diverged([1.0] * 20 + [50.0])


def test_the_grid_is_around_a_tenth_of_the_lowest_loss():
    lrs = lr_policy.ramp(1e-6, 1.0, 7)
    center = lr_policy.grid_center(lrs, [9.0, 5.0, 1.0, 0.1, 90.0, math.inf])
    assert center == pytest.approx(1e-4)
    points = lr_policy.grid(center)
    assert (points[0], points[-1], len(points)) == (pytest.approx(10**-5.5), pytest.approx(10**-2.5), 7)
    with pytest.raises(ValueError, match="no finite loss"):
        lr_policy.grid_center(lrs, [math.nan])


def test_ap_decides_then_the_loss_and_diverged_ones_never_go_on():
    scores = [Score(1e-3, None, math.nan), Score(1e-4, 0.2, 1.0), Score(1e-5, 0.2, 0.9), Score(1e-6, 0.1, 0.1)]
    assert [score.lr for score in lr_policy.rank(scores)] == [1e-5, 1e-4, 1e-6, 1e-3]
    assert lr_policy.survivors(scores) == [1e-5, 1e-4]
    assert lr_policy.survivors(scores[:1]) == []


def test_batch_size_rules():
    assert lr_policy.scale_lr(0.01, 4, "sgd") == pytest.approx(0.04)
    assert lr_policy.scale_lr(0.01, 4, "adamw") == pytest.approx(0.02)
