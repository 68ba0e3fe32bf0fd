"""Decisions of a learning-rate search: the ramp of a range test, its end, the grid around it, who goes on, who wins.

Pure functions of numbers; no I/O, no torch, no clock. A range test finds where training diverges, not what is best: it
suggests about 1e-3 where 1e-5 is best for a pretrained transformer. So its result only places the grid, and the
validation split decides.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SMOOTHING = 0.9
"""Decay of the mean of the losses, corrected for its start (Kingma & Ba 2015, section 3)."""
DIVERGED_RATIO = 4.0
"""A smoothed loss this many times the best one ends the ramp (Smith 2017, arXiv 1506.01186; the factor is fastai's)."""
HALF_DECADE = math.sqrt(10.0)
RUNGS = 3
"""Rounds of successive halving: 7, 4 and 2 learning rates, each round twice as long as the one before."""
MIN_AP = 0.01
"""A lower AP counts as 0: in the first steps it is chance, and the loss decides (heuristic; on the built-in data,
trainings of 664 steps of four small images had 0.005)."""
MAX_EXTENSIONS = 2
"""Learning rates that are added below or above a grid whose best one is at its edge."""


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
    finite = list(itertools.takewhile(math.isfinite, losses))
    if not finite:
        raise ValueError("no finite loss")
    means = smooth(finite)
    return lrs[means.index(min(means))] / 10


def grid(center: float) -> list[float]:
    """Seven learning rates in half-decades around `center`, ascending, of three digits."""
    return [_digits(center * HALF_DECADE**n) for n in range(-3, 4)]


def _digits(lr: float) -> float:
    return float(f"{lr:.3g}")


class Score(NamedTuple):
    """A learning rate after a rung of the sweep, on the validation split."""

    lr: float
    ap: float | None
    """None: it diverged."""
    loss: float
    """Mean of the last training losses; decides between equal AP, as that of the first short trainings, often 0."""


def rank(scores: Sequence[Score]) -> list[Score]:
    """The best first: AP, then loss; those that diverged last."""

    def key(score: Score) -> tuple[float, float]:
        is_alive = score.ap is not None and math.isfinite(score.loss)
        ap = score.ap if score.ap is not None and score.ap >= MIN_AP else 0.0
        return (-ap, score.loss) if is_alive else (math.inf, math.inf)

    return sorted(scores, key=key)


def survivors(scores: Sequence[Score]) -> list[float]:
    """The better half, rounded up, of those that did not diverge (successive halving, Jamieson & Talwalkar 2016)."""
    alive = [score for score in rank(scores) if score.ap is not None and math.isfinite(score.loss)]
    return [score.lr for score in alive[: -(-len(scores) // 2)]]


Done = Mapping[tuple[int, float], Score]
"""Round, from 0, and learning rate → score."""


def next_trial(center: float, done: Done) -> tuple[int, float] | None:
    """(round, learning rate) of the next training; None: the sweep has ended."""
    for number, lrs in enumerate(_rounds(center, done)):
        for lr in lrs:
            if (number, lr) not in done:
                return number, lr
    return None


def best_of(center: float, done: Done) -> Score | None:
    """The best of the last round with a result; None: all diverged."""
    best = None
    for number, lrs in enumerate(_rounds(center, done)):
        scores = [done[number, lr] for lr in lrs if (number, lr) in done]
        if scores and survivors(scores):
            best = rank(scores)[0]
    return best


def _rounds(center: float, done: Done) -> list[list[float]]:
    """The learning rates of each round, as far as they are known. The first is the grid, extended while its best is at
    its edge: a range test can be wrong by two decades."""
    lrs = grid(center)
    for _ in range(MAX_EXTENSIONS):
        if any((0, lr) not in done for lr in lrs):
            break
        best = rank([done[0, lr] for lr in lrs])[0]
        if best.ap is None or best.lr not in (lrs[0], lrs[-1]):
            break
        lrs = [_digits(lrs[0] / HALF_DECADE), *lrs] if best.lr == lrs[0] else [*lrs, _digits(lrs[-1] * HALF_DECADE)]
    rounds = [lrs]
    while len(rounds) < RUNGS and all((len(rounds) - 1, lr) in done for lr in rounds[-1]):
        going_on = survivors([done[len(rounds) - 1, lr] for lr in rounds[-1]])
        if len(going_on) < 2:
            break
        rounds.append(going_on)
    return rounds


START_S = 15.0
"""Seconds of a short training besides its steps: imports, the model, the evaluation; on two cores."""
MIN_STEPS = 20
"""Steps of the shortest training: fewer rank by the warm-up."""


def cost() -> tuple[int, int]:
    """(steps of a sweep, in lengths of a training of the first round; number of its trainings)."""
    count, length, trainings = len(grid(1.0)), 0, 0
    for number in range(RUNGS):
        length, trainings, count = length + count * 2**number, trainings + count, -(-count // 2)
    return length, trainings


def first_steps(step_s: float, budget_s: float, total: int | None) -> int:
    """Steps of the trainings of the first round, so that all rounds fit the budget; at most a quarter of the length, so
    that those of the last are as long as the run at most. Below MIN_STEPS: the budget is too short. step_s: seconds of
    a step; total: steps of the run, None: it has a time."""
    length, trainings = cost()
    fitting = int((budget_s - trainings * START_S) / (length * step_s))
    return fitting if total is None else min(fitting, max(MIN_STEPS, total // 2 ** (RUNGS - 1)))


def scale_lr(lr: float, batch_ratio: float, optimizer: str) -> float:
    """The learning rate at `batch_ratio` times the batch size: linear for sgd (Goyal et al. 2017), square root for
    adamw and muon (Malladi et al. 2022)."""
    return lr * (batch_ratio if optimizer == "sgd" else math.sqrt(batch_ratio))
