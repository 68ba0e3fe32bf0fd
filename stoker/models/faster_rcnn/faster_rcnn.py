"""Faster R-CNN (arXiv 1506.01497) on a feature pyramid (arXiv 1612.03144): it proposes regions, then judges each.

With the same weights, losses and detections are those of torchvision's FasterRCNN, and so are the names in
`state_dict`; which anchors and regions the losses look at is drawn otherwise (`sampling.py`). Here the parts are put
together: `rpn.py` is the first stage, `roi_heads.py` the second, `roi_align.py` lies between them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch, Draw
from stoker.hardware.host_sync import allow_host_wait
from stoker.models.architecture import PRETRAINED, Build, Defaults
from stoker.models.backbones import FeaturePyramid, pyramid
from stoker.models.detector import ClassLayer, Detector
from stoker.models.faster_rcnn.roi_heads import RegionHead, boxes_of_classes, region_loss, sample_regions
from stoker.models.faster_rcnn.rpn import (
    ROUNDS,
    Predicted,
    ProposalNetwork,
    proposal_loss,
    propose,
    propose_for_training,
)
from stoker.models.layers.boxes import clip
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.postprocess import Candidates
from stoker.models.layers.roi_align import pool
from stoker.models.layers.sampling import take

UNCONVERGED = 0.01
"""Share of pictures whose proposals are not suppressed to the end above which the user is told. Our judgment."""
SMALLEST_PX = 1e-2
"""A detection with a shorter side is none (torchvision)."""


class Raw(NamedTuple):
    """What the network says before it has looked at any region."""

    predicted: Predicted
    """Of the first stage, at all levels."""
    levels: tuple[Tensor, ...]
    """The levels that regions are pooled from, finest first, each [B, C, h, w]."""
    strides: tuple[int, ...]
    """Of `levels`, in pixels of the canvas."""


class FasterRCNN(Detector):
    """The detector. pooled: how many levels, from the finest, regions are pooled from (each half the one before it);
    proposal_score: the least probability of an object that a proposal has."""

    train_proposals = 2000
    """Proposals of a picture that regions are sampled from, and anchors of a level that go into their suppression
    (torchvision)."""
    test_proposals = 1000
    """The same in evaluation."""
    per_picture = 1000
    """Candidates of a picture: its best scores of a class at a region. torchvision has no bound; above the usual
    threshold of 0.05 there are fewer once the model has learnt something."""

    nms_pictures: Tensor
    """int64 []: pictures whose proposals were suppressed, in all losses since the model was made."""
    nms_unconverged: Tensor
    """int64 []: those of them whose proposals were not suppressed to the end."""

    def __init__(
        self,
        backbone: FeaturePyramid,
        settings: ModelSettings,
        class_count: int,
        *,
        channels: int,
        pooled: int,
        proposal_score: float,
    ) -> None:
        super().__init__(settings, class_count)
        self.pooled, self.proposal_score = pooled, proposal_score
        self.backbone = backbone
        self.rpn = ProposalNetwork(
            channels, sizes=settings.anchor_sizes, scales=settings.anchor_scales, ratios=settings.anchor_ratios
        )
        self.roi_heads = RegionHead(channels, class_count)
        self.register_buffer("nms_pictures", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("nms_unconverged", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, images: Tensor) -> Raw:
        """images: uint8 [B, 3, H, W], RGB, H and W multiples of 32."""
        levels = self.backbone(self.pixels(images))
        canvas = (images.shape[2], images.shape[3])
        pooled = tuple(levels[: self.pooled])
        return Raw(self.rpn(levels, canvas), pooled, tuple(canvas[0] // level.shape[2] for level in pooled))

    def loss(self, raw: Raw, batch: Batch) -> dict[str, Tensor]:
        """torchvision's four, fp32 scalars: of the first stage `loss_objectness` and `loss_rpn_box_reg`, summed over
        the sampled anchors of the batch and divided by their number; of the second `loss_classifier` and
        `loss_box_reg`, the same over regions.

        The halves of a batch average to the loss of the whole where all pictures have equally many samples: 256 anchors
        nearly always, 512 regions unless there are fewer proposals. Where one has fewer, its samples weigh a little
        more in a small part than they would in the whole.
        """
        settings, draw = self.settings, batch.draw[:, Draw.SAMPLE]
        kind = raw.predicted.logits.device.type
        with torch.autocast(kind, enabled=False):
            predicted = _in_fp32(raw.predicted)
            boxes = batch.boxes.to(predicted.deltas.dtype)
            objectness, rpn_boxes = proposal_loss(
                predicted,
                boxes,
                batch.valid,
                draw,
                foreground_iou=settings.foreground_iou,
                background_iou=settings.background_iou,
            )
            with torch.no_grad():
                proposals = propose_for_training(
                    predicted,
                    batch.content,
                    per_level=self.train_proposals,
                    slots=self.train_proposals,
                    score_threshold=self.proposal_score,
                )
                self.nms_pictures += proposals.valid.shape[0]
                self.nms_unconverged += proposals.unconverged.sum()
                regions = sample_regions(proposals, boxes, batch.labels, batch.valid, draw)
            features = pool(raw.levels, raw.strides, regions.boxes)
        logits, deltas = self.roi_heads(features)
        with torch.autocast(kind, enabled=False):
            classes, region_boxes = region_loss(at_least_fp32(logits), at_least_fp32(deltas), regions)
        return {
            "loss_objectness": objectness,
            "loss_rpn_box_reg": rpn_boxes,
            "loss_classifier": classes,
            "loss_box_reg": region_boxes,
        }

    def candidates(self, raw: Raw, content: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        """The `per_picture` best scores of a class at a proposed region, with that class's box."""
        kind = raw.predicted.logits.device.type
        with torch.autocast(kind, enabled=False):
            proposals = propose(
                _in_fp32(raw.predicted),
                content,
                per_level=self.test_proposals,
                slots=self.test_proposals,
                score_threshold=self.proposal_score,
            )
            features = pool(raw.levels, raw.strides, proposals.boxes)
        logits, deltas = self.roi_heads(features)
        with torch.autocast(kind, enabled=False):
            slots, classes = proposals.valid.shape[1], self.class_count
            scores = at_least_fp32(logits).softmax(dim=1)[:, 1:].reshape(-1, slots, classes)
            scores = torch.where(proposals.valid[..., None], scores, 0.0).flatten(1)
            score, place = scores.topk(min(self.per_picture, slots * classes), dim=1)
            # Each place is a region and a class; of the boxes only those of the best places are decoded.
            chosen = take(at_least_fp32(deltas)[:, 1:].reshape(-1, slots * classes, 4), place)
            boxes = clip(boxes_of_classes(chosen, take(proposals.boxes, place // classes)), content)
            is_box = ((boxes[..., 2:] - boxes[..., :2]) >= SMALLEST_PX).all(-1)
            return Candidates(boxes, torch.where((score > score_threshold) & is_box, score, 0.0), place % classes)

    def remark(self) -> str | None:
        """Whether suppression in the first stage ran out of rounds on more than UNCONVERGED of the pictures."""
        with allow_host_wait("remark"):
            pictures, unconverged = int(self.nms_pictures), int(self.nms_unconverged)
        if unconverged <= UNCONVERGED * pictures:
            return None
        return (
            f"{unconverged:,} of {pictures:,} pictures had proposals that overlap in chains of more than {ROUNDS}: "
            f"some that a better one suppresses stayed, and the second stage learned from them, too. No harm in the "
            f"first steps; where the share stays above {100 * UNCONVERGED:.0f} %, detections may be worse"
        )

    def class_layers(self) -> tuple[ClassLayer, ...]:
        predictor = "roi_heads.box_predictor."
        return (
            ClassLayer(predictor + "cls_score", background=True),
            ClassLayer(predictor + "bbox_pred", per_class=4, background=True),
        )


def _in_fp32(predicted: Predicted) -> Predicted:
    return predicted._replace(logits=at_least_fp32(predicted.logits), deltas=at_least_fp32(predicted.deltas))


FASTER_RCNN: Defaults = {
    "foreground_iou": (0.7, "Faster R-CNN paper, section 3.1.2; of anchors, in the first stage"),
    "background_iou": (0.3, "Faster R-CNN paper, section 3.1.2; of anchors, in the first stage"),
    "anchor_sizes": ((32.0, 64.0, 128.0, 256.0, 512.0), "FPN paper, section 4.1: eight times the stride of each level"),
    "anchor_scales": ((1.0,), "FPN paper, section 4.1: one scale per level"),
    "anchor_ratios": ((0.5, 1.0, 2.0), "FPN paper, section 4.1"),
    **PRETRAINED,
}


def faster_rcnn_on(
    body: str, *, outputs: Mapping[str, int] | None = None, pooled: int = 4, proposal_score: float = 0.0
) -> Build:
    """Builds Faster R-CNNs on a body of BODIES with an FPN of 256 channels; outputs: as in `pyramid`; pooled and
    proposal_score: as in `FasterRCNN`."""

    def build(settings: ModelSettings, class_count: int) -> FasterRCNN:
        backbone = pyramid(
            body,
            256,
            norm=settings.norm,
            trainable_stages=settings.trainable_stages,
            finest=2,
            coarser="pool",
            outputs=outputs,
        )
        return FasterRCNN(backbone, settings, class_count, channels=256, pooled=pooled, proposal_score=proposal_score)

    return build
