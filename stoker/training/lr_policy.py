"""Decisions of a learning-rate search: the ramp of a range test, its end, the grid around it, who goes on, who wins.

Pure functions of numbers; no I/O, no torch, no clock. A range test finds where training diverges, not what is best: it
suggests about 1e-3 where 1e-5 is best for a pretrained transformer. So its result only places the grid, and the
validation split decides.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

SMOOTHING = 0.9
"""Decay of the mean of the losses, corrected for its start (Kingma & Ba 2015, section 3)."""
DIVERGED_RATIO = 4.0
"""A smoothed loss this many times the best one ends the ramp (Smith 2017, arXiv 1506.01186; the factor is fastai's)."""
HALF_DECADE = math.sqrt(10.0)


def ramp(low: float, high: float, count: int) -> list[float]:
    """`count` (from 2) learning rates from `low` to `high` in equal ratios."""
    return [low * (high / low) ** (n / (count - 1)) for n in range(count)]


def smooth(losses: Sequence[float]) -> list[float]:
    """Bias-corrected exponential means of finite losses."""
    mean, means = 0.0, []
    for n, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        means.append(mean / (1 - SMOOTHING**n))
    return means


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether a ramp with these losses ends: the newest is not finite, or its mean is far above the lowest."""
    if not losses:
        return False
    if not math.isfinite(losses[-1]):
        return True
    means = smooth(losses)
    return means[-1] > DIVERGED_RATIO * min(means)


def grid_center(lrs: Sequence[float], losses: Sequence[float]) -> float:
    """A tenth of the learning rate with the lowest smoothed loss: the lowest loss is next to divergence (Smith 2017).
    Losses that are not finite end the list; ValueError without a finite one."""
    finite: list[float] = []
    for loss in losses:
        if not math.isfinite(loss):
            break
        finite.append(loss)
    if not finite:
        raise ValueError("no finite loss")
    means = smooth(finite)
    return lrs[means.index(min(means))] / 10


def grid(center: float, count: int = 7) -> list[float]:
    """`count` learning rates in half-decades around `center`, ascending."""
    return [center * HALF_DECADE ** (n - count // 2) for n in range(count)]


class Score(NamedTuple):
    """A learning rate after a rung of the sweep, on the validation split."""

    lr: float
    ap: float | None
    """None: it diverged."""
    loss: float
    """Decides between equal AP."""


def rank(scores: Sequence[Score]) -> list[Score]:
    """The best first: AP, then validation loss; those that diverged last."""
    def key(score: Score) -> tuple[float, float]:
        is_alive = score.ap is not None and math.isfinite(score.loss)
        return (-(score.ap or 0.0), score.loss) if is_alive else (math.inf, math.inf)

    return sorted(scores, key=key)


def survivors(scores: Sequence[Score]) -> list[float]:
    """The better half, rounded up, of those that did not diverge (successive halving, Jamieson & Talwalkar 2016)."""
    alive = [score for score in rank(scores) if score.ap is not None and math.isfinite(score.loss)]
    return [score.lr for score in alive[: -(-len(scores) // 2)]]


def scale_lr(lr: float, batch_ratio: float, optimizer: str) -> float:
    """The learning rate at `batch_ratio` times the batch size, by the rules of `defaults/derive.py`: linear for sgd
    (Goyal et al. 2017), square root for adamw (Malladi et al. 2022)."""
    return lr * (batch_ratio if optimizer == "sgd" else math.sqrt(batch_ratio))
