"""`stoker search` of 20 real trainings by two workers, each killed with SIGKILL once, against an undisturbed one.

Tiny trainings of the built-in data, on the CPU. Each worker is killed while it has a trial that has been evaluated but
has not ended; `stoker search` starts it again. All trials of both searches are compared: states, settings, and the AP
of each evaluation. Bars: trials with different settings, trials that are the same in both, whether the best one is the
same, and the steps of a pruned trial over those of a full one.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import ROOT, child_environment
from benchmarks.report import Bar, Report, options, publish
from stoker.search.study import Study, TrialState, best_trials
from stoker_watch.runs.records import EVENTS, is_finished, read_lines
from stoker_watch.runs.schemas import Event

STEPS, SIDE, BATCH, WORKERS = 36, 32, 4, 2
SPACE = "lr = { low = 1e-4, high = 3e-2, log = true }\nhflip = { low = 0.0, high = 0.5 }\n"


def search(folder: Path, trials: int, kills: int) -> dict[str, Any]:
    """Runs a search, and kills each worker once, `kills` in all. Returns seconds and what was killed."""
    space = folder.with_suffix(".toml")
    space.write_text(SPACE)
    command = [
        sys.executable, "-m", "stoker", "search", "demo", "--space", str(space), "--trials", str(trials), "--parallel",
        str(WORKERS), "--steps", str(STEPS), "--image-size", str(SIDE), str(SIDE), "--batch-size", str(BATCH),
        "--workers", "1", "--device", "cpu", "--checkpoint-every", "4", "--seed", "7", "--run-dir", str(folder),
    ]  # fmt: skip
    environment = child_environment() | {"OMP_NUM_THREADS": "1"}
    start_s, killed = time.monotonic(), dict[str, int]()
    with folder.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(0.02)
            if len(killed) == kills:
                continue
            for worker in psutil.Process(process.pid).children():
                run = open_run(worker)
                if run is not None and worker.pid not in killed.values() and run.name not in killed:
                    if int(run.name) < 2 + 3 * len(killed):  # not both in the first round
                        continue
                    os.kill(worker.pid, signal.SIGKILL)
                    killed[run.name] = worker.pid
                    break
    if process.returncode:
        raise RuntimeError(f"the search ended with {process.returncode}, see {folder.with_suffix('.log')}")
    return {"s": time.monotonic() - start_s, "killed in": sorted(killed)}


def open_run(worker: psutil.Process) -> Path | None:
    """The run folder of the trial that a worker trains, if it was evaluated and goes on."""
    try:
        folders = {
            Path(file.path).parent for file in worker.open_files() if Path(file.path).parent.parent.name == "trials"
        }
    except psutil.Error:
        return None
    for run in folders:
        evaluated = any(event.kind == "evaluated" for event in read_lines(run, EVENTS, Event))
        if evaluated and not is_finished(run):
            return run
    return None


def results(folder: Path) -> list[tuple[Any, ...]]:
    return [
        (trial.number, trial.state.name, tuple(sorted(trial.params.items())), tuple(trial.intermediate_values.values()))
        for trial in Study(folder).trials()
    ]


def run(arguments: argparse.Namespace) -> Report:
    count = 6 if arguments.quick else 20
    report = Report(
        f"`stoker search`: {count} trials of {STEPS} steps, {WORKERS} workers", 1, ("stoker", "optuna", "torch")
    )
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        place = arguments.work or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        folders = {"undisturbed": place / "undisturbed", "killed": place / "killed"}
        for name, folder in folders.items():
            row = {"what": name, **search(folder, count, WORKERS if name == "killed" else 0)}
            trials = Study(folder).trials()
            steps = {state: [t.user_attrs["steps"] for t in trials if t.state == state] for state in TrialState}
            best = best_trials(Study(folder).spec, trials)
            row |= {
                "trials": len(trials), "distinct": len({str(sorted(t.params.items())) for t in trials}),
                "pruned": len(steps[TrialState.PRUNED]), "best": best[0].number, "AP": best[0].values[0],
                "most steps of a pruned one": max(steps[TrialState.PRUNED], default=0),
                "steps of a full one": min(steps[TrialState.COMPLETE]),
            }  # fmt: skip
            report.rows.append(row)
        one, two = (results(folder) for folder in folders.values())
    same = sum(a == b for a, b in zip(one, two, strict=False))
    first, second = report.rows
    report.bars = [
        Bar.at_least("workers killed", len(second["killed in"]), WORKERS),
        Bar.at_least("distinct trials of the killed search", second["distinct"], count),
        Bar.at_most("trials of the killed search", second["trials"], count),
        Bar.at_least("trials equal to those of the undisturbed one", same, count),
        Bar.at_most(
            "best of one and of the other, difference of their numbers", abs(first["best"] - second["best"]), 0
        ),
        Bar.at_most("steps, pruned / full", second["most steps of a pruned one"] / second["steps of a full one"], 0.5),
    ]
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--work", type=Path, help="keeps the studies in this new folder")
    return made


if __name__ == "__main__":
    publish(run, parser())
