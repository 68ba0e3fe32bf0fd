"""`stoker compare`: exit code 1 only for a regression."""

import random
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.report.compare import check_speed
from stoker.runs.records import STEPS, RunFolder
from stoker.runs.schemas import StepWindow


def write_run(path: Path, img_per_s: float, windows: int = 48, noise: float = 0.03) -> Path:
    path.mkdir()
    generator, folder = random.Random(str(path.name)), RunFolder(path, 1)
    for k in range(windows):
        images = round(1000 * img_per_s * (1 + generator.gauss(0, noise)) / 1000)
        phases = {"compute": 1.0} | ({"startup": 30.0} if k == 0 else {})
        folder.append(
            STEPS,
            StepWindow(t=float(k), attempt=1, step=k, window_steps=1, num_images=images, wall_s=sum(phases.values()),
                       devices=1, phases=phases),
        )  # fmt: skip
    folder.close()
    return path


def test_only_an_interval_below_the_threshold_is_a_regression(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", 1000)
    for name, speed, expected in (("same", 1000, False), ("slower", 800, True), ("faster", 1300, False)):
        found = check_speed(base, write_run(tmp_path / name, speed), 0.05)
        assert found.is_regression is expected
        assert found.low <= found.ratio <= found.high
        assert found.ratio == pytest.approx(speed / 1000, rel=0.05)
    assert not check_speed(base, tmp_path / "slower", 0.3).is_regression
    noisy = write_run(tmp_path / "noisy", 900, windows=8, noise=0.4)
    assert not check_speed(base, noisy, 0.05).is_regression


def test_runs_that_are_too_short_and_other_thresholds_are_refused(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", 1000)
    with pytest.raises(UsageError, match="too short"):
        check_speed(base, write_run(tmp_path / "short", 1000, windows=5), 0.05)
    with pytest.raises(UsageError, match="not a fraction"):
        check_speed(base, base, 5)
