"""A classifier under DistributedDataParallel (gloo), started by torchrun with three ranks."""

import argparse
import datetime
import os
import random
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from clock import Lost
from PIL import Image, ImageFilter
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.transforms.v2 import functional as tf

lost = Lost()


class Shapes(Dataset):
    def __init__(self, folder: Path, size: int, blur: int = 0) -> None:
        folders = sorted(path for path in folder.iterdir() if path.is_dir())
        self.items = [(path, n) for n, folder in enumerate(folders) for path in sorted(folder.glob("*.jpg"))]
        random.Random(0).shuffle(self.items)
        self.size, self.blur = size, blur

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, n: int) -> tuple[torch.Tensor, int]:
        path, label = self.items[n]
        image = Image.open(path).convert("RGB").resize((self.size, self.size))
        for _ in range(self.blur):
            image = image.filter(ImageFilter.MedianFilter(5))
        return tf.pil_to_tensor(image).float() / 127.5 - 1, label


class Net(nn.Module):
    def __init__(self, width: int, classes: int, hidden: int, extra_head: bool, sometimes: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
            layers += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.neck = nn.Sequential(nn.Linear(64 * width, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, classes)
        self.auxiliary = nn.Linear(hidden, 4) if extra_head else None
        self.adapter = nn.Linear(hidden, hidden) if sometimes else None

    def forward(self, images: torch.Tensor, difficult: bool = False) -> torch.Tensor:
        x = self.neck(self.body(images))
        if self.adapter is not None and difficult:
            x = x + self.adapter(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--data-of-rank-1", type=Path)
    parser.add_argument("--blur-of-rank-2", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--uneven", action="store_true", help="the last rank has fewer images")
    parser.add_argument("--locked", action="store_true", help="rank 1 writes its log under a lock")
    parser.add_argument("--extra-head", action="store_true")
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    folder = args.data_of_rank_1 if rank == 1 and args.data_of_rank_1 else args.data
    data = Shapes(folder, args.size, args.blur_of_rank_2 if rank == 2 else 0)
    if args.uneven:
        data.items = data.items[rank::world][: 72 - 24 * (rank == 2)]
        sampler = None
    else:
        sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, args.batch, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(Net(args.width, 3, args.hidden, args.extra_head, args.adapter))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    log_lock = threading.Lock()
    step = 0
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        batches = iter(loader)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            slow_rank = 1 if args.data_of_rank_1 else 2 if args.blur_of_rank_2 else -1
            if rank == slow_rank:  # no rank computes meanwhile
                lost.add((time.perf_counter() - asked) * world)
            images, labels = batch
            difficult = args.adapter and rank == 0 and step % 2 == 1
            loss = criterion(model(images, difficult), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if args.locked and rank == 1 and step >= 40:
                log_lock.acquire()  # a second time: the flush below never released it
            if rank == 0 and step % 5 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        if args.evaluate and rank == 0:
            model.eval()
            with torch.no_grad():
                chosen = [data[n] for n in range(24)]
                right = sum(int(model.module(image[None]).argmax() == label) for image, label in chosen)
            print(f"epoch {epoch}: val accuracy {right / 24:.3f}", flush=True)
    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
        print(f"done, process {os.getpid()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
