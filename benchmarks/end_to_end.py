"""Whether training ever waits for pictures: `stoker train` on JPEG files beside the same steps on one ready batch.

The real command, to which only a clock is added: after its first steps those that follow are timed, until as many are
done as were asked for. On the other side the loader is closed after the first step, and every step gets the first
batch again. Each run is a process of its own, the two sides in turn. Pictures are drawn, 640 × 480 and about 95 KB, and
decoded every time (no cache). On a CPU loading and computing share the cores, so the rate with the loader is lower by
what loading takes, and there is no bar. The shares are the run's own ledger's.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import loader
from processes import run_child, serve_child
from report import Bar, Report, options, publish, spread

SIDES = ("real loader", "ready batch")
GOAL = 0.97
ON_CPU = ("retinanet_tiny_fpn", 320, 8)
ON_DEVICE = ("ssdlite320_mobilenet_v3_large", 320, 128)
"""Model, side of the canvas, batch. On a device the model with the most pictures a second (gpu.py)."""


class StepsDone(BaseException):
    """Ends the training; not an Exception, so that nothing of the run's takes it for a failure to handle."""


class OneBatch:
    """Hands out the first batch of a loader again and again."""

    last_wait: tuple[()] = ()

    def __init__(self, loader: Any, batch: Any) -> None:
        self.loader, self.batch = loader, batch
        loader.close()

    def __next__(self) -> Any:
        return self.batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def train(folder: Path, ready: int, first: int, steps: int) -> dict[str, Any]:
    """Trains for `first` steps, then `steps` more, which are measured; ready: on one batch."""
    import time

    from stoker.cli.app import app
    from stoker.training import loop

    step, write_window = loop.Training.step, loop.Training.write_window
    accounts: list[Any] = []
    taken: list[Any] = []
    began: list[float] = []

    def timed_step(training: Any) -> None:
        job = training.state
        if job.step == first:
            job.device.wait()
            training.flush_stats()
            accounts.clear()
            began[:] = time.perf_counter(), time.process_time()
        if job.step == first + steps:
            job.device.wait()
            took = [time.perf_counter() - began[0], time.process_time() - began[1]]
            training.finish_stats()
            raise StepsDone(took)
        if ready and not taken:
            take = job.loader.__next__()
            taken.append(take)
            job.loader = OneBatch(job.loader, take)
        step(training)

    def seen(training: Any, account: Any, *rest: Any) -> None:
        accounts.extend([] if account is None else [account])
        write_window(training, account, *rest)

    loop.Training.step = timed_step  # type: ignore[method-assign]
    loop.Training.write_window = seen  # type: ignore[method-assign]
    command = json.loads((folder / "command.json").read_text())
    try:
        app(["train", str(folder), *command, "--run", tempfile.mkdtemp(dir=folder.parent) + "/run"])
    except StepsDone as done:
        seconds, cpu_s = done.args[0]
    else:
        raise RuntimeError("the training ended before its steps were done")
    wall_s = sum(account.wall_s for account in accounts)
    shares = {name: sum(one.phases.get(name, 0.0) for one in accounts) / wall_s for name in ("compute", "input_wait")}
    return {"s": seconds, "cpu_s": cpu_s, **shares}


def run(arguments: argparse.Namespace) -> Report:
    from stoker.hardware.device import select_device

    device = select_device(arguments.device)
    n = 1 if arguments.quick else arguments.runs or (2 if device.is_cpu else 3)
    model, side, batch = ON_CPU if device.is_cpu else ON_DEVICE
    first, steps, files = (2, 16, 128) if device.is_cpu else (30, 300, 1024)
    if arguments.quick:
        side, first, steps, files = 64 if device.is_cpu else side, 2, 3, 64
    command = ["--model", model, "--weights", "none", "--image-size", str(side), str(side), "--batch-size", str(batch),
               "--max-duration", str(10 * (first + steps)), "--eval-every", "0", "--workers", str(arguments.threads),
               "--cache", "none", "--device", str(device.torch_device)]  # fmt: skip
    report = Report(
        f"Training {model}, {side} × {side}, batch {batch}, on {device.name}: the loader in the loop", n,
        ("stoker", "torch", "torchvision", "simplejpeg"),
    )  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder, cache = Path(temporary) / "drawn", Path(temporary) / "cache"
        folder.mkdir()
        kind = loader.KINDS[0]
        run_child("draw", folder, cache, files, *kind.size, round(100 * kind.roll), 1)
        (folder / "command.json").write_text(json.dumps(command))
        for _ in range(n):
            for name in SIDES:
                runs[name].append(run_child("train", folder, cache, int(name == "ready batch"), first, steps))
    pictures = steps * batch
    rate = {name: spread([pictures / one["s"] for one in found]) for name, found in runs.items()}
    for name, found in runs.items():
        middle = {key: statistics.median(one[key] for one in found) for key in ("cpu_s", "compute", "input_wait")}
        report.rows.append(
            {"what": name, "img/s": rate[name]["median"], "min": rate[name]["min"], "max": rate[name]["max"],
             "CPU ms a picture": 1e3 * middle["cpu_s"] / pictures, "compute, share of the time": middle["compute"],
             "input_wait, share": middle["input_wait"]}
        )  # fmt: skip
    ratio = rate["real loader"]["median"] / rate["ready batch"]["median"]
    report.rows.append({"what": "rate, real loader / ready batch", "img/s": ratio})
    if not device.is_cpu:
        report.bars.append(Bar.at_least("img/s, real loader / ready batch", ratio, GOAL))
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--device", help="cuda, cpu …; default: the accelerator that torch finds, else the cpu")
    made.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="of the loader; default: cores")
    made.add_argument("--runs", type=int, help="of each side; default: 3, on a CPU 2")
    return made


if __name__ == "__main__":
    serve_child({"draw": loader.draw, "train": train})
    publish(run, parser())
