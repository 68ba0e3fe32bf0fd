"""Runs `stoker train` as a user does, injects a fault for real, and compares the end with an undisturbed run."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from stoker.runs.records import EVENTS, read_lines
from stoker.runs.schemas import Event

FOLDER_VARIABLE = "STOKER_CHAOS_FOLDER"
"""Marks all processes of a command, whatever starts them."""
INJECT = Path(__file__).with_name("inject")
STEPS = 18
FLAGS = (
    "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "4", "--steps", str(STEPS),
    "--eval-every", "6", "--checkpoint-every", "4", "--scale-jitter-prob", "0.5", "--ema-decay", "0.9",
    "--precision", "fp32", "--hflip", "0.5", "--mosaic", "0.4", "--workers", "2",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    output: str
    run: Path

    @property
    def events(self) -> list[Event]:
        return list(read_lines(self.run, EVENTS, Event))

    def texts(self, *kinds: str) -> list[str]:
        return [event.text for event in self.events if event.kind in kinds]


def chaos_environment(chaos: Mapping[str, object] | None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a command into which a fault is injected; see `inject/sitecustomize.py`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(extra or {})}
    if chaos is not None:
        env["STOKER_CHAOS"] = json.dumps(chaos)
    if chaos is not None or "STOKER_CHAOS_CLOCK" in env:
        env["PYTHONPATH"] = os.pathsep.join([str(INJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return env


def train(
    data: Path,
    folder: Path,
    *flags: str,
    chaos: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    timeout_s: float = 600,
) -> Ended:
    """`stoker train` to its end, with the run in folder/run. prefix: a command that starts it."""
    process = start(data, folder, *flags, chaos=chaos, env=env, prefix=prefix)
    output, _ = process.communicate(timeout=timeout_s)
    return Ended(process.returncode, output, folder / "run")


def merge_flags(flags: Sequence[str]) -> list[str]:
    """FLAGS without those that `flags` has too, and `flags`."""
    kept: list[str] = []
    is_kept = True
    for argument in FLAGS:
        if argument.startswith("--"):
            is_kept = argument not in flags
        if is_kept:
            kept.append(argument)
    return [*kept, *flags]


def start(
    data: Path,
    folder: Path,
    *flags: str,
    chaos: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.Popen[str]:
    arguments = [*merge_flags(flags), "--run-dir", str(folder / "run")]
    command = [*prefix, sys.executable, "-m", "stoker", "train", str(data), *arguments]
    marked = {**(env or {}), FOLDER_VARIABLE: str(folder)}
    return subprocess.Popen(
        command, env=chaos_environment(chaos, marked), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def assert_same_weights(run: Path, undisturbed: Path) -> None:
    """Final and best weights, and the scores of every evaluation, are those of the undisturbed run, bit for bit."""
    for name in ("final.safetensors", "best.safetensors"):
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes(), name
    scores = [
        {event.step: event.data["metrics"] for event in read_lines(folder, EVENTS, Event) if event.kind == "evaluated"}
        for folder in (run, undisturbed)
    ]
    assert scores[0] == scores[1]


def processes_of(folder: Path) -> list[str]:
    """Commands of live processes that were started for a folder, by their variables: nothing of a run may be left."""
    found = []
    for process in psutil.process_iter():
        try:
            is_alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get(FOLDER_VARIABLE) == str(folder):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
