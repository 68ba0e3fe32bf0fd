"""Killed and resumed: the final weights are those of an uninterrupted run, bit for bit."""

import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from stoker_watch.runs.records import CONFIG, EVENTS, STEPS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from tests.drawn import draw, run_stoker, stoker

STEPS_IN_ALL = 80
FLAGS = [
    "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "4", "--steps", str(STEPS_IN_ALL),
    "--eval-every", "30", "--checkpoint-every", "6", "--scale-jitter-prob", "0.5", "--ema-decay", "0.9",
    "--precision", "fp32",
    "--hflip", "0.5", "--brightness", "0.2", "--contrast", "0.2", "--saturation", "0.2", "--hue", "0.05",
    "--mosaic", "0.4",
    "--workers", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = run_stoker("train", data, *FLAGS, "--run-dir", "whole", cwd=folder)
    assert code == 0, output
    return folder / "whole"


POLL_S = 0.002
"""Between two polls, so that polling does not take a core from the run."""


def wait_for(process: subprocess.Popen[str], run: Path, ready: str) -> None:
    """Returns when the run has come as far as `ready` says, or has ended by itself."""
    seen = sorted(run.glob("checkpoints/step-*"))
    while process.poll() is None:
        if ready == "saving" and list(run.glob("checkpoints/.step-*")):
            return
        if ready == "saved" and sorted(run.glob("checkpoints/step-*")) != seen:
            return
        time.sleep(POLL_S)


def assert_same_end(one: Path, two: Path) -> None:
    for name in ("final.safetensors", "best.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    scores = [
        {e.step: e.data["metrics"] for e in read_lines(run, EVENTS, Event) if e.kind == "evaluated"}
        for run in (one, two)
    ]
    assert scores[0] == scores[1]
    ends = [[e for e in read_lines(run, EVENTS, Event) if e.kind == "finished"] for run in (one, two)]
    assert ends[0][-1].data["metrics"] == ends[1][-1].data["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("moments", [["saved"], ["saving", "saved"]])
def test_sigkill(undisturbed: Path, data: Path, tmp_path: Path, moments: list[str]):
    run = tmp_path / "killed"
    for moment in moments:
        process = stoker("train", data, *FLAGS, "--run-dir", "killed", cwd=tmp_path)
        wait_for(process, run, moment)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    code, output = run_stoker("train", data, *FLAGS, "--run-dir", "killed", cwd=tmp_path)
    assert code == 0, output
    assert moments != ["saved"] or "continuing from step" in output
    assert_same_end(undisturbed, run)
    windows = list(read_lines(run, STEPS, StepWindow))
    assert max(window.attempt for window in windows) == len(moments) + 1


LONG = [*FLAGS, "--run-dir", "long"]
LONG[LONG.index(str(STEPS_IN_ALL))] = "300"
LONG[LONG.index("--checkpoint-every") + 1] = "20"
LONG[LONG.index("--eval-every") + 1] = "130"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))  # `make soak` draws more
def test_sigkill_at_random_moments(data: Path, tmp_path: Path, seed: int):
    """Five kills, each up to four seconds after training goes on, so in steps, saves and evaluations."""
    rng = random.Random(seed)
    (tmp_path / "whole").mkdir()
    code, output = run_stoker("train", data, *LONG, cwd=tmp_path / "whole")
    assert code == 0, output
    run, kills = tmp_path / "long", 0
    for attempt in range(1, 6):
        process = stoker("train", data, *LONG, cwd=tmp_path)
        while process.poll() is None and not steps_of(run, attempt):
            time.sleep(POLL_S)
        try:
            process.communicate(timeout=rng.uniform(0, 4))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
        else:
            break
    else:
        code, output = run_stoker("train", data, *LONG, cwd=tmp_path)
        assert code == 0, output  # also if the last kill came after the run's end
    assert kills
    assert_same_end(tmp_path / "whole" / "long", run)


