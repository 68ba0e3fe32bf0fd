"""Whether `stoker why` finds the right cause: real jobs on the CPU with one injected fault each, and healthy jobs.

    python -m benchmarks diagnose [--quick] [--seed N] [--only CAUSE …] [--kinds KIND …] [--runs N] [--json FILE]

A cell is a fault at one of two strengths; its runs alternate over all the kinds of jobs that can have it. The seed,
which is printed, draws the size of the fault of each run. A run is correct if its first finding above "info" is one
that the cell accepts; a healthy run is correct without one. If the injector knows how much time the fault took, the
lost time of the finding is compared with it. Cells that this machine does not permit are n/a, with the reason. Finished
runs are kept in a file (`--partial`) next to the result: the same command continues there with the same seed, as long
as the catalog is the same.

The faults are in `diagnose_causes.py` and `diagnose_plans.py`, their code in `diagnose_inside.py`,
`diagnose_outside.py` and `diagnose_driver.py`, the jobs in `diagnose_job.py`, `diagnose_keras.py` and
`diagnose_simulated.py`, the counting in `diagnose_score.py`. Jobs that leave a core idle run two at a time, the others
alone, so that no job disturbs another.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np

from benchmarks.diagnosis import diagnose_outside as outside
from benchmarks.diagnosis.diagnose_causes import CAUSES, KINDS, Cause
from benchmarks.diagnosis.diagnose_data import data_set, draw_all
from benchmarks.diagnosis.diagnose_plans import BATCH, Case, Machine, Plan
from benchmarks.diagnosis.diagnose_score import NO_ANSWER, NONE, Outcome, cells, confusion, fraction_correct, wilson
from benchmarks.processes import python_path
from benchmarks.report import Bar, Report, options, publish
from stoker_watch.diagnosis.engine import catalog_hash
from stoker_watch.diagnosis.reader import read_run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS, QUICK_RUNS = 3, 2
"""Runs of each fault at each strength, over the kinds of jobs in turn; every kind has at least one in the benchmark."""
HEALTHY_RUNS = 6
"""Runs of each kind: the goal of healthy runs needs more than three."""
SECONDS = 7.0
WEAK_TIMES = 2.5
"""Factor of the length of jobs with a weak fault of known seconds: it loses 2 s or more, below which several rules are
silent (`min_duration_s` in causes.toml)."""
TIMEOUT_S = 90.0
SCRIPTS = {"measure": "diagnose_job.py", "watch": "diagnose_job.py", "keras": "diagnose_keras.py",
           "simulated": "diagnose_simulated.py"}  # fmt: skip
QUICK = ("healthy", "slow_storage", "slow_decode", "python_bound", "evaluation", "quota", "memory_kill", "small_shm")
STRONG_GOAL, WEAK_GOAL, HEALTHY_GOAL, LOSS_GOAL = 0.90, 0.75, 0.95, 0.15


class Task(msgspec.Struct, frozen=True):
    cause: str
    strength: str
    kind: str
    run: int


def tasks(arguments: argparse.Namespace) -> list[Task]:
    """All runs, in an order that the seed draws."""
    names = arguments.only or (QUICK if arguments.quick else CAUSES)
    strengths = arguments.strengths or (("strong",) if arguments.quick else ("weak", "strong"))
    found = []
    for name in names:
        kinds = [kind for kind in CAUSES[name].kinds if kind in arguments.kinds]
        for strength in strengths if name != "healthy" else ("",):
            asked = enumerate(kinds_of_runs(name, strength, kinds, arguments)) if kinds else ()
            found += [Task(name, strength, kind, run) for run, kind in asked]
    random.Random(f"order {arguments.seed}").shuffle(found)
    return found


def kinds_of_runs(name: str, strength: str, kinds: list[str], arguments: argparse.Namespace) -> list[str]:
    """The kind of each run of a cell: all kinds in turn, starting with one that the seed draws; with `--runs`, so many
    of each."""
    if arguments.runs:
        return kinds * arguments.runs
    if name == "healthy":
        return kinds * (1 if arguments.quick else HEALTHY_RUNS)
    first = random.Random(f"kinds {arguments.seed} {name} {strength}").randrange(len(kinds))
    count = QUICK_RUNS if arguments.quick else max(RUNS, len(kinds))
    return [kinds[(first + run) % len(kinds)] for run in range(count)]


def level_of(task: Task, seed: int) -> float:
    low, high = CAUSES[task.cause].strong if task.strength == "strong" else CAUSES[task.cause].weak
    return random.Random(f"{seed}/{task.cause}/{task.strength}/{task.kind}/{task.run}").uniform(low, high)


class Bench:
    """Runs tasks in folders of their own. base: the folder with the generated data."""

    def __init__(self, base: Path, arguments: argparse.Namespace) -> None:
        self.base, self.arguments = base, arguments
        self._lock = threading.Lock()
        self._count = 0
        self.machine = Machine()

    def calibrate(self) -> None:
        """Measures the time of a step, an evaluation and a pixel on this machine, for faults of a given size."""
        encoded = data_set(self.base, "png600") / "train" / "train-0.png"
        pixels = np.fromfile(encoded, np.uint8)
        took_s = min(timeit.repeat(lambda: cv2.imdecode(pixels, cv2.IMREAD_COLOR), number=10, repeat=5))  # undisturbed
        decode_s = took_s / 10 / 600**2
        folder = self.base / "calibration"
        folder.mkdir()
        plan = Plan(("--eval-every", "40"), data="long_val", stretch=1.5)
        self._run(CAUSES["healthy"], "stoker", plan, folder, self.arguments.seconds)
        sums = read_run(folder / "run").totals
        sizes = [path.stat().st_size for path in (self.base / "bucket" / "train").glob("*.jpg")]
        evaluations = -(-sums.steps // 40)
        self.machine = Machine(
            step_s=sums.phases["compute"] / sums.steps,
            decode_s=decode_s,
            evaluation_s=sums.phases["eval"] / evaluations,
            image_bytes=sum(sizes) / len(sizes),
        )
        print(self.machine, file=sys.stderr)

    def outcome(self, task: Task) -> Outcome:
        cause, level = CAUSES[task.cause], level_of(task, self.arguments.seed)
        with self._lock:
            self._count += 1
            folder = self.base / f"{self._count:04d}-{task.cause}-{task.strength}-{task.kind}-{task.run}"
        folder.mkdir()
        began = time.monotonic()
        told: dict[str, Any] = {
            "cause": task.cause, "strength": task.strength, "kind": task.kind, "run": task.run, "level": level,
            "accepts": tuple(sorted(cause.accepts)),
        }  # fmt: skip
        try:
            seed = random.Random(f"{self.arguments.seed}/{task}").randrange(2**32)
            case = Case(task.kind, level, task.strength == "strong", folder, self.machine, seed)
            plan = cause.plan(case)
            times = WEAK_TIMES if cause.known and task.strength == "weak" else 1.0
            told |= self._run(cause, task.kind, plan, folder, times * self.arguments.seconds)
        except outside.NotPermitted as error:
            told |= {"named": None, "reason": str(error)}
        except (subprocess.SubprocessError, json.JSONDecodeError, OSError, KeyError) as error:
            told |= {"named": None, "reason": f"{type(error).__name__}: {str(error)[-300:]}"}
        if not self.arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
        return Outcome(**told, took_s=round(time.monotonic() - began, 2))

    def _run(self, cause: Cause, kind: str, plan: Plan, folder: Path, seconds: float) -> dict[str, Any]:
        run, log = folder / "run", folder / "job"
        with plan.around() as around:
            command = self._command(kind, plan, max(cause.least_s, seconds), run, log)
            variables = {
                **os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", "PYTHONPATH": python_path(ROOT),
                "STOKER_CACHE_DIR": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "torch",
            }  # fmt: skip
            if around.variables.get("NVML_STUB"):
                del variables["CUDA_VISIBLE_DEVICES"]
            variables |= plan.variables | around.variables
            with (folder / "job.log").open("wb") as output:
                job = subprocess.Popen(
                    [*around.before, *command], env=variables, cwd=folder, stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
                try:
                    code = self._wait(job, plan, folder / "job.0.json")
                    findings = self._why(run)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
            facts = around.facts() if around.facts is not None else {}
            injected_s = around.injected_s() if around.injected_s is not None else None
        for rank, before in ((0, ""), (1, "rank 1 ")):
            log = folder / f"job.{rank}.json"
            if log.exists():
                facts |= {before + name: value for name, value in json.loads(log.read_text()).items()}
        if injected_s is None:
            injected_s = known_s(cause.name, facts)
        ignored = self.arguments.ignore
        grave = [found for found in findings if found["severity"] != "info" and found["cause"] not in ignored]
        return {
            "named": cause.name_of(grave[0]) if grave else NONE,
            "named_s": grave[0].get("lost_device_s") if grave else None,
            "others": tuple(finding["cause"] for finding in grave[1:]),
            "injected_s": injected_s if cause.known and kind != "stoker" else None,
            "exit_code": code,
            "facts": facts,
        }

    def _command(self, kind: str, plan: Plan, seconds: float, run: Path, log: Path) -> list[str]:
        python = sys.executable
        if kind == "stoker":
            data = plan.data
            if not data.startswith("gs://"):
                with self._lock:
                    data = str(data_set(self.base, data))
            steps = max(30, round(seconds / self.machine.step_s / plan.stretch))
            return [
                python, "-m", "stoker", "train", data, "--run-dir", str(run), "--model", "retinanet_tiny_fpn",
                "--image-size", "96", "96", "--no-compile", "--steps", str(steps),
                *defaults(plan.options, ("--batch-size", str(BATCH)), ("--eval-every", "0")),
                *defaults(plan.options, ("--checkpoint-every", "0")),
                *plan.options,
            ]  # fmt: skip
        script = HERE / SCRIPTS[kind]
        job = [python, str(script), "--data", str(self.base / "images"), "--log", str(log), "--seconds", str(seconds)]
        job += plan.options
        if kind == "measure":
            return [*job, "--measure", str(run)]
        return [python, "-m", "stoker", "watch", "--run-dir", str(run), "--", *job]

    def _wait(self, job: "subprocess.Popen[bytes]", plan: Plan, log: Path) -> int | None:
        """The exit code; None if the job is still alive. log: the file in which it records its steps."""
        if plan.hang_s is None:
            return job.wait(TIMEOUT_S)
        ends = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return job.wait(0.5)
            if log.exists() and time.time() - log.stat().st_mtime > plan.hang_s:
                break
        return None

    def _why(self, run: Path) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "stoker", "why", str(run), "--json"],
            env={**os.environ, "PYTHONPATH": python_path(ROOT)}, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        if done.returncode:  # this is a wrong answer too
            return [{"cause": NO_ANSWER, "severity": "critical", "title": done.stderr.strip()[-300:]}]
        found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
        return found


def known_s(cause: str, facts: dict[str, float]) -> float | None:
    """The time of the fault by the job's own clocks."""
    if cause in ("one_loader", "slow_decode"):
        return facts.get("waited_s")
    if cause == "slow_link":
        return facts["comm_s"] + facts["rank 1 comm_s"]
    if cause == "straggler":
        return 2 * facts["rank 1 injected_s"]  # of both ranks: the slow one trains as little meanwhile
    return facts.get("injected_s")


