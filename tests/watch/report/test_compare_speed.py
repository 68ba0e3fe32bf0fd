"""`stoker compare`: exit code 1 only for a regression."""

import io
import random
from pathlib import Path

import pytest

from stoker_watch.errors import UsageError
from stoker_watch.report.compare import check_speed, compare, print_comparison
from stoker_watch.runs.records import STEPS, RunFolder
from stoker_watch.runs.schemas import StepWindow


def write_run(
    path: Path, img_per_s: float, windows: int = 48, noise: float = 0.03, counts: str = "images", ranks: int = 1
) -> Path:
    """counts: what the windows have, `images`, `steps` of a tenth of them, or nothing."""
    path.mkdir()
    generator, folder = random.Random(str(path.name)), RunFolder(path, 1)
    for k in range(windows):
        images = round(1000 * img_per_s * (1 + generator.gauss(0, noise)) / 1000)
        phases = {"compute": 1.0} | ({"startup": 30.0} if k == 0 else {})
        steps = 1 if counts == "images" else images // 10 if counts == "steps" else 0
        folder.append(
            STEPS,
            StepWindow(t=float(k), attempt=1, step=k, window_steps=steps,
                       num_images=images if counts == "images" else 0, wall_s=sum(phases.values()), devices=1,
                       phases=phases, ranks=ranks),
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


def test_jobs_whose_images_are_not_counted_are_compared_by_their_steps(tmp_path: Path) -> None:
    base, slower = (write_run(tmp_path / name, speed, counts="steps") for name, speed in (("a", 1000), ("b", 800)))
    found = check_speed(base, slower, 0.05)
    assert (found.unit, found.is_regression) == ("steps", True)
    assert found.ratio == pytest.approx(0.8, rel=0.05)
    counted = check_speed(write_run(tmp_path / "c", 1000), write_run(tmp_path / "d", 1000), 0.05)
    assert counted.unit == "images"
    comparison = compare(base, slower)
    comparison.speed = found
    file = io.StringIO()
    print_comparison(comparison, file, width=400)
    assert "times the steps per second" in file.getvalue()
    assert "the batch size must be the same" in file.getvalue()
    with pytest.raises(UsageError, match="no speed to compare") as caught:
        check_speed(base, write_run(tmp_path / "uncounted", 1000, counts="nothing"), 0.05)
    assert "stoker_watch.measure" in str(caught.value.fix)


def test_the_images_of_all_ranks_count(tmp_path: Path) -> None:
    found = check_speed(write_run(tmp_path / "one", 1000), write_run(tmp_path / "four", 1000, ranks=4), 0.05)
    assert found.ratio == pytest.approx(4, rel=0.05)
