"""Trains under random faults for some minutes and checks that nothing was lost: `make soak`, or

    python -m tests.chaos.soak --minutes 20

Run after run trains with `--restarts`, while every few seconds something happens to it: its trainer or its supervisor
is killed, gets SIGTERM or SIGUSR1, is stopped for a while, hangs, runs out of memory, or its newest checkpoint is
damaged.
What ends with another code than 0 is started again by the same command, as a scheduler does. Lost is: a checkpoint that
is complete and gone though no two newer ones are there, steps that a later attempt begins before, a process that
survives its run. Final weights are compared with an undisturbed run: bit for bit where no step ran out of memory, which
makes micro-batches smaller, and the statistics of BatchNorms noisier; else AP has to be within the range of undisturbed
runs with other seeds and micro-batches, and half as much again on both sides. Exit 1 if anything differs.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from stoker.training.checkpoint import is_complete, list_checkpoints
from stoker_watch.runs import records
from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.chaos.harness import processes_of, start, train
from tests.drawn import draw

FLAGS = (
    "--eval-every", "100", "--checkpoint-every", "20", "--restarts", "50",
)  # fmt: skip
ENDED_EARLY = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR1)
"""Codes of a command that was killed, or got a signal before it handled signals: there was nothing to save."""
MAX_PAUSE_S = 5.0
HUNG = 7
"""Where a hang was injected: a supervisor that was asked to stop meanwhile does not start the training again."""
NOISE_SEEDS, NOISE_MICRO_BATCHES = 3, (1, 2, 4)
"""Undisturbed runs that show how much AP varies, on a small data set where a single box is a tenth of a class."""
KINDS = ("kill trainer", "kill supervisor", "SIGTERM", "SIGUSR1", "stop for a while", "damage", "hang", "out of memory")


class Soak:
    """One soak in a folder of its own."""

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.flags = ("--steps", str(steps), *FLAGS)
        self.data = draw(folder / "data")
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.attempts = self.runs = 0
        self.saved_steps: set[int] = set()
        self.aps: tuple[float, ...] = ()
        self.disturbed_aps: list[float] = []

    def undisturbed(self, seed: int, micro_batches: int) -> tuple[Path, float]:
        different = ("--seed", str(seed), "--grad-accum-steps", str(micro_batches))
        ended = train(
            self.data, self.folder / f"seed-{seed}-{micro_batches}", *self.flags, *different, timeout_s=600
        )  # fmt: skip
        if ended.code != 0:
            raise SystemExit(f"the undisturbed run failed:\n{ended.output}")
        return ended.run, ended.events[-1].data["metrics"]["ap"]

    def run_for(self, duration_s: float) -> None:
        found = [self.undisturbed(seed, n) for n in NOISE_MICRO_BATCHES for seed in range(NOISE_SEEDS)]
        runs, self.aps = zip(*found, strict=True)
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            self.runs += 1
            name = self.folder / f"soak-{self.runs}"
            self.disturb(name, end_s)
            self.compare(name / "run", runs[0])
            print(f"run {self.runs}: {self.attempts} attempts so far, {dict(self.counts)}", flush=True)

    def disturb(self, folder: Path, end_s: float) -> None:
        """Trains a run to its end; faults stop at `end_s`."""
        run = folder / "run"
        self.saved_steps = set()
        while True:
            self.attempts += 1
            chaos = self.pick_injected() if time.monotonic() < end_s else None
            process = start(
                self.data, folder, *self.flags, "--seed", "0", chaos=chaos, env={"STOKER_HANG_TIMEOUT_S": "10"}
            )
            output = self.harass(process, run, end_s)
            if process.returncode != 0:
                self.wait_for_end(folder)
            if process.returncode == 0 or records.is_finished(run):  # by a trainer whose supervisor was killed
                return
            is_hang = chaos is not None and chaos["fault"] == "hang" and process.returncode == HUNG
            if process.returncode not in (75, *ENDED_EARLY) and not is_hang:
                self.problems.append(f"{run}: exit code {process.returncode}: {output[-500:]}")
                return

    def pick_injected(self) -> dict[str, object] | None:
        kind = self.rng.choice(("hang", "out of memory", None, None, None, None))
        if kind is None:
            return None
        self.counts[kind] += 1
        call = self.rng.randrange(5, 80)
        target = (
            "stoker.training.optim:OptimizerStep.backward"
            if kind == "out of memory"
            else "stoker.training.make_step:train_step"
        )
        return {"target": target, "call": call, "fault": kind.replace(" ", "_"), "attempt": 1}

    def harass(self, process: subprocess.Popen[str], run: Path, end_s: float) -> str:
        while True:
            try:
                output, _ = process.communicate(timeout=self.rng.uniform(0.5, MAX_PAUSE_S))
            except subprocess.TimeoutExpired:
                self.check_checkpoints(run)
                if time.monotonic() < end_s:
                    self.strike(process, run)
            else:
                self.check_checkpoints(run)
                return output

    def strike(self, process: subprocess.Popen[str], run: Path) -> None:
        kind = self.rng.choice(KINDS[:-2])
        self.counts[kind] += 1
        try:
            trainers = psutil.Process(process.pid).children()
            if kind == "kill supervisor":
                process.kill()
            elif kind.startswith("SIG"):
                process.send_signal(signal.Signals[kind])
            elif kind == "damage":
                self.damage(run)
            for trainer in trainers:
                if kind == "kill trainer":
                    trainer.kill()
                elif kind == "stop for a while":
                    trainer.suspend()
                    time.sleep(self.rng.uniform(0.1, 6.0))  # also longer than the watchdog's limit
                    trainer.resume()
        except psutil.NoSuchProcess:  # it ended meanwhile
            return

    def damage(self, run: Path) -> None:
        """One byte of the newest checkpoint changes, if there is another one to fall back to."""
        folders = list_checkpoints(run)
        if len(folders) < 2 or not is_complete(folders[1]):
            return
        self.saved_steps.discard(int(folders[0].name[5:]))
        try:
            with (folders[0] / "state.pt").open("r+b") as file:
                file.seek(self.rng.randrange(1000))
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 0xFF]))
        except OSError:  # removed meanwhile
            return

    def check_checkpoints(self, run: Path) -> None:
        """The newest complete checkpoint that was ever seen must stay, unless newer ones took its place."""
        complete = {int(folder.name[5:]) for folder in list_checkpoints(run) if is_complete(folder)}
        newest_seen = max(self.saved_steps, default=-1)
        if newest_seen >= 0 and max(complete, default=-1) < newest_seen:
            self.problems.append(f"{run}: the checkpoint of step {newest_seen} is lost, there are {sorted(complete)}")
        self.saved_steps |= complete

    def wait_for_end(self, folder: Path) -> None:
        """After the supervisor was killed, its child saves and ends by itself."""
        end_s = time.monotonic() + 120
        while (left := processes_of(folder)) and time.monotonic() < end_s:
            time.sleep(0.05)
        self.problems += [f"process left: {command}" for command in left]

    def compare(self, run: Path, whole: Path) -> None:
        self.problems += [f"process left: {command}" for command in processes_of(run.parent)]
        events = list(read_lines(run, EVENTS, Event))
        if not events or events[-1].kind != "finished":
            self.problems.append(f"{run} did not finish")
            return
        if any(event.kind == "out_of_memory" for event in events):
            ap, low, high = events[-1].data["metrics"]["ap"], min(self.aps), max(self.aps)
            if not low - (high - low) / 2 <= ap <= high + (high - low) / 2:
                self.problems.append(f"{run}: AP {ap:.3f}, undisturbed {low:.3f} to {high:.3f}")
            self.disturbed_aps.append(round(ap, 3))
        elif (run / "final.safetensors").read_bytes() != (whole / "final.safetensors").read_bytes():
            self.problems.append(f"{run}: other weights than the undisturbed run")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="of a run")
    arguments = parser.parse_args()
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stoker-soak-") as folder:
        soak = Soak(Path(folder), arguments.seed, arguments.steps)
        soak.run_for(60 * arguments.minutes)
    faults = sum(soak.counts.values())
    summary = {
        "minutes": round((time.monotonic() - start_s) / 60, 1), "runs": soak.runs, "commands": soak.attempts,
        "faults": faults, "by_kind": dict(soak.counts), "ap of undisturbed runs": [round(ap, 3) for ap in soak.aps],
        "ap after out of memory": soak.disturbed_aps, "problems": soak.problems,
    }  # fmt: skip
    print(json.dumps(summary, indent=2))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
