"""Steps of `training.parallel` without a run: the setup of a model, its optimizer and these ranks."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from stoker.config.settings import DataSettings
from stoker.data.batch import Batch
from stoker.hardware.device import Device
from stoker.models import Detector
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import OptimizerStep
from stoker.training.parallel import SingleProcess
from stoker.training.ranks import Ranks
from stoker.training.state import Signals, TrainState
from stoker.training.step import train_step

PLAIN = DataSettings(hflip=0.0, brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0, mosaic=0.0, mixup=0.0)
"""Without augmentation."""


def make_setup(
    model: Detector,
    optimizer: OptimizerStep,
    ranks: Ranks,
    device: Device,
    *,
    micro_batches: int = 1,
    image_size: tuple[int, int] = (64, 64),
) -> Any:
    """What a `Parallel` takes from a `TrainSetup`."""
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_accumulator=LossAccumulator(device, max_skipped_steps=20),
        ranks=ranks,
        device=device,
        state=TrainState(),
        micro_batches=micro_batches,
        config=SimpleNamespace(
            run=SimpleNamespace(precision="fp32", compile=False), data=dataclasses.replace(PLAIN, image_size=image_size)
        ),
    )


def ignore(_kind: str, _text: str, /, **_: Any) -> None:
    """An event of a test that looks at none."""


def step_of(parallel: SingleProcess, batch: Batch, lr: float, signals: Signals = Signals()) -> None:  # noqa: B008
    """A step on an augmented batch, as the loop does it; the steps of the state are counted."""
    state = parallel.setup.state
    parallel.micro_batches = parallel.setup.micro_batches
    parallel.augment = lambda batch: batch  # type: ignore[method-assign]
    parallel.send_with_step(signals)
    parallel.optimizer.set_scalars(lr, state.step)
    train_step(parallel, batch)
    state.step += 1
