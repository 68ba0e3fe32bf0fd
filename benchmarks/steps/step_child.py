"""One side of step.py, in a process of its own: a training step for each line of standard input, its cost as JSON.

`theirs` is torchvision's RetinaNet and the step of its reference training; it never imports stoker, whose import
changes how OpenMP's threads wait. `ours` is the whole step of a run: clipping, skipping of bad gradients and the
average of weights included. Both get the same images and boxes, in the form that each wants, at random weights.
"""

import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

CLASSES, MOST_BOXES = 20, 16
OUTPUTS = {
    "mobilenet_v2": {"6": 32, "13": 96, "18": 1280},
    "resnet50": {"layer2": 512, "layer3": 1024, "layer4": 2048},
}
"""Children of the backbone that go into the FPN, with their channels."""
FROZEN = {"mobilenet_v2": ["0", "1", "2", "3"], "resnet50": ["conv1", "bn1", "layer1"]}


@dataclasses.dataclass(frozen=True)
class ImageBatch:
    images: Tensor
    """uint8 [B, H, W, 3]."""
    boxes: Tensor
    """float32 [B, M, 4]."""
    labels: Tensor
    """int64 [B, M]."""
    valid: Tensor
    """bool [B, M]."""


def draw(count: int, side: int) -> ImageBatch:
    chance = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=chance)
    center = torch.rand(count, MOST_BOXES, 2, generator=chance) * 0.8 + 0.1
    half = torch.rand(count, MOST_BOXES, 2, generator=chance) ** 2 * 0.25 + 0.02
    boxes = (torch.cat((center - half, center + half), 2) * side).clamp(0, side)
    labels = torch.randint(0, CLASSES, (count, MOST_BOXES), generator=chance)
    used = torch.randint(1, MOST_BOXES + 1, (count, 1), generator=chance)
    return ImageBatch(images, boxes, labels, torch.arange(MOST_BOXES) < used)


def theirs(backbone_name: str, side: int, image_batch: ImageBatch) -> Callable[[], None]:
    """The model as `torchvision.models.detection` builds it, with 256 channels and towers of 4."""
    from torchvision import models
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops import FrozenBatchNorm2d
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    network = models.get_model(backbone_name, weights=None, norm_layer=FrozenBatchNorm2d)
    network = network.features if backbone_name == "mobilenet_v2" else network
    for name in FROZEN[backbone_name]:
        network.get_submodule(name).requires_grad_(False)
    outputs = OUTPUTS[backbone_name]
    backbone = BackboneWithFPN(
        network, {name: name for name in outputs}, list(outputs.values()), 256, LastLevelP6P7(256, 256)
    )
    sizes = tuple((x, int(x * 2 ** (1 / 3)), int(x * 2 ** (2 / 3))) for x in (32, 64, 128, 256, 512))
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    model = RetinaNet(backbone, CLASSES + 1, anchor_generator=anchors, min_size=side, max_size=side).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-4, momentum=0.9, weight_decay=1e-4)
    images = list(image_batch.images.permute(0, 3, 1, 2).contiguous() / 255)
    targets = [
        {"boxes": boxes[valid], "labels": labels[valid] + 1}
        for boxes, labels, valid in zip(image_batch.boxes, image_batch.labels, image_batch.valid, strict=True)
    ]

    def step() -> None:
        losses: dict[str, Tensor] = model(images, targets)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()

    return step


def ours(backbone_name: str, side: int, image_batch: ImageBatch, precision: str) -> Callable[[], None]:
    """The same model in this project's code."""
    from stoker.config.settings import ModelSettings, OptimSettings
    from stoker.data.batch import NUM_RAND, Batch
    from stoker.hardware.cpu import configure_malloc
    from stoker.hardware.selection import select_device
    from stoker.models import MODELS
    from stoker.models.layers.winograd import use_winograd_without_avx512
    from stoker.models.retinanet import RetinaNet
    from stoker.training.optim import OptimizerStep
    from stoker.training.step import PlainStep, make_loss_fn

    defaults = MODELS["retinanet_resnet50_fpn"].defaults
    model = RetinaNet(ModelSettings(**defaults), CLASSES, backbone=backbone_name)
    use_winograd_without_avx512(model)  # as `models.build` does
    model = model.to(memory_format=torch.channels_last).train()
    device = select_device("cpu")
    configure_malloc()  # as the start of a run does
    settings = OptimSettings(
        optimizer="sgd", backbone_lr_mult=1.0, momentum=0.9, weight_decay=1e-4, clip_grad_norm=10.0, ema_decay=0.99
    )
    stepper = OptimizerStep(model, settings, device, precision=precision)
    whole = torch.full((len(image_batch.images), 2), side, dtype=torch.int32)
    batch = Batch(
        image_batch.images.permute(0, 3, 1, 2),
        image_batch.boxes,
        image_batch.labels,
        image_batch.valid,
        whole,
        torch.ones(len(whole), 2),
        whole,
        torch.arange(len(whole)),
        torch.zeros(len(whole), NUM_RAND),
    )
    compute = make_loss_fn(model, compile=False)

    def step() -> None:
        PlainStep(compute, stepper, None, device.autocast(precision)).forward_backward(batch)
        stepper.step(1e-4, 1)

    return step


def main() -> None:
    contestant, backbone_name, precision, side, count = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    torch.manual_seed(0)
    image_batch = draw(count, side)
    step = (
        theirs(backbone_name, side, image_batch)
        if contestant == "theirs"
        else ours(backbone_name, side, image_batch, precision)
    )
    idle_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in sys.stdin:
        before = time.process_time()
        step()
        cpu_s = time.process_time() - before
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"cpu_s": cpu_s, "peak_mib": (peak_kb - idle_kb) / 1024}), flush=True)


if __name__ == "__main__":
    main()
