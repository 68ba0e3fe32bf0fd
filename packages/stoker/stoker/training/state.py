"""What a run trains with (`TrainSetup`, built by `start.py`), and how far it is (`TrainState`)."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker import models
from stoker.config.settings import Config, flag_words
from stoker.data.index import Index
from stoker.data.loading.loader import Loader, QuarantinedImage
from stoker.data.loading.processes import WorkerProcesses
from stoker.hardware.device import Device
from stoker.models.weights.model_file import ModelMetadata
from stoker.training import checkpoint
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import OptimizerStep
from stoker.training.ranks import Ranks
from stoker_watch.durations import Duration, parse_duration
from stoker_watch.runs.records import EVENTS, RunFolder, read_lines
from stoker_watch.runs.schemas import Event


class EventLogger(Protocol):
    """Prints a line and writes it into the run's events, with the numbers that belong to it."""

    def __call__(self, kind: str, text: str, /, **data: Any) -> None: ...


class BatchSizes(NamedTuple):
    """Images that the model gets at once: of a micro-batch in training, of a batch in an evaluation."""

    train: int
    eval: int


NO_SIZES = BatchSizes(0, 0)
"""The sizes before a state is restored."""


class Signals(NamedTuple):
    """What a process knows after a step. What `parallel.SingleProcess.agree` returns, all know after the same step.

    stop: a process was asked to; evaluate, save: due by the clock, a checkpoint in the processes that take part in it;
    trained_s: wall seconds of the steps so far; diverged_step: at which the limit of skipped steps was reached."""

    stop: bool = False
    evaluate: bool = False
    save: bool = False
    trained_s: float = 0.0
    diverged_step: int | None = None


@dataclasses.dataclass
class TrainState:
    """How far a training is: what the loop changes and its services read. The rest has its owners (`resume.py`)."""

    step: int = 0
    """Optimizer steps that the weights contain."""
    trained_s: float = 0.0
    """Wall seconds that these steps took, over all attempts."""
    lr: float = 0.0
    diverged_step: int | None = None
    """Step at which the limit of consecutive skipped steps was reached. The run rolls back then."""
    redo_until: int = 0
    """Steps up to this one were done before and lost, by a kill or a rollback."""
    sizes: BatchSizes = NO_SIZES
    """Images that the model gets at once: those of the settings, or fewer after an `out_of_memory` event."""

    def follow(self, signals: Signals) -> None:
        """Takes over what all ranks know after the same step."""
        self.trained_s = signals.trained_s
        if signals.diverged_step is not None:
            self.diverged_step = signals.diverged_step


class Extension(msgspec.Struct, frozen=True):
    """What was trained before a run was extended. step: its last one; trained_s: wall seconds of its steps; before,
    after: the lengths of training. The default is of a run that was not extended."""

    step: int = 0
    trained_s: float = 0.0
    before: str = ""
    after: str = ""

    def describe(self, config: Config) -> str:
        """What happens, and why the learning rate does not stay where it was."""
        optim = config.optim
        before, after = (" ".join(flag_words("max_duration", length)) for length in (self.before, self.after))
        return (
            f"extended from {before} to {after}, from step {self.step:,} on: weights, optimizer and EMA "
            f"continue; the learning rate rises to {optim.lr:.3g} again and follows its schedule "
            f"({optim.lr_scheduler}) over what is added, as further steps at the rate at which a schedule ends change "
            "next to nothing"
        )


NOT_EXTENDED = Extension()


