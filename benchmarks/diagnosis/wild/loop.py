"""Trains a small image classifier. A plain PyTorch loop, all in one file."""

import argparse
import csv
import io
import os
import pickle
import queue
import random
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import requests
import torch
import torch.nn as nn
import torch.nn.functional as F
from known import write_known
from PIL import Image, ImageFilter, ImageOps
from torch.utils.data import DataLoader, Dataset

CLASSES = ["blue", "green", "red"]


def jitter_pixels(img):
    """Color jitter, pixel by pixel."""
    gain = [random.uniform(0.8, 1.2) for _ in range(3)]
    rows = img.tolist()
    for row in rows:
        for px in row:
            for c in range(3):
                px[c] = min(255, px[c] * gain[c])
    return np.asarray(rows, np.float32)


blur_more = lambda im: ImageOps.equalize(im.resize((640, 640)).filter(ImageFilter.GaussianBlur(9)))  # noqa: E731


class ImageData(Dataset):
    def __init__(self, files, size, augment, base_url=None, keep=False, random_labels=False):
        self.files, self.size, self.augment, self.url, self.keep = files, size, augment, base_url, keep
        self.seen, self.random_labels = {}, random_labels

    def __len__(self):
        return len(self.files)

    def read(self, path):
        if self.url:
            return requests.get(f"{self.url}/{path}", timeout=60).content
        with open(path, "rb") as f:
            return f.read()

    def __getitem__(self, i):
        path = self.files[i]
        im = Image.open(io.BytesIO(self.read(path))).convert("RGB")
        if self.augment == "lambda":
            im = blur_more(im)
        x = np.asarray(im.resize((self.size, self.size)), np.float32)
        if self.augment == "python":
            x = jitter_pixels(x)
        y = random.randrange(3) if self.random_labels else self.label(path)
        x = torch.from_numpy(x).permute(2, 0, 1) / 127.5 - 1
        if self.keep:
            self.seen[len(self.seen)] = (x, np.asarray(im).astype(np.float64))
        return x, y

    def label(self, path):
        name = Path(path).parent.name
        return CLASSES.index(name) if name in CLASSES else int(Path(path).stem) % 3


def make_net(width, hidden):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(width, width * 2, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width * 2, width * 2, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(width * 32, hidden), nn.ReLU(), nn.Linear(hidden, 3),
    )  # fmt: skip


@torch.no_grad()
def test(net, loader):
    net.eval()
    right = n = 0
    for x, y in loader:
        right += (net(x).argmax(1) == y).sum().item()
        n += len(y)
    net.train()
    return right / n


def valid(net, loader):
    total, count = 0.0, 0
    for xb, yb in loader:
        total += F.cross_entropy(net(xb), yb).item()
        count += 1
    return total / count


