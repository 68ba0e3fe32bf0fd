"""CPU time, throughput and peak memory of turning JPEG files into batches, compared with other loaders.

Generated images of 640 × 480 and 4,000 × 3,000, in the page cache, become uint8 batches of 16, squashed to 800 × 800.
Every loader makes the same number of pixels (loader_peers.py). Each runs in a process that lives from pass to pass,
with as many workers as there are cores; starting it and the first pass are not counted. The loaders take turns. CPU
time is that of the process and all its descendants; memory is their proportional set size (a page that n processes
share counts 1/n for each), sampled during a separate pass. "difference" is the mean absolute difference of an image, of
255 levels, from Pillow's antialiased bilinear resize of the same file. A loader that is not installed, or fails, is a
row "n/a" with the reason.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks import peers
from benchmarks.loading.loader_peers import BATCH, INSTALL, LOADERS, NEEDS, SHARD, SIDE
from benchmarks.processes import ROOT, python_path, run_child, serve_child
from benchmarks.report import Bar, Report, describe, options, publish, spread

CHILD = Path(__file__).with_name("loader_peers.py")
REFERENCE = "DataLoader, tensor resize"
"""torchvision's reference, with which the bars compare."""
SAMPLE_S = 0.02
FEWER = 3
"""Passes of a loader whose CPU time is in no bar."""
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Kind:
    """Images of one size: the number of files, how often a pass repeats them, and the goals."""

    name: str
    size: tuple[int, int]
    files: int
    repeats: int
    roll: float
    """How fast the amplitude of detail falls with its frequency; larger is smoother. Pixels of larger photographs have
    less detail each."""
    goals: tuple[tuple[str, float], ...]

    def for_workers(self, workers: int) -> "Kind":
        """The same with longer passes, so that every worker has several batches."""
        return dataclasses.replace(self, repeats=self.repeats * max(1, workers // 2))


KINDS = (
    Kind("640 × 480", (480, 640), 128, 2, 0.42, ((REFERENCE, 2.5), ("tf.data", 1.5))),
    Kind("4,000 × 3,000", (3000, 4000), 8, 4, 0.6, ((REFERENCE, 4.0),)),
)


def draw(folder: Path, files: int, height: int, width: int, roll_percent: int, shards: int) -> None:
    """Writes images/, the same images in shards/*.tar, and all.json with a box on each."""
    import cv2
    import numpy as np

    (folder / "images").mkdir()
    (folder / "shards").mkdir()

    def draw_one(number: int) -> None:
        pixels = natural(np.random.default_rng(number), height, width, roll_percent / 100)
        cv2.imwrite(str(folder / "images" / f"{number:06d}.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, 91])

    with ThreadPoolExecutor() as pool:
        list(pool.map(draw_one, range(files)))
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


def natural(rng: Any, height: int, width: int, roll: float) -> Any:
    """uint8 [height, width, 3]: octaves of noise whose amplitude falls with their frequency, as in photographs
    (Field 1987: about 1/f), with less color than light. rng: numpy's Generator."""
    import cv2
    import numpy as np

    light = np.full((height, width, 3), 128, np.float32)
    cells, amplitude = 3, 52.0
    while cells < max(height, width):
        grid = max(2, round(cells * height / max(height, width))), max(2, round(cells * width / max(height, width)))
        coarse = rng.standard_normal((*grid, 1), np.float32) + 0.35 * rng.standard_normal((*grid, 3), np.float32)
        light += cv2.resize(coarse * np.float32(amplitude), (width, height), interpolation=cv2.INTER_CUBIC)
        cells, amplitude = cells * 2, amplitude / 2**roll
    return np.clip(light, 0, 255).astype(np.uint8)


class LoaderFailed(RuntimeError):
    """A loader ended; the message is the last line of its errors."""


class LoaderProcess:
    """A loader in its own process, which makes a pass on request."""

    def __init__(self, name: str, folder: Path, workers: int, repeats: int, cache: Path) -> None:
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `start_loaders`)
        python = peers.interpreter() if name in NEEDS else Path(sys.executable)
        environment = {**os.environ, "STOKER_CACHE_DIR": str(cache), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment.pop("GOMP_SPINCOUNT", None)  # set by importing stoker; each loader runs with its own default
        if name == "stoker":
            environment["PYTHONPATH"] = os.pathsep.join([python_path(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [python, CHILD, name, folder, str(workers), str(repeats)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment,
        )  # fmt: skip

    def send(self, line: str) -> dict[str, Any]:
        """The answer to a command. Raises LoaderFailed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; the reason follows
            print(line, file=self.process.stdin, flush=True)
        for answer_line in self.process.stdout:
            if answer_line.startswith("{"):
                result: dict[str, Any] = json.loads(answer_line)
                return result
        exit_code = self.process.wait()
        self.errors.seek(0)
        error_lines = [text.strip() for text in self.errors if text.strip()]
        raise LoaderFailed(error_lines[-1] if error_lines else f"it ended with exit code {exit_code}")

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU time so far of the process and its descendants, including those that have ended."""
        times = [process.cpu_times() for process in self.tree()]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    def memory(self) -> int:
        """Bytes of the whole tree now."""
        total = 0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it has ended and uses no memory
                total += process.memory_full_info().pss
        return total

    def timed(self) -> dict[str, Any]:
        before = self.cpu_s()
        return {**self.send("pass"), "cpu_s": self.cpu_s() - before}

    def peak(self) -> int:
        """Bytes, the maximum of samples during a pass."""
        samples, done = [self.memory()], threading.Event()

        def watch() -> None:
            while not done.wait(SAMPLE_S):
                samples.append(self.memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            self.send("pass")
        finally:
            done.set()
            watcher.join()
        return max(samples)


@contextlib.contextmanager
def start_loaders(
    names: list[str], folder: Path, workers: int, repeats: int, cache: Path
) -> Iterator[list[LoaderProcess]]:
    loaders: list[LoaderProcess] = []
    try:
        loaders.extend(LoaderProcess(name, folder, workers, repeats, cache) for name in names)
        yield loaders
    finally:
        for loader in loaders:
            tree = loader.tree() if loader.process.poll() is None else []
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            loader.process.wait()
            loader.errors.close()


def difference(pixels: Path, image: Path) -> float:
    """Mean absolute difference of the pixels in an .npy file from Pillow's antialiased resize of an image."""
    import numpy as np
    from PIL import Image

    with Image.open(image) as opened:
        reference = opened.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return float(np.abs(np.load(pixels).astype(np.int16) - np.asarray(reference, np.int16)).mean())


def measure(kind: Kind, n: int, workers: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Results of each loader with the images of a kind: runs, peak memory and difference from the reference, or the
    reason why it failed. Raises LoaderFailed where stoker's own fails."""
    results: dict[str, dict[str, Any]] = {name: {"runs": []} for name in names}
    compared = {"stoker", *(name for name, _ in kind.goals)}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder, cache = Path(temporary) / "drawn", Path(temporary) / "cache"
        folder.mkdir()
        run_child("draw", folder, cache, kind.files, *kind.size, round(100 * kind.roll), workers)
        first, *_ = files = sorted((folder / "images").iterdir())
        results["files"] = {"kb": statistics.mean(path.stat().st_size for path in files) / 1e3}
        with start_loaders(names, folder, workers, kind.repeats, cache) as loaders:

            @contextlib.contextmanager
            def failure_recorded(loader: LoaderProcess) -> Iterator[None]:
                try:
                    yield
                except (LoaderFailed, psutil.NoSuchProcess) as error:
                    if loader.name == "stoker":
                        raise
                    results[loader.name]["failed"] = install_hint(loader.name, str(error))

            def running() -> list[LoaderProcess]:
                return [loader for loader in loaders if "failed" not in results[loader.name]]

            for loader in running():
                with failure_recorded(loader):
                    first_image = Path(temporary) / "first.npy"
                    loader.send(f"save {first_image}")
                    results[loader.name]["difference"] = difference(first_image, first)
            for number in range(n):
                for loader in running() if number % 2 else reversed(running()):
                    if number < FEWER or loader.name in compared:
                        with failure_recorded(loader):
                            results[loader.name]["runs"].append(loader.timed())
            for loader in running():
                with failure_recorded(loader):
                    results[loader.name]["peak"] = loader.peak()
    for name in names:
        if any(run["images"] != kind.files * kind.repeats for run in results[name]["runs"]):
            raise RuntimeError(f"{name} did not load everything")
    return results


def install_hint(name: str, reason: str) -> str:
    return f"install {INSTALL[name]}: {reason}" if name in INSTALL else reason


def run(arguments: argparse.Namespace) -> Report:
    n = 2 if arguments.quick else arguments.runs
    kinds = [shrunk(kind) for kind in KINDS] if arguments.quick else list(KINDS)
    missing = {name: install_hint(name, reason) for name, needs in NEEDS.items() if (reason := peers.missing(*needs))}
    present = [name for name in LOADERS if name not in missing]
    installed = describe(peers.versions("tensorflow-cpu", "webdataset", "spdl-io"))
    report = Report(
        f"Loading: JPEG files to uint8 batches of {BATCH}, {SIDE} × {SIDE}; {arguments.workers} workers, files cached;"
        f" peers: {installed or 'none'}",
        n,
        ("stoker", "simplejpeg", "opencv-python-headless", "torch", "torchvision", "pillow"),
    )
    for kind in kinds:
        results = measure(kind.for_workers(arguments.workers), n, arguments.workers, present)
        add(report, kind, results, missing)
    return report


def shrunk(kind: Kind) -> Kind:
    files = min(kind.files, 32) // 2
    return dataclasses.replace(kind, files=files, repeats=max(1, BATCH // files))


def add(report: Report, kind: Kind, results: dict[str, dict[str, Any]], missing: dict[str, str]) -> None:
    """Rows and bars of one image size."""
    what = f"{kind.name}, {results['files']['kb']:,.0f} KB"
    cpu: dict[str, float] = {}
    peak: dict[str, float] = {}
    for name in LOADERS:
        result = results.get(name, {})
        if (reason := missing.get(name) or result.get("failed")) is not None:
            report.rows.append({"what": f"{what}: {name}", "n/a": reason})
            continue
        runs = result["runs"]
        ms = spread([1e3 * one["cpu_s"] / one["images"] for one in runs])
        cpu[name], peak[name] = ms["median"], result["peak"] / MIB
        report.rows.append({
            "what": f"{what}: {name}",
            "n": len(runs),
            "CPU ms per image": ms["median"],
            "min": ms["min"],
            "max": ms["max"],
            "img/s": statistics.median(one["images"] / one["s"] for one in runs),
            "peak MiB": peak[name],
            "difference": result["difference"],
        })  # fmt: skip
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
    made.add_argument("--runs", type=int, default=5, help="passes per median of a bar; default: 5")
    return made


if __name__ == "__main__":
    serve_child({"draw": draw})
    publish(run, parser())