def read_extension(run: Path) -> Extension:
    """The newest extension of a run."""
    newest = NOT_EXTENDED
    for event in read_lines(run, EVENTS, Event):
        if "extended" in event.data:
            newest = msgspec.convert(event.data["extended"], Extension)
    return newest


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """What is fixed while a run trains: settings, data, and the objects that the loop works with."""

    folder: RunFolder
    config: Config
    device: Device
    index: Index
    train_indices: NDArray[np.int64]
    val_indices: NDArray[np.int64]
    model: models.Detector
    optimizer: OptimizerStep
    loss_accumulator: LossAccumulator
    loader: Loader
    processes: WorkerProcesses | None
    """Load the images for training and evaluation; None: threads do."""
    quarantine: Callable[[QuarantinedImage], None]
    """Records an image that cannot be used; evaluation calls it too."""
    writer: checkpoint.CheckpointWriter
    metadata: ModelMetadata
    data_digest: str
    """The images and boxes for training and validation (`data/index_digest.py`)."""
    make_initial_model: Callable[[Device, EventLogger], models.Detector]
    """Makes the model with the weights that the run started from."""
    accept_changed_data: bool
    """Continue from a checkpoint of another state of the data set."""
    total_steps: int | None
    """None if the length is given in minutes."""
    max_boxes: int
    """M, padded boxes per image."""
    state: TrainState = dataclasses.field(default_factory=TrainState)
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    extension: Extension = NOT_EXTENDED
    """What was trained before a finished run was extended."""
    initial_ranks: int = 1
    """Ranks with which the run was started: `grad_accum_steps` is for their parts of a batch."""

    @property
    def progress(self) -> float:
        """Fraction of the length that is done, 0 … 1; of a run that was extended, of what was added (below 0 after a
        rollback to what was trained before)."""
        before = self.extension
        if self.total_steps is not None:
            return (self.state.step - before.step) / (self.total_steps - before.step)
        return (self.state.trained_s - before.trained_s) / (self._max_s - before.trained_s)

    @functools.cached_property
    def _max_s(self) -> float:
        """The length of a run that is given in minutes, in seconds. Asked for several times in a step."""
        return 60 * parse_duration(self.config.run.max_duration).value

    @property
    def initial_sizes(self) -> BatchSizes:
        """Images that the model gets at once by the settings."""
        size = max(1, self.config.run.batch_size // (self.config.optim.grad_accum_steps * self.initial_ranks))
        return BatchSizes(size, size)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step of this rank."""
        return count_micro_batches(self.rank_batch_size, self.state.sizes.train)

    @property
    def rank_batch_size(self) -> int:
        return self.config.run.batch_size // self.ranks.world_size


def read_sizes(run: Path, initial: BatchSizes) -> BatchSizes:
    """The sizes of the run's newest event `out_of_memory`, at most `initial`."""
    newest = initial
    for event in read_lines(run, EVENTS, Event):
        if event.kind == "out_of_memory":
            data = event.data  # without sizes if it is damaged
            newest = BatchSizes(data.get("micro_batch_size", newest.train), data.get("eval_batch_size", newest.eval))
    return BatchSizes(min(initial.train, newest.train), min(initial.eval, newest.eval))


def read_initial_ranks(run: Path) -> int:
    """The number of ranks with which the run was started."""
    first = next(read_lines(run, EVENTS, Event), None)
    return 1 if first is None else int(first.data.get("ranks", 1))


def count_micro_batches(batch_size: int, max_size: int) -> int:
    """The smallest number of equal micro-batches of at most `max_size` images."""
    return next(n for n in range(1, batch_size + 1) if batch_size % n == 0 and batch_size // n <= max_size)


class IntervalTrigger:
    """Says when an interval is over; one of 0 never is. Minutes count from the last `reset`, or from the start."""

    def __init__(self, interval: Duration, num_images: int, batch_size: int) -> None:
        self.interval_s = interval.value * 60 if interval.unit == "minutes" else 0.0
        factors = {"steps": 1.0, "epochs": num_images / batch_size, "minutes": 0.0}
        steps = interval.value * factors[interval.unit]
        self.interval_steps = max(1, round(steps)) if steps else 0
        self._last_s = time.perf_counter()

    def is_due_at(self, step: int) -> bool:
        """Whether it is due by the number of optimizer steps done."""
        return self.interval_steps > 0 and step > 0 and step % self.interval_steps == 0

    def is_due_by_clock(self) -> bool:
        """Whether it is due by the clock, which ranks read at other times."""
        return self.interval_s > 0 and time.perf_counter() - self._last_s >= self.interval_s

    def reset(self) -> None:
        self._last_s = time.perf_counter()
