"""RetinaNet (arXiv 1708.02002): a feature pyramid, two convolutional heads over every level, one box per anchor.

With the same weights, losses and detections equal those of torchvision's RetinaNet, and so do the names in
`state_dict`. The class head differs in channels: here it has one sigmoid per class and labels 0 … C-1; torchvision's
COCO weights have 91 channels, for labels 1 … 90 and an unused 0 (`weights/load.py` converts).

The lite variant is the SSD MobileNetV2 FPN-lite of TF's Object Detection API (ssd_mobilenet_v2_fpnlite_320x320 and
640x640, called a mobile RetinaNet by its authors): depthwise-separable convolutions with BatchNorm and ReLU6 in FPN and
head, one head for classes and boxes, with weights shared by all levels and separate norms per level. As in TF:
separable convolutions also in the last layers, no norm after the 1 × 1 convolutions of the FPN. Unlike TF: the backbone
keeps the last convolution of the ImageNet classifier (TF's has 256 channels instead of 1,280); levels are merged before
the FPN's 3 × 3 convolutions, as in the paper and in TF's version for TF 1, and the coarsest level has one, too; anchors
start at the image's corner, not half a stride from it; box offsets are not scaled (TF: 10 and 5), and their loss is
GIoU, not a smooth L1 with a quarter of the weight; the NMS threshold is 0.5, not 0.6; the backbone's norms are frozen
unless `--backbone-norm` changes that, TF trains them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.models.backbones import ExtraBlocks, build_backbone_with_fpn, depthwise_conv, separable_conv
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.layers.boxes import AnchorGenerator, AnchorOutputs, batched_gather, cell_anchors, decode, rows_at
from stoker.models.layers.convolutions import ConvReLU, conv_norm, flatten_map
from stoker.models.layers.losses import at_least_fp32, box_loss, focal_loss
from stoker.models.layers.matching import match_anchors
from stoker.models.layers.norms import NORMS, Norm, lite_norm, trainable_norm
from stoker.models.layers.postprocess import PRE_NMS_TOP_N, Candidates, clip_and_filter, topk_per_level

PRIOR_PROBABILITY = 0.01
"""Initial score of every class, so that the many negatives do not dominate the first steps (section 4.1)."""
PRIOR_LOGIT = -math.log((1 - PRIOR_PROBABILITY) / PRIOR_PROBABILITY)


class ConvHead(nn.Module):
    """Convolution blocks, then predictors: levels [B, C, h, w] → of each predictor and level [B, anchors, outputs].

    predictors: name, as in torchvision → (last convolution, outputs per anchor).
    """

    def __init__(self, blocks: list[nn.Module], **predictors: tuple[nn.Conv2d, int]) -> None:
        super().__init__()
        self.conv = nn.Sequential(*blocks)
        self.outputs_per_anchor = {name: outputs for name, (_, outputs) in predictors.items()}
        for name, (predictor, _) in predictors.items():
            self.add_module(name, predictor)

    def forward(self, levels: list[Tensor]) -> list[list[Tensor]]:
        shared = [self.conv(level) for level in levels]
        return [
            [flatten_map(self.get_submodule(name)(features), outputs) for features in shared]
            for name, outputs in self.outputs_per_anchor.items()
        ]


def head_conv(in_channels: int, out_channels: int, *, kernel_size: int = 3, bias: float = 0.0) -> nn.Conv2d:
    """A convolution of a head, with small random weights (section 4.1) and a constant bias."""
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2)
    nn.init.normal_(conv.weight, std=0.01)
    assert conv.bias is not None
    nn.init.constant_(conv.bias, bias)
    return conv


class SharedConvLayer(nn.Module):
    """A layer of the lite variant's head: one convolution for all levels, and a norm per level, since their statistics
    differ. Levels, finest first, each [B, C, h, w] → the same shapes."""

    def __init__(self, channels: int, levels: int, norm: Norm) -> None:
        super().__init__()
        self.conv = separable_conv(channels)
        self.norms = nn.ModuleList(norm(channels) for _ in range(levels))

    def forward(self, levels: list[Tensor]) -> list[Tensor]:
        return [functional.relu6(norm(self.conv(x)), inplace=True) for norm, x in zip(self.norms, levels, strict=True)]


class RetinaNet(Detector):
    """The detector, on a backbone of BACKBONES. channels: of FPN and heads; num_convs: convolutions in each head;
    with_norm: whether FPN and heads have trained norms (not in the paper).

    lite: one head for both, of `num_convs` separable convolutions, with a norm for each level.
    """

    pre_nms_top_n = PRE_NMS_TOP_N
    """Boxes of a pyramid level before NMS."""
    fused_loss = False
    """Whether matching and classification loss are Triton kernels (`layers/triton_kernels.py`)."""

    def __init__(
        self, settings: ModelSettings, num_classes: int, *, backbone: str, channels: int = 256, num_convs: int = 4,
        extra_blocks: ExtraBlocks = "p6p7", with_norm: bool = False, lite: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(settings, num_classes)
        kind = trainable_norm(settings.backbone_norm)
        norm = lite_norm(kind) if lite else NORMS[kind] if with_norm else None
        self.backbone = build_backbone_with_fpn(
            backbone, channels, norm=settings.backbone_norm, trainable_stages=settings.trainable_backbone_layers,
            extra_blocks=extra_blocks, fpn_norm=norm, lite=lite,
        )  # fmt: skip
        num_anchors = len(settings.anchor_scales) * len(settings.aspect_ratios)
        self.head = nn.ModuleDict()
        if lite:
            assert norm is not None
            levels = len(settings.anchor_sizes)
            self.head["tower"] = nn.Sequential(*(SharedConvLayer(channels, levels, norm) for _ in range(num_convs)))
        for child, predictor_name, outputs_per_anchor, bias in (
            ("classification_head", "cls_logits", num_classes, PRIOR_LOGIT),
            ("regression_head", "bbox_reg", 4, 0.0),
        ):
            # The last layer of the lite variant is separable, too: a depthwise convolution before the 1 × 1 predictor.
            blocks: list[nn.Module] = (
                [depthwise_conv(channels)]
                if lite
                else [
                    ConvReLU(head_conv(channels, channels)) if norm is None else conv_norm(channels, channels, norm)
                    for _ in range(num_convs)
                ]
            )
            predictor = head_conv(channels, num_anchors * outputs_per_anchor, kernel_size=1 if lite else 3, bias=bias)
            self.head[child] = ConvHead(blocks, **{predictor_name: (predictor, outputs_per_anchor)})
        self.anchors = AnchorGenerator(
            cell_anchors(size, settings.anchor_scales, settings.aspect_ratios) for size in settings.anchor_sizes
        )

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> AnchorOutputs:
        grids = [(level.shape[2], level.shape[3]) for level in levels]
        anchors = self.anchors(image_size, grids)
        if "tower" in self.head:
            levels = self.head["tower"](levels)
        (logits,) = self.head["classification_head"](levels)
        (deltas,) = self.head["regression_head"](levels)
        logits = tuple(logits) if self.fused_loss and self.training else torch.cat(logits, dim=1)
        return AnchorOutputs(logits, torch.cat(deltas, dim=1), anchors, self.anchors.num_anchors_per_level(grids))

    def loss(self, outputs: AnchorOutputs, batch: Batch) -> dict[str, Tensor]:
        """`classification` (focal) and `bbox_regression`, fp32 scalars: summed over an image's anchors, divided by its
        number of positives (at least 1), averaged over images: those of half batches average to the whole batch's."""
        settings = self.settings
        match: Callable[..., Tensor] = match_anchors
        compute_class_loss: Callable[..., Tensor] = focal_loss
        if isinstance(outputs.logits, tuple):
            from stoker.models.layers import triton_kernels  # Triton, which only the CUDA build of torch has

            match, compute_class_loss = triton_kernels.match_anchors, triton_kernels.focal_loss
        with torch.autocast(outputs.deltas.device.type, enabled=False):
            gt_index = match(batch.boxes, batch.valid, outputs.anchors, **self.match_thresholds())
            positive, index = gt_index >= 0, gt_index.clamp(min=0)
            num_positive = positive.sum(1).clamp(min=1)
            target = torch.where(positive, batch.labels.gather(1, index), gt_index)
            boxes = batched_gather(batch.boxes, index)
            class_loss = compute_class_loss(
                outputs.logits, target, alpha=settings.focal_alpha, gamma=settings.focal_gamma
            )
            offset_loss = box_loss(settings.box_loss, at_least_fp32(outputs.deltas), outputs.anchors, boxes, positive)
            return {
                "classification": (class_loss / num_positive).mean(),
                "bbox_regression": (offset_loss / num_positive).mean(),
            }

    def candidates(
        self, outputs: AnchorOutputs, resized_size: Tensor, *, score_threshold: float | Tensor
    ) -> Candidates:
        """The `pre_nms_top_n` best of each pyramid level, ranked by logits, of which no fp32 copy is needed."""
        assert isinstance(outputs.logits, Tensor)
        with torch.autocast(outputs.deltas.device.type, enabled=False):
            logits, indices, labels = topk_per_level(outputs.logits, outputs.num_anchors_per_level, self.pre_nms_top_n)
            deltas = at_least_fp32(batched_gather(outputs.deltas, indices))
            boxes = decode(deltas, rows_at(outputs.anchors, indices))
            scores = at_least_fp32(logits).sigmoid()
            return clip_and_filter(resized_size, boxes, scores, labels, score_threshold=score_threshold)

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        num_anchors = len(self.settings.anchor_scales) * len(self.settings.aspect_ratios)
        return (ClassHeadSpec("head.classification_head.cls_logits", num_anchors),)
