"""YOLO11n of Ultralytics, from scratch, on a data set of one's own."""

import argparse
import io
import os
import time
import urllib.request
from pathlib import Path

os.environ.setdefault("YOLO_CONFIG_DIR", str(Path("settings").resolve()))
os.environ.setdefault("YOLO_OFFLINE", "true")

import numpy as np
from clock import Lost
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from ultralytics import YOLO
from ultralytics.data.dataset import YOLODataset
from ultralytics.models.yolo.detect import DetectionTrainer

lost = Lost()


class ServedDataset(YOLODataset):
    """Training images come from the server of the labeling tool at each access; labels are local."""

    def load_image(self, i: int, rect_mode: bool = True) -> tuple[np.ndarray, tuple[int, int], tuple[int, int]]:  # noqa: ARG002 (YOLODataset calls it so)
        name = Path(self.im_files[i])
        if self.augment:
            self.buffer = [*self.buffer, i][-self.max_buffer_length :]
        url = f"{os.environ['FILE_SERVER']}/{name.parent.name}/{name.name}"
        with lost.stretch(), urllib.request.urlopen(url) as answer:
            body = answer.read()
        image = Image.open(io.BytesIO(body)).convert("RGB")
        height, width = image.height, image.width
        image = image.resize((self.imgsz, self.imgsz))
        return np.ascontiguousarray(np.asarray(image)[..., ::-1]), (height, width), (self.imgsz, self.imgsz)


class PhotometricDataset(YOLODataset):
    """Weather and camera effects, made with Pillow."""

    def load_image(self, i: int, rect_mode: bool = True) -> tuple[np.ndarray, tuple[int, int], tuple[int, int]]:
        array, before, after = super().load_image(i, rect_mode)
        with lost.stretch():
            image = Image.fromarray(array).resize((640, 640), Image.Resampling.BICUBIC)
            image = image.filter(ImageFilter.MedianFilter(5)).filter(ImageFilter.GaussianBlur(2))
            image = ImageOps.equalize(ImageEnhance.Sharpness(image).enhance(1.5))
            array = np.array(image.resize((after[1], after[0]), Image.Resampling.LANCZOS))
        return array, before, after


class Trainer(DetectionTrainer):
    dataset_class: type[YOLODataset] = YOLODataset

    def build_dataset(self, img_path: str, mode: str = "train", batch: int | None = None) -> YOLODataset:
        dataset = super().build_dataset(img_path, mode, batch)
        if mode == "train":
            dataset.__class__ = self.dataset_class
            dataset.buffer = []
        return dataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--images", choices=["local", "served", "photometric"], default="local")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--imgsz", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr0", type=float, default=0.01)
    parser.add_argument("--check-every", type=int, default=0, help="batches")
    parser.add_argument("--model", default="yolo11n.yaml")
    parser.add_argument("--clock-val", action="store_true")
    parser.add_argument("--no-val", action="store_true")
    args = parser.parse_args()
    sources = {"local": YOLODataset, "served": ServedDataset, "photometric": PhotometricDataset}
    Trainer.dataset_class = sources[args.images]

    model = YOLO(args.model)
    if args.check_every:

        def check(trainer: DetectionTrainer) -> None:
            """Validates every few batches, to see the best moment."""
            trainer.seen_batches = getattr(trainer, "seen_batches", 0) + 1
            if trainer.seen_batches % args.check_every == 0:
                trainer.validate()
                trainer.model.train()

        model.add_callback("on_train_batch_end", check)
    if args.check_every or args.clock_val:
        begun: list[float] = []
        model.add_callback("on_val_start", lambda _: begun.append(time.perf_counter()))
        model.add_callback("on_val_end", lambda _: lost.add(time.perf_counter() - begun[-1]))
    model.train(
        trainer=Trainer, data=args.data, epochs=args.epochs, imgsz=args.imgsz, batch=args.batch, workers=args.workers,
        device="cpu", amp=False, plots=False, lr0=args.lr0, optimizer="SGD", warmup_epochs=1,
        project=str(Path("runs").resolve()), name="train", exist_ok=True, val=not args.no_val, seed=1,
    )  # fmt: skip


if __name__ == "__main__":
    main()
