"""Keras with torch as its backend: `model.fit` on a PyDataset, with callbacks."""

import argparse
import io
import os
import random
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import requests
from keras import layers
from known import write_known
from PIL import Image, ImageEnhance, ImageFilter


class Batches(keras.utils.PyDataset):
    def __init__(self, source, batch, augment, side, **kwargs):
        super().__init__(**kwargs)
        self.source, self.batch, self.augment, self.side, self.spent = source, batch, augment, side, 0.0
        self.session = requests.Session()
        if source.startswith("http"):
            self.files = self.session.get(source + "/", timeout=60).text.split()
        else:
            self.files = sorted(str(p) for p in Path(source).rglob("*.jpg"))
        random.Random(0).shuffle(self.files)

    def __len__(self):
        return len(self.files) // self.batch

    def __getitem__(self, n):
        began = time.perf_counter()
        chosen = self.files[n * self.batch : (n + 1) * self.batch]
        x = np.stack([self.load(name) for name in chosen])
        y = np.array([int(Path(name).stem) % 3 for name in chosen])
        self.spent += time.perf_counter() - began
        return x, y

    def load(self, name):
        if self.source.startswith("http"):
            data = self.session.get(f"{self.source}/{name}", timeout=60).content
        else:
            data = Path(name).read_bytes()
        image = Image.open(io.BytesIO(data)).convert("RGB")
        if self.augment == "pil":
            image = image.rotate(random.uniform(-20, 20), Image.Resampling.BICUBIC, expand=True).resize((500, 500))
            image = ImageEnhance.Sharpness(image.filter(ImageFilter.GaussianBlur(4))).enhance(1.5)
        x = np.asarray(image.resize((self.side, self.side)), "float32") / 255
        if self.augment == "python":
            for row in range(self.side):
                for column in range(self.side):
                    x[row, column] = x[row, column] * 0.9 + random.random() * 0.1
        return x


class Tracker(keras.callbacks.Callback):
    """Sends the loss of each batch."""

    def __init__(self, url):
        super().__init__()
        self.url, self.spent = url, 0.0

    def on_train_batch_end(self, batch, logs=None):
        t = time.perf_counter()
        requests.post(self.url, json={"batch": batch, **{k: float(v) for k, v in (logs or {}).items()}}, timeout=60)
        self.spent += time.perf_counter() - t


class Ranking(keras.callbacks.Callback):
    """Keeps a sorted list of words for a dashboard."""

    def __init__(self, size):
        super().__init__()
        self.size, self.spent = size, 0.0

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        t = time.perf_counter()
        words = [str((n * 7919) % self.size) for n in range(self.size)]
        " ".join(sorted(words, key=lambda word: (len(word), word)))
        self.spent += time.perf_counter() - t


class EvaluateOften(keras.callbacks.Callback):
    def __init__(self, data, every):
        super().__init__()
        self.data, self.every = data, every

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        if batch % self.every == self.every - 1:
            print("\nheld out:", self.model.evaluate(self.data, verbose=0))


class StopAfter(keras.callbacks.Callback):
    def __init__(self, seconds):
        super().__init__()
        self.ends = time.time() + seconds

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        if time.time() > self.ends:
            self.model.stop_training = True


def build(width, dense):
    return keras.Sequential([
        layers.Input((64, 64, 3)),
        layers.Conv2D(width, 3, strides=2, activation="relu"), layers.Conv2D(2 * width, 3, activation="relu"),
        layers.Conv2D(2 * width, 3, strides=2, activation="relu"), layers.GlobalAveragePooling2D(),
        layers.Dense(dense, activation="relu"), layers.Dense(3, activation="softmax"),
    ])  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--dense", type=int, default=64)
    parser.add_argument("--augment", default="none")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, default=16)
    parser.add_argument("--steps-per-epoch", type=int)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--tracker", default="")
    parser.add_argument("--ranking", type=int, default=0)
    parser.add_argument("--checkpoint-freq", type=int, default=0)
    parser.add_argument("--labels-shape", type=int, default=0)
    parser.add_argument("--weights", default="")
    parser.add_argument("--verbose", type=int, default=1)
    args = parser.parse_args()
    keras.utils.set_random_seed(3)

    train = Batches(args.source, args.batch, args.augment, 64, workers=args.workers)
    held_out = Batches(args.source, args.batch, "none", 64)
    model = build(args.width, args.dense)
    optimizer = keras.optimizers.SGD(args.lr) if args.optimizer == "sgd" else keras.optimizers.Adam(args.lr)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    if args.weights:
        model.load_weights(args.weights)
    tracker, ranking = Tracker(args.tracker), Ranking(args.ranking)
    callbacks = [StopAfter(args.seconds)]
    callbacks += [tracker] if args.tracker else []
    callbacks += [ranking] if args.ranking else []
    callbacks += [EvaluateOften(held_out, args.evaluate_every)] if args.evaluate_every else []
    if args.checkpoint_freq:
        callbacks.append(keras.callbacks.ModelCheckpoint("model.keras", save_freq=args.checkpoint_freq))
    model.fit(train, epochs=10**5, steps_per_epoch=args.steps_per_epoch, callbacks=callbacks, verbose=args.verbose,
              validation_data=held_out if args.validate else None)  # fmt: skip
    write_known(loaded=train.spent, tracked=tracker.spent, ranked=ranking.spent)


if __name__ == "__main__":
    main()
