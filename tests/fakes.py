"""Training steps on the fake accelerator of `stoker plan` (`stoker/planning/fake_accelerator.py`), tried by the tests.

Three things are shown with it. A step that reads a value of the device cannot run, since there are no values. The peak
of the memory that a step's tensors take can be counted, and so can the operators that it issues. It runs in a process
of its own, which prints a line of JSON for each trial:

    python -m tests.fakes '{"model": "retinanet_resnet50_fpn", "batch": 32, "image_size": [800, 800]}' …
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stoker.config.settings import DataSettings, ModelSettings, OptimSettings
from stoker.data.augment import augment_batch, clear_cached_constants
from stoker.data.batch import Batch
from stoker.hardware.device import Device
from stoker.models import MODELS, build
from stoker.models.layers.convolutions import use_fused_convs
from stoker.planning.fake_accelerator import (
    DEVICE,
    GRANULE,
    Autocast,
    FakeAcceleratorBroken,
    empty_batch,
    fake_tensors,
    install,
    to_fake,
)
from stoker.planning.trace import FLOP
from stoker.training.defaults.dry_run import PeakMemoryMode
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import OptimizerStep
from stoker.training.step import PlainStep, make_loss_fn
from tests.host_sync import ForbidHostSync

AUGMENTATIONS = DataSettings(hflip=0.5, brightness=0.2, contrast=0.2, saturation=0.2, hue=0.1, mosaic=0.5, mixup=0.0)
"""All of them, in every trial."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A training step to try. `oracle`: torchvision's RetinaNet-R50 instead of ours, which has to fail."""

    model: str = "retinanet_tiny_fpn"
    classes: int = 80
    batch: int = 4
    slots: int = 16
    image_size: tuple[int, int] = (128, 192)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    optimizer: Literal["sgd", "adamw", "muon"] = "sgd"
    steps: int = 2
    average: bool = False
    """Whether averaged weights lie on the device too, as they do in a run."""
    oracle: bool = False
    kernels: bool = False
    """Whether convolutions and the loss are the fused ones, which a run on a GPU may choose."""
    flop: bool = False
    """Whether one more step is taken to count its operations. Counting keeps activations alive that would be freed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """error: the exception that the step died of, None when it ran. Bytes: peak, and alive between two steps."""

    error: str | None
    peak: int
    resting: int
    peak_operator: str
    by_type: dict[str, int]
    """Bytes alive at the peak by the tensors' type."""
    operators: dict[str, int]
    """Operators of the last step by phase, as `OperatorCounts` counts them."""
    flop: float | None
    """Where asked for: products and sums of convolutions and matrices of a step, both ways, per image."""


def run(*trials: Trial, timeout_s: float = 200) -> list[Outcome]:
    """The outcomes of trials, from one process of their own. Raises FakeAcceleratorBroken when they cannot be tried."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "tests.fakes", *(json.dumps(dataclasses.asdict(trial)) for trial in trials)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise FakeAcceleratorBroken(f"torch {torch.__version__}: the fake accelerator did not run\n{done.stderr}")
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()[-len(trials) :]]


class PeakMemory(PeakMemoryMode):
    """The bytes of the fake device's storages, and what lives at their peak."""

    def __init__(self) -> None:
        super().__init__(DEVICE, GRANULE)
        self.peak_operator, self.by_type = "", {}

    def at_peak(self, operator: str) -> None:
        self.peak_operator = operator
        self.by_type = {}
        for nbytes, dtype in self.live_storages.values():
            self.by_type[dtype] = self.by_type.get(dtype, 0) + nbytes


Phase = Literal["augmentation", "forward", "loss", "backward", "optimizer"]


class OperatorCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own bases are untyped
    """Counts the operators of a step that issue work, by phase: all but views, metadata and new memory without values.
    A `_foreach_` operator is one.

    The backward pass of matching and loss belongs to "loss": it is over when the gradient of an output is ready.
    "optimizer" includes the norm of the gradients and the accumulated losses.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "augmentation"
        self.by_phase: dict[str, int] = {}
        self.by_name: dict[tuple[str, str], int] = {}
        """(phase, operator) → count."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("aten", "stoker") and not func.is_view and "empty" not in func.__name__:
            self.by_phase[self.phase] = self.by_phase.get(self.phase, 0) + 1
            key = self.phase, str(func).removeprefix("aten.")
            self.by_name[key] = self.by_name.get(key, 0) + 1
        return func(*args, **(kwargs or {}))

    def enter(self, phase: Phase) -> None:
        self.phase = phase

    def watch(self, model: nn.Module) -> None:
        """Makes the model tell when its forward pass and its loss begin."""
        forward, loss = model.forward, model.loss

        def counted_forward(images: Tensor) -> Any:
            self.enter("forward")
            return forward(images)

        def counted_loss(outputs: Any, batch: Batch) -> dict[str, Tensor]:
            self.enter("loss")
            for leaf in _pytree.tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self.enter("backward"))
            return loss(outputs, batch)

        model.forward, model.loss = counted_forward, counted_loss  # type: ignore[method-assign,assignment]