def defaults(given: tuple[str, ...], *pairs: tuple[str, str]) -> list[str]:
    return [word for pair in pairs if pair[0] not in given for word in pair]


def rests(task: Task) -> bool:
    """Whether the job leaves most of a core idle."""
    return CAUSES[task.cause].rests and (task.strength == "strong" or task.kind == "simulated")


def run_all(bench: Bench, todo: list[Task], keep: Path | None) -> list[Outcome]:
    """One after the other; two at a time of those that leave a core idle."""
    done: list[Outcome] = []
    waiting, running = list(todo), dict[Future[Outcome], bool]()
    with ThreadPoolExecutor(2) as pool:
        while waiting or running:
            fits = next((task for task in waiting if not running or (rests(task) and all(running.values()))), None)
            if fits is not None and len(running) < 2:
                waiting.remove(fits)
                running[pool.submit(bench.outcome, fits)] = rests(fits)
                continue
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                outcome = future.result()
                done.append(outcome)
                if keep is not None:
                    with keep.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(outcome.as_dict()) + "\n")
                show(outcome, len(done), len(todo))
    return done


def show(outcome: Outcome, count: int, of: int) -> None:
    verdict = "n/a  " if outcome.named is None else "right" if outcome.correct else "WRONG"
    off = "" if outcome.loss_error is None else f", {100 * outcome.loss_error:+.0f} %"
    named = outcome.reason if outcome.named is None else ", ".join((outcome.named, *outcome.others))
    print(
        f"{count}/{of} {verdict} {outcome.cause} {outcome.strength} {outcome.kind} #{outcome.run} "
        f"level {outcome.level:.3g}: {named}{off} ({outcome.took_s:.0f} s)",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def seed_of(asked: int | None, path: Path | None, mark: dict[str, Any]) -> int:
    """The requested seed; else that of the partial result; else the time."""
    if asked is not None:
        return asked
    if path is not None and path.exists():
        first = json.loads(path.read_text(encoding="utf-8").split("\n", 1)[0] or "{}")
        if {name: value for name, value in first.items() if name != "seed"} == mark:
            return int(first["seed"])
    return int(time.time())


def before(path: Path | None, mark: dict[str, Any], asked: list[Task]) -> list[Outcome]:
    """What an interrupted benchmark of the same seed and catalog has done; else starts the file again."""
    if path is None:
        return []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if not lines or json.loads(lines[0]) != mark:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(mark) + "\n", encoding="utf-8")
        return []
    found = [msgspec.convert(json.loads(line), Outcome) for line in lines[1:] if line.endswith("}")]
    wanted = set(asked)
    return [o for o in found if Task(o.cause, o.strength, o.kind, o.run) in wanted]


