"""Drawn data for the programs of `diagnose_programs.py`: `python draw.py CODE JSON` runs CODE, which calls functions of
this file, in the working directory, with the values of JSON as variables.
"""

import csv
import gzip
import json
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("circle", "square")
Box = tuple[int, int, int, int, int]


def shapes(count: int, width: int, height: int, seed: int = 0) -> Iterator[tuple[Image.Image, list[Box]]]:
    """Images of one to four shapes on noise, with boxes (x1, y1, x2, y2, class)."""
    chance = random.Random(seed)
    noise = np.random.default_rng(seed).integers(0, 90, (height, width, 3), dtype=np.uint8)
    for _ in range(count):
        image = Image.fromarray(np.roll(noise, chance.randrange(width), axis=1))
        pen, boxes = ImageDraw.Draw(image), []
        for _ in range(chance.randint(1, 4)):
            side = chance.randint(min(width, height) // 5, min(width, height) // 2)
            x, y, label = chance.randrange(width - side), chance.randrange(height - side), chance.randrange(2)
            color = tuple(chance.randint(120, 255) for _ in range(3))
            (pen.ellipse if label == 0 else pen.rectangle)((x, y, x + side, y + side), fill=color)
            boxes.append((x, y, x + side, y + side, label))
        yield image, boxes


def save(folder: str, count: int, width: int, height: int, seed: int = 0) -> dict[str, list[Box]]:
    """JPEG files in a folder: path → boxes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    found = {}
    for number, (image, boxes) in enumerate(shapes(count, width, height, seed)):
        path = f"{folder}/{number:05d}.jpg"
        image.save(path, quality=90)
        found[path] = boxes
    return found


def csv_set(name: str, count: int, width: int, height: int) -> None:
    """NAME.csv with a row (path, x1, y1, x2, y2, class) for each box, and classes.csv."""
    with open(f"{name}.csv", "w", newline="") as file:
        for path, boxes in save(f"images_{name}", count, width, height, len(name)).items():
            csv.writer(file).writerows([path, *box[:4], CLASSES[box[4]]] for box in boxes)
    Path("classes.csv").write_text("".join(f"{c},{i}\n" for i, c in enumerate(CLASSES)))


def line_set(name: str, count: int, width: int, height: int) -> None:
    """NAME.txt with a line "path x1,y1,x2,y2,class …" for each image."""
    found = save(f"images_{name}", count, width, height, len(name))
    Path(f"{name}.txt").write_text(
        "".join(f"{path} {' '.join(','.join(map(str, box)) for box in boxes)}\n" for path, boxes in found.items())
    )


def coco_set(root: str, name: str, images: str, annotations: str, count: int, width: int, height: int) -> None:
    """A COCO file at root/annotations and its images in root/images."""
    found = save(f"{root}/{images}", count, width, height, len(name))
    listed, boxes = [], []
    for number, (path, drawn) in enumerate(found.items(), 1):
        listed.append({"id": number, "file_name": Path(path).name, "width": width, "height": height})
        boxes += [
            {"id": len(boxes) + i + 1, "image_id": number, "category_id": c + 1, "iscrowd": 0,
             "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
            for i, (x1, y1, x2, y2, c) in enumerate(drawn)
        ]  # fmt: skip
    classes = [{"id": i + 1, "name": name} for i, name in enumerate(CLASSES)]
    place = Path(root, "annotations", annotations)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps({"images": listed, "annotations": boxes, "categories": classes}))


def voc_set(root: str, count: int, width: int, height: int, class_names: tuple[str, str]) -> None:
    """A VOC2007 folder with the split trainval."""
    for folder in ("Annotations", "ImageSets/Main"):
        Path(root, folder).mkdir(parents=True, exist_ok=True)
    found = save(f"{root}/JPEGImages", count, width, height)
    for path, boxes in found.items():
        text = f"<annotation><size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        for x1, y1, x2, y2, label in boxes:
            text += f"<object><name>{class_names[label]}</name><difficult>0</difficult><bndbox><xmin>{x1 + 1}</xmin>"
            text += f"<ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
        Path(root, "Annotations", Path(path).stem + ".xml").write_text(text + "</annotation>")
    Path(root, "ImageSets/Main/trainval.txt").write_text("".join(f"{Path(path).stem}\n" for path in found))


def mask_set(count: int, width: int, height: int) -> None:
    """data/imgs/N.jpg with data/masks/N.png."""
    found = save("data/imgs", count, width, height)
    Path("data/masks").mkdir(parents=True, exist_ok=True)
    for path, boxes in found.items():
        mask = Image.new("L", (width, height))
        for x1, y1, x2, y2, _ in boxes:
            ImageDraw.Draw(mask).rectangle((x1, y1, x2, y2), fill=255)
        mask.save(f"data/masks/{Path(path).stem}.png")


def digits(count: int, seed: int, side: int = 28) -> tuple[np.ndarray, np.ndarray]:
    """Gray images uint8 [count, side, side] of bars in ten directions, and labels."""
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, 10, count).astype(np.uint8)
    y, x = np.mgrid[:side, :side] - side / 2
    angles = labels[:, None, None] * np.pi / 10
    bars = np.abs(x * np.sin(angles) + y * np.cos(angles)) < chance.uniform(2, 4, (count, 1, 1))
    return (bars * 200 + chance.integers(0, 50, (count, side, side))).astype(np.uint8), labels


def mnist(folder: str, count: int, test: int, zipped: bool = False) -> None:
    """The four files of MNIST."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, number, seed in (("train", count, 0), ("t10k", test, 1)):
        images, labels = digits(number, seed)
        shape = b"".join(size.to_bytes(4, "big") for size in images.shape)
        for kind, magic, head, values in (
            ("images-idx3", 2051, shape, images),
            ("labels-idx1", 2049, shape[:4], labels),
        ):
            content = magic.to_bytes(4, "big") + head + values.tobytes()
            path = Path(folder, f"{name}-{kind}-ubyte")
            if zipped:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(content, 1))
            else:
                path.write_bytes(content)


