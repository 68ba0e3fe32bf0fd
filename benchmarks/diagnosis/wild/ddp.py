"""DistributedDataParallel training on CPU with gloo: `torchrun --nproc-per-node 2 ddp.py DATA`."""

import argparse
import datetime
import io
import logging
import os
import random
import threading
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from known import write_known
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms.functional import pil_to_tensor

logger = logging.getLogger("train")


class FolderDataset(Dataset):
    def __init__(self, where: str, side: int):
        self.where, self.side = where, side
        if where.startswith("http"):
            self.paths = urllib.request.urlopen(where + "/").read().decode().split()
        else:
            self.paths = sorted(str(p.relative_to(where)) for p in Path(where).rglob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        if self.where.startswith("http"):
            data = urllib.request.urlopen(f"{self.where}/{path}").read()
        else:
            data = (Path(self.where) / path).read_bytes()
        img = Image.open(io.BytesIO(data)).convert("RGB").resize((self.side, self.side))
        return pil_to_tensor(img).float().div(255), int(Path(path).stem) % 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, width, depth, aux, drop_path):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.aux = nn.Linear(width, 3) if aux else None
        self.head = nn.Linear(width, 3)
        self.drop_path = drop_path

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training and random.random() < self.drop_path:
                continue
            x = block(x)
        return self.head(x.mean((2, 3)))


def mine_hard_examples(losses, seconds):
    """Sorts and ranks in Python, for `seconds` of work."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        sorted(losses * 50, key=lambda v: -v)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("data")
    p.add_argument("--side", type=int, default=96)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--workers", type=int, default=0)
    p.add_argument("--width", type=int, default=48)
    p.add_argument("--depth", type=int, default=8)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--duration", type=float, default=18)
    p.add_argument("--aux-head", action="store_true")
    p.add_argument("--drop-path", type=float, default=0.0)
    p.add_argument("--mining", type=float, default=0.0, help="seconds of hard example mining on the last rank")
    p.add_argument("--multi-scale", type=int, default=0, help="side of the images of the last rank")
    p.add_argument("--wait-lock", type=int, default=0, help="step of the last rank")
    p.add_argument("--wait-file", type=int, default=0, help="step of the first rank")
    p.add_argument("--bad-shape", type=int, default=0, help="step of the last rank")
    p.add_argument("--bad-key", type=int, default=0, help="step of the last rank")
    p.add_argument("--timeout", type=float, default=1800)
    p.add_argument("--save-every", type=int, default=0)
    args = p.parse_args()

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    last = rank == world - 1
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [rank {rank}] %(message)s")
    torch.manual_seed(1)
    side = args.multi_scale if args.multi_scale and last else args.side
    dataset = FolderDataset(args.data, side)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, args.batch, sampler=sampler, num_workers=args.workers, drop_last=True)
    model = DDP(Net(args.width, args.depth, args.aux_head, args.drop_path))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss(reduction="none")

    step, mined, waited = 0, 0.0, 0.0
    start = time.monotonic()
    running = torch.tensor(1.0)
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        before = time.monotonic()
        for images, target in loader:
            waited += time.monotonic() - before if step else 0.0
            if args.bad_shape == step + 1 and last:
                images = images[:, :1]
            losses = criterion(model(images), target)
            if args.mining and last:
                t = time.monotonic()
                mine_hard_examples(losses.tolist(), args.mining)
                mined += time.monotonic() - t
            loss = losses.mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if rank == 0 and step % 5 == 0:
                logger.info("Epoch %d step %d loss: %.4f lr: %g", epoch, step, loss.item(), args.lr)
            if args.wait_lock == step and last:
                gate = threading.Lock()
                gate.acquire()
                gate.acquire()
            if args.wait_file == step and rank == 0:
                while not os.path.exists("resume.flag"):
                    time.sleep(1)
            if args.bad_key == step and last:
                logger.info("best %s", {"loss": loss.item()}["accuracy"])
            if args.save_every and step % args.save_every == 0 and rank == 0:
                torch.save(model.module.state_dict(), "model.pt")
            before = time.monotonic()
        running.fill_(float(time.monotonic() - start < args.duration))
        dist.broadcast(running, 0)
        if not running.item():
            break
    if last:
        write_known(mined=mined, waited=waited * world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