def run(arguments: argparse.Namespace) -> Report:
    outside.own_mounts()
    partial = arguments.partial or (arguments.json.with_suffix(".partial.jsonl") if arguments.json else None)
    mark = {"catalog": catalog_hash(), "seconds": arguments.seconds, "ignored": list(arguments.ignore)}
    mark["seed"] = arguments.seed = seed_of(arguments.seed, partial, mark)
    print(f"seed {arguments.seed}; catalog {mark['catalog']}", file=sys.stderr)
    asked = tasks(arguments)
    done = before(partial, mark, asked)
    finished = {Task(o.cause, o.strength, o.kind, o.run) for o in done}
    folder = Path(tempfile.mkdtemp(prefix="stoker-diagnose-"))
    try:
        draw_all(folder)
        bench = Bench(folder, arguments)
        todo = [task for task in asked if task not in finished]
        if any(task.kind == "stoker" for task in todo):
            bench.calibrate()
        done += run_all(bench, todo, partial)
    finally:
        if arguments.keep:
            print(f"kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if partial is not None and arguments.partial is None:
        partial.unlink()
    return conclude(done, mark, arguments)


def conclude(done: list[Outcome], mark: dict[str, Any], arguments: argparse.Namespace) -> Report:
    done = sorted(done, key=lambda o: (list(CAUSES).index(o.cause), o.strength, KINDS.index(o.kind), o.run))
    what = f"Causes named by `stoker why`, of faults injected; seed {mark['seed']}, catalog {mark['catalog']}"
    report = Report(what, arguments.runs or (QUICK_RUNS if arguments.quick else RUNS), ("torch", "keras", "stoker"))
    report.rows = cells(done) + confusion(done)
    for name, goal, chosen in (
        ("strong: the right cause first, share", STRONG_GOAL, [o for o in done if o.strength == "strong"]),
        ("weak: the right cause first, share", WEAK_GOAL, [o for o in done if o.strength == "weak"]),
        ("healthy: no finding above info, share", HEALTHY_GOAL, [o for o in done if o.cause == "healthy"]),
    ):
        right, count = fraction_correct(chosen)
        if count:
            low, high = wilson(right, count)
            report.rows.append({"what": name, "right": f"{right} of {count}", "share": right / count,
                                "95 % from": low, "to": high})  # fmt: skip
            report.bars.append(Bar.at_least(name, right / count, goal))
    offs = sorted(abs(row["loss named, off by"]) for row in report.rows if "loss named, off by" in row)
    if offs:
        name = "cells whose named loss is within 15 % of the injected, share"
        report.bars.append(Bar.at_least(name, sum(off <= LOSS_GOAL for off in offs) / len(offs), 1.0))
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument(
        "--seed", type=int, help="draws levels and order; default: that of a partial result, else the time"
    )
    made.add_argument("--only", nargs="+", choices=list(CAUSES), metavar="CAUSE", help=", ".join(CAUSES))
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    made.add_argument("--strengths", nargs="+", choices=("weak", "strong"))
    made.add_argument("--runs", type=int, help="of each cell in each kind of job")
    made.add_argument("--seconds", type=float, default=SECONDS, help="of a job's loop")
    made.add_argument("--partial", type=Path, metavar="FILE", help="finished runs, to continue after an interruption")
    made.add_argument(
        "--ignore", nargs="+", default=(), metavar="ID", help="findings that do not count; not for publishing"
    )
    made.add_argument("--keep", action="store_true", help="keep the folders of the runs")
    return made


if __name__ == "__main__":
    publish(run, parser())
