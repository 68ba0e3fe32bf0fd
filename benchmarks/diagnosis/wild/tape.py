"""A classifier of TFRecords with a loop of its own: `tf.data`, `GradientTape`, `tf.function`."""

import argparse
import io
import itertools
import os
import random
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from clock import Lost
from PIL import Image, ImageFilter

lost = Lost()


def parse_example(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    example = tf.io.parse_single_example(record, features)
    return tf.io.decode_jpeg(example["image"], channels=3), example["label"]


def prepare(image: tf.Tensor, label: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    image = tf.image.random_flip_left_right(tf.image.resize(image, (size, size)))
    return image / 127.5 - 1.0, label


def labeled_files(folder: Path) -> list[tuple[str, int]]:
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    pairs = [(str(path), n) for n, folder in enumerate(folders) for path in sorted(folder.glob("*.jpg"))]
    random.Random(1).shuffle(pairs)
    return pairs


def from_server(folder: Path) -> Iterator[tuple[np.ndarray, int]]:
    """Images of the data service, in the order of the index."""
    server = os.environ["FILE_SERVER"]
    for path, label in labeled_files(folder):
        with urllib.request.urlopen(f"{server}/{Path(path).relative_to(folder)}") as answer:
            yield np.asarray(Image.open(io.BytesIO(answer.read())), np.uint8), label


def from_pillow(folder: Path, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Scans of full size, cleaned and cropped to their content in Python."""
    for path, label in labeled_files(folder):
        image = Image.open(path).convert("RGB").filter(ImageFilter.BoxBlur(1))
        box = image.convert("L").point(lambda v: 255 if v > 100 else 0).getbbox()
        yield np.asarray(image.crop(box).resize((size, size), Image.Resampling.LANCZOS), np.uint8), label


class Net(tf.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        make = tf.random.Generator.from_seed(1)
        sizes = [3, width, width * 2, width * 4, width * 4]
        self.kernels = [
            tf.Variable(make.normal((3, 3, a, b)) * (2 / (9 * a)) ** 0.5) for a, b in itertools.pairwise(sizes)
        ]
        self.head = tf.Variable(make.normal((sizes[-1], classes)) * 0.05)
        self.bias = tf.Variable(tf.zeros(classes))

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        for kernel in self.kernels:
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, strides=2, padding="SAME"))
        return tf.reduce_mean(x, axis=(1, 2)) @ self.head + self.bias


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", default="")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--reader", choices=["records", "files", "server", "pillow"], default="records")
    parser.add_argument("--parallel", type=int, default=0, help="0: as TensorFlow likes")
    parser.add_argument("--no-prefetch", action="store_true")
    parser.add_argument("--shuffle", type=int, default=256)
    parser.add_argument("--read-buffer", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--warmup-in-python", action="store_true")
    parser.add_argument("--multi-scale", action="store_true")
    parser.add_argument("--keep", choices=["batches", "activations"])
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-batches", type=int, default=6)
    parser.add_argument("--random-labels", action="store_true")
    parser.add_argument("--measure-waits", action="store_true")
    args = parser.parse_args()

    parallel = args.parallel or tf.data.AUTOTUNE
    if args.reader == "records":
        files = sorted(tf.io.gfile.glob(args.records))
        data = tf.data.TFRecordDataset(files, buffer_size=args.read_buffer or None).repeat()
        data = data.map(parse_example, num_parallel_calls=parallel)
    elif args.reader == "files":
        names, labels = zip(*labeled_files(args.folder), strict=True)
        data = tf.data.Dataset.from_tensor_slices((list(names), list(labels))).repeat()

        def read(name: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return tf.io.decode_jpeg(tf.io.read_file(name), channels=3), tf.cast(label, tf.int64)

        data = data.map(read, num_parallel_calls=parallel)
    else:

        def generate() -> Iterator[tuple[np.ndarray, int]]:
            return from_server(args.folder) if args.reader == "server" else from_pillow(args.folder, args.size)

        signature = (tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((), tf.int64))
        data = tf.data.Dataset.from_generator(generate, output_signature=signature).repeat()
    if args.random_labels:
        data = data.map(lambda image, label: (image, tf.random.uniform((), 0, 3, tf.int64) + 0 * label))
    data = data.map(lambda image, label: prepare(image, label, args.size), num_parallel_calls=parallel)
    held_out = list(data.batch(args.batch).take(args.eval_batches)) if args.eval_batches else []
    data = data.shuffle(args.shuffle) if args.shuffle else data
    data = data.batch(args.batch)
    data = data if args.no_prefetch else data.prefetch(tf.data.AUTOTUNE)

    net = Net(3, args.width)
    momenta = [tf.Variable(tf.zeros_like(v)) for v in net.trainable_variables]

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor, lr: float) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, net(images)))
        for v, m, g in zip(net.trainable_variables, momenta, tape.gradient(loss, net.trainable_variables), strict=True):
            m.assign(0.9 * m + g)
            v.assign_sub(lr * m)
        return loss

    @tf.function
    def correct(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.cast(tf.argmax(net(images), 1) == labels, tf.float32))

    kept: list[object] = []
    fixed_lr = tf.constant(args.lr)
    batches = iter(data)
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        asked = time.perf_counter()
        images, labels = next(batches)
        if args.measure_waits:
            lost.add(time.perf_counter() - asked)
        if args.multi_scale:
            side = random.randrange(72, 168)
            images = tf.image.resize(images, (side, random.randrange(72, 168)))
        lr = args.lr * min(1.0, step / args.steps) if args.warmup_in_python else fixed_lr
        loss = train_step(images, labels, lr)
        if args.keep == "batches":
            kept.append((images.numpy(), labels.numpy(), float(loss)))
        elif args.keep == "activations":
            features = tf.nn.relu(tf.nn.conv2d(images, net.kernels[0], 1, "SAME"))
            kept.append({"step": step, "input": images, "features": features})
        if step % 10 == 0:
            rate = step * args.batch / (time.perf_counter() - began)
            print(f"step {step}/{args.steps}  loss {float(loss):.4f}  {rate:.1f} images/s", flush=True)
        if held_out and step % args.eval_every == 0:
            accuracy = np.mean([float(correct(*batch)) for batch in held_out])
            print(f"step {step}: val accuracy {accuracy:.3f}", flush=True)
    if args.warmup_in_python:
        whole = time.perf_counter() - began
        again = time.perf_counter()
        for _ in range(4):
            train_step(images, labels, lr)
        lost.add(whole - args.steps * (time.perf_counter() - again) / 4)


if __name__ == "__main__":
    main()
