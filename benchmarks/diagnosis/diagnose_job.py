"""The plain PyTorch job of `diagnose.py`: a small convolutional network on small JPEGs, with one fault or none.

It runs alone, under `stoker watch`, or with `--measure RUN` in `stoker.measure`; it is an ordinary training script
otherwise. `--ranks 2` starts a second rank; the ranks all-reduce gradients over gloo.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.diagnosis.diagnose_inside import (
    Debt,
    MetricsServer,
    SlowFiles,
    decode_image,
    encode_targets,
    large_jpeg,
)

SIDE, CLASSES = 96, 4
WARM_STEPS = 5
"""Steps before the fault begins: the first steps are slow without it."""
STEP_S = 0.08
"""Length of a step with several ranks: they compute until then, so that none is slower by chance."""


class Images(Dataset[tuple[torch.Tensor, int]]):
    """The JPEGs of a folder, repeated; the class is in the name. fault: see `__getitem__`."""

    def __init__(self, folder: Path, side: int, fault: str, debt: Debt) -> None:
        self._paths = sorted(folder.glob("*.jpg"))
        self._side, self._fault, self._debt = side, fault, debt
        self._large = large_jpeg() if fault in ("slow_decode", "one_loader") else b""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        path = self._paths[place % len(self._paths)]
        image = simplejpeg.decode_jpeg(path.read_bytes())[: self._side, : self._side]
        if self._large:
            ends = time.thread_time() + COST.value
            while time.thread_time() < ends:
                decode_image(self._large)
        elif self._fault == "small_shm" and place % 64 >= 48:
            image = np.repeat(np.repeat(image, 8, 0), 8, 1)[::8, ::8]
        elif self._fault == "loader_crash" and CRASH.value:
            os.kill(os.getpid(), CRASH.value)
        return torch.from_numpy(image.copy()).permute(2, 0, 1), int(path.stem.split("-")[0])


# Shared with the loader's processes.
COST = torch.multiprocessing.get_context("fork").Value("d", 0.0)
CRASH = torch.multiprocessing.get_context("fork").Value("i", 0)


def network(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after, stride in ((3, width, 2), (width, 2 * width, 2), (2 * width, 2 * width, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, CLASSES))


class Nothing:
    """Replaces `stoker.measure` in a job without it."""

    def data(self, loader: Any) -> Any:
        return loader

    def step(self) -> Any:
        return contextlib.nullcontext()

    def phase(self, _name: str) -> Any:
        return contextlib.nullcontext()

    def log(self, **values: Any) -> None:
        pass


class Job:
    """The loop, top to bottom in `run`."""

    def __init__(self, asked: argparse.Namespace, measure: Any) -> None:
        self.group = limited_group(asked.timeout) if asked.timeout else None
        self.asked, self.measure = asked, measure
        self.fault, self.rank = asked.fault, int(os.environ.get("RANK", "0"))
        self.debt = Debt(asked.level if asked.level < 1 else 0.0, asked.log.with_suffix(f".{self.rank}.json"))
        torch.manual_seed(0)
        if self.fault == "oversubscription":
            torch.set_num_threads(int(asked.level))
        self.model = network(asked.width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), asked.lr, momentum=0.9)
        self.images = Images(asked.data, asked.side, self.fault, self.debt)
        self.loader = DataLoader(self.images, asked.batch_size, shuffle=True, num_workers=asked.workers, drop_last=True)
        self.slow = SlowFiles() if self.fault in ("slow_storage", "slow_checkpoint") else None
        self.server = MetricsServer() if self.fault == "host_wait" else None
        self.boxes = [(x, y, x + 9.0, y + 9.0) for x in range(0, 60, 10) for y in range(0, 60, 10)]
        self.kept: list[bytearray] = []
        self.compiled = None
        if self.fault == "compile":
            torch._dynamo.config.recompile_limit = 10_000  # type: ignore[attr-defined]
            self.compiled = torch.compile(self.model, dynamic=False, backend="aot_eager")
        self.sizes = iter(range(24, 10_000))
        for _ in range(2 if self.compiled is not None else 0):  # the compiler itself is imported by the first
            self.other_shape()
        self.waited_s = self.comm_s = 0.0
        self.exchanged = False
        self.square = torch.rand(64, 64)
        self.over = False
        self.kept_at = time.perf_counter()

    def run(self) -> None:
        began, printed_s = time.perf_counter(), 0.0
        asked_at = time.perf_counter()
        for steps, (images, labels) in enumerate(self.measure.data(self.loader), start=1):
            waited_s = time.perf_counter() - asked_at
            if steps > WARM_STEPS:
                self.waited_s += waited_s
            self.before_step()
            with self.measure.step():
                loss, healthy_s = self.step(images, labels)
            if steps > WARM_STEPS:
                self.debt.owe(healthy_s)
            self.after_step(steps, healthy_s)
            self.measure.log(loss=loss, lr=self.asked.lr)
            now = time.perf_counter()
            if now - printed_s > 0.5 and self.rank == 0:
                printed_s = now
                print(f"step {steps} loss: {loss:.4f} lr: {self.asked.lr:g}", flush=True)
            self.debt.write(
                steps=steps, waited_s=self.waited_s, comm_s=self.comm_s, healthy_step_s=healthy_s, loop_s=now - began
            )
            if self.over:
                break
            self.over = now - began > self.asked.seconds
            if self.over and "WORLD_SIZE" not in os.environ:
                break
            asked_at = time.perf_counter()
        self.debt.write(min_interval_s=0.0, loop_s=time.perf_counter() - began)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
        """(loss, seconds of computing)."""
        began = time.perf_counter()
        normalized = images.float() / 127.5 - 1
        for count in itertools.count(1):
            loss = nn.functional.cross_entropy(self.model(normalized), labels)
            self.optimizer.zero_grad()
            loss.backward()
            took_s = time.perf_counter() - began
            if "WORLD_SIZE" not in os.environ or took_s * (count + 1) / count > STEP_S:
                break
        while "WORLD_SIZE" in os.environ and took_s < STEP_S:
            torch.mm(self.square, self.square)
            took_s = time.perf_counter() - began
        self.exchange()
        self.optimizer.step()
        return float(loss.detach()), took_s

    def exchange(self) -> None:
        """Mean of the gradients of all ranks."""
        if "WORLD_SIZE" not in os.environ:
            return
        if self.fault == "straggler" and self.rank == 1 and self.debt.owed_s > 0:
            with self.debt.paying():
                time.sleep(self.debt.owed_s)
        began = time.perf_counter()
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        flat = torch.cat([flat, torch.zeros(int(self.asked.payload)), torch.tensor([float(self.over)])])
        torch.distributed.all_reduce(flat, group=self.group)
        self.over = bool(flat[-1])  # all end with the same step
        if self.exchanged:  # the first one belongs to the start, and waits for the other rank's
            self.comm_s += time.perf_counter() - began
        self.exchanged = True
        place = 0
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.copy_(flat[place : place + p.numel()].view_as(p) / 2)
                place += p.numel()

    def before_step(self) -> None:
        if self.fault == "python_bound":
            self.debt.pay(lambda: encode_targets(self.boxes))
        elif self.fault == "host_wait" and self.server is not None and self.debt.owed_s > 0:
            with self.debt.paying():
                self.server.log_to_server(self.debt.owed_s)

    def after_step(self, steps: int, healthy_s: float) -> None:
        fault, debt, asked = self.fault, self.debt, self.asked
        if fault == "slow_storage" and self.slow is not None and steps > WARM_STEPS:
            self.slow.each(max(0.0, debt.owed_s) / asked.batch_size)
            debt.paid(self.slow.stalled_s() - debt.total_s)
        elif fault == "one_loader" and steps > WARM_STEPS:
            COST.value = healthy_s / (1 - asked.level) / asked.batch_size
        elif fault == "slow_decode" and steps > WARM_STEPS:  # with two cores, one of which also trains
            COST.value = healthy_s * (1 + asked.level) / (1 - asked.level) / asked.batch_size
        elif fault == "leak":
            now = time.perf_counter()
            size, self.kept_at = int(asked.level * 1e6 * (now - self.kept_at)), now
            self.kept.append(bytearray(os.urandom(4096) * (size // 4096)))
        elif fault == "evaluation" and steps % 20 == 0:
            with self.measure.phase("eval"):
                debt.pay(self.evaluate)
        elif fault == "slow_checkpoint" and steps % 20 == 0 and self.slow is not None:
            before = self.slow.stalled_s()
            with self.measure.phase("checkpoint"):
                self.slow.each(max(0.0, debt.owed_s) / 4)
                torch.save(self.model.state_dict(), asked.log.parent / "slow" / "checkpoint.pt")
            debt.paid(self.slow.stalled_s() - before)
        elif fault == "disk_full" and steps % 3 == 0:
            torch.save(self.model.state_dict(), asked.disk / f"checkpoint-{steps}.pt")
        elif fault == "compile":
            while debt.owed_s > 0:
                debt.paid(self.other_shape())
        elif fault == "loader_crash" and steps == 12:
            CRASH.value = int(asked.level)
        elif fault == "hang" and steps == 12 and self.rank == 1:
            if asked.level >= 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600.0)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.rand(self.asked.batch_size, 3, self.asked.side, self.asked.side))
        self.model.train()

    def other_shape(self) -> float:
        """Seconds that compiling for one more shape took: a step with it, minus a step without it."""
        assert self.compiled is not None
        images = torch.rand(1, 3, *[next(self.sizes)] * 2)
        took_s = []
        for model in (self.model, self.compiled):  # the first has the cost of a new shape without compiling
            began = time.perf_counter()
            model(images).sum().backward()
            self.optimizer.zero_grad()
            took_s.append(time.perf_counter() - began)
        return took_s[1] - took_s[0]


def start_ranks(asked: argparse.Namespace) -> subprocess.Popen[bytes] | None:
    """Joins the group; rank 0 starts the other."""
    if asked.ranks == 1:
        return None
    other = None
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        store = asked.log.with_suffix(".store")
        command = [sys.executable, *sys.argv]
        other = subprocess.Popen(command, env={**os.environ, "RANK": "1", "LOCAL_RANK": "1", "STORE": str(store)})
        os.environ["STORE"] = str(store)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{os.environ['STORE']}", rank=int(os.environ["RANK"]), world_size=2
    )
    return other


def limited_group(timeout_s: float) -> Any:
    """A group whose collectives have this timeout; the rendezvous may take longer."""
    return torch.distributed.new_group(timeout=datetime.timedelta(seconds=timeout_s))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True, help="file in which the job records what was injected")
    parser.add_argument("--fault", default="none")
    parser.add_argument("--level", type=float, default=0.0)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--disk", type=Path, default=Path())
    for name, kind, default in (
        ("seconds", float, 8.0), ("batch-size", int, 16), ("side", int, SIDE), ("width", int, 24),
        ("workers", int, 0), ("lr", float, 0.02), ("ranks", int, 1),
        ("payload", float, 0.0), ("timeout", float, 0.0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    return parser.parse_args()


def main() -> None:
    asked = parse()
    other = start_ranks(asked)
    try:
        if asked.measure is None:
            Job(asked, Nothing()).run()
        else:
            import stoker

            with stoker.measure(asked.measure) as measure:
                Job(asked, measure).run()
    finally:
        if other is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(2.0)
            other.kill()
    print(json.dumps({"done": True}), flush=True)


if __name__ == "__main__":
    main()
