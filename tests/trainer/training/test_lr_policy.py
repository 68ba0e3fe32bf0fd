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
    assert (points[0], points[-1], len(points)) == (3.16e-6, 3.16e-3, 7)
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


def sweep(center, ap_of):
    """All trainings of a sweep, in order."""
    done, order = {}, []
    while (action := lr_policy.next_trial(center, done)) is not None:
        assert action not in done
        order.append(action)
        done[action] = Score(action[1], ap_of(action[1]), 1.0)
    return done, order


def peak(at):
    return lambda lr: 1 / (1 + abs(math.log10(lr / at)))


def test_a_sweep_halves_and_finds_the_best():
    done, order = sweep(1e-3, peak(3e-3))
    assert [sum(number == rung for rung, _ in order) for number in range(3)] == [7, 4, 2]
    best = lr_policy.best_of(1e-3, done)
    assert best is not None
    assert best.lr == 3.16e-3


def test_a_range_test_that_is_two_decades_off_is_corrected():
    done, _ = sweep(1e-3, peak(1e-5))
    best = lr_policy.best_of(1e-3, done)
    assert best is not None
    assert best.lr == pytest.approx(1e-5, rel=0.01)


def test_a_sweep_in_which_all_diverge_ends_after_its_first_round():
    done, order = sweep(1e-3, lambda _: None)
    assert len(order) == 7
    assert lr_policy.best_of(1e-3, done) is None


def test_the_last_round_fits_the_budget_and_the_length():
    length, trainings = lr_policy.cost()
    assert (length, trainings) == (7 + 4 * 2 + 2 * 4, 13)
    steps = lr_policy.first_steps(0.1, 600, None)
    assert length * steps * 0.1 + trainings * lr_policy.START_S == pytest.approx(600, abs=length * 0.1)
    assert 4 * lr_policy.first_steps(0.1, 6000, 400) == 400
    assert lr_policy.first_steps(10.0, 600, None) < lr_policy.MIN_STEPS


def test_an_ap_that_is_chance_leaves_the_decision_to_the_loss():
    assert lr_policy.rank([Score(1e-3, 0.005, 1.0), Score(1e-4, 0.001, 0.9)])[0].lr == 1e-4
