"""Training images from shards behind an emulated S3 (20 ms, 200 MB/s): rate, CPU time, memory, start; beside others.

Photos of 640 × 480 become uint8 batches of 16, squashed to 640 × 640; decoding limits. BMPs of 384 × 288 cost little
to decode and become 256 × 256; the link limits. `stoker data pack` makes the shards. The limit of decoding is the rate
from the same images as local files, less the part of the cores that the server uses ("server cores"), as both use all.
WebDataset reads the same tar files, MosaicML Streaming the same images as MDS, which it keeps on /dev/shm once read;
both decode and resize with OpenCV, in two workers. Two epochs are measured, after one. Server and each client are
separate processes on the same cores; clients take turns; CPU time is the client's alone, with all processes that it
starts. "random" is stoker with a request per image. "start" is from nothing to the first batch of a set of 100,000
small images. Memory is that of the process after the last batch, as a multiple of that after a quarter of the run.

A peer that is not installed is a row "n/a": STOKER_PEERS_PYTHON names a Python that has webdataset, mosaicml-streaming
and opencv-python-headless. The packages of `make peers` exclude the newest mosaicml-streaming.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.loading.object_server import running_server
from benchmarks.processes import child_environment
from benchmarks.report import Bar, Report, options, publish

FOLDER = Path(__file__).resolve().parent
LATENCY_MS, MB_PER_S = 20.0, 200.0
LINK = ("--latency-ms", str(LATENCY_MS), "--mb-per-s", str(MB_PER_S))
SHARD_MIB = 32
PACKED = 100_000
DISTINCT = 64
KINDS = {
    "photos": ((480, 640), ".jpg", 640),
    "bitmaps": ((288, 384), ".bmp", 256),
}
"""Name: (height, width), suffix, side of the model input."""
INSTALL = {"webdataset": "webdataset", "streaming": "mosaicml-streaming"}


def draw(folder: Path, count: int, size: tuple[int, int], suffix: str) -> int:
    """A COCO set of `count` training images, links to some that differ, and one to validate. Bytes per image."""
    import cv2
    import numpy as np

    from benchmarks.loading.loader import natural

    for split in ("train", "valid"):
        (folder / split).mkdir(parents=True)
    for number in range(min(count, DISTINCT)):
        if max(size) < 100:
            pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), np.uint8)
        else:
            pixels = natural(np.random.default_rng(number), *size, 0.42)
        quality = [cv2.IMWRITE_JPEG_QUALITY, 91] if suffix == ".jpg" else []
        cv2.imwrite(str(folder / "train" / f"{number:06d}{suffix}"), pixels, quality)
    for number in range(DISTINCT, count):
        os.link(folder / "train" / f"{number % DISTINCT:06d}{suffix}", folder / "train" / f"{number:06d}{suffix}")
    os.link(folder / "train" / f"000000{suffix}", folder / "valid" / f"0{suffix}")
    for split in ("train", "valid"):
        names = sorted(path.name for path in (folder / split).iterdir())
        images = [{"id": i, "file_name": n, "height": size[0], "width": size[1]} for i, n in enumerate(names)]
        boxes = [
            {"id": i, "image_id": i, "category_id": 1, "bbox": [2, 2, 9, 9], "area": 81, "iscrowd": 0}
            for i in range(len(names))
        ]
        content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
        (folder / split / "_annotations.coco.json").write_text(json.dumps(content))
    used = [(folder / "train" / f"{number:06d}{suffix}").stat().st_size for number in range(min(count, DISTINCT))]
    return round(sum(used) / len(used))


def pack(folder: Path, out: Path) -> int:
    """Makes the shards of a set; the number of those to train on."""
    from stoker.data.index import open_index
    from stoker.data.packing import PackOptions, in_threads
    from stoker.data.packing import pack as pack_shards

    pack_shards(open_index(folder), str(out), PackOptions(shard_mib=SHARD_MIB), run_shards=in_threads(2))
    return len(list(out.glob("train-*.tar")))


def one_run(python: str, cache: Path, who: str, port: int, what: str, *arguments: object) -> dict[str, float]:
    command = [python, str(FOLDER / "shard_loading_child.py"), who, str(port), what, *map(str, arguments)]
    environment = child_environment() | {
        "STOKER_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)
    if done.returncode:
        raise RuntimeError(f"{who} failed: {done.stderr[-800:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(arguments: argparse.Namespace) -> Report:
    n = 1 if arguments.quick else 5
    count = 1024 if arguments.quick else 2048
    absent = {
        name: peers.missing(module, "cv2")
        for name, module in (("webdataset", "webdataset"), ("streaming", "streaming"))
    }
    pythons = {"stoker": sys.executable}
    pythons |= {name: str(peers.interpreter()) for name, reason in absent.items() if reason is None}
    results: dict[str, list[dict[str, float]]] = {}
    bytes_per_image: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, contextlib.ExitStack() as stack:
        root = Path(name)
        packed, cache, num_shards = root / "packed", root / "cache", {}
        for kind, (size, suffix, _) in KINDS.items():
            bytes_per_image[kind] = draw(root / kind, count, size, suffix)
            num_shards[kind] = pack(root / kind, packed / kind)
        if absent["streaming"] is None:
            for kind in KINDS:
                out = packed / f"{kind}-mds"
                command = [pythons["streaming"], str(FOLDER / "shard_loading_child.py"), "pack-mds"]
                subprocess.run([*command, str(root / kind / "train"), str(out)], check=True, capture_output=True)
        draw(root / "many", PACKED // (10 if arguments.quick else 1), (48, 64), ".jpg")
        pack(root / "many", packed / "many")
        port, server_pid = stack.enter_context(running_server(str(packed), *LINK))

        def measure(what: str, who: str, at: int, data: str, *more: object, python: str) -> None:
            found = one_run(python, cache, who, at, data, *more, "--server", server_pid if at else 0)
            results.setdefault(what, []).append(found)

        for repeat in range(n):
            for kind, (_, _, side) in KINDS.items():
                for who, python in list(pythons.items()):
                    shards = ("--shards", num_shards[kind], "--warm", count)
                    try:
                        measure(f"{kind}: {who}", who, port, kind, 2 * count, side, *shards, python=python)
                    except RuntimeError as error:
                        if who == "stoker":
                            raise
                        absent[who] = str(error).strip().splitlines()[-1]
                        del pythons[who]
                for name, at, data, more in (("random", port, kind, ["--random"]), ("local files", 0, root / kind, [])):
                    shown = f"{kind}: stoker, {name}"
                    measure(shown, "stoker", at, str(data), 2 * count, side, "--warm", count, *more,
                            python=sys.executable)  # fmt: skip
            fresh = root / f"cache-{repeat}"
            start = one_run(sys.executable, fresh, "stoker", port, "many", 16, 64, "--warm", 0)
            results.setdefault("start, 100,000 images", []).append(start)
        # several epochs, and a buffer that is a quarter of the set
        memory = [count // 4 for _ in range(n)]
        for buffer in memory:
            long_run = ("--buffer", buffer, "--warm", count // 2)
            measure(
                "bitmaps: stoker, 6 epochs", "stoker", port, "bitmaps", 6 * count, 256, *long_run, python=sys.executable
            )
    return report_of(results, bytes_per_image, absent, n)


def report_of(
    results: dict[str, list[dict[str, float]]], bytes_per_image: dict[str, int], absent: dict[str, str | None], n: int
) -> Report:
    found = ", ".join(
        f"{name} {peers.versions(INSTALL[name]).get(INSTALL[name], 'n/a')}"
        for name, reason in absent.items()
        if not reason
    )
    report = Report(f"batches from shards over {MB_PER_S:g} MB/s and {LATENCY_MS:g} ms; peers: {found or 'none'}", n)
    report.packages = ["obstore", "opencv-python-headless"]
    for what, runs in results.items():
        row: dict[str, Any] = {"what": what}
        for number in runs[0]:
            row[number] = statistics.median(one[number] for one in runs)
        kind = what.partition(":")[0]
        if kind in bytes_per_image:
            row["MB/s"] = row["images/s"] * bytes_per_image[kind] / 1e6
        row |= {f"images/s {f.__name__}": f(one["images/s"] for one in runs) for f in (min, max)}
        row |= {f"CPU ms {f.__name__}": f(one["CPU ms"] for one in runs) for f in (min, max)}
        report.rows.append(row)
    for name, reason in absent.items():
        if reason is not None:
            report.rows += [{"what": f"{kind}: {name}: n/a, install {INSTALL[name]}, or {reason}"} for kind in KINDS]
    rows = {row["what"]: row for row in report.rows}
    for kind in KINDS:
        ours, local = rows[f"{kind}: stoker"], rows[f"{kind}: stoker, local files"]
        link, cores = MB_PER_S * 1e6 / bytes_per_image[kind], os.cpu_count() or 1
        decoding = local["images/s"] * (1 - ours["server cores"] / cores)
        what = "the link" if link < decoding else "local files on the cores that the server leaves"
        report.bars.append(Bar.at_least(f"{kind}: rate / rate of {what}", ours["images/s"] / min(link, decoding), 0.95))
        for name, reason in absent.items():
            if reason is None:
                ratio = rows[f"{kind}: {name}"]["CPU ms"] / ours["CPU ms"]
                report.bars.append(Bar.at_least(f"{kind}: CPU of {name} / CPU of stoker", ratio, 1.3))
    report.bars += [
        Bar.at_most("memory at the end / after a quarter", rows["bitmaps: stoker, 6 epochs"]["RSS growth"], 1.1),
        Bar.at_most("start of 100,000 images, s", rows["start, 100,000 images"]["first batch s"], 5.0),
    ]
    return report


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--folder", help="where the images are drawn; 3 GB, best in memory (/dev/shm)")
    publish(run, parser)
