"""Where the time of a real run went: known delays are charged to the phase that they were put into, nothing is left.

The truth is measured around the delayed call itself, by the same clock, so a busy machine changes both alike.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.config import Config, from_fields
from stoker.data.loader import Loader
from stoker.records import STEPS, StepWindow, read_lines, totals
from stoker.training import checkpoint, loop
from tests.drawn import draw

DELAYS = {"input_wait": 0.05, "eval": 1.5, "checkpoint": 0.4}


def delayed(
    spent: dict[str, float], phase: str, call: Callable[..., Any], *, by: float | None = None
) -> Callable[..., Any]:
    """`call` with the phase's delay before it (or `by` seconds); what both take is added to `spent`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        time.sleep(DELAYS[phase] if by is None else by)
        try:
            return call(*args, **kwargs)
        finally:
            spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - began

    return wrapper


def settings(data: Path) -> Config:
    return from_fields(
        {
            "data": str(data),
            "model": "retinanet_tiny_fpn",
            "canvas": (64, 64),
            "batch": 4,
            "for_": "60",
            "eval_every": "25",
            "checkpoint_every": "20",
            "precision": "fp32",
        }
    )


def test_known_delays_land_in_their_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = draw(tmp_path / "data")
    spent: dict[str, float] = {}
    next_batch = Loader.__next__
    slow_next = delayed(spent, "input_wait", next_batch)
    # only of training: evaluation has a loader of its own
    monkeypatch.setattr(Loader, "__next__", lambda self: (slow_next if self._samples.train else next_batch)(self))
    monkeypatch.setattr(loop, "detect", delayed(spent, "eval", loop.detect))
    for name in ("score_with_curves", "appraise"):  # the rest of an evaluation
        monkeypatch.setattr(loop, name, delayed(spent, "eval", getattr(loop, name), by=0.0))
    monkeypatch.setattr(checkpoint, "snapshot", delayed(spent, "checkpoint", checkpoint.snapshot))
    monkeypatch.setattr(checkpoint.Writer, "wait", delayed(spent, "checkpoint", checkpoint.Writer.wait, by=0.0))
    result = loop.train(settings(data), run=str(tmp_path / "run"))
    summed = totals(result.run)
    for phase, seconds in spent.items():
        assert seconds >= {"input_wait": 60, "eval": 3, "checkpoint": 3}[phase] * DELAYS[phase]
        assert summed.phases[phase] == pytest.approx(seconds, rel=0.05), phase

    windows = list(read_lines(result.run, STEPS, StepWindow))
    for window in windows:
        assert min(window.phases.values()) >= 0
        assert sum(window.phases.values()) == pytest.approx(window.wall_s, rel=1e-6)
    steady = [window for window in windows if window.steps]
    wall = sum(window.wall_s for window in steady)
    assert sum(window.phases.get("unattributed", 0.0) for window in steady) <= 0.03 * wall
    assert sum(window.steps for window in windows) == 60
    assert sum(window.pictures for window in windows) == 240


def test_a_slow_disk_is_no_loss_while_it_is_written_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One save in the middle takes a second to write; the training thread only waits for it at the next save."""
    data = draw(tmp_path / "data")
    spent: dict[str, float] = {}
    monkeypatch.setattr(checkpoint, "write_whole", delayed(spent, "checkpoint", checkpoint.write_whole))
    config = settings(data).replace(checkpoint_every="10", eval_every="0", for_="15")
    result = loop.train(config, run=str(tmp_path / "run"))
    middle = [w for w in read_lines(result.run, STEPS, StepWindow) if 10 <= w.step < 15]
    charged = sum(window.phases.get("checkpoint", 0.0) for window in middle)
    assert spent["checkpoint"] > 3 * DELAYS["checkpoint"]
    assert charged < DELAYS["checkpoint"]
