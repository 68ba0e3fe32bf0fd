"""`stoker tune` from a bad and from a good configuration, with data behind a slow link, on real data sets, on the CPU.

    python -m benchmarks tune --work FOLDER [--data bccd cars] [--only bad good ap] [--json FILE]

Bad but working: batch 2, one worker, no cache, an evaluation every 50 steps, large images, and a server that sends
LINK. `bad`: one `stoker tune` of ten minutes from there; then trainings of each configuration that it kept on its way,
of the first, and of one tuned by hand, in turn. Images per second are those of `stoker train` (`images_per_s`),
with what evaluations take at the interval of the configuration (`images_per_s`): nothing of `tune` measures them.
`good`: `stoker tune` from the configuration tuned by hand, with local images, again and again; a gain that it reports
and trainings do not confirm is false. `ap`: both configurations trained on the same number of images, which are local,
three seeds.

All is done in FOLDER and continues there: what has ended is not repeated, and --only does a part of it. The report is
of what is there.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.loading.object_server import running_server
from benchmarks.processes import ROOT, child_environment
from benchmarks.report import Bar, Report, options, publish
from stoker.config.settings import from_fields, from_toml, to_toml
from stoker.tuning.policy import restore_types
from stoker_watch.durations import parse_duration
from stoker_watch.runs.records import EVENTS, PROBES, STEPS, is_finished, read_lines
from stoker_watch.runs.schemas import Event, Probe, StepWindow

LINK = ("--latency-ms", "30", "--mb-per-s", "0.1")
SETS = {"bccd": ("bccd/BCCD", (480, 640)), "cars": ("cars", (320, 320))}
"""Name → folder of the data sets, and the image size: that of the images."""
BAD = {"batch_size": 2, "workers": 1, "worker_processes": 0, "cache": "none", "eval_every": "50", "precision": "fp32"}
HAND = {"batch_size": 8, "workers": 4, "worker_processes": 0, "cache": "ram", "eval_every": "4ep"}
"""By someone who knows the machine: the recipe's batch, two threads for each core, five evaluations."""
COMMON = {"model": "ember_n", "max_duration": "20ep", "device": "cpu"}
BUDGET = "10min"
MAX_FALSE = 1
"""False gains of ten tunings from a good configuration."""


class Bench:
    """A data set behind the server of its port."""

    def __init__(self, name: str, work: Path, port: int, quick: bool) -> None:
        self.name, self.quick = name, quick
        self.folder = work / name
        self.folder.mkdir(parents=True, exist_ok=True)
        height, width = (64, 64) if quick else SETS[name][1]
        self.common = COMMON | {"data": "s3://bucket", "image_size": (height, width)}
        self.environment = child_environment() | {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "key",
            "AWS_REGION": "us-east-1", "NO_PROXY": "127.0.0.1", "STOKER_CACHE_DIR": str(work / "cache"),
        }  # fmt: skip

    def write(self, name: str, settings: Mapping[str, Any]) -> Path:
        """A file of settings."""
        path = self.folder / f"{name}.toml"
        path.write_text(to_toml(from_fields(dict(settings)), {}))
        return path

    def stoker(self, *words: str) -> str:
        command = [sys.executable, "-m", "stoker", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-600:]}")
        return done.stdout

    def tune(self, start: Path, out: str) -> dict[str, Any]:
        """The result of a tuning of the data of these settings, which continues."""
        result = self.folder / f"{out}.json"
        if not result.exists():
            settings = read_settings(start)
            data = settings.pop("data")
            config = self.write(f"{out}-start", settings)
            budget = "90s" if self.quick else BUDGET
            text = self.stoker("tune", data, "--config", str(config), "--budget", budget,
                               "--out", str(self.folder / out), "--json")  # fmt: skip
            result.write_text(text)
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def train(self, config: Path, name: str, epochs: int, seed: int = 0) -> Path:
        """The run folder of a training with these settings."""
        run = self.folder / "runs" / name
        if not is_finished(run):
            self.stoker("train", "--config", str(config), "--epochs", str(epochs), "--seed", str(seed),
                        "--run-dir", str(run), "--patience", "0")  # fmt: skip
        return run

    def images_per_s(self, config: Path, name: str) -> float:
        """Of the last two thirds of a training, with the time of an evaluation over the images between two of them:
        three epochs where a cache is filled in the first one, else one."""
        epochs = 1 if read_settings(config)["cache"] == "none" else 3
        run = self.train(config, name, epochs)
        settings = read_settings(run / "config.toml")
        batch = settings["batch_size"]
        windows = list(read_lines(run, STEPS, StepWindow))
        last = max(window.step for window in windows)
        later = [window for window in windows if window.window_steps and window.step > last / 3 + window.window_steps]
        busy_s = sum(window.wall_s - window.phases.get("eval", 0.0) for window in later)
        evaluations = sum(event.kind == "evaluated" for event in read_lines(run, EVENTS, Event))
        evaluation_s = sum(window.phases.get("eval", 0.0) for window in windows) / evaluations
        every = parse_duration(read_settings(config)["eval_every"], "eval-every")
        between = every.value * (last * batch / epochs if every.unit == "epochs" else batch)
        return 1 / (busy_s / (batch * sum(window.window_steps for window in later)) + evaluation_s / between)


