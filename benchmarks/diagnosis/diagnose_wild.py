"""Whether `stoker why` finds the right cause in programs on which its rules were not written.

    python -m benchmarks diagnose_wild [--only WORD …] [--healthy-only] [--stoker DIR] [--partial FILE] [--json FILE]
    python -m benchmarks diagnose_wild --read FOLDER [--only …] [--stoker DIR] [--json FILE]

Each job is a real program that knows nothing of stoker, run as `stoker watch -- python SCRIPT …` in a folder of its
own; then `stoker why RUN --json` is read. A job with a fault is right if its first finding above "info" (of all
findings, where none is above) is one that the job accepts, a cause or a line in the function of the fault; a healthy
job is right without a finding above "info". A job may write known.json {"lost_s": seconds} into its folder, by clocks
of its own: the lost device time of the accepted finding is compared with it. Where processes besides this benchmark
used the cores, `cpu_contention` is true and is passed over. The jobs were written without a look at the rules; after
fixes for what they found, they no longer say how well the rules do on jobs of others: new ones do. `--stoker DIR`
measures another checkout with the same jobs; with `--read` nothing runs, and its rules read the runs that `--keep` has
kept. Jobs that this machine does not permit, that lack a package, or that failed by themselves are n/a, with the
reason. Finished jobs are kept in a file (`--partial`) and not repeated.

To add a job: write a program into `wild/`, parameterized by its arguments or variables, with the parameters of the
fault among them and without a word of stoker, and add a `Job` (`wild/job.py`) to `JOBS` in `wild/jobs.py`. Faults from
outside (slow disks, servers, limits, neighbors, signals) are in `wild/around.py` and `diagnose_outside.py`. A fault of
a program has at least two jobs, each in another way. A job takes 20 to 35 s, of which loading the packages is a part;
some healthy ones 10 s, some 70 s. One that ends sooner, on a quicker machine, is run again with more epochs or steps.
`make docs` lists the ids of causes. Try one job with `--only WORDS --keep`, whose folder is then printed: it has
`job.log`, `run/` and `why.json`.
"""

import argparse
import ast
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.diagnosis import diagnose_outside as outside
from benchmarks.diagnosis.diagnose_score import NO_ANSWER, NONE, wilson
from benchmarks.diagnosis.wild.around import descendants, tree
from benchmarks.diagnosis.wild.job import HEALTHY, Job, place
from benchmarks.diagnosis.wild.jobs import JOBS
from benchmarks.processes import python_path
from benchmarks.report import Bar, Report, options, publish

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONTENTION = "cpu_contention"
DISTURBED_CORES = 0.3
"""Below, a job has the machine to itself: the neighbors of `around.busy_neighbors` are not counted."""
OUTCOME = "outcome.json"
"""In the folder of a kept job."""
MIN_S, AIM_S, PACKAGES_S = 18.0, 26.0, 6.0
"""Seconds of a job from which it is long enough for samples; those of one that is run again, longer; those that its
packages take to load."""
MAX_LONGER = 6
"""Times as many epochs or steps, at most, of a job that is run again."""
FIRST_GOAL, TWO_GOAL, HEALTHY_GOAL, LOSS_GOAL = 0.85, 0.95, 0.95, 0.15


@dataclass(frozen=True, kw_only=True)
class NamedCause:
    cause: str
    severity: str
    lost_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One job. findings: None if there is no reading; see reason."""

    program: str
    fault: str
    way: str
    accepted: tuple[str, ...]
    findings: tuple[NamedCause, ...] | None
    reason: str = ""
    known_s: float | None = None
    """The lost time by the job's own clocks."""
    exit_code: int | None = None
    took_s: float = 0.0
    others_cores: float | None = None
    """Cores that processes besides this benchmark used meanwhile."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.program, self.fault, self.way

    @property
    def disturbed(self) -> bool:
        return self.others_cores is not None and self.others_cores >= DISTURBED_CORES

    @property
    def named(self) -> tuple[NamedCause, ...]:
        """Findings above info. Of a job with a fault: all of them, where none is above. Without `cpu_contention` where
        other processes did use the cores and it is not the job's fault: it is true then, and no answer."""
        found = self.findings or ()
        if self.disturbed and CONTENTION not in self.accepted:
            found = tuple(finding for finding in found if finding.cause != CONTENTION)
        grave = tuple(finding for finding in found if finding.severity != "info")
        return grave if grave or self.fault == HEALTHY else found

    @property
    def first(self) -> str:
        return self.named[0].cause if self.named else NONE

    @property
    def right(self) -> bool:
        return not self.named if self.fault == HEALTHY else self.first in self.accepted

    @property
    def within_two(self) -> bool:
        return any(finding.cause in self.accepted for finding in self.named[:2])

    @property
    def loss_error(self) -> float | None:
        """Relative error of the lost time of the accepted finding: 0.1 is 10 % too much. None where the job has no
        clock of its own or no accepted finding; -1 if the finding has no lost time."""
        found = next((finding for finding in self.named if finding.cause in self.accepted), None)
        if self.known_s is None or found is None:
            return None
        return (found.lost_s or 0.0) / self.known_s - 1


