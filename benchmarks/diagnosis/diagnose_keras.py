"""The Keras job of `diagnose.py`: a `fit` on small JPEGs, with torch as the backend, with one fault or none."""

import argparse
import math
import os
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import simplejpeg

from benchmarks.diagnosis.diagnose_inside import Debt, SlowFiles

WARM_STEPS = 5


class Images(keras.utils.PyDataset):
    """Batches, read and decoded in the main thread when `fit` needs them."""

    def __init__(self, folder: Path, batch: int) -> None:
        super().__init__()
        self._paths, self._batch = sorted(folder.glob("*.jpg")), batch

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = [self._paths[(place * self._batch + n) % len(self._paths)] for n in range(self._batch)]
        images = np.stack([simplejpeg.decode_jpeg(path.read_bytes()) for path in chosen])
        return images.astype("float32") / 127.5 - 1, np.array([int(path.stem.split("-")[0]) for path in chosen])


class Fault(keras.callbacks.Callback):
    def __init__(self, asked: argparse.Namespace, images: Images) -> None:
        super().__init__()
        self._asked, self._images = asked, images
        self._debt = Debt(asked.level if asked.level < 1 else 0.0, asked.log.with_suffix(".0.json"))
        self._slow = SlowFiles() if asked.fault == "slow_storage" else None
        self._began = self._batch_began = 0.0
        self._steps = 0
        self._kept: list[bytes] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:  # noqa: ARG002 (Keras calls it so)
        self._batch_began = time.perf_counter()
        self._began = self._began or self._batch_began

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:  # noqa: ARG002 (Keras calls it so)
        self._steps += 1
        now = time.perf_counter()
        if self._steps > WARM_STEPS:
            self._debt.owe(now - self._batch_began)
            if self._slow is not None:
                self._slow.each(max(0.0, self._debt.owed_s) / self._asked.batch_size)
                self._debt.paid(self._slow.stalled_s() - self._debt.total_s)
        self._debt.write(steps=self._steps, loop_s=now - self._began)
        if self._asked.fault == "leak":
            self._kept.append(os.urandom(4096) * int(self._asked.level * 1e6 * (now - self._batch_began) / 4096))
        if now - self._began > self._asked.seconds:
            self.model.stop_training = True

    def on_train_end(self, logs: object = None) -> None:  # noqa: ARG002
        self._debt.write(min_interval_s=0.0)


class Evaluation(Fault):
    """Evaluates every 20 steps, for the time that is owed."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        super().on_train_batch_end(batch, logs)
        if self._steps % 20 == 0 and self._debt.owed_s > 0:
            steps = max(1, math.ceil(self._debt.owed_s / 0.03))
            with self._debt.paying():
                self.model.evaluate(self._images, steps=steps, verbose=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--fault", default="none")
    for name, kind, default in (
        ("level", float, 0.0), ("seconds", float, 8.0), ("batch-size", int, 16), ("lr", float, 0.02),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    asked = parser.parse_args()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((96, 96, 3)),
            layers.Conv2D(32, 3, 2, "same", activation="relu"),
            layers.Conv2D(64, 3, 2, "same", activation="relu"),
            layers.Conv2D(64, 3, 1, "same", activation="relu"),
            layers.Conv2D(64, 3, 1, "same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(asked.lr, momentum=0.9), loss)
    images = Images(asked.data, asked.batch_size)
    fault = (Evaluation if asked.fault == "evaluation" else Fault)(asked, images)
    model.fit(images, epochs=1, callbacks=[fault])


if __name__ == "__main__":
    main()
