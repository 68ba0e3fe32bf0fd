"""What it costs to turn JPEG files into batches: processor time, rate and peak memory, beside other loaders.

Drawn pictures of 640 × 480 and 4,000 × 3,000, from the page cache, to uint8 batches of 16, squashed to 800 × 800: every
loader makes the same number of pixels (loader_peers.py). Each is a process that lives from pass to pass, with as many
workers as there are cores; starting it and a first pass are not counted. The passes are taken in turn. Processor time
is that of the process and all below it; memory their proportional set size (a page that n processes share counts 1/n
for each), sampled during a pass of its own. "apart" is the mean absolute difference of a picture, of 255 levels, from
Pillow's antialiased bilinear resize of the same file.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers
import psutil
from loader_peers import BATCH, LOADERS, NEEDS, SHARD, SIDE
from processes import ROOT, run_child, serve_child
from report import Bar, Report, describe, options, publish, spread

CHILD = Path(__file__).with_name("loader_peers.py")
THEIRS = "DataLoader, tensor resize"
"""torchvision's reference way, which the bars are beside."""
SAMPLE_S = 0.02
FEWER = 3
"""Passes of a loader whose processor time is in no bar."""
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Kind:
    """Pictures of one size: how many files, how often a pass goes through them, and what must be reached."""

    name: str
    size: tuple[int, int]
    files: int
    repeats: int
    roll: float
    """How the detail falls off with its size; the larger, the smoother. Cameras' pixels hold less each where they are
    more."""
    goals: tuple[tuple[str, float], ...]

    def for_workers(self, workers: int) -> "Kind":
        """The same with longer passes, so that every worker has several batches."""
        return dataclasses.replace(self, repeats=self.repeats * max(1, workers // 2))


KINDS = (
    Kind("640 × 480", (480, 640), 128, 2, 0.42, ((THEIRS, 2.5), ("tf.data", 1.5))),
    Kind("4,000 × 3,000", (3000, 4000), 8, 4, 0.6, ((THEIRS, 4.0),)),
)


def draw(folder: Path, files: int, height: int, width: int, roll_percent: int, shards: int) -> None:
    """Writes images/, the same pictures in shards/*.tar, and all.json with a box on each."""
    import cv2
    import numpy as np

    (folder / "images").mkdir()
    (folder / "shards").mkdir()
    for number in range(files):
        picture = natural(np.random.default_rng(number), height, width, roll_percent / 100)
        cv2.imwrite(str(folder / "images" / f"{number:06d}.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 91])
    each = min(SHARD, -(-files // shards))
    for first in range(0, files, each):
        with tarfile.open(folder / "shards" / f"{first:06d}.tar", "w") as tar:
            for number in range(first, min(first + each, files)):
                data = (folder / "images" / f"{number:06d}.jpg").read_bytes()
                entry = tarfile.TarInfo(f"{number:06d}.jpg")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    images = [{"id": i, "file_name": f"{i:06d}.jpg", "height": height, "width": width} for i in range(files)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [9, 9, 90, 90]} for i in range(files)]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "all.json").write_text(json.dumps(content))


def natural(chance: Any, height: int, width: int, roll: float) -> Any:
    """uint8 [height, width, 3]: octaves of noise whose amplitude falls with their frequency, as photographs' does
    (Field 1987: about 1/f), with less colour than light. chance: numpy's Generator."""
    import cv2
    import numpy as np

    light = np.full((height, width, 3), 128, np.float32)
    cells, amplitude = 3, 52.0
    while cells < max(height, width):
        grid = max(2, round(cells * height / max(height, width))), max(2, round(cells * width / max(height, width)))
        coarse = chance.standard_normal((*grid, 1), np.float32) + 0.35 * chance.standard_normal((*grid, 3), np.float32)
        light += cv2.resize(coarse * np.float32(amplitude), (width, height), interpolation=cv2.INTER_CUBIC)
        cells, amplitude = cells * 2, amplitude / 2**roll
    return np.clip(light, 0, 255).astype(np.uint8)


class Side:
    """A loader in its process, which makes a pass when it is told to."""

    def __init__(self, name: str, folder: Path, workers: int, repeats: int, cache: Path) -> None:
        self.name = name
        python = peers.interpreter() if name in NEEDS else Path(sys.executable)
        environment = {**os.environ, "STOKER_CACHE_DIR": str(cache), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment.pop("GOMP_SPINCOUNT", None)  # importing stoker has set it; each with what it has by itself
        if name == "stoker":
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [python, CHILD, name, folder, str(workers), str(repeats)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def tell(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        for said in self.process.stdout:
            if said.startswith("{"):
                found: dict[str, Any] = json.loads(said)
                return found
        raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}")

    def tree(self) -> list[psutil.Process]:
        whole = psutil.Process(self.process.pid)
        return [whole, *whole.children(recursive=True)]

    def cpu_s(self) -> float:
        """Processor time so far of the process and all below it, also of those that have ended."""
        times = [process.cpu_times() for process in self.tree()]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    def memory(self) -> int:
        """Bytes that the tree holds now."""
        total = 0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it ended meanwhile: it holds none
                total += process.memory_full_info().pss
        return total

    def timed(self) -> dict[str, Any]:
        before = self.cpu_s()
        said = self.tell("pass")
        return {**said, "cpu_s": self.cpu_s() - before}

    def peak(self) -> int:
        """Bytes, the most that was seen during a pass."""
        seen, done = [self.memory()], threading.Event()

        def watch() -> None:
            while not done.wait(SAMPLE_S):
                seen.append(self.memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            self.tell("pass")
        finally:
            done.set()
            watcher.join()
        return max(seen)


@contextlib.contextmanager
def contest(names: list[str], folder: Path, workers: int, repeats: int, cache: Path) -> Iterator[list[Side]]:
    sides: list[Side] = []
    try:
        sides.extend(Side(name, folder, workers, repeats, cache) for name in names)
        yield sides
    finally:
        for side in sides:
            tree = side.tree() if side.process.poll() is None else []
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            side.process.wait()


def apart(found: Path, picture: Path) -> float:
    """Mean absolute difference of the pixels in an .npy file from Pillow's antialiased resize of a picture."""
    import numpy as np
    from PIL import Image

    with Image.open(picture) as opened:
        reference = opened.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return float(np.abs(np.load(found).astype(np.int16) - np.asarray(reference, np.int16)).mean())


def measure(kind: Kind, n: int, workers: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """What each loader does with the pictures of a kind: runs, peak and how far its pixels are from the reference."""
    found: dict[str, dict[str, Any]] = {name: {"runs": []} for name in names}
    compared = {"stoker", *(name for name, _ in kind.goals)}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder, cache = Path(temporary) / "drawn", Path(temporary) / "cache"
        folder.mkdir()
        run_child("draw", folder, cache, kind.files, *kind.size, round(100 * kind.roll), workers)
        first, *_ = files = sorted((folder / "images").iterdir())
        found["files"] = {"kb": statistics.mean(path.stat().st_size for path in files) / 1e3}
        with contest(names, folder, workers, kind.repeats, cache) as sides:
            for side in sides:
                look = Path(temporary) / "look.npy"
                side.tell(f"look {look}")
                found[side.name]["apart"] = apart(look, first)
            for number in range(n):
                for side in sides if number % 2 else reversed(sides):
                    if number < FEWER or side.name in compared:
                        found[side.name]["runs"].append(side.timed())
            for side in sides:
                found[side.name]["peak"] = side.peak()
    for name in names:
        if any(run["pictures"] != kind.files * kind.repeats for run in found[name]["runs"]):
            raise RuntimeError(f"{name} did not load everything")
    return found


def run(arguments: argparse.Namespace) -> Report:
    n = 2 if arguments.quick else arguments.runs
    kinds = [shrunk(kind) for kind in KINDS] if arguments.quick else list(KINDS)
    absent = {name: reason for name, needs in NEEDS.items() if (reason := peers.missing(*needs))}
    present = [name for name in LOADERS if name not in absent]
    installed = describe(peers.versions("tensorflow-cpu", "webdataset", "spdl-io"))
    report = Report(
        f"Loading: JPEG files to uint8 batches of {BATCH}, {SIDE} × {SIDE}; {arguments.workers} workers, files cached;"
        f" peers: {installed or 'none'}",
        n, ("stoker", "simplejpeg", "opencv-python-headless", "torch", "torchvision", "pillow"),
    )  # fmt: skip
    for kind in kinds:
        found = measure(kind.for_workers(arguments.workers), n, arguments.workers, present)
        add(report, kind, found, absent)
    return report


def shrunk(kind: Kind) -> Kind:
    files = min(kind.files, 32) // 2
    return dataclasses.replace(kind, files=files, repeats=max(1, BATCH // files))


def add(report: Report, kind: Kind, found: dict[str, dict[str, Any]], absent: dict[str, str]) -> None:
    """Rows and bars of one size of pictures."""
    what = f"{kind.name}, {found['files']['kb']:,.0f} KB"
    cpu: dict[str, float] = {}
    peak: dict[str, float] = {}
    for name in LOADERS:
        if name in absent:
            report.rows.append({"what": f"{what}: {name}", "n/a": absent[name]})
            continue
        runs = found[name]["runs"]
        ms = spread([1e3 * one["cpu_s"] / one["pictures"] for one in runs])
        cpu[name], peak[name] = ms["median"], found[name]["peak"] / MIB
        report.rows.append(
            {"what": f"{what}: {name}", "n": len(runs), "CPU ms a picture": ms["median"], "min": ms["min"],
             "max": ms["max"], "img/s": statistics.median(one["pictures"] / one["s"] for one in runs),
             "peak MiB": peak[name], "apart": found[name]["apart"]}
        )  # fmt: skip
    for name, goal in kind.goals:
        if name in cpu:
            value = cpu[name] / cpu["stoker"]
            report.bars.append(Bar.at_least(f"{kind.name}: CPU time, {name} / stoker", value, goal))
    for name in peak:
        if name != "stoker":
            report.bars.append(
                Bar.at_most(f"{kind.name}: peak memory, stoker / {name}", peak["stoker"] / peak[name], 1)
            )


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    cores = len(os.sched_getaffinity(0))
    made.add_argument("--workers", type=int, default=cores, help=f"threads or processes of a loader; default: {cores}")
    made.add_argument("--runs", type=int, default=5, help="passes that the medians in a bar are of; default: 5")
    return made


if __name__ == "__main__":
    serve_child({"draw": draw})
    publish(run, parser())
