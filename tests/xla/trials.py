"""The same steps of a training on a CPU and through XLA's CPU client."""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch_xla.debug import metrics

from stoker.config.settings import OptimSettings
from stoker.data.batch import Batch
from stoker.hardware.device import Device, select_device
from stoker.models import Detector, build
from stoker.training.optim import LossAccumulator, OptimizerStep
from stoker.training.step import PlainStep, make_loss_fn, train_step
from tests.models.samples import make_batch, settings_of

CLASSES = 5


@dataclasses.dataclass(kw_only=True)
class Trial:
    model: str
    image_size: tuple[int, int] = (64, 96)
    steps: int = 4
    micro_batches: int = 1
    optimizer: str = "sgd"
    lr: float = 0.001
    ema_decay: float = 0.99
    changing_lr: bool = False
    bad_steps: tuple[int, ...] = ()
    """Steps in which the pixel scale is NaN, so that their gradients are not finite."""
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Outcome:
    losses: list[list[float]]
    """Of each step: the mean losses, the gradient's norm, and the number of skipped steps."""
    tensors: dict[str, Tensor]
    """Weights, running statistics, EMA weights and the optimizer's state after the last step, on the host."""
    compilations: list[int]
    """After each step."""
    fallbacks: list[str]


def run(trial: Trial, device: Device, model: Detector) -> Outcome:
    """The steps, from the weights of `model`, which stays as it is."""
    model = copy.deepcopy(model).to(device.torch_device).train()
    settings = OptimSettings(
        optimizer=trial.optimizer,  # type: ignore[arg-type]
        lr=trial.lr, backbone_lr_mult=1.0, momentum=0.9, weight_decay=0.01, clip_grad_norm=1.0,
        ema_decay=trial.ema_decay,
    )  # fmt: skip
    optimizer = OptimizerStep(model, settings, device, precision="fp32")
    accumulator = LossAccumulator(device, max_skipped_steps=10)
    loss_fn = make_loss_fn(model, compile=False)
    step = PlainStep(loss_fn, optimizer, accumulator, device.autocast("fp32"), trial.micro_batches)
    stream = device.make_stream()
    device.synchronize()
    metrics.clear_all()
    losses, compilations = [], []
    for number in range(trial.steps):
        host = make_batch((3, 0, 1, 2), trial.image_size, CLASSES, seed=number)
        if number in trial.bad_steps:
            host = host._replace(boxes=torch.where(host.valid[..., None], torch.nan, host.boxes))
        tensors, ready = stream.to_device(host)
        ready.block_main_stream()
        optimizer.set_scalars(trial.lr * (number + 1) / trial.steps if trial.changing_lr else trial.lr, number)
        train_step(step, Batch(*tensors))
        compilations.append(metrics.counter_value("UncachedCompile") or 0)
        host_tensors, ready = stream.to_host(accumulator.take())
        ready.synchronize()
        losses.append([float(value) for value in host_tensors[0]])
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
    model = build(settings_of(trial.model, **trial.settings), CLASSES).to(trial.dtype)
    xla = select_device("xla")  # before the first backward pass of the process: autograd then counts the devices
    return run(trial, select_device("cpu"), model), run(trial, xla, model)
