"""Which batch fits: tried on the device with the worst case that the run can produce, before anything is spent.

The worst case is the full canvas, every box slot filled, two whole steps (the second has all optimizer state), then an
evaluation. On an accelerator the peak at one and at two pictures gives the line on which the largest batch lies, which
is then tried itself. On a CPU memory is counted: what one picture's forward pass keeps for backward.
"""

import dataclasses

import torch
from torch import Tensor

from stoker.batch import DRAWS, Batch
from stoker.config import Config
from stoker.data.augment_device import GROUP
from stoker.data.index import Index
from stoker.data.loader import box_slots
from stoker.device import Device
from stoker.errors import OutOfMemoryError
from stoker.models import Detector, build
from stoker.training.optim import Stepper

HEADROOM = 0.9
"""Share of the free memory that a step may plan with; the rest is for fragmentation and cuDNN's work space."""
GIB = 2**30


def batch(config: Config, index: Index, device: Device, *, wanted: int, pictures: int) -> tuple[int, int, str]:
    """(pictures per step, micro-batches per step, reason), for the config's batch or else the recipe's `wanted`.

    `config` needs canvas, precision and the model's settings; `pictures` is how many the training split has. Raises
    OutOfMemoryError when one picture does not fit.
    """
    asked: int | None = config.set_fields().get("batch")
    target: int = asked if asked is not None else max(1, min(wanted, pictures))
    if asked is None and config.data.mosaic > 0:
        target = max(GROUP, target // GROUP * GROUP)
    slots = box_slots(index, index.rows("train"), mosaic=config.data.mosaic)
    classes = len(index.class_names)
    if device.is_cpu:
        largest, evidence = _largest_on_cpu(config, classes, slots, device)
    else:
        largest, evidence = _largest_on_device(config, classes, slots, device, target)
    if largest < 1:
        height, width = config.data.canvas
        raise OutOfMemoryError(
            f"Not even one picture of {width}x{height} pixels fits the memory of {device.name}.",
            cause=evidence,
            fix="a smaller --canvas or --model, or a device with more memory",
        )
    parts = next(n for n in range(1, target + 1) if target % n == 0 and target // n <= largest)
    whose = "asked for" if asked is not None else f"the recipe's {wanted}"
    if asked is None and target < wanted:
        whose = f"the training split has {pictures} pictures"
    return target, parts, f"{whose}; {evidence}" + ("" if parts == 1 else f", so in {parts} parts")


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


def _forward(model: Detector, case: Batch, config: Config, device: Device) -> Tensor:
    with device.autocast(config.run.precision):
        losses = model.loss(model(case.images), case)
    return torch.stack(list(losses.values())).sum()


def _largest_on_cpu(config: Config, classes: int, slots: int, device: Device) -> tuple[int, str]:
    model = build(config.model, classes).train()
    case = worst_case(1, canvas=config.data.canvas, slots=slots, classes=classes, device=device)
    lasting = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _forward(model, case, config, device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # Gradients, two moments and the average beside the weights; half as much again of what is kept, for temporaries.
    picture = 1.5 * sum(kept.values())
    free = HEADROOM * device.memory().free - 5 * weights
    return int(free // picture), f"{picture / 2**20:,.0f} MiB a picture of {free / GIB:.0f} GiB"


def _largest_on_device(config: Config, classes: int, slots: int, device: Device, target: int) -> tuple[int, str]:
    def peak(count: int) -> int | None:
        """Bytes, or None when `count` pictures do not fit."""
        device.release_cache()
        device.reset_peak()
        try:
            return _trial(config, classes, slots, device, count)
        except torch.OutOfMemoryError:
            return None
        finally:
            device.release_cache()

    budget = int(HEADROOM * device.memory().free)
    one, two = peak(1), peak(2)
    if one is None or one > budget:
        return 0, f"one picture takes more than {budget / GIB:.1f} GiB"
    if two is None:
        return 1, f"two pictures do not fit into {budget / GIB:.1f} GiB"
    slope = max(1, two - one)
    count = min(target, 1 + (budget - one) // slope)
    while count > 1:
        used = peak(count)
        if used is not None and used <= budget:
            return count, f"{used / GIB:.1f} of {budget / GIB:.1f} GiB at {count} pictures, tried"
        count -= max(1, count // 8)
    return 1, f"{one / GIB:.1f} of {budget / GIB:.1f} GiB at one picture, tried"


def _trial(config: Config, classes: int, slots: int, device: Device, count: int) -> int:
    """Peak bytes of two steps and an evaluation of the worst case at `count` pictures."""
    model = build(config.model, classes).to(device.torch_device).train()
    optim = config.optim if config.optim.ema is not None else dataclasses.replace(config.optim, ema=0.99)
    stepper = Stepper(model, optim, device, precision=config.run.precision)
    case = worst_case(count, canvas=config.data.canvas, slots=slots, classes=classes, device=device)
    for step in range(2):
        stepper.backward(_forward(model, case, config, device))
        stepper.step(0.0, step)
    with torch.no_grad(), device.autocast(config.run.precision):
        model.decode(stepper.averaged.eval()(case.images), case.content, case.scale, case.size)
    device.wait()
    return device.memory().peak
