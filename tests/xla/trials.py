"""The same steps of a training on a CPU and through XLA's CPU client."""

import copy
import dataclasses

import torch
from torch import Tensor
from torch_xla.debug import metrics

from stoker.config.settings import OptimSettings
from stoker.data.batch import Batch
from stoker.hardware.device import Device
from stoker.hardware.selection import select_device
from stoker.models import Detector, build
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import OptimizerStep
from stoker.training.step import PlainStep, make_loss_fn, train_step
from tests.trainer.models.samples import make_batch, settings_of

CLASSES = 5
LR = 2**-15
"""Of the first step; it grows by that from step to step. A float32, which it is on XLA, is exactly it."""
BAD_STEP = 3
"""The step whose gradients are not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Steps with clipping, EMA, a changing learning rate and one skipped step."""

    model: str
    optimizer: str = "sgd"
    counts: tuple[int, ...] = (3, 1)
    """Boxes of the images of a batch."""
    micro_batches: int = 1
    image_size: tuple[int, int] = (64, 64)
    steps: int = 20
    programs: int = 2
    """The step, and `take` of the sums of losses. Matching on the host divides the step."""
    dtype: torch.dtype = torch.float64
    """float64: what differs then is not rounding, which a float32 step can amplify on its own."""


@dataclasses.dataclass
class Outcome:
    losses: list[list[float]]
    """Of each step: the losses, their sum and the gradient's norm; and 1 if it was skipped, then without losses."""
    tensors: dict[str, Tensor]
    """Weights, running statistics, EMA weights and the optimizer's state after the last step, on the host."""
    compilations: list[int]
    """After each step."""
    fallbacks: list[str]


def run(trial: Trial, device: Device, model: Detector) -> Outcome:
    """The steps, from the weights of `model`, which stays as it is."""
    model = copy.deepcopy(model).to(trial.dtype).to(device.torch_device).train()
    settings = OptimSettings(
        optimizer=trial.optimizer,  # type: ignore[arg-type]
        lr=LR, backbone_lr_mult=1.0, momentum=0.9, weight_decay=0.01, clip_grad_norm=1.0, ema_decay=0.99,
    )  # fmt: skip
    optimizer = OptimizerStep(model, settings, device, precision="fp32")
    accumulator = LossAccumulator(device, max_skipped_steps=10)
    losses_of = make_loss_fn(model, compile=False)

    def loss_fn(batch: Batch) -> dict[str, Tensor]:
        return {name: loss * batch.scale[0, 0] for name, loss in losses_of(batch).items()}

    step = PlainStep(loss_fn, optimizer, accumulator, device.autocast("fp32"), trial.micro_batches)
    stream = device.make_stream()
    device.synchronize()
    metrics.clear_all()
    losses, compilations = [], []
    for number in range(trial.steps):
        host = make_batch(trial.counts, trial.image_size, CLASSES, seed=number)
        # Where a box and a denoising query end at the edge of the image, rounding says which is the larger one, and so
        # which way the gradient of GIoU goes.
        inside = host.boxes.clamp(1.5, min(trial.image_size) - 1.5)
        host = host._replace(
            boxes=torch.where(host.valid[..., None], inside, host.boxes),
            scale=torch.full_like(host.scale, torch.nan if number == BAD_STEP else 1.0),
        )
        tensors, ready = stream.to_device(host)
        ready.block_main_stream()
        optimizer.set_scalars(LR * (number + 1), number)
        train_step(step, Batch(*tensors))
        host_tensors, ready = stream.to_host(accumulator.take())
        ready.synchronize()
        stats = accumulator.read(host_tensors, 1)
        losses.append([*stats.losses.values(), stats.grad_norm or 0.0, stats.skipped_steps])
        compilations.append(metrics.counter_value("UncachedCompile") or 0)
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"ema.{name}": tensor for name, tensor in optimizer.ema_model.state_dict().items()}
    for number, values in optimizer.state_dict()["optimizer"]["state"].items():
        state |= {f"optimizer.{number}.{name}": tensor for name, tensor in values.items()}
    on_host = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    return Outcome(losses, on_host, compilations, fallbacks)


def compare(trial: Trial) -> tuple[Outcome, Outcome]:
    """(on the CPU, through XLA)."""
    torch.manual_seed(0)
    model = build(settings_of(trial.model), CLASSES)
    xla = select_device("xla")  # before the first backward pass of the process: autograd then counts the devices
    return run(trial, select_device("cpu"), model), run(trial, xla, model)


def distances(expected: Outcome, actual: Outcome) -> dict[str, float]:
    """Of each tensor after the last step: the norm of the difference, as a fraction of the norm; of 1e-6 where that is
    smaller: a bias before a norm has gradients of 1e-16."""
    assert expected.tensors.keys() == actual.tensors.keys()
    result = {}
    for name, tensor in expected.tensors.items():
        difference = float((actual.tensors[name].double() - tensor.double()).norm())
        result[name] = difference / max(float(tensor.double().norm()), 1e-6)
    return result