def fake_batch(trial: Trial) -> Batch:
    """A batch of the trial's shapes on the fake device; to be called inside `fake_tensors`."""
    return empty_batch(trial.batch, trial.slots, trial.image_size, DEVICE)


def make_stepper(trial: Trial, model: nn.Module) -> OptimizerStep:
    """The project's own step, without averaged weights: their copy cannot be made of fakes."""
    settings = OptimSettings(
        optimizer=trial.optimizer,
        backbone_lr_mult=1.0,
        momentum=0.9,
        weight_decay=1e-4,
        clip_grad_norm=1.0,
        ema_decay=0.0,
    )
    return OptimizerStep(model, settings, Device(torch.device(DEVICE)), precision=trial.precision)


def try_step(trial: Trial) -> Outcome:
    """Runs the trial in this process, which `install` was called in."""
    settings = ModelSettings(**{**MODELS[trial.model].defaults, "model": trial.model, **trial.settings})
    model: nn.Module = _oracle(trial) if trial.oracle else build(settings, trial.classes)
    if trial.kernels:
        use_fused_convs(model, True)
        model.fused_loss = True  # type: ignore[assignment]  # of a RetinaNet
    memory, counts = PeakMemory(), OperatorCounts()
    clear_cached_constants()  # of the fakes of another trial
    if not trial.oracle:
        counts.watch(model)
    with fake_tensors():
        to_fake(model).train()
        batch = fake_batch(trial)
        stepper = make_stepper(trial, model)
        for tensor in (*model.parameters(), *model.buffers(), *batch):
            memory.add(tensor)
        for tensor in _pytree.tree_leaves(stepper.state_dict()["optimizer"]["state"]):
            memory.add(tensor)
        average = [torch.empty_like(tensor) for tensor in model.state_dict().values()] if trial.average else []
        for tensor in average:
            memory.add(tensor)
        with memory:
            error = _steps(trial, model, batch, stepper, counts)
        flop = None
        if trial.flop and error is None:
            with FlopCounterMode(display=False, custom_mapping=FLOP) as counter:
                error = _steps(dataclasses.replace(trial, steps=1), model, batch, stepper, counts)
            flop = counter.get_total_flops() / trial.batch
    peak = memory.peak_bytes, memory.current_bytes, memory.peak_operator, memory.by_type
    return Outcome(error, *peak, counts.by_phase, flop)


def _steps(trial: Trial, model: nn.Module, batch: Batch, stepper: OptimizerStep, counts: OperatorCounts) -> str | None:
    """Takes the trial's steps. Counts the operators of the last one, when the anchors and the optimizer's state are
    there."""
    meter = LossAccumulator(Device(torch.device(DEVICE)), max_skipped_steps=3)
    try:
        for step in range(trial.steps):
            is_last = step == trial.steps - 1
            with ForbidHostSync(), counts if is_last else contextlib.nullcontext():
                counts.enter("augmentation")
                if trial.oracle:
                    with Autocast(trial.precision):
                        losses = _oracle_losses(model, batch)
                    stepper.backward(torch.stack(list(losses.values())).sum())
                else:
                    augmented = augment_batch(batch, AUGMENTATIONS, 0.0)
                    counts.enter("forward")  # the casts of the weights, which come before the model's own
                    losses = PlainStep(
                        make_loss_fn(model, compile=False), stepper, None, Autocast(trial.precision)
                    ).forward_backward(augmented)  # type: ignore[arg-type]
                counts.enter("optimizer")
                norm, bad = stepper.step(0.01, step)
                meter.add(losses, norm, bad, stepper.completed_steps)
                del losses
    except (RuntimeError, TypeError, ValueError) as error:  # HostWait and what fake tensors raise: the outcome
        return f"{type(error).__name__}: {error}"
    return None


def _oracle(trial: Trial) -> nn.Module:
    from torchvision.models.detection import retinanet_resnet50_fpn

    short, long = sorted(trial.image_size)
    model: nn.Module = retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=trial.classes, min_size=short, max_size=long
    )
    return model


def _oracle_losses(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    images = list((batch.images / 255).unbind(0))
    targets = [{"boxes": boxes, "labels": labels} for boxes, labels in zip(batch.boxes, batch.labels, strict=True)]
    losses: dict[str, Tensor] = model(images, targets)
    return losses


if __name__ == "__main__":
    install()
    for text in sys.argv[1:]:
        given = json.loads(text)
        given["image_size"] = tuple(given.get("image_size", Trial.image_size))
        print(json.dumps(dataclasses.asdict(try_step(Trial(**given)))), flush=True)
