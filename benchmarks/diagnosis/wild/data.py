"""The drawn data sets of the jobs: `python data.py FOLDER KIND …`, kinds as in `KINDS`.

Each kind is a folder below FOLDER, and is made once. `records` needs TensorFlow; all others need numpy and Pillow.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle")


def picture(rng: random.Random, size: int, label: int) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """Returns an image with one shape on noise, and the xyxy box of the shape in pixels."""
    noise = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 90, (size // 4, size // 4, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((size, size), Image.Resampling.BILINEAR)
    side = rng.randrange(size // 4, size // 2)
    x, y = rng.randrange(size - side), rng.randrange(size - side)
    color = tuple(rng.randrange(120, 256) for _ in range(3))
    pen = ImageDraw.Draw(image)
    if label == 0:
        pen.ellipse((x, y, x + side, y + side), fill=color)
    elif label == 1:
        pen.rectangle((x, y, x + side, y + side), fill=color)
    else:
        pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=color)
    return image, (x, y, x + side, y + side)


def class_folders(folder: Path, count: int, size: int, classes: tuple[str, ...] = CLASSES) -> None:
    """Draws `count` images into one folder per class."""
    rng = random.Random(count)
    for n in range(count):
        label = n % len(classes)
        path = folder / classes[label] / f"{n:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(rng, size, label)[0].save(path, quality=90)


def yolo(folder: Path, train: int, val: int, size: int) -> None:
    """Draws a data set in the format of YOLO with its YAML file, and its boxes in `train.json` and `val.json`."""
    rng = random.Random(7)
    for split, count in (("train", train), ("val", val)):
        images, labels = folder / "images" / split, folder / "labels" / split
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        rows = []
        for n in range(count):
            label = n % len(CLASSES)
            image, (x0, y0, x1, y1) = picture(rng, size, label)
            image.save(images / f"{n:04d}.jpg", quality=90)
            box = ((x0 + x1) / 2 / size, (y0 + y1) / 2 / size, (x1 - x0) / size, (y1 - y0) / size)
            (labels / f"{n:04d}.txt").write_text(f"{label} " + " ".join(f"{v:.5f}" for v in box) + "\n")
            rows.append({"file": f"images/{split}/{n:04d}.jpg", "box": [x0, y0, x1 - x0, y1 - y0], "label": label})
        (folder / f"{split}.json").write_text(json.dumps(rows))
    names = "".join(f"  {n}: {name}\n" for n, name in enumerate(CLASSES))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}")


def missing(folder: Path) -> None:
    """A YAML file of a data set whose validation images were never copied, and a list of images of which one is not."""
    yolo(folder, 8, 0, 96)
    (folder / "images" / "val").rmdir()
    numbers = [n for n in range(90) if n % 3 < 2]
    rows = [f"{'square' if n % 3 else 'circle'}/{n:04d}.jpg,{n % 3}" for n in numbers]
    (folder / "list.csv").write_text("\n".join([*rows[:50], "circle/0991.jpg,0", *rows[50:]]) + "\n")


def records(folder: Path, shards: int, per_shard: int, size: int) -> None:
    """Writes `tf.train.Example`s of JPEG bytes and label, and two damaged copies of a shard."""
    import tensorflow as tf

    rng = random.Random(3)
    scratch = folder / "scratch.jpg"
    folder.mkdir(parents=True)
    for shard in range(shards):
        with tf.io.TFRecordWriter(str(folder / f"train-{shard:02d}.tfrecord")) as writer:
            for n in range(per_shard):
                picture(rng, size, n % 3)[0].save(scratch, quality=90)
                feature = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[scratch.read_bytes()])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[n % 3])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    scratch.unlink()
    whole = (folder / "train-00.tfrecord").read_bytes()
    middle = len(whole) // 2
    for name, data in (
        ("truncated", whole[: len(whole) * 2 // 3]),
        ("flipped", whole[:middle] + bytes(byte ^ 0x5A for byte in whole[middle : middle + 64]) + whole[middle + 64 :]),
    ):
        (folder / name).mkdir()
        (folder / name / "train-00.tfrecord").write_bytes(data)


KINDS = {
    "missing": missing,
    "shapes": lambda folder: class_folders(folder, 288, 128),
    "shapes_nfs": lambda folder: class_folders(folder, 288, 128),
    "scans": lambda folder: class_folders(folder, 48, 1600),
    "yolo": lambda folder: yolo(folder, 80, 16, 160),
    "yolo_val": lambda folder: yolo(folder, 16, 96, 160),
    "yolo_large": lambda folder: yolo(folder, 48, 8, 2400),
    "yolo_mid": lambda folder: yolo(folder, 48, 8, 480),
    "records": lambda folder: records(folder, 4, 96, 160),
}


def main() -> None:
    root = Path(sys.argv[1])
    for kind in sys.argv[2:]:
        if not (root / kind / "ready").exists():
            KINDS[kind](root / kind)
            (root / kind / "ready").touch()


if __name__ == "__main__":
    main()