def read_settings(path: Path) -> dict[str, Any]:
    return from_toml(path)[0].set_fields()


def stages(bench: Bench, out: str) -> dict[str, Path]:
    """Name of each configuration of a tuning → its file: the first, and after each change that was kept."""
    tuned = bench.folder / out
    settings = read_settings(tuned / "first.toml")
    found = {"first": bench.write(f"{out}-first", settings)}
    changes = json.loads((bench.folder / f"{out}.json").read_text())["changes"]
    newest = {line.trial: line for line in read_lines(tuned, PROBES, Probe)}
    for trial in sorted(newest.values(), key=lambda line: line.trial):
        if trial.kept and changes:
            settings |= restore_types(trial.changes)
            what = ", ".join(f"{name} {value}" for name, value in trial.changes.items())
            found[what] = bench.write(f"{out}-{len(found)}", settings)
    return found


def from_bad(bench: Bench, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for the tuning and for each configuration, with its images per second in each round."""
    result = bench.tune(bench.write("bad", bench.common | BAD), "bad-tune")
    tried = [f"{t['probe']} {t.get('changes', '')}: {t['state']}, {t['ratio']:.3g}" for t in result["trials"]]
    spent_s = sum(trial.get("seconds", 0.0) for trial in result["trials"])
    yield {"data": bench.name, "what": "tune from bad", "s": spent_s, "tried": tried}
    files = stages(bench, "bad-tune") | {"by hand": bench.write("hand", bench.common | HAND)}
    speeds: dict[str, list[float]] = {name: [] for name in files}
    for number in range(rounds):
        for place, (name, file) in enumerate(files.items()):
            speeds[name].append(bench.images_per_s(file, f"bad-{place}-{number}"))
    for name, values in speeds.items():
        yield {"data": bench.name, "what": name, "img/s": statistics.median(values), "all": values}


def from_good(bench: Bench, data: str, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each tuning from the configuration tuned by hand, with local images of half the size."""
    sides = tuple(-(-side // 64) * 32 for side in bench.common["image_size"])
    local = {"data": data, "image_size": sides}
    hand = bench.write("good", bench.common | HAND | local)
    for number in range(repeats):
        out = f"good-tune-{number}"
        result = bench.tune(hand, out)
        row = {"data": bench.name, "what": "tune from good", "changes": result["changes"],
               "s": sum(trial.get("seconds", 0.0) for trial in result["trials"])}  # fmt: skip
        if result["changes"]:
            files = {"before": hand, "after": bench.folder / out / "config.toml"}
            speed = {name: bench.images_per_s(file, f"good-{number}-{name}") for name, file in files.items()}
            row |= {"ratio of fresh runs": speed["after"] / speed["before"]}
        yield row


def accuracy(bench: Bench, data: str, seeds: int, epochs: int) -> Iterator[dict[str, Any]]:
    """A row for each configuration with the AP on the validation split of each seed; of local images, since where they
    are does not matter here, and evaluated at the end only."""
    files = stages(bench, "bad-tune")
    for what, name in (("AP, first", "first"), ("AP, tuned", list(files)[-1])):
        found = []
        settings = read_settings(files[name]) | {"data": data, "eval_every": "0"}
        file = bench.write(f"ap-{what[4:]}", settings)
        for seed in range(seeds):
            run = bench.train(file, f"ap-{what[4:]}-{seed}", epochs, seed)
            ends = [event for event in read_lines(run, EVENTS, Event) if event.kind == "finished"]
            found.append(ends[-1].data["metrics"]["ap"])
        yield {"data": bench.name, "what": what, "AP": statistics.fmean(found), "all": found}


def judge(report: Report, name: str) -> None:
    """The bars of a data set, of the rows that are there."""
    rows = [row for row in report.rows if row["data"] == name]
    speeds = {row["what"]: row["img/s"] for row in rows if "img/s" in row}
    for row in rows:
        if row["what"] == "tune from bad":
            report.bars.append(Bar.at_most(f"{name}: minutes of tune", row["s"] / 60, 10.5))
    if speeds:
        steps = [speed for what, speed in speeds.items() if what != "by hand"]
        report.bars.append(Bar.at_least(f"{name}: tuned / bad", steps[-1] / steps[0], 3.0))
        report.bars.append(Bar.at_least(f"{name}: tuned / by hand", steps[-1] / speeds["by hand"], 0.95))
        gains = [after / before for before, after in itertools.pairwise(steps)]
        if gains:
            report.bars.append(Bar.at_least(f"{name}: smallest gain of a kept change, fresh runs", min(gains), 1.0))
    good = [row for row in rows if row["what"] == "tune from good"]
    if good:
        false = sum(row.get("ratio of fresh runs", 2.0) <= 1 for row in good)
        report.bars.append(Bar.at_most(f"{name}: false gains of {len(good)} from good", false, MAX_FALSE))
    aps = {row["what"]: row["all"] for row in rows if row["what"].startswith("AP")}
    if len(aps) == 2 and min(map(len, aps.values())) > 1:
        before, after = aps["AP, first"], aps["AP, tuned"]
        pooled = statistics.fmean([statistics.variance(before), statistics.variance(after)]) ** 0.5
        difference = (statistics.fmean(after) - statistics.fmean(before)) / max(pooled, 1e-6)
        report.bars.append(Bar.at_least(f"{name}: AP tuned - first, in pooled deviations", difference, -2.0))


def run(arguments: argparse.Namespace) -> Report:
    rounds = 1 if arguments.quick else arguments.rounds
    report = Report(f"`stoker tune`; server: {' '.join(LINK)}", rounds, ("stoker", "torch"))
    work = arguments.work.absolute()
    for name in arguments.data[: 1 if arguments.quick else None]:
        with running_server(str(arguments.shared / SETS[name][0]), *LINK) as (port, _):
            bench, local = Bench(name, work, port, arguments.quick), str(arguments.shared / SETS[name][0])
            if "bad" in arguments.only:
                report.rows += from_bad(bench, rounds)
            if "good" in arguments.only:
                report.rows += from_good(bench, local, 1 if arguments.quick else arguments.repeats)
            if "ap" in arguments.only:
                seeds, epochs = (1, 1) if arguments.quick else (3, arguments.epochs)
                report.rows += accuracy(bench, local, seeds, epochs)
        judge(report, name)
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--work", type=Path, required=True, help="folder of the tunings and trainings; continues there")
    made.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    made.add_argument("--only", nargs="+", choices=("bad", "good", "ap"), default=["bad", "good", "ap"])
    made.add_argument("--rounds", type=int, default=3, help="trainings of each configuration")
    made.add_argument("--repeats", type=int, default=10, help="tunings from a good configuration")
    made.add_argument("--epochs", type=int, default=20, help="of the trainings that say the AP")
    place = Path(os.environ.get("STOKER_TEST_DATA", ROOT.parent / "shared/data"))
    made.add_argument("--shared", type=Path, default=place, help="folder of the data sets; default STOKER_TEST_DATA")
    return made


if __name__ == "__main__":
    publish(run, parser())
