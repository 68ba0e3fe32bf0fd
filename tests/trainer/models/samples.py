"""Settings, batches and settled models that the tests of the models share."""

from typing import Any

import torch

from stoker.config.settings import ModelSettings
from stoker.data.batch import NUM_RAND, Batch
from stoker.models import MODELS, Detector, build

ALIKE = tuple(
    name
    for name in MODELS
    if name.startswith(("dfine_", "deimv2_", "rf_detr_")) and name not in ("dfine_n", "deimv2_pico", "rf_detr_n")
)
"""Sizes that differ from a smaller one of their family in numbers only: expensive tests of every row leave them out."""


def settings_of(name: str, **changes: Any) -> ModelSettings:
    """The architecture's own settings, nothing AUTO, with `changes`."""
    return ModelSettings(**{"weights": "none", **MODELS[name].defaults, "model": name, **changes})


def make_batch(
    counts: tuple[int, ...], image_size: tuple[int, int], classes: int, *, slots: int = 16, seed: int = 0
) -> Batch:
    """Random images with `counts` boxes each, of very different sizes, in scattered slots; the rest is padding."""
    draw = torch.Generator().manual_seed(seed)
    height, width = image_size
    b = len(counts)
    images = torch.randint(0, 256, (b, height, width, 3), dtype=torch.uint8, generator=draw).permute(0, 3, 1, 2)
    boxes, labels, valid = torch.zeros(b, slots, 4), torch.zeros(b, slots, dtype=torch.int64), torch.zeros(b, slots) > 0
    for image, count in enumerate(counts):
        used = torch.randperm(slots, generator=draw)[:count].sort().values
        size = torch.tensor([width, height])
        center = (torch.rand(count, 2, generator=draw) * 0.8 + 0.1) * size
        half = (torch.rand(count, 2, generator=draw) ** 2 * 0.25 + 0.02) * size
        some = torch.cat((center - half, center + half), 1)
        boxes[image, used] = torch.minimum(some.clamp(min=0), size.repeat(2).float())
        labels[image, used] = torch.randint(0, classes, (count,), generator=draw)
        valid[image, used] = True
    whole = torch.tensor(image_size, dtype=torch.int32).repeat(b, 1)
    return Batch(
        images,
        boxes,
        labels,
        valid,
        whole,
        torch.ones(b, 2),
        whole,
        torch.arange(b),
        torch.rand(b, NUM_RAND, generator=draw),
    )


def calibrated_model(settings: ModelSettings, classes: int, image_size: tuple[int, int], seed: int = 0) -> Detector:
    """A model whose norms have the statistics of random images and whose heads are far from their timid start."""
    torch.manual_seed(seed)
    trained = build(settings_of(settings.model, backbone_norm="bn"), classes).train()
    for module in trained.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        for head, child, std in (("classification_head", "cls_logits", 0.1), ("regression_head", "bbox_reg", 0.03)):
            trained.head[head].get_submodule(child).weight.normal_(std=std)
        trained.head["classification_head"].get_submodule("cls_logits").bias.fill_(-2.0)
        trained(make_batch((0, 0, 0), image_size, classes, seed=seed + 1).images)
    model = build(settings, classes)
    model.load_state_dict(trained.state_dict(), strict=False)
    return model
