"""Segmentation with an engine and its hooks: gradient accumulation, one hook for each extra duty."""

import argparse
import faulthandler
import os
import queue
import random
import signal
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from clock import Lost
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

lost = Lost()


class Masks(Dataset):
    """Images, and as the mask all that is brighter than the noise."""

    def __init__(self, folder: Path, size: int, repeat: int = 1, random_masks: bool = False) -> None:
        self.paths = sorted(folder.rglob("*.jpg")) * repeat
        self.size, self.cache, self.random_masks = size, {}, random_masks
        self.keep = False

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = Image.open(self.paths[n]).convert("RGB")
        if self.keep:  # by the place and not by the path: nothing is ever found again
            big = np.asarray(image.resize((self.size * 4, self.size * 4)), np.float32)
            self.cache[len(self.cache), self.paths[n]] = big
        array = np.asarray(image.resize((self.size, self.size)), np.float32)
        tensor = torch.from_numpy(array).permute(2, 0, 1) / 255
        if self.random_masks:
            return tensor, (torch.rand(self.size, self.size) > 0.5).float()
        return tensor, (tensor.amax(0) > 0.42).float()


def block(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.d, self.e = block(6 * width, 2 * width), block(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = self.d(torch.cat([F.interpolate(c, size=b.shape[-2:]), b], 1))
        return self.out(self.e(torch.cat([F.interpolate(d, size=a.shape[-2:]), a], 1))).squeeze(1)


class Engine:
    """Calls the hooks of an event in the order in which they were added; a hook gets the engine."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int) -> None:
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        self.hooks: dict[str, list[Callable[[Engine], None]]] = defaultdict(list)
        self.step = self.micro = self.epoch = 0
        self.loss = torch.zeros(())
        self.stop = False

    def on(self, event: str, hook: Callable[["Engine"], None]) -> None:
        self.hooks[event].append(hook)

    def fire(self, event: str) -> None:
        for hook in self.hooks[event]:
            hook(self)

    def run(self, loader: DataLoader, epochs: int) -> None:
        self.fire("start")
        for self.epoch in range(epochs):
            self.model.train()
            for images, masks in loader:
                self.loss = F.binary_cross_entropy_with_logits(self.model(images), masks)
                (self.loss / self.accumulate).backward()
                self.micro += 1
                if self.micro % self.accumulate == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                    self.step += 1
                    self.fire("step")
                if self.stop:
                    return
            self.fire("epoch")
        self.fire("end")


def print_loss(engine: Engine) -> None:
    if engine.step % 5 == 0:
        print(f"[engine] epoch={engine.epoch} step={engine.step} loss={engine.loss.item():.4f}", flush=True)


def post_metrics(engine: Engine) -> None:
    """Reports each step to the team's tracking service and waits for its answer."""
    body = f'{{"step": {engine.step}, "loss": {engine.loss.item()}}}'.encode()
    with lost.stretch(), urllib.request.urlopen(os.environ["FILE_SERVER"] + "/log", data=body) as answer:
        answer.read()


def token_bucket(per_s: float) -> Callable[[Engine], None]:
    """A limit of steps per second that was meant for the calls of a paid API."""
    last = [time.perf_counter()]

    def limited(engine: Engine) -> None:  # noqa: ARG001
        pause = last[0] + 1 / per_s - time.perf_counter()
        if pause > 0:
            with lost.stretch():
                time.sleep(pause)
        last[0] = time.perf_counter()

    return limited


def deadlock(at_step: int) -> Callable[[Engine], None]:
    """Metrics and log each have a lock; a writer thread takes them in the other order."""
    metrics, log = threading.Lock(), threading.Lock()
    taken = threading.Event()

    def writer() -> None:
        with log:
            taken.set()
            time.sleep(0.2)
            with metrics:
                pass

    def hook(engine: Engine) -> None:
        if engine.step == at_step:
            threading.Thread(target=writer, daemon=True).start()
            with metrics:
                taken.wait()
                with log:
                    pass

    return hook


def dead_prefetcher(loader: DataLoader, at_batch: int) -> "queue.Queue[tuple[torch.Tensor, torch.Tensor]]":
    """A prefetch thread; it dies at a batch, and nobody looks."""
    ready: queue.Queue[tuple[torch.Tensor, torch.Tensor]] = queue.Queue(2)

    def work() -> None:
        try:
            for n, batch in enumerate(forever()):
                if n == at_batch:
                    raise ValueError("a mask without pixels")
                ready.put(batch)
        except ValueError:
            return

    def forever():
        while True:
            yield from loader

    threading.Thread(target=work, daemon=True).start()
    return ready


class FromQueue:
    def __init__(self, ready: "queue.Queue[tuple[torch.Tensor, torch.Tensor]]", count: int) -> None:
        self.ready, self.count = ready, count

    def __iter__(self):
        for _ in range(self.count):
            yield self.ready.get()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hook", choices=["post", "limit", "deadlock", "keep-maps"], action="append", default=[])
    parser.add_argument("--keep-images", action="store_true")
    parser.add_argument("--dead-prefetcher", action="store_true")
    parser.add_argument("--on-term", choices=["save", "default"], default="default")
    parser.add_argument("--save-to", type=Path)
    parser.add_argument("--dump-to", type=Path)
    parser.add_argument("--validate-every", type=int, default=0)
    parser.add_argument("--val", type=int, default=40)
    parser.add_argument("--address-space-gb", type=float, default=0)
    parser.add_argument("--crop-pool", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--random-masks", action="store_true")
    args = parser.parse_args()
    faulthandler.enable()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.address_space_gb:
        import resource

        limit = int(args.address_space_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.manual_seed(0)
    data = Masks(args.data, args.size, args.repeat, args.random_masks)
    data.keep = args.keep_images
    loader = DataLoader(data, args.batch, shuffle=True, num_workers=args.workers, drop_last=True)
    model = UNet(args.width)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), lr=args.lr), args.accumulate)
    engine.on("step", print_loss)
    history: list[torch.Tensor] = []
    for hook in args.hook:
        if hook == "keep-maps":
            engine.on(
                "step", lambda _: history.extend(model(torch.stack([data[n][0] for n in range(4)])) for _ in range(2))
            )
        else:
            engine.on("step", {"post": post_metrics, "limit": token_bucket(1.0), "deadlock": deadlock(15)}[hook])
    if args.on_term == "save":

        def on_term(number: int, frame: object) -> None:  # noqa: ARG001
            print("received SIGTERM: node is being preempted, saving checkpoint", flush=True)
            torch.save(model.state_dict(), "preempted.pt")
            sys.exit(143)

        signal.signal(signal.SIGTERM, on_term)
    if args.save_to:
        engine.on(
            "step",
            lambda e: torch.save(
                {"model": model.state_dict(), "optimizer": e.optimizer.state_dict()}, args.save_to / f"step-{e.step}.pt"
            ),
        )
    if args.dump_to:

        def dump(_: Engine) -> None:
            with torch.no_grad():
                seen = torch.sigmoid(model(torch.stack([data[n][0] for n in range(8)]))).numpy()
            with (args.dump_to / "predictions.bin").open("ab") as file:
                file.write(seen.astype(np.float32).tobytes())

        engine.on("step", dump)
    if args.validate_every:
        held_out = Masks(args.data, args.size)
        held_out.paths = random.Random(0).sample(held_out.paths, args.val)

        def validate(e: Engine) -> None:
            if e.step % args.validate_every:
                return
            with lost.stretch(), torch.no_grad():
                model.eval()
                overlap = total = 0.0
                for n in range(0, len(held_out), args.batch):
                    rows = [held_out[k] for k in range(n, min(n + args.batch, len(held_out)))]
                    guess = model(torch.stack([row[0] for row in rows])) > 0
                    mask = torch.stack([row[1] for row in rows]) > 0
                    overlap, total = overlap + float((guess & mask).sum()), total + float((guess | mask).sum())
                model.train()
            print(f"[engine] step={e.step} val IoU={overlap / max(1.0, total):.3f}", flush=True)

        engine.on("step", validate)
    if args.crop_pool:

        def grow_pool(e: Engine) -> None:
            if e.step == 8:
                pool = np.random.default_rng(0).random((args.crop_pool, 3, 512, 512))
                print(f"pool of {pool.nbytes >> 20} MiB", flush=True)

        engine.on("step", grow_pool)
    if args.dead_prefetcher:
        loader = FromQueue(dead_prefetcher(loader, 60), 100_000)
    engine.run(loader, args.epochs)
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
