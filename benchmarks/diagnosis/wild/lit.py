"""Lightning: a LightningModule and a LightningDataModule for small images."""

import argparse
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytorch_lightning as pl
import torch
from known import write_known
from PIL import Image, ImageFilter
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T


def elastic(img):
    """An elastic distortion, in Python."""
    w, h = img.size
    src, dst = img.load(), Image.new("RGB", (w, h))
    out = dst.load()
    for y in range(h):
        shift = random.randint(-3, 3)
        for x in range(w):
            out[x, y] = src[(x + shift) % w, y]
    return dst


PIPELINES = {
    "none": [],
    "python": [T.Lambda(elastic)],
    "pil": [
        T.Lambda(lambda img: img.resize((300, 300)).filter(ImageFilter.MedianFilter(3))),
        T.ColorJitter(0.4, 0.4, 0.4, 0.2),
    ],
}


class Pictures(Dataset):
    def __init__(self, files, transform):
        self.files, self.transform = files, transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with Image.open(self.files[i]) as img:
            return self.transform(img.convert("RGB")), int(self.files[i].stem) % 3


class Data(pl.LightningDataModule):
    def __init__(self, root, batch_size, num_workers, augment):
        super().__init__()
        self.root, self.batch_size, self.num_workers = Path(root), batch_size, num_workers
        end = [T.Resize((64, 64)), T.ToTensor(), T.Normalize((0.5,) * 3, (0.5,) * 3)]
        self.train_transform, self.val_transform = T.Compose(PIPELINES[augment] + end), T.Compose(end)

    def setup(self, stage):  # noqa: ARG002
        files = sorted(self.root.rglob("*.jpg"))
        random.Random(0).shuffle(files)
        cut = len(files) // 5
        self.val, self.train = Pictures(files[:cut], self.val_transform), Pictures(files[cut:], self.train_transform)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers, drop_last=True,
                          persistent_workers=self.num_workers > 0)  # fmt: skip

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)


class LitClassifier(pl.LightningModule):
    def __init__(self, width, hidden, lr, optimizer, counting):  # noqa: ARG002
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 1, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(8 * width, hidden), nn.ReLU(), nn.Linear(hidden, 3),
        )  # fmt: skip
        self.words, self.counted = Counter(), 0.0

    def training_step(self, batch, batch_idx):  # noqa: ARG002
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, prog_bar=True)
        t = time.perf_counter()
        for _ in range(self.hparams.counting):
            for row in logits.tolist():
                self.words.update(f"{v:.2f}" for v in row)
        self.counted += time.perf_counter() - t
        return loss

    def validation_step(self, batch, batch_idx):  # noqa: ARG002
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), prog_bar=True)

    def configure_optimizers(self):
        kind = torch.optim.AdamW if self.hparams.optimizer == "adamw" else torch.optim.SGD
        return kind(self.parameters(), lr=self.hparams.lr)


class Extras(Callback):
    def __init__(self, opt):
        self.opt, self.ranked, self.saved = opt, 0.0, 0.0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):  # noqa: ARG002
        t = time.perf_counter()
        if self.opt.rank_table:
            table = [(random.random(), n) for n in range(self.opt.rank_table)]
            for key in range(2):
                table.sort(key=lambda row: row[key])
        self.ranked += time.perf_counter() - t
        if self.opt.val_now and trainer.global_step % self.opt.val_now == 0:
            module.eval()
            with torch.no_grad():
                losses = [
                    nn.functional.cross_entropy(module.net(x), y).item() for x, y in trainer.datamodule.val_dataloader()
                ]
            print("extra validation", sum(losses) / len(losses))
            module.train()
        t = time.perf_counter()
        if self.opt.save_now and trainer.global_step % self.opt.save_now == 0:
            torch.save({"model": module.state_dict(), "opt": trainer.optimizers[0].state_dict()}, "newest.pt")
            with open("newest.pt", "rb") as f:
                os.fsync(f.fileno())
        self.saved += time.perf_counter() - t


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--num-workers", type=int, default=1)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--width", type=int, default=32)
    ap.add_argument("--hidden", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--optimizer", default="adamw")
    ap.add_argument("--augment", default="none", choices=PIPELINES)
    ap.add_argument("--seconds", type=int, default=16)
    ap.add_argument("--counting", type=int, default=0)
    ap.add_argument("--rank-table", type=int, default=0)
    ap.add_argument("--val-check-interval", type=int, default=0)
    ap.add_argument("--val-now", type=int, default=0)
    ap.add_argument("--ckpt-every", type=int, default=0)
    ap.add_argument("--save-now", type=int, default=0)
    ap.add_argument("--freeze", action="store_true")
    opt = ap.parse_args()
    pl.seed_everything(0)
    model = LitClassifier(opt.width, opt.hidden, opt.lr, opt.optimizer, opt.counting)
    if opt.freeze:
        for parameter in list(model.parameters())[:-1]:
            parameter.requires_grad_(False)
    extras = Extras(opt)
    callbacks = [extras]
    if opt.ckpt_every:
        callbacks.append(ModelCheckpoint(dirpath="ckpt", every_n_train_steps=opt.ckpt_every, save_top_k=1))
    trainer = pl.Trainer(
        max_time={"seconds": opt.seconds}, max_epochs=-1, accelerator="cpu", devices=1, callbacks=callbacks,
        enable_checkpointing=bool(opt.ckpt_every), logger=False, log_every_n_steps=1,
        val_check_interval=opt.val_check_interval or None,
        check_val_every_n_epoch=None if opt.val_check_interval else 5, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=Data(opt.root, opt.batch_size, opt.num_workers, opt.augment))
    write_known(counted=model.counted, ranked=extras.ranked, saved=extras.saved)
