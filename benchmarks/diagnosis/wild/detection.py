"""Trains a small Faster R-CNN, in the style of torchvision's references/detection."""

import argparse
import datetime
import math
import os
import random
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

import torch
import torch.utils.data
from known import write_known
from PIL import Image, ImageFile
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign
from torchvision.transforms import functional as TF


class SmoothedValue:
    def __init__(self, window_size=20, fmt="{median:.4f} ({global_avg:.4f})"):
        self.deque, self.total, self.count, self.fmt = deque(maxlen=window_size), 0.0, 0, fmt

    def update(self, value):
        self.deque.append(value)
        self.count += 1
        self.total += value

    def __str__(self):
        d = torch.tensor(list(self.deque))
        return self.fmt.format(
            median=d.median().item(), avg=d.mean().item(), global_avg=self.total / self.count, value=self.deque[-1]
        )


class MetricLogger:
    def __init__(self, delimiter="  "):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter, self.data_total = delimiter, 0.0

    def update(self, **values):
        for name, value in values.items():
            self.meters[name].update(value.item() if isinstance(value, torch.Tensor) else value)

    def log_every(self, iterable, print_freq, header):
        start_time = end = time.time()
        iter_time, data_time = SmoothedValue(fmt="{avg:.4f}"), SmoothedValue(fmt="{avg:.4f}")
        for i, obj in enumerate(iterable):
            data_time.update(time.time() - end)
            if i:
                self.data_total += time.time() - end
            yield obj
            iter_time.update(time.time() - end)
            if i % print_freq == 0 or i == len(iterable) - 1:
                eta = datetime.timedelta(seconds=int(iter_time.total / iter_time.count * (len(iterable) - i)))
                meters = self.delimiter.join(f"{name}: {meter}" for name, meter in self.meters.items())
                print(self.delimiter.join([
                    header, f"[{i:3d}/{len(iterable)}]", f"eta: {eta}", meters, f"time: {iter_time}",
                    f"data: {data_time}",
                ]))  # fmt: skip
            end = time.time()
        total_time = datetime.timedelta(seconds=int(time.time() - start_time))
        print(f"{header} Total time: {total_time}")


class BoxDataset(torch.utils.data.Dataset):
    def __init__(self, root, files, size, args):
        self.root, self.files, self.size, self.args, self.opened = Path(root), files, size, args, []

    def __len__(self):
        return len(self.files)

    def __getitem__(self, idx):
        path = self.root / self.files[idx]
        if self.args.leak_files:
            self.opened += [open(path, "rb") for _ in range(self.args.leak_files)]  # noqa: SIM115
        if self.args.segfault and random.random() < self.args.segfault:
            os.abort()
        img = TF.to_tensor(Image.open(path).convert("RGB").resize((self.size, self.size)))
        n = sum(map(ord, self.files[idx]))
        x, y = n % (self.size // 2), n * 7 % (self.size // 2)
        box = [x, y, x + self.size // 3, y + self.size // 3]
        img[n % 3, y : box[3], x : box[2]] = 1.0
        target = {"boxes": torch.tensor([box], dtype=torch.float32), "labels": torch.tensor([1 + n % 3])}
        return img, target


def collate_fn(batch):
    return tuple(zip(*batch))  # noqa: B905


def get_model(width):
    backbone = nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(width, width * 2, 3, 2, 1), nn.ReLU(),
    )  # fmt: skip
    backbone.out_channels = width * 2
    return FasterRCNN(
        backbone, num_classes=4, min_size=128, max_size=128,
        rpn_anchor_generator=AnchorGenerator(((24, 48),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 5, 2),
        rpn_pre_nms_top_n_train=200, rpn_post_nms_top_n_train=100, box_batch_size_per_image=64,
    )  # fmt: skip


def train_one_epoch(model, optimizer, data_loader, epoch, print_freq, deadline):
    model.train()
    metric_logger = MetricLogger()
    for images, targets in metric_logger.log_every(data_loader, print_freq, f"Epoch: [{epoch}]"):
        loss_dict = model(list(images), [dict(t) for t in targets])
        losses = sum(loss_dict.values())
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            print(loss_dict)
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        metric_logger.update(lr=optimizer.param_groups[0]["lr"], loss=losses, **loss_dict)
        if time.time() > deadline:
            break
    return metric_logger


@torch.inference_mode()
def evaluate(model, data_loader):
    model.eval()
    metric_logger = MetricLogger()
    for images, _ in metric_logger.log_every(data_loader, 100, "Test:"):
        began = time.time()
        model(list(images))
        metric_logger.update(model_time=time.time() - began)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--lr", default=0.005, type=float)
    parser.add_argument("-b", "--batch-size", default=4, type=int)
    parser.add_argument("-j", "--workers", default=1, type=int)
    parser.add_argument("--width", default=24, type=int)
    parser.add_argument("--size", default=128, type=int)
    parser.add_argument("--print-freq", default=5, type=int)
    parser.add_argument("--max-time", default=18, type=float)
    parser.add_argument("--max-epochs", default=10**6, type=int)
    parser.add_argument("--threads", default=0, type=int)
    parser.add_argument("--eval", action="store_true")
    parser.add_argument("--leak-files", default=0, type=int)
    parser.add_argument("--segfault", default=0.0, type=float)
    parser.add_argument("--extra-file", default="", help="one more file name in the list")
    parser.add_argument("--truncated", action="store_true")
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    print(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ImageFile.LOAD_TRUNCATED_IMAGES = False

    files = sorted(str(p.relative_to(args.data_path)) for p in Path(args.data_path).rglob("*.jpg"))
    random.Random(0).shuffle(files)
    cut = max(1, len(files) // 8)
    train_files = files[cut:]
    if args.truncated:
        source = Path(args.data_path) / files[-1]
        Path("broken.jpg").write_bytes(source.read_bytes()[:3000])
        train_files.append(str(Path("broken.jpg").absolute()))
    if args.extra_file:
        train_files.append(args.extra_file)
    dataset = BoxDataset(args.data_path, train_files, args.size, args)
    dataset_test = BoxDataset(args.data_path, files[:cut], args.size, args)
    data_loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, collate_fn=collate_fn
    )
    data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=1, collate_fn=collate_fn)

    model = get_model(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    if args.resume:
        model.load_state_dict(torch.load(args.resume)["model"])

    print("Start training")
    start_time, data_total, epoch = time.time(), 0.0, 0
    while time.time() - start_time < args.max_time and epoch < args.max_epochs:
        logger = train_one_epoch(model, optimizer, data_loader, epoch, args.print_freq, start_time + args.max_time)
        data_total += logger.data_total
        torch.save({"model": model.state_dict(), "epoch": epoch}, "model.pth")
        if args.eval:
            evaluate(model, data_loader_test)
        epoch += 1
    print(f"Training time {datetime.timedelta(seconds=int(time.time() - start_time))}")
    write_known(data=data_total)


if __name__ == "__main__":
    main()