def cifar100(folder: str, count: int, test: int) -> None:
    """The three files of CIFAR-100 (ten of its classes)."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, number, seed in (("train", count, 0), ("test", test, 1)):
        images, labels = digits(number, seed, 32)
        pixels = np.repeat(images.reshape(number, 1, -1), 3, axis=1).reshape(number, -1)
        Path(folder, name).write_bytes(pickle.dumps({"data": pixels, "fine_labels": labels.tolist()}))
    Path(folder, "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}))


def words(folder: str, lines: int) -> None:
    """train.txt, valid.txt and test.txt of drawn words."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for name, count in (("train", lines), ("valid", lines // 20), ("test", lines // 20)):
        text = (" ".join(f"w{int(chance.paretovariate(0.7)) % 2000}" for _ in range(20)) for _ in range(count))
        Path(folder, f"{name}.txt").write_text("\n".join(text) + "\n")


def tokens(folder: str, count: int, vocabulary: int) -> None:
    """train.bin, val.bin (uint16) and meta.pkl."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, number in (("train", count), ("val", count // 10)):
        steps = np.random.default_rng(number).integers(0, 4, number)
        Path(folder, f"{name}.bin").write_bytes((np.cumsum(steps) % vocabulary).astype(np.uint16).tobytes())
    Path(folder, "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))


def records(path: str, count: int, width: int, height: int) -> None:
    """A TFRecord file of detection examples, and classes.names."""
    import io

    import tensorflow as tf

    def of(values: list[float] | list[bytes]) -> tf.train.Feature:
        if isinstance(values[0], bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    Path("classes.names").write_text("".join(f"{name}\n" for name in CLASSES))
    with tf.io.TFRecordWriter(path) as writer:
        for image, boxes in shapes(count, width, height, len(path)):
            buffer = io.BytesIO()
            image.save(buffer, "JPEG")
            corners = {
                name: of([box[i] / (height if i % 2 else width) for box in boxes])
                for i, name in enumerate(("xmin", "ymin", "xmax", "ymax"))
            }
            feature = {f"image/object/bbox/{name}": value for name, value in corners.items()}
            feature |= {"image/encoded": of([buffer.getvalue()])}
            feature |= {"image/object/class/text": of([CLASSES[box[4]].encode() for box in boxes])}
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())


if __name__ == "__main__":
    exec(sys.argv[1], globals() | json.loads(sys.argv[2]))
