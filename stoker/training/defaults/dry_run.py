"""A rehearsal of training: whole steps of the worst case that a run can produce, for their memory and their time.

The worst case is the full canvas with every box slot filled. What follows from it is decided in `auto_batch.py`. On an
accelerator memory is what the allocator counted; on a CPU the tensors that live at the same time are counted.
"""

import dataclasses
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.config.settings import Config
from stoker.data.batch import DRAWS, Batch
from stoker.hardware.device import Device
from stoker.models import build
from stoker.training.optim import Stepper

HEADROOM = 0.9
"""Share of the free memory that a step may plan with; the rest is for fragmentation and cuDNN's work space."""
ROUNDS = 3
"""Times that the steps of a batch are measured; the shortest counts, since whatever else happens only adds."""
STEPS = 3
"""Steps of a round, on an accelerator: waiting after each would hide that the host works ahead."""
ROUNDS_S = 4.0
"""No further round of a batch begins after this many seconds."""
LIMIT_S = 60.0
"""Seconds that the trials of all batches may take; the next begins only where it can be expected to end in time."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """Steps of one size, tried."""

    pictures: int
    """Of a micro-batch."""
    peak_bytes: int
    seconds_per_picture: float


class Rehearsal:
    """A model and its optimizer as the config has them, with random weights that do not move.

    `config` needs canvas, precision, the optimizer and the model's settings.
    """

    def __init__(self, config: Config, device: Device, *, classes: int, slots: int) -> None:
        self.config, self.device, self.classes, self.slots = config, device, classes, slots
        self.budget = int(HEADROOM * device.memory().free)
        """Bytes that steps may plan with, weights included."""
        model = build(config.model, classes).to(device.torch_device).train()
        optim = config.optim if config.optim.ema is not None else dataclasses.replace(config.optim, ema=0.99)
        self.stepper = Stepper(model, optim, device, precision=config.run.precision)
        self.least = 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1
        """Pictures of the smallest step: of one picture, norms that learn see no spread where a map has one place, and
        leave their statistics as they began (`models.norms.BatchNorm`)."""

    def case(self, count: int) -> Batch:
        """The worst case of `count` pictures."""
        return worst_case(
            count, canvas=self.config.data.canvas, slots=self.slots, classes=self.classes, device=self.device
        )

    def loss(self, case: Batch) -> Tensor:
        """The sum of the losses, a scalar; operator by operator, since compiling for every size would take minutes."""
        model = self.stepper.model
        with self.device.autocast(self.config.run.precision):
            losses = model.loss(model(case.images), case)
        return torch.stack(list(losses.values())).sum()

    def step(self, case: Batch) -> None:
        """Forward, losses, backward, and the optimizer at a rate of 0."""
        self.stepper.backward(self.loss(case))
        self.stepper.step(0.0, 0)

    def peak(self, count: int) -> int:
        """Bytes at the peak of two steps (the second has all optimizer state) and an evaluation; on a CPU of a step.

        Raises torch.OutOfMemoryError.
        """
        if self.device.is_cpu:
            live = LiveBytes("cpu")
            for tensor in _pytree.tree_leaves((self.stepper.state_dict(), self.stepper.averaged.state_dict())):
                if isinstance(tensor, Tensor):
                    live.add(tensor)
            case = self.case(count)
            with live:
                self.step(case)
            return live.peak
        self.device.release_cache()
        self.device.reset_peak()
        try:
            case = self.case(count)
            for _ in range(2):
                self.step(case)
            averaged = self.stepper.averaged.eval()
            with torch.no_grad(), self.device.autocast(self.config.run.precision):
                averaged.decode(averaged(case.images), case.content, case.scale, case.size)
            averaged.train()
            self.device.wait()
            return self.device.memory().peak
        finally:
            self.device.release_cache()

    def seconds(self, count: int) -> float:
        """Of a step of `count` pictures, after one that warms up. Waits for the device between rounds only."""
        case = self.case(count)
        self.step(case)
        self.device.wait()
        steps = 1 if self.device.is_cpu else STEPS
        began, best = time.perf_counter(), float("inf")
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(steps):
                self.step(case)
            self.device.wait()
            best = min(best, (time.perf_counter() - start) / steps)
            if time.perf_counter() - began > ROUNDS_S:
                break
        return best


def try_sizes(rehearsal: Rehearsal, sizes: Iterable[int]) -> Iterator[Tried | str]:
    """Tries micro-batches of rising `sizes`, as long as they fit into the budget and LIMIT_S; the last thing said is
    why there are no more, unless all were tried."""
    began = time.perf_counter()
    peaks: dict[int, int] = {}
    took = 0.0
    for count in sizes:
        start = time.perf_counter()
        if start - began + 2 * took > LIMIT_S:
            yield f"trials end after {LIMIT_S:.0f} s"
            return
        try:
            fits = _next_peak(peaks, count) <= rehearsal.budget
            if fits:
                peaks[count] = rehearsal.peak(count)
                fits = peaks[count] <= rehearsal.budget
            if fits:
                tried = Tried(count, peaks[count], rehearsal.seconds(count) / count)
        except torch.OutOfMemoryError:
            fits = False
        if not fits:
            yield f"{count} do not fit"
            return
        took = time.perf_counter() - start
        yield tried


def _next_peak(peaks: dict[int, int], count: int) -> float:
    """Bytes at `count` on the line through the last two that were tried; 0 where there are not two."""
    if len(peaks) < 2:
        return 0.0
    (a, at_a), (b, at_b) = list(peaks.items())[-2:]
    return at_b + (at_b - at_a) / (b - a) * (count - b)


def worst_case(count: int, *, canvas: tuple[int, int], slots: int, classes: int, device: Device) -> Batch:
    """A batch of `count` pictures that fills the canvas (height, width) and every one of `slots` box slots."""
    height, width = canvas
    where = device.torch_device
    images = torch.zeros(count, height, width, 3, dtype=torch.uint8, device=where).permute(0, 3, 1, 2)
    corner = torch.rand(count, slots, 2, device=where) * 0.5
    sides = torch.tensor([width, height, width, height], dtype=torch.float32, device=where)
    size = torch.tensor([[height, width]], dtype=torch.int32, device=where).expand(count, 2).contiguous()
    return Batch(
        images=images,
        boxes=torch.cat([corner, corner + 0.4], -1) * sides,
        labels=torch.arange(slots, device=where).remainder(classes).expand(count, slots).contiguous(),
        valid=torch.ones(count, slots, dtype=torch.bool, device=where),
        content=size,
        scale=torch.ones(count, 2, device=where),
        size=size.clone(),
        image_id=torch.arange(count, device=where),
        draw=torch.zeros(count, DRAWS, device=where),
    )


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own bases are untyped
    """Counts the bytes of tensors on a kind of device from their making to their end: `now`, and the `peak` of it.

    Every storage counts once, rounded up to `granule` bytes. What lies inside one operator is not seen.
    """

    def __init__(self, kind: str, granule: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind, self.granule = kind, granule
        self.now = self.peak = 0
        self.alive: dict[int, tuple[int, str]] = {}
        """Storage → bytes and type of the tensor that it was made for."""

    def add(self, tensor: Tensor, operator: str = "before") -> None:
        """Counts a tensor that was made outside."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != self.kind or key in self.alive:
            return
        size = -(-storage.nbytes() // self.granule) * self.granule
        self.alive[key] = (size, str(tensor.dtype))
        self.now += size
        weakref.finalize(storage, self._free, key)
        if self.now > self.peak:
            self.peak = self.now
            self.at_peak(operator)

    def at_peak(self, operator: str) -> None:
        """`operator` has just made the peak higher; for those that want to know what lives then."""

    def _free(self, key: int) -> None:
        self.now -= self.alive.pop(key)[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in _pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf, str(func))
        return result
