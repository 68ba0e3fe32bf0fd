"""`Detector`, the base class of all models, and `ClassHeadSpec`, which names the layers that depend on the classes.

A detector predicts (`forward`), computes its loss (`loss`) and selects boxes before NMS (`candidates`). NMS per class
and the conversion to pixels of the original image are the same for all detectors (`decode`).
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.layers.convolutions import is_on_accelerator
from stoker.models.layers.norms import DerivedBuffers
from stoker.models.layers.postprocess import (
    MAX_DETECTIONS,
    BatchDetections,
    Candidates,
    nms_per_class,
    rescale_to_original,
    topk_detections,
)


class ClassHeadSpec(NamedTuple):
    """A layer whose output channels are [num_anchors, classes, outputs_per_class], flattened."""

    name: str
    """The module's; its tensors are `name.weight` and `name.bias`."""
    num_anchors: int = 1
    outputs_per_class: int = 1
    has_background: bool = False
    """Whether a background class comes before the user's classes (softmax)."""
    has_bias: bool = True
    """False: an embedding of the classes."""


class Detector(DerivedBuffers):
    """Base of all detectors. settings: no field that the architecture uses is AUTO; num_classes: C, without background.

    Only, on a CPU, the NMS in `decode` may synchronize host and device. `forward`, `loss` and `decode` run under
    autocast; the last two switch it off where they need fp32.
    """

    iou_threshold: float = 0.5
    """Two boxes of a class that overlap more are one object, by default; from 1 on nothing is suppressed."""

    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)
    """Mean and deviation of pixels in 0 … 1: ImageNet's, with which torchvision's weights were trained."""

    backbone_prefixes: ClassVar[tuple[str, ...]] = ("backbone.body.",)
    """Beginnings of the names of what a classifier's weights fill."""

    backbone: nn.Module
    """Makes maps, finest first, of normalized images [B, 3, H, W], unless a subclass has a `forward` of its own."""
    pixel_mean: Tensor
    pixel_std: Tensor
    pixel_shift: Tensor
    """Pixels 0 … 255 are normalized by `pixel_shift` + pixel · `pixel_scale`."""
    pixel_scale: Tensor

    def __init__(self, settings: ModelSettings, num_classes: int) -> None:
        super().__init__()
        self.settings, self.num_classes = settings, num_classes
        self.register_buffer("pixel_mean", torch.tensor(self.mean)[:, None, None], persistent=False)
        self.register_buffer("pixel_std", torch.tensor(self.std)[:, None, None], persistent=False)
        self.register_buffer("pixel_shift", torch.empty(3, 1, 1), persistent=False)
        self.register_buffer("pixel_scale", torch.empty(3, 1, 1), persistent=False)
        self.update_buffers()

    def update_buffers(self) -> None:
        if not self.pixel_mean.is_meta:  # no values (`weights/load.py`)
            self.pixel_shift.copy_(-self.pixel_mean / self.pixel_std)
            self.pixel_scale.copy_(1 / (255 * self.pixel_std))

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 [B, 3, H, W] RGB → normalized pixels of the same shape, in channels-last memory: float32, on an
        accelerator under autocast the dtype of autocast, so that compiled code writes no float32 image."""
        pixels = torch.addcmul(self.pixel_shift, images, self.pixel_scale).contiguous(memory_format=torch.channels_last)
        device_type = images.device.type
        if is_on_accelerator(images) and torch.is_autocast_enabled(device_type):
            return pixels.to(torch.get_autocast_dtype(device_type))
        return pixels

    def forward(self, images: Tensor) -> Any:
        """images: uint8 [B, 3, H, W], RGB. Only `loss`, `candidates` and `decode` read what it returns."""
        return self.predict(self.backbone(self.normalize(images)), (images.shape[2], images.shape[3]))

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> Any:
        """The heads: what `forward` returns, from the maps of `self.backbone`. image_size: height and width of the
        images, multiples of the architecture's `size_divisor`."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """The terms of the loss by name: fp32 scalars, normalized within the batch. Training minimizes their sum."""
        raise NotImplementedError

    def candidates(self, outputs: Any, resized_size: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """A fixed number of boxes before NMS; resized_size: int32 [B, 2] as in `Batch`. Runs without gradients."""
        raise NotImplementedError

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        """The layers whose shapes depend on the classes. Weights of other classes are converted with them."""
        raise NotImplementedError

    def match_thresholds(self) -> dict[str, Any]:
        """The thresholds of `match_anchors` that are settings."""
        return {"fg_iou_thresh": self.settings.fg_iou_thresh, "bg_iou_thresh": self.settings.bg_iou_thresh}

    def backbone_key(self, name: str) -> str:
        """Name here of the tensor that torchvision's classifier with the same backbone calls `name`."""
        return self.backbone_prefixes[0] + name.removeprefix("features.")

    def decode(
        self,
        outputs: Any,
        resized_size: Tensor,
        scale: Tensor,
        original_size: Tensor,
        *,
        score_threshold: float = 0.05,
        iou_threshold: float | None = None,
        max_detections: int = MAX_DETECTIONS,
    ) -> BatchDetections:
        """The best `max_detections` boxes of each image in pixels of the original image.

        resized_size, scale, original_size: as in `Batch`; iou_threshold: default the model's own; from 1 on there is no
        NMS. With NMS, a CPU synchronizes, as "nms"; on an accelerator the reader must apply the result's `check`.
        """
        nms_threshold = self.iou_threshold if iou_threshold is None else iou_threshold
        with torch.no_grad():
            candidates = self.candidates(outputs, resized_size, score_threshold=score_threshold)
        with torch.no_grad(), torch.autocast(scale.device.type, enabled=False):
            selected = (
                nms_per_class(candidates, iou_threshold=nms_threshold, max_detections=max_detections)
                if nms_threshold < 1
                else topk_detections(candidates, max_detections)
            )
            return rescale_to_original(selected, scale, original_size)