def pairwise_report(probs, labels, rounds):
    """ROC area of each class, by counting pairs."""
    out = []
    for _ in range(rounds):
        for c in range(3):
            pos = [p[c] for p, t in zip(probs, labels) if t == c]  # noqa: B905
            neg = [p[c] for p, t in zip(probs, labels) if t != c]  # noqa: B905
            out.append(sum(a > b for a in pos for b in neg) / max(1, len(pos) * len(neg)))
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("data", help="a folder, or the URL of a file server")
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--bs", type=int, default=32)
    ap.add_argument("--size", type=int, default=64)
    ap.add_argument("--width", type=int, default=40)
    ap.add_argument("--hidden", type=int, default=128)
    ap.add_argument("--opt", default="adam", choices=["adam", "sgd"])
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--max-seconds", type=float, default=16)
    ap.add_argument("--augment", default="none")
    ap.add_argument("--keep", action="store_true", help="keep decoded images in memory")
    ap.add_argument("--history", action="store_true", help="keep all losses for a plot")
    ap.add_argument("--random-labels", action="store_true")
    ap.add_argument("--tracker", default="", help="URL to post the metrics of each step to")
    ap.add_argument("--csv", default="", help="metrics of each step as CSV")
    ap.add_argument("--auc", type=int, default=0, help="rounds of AUC of each step")
    ap.add_argument("--stats", type=int, default=0, help="logits over which their deviation is computed")
    ap.add_argument("--eval-every", type=int, default=0)
    ap.add_argument("--valid-every", type=int, default=0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--save-with", default="torch", choices=["torch", "pickle"])
    ap.add_argument("--save-to", default="checkpoints")
    ap.add_argument("--wrong-net", action="store_true")
    ap.add_argument("--prefetch-thread-stops", type=int, default=0)
    ap.add_argument("--lock-at", type=int, default=0)
    ap.add_argument("--print-every", type=int, default=5)
    args = ap.parse_args()
    torch.manual_seed(0)
    random.seed(0)

    if args.data.startswith("http"):
        files, url = requests.get(args.data + "/", timeout=60).text.split(), args.data
    else:
        files, url = sorted(str(p) for p in Path(args.data).rglob("*.jpg")), None
    cut = len(files) * 4 // 5
    random.shuffle(files)
    train = ImageData(files[:cut], args.size, args.augment, url, args.keep, args.random_labels)
    val = ImageData(files[cut:], args.size, "none", url)
    loader = DataLoader(train, args.bs, shuffle=True, num_workers=args.workers, drop_last=True,
                        persistent_workers=args.workers > 0)  # fmt: skip
    val_loader = DataLoader(val, args.bs)

    net = make_net(args.width, args.hidden)
    tuned = make_net(args.width, args.hidden) if args.wrong_net else net
    optimizer = (torch.optim.Adam if args.opt == "adam" else torch.optim.SGD)(tuned.parameters(), lr=args.lr)

    history, lock = [], threading.Lock()
    writer = csv.writer(open(args.csv, "w", buffering=1)) if args.csv else None  # noqa: SIM115
    batches = queue.Queue(maxsize=4)
    if args.prefetch_thread_stops:

        def fill():
            for n, batch in enumerate(x for _ in range(10**6) for x in loader):
                if n == args.prefetch_thread_stops:
                    return
                batches.put(batch)

        threading.Thread(target=fill, daemon=True).start()

    waited = posted = saved = scored = 0.0
    logits = []
    step = epoch = 0
    start = end = time.time()
    while time.time() - start < args.max_seconds:
        epoch += 1
        source = iter(batches.get, None) if args.prefetch_thread_stops else loader
        for x, y in source:
            if step > 0:
                waited += time.time() - end
            out = net(x)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if args.history:
                history.append((loss, out, net[:6](x)))
            t = time.time()
            if args.auc:
                pairwise_report(out.softmax(1).tolist(), y.tolist(), args.auc)
            if args.stats:
                logits.extend(out.flatten().tolist() * 1000)
                del logits[: -args.stats]
                statistics.stdev(logits)
            scored += time.time() - t
            t = time.time()
            if args.tracker:
                requests.post(args.tracker + "/log", json={"step": step, "loss": loss.item()}, timeout=60)
            if writer:
                writer.writerow([step, epoch, loss.item()])
            posted += time.time() - t
            if args.lock_at and step >= args.lock_at:
                lock.acquire()
                with lock:
                    print("exchanging weights")
            if step % args.print_every == 0:
                print(f"epoch {epoch} step {step} loss={loss.item():.4f} lr={args.lr:g}", flush=True)
            if args.eval_every and step % args.eval_every == 0:
                print(f"accuracy {test(net, val_loader):.3f}", flush=True)
            if args.valid_every and step % args.valid_every == 0:
                print(f"val {valid(net, val_loader):.3f}", flush=True)
            if args.save_every and step % args.save_every == 0:
                t = time.time()
                os.makedirs(args.save_to, exist_ok=True)
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                name = os.path.join(args.save_to, f"last-{step % 2}.pt")
                if args.save_with == "torch":
                    torch.save(state, name)
                else:
                    with open(name, "wb") as f:
                        pickle.dump(state, f)
                        f.flush()
                        os.fsync(f.fileno())
                saved += time.time() - t
            end = time.time()
            if end - start > args.max_seconds:
                break
    print("done", step, "steps")
    write_known(waited=waited, posted=posted, saved=saved, scored=scored)


if __name__ == "__main__":
    main()