def steps_of(run: Path, attempt: int) -> int:
    """Steps that an attempt has written down."""
    return sum(window.window_steps for window in read_lines(run, STEPS, StepWindow) if window.attempt == attempt)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_75(undisturbed: Path, data: Path, tmp_path: Path, number: signal.Signals):
    """Without --run-dir: the same command finds its unfinished run by itself, and a finished one starts a new run."""
    process = stoker("train", data, *FLAGS, cwd=tmp_path)
    run = tmp_path / "runs" / f"{data.name}-retinanet_tiny_fpn-1"
    wait_for(process, run, "saved")
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert f"Stopped by {number.name}" in output
    assert [e.kind for e in read_lines(run, EVENTS, Event)][-1] == "preempted"
    stopped_at = int(re.search(r"at step (\d+)", output)[1])  # type: ignore[index]
    assert (run / "checkpoints" / f"step-{stopped_at:08d}").is_dir()
    again = ["--resume", run] if number == signal.SIGINT else [data, *FLAGS]
    elsewhere = tmp_path / "elsewhere" if number == signal.SIGINT else tmp_path
    elsewhere.mkdir(exist_ok=True)
    code, output = run_stoker("train", *again, cwd=elsewhere)
    assert code == 0, output
    assert f"continuing from step {stopped_at}" in output
    assert_same_end(undisturbed, run)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [run.name]
    phases = {name for window in read_lines(run, STEPS, StepWindow) for name in window.phases}
    assert "recovery" not in phases


@pytest.mark.slow
def test_a_finished_run_is_not_continued(undisturbed: Path, data: Path):
    """Exit code 0 for a scheduler that starts the same command again; 2 if something else is asked for."""
    before = (undisturbed / EVENTS).read_bytes()
    for again in ((data, *FLAGS, "--run-dir", "whole"), ("--resume", "whole")):
        code, output = run_stoker("train", *again, cwd=undisturbed.parent)
        assert code == 0, output
        assert "The run is finished: nothing is left to do." in output
    code, output = run_stoker("train", data, *FLAGS, "--lr", "0.5", "--run-dir", "whole", cwd=undisturbed.parent)
    assert code == 2
    assert "The run is finished, with other settings." in output
    assert "now it is" in output
    assert (undisturbed / EVENTS).read_bytes() == before


@pytest.mark.slow
def test_a_finished_run_is_extended(undisturbed: Path, tmp_path: Path):
    """Its schedule begins again for what is added; a kill in it changes nothing; the first part stays as it was."""
    whole, killed, longer = tmp_path / "whole", tmp_path / "killed", str(STEPS_IN_ALL + 30)
    for run in (whole, killed):
        shutil.copytree(undisturbed, run)
    code, output = run_stoker("train", "--resume", "whole", "--steps", longer, cwd=tmp_path)
    assert code == 0, output
    assert f"extended from --steps {STEPS_IN_ALL} to --steps {longer}, from step {STEPS_IN_ALL} on" in output
    windows = [window for window in read_lines(whole, STEPS, StepWindow) if window.window_steps]
    before, after = ([w for w in windows if w.attempt == attempt] for attempt in (1, 2))
    assert before == [window for window in read_lines(undisturbed, STEPS, StepWindow) if window.window_steps]
    assert after[-1].step == STEPS_IN_ALL + 30
    rates = [window.lr for window in after if window.lr is not None]
    assert before[-1].lr < 0.2 * max(rates)  # it begins where a schedule ends, rises, and falls again
    assert rates[0] < 0.2 * max(rates)
    assert rates[-1] < 0.2 * max(rates)
    aps = [event.step for event in read_lines(whole, EVENTS, Event) if event.kind == "evaluated"]
    assert aps == sorted(set(aps))
    assert aps[-1] == STEPS_IN_ALL + 30

    with stoker("train", "--resume", "killed", "--steps", longer, cwd=tmp_path) as process:
        wait_for(process, killed, "saved")
        process.kill()
    code, output = run_stoker("train", "--resume", "killed", "--steps", longer, cwd=tmp_path)  # the same command again
    assert code == 0, output
    assert_same_end(whole, killed)

    between = tmp_path / "between"  # killed after its new length was written, and before the event
    shutil.copytree(undisturbed, between)
    written = (between / CONFIG).read_text()
    changed = written.replace(f'max_duration = "{STEPS_IN_ALL}"', f'max_duration = "{longer}"')
    assert changed != written
    (between / CONFIG).write_text(changed)
    code, output = run_stoker("train", "--resume", "between", "--steps", longer, "--dry-run", cwd=tmp_path)
    assert code == 0, output
    assert "continues" in output

    for flags, words in (
        (["--steps", longer], "The run is finished: nothing is left to do."),
        (["--epochs", "1"], "epochs"),
        (["--steps", "200", "--batch-size", "2"], "--batch-size 2"),
    ):
        code, output = run_stoker("train", "--resume", "whole", *flags, cwd=tmp_path)
        assert code == (0 if flags[-1] == longer else 2), output
        assert words in output


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_the_result(undisturbed: Path, data: Path, tmp_path: Path):
    code, output = run_stoker("train", data, *FLAGS[:-2], "--workers", "1", "--run-dir", "one", cwd=tmp_path)
    assert code == 0, output
    assert_same_end(undisturbed, tmp_path / "one")
