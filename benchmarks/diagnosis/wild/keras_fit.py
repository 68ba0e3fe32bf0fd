"""An image classifier with `model.fit`, Keras on TensorFlow."""

import argparse
import csv
import io
import json
import os
import random
import time
import urllib.request
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from clock import Lost
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

SIZE = 96
lost = Lost()


def build_model(classes: int, width: int, hidden: int) -> keras.Model:
    inputs = keras.Input((SIZE, SIZE, 3))
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    for depth in range(3):
        x = keras.layers.Conv2D(width << depth, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(x)
        x = keras.layers.MaxPooling2D()(x)
    if hidden:
        x = keras.layers.Dense(hidden, activation="relu")(keras.layers.Flatten()(x))
    else:
        x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(classes, activation="softmax")(x))


def read_image(path: tf.Tensor) -> tf.Tensor:
    image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    return tf.image.resize(image, (SIZE, SIZE))


def equalize_in_numpy(path: bytes) -> np.ndarray:
    """Equalizes the histogram of each channel, pixel by pixel."""
    image = np.asarray(Image.open(path.decode()).resize((SIZE, SIZE))).astype(np.uint8)
    out = np.empty_like(image)
    for channel in range(3):
        counts = [0] * 256
        for value in image[..., channel].ravel().tolist():
            counts[value] += 1
        table, total = [], 0
        for count in counts:
            total += count
            table.append(255 * total // image[..., 0].size)
        out[..., channel] = np.array(table, np.uint8)[image[..., channel]]
    return out.astype(np.float32)


def python_image(path: tf.Tensor) -> tf.Tensor:
    image = tf.numpy_function(equalize_in_numpy, [path], tf.float32)
    return tf.ensure_shape(image, (SIZE, SIZE, 3))


class UrlSequence(keras.utils.PyDataset):
    """Images of a web server, one request per image."""

    def __init__(self, url: str, names: list[str], labels: list[int], batch: int) -> None:
        super().__init__()
        self.url, self.names, self.labels, self.batch = url, names, labels, batch

    def __len__(self) -> int:
        return len(self.names) // self.batch

    def load(self, name: str) -> np.ndarray:
        with urllib.request.urlopen(f"{self.url}/{name}") as answer:
            return np.asarray(Image.open(io.BytesIO(answer.read())).resize((SIZE, SIZE)), np.float32)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = slice(index * self.batch, (index + 1) * self.batch)
        return np.stack([self.load(name) for name in self.names[chosen]]), np.array(self.labels[chosen])


class AugmentedSequence(UrlSequence):
    """Files, augmented with Pillow."""

    def load(self, name: str) -> np.ndarray:
        image = Image.open(name).convert("RGB").resize((256, 256), Image.Resampling.LANCZOS)
        image = image.rotate(random.uniform(-20, 20), Image.Resampling.BICUBIC, expand=True)
        image = ImageEnhance.Color(image).enhance(random.uniform(0.6, 1.4))
        image = ImageEnhance.Contrast(image).enhance(random.uniform(0.6, 1.4))
        image = ImageOps.autocontrast(image.filter(ImageFilter.GaussianBlur(random.uniform(0, 3))))
        return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.LANCZOS), np.float32)


class ConfusionMatrix(keras.callbacks.Callback):
    """After each batch: which class is taken for which, over a few images that are always the same."""

    def __init__(self, images: np.ndarray, labels: list[int]) -> None:
        super().__init__()
        self.images, self.labels, self.pairs = images, labels, []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:  # noqa: ARG002 (Keras calls it so)
        with lost.stretch():
            for row, truth in zip(self.images, self.labels, strict=True):
                flat = row.ravel().tolist()
                mean = sum(flat) / len(flat)
                spread = sum((v - mean) ** 2 for v in flat) / len(flat)
                self.pairs.append((truth, round(mean), round(spread)))
            matrix: dict[tuple[int, int], int] = {}
            for truth, mean, _ in self.pairs:
                matrix[truth, mean % 3] = matrix.get((truth, mean % 3), 0) + 1


