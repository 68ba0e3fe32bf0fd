"""Files of pretrained weights as torchvision publishes them, with random values."""

from pathlib import Path

import torch
import torchvision

from stoker.models import MODELS

BUILDERS = {"faster_rcnn_resnet50_fpn": "fasterrcnn_resnet50_fpn"}


def write_weights(folder: Path, name: str, *, seed: int = 0) -> torch.nn.Module:
    """Writes the COCO weights of a model where a download would, and returns torchvision's model with them."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    build = getattr(torchvision.models.detection, BUILDERS.get(name, name))
    model = build(weights=None, weights_backbone=None)
    torch.save(model.state_dict(), folder / MODELS[name].urls["coco"].rpartition("/")[2])
    return model.eval()
