"""Faster R-CNN (arXiv 1506.01497) on a feature pyramid (arXiv 1612.03144), a two-stage detector.

With the same weights, losses and detections equal those of torchvision's FasterRCNN, and so do the names in
`state_dict`; only the random selection of anchors and RoIs differs (`layers/sampling.py`). The parts: `rpn.py` is the
first stage, `layers/roi_align.py` pools features, `roi_heads.py` is the second stage.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch, RandSlot
from stoker.hardware.device import allow_host_sync
from stoker.models.backbones import BackboneWithFPN, build_backbone_with_fpn
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.faster_rcnn.roi_heads import RoIHead, decode_class_boxes, roi_loss, sample_rois
from stoker.models.faster_rcnn.rpn import (
    RegionProposalNetwork,
    RPNOutputs,
    propose,
    propose_in_groups,
    rpn_loss,
)
from stoker.models.layers.boxes import clip
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.nms import NMS_ROUNDS
from stoker.models.layers.postprocess import Candidates
from stoker.models.layers.roi_align import multiscale_roi_align
from stoker.models.layers.sampling import batched_gather

MAX_UNCONVERGED_FRACTION = 0.01
"""Above this fraction of images whose NMS of proposals did not converge, the user is warned. Heuristic."""
MIN_BOX_PX = 1e-2
"""Detections with a shorter side are dropped (torchvision)."""


class FasterRCNNOutputs(NamedTuple):
    """Outputs of the first stage, and the features for the second one."""

    rpn_outputs: RPNOutputs
    features: tuple[Tensor, ...]
    """The levels that RoIs are pooled from, finest first, each [B, C, h, w]."""
    strides: tuple[int, ...]
    """Of `features`, in pixels of the model input."""


class FasterRCNN(Detector):
    """The detector. num_pooled_levels: number of levels, from the finest, that RoIs are pooled from; rpn_score_thresh:
    minimum objectness of a proposal."""

    num_train_proposals = 2000
    """Proposals of an image after NMS, and anchors of a level before it (torchvision)."""
    num_test_proposals = 1000
    """The same in evaluation."""
    max_candidates = 1000
    """Best (RoI, class) scores of an image. torchvision has no limit; above the usual threshold of 0.05 a trained model
    has fewer."""

    nms_images: Tensor
    """int64 []: images with proposals in all losses since the model was built."""
    nms_unconverged: Tensor
    """int64 []: those of them whose NMS did not converge."""

    def __init__(
        self,
        backbone: BackboneWithFPN,
        settings: ModelSettings,
        num_classes: int,
        *,
        channels: int,
        num_pooled_levels: int,
        rpn_score_thresh: float,
    ) -> None:
        super().__init__(settings, num_classes)
        self.num_pooled_levels, self.rpn_score_thresh = num_pooled_levels, rpn_score_thresh
        self.backbone = backbone
        self.rpn = RegionProposalNetwork(
            channels, sizes=settings.anchor_sizes, scales=settings.anchor_scales, aspect_ratios=settings.aspect_ratios
        )
        self.roi_heads = RoIHead(channels, num_classes)
        self.register_buffer("nms_images", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("nms_unconverged", torch.zeros((), dtype=torch.int64), persistent=False)

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> FasterRCNNOutputs:
        """The first stage; the second one runs in `loss` and `candidates`. image_size: multiples of 32."""
        pooled_levels = tuple(levels[: self.num_pooled_levels])
        return FasterRCNNOutputs(
            self.rpn(levels, image_size),
            pooled_levels,
            tuple(image_size[0] // level.shape[2] for level in pooled_levels),
        )

    def loss(self, outputs: FasterRCNNOutputs, batch: Batch) -> dict[str, Tensor]:
        """torchvision's four fp32 scalars: `loss_objectness` and `loss_rpn_box_reg` of the first stage, summed over
        the sampled anchors of the batch and divided by their number; `loss_classifier` and `loss_box_reg` of the
        second stage, the same over RoIs.

        The losses of two half batches average to that of the whole batch if all images have equally many samples:
        nearly always 256 anchors, and 512 RoIs unless there are fewer proposals.
        """
        settings, rand = self.settings, batch.rand[:, RandSlot.SAMPLE]
        device_type = outputs.rpn_outputs.logits.device.type
        with torch.autocast(device_type, enabled=False):
            rpn_outputs = _in_fp32(outputs.rpn_outputs)
            boxes = batch.boxes.to(rpn_outputs.deltas.dtype)
            objectness_loss, rpn_box_loss = rpn_loss(
                rpn_outputs,
                boxes,
                batch.valid,
                rand,
                fg_iou_thresh=settings.fg_iou_thresh,
                bg_iou_thresh=settings.bg_iou_thresh,
            )
            with torch.no_grad():
                proposals = propose_in_groups(
                    rpn_outputs,
                    batch.resized_size,
                    pre_nms_top_n=self.num_train_proposals,
                    post_nms_top_n=self.num_train_proposals,
                    score_threshold=self.rpn_score_thresh,
                )
                self.nms_images += proposals.valid.shape[0]
                self.nms_unconverged += proposals.unconverged.sum()
                rois = sample_rois(proposals, boxes, batch.labels, batch.valid, rand)
            features = multiscale_roi_align(outputs.features, outputs.strides, rois.boxes)
        logits, deltas = self.roi_heads(features)
        with torch.autocast(device_type, enabled=False):
            class_loss, roi_box_loss = roi_loss(at_least_fp32(logits), at_least_fp32(deltas), rois)
        return {
            "loss_objectness": objectness_loss,
            "loss_rpn_box_reg": rpn_box_loss,
            "loss_classifier": class_loss,
            "loss_box_reg": roi_box_loss,
        }

    def candidates(
        self, outputs: FasterRCNNOutputs, resized_size: Tensor, *, score_threshold: float | Tensor
    ) -> Candidates:
        """The `max_candidates` best scores of a class at a proposal, with that class's box."""
        device_type = outputs.rpn_outputs.logits.device.type
        with torch.autocast(device_type, enabled=False):
            proposals = propose(
                _in_fp32(outputs.rpn_outputs),
                resized_size,
                pre_nms_top_n=self.num_test_proposals,
                post_nms_top_n=self.num_test_proposals,
                score_threshold=self.rpn_score_thresh,
            )
            features = multiscale_roi_align(outputs.features, outputs.strides, proposals.boxes)
        logits, deltas = self.roi_heads(features)
        with torch.autocast(device_type, enabled=False):
            num_proposals, num_classes = proposals.valid.shape[1], self.num_classes
            scores = at_least_fp32(logits).softmax(dim=1)[:, 1:].reshape(-1, num_proposals, num_classes)
            scores = torch.where(proposals.valid[..., None], scores, 0.0).flatten(1)
            score, indices = scores.topk(min(self.max_candidates, num_proposals * num_classes), dim=1)
            # Each index is a pair (RoI, class); only the boxes of the best pairs are decoded.
            selected_deltas = batched_gather(
                at_least_fp32(deltas)[:, 1:].reshape(-1, num_proposals * num_classes, 4), indices
            )
            boxes = clip(
                decode_class_boxes(selected_deltas, batched_gather(proposals.boxes, indices // num_classes)),
                resized_size,
            )
            is_box = ((boxes[..., 2:] - boxes[..., :2]) >= MIN_BOX_PX).all(-1)
            return Candidates(boxes, torch.where((score > score_threshold) & is_box, score, 0.0), indices % num_classes)

    def training_warning(self) -> str | None:
        """A warning if NMS in the first stage did not converge on more than MAX_UNCONVERGED_FRACTION of the images."""
        with allow_host_sync("training_warning"):
            num_images, num_unconverged = int(self.nms_images), int(self.nms_unconverged)
        if num_unconverged <= MAX_UNCONVERGED_FRACTION * num_images:
            return None
        return (
            f"NMS of proposals did not converge in {NMS_ROUNDS} rounds for {num_unconverged:,} of {num_images:,} "
            f"images: the second stage was also trained on some overlapping proposals. This is harmless in the first "
            f"steps; if the fraction stays above {100 * MAX_UNCONVERGED_FRACTION:.0f} %, detections may be worse"
        )

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        predictor = "roi_heads.box_predictor."
        return (
            ClassHeadSpec(predictor + "cls_score", has_background=True),
            ClassHeadSpec(predictor + "bbox_pred", outputs_per_class=4, has_background=True),
        )


def _in_fp32(rpn_outputs: RPNOutputs) -> RPNOutputs:
    return rpn_outputs._replace(logits=at_least_fp32(rpn_outputs.logits), deltas=at_least_fp32(rpn_outputs.deltas))


def build_faster_rcnn(
    settings: ModelSettings,
    num_classes: int,
    *,
    backbone: str,
    return_layers: Mapping[str, int] | None = None,
    num_pooled_levels: int = 4,
    rpn_score_thresh: float = 0.0,
) -> FasterRCNN:
    """A Faster R-CNN on a backbone of BACKBONES with an FPN of 256 channels; return_layers: as in
    `build_backbone_with_fpn`; num_pooled_levels, rpn_score_thresh: as in `FasterRCNN`."""
    network = build_backbone_with_fpn(
        backbone,
        256,
        norm=settings.backbone_norm,
        trainable_stages=settings.trainable_backbone_layers,
        min_level=2,
        extra_blocks="pool",
        return_layers=return_layers,
    )
    return FasterRCNN(
        network,
        settings,
        num_classes,
        channels=256,
        num_pooled_levels=num_pooled_levels,
        rpn_score_thresh=rpn_score_thresh,
    )