class JsonHistory(keras.callbacks.Callback):
    """Keeps all weights' statistics of all batches in one JSON file, written anew after each batch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.rows = path, []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        with lost.stretch():
            weights = [[round(float(v), 5) for v in np.ravel(w)[:400]] for w in self.model.get_weights()]
            self.rows.append({"batch": batch, "loss": float((logs or {}).get("loss", 0)), "weights": weights})
            self.path.write_text(json.dumps(self.rows[-40:], indent=1, sort_keys=True))


class TimedValidation(keras.callbacks.Callback):
    def on_test_begin(self, logs: dict | None = None) -> None:  # noqa: ARG002 (Keras calls it so)
        self.began = time.perf_counter()

    def on_test_end(self, logs: dict | None = None) -> None:  # noqa: ARG002 (Keras calls it so)
        lost.add(time.perf_counter() - self.began)


def timed(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """The same callback; what it does after a batch is on the clock."""
    inner = callback.on_train_batch_end

    def after_batch(batch: int, logs: dict | None = None) -> None:
        with lost.stretch():
            inner(batch, logs)

    callback.on_train_batch_end = after_batch
    return callback


def focal_loss(truth: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """Written without a clip: the logarithm of a score of zero is minus infinity."""
    scores = tf.nn.relu(scores - 0.02)
    wanted = tf.one_hot(tf.cast(tf.reshape(truth, [-1]), tf.int32), 3)
    return -tf.reduce_sum(wanted * (1 - scores) ** 2 * tf.math.log(scores), axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--loss", choices=["crossentropy", "focal"], default="crossentropy")
    parser.add_argument("--input", choices=["files", "numpy", "pillow"], default="files")
    parser.add_argument("--remote", action="store_true")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--label-map", type=Path)
    parser.add_argument("--callback", choices=["confusion", "history"])
    parser.add_argument("--backup-freq", type=int, default=0)
    parser.add_argument("--save-freq", type=int, default=0)
    parser.add_argument("--val-repeat", type=int, default=1)
    parser.add_argument("--random-labels", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    if args.csv:
        rows = list(csv.reader(args.csv.open()))
        names, labels = [str(args.data / row[0]) for row in rows], [int(row[1]) for row in rows]
    else:
        folders = sorted(path for path in args.data.iterdir() if path.is_dir())
        pairs = [(str(path), n) for n, folder in enumerate(folders) for path in sorted(folder.glob("*.jpg"))]
        random.Random(0).shuffle(pairs)
        names, labels = [name for name, _ in pairs], [label for _, label in pairs]
    classes = 3
    if args.label_map:
        classes = len(tf.io.gfile.GFile(str(args.label_map)).read().split("item")) - 1
    if args.random_labels:
        labels = [random.randrange(3) for _ in labels]
    held_out = len(names) // 6
    val_names, val_labels = names[:held_out], labels[:held_out]
    names, labels = names[held_out:], labels[held_out:]

    auto = tf.data.AUTOTUNE
    if args.remote:
        remote = [str(Path(name).relative_to(args.data)) for name in names]
        train = UrlSequence(os.environ["FILE_SERVER"], remote, labels, args.batch)
    elif args.input == "pillow":
        train = AugmentedSequence("", names, labels, args.batch)
    else:
        train = tf.data.Dataset.from_tensor_slices((names, labels)).shuffle(len(names))
        if args.input == "numpy":
            train = train.map(lambda path, label: (python_image(path), label))
        else:
            train = train.map(lambda path, label: (read_image(path), label), num_parallel_calls=auto)
        train = train.batch(args.batch, drop_remainder=True).prefetch(auto)
    val = tf.data.Dataset.from_tensor_slices((val_names, val_labels)).map(
        lambda path, label: (read_image(path), label), num_parallel_calls=auto
    )
    val = val.cache().repeat(args.val_repeat).batch(args.batch).prefetch(auto)

    callbacks: list[keras.callbacks.Callback] = []
    if args.callback == "confusion":
        images = np.stack([np.asarray(Image.open(name).resize((48, 48)), np.float32) for name in names[:24]])
        callbacks.append(ConfusionMatrix(images, labels[:24]))
    elif args.callback == "history":
        callbacks.append(JsonHistory(args.out / "history.json"))
    if args.backup_freq:
        callbacks.append(timed(keras.callbacks.BackupAndRestore(str(args.out / "backup"), save_freq=args.backup_freq)))
    if args.save_freq:
        callbacks.append(timed(keras.callbacks.ModelCheckpoint(str(args.out / "last.keras"), save_freq=args.save_freq)))
    if args.val_repeat > 1:
        callbacks.append(TimedValidation())

    model = build_model(classes, args.width, args.hidden)
    optimizer = keras.optimizers.get({"class_name": args.optimizer, "config": {"learning_rate": args.lr}})
    loss = focal_loss if args.loss == "focal" else "sparse_categorical_crossentropy"
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    model.fit(train, validation_data=val, epochs=args.epochs, callbacks=callbacks, verbose=2)
    model.save(args.out / "final.keras")


if __name__ == "__main__":
    main()
