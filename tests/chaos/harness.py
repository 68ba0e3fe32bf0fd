"""Runs `stoker train` as a user does, injects a fault for real, and compares the end with an undisturbed run."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event

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
    run_dir = () if "--run-dir" in flags else ("--run-dir", str(folder / "run"))
    arguments = [*merge_flags(flags), *run_dir]
    command = [*prefix, sys.executable, "-m", "stoker", "train", str(data), *arguments]
    marked = {**(env or {}), FOLDER_VARIABLE: str(folder)}
    return subprocess.Popen(
        command, env=chaos_environment(chaos, marked), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def assert_same_weights(run: Path, undisturbed: Path, *, lost_events: bool = False) -> None:
    """Final and best weights, and the scores of every evaluation, are those of the undisturbed run, bit for bit.
    lost_events: the disk has lost some of the scores."""
    for name in ("final.safetensors", "best.safetensors"):
        assert (run / name).read_bytes() == (undisturbed / name).read_bytes(), name
    scores = [
        {event.step: event.data["metrics"] for event in read_lines(folder, EVENTS, Event) if event.kind == "evaluated"}
        for folder in (run, undisturbed)
    ]
    assert scores[0] == scores[1] or (lost_events and scores[0].items() <= scores[1].items())


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


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of this size. Skips where it cannot be mounted."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@dataclasses.dataclass(frozen=True)
class CgroupOfTest:
    """A cgroup of version 1 or 2. path: of its files; join: the prefix of a command that runs in it."""

    path: Path

    @property
    def join(self) -> list[str]:
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"]

    @property
    def memory_limit(self) -> Path:
        return self._first("memory.max", "memory.limit_in_bytes")

    def memory_used(self) -> int:
        return int(self._first("memory.current", "memory.usage_in_bytes").read_text())

    def _first(self, *names: str) -> Path:
        return next(self.path / name for name in names if (self.path / name).exists())


@contextmanager
def cgroup(controller: str) -> Iterator[CgroupOfTest]:
    """A new cgroup with this controller, "memory" or "pids". Skips where none can be made."""
    root = Path("/sys/fs/cgroup")
    parent = root / controller if (root / controller).is_dir() else root
    group = parent / f"stoker-chaos-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        if not (group / {"pids": "pids.max", "memory": "memory.stat"}[controller]).exists():
            pytest.skip(f"the controller {controller} is not available in a cgroup made here")
        yield CgroupOfTest(group)
    finally:
        while group.exists():
            try:
                group.rmdir()
            except OSError:  # until its processes have ended
                time.sleep(0.05)
