"""What every detector is: the base class of the rows of MODELS, and how it says which of its numbers belong to classes.

A detector predicts (`forward`), compares with a batch (`loss`) and offers boxes (`candidates`); what happens to those,
suppression within each class and the way back to pixels of the original picture, is the same for all (`decode`).
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.layers.postprocess import (
    MAX_DETECTIONS,
    BatchDetections,
    Candidates,
    nms_per_class,
    rescale_to_original,
    topk_detections,
)

# Mean and standard deviation of ImageNet's pixels, 0 … 1: what torchvision's weights were trained with.
PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)


class ClassHeadSpec(NamedTuple):
    """A layer (weight and bias) whose outputs belong to classes: `anchors` groups of classes of `per_class` numbers."""

    name: str
    """Of the module; its tensors are `name.weight` and `name.bias`."""
    num_anchors: int = 1
    outputs_per_class: int = 1
    has_background: bool = False
    """Whether a background class comes before the user's (softmax)."""


class Detector(nn.Module):
    """Base of all detectors. settings: no field that the architecture uses is AUTO; class_count: C, without background.

    Nothing but `remark` and the suppression in `decode` may make the host wait for the device. `forward` runs under
    autocast and so do `loss` and `decode`, which leave it for what needs fp32.
    """

    iou_threshold: float = 0.5
    """Two boxes of a class that overlap more are one object, where the caller does not say otherwise; from 1 on nothing
    is suppressed."""

    backbone_prefixes: ClassVar[tuple[str, ...]] = ("backbone.body.",)
    """Beginnings of the names of what a classifier's weights fill."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        settings: ModelSettings,
        num_classes: int,
        *,
        mean: tuple[float, ...] = PIXEL_MEAN,
        std: tuple[float, ...] = PIXEL_STD,
    ) -> None:
        super().__init__()
        self.settings, self.num_classes = settings, num_classes
        self.register_buffer("pixel_mean", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("pixel_std", torch.tensor(std)[:, None, None], persistent=False)

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 [B, 3, H, W] RGB → float32 of the same shape in channels-last memory, as pretrained weights want it."""
        shift, scale = -self.pixel_mean / self.pixel_std, 1 / (255 * self.pixel_std)
        return torch.addcmul(shift, images, scale).contiguous(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Any:
        """images: uint8 [B, 3, H, W], RGB. What it returns goes to `loss`, `candidates` and `decode`, nowhere else."""
        raise NotImplementedError

    def loss(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """The parts of the loss, fp32 scalars whose sum is minimised; normalised within the batch given."""
        raise NotImplementedError

    def candidates(self, outputs: Any, resized_size: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """Boxes before suppression, a fixed number; content: int32 [B, 2] as in `Batch`. Runs without gradients."""
        raise NotImplementedError

    def training_warning(self) -> str | None:
        """A sentence on the training steps so far that the user should know, where there is one. Waits for the host, as
        "remark"."""
        return None

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        """The layers whose shapes depend on the classes; files of weights are fitted to the user's by them."""
        raise NotImplementedError

    def backbone_key(self, name: str) -> str:
        """Our name of the tensor that torchvision's classifier on the same body calls `name`."""
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
        """The best `detections` boxes of each picture, in pixels of the original; `content`, `scale`, `size` as in
        `Batch`; iou_threshold: default the model's own. Waits for the host, as "nms", where that is below 1."""
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