def chosen_jobs(arguments: argparse.Namespace) -> dict[tuple[str, str, str], Job]:
    return {
        job.key: job
        for job in JOBS
        if (not arguments.healthy_only or job.fault == HEALTHY)
        and all(word.lower() in job.name.lower() for word in arguments.only or ())
    }


def interpreter(name: str) -> str:
    """Path of the Python that runs a job; a path is itself. Raises NotPermitted where it is not installed."""
    if os.sep in name:
        return name
    if name == "venv":
        return sys.executable
    if name == "peers":
        path = ROOT / ".peers" / "bin" / "python"
        if not path.exists():
            raise outside.NotPermitted("install the peers: make peers")
        return str(path)
    path = Path(os.environ.get("STOKER_ULTRALYTICS_PYTHON", ""))
    if not path.is_file():
        raise outside.NotPermitted("install ultralytics, and name its Python in STOKER_ULTRALYTICS_PYTHON")
    return str(path)


def cpu_seconds() -> tuple[float, float]:
    """CPU time of all processes; and of this one's children and theirs, ended or not."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    own_s = os.times().children_user + os.times().children_system
    for pid in descendants(tree(), os.getpid()):
        with contextlib.suppress(OSError):  # it ended
            words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            own_s += sum(map(int, words[11:15])) / tick
    return (user + nice + system + irq + soft) / tick, own_s


def lengthen(job: Job, factor: float) -> Job:
    """The job with so many times its epochs or steps; itself where it says no number of them."""
    times, words = min(MAX_LONGER, math.ceil(factor)), list(job.command)
    for index, word in enumerate(words[:-1]):
        if word in ("--epochs", "--steps") and words[index + 1].isdecimal():
            words[index + 1] = str(times * int(words[index + 1]))
    return replace(job, command=tuple(words))


class Bench:
    """Runs jobs in folders of their own below `base`, which has the data."""

    def __init__(self, base: Path, stoker: Path, *, keep: bool) -> None:
        self.base, self.stoker, self.keep = base, stoker, keep
        self._count = 0

    def outcome(self, job: Job) -> Outcome:
        """Of a job as it is; where it was too short on a quick machine, of one with more epochs or steps."""
        outcome = self._outcome(job)
        longer = lengthen(job, (AIM_S - PACKAGES_S) / max(1.0, outcome.took_s - PACKAGES_S))
        if outcome.reason or outcome.took_s >= MIN_S or job.exits != 0 or job.way == "short" or longer == job:
            return outcome
        again = self._outcome(longer)
        return again if again.findings is not None else outcome

    def _outcome(self, job: Job) -> Outcome:
        self._count += 1
        folder = self.base / f"job-{self._count:03d}"
        folder.mkdir()
        began = time.monotonic()
        read: dict[str, Any] = {"findings": None}
        busy_s, own_s = cpu_seconds()
        try:
            read = self._run(job, folder)
        except outside.NotPermitted as error:
            read["reason"] = str(error)
        except subprocess.TimeoutExpired as error:
            read["reason"] = f"it did not end within {error.timeout:.0f} s"
        except (subprocess.SubprocessError, json.JSONDecodeError, OSError, KeyError) as error:
            read["reason"] = f"{type(error).__name__}: {str(error)[-300:]}"
        if self.keep:
            print(f"{job.name}: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        took_s = time.monotonic() - began
        busy_after_s, own_after_s = cpu_seconds()
        read["others_cores"] = round(max(0.0, busy_after_s - busy_s - (own_after_s - own_s)) / took_s, 2)
        outcome = Outcome(
            program=job.program, fault=job.fault, way=job.way, accepted=job.accepted,
            took_s=round(took_s, 1), **read,
        )  # fmt: skip
        if self.keep:
            (folder / OUTCOME).write_text(json.dumps(asdict(outcome)))
        return outcome

    def read_again(self, kept: Outcome, folder: Path, accepted: tuple[str, ...]) -> Outcome:
        """A kept job by the rules of this checkout, and by what the job accepts now."""
        findings = None if kept.findings is None else self._why(folder / "run", folder)
        return replace(kept, findings=findings, accepted=accepted)

    def _run(self, job: Job, folder: Path) -> dict[str, Any]:
        run = folder / "run"
        with job.around(folder) as around:
            # what is kept may be recorded
            watch = ("benchmarks.diagnosis.watch_raw" if self.keep else "stoker", "watch", "--run-dir", str(run))
            command = [sys.executable, "-m", *watch, "--", interpreter(job.python)]
            command += self._words(job, folder, around.variables.get("FILE_SERVER", ""))
            variables = {
                **os.environ,
                "PYTHONPATH": python_path(self.stoker),
                "CUDA_VISIBLE_DEVICES": "",
            }
            variables |= {"STOKER_CACHE_DIR": str(folder / "cache")} | job.variables | around.variables
            if "PYTHONPATH" in job.variables:  # of the job, after that of `stoker watch`
                variables["PYTHONPATH"] = os.pathsep.join((python_path(self.stoker), job.variables["PYTHONPATH"]))
            with (folder / "job.log").open("wb") as output:
                process = subprocess.Popen(
                    [*around.before, *command], env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=output, start_new_session=True,
                )  # fmt: skip
                try:
                    if job.meanwhile is not None:
                        threading.Thread(target=job.meanwhile, args=(process.pid,), daemon=True).start()
                    code = self._wait(process, job)
                    findings = self._why(run, folder)
                finally:
                    for pid in (*descendants(tree(), process.pid), process.pid):
                        with contextlib.suppress(ProcessLookupError):  # it ended
                            os.kill(pid, signal.SIGKILL)
                    process.wait()
        last = (folder / "job.log").read_bytes().decode(errors="replace").strip()[-200:]
        if job.exits is not None and code != job.exits and job.read_after_s is None:
            return {"findings": None, "reason": f"exit code {code} instead of {job.exits}: {last}", "exit_code": code}
        known = folder / "known.json"
        known_s = float(json.loads(known.read_text())["lost_s"]) if known.exists() else None
        return {"findings": findings, "known_s": known_s, "exit_code": code}

    def _words(self, job: Job, folder: Path, server: str) -> list[str]:
        places = {"wild": str(HERE / "wild"), "folder": str(folder), "server": server}
        words = [word.format(**places) for word in job.command]
        return [str(HERE / "wild" / words[0]), *words[1:]] if words[0].endswith(".py") else words

    def _wait(self, process: "subprocess.Popen[bytes]", job: Job) -> int | None:
        """The exit code; None if the job still runs when it is read."""
        if job.read_after_s is None:
            return process.wait(job.limit_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(job.read_after_s)
        return None

    def _why(self, run: Path, folder: Path) -> tuple[NamedCause, ...]:
        done = subprocess.run(
            [sys.executable, "-m", "stoker", "why", str(run), "--json"],
            env={**os.environ, "PYTHONPATH": python_path(self.stoker)}, capture_output=True, text=True, timeout=60,
            cwd=folder,
        )  # fmt: skip
        (folder / "why.json").write_text(done.stdout or done.stderr)
        if done.returncode:  # this is a wrong answer too
            return (NamedCause(cause=NO_ANSWER, severity="critical"),)
        return named_causes(json.loads(done.stdout))


def named_causes(answer: dict[str, Any]) -> tuple[NamedCause, ...]:
    """The causes of all findings of `stoker why --json`."""
    return tuple(
        NamedCause(cause=cause_or_function(found), severity=found["severity"], lost_s=found.get("lost_device_s"))
        for found in answer["findings"]
    )


def cause_or_function(found: dict[str, Any]) -> str:
    """The id of a finding's cause; of a place in a program of `wild/`, `wild.job.place` of the function with its
    line."""
    file, _, line = found.get("place", "").rpartition(":")
    path = HERE / "wild" / Path(file).name
    if found["cause"] != "heavy_place" or not path.is_file() or not line.isdecimal():
        return str(found["cause"])
    names: list[str] = []
    inner: list[ast.AST] = [ast.parse(path.read_text())]
    while inner:
        node = inner.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= int(line) <= (node.end_lineno or 0):
            names.append(node.name)
        inner += ast.iter_child_nodes(node)
    return place(path.name, ".".join(names))


def finished(path: Path | None, asked: dict[tuple[str, str, str], Job]) -> list[Outcome]:
    """The last reading of each job in an interrupted benchmark, as far as it is asked for."""
    if path is None or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [msgspec.convert(json.loads(line), Outcome) for line in lines if line.endswith("}")]
    return [
        o
        for o in {o.key: o for o in found if o.findings is not None}.values()
        if o.key in asked and o.accepted == asked[o.key].accepted
    ]


def show(outcome: Outcome, count: int, of: int) -> None:
    verdict = "n/a   " if outcome.findings is None else "right " if outcome.right else "WRONG "
    if verdict == "WRONG " and outcome.within_two:
        verdict = "second"
    off = "" if outcome.loss_error is None else f", loss {100 * outcome.loss_error:+.0f} %"
    named = ", ".join(f"{f.cause}{' (info)' if f.severity == 'info' else ''}" for f in outcome.findings or ())
    print(
        f"{count}/{of} {verdict} {outcome.program}: {outcome.fault} ({outcome.way}): "
        f"{outcome.reason or named or NONE}{off} ({outcome.took_s:.0f} s"
        f"{'' if outcome.others_cores is None else f', others {outcome.others_cores:.1f} cores'})",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def share(name: str, right: int, count: int) -> dict[str, Any]:
    low, high = wilson(right, count)
    return {"what": name, "right": f"{right} of {count}", "share": right / count, "95 % from": low, "to": high}


def rows_of(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """A row for each program and fault, then one for each job that was not answered right."""
    rows = []
    for program, fault in dict.fromkeys(o.key[:2] for o in outcomes):
        of_cell = [o for o in outcomes if o.key[:2] == (program, fault)]
        made = [o for o in of_cell if o.findings is not None]
        row: dict[str, Any] = {"what": f"{program}: {fault}"}
        row["right"] = f"{sum(o.right for o in made)} of {len(made)}" if made else None
        if fault != HEALTHY and made:
            row["within two"] = f"{sum(o.within_two for o in made)} of {len(made)}"
        wrong = [f"{o.way}: {', '.join(f.cause for f in o.named[:2]) or NONE}" for o in made if not o.right]
        row["found instead"] = "; ".join(wrong) or "-"
        offs = [f"{100 * o.loss_error:+.0f} %" for o in made if o.loss_error is not None]
        row["loss off by"] = ", ".join(offs) or "-"
        reasons = [f"{o.way}: {o.reason}" for o in of_cell if o.findings is None]
        if reasons:
            row["n/a"] = "; ".join(reasons)
        rows.append(row)
    return rows


def confusion(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """A row for each fault: which causes were found first, and how often."""
    rows = []
    for fault in dict.fromkeys(o.fault for o in outcomes):
        made = [o for o in outcomes if o.fault == fault and o.findings is not None]
        if made:
            row = share(f"fault: {fault}", sum(o.right for o in made), len(made))
            found = Counter(o.first for o in made).most_common()
            rows.append(row | {"found first": ", ".join(f"{name} {count}" for name, count in found)})
    return rows


def conclude(outcomes: list[Outcome], what: str) -> Report:
    report = Report(what, 1, ("torch", "torchvision", "keras", "pytorch-lightning", "transformers", "stoker"))
    report.rows = rows_of(outcomes) + confusion(outcomes)
    disturbed = sum(o.disturbed for o in outcomes)
    what = f"jobs during which other processes used {DISTURBED_CORES} cores or more"
    report.rows.append({"what": what, "right": f"{disturbed} of {len(outcomes)}"})
    add_goals(report, outcomes)
    return report


def add_goals(report: Report, outcomes: list[Outcome], *, among: str = "", first_goal: float = FIRST_GOAL) -> None:
    """Appends the four shares, as rows and bars; among: the name of a part of the jobs, e.g. "held back: "."""
    made = [o for o in outcomes if o.findings is not None]
    faults, healthy = [o for o in made if o.fault != HEALTHY], [o for o in made if o.fault == HEALTHY]
    timed = [o for o in faults if o.known_s is not None]
    for name, right, count, goal in (
        ("first finding right", sum(o.right for o in faults), len(faults), first_goal),
        ("right within two", sum(o.within_two for o in faults), len(faults), TWO_GOAL),
        ("healthy without warning or critical", sum(o.right for o in healthy), len(healthy), HEALTHY_GOAL),
        ("lost time within 15 %", sum(loss_is_right(o) for o in timed), len(timed), 1.0),
    ):
        if count:
            report.rows.append(share(among + name, right, count))
            report.bars.append(Bar.at_least(f"{among}{name}, share", right / count, goal))


def loss_is_right(outcome: Outcome) -> bool:
    """False too where no accepted cause was found."""
    return outcome.loss_error is not None and abs(outcome.loss_error) <= LOSS_GOAL


def catalog_of(stoker: Path) -> str:
    program = (
        "try:\n    from stoker_watch.diagnosis.engine import catalog_hash\n"
        "except ImportError:\n    from stoker_watch.diagnosis.catalog import catalog_hash  # an older version\n"
        "print(catalog_hash())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": python_path(stoker)}, capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    return done.stdout.strip()


def read_kept(bench: Bench, jobs: dict[tuple[str, str, str], Job]) -> list[Outcome]:
    newest: dict[tuple[str, str, str], tuple[Outcome, Path]] = {}
    for path in sorted(bench.base.glob(f"job-*/{OUTCOME}")):
        kept = msgspec.convert(json.loads(path.read_text()), Outcome)
        if kept.key in jobs and (kept.findings is not None or kept.key not in newest):
            newest[kept.key] = kept, path.parent
    done: list[Outcome] = []
    for key, (kept, folder) in newest.items():
        done.append(bench.read_again(kept, folder, jobs[key].accepted))
        show(done[-1], len(done), len(jobs))
    return done


def run(arguments: argparse.Namespace) -> Report:
    stoker = arguments.stoker.resolve()
    done = (
        measure(arguments, chosen_jobs(arguments))
        if arguments.read is None
        else read_kept(Bench(arguments.read, stoker, keep=True), chosen_jobs(arguments))
    )
    return conclude(done, f"Causes named by `stoker why`, of programs of others; catalog {catalog_of(stoker)}")


def measure(
    arguments: argparse.Namespace, asked: dict[tuple[str, str, str], Job], bench_type: type[Bench] = Bench
) -> list[Outcome]:
    outside.own_mounts()
    partial = arguments.partial or (arguments.json.with_suffix(".partial.jsonl") if arguments.json else None)
    done = finished(partial, asked)
    folder = Path(tempfile.mkdtemp(prefix="stoker-wild-"))
    try:
        bench = bench_type(folder, arguments.stoker.resolve(), keep=arguments.keep)
        for job in [job for key, job in asked.items() if key not in {outcome.key for outcome in done}]:
            done.append(bench.outcome(job))
            show(done[-1], len(done), len(asked))
            if partial is not None:
                partial.parent.mkdir(parents=True, exist_ok=True)
                with partial.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(done[-1])) + "\n")
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    order = list(asked)
    done.sort(key=lambda outcome: order.index(outcome.key))
    return done


def parser(description: str | None = __doc__) -> argparse.ArgumentParser:
    made = options(description)
    made.add_argument("--only", nargs="+", metavar="WORD", help="jobs with all these words in PROGRAM: FAULT (WAY)")
    made.add_argument("--healthy-only", action="store_true")
    made.add_argument("--stoker", type=Path, default=ROOT, metavar="DIR", help="another checkout to measure")
    made.add_argument(
        "--partial", type=Path, metavar="FILE", help="finished jobs, to continue after an interruption; default: next "
        "to the result"
    )  # fmt: skip
    made.add_argument("--keep", action="store_true", help="keep the folders of the jobs")
    made.add_argument("--read", type=Path, metavar="FOLDER", help="of kept jobs, to be read instead of running any")
    return made


if __name__ == "__main__":
    publish(run, parser())
