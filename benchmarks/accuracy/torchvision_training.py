"""The other side of quality.py: torchvision's own model, losses and transform, trained in a plain loop.

RetinaNet on MobileNetV2 and FPN, put together from torchvision's parts at the size of the row
`retinanet_mobilenet_v2_fpn`: 128 channels, heads of 2 convolutions, 9 anchors of the same sizes, frozen BatchNorm, the
first two stages frozen, GIoU. Images squashed to a square, flipped, fp32, AdamW with a short warm-up and a cosine,
gradients clipped as in the recipe (without, this model at this learning rate stays at AP 0.235: LOG.md, "Quality on
BCCD"), no EMA. Prints AP and AP50 of the final weights on the test split, by this project's evaluation, and the
CPU time up to the end of training.
"""

import argparse
import json
import math
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import mobilenet_v2
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.transforms.functional import hflip, pil_to_tensor

from stoker.data.index import Index, open_index
from stoker.evaluation.detections import Detections
from stoker.evaluation.evaluate import compute_metrics, ground_truth
from stoker_watch.runs.evaluation import Metrics

CHANNELS, DEPTH, ANCHORS, FROZEN = 128, 2, 9, 4
"""FROZEN: children of MobileNetV2's features, which make its first two stages."""
BATCH, LR, WEIGHT_DECAY = 8, 1e-3, 0.02
"""As the recipe `light`."""
CLIP = 10.0
"""Also as the recipe."""
FLIP = 0.5


def build(weights: Path, class_count: int, side: int) -> RetinaNet:
    """With ImageNet's weights in the backbone; class 0 is torchvision's background, ours + 1 are the others."""
    classifier = mobilenet_v2(norm_layer=FrozenBatchNorm2d)
    classifier.load_state_dict(torch.load(weights, weights_only=True))
    body = classifier.features
    body[:FROZEN].requires_grad_(False)
    stages = {"6": 32, "13": 96, "18": 1280}
    backbone = BackboneWithFPN(
        body, {name: name for name in stages}, list(stages.values()), CHANNELS, LastLevelP6P7(CHANNELS, CHANNELS)
    )
    head = RetinaNetHead(CHANNELS, ANCHORS, class_count + 1)
    head.regression_head._loss_type = "giou"  # as torchvision sets it for retinanet_resnet50_fpn_v2
    for tower in (head.classification_head, head.regression_head):
        tower.conv = tower.conv[:DEPTH]
    sizes = tuple((size, int(size * 2 ** (1 / 3)), int(size * 2 ** (2 / 3))) for size in (32, 64, 128, 256, 512))
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    return RetinaNet(backbone, class_count + 1, anchor_generator=anchors, head=head, detections_per_img=100,
                     fixed_size=(side, side))  # fmt: skip


def load_image(index: Index, image_index: int) -> Tensor:
    """float32 [3, H, W], 0 … 1."""
    with Image.open(index.path(image_index)) as image:
        return pil_to_tensor(image.convert("RGB")) / 255


def target(index: Index, row: int) -> dict[str, Tensor]:
    of = slice(index.offsets[row], index.offsets[row + 1])
    boxes = np.array(index.boxes[of])
    sound = (boxes[:, 2:] > boxes[:, :2]).all(1)  # torchvision refuses boxes without an area
    return {
        "boxes": torch.from_numpy(boxes[sound]),
        "labels": torch.from_numpy(index.labels[of][sound].astype(np.int64) + 1),
    }


def batches(index: Index, draw: np.random.Generator) -> Iterator[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    """Endless; every image once in each epoch, in another order."""
    rows: list[int] = []
    while True:
        while len(rows) < BATCH:
            rows += draw.permutation(index.image_indices("train")).tolist()
        images, targets = [], []
        for row in rows[:BATCH]:
            image, boxes = load_image(index, row), target(index, row)
            if draw.random() < FLIP:
                image = hflip(image)
                boxes["boxes"][:, [0, 2]] = image.shape[2] - boxes["boxes"][:, [2, 0]]
            images.append(image)
            targets.append(boxes)
        del rows[:BATCH]
        yield images, targets


def train(model: RetinaNet, index: Index, steps: int, seed: int) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY)
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * step / steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    for _, (images, targets) in zip(range(steps), batches(index, np.random.default_rng(seed)), strict=False):
        losses: dict[str, Tensor] = model(images, targets)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        schedule.step()


@torch.inference_mode()
def evaluate(model: nn.Module, index: Index, split: str) -> Metrics:
    model.eval()
    parts = []
    for image_index in index.image_indices(split).tolist():
        image = load_image(index, image_index)
        found = {name: tensor.numpy() for name, tensor in model([image])[0].items()}
        detections = Detections(
            image_index=np.full(len(found["labels"]), image_index, np.int64),
            boxes=found["boxes"],
            score=found["scores"],
            label=found["labels"] - 1,
            image_indices=np.array([image_index]),
        )
        parts.append(detections)
    return compute_metrics(ground_truth(index, index.image_indices(split)), Detections.concatenate(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a data set with train and test split")
    parser.add_argument("--weights", type=Path, required=True, help="torchvision's MobileNetV2")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", type=int, default=320, help="of the square that images are squashed to")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    index = open_index(asked.data)
    model = build(asked.weights, len(index.class_names), asked.side)
    train(model, index, asked.steps, asked.seed)
    used = resource.getrusage(resource.RUSAGE_SELF)
    metrics = evaluate(model, index, "test")
    print(json.dumps({"ap": metrics.ap, "ap50": metrics.ap50, "cpu_s": used.ru_utime + used.ru_stime}))


if __name__ == "__main__":
    main()
