"""Detections and ground truth as columns, the metrics of an evaluation, and evaluation.json, which has the errors of a
model, too. No torch, so that reports can read them; they need neither model nor images.

`evaluate.py` and `inference/predict.py` create them; `report/` and `evaluation/draw.py` show them. evaluation.json has
a bounded size for any data set; `training/evaluator.py` writes it; docs/run-folder.md describes it.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker import regular_files
from stoker.errors import UsageError, make_error
from stoker.runs.records import EVALUATION


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detections:
    """N detections in one or more images, as columns on the host."""

    image_index: NDArray[np.int64]
    """[N], the image: its position in the index, or in the list of files."""
    boxes: NDArray[np.float32]
    """[N, 4], xyxy in pixels of the original image."""
    score: NDArray[np.float32]
    """[N], 0 … 1."""
    label: NDArray[np.int64]
    """[N], 0 … C-1."""
    image_indices: NDArray[np.int64]
    """[P], the evaluated images, also those without detections."""

    def __len__(self) -> int:
        return len(self.image_index)

    def select(self, mask: NDArray[Any]) -> "Detections":
        """The detections of a mask or of indices."""
        columns = {name: getattr(self, name)[mask] for name in ("image_index", "boxes", "score", "label")}
        return Detections(image_indices=self.image_indices, **columns)

    def of_image(self, image_index: int) -> "Detections":
        """The detections in one image, best score first."""
        positions = np.flatnonzero(self.image_index == image_index)
        best_first = self.select(positions[np.argsort(-self.score[positions], kind="stable")])
        return dataclasses.replace(best_first, image_indices=np.array([image_index], np.int64))

    @staticmethod
    def concatenate(parts: Sequence["Detections"]) -> "Detections":
        if not parts:
            return empty_detections()
        names = [field.name for field in dataclasses.fields(Detections)]
        return Detections(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """K ground truth boxes of P images, as columns."""

    image_indices: NDArray[np.int64]
    """[P], positions in the index."""
    image_index: NDArray[np.int64]
    """[K], the image of each box."""
    boxes: NDArray[np.float32]
    """[K, 4], xyxy in pixels of the original image."""
    label: NDArray[np.int64]
    """[K], 0 … C-1."""
    crowd: NDArray[np.bool_]
    """[K], COCO's iscrowd: regions with many objects, in which detections are ignored."""
    area: NDArray[np.float64]
    """[K], for small, medium and large; from the annotations if they have it."""
    class_names: tuple[str, ...]


def boxes_in_image(
    boxes: NDArray[np.float32], label: NDArray[np.int64], score: NDArray[np.float32] | None = None
) -> Detections:
    """N boxes of one image, as detections in the image 0; without scores, these are 1."""
    return Detections(
        image_index=np.zeros(len(boxes), np.int64),
        boxes=boxes,
        score=np.ones(len(boxes), np.float32) if score is None else score,
        label=label,
        image_indices=np.zeros(1, np.int64),
    )


def empty_detections(image_indices: Sequence[int] = ()) -> Detections:
    """No detections in `image_indices`."""
    nothing = boxes_in_image(np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    return dataclasses.replace(nothing, image_indices=np.asarray(image_indices, np.int64))


class ClassMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A class. None: the evaluated images have no ground truth box of it."""

    name: str
    ap: float | None
    ap50: float | None
    boxes: int
    """Ground truth boxes, without crowd boxes."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The twelve COCO metrics, 0 … 1; None where COCO has -1, because no ground truth box has that size.

    ap: mean over ten IoU thresholds 0.50 … 0.95 and over classes; ap50, ap75: at one threshold; small, medium, large:
    areas below 32², up to 96², and above, in pixels of the original image; ar1 … ar100: recall with that many
    detections per image and class.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    ar1: float | None
    ar10: float | None
    ar100: float | None
    ar_small: float | None
    ar_medium: float | None
    ar_large: float | None
    per_class: list[ClassMetrics]
    num_images: int
    """Evaluated images."""
    boxes: int
    """Ground truth boxes, without crowd boxes."""
    detections: int
    missing: int = 0
    """Images of the split that could not be read."""


COCO_SUMMARY = Metrics.__struct_fields__[:12]
"""The fields of Metrics in COCO's order."""
NUM_RECALL_POINTS = 101
"""Values of a precision-recall curve, at the recalls 0, 0.01, …, 1, as in COCO."""
HISTOGRAM_BINS = 20
"""Equal bins of 0 … 1 of a histogram of scores."""
ERROR_TYPES = ("localization", "class", "both", "duplicate", "background", "missed")
"""TIDE's error types (Bolya et al., ECCV 2020); `error_analysis.py` defines them."""


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Interpolated precision at the recalls 0, 0.01, …, 1; empty without ground truth boxes."""

    iou50: list[float]
    iou75: list[float]
    mean: list[float]
    """Mean over the ten IoU thresholds 0.50 … 0.95; its own mean is AP."""


class ClassEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A class. Counts are at its score `threshold` and at IoU 0.5."""

    name: str
    boxes: int
    """Ground truth boxes, without crowd boxes."""
    ap: float | None
    ap50: float | None
    threshold: float | None
    """Score threshold with the best F1 at IoU 0.5; None without true positives."""
    f1: float | None
    precision: float | None
    recall: float | None
    tp: int
    error_types: dict[str, int]
    """Error type (one of ERROR_TYPES) → count; types without errors are absent."""
    tp_scores: list[int]
    """Histogram of the scores of all true positives at IoU 0.5, also below the threshold."""
    fp_scores: list[int]
    """The same of the false positives."""
    curves: Curves | None
    """None for the less frequent classes of a data set with many classes."""


class ConfusionPair(msgspec.Struct, frozen=True, kw_only=True):
    """How often a box of one class was detected as another; labels 0 … C-1."""

    gt_label: int
    """Label of the ground truth box."""
    pred_label: int
    """Label of the detection."""
    count: int
    """How often."""


class ConfusionMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """What each ground truth box was detected as, and each other detection: all count once."""

    labels: list[int]
    """[L], the most frequent classes."""
    counts: list[list[int]]
    """[L + 2][L + 2], by ground truth and prediction; after the classes, all others together, and background."""


class GroundTruthBox(msgspec.Struct, frozen=True, kw_only=True):
    """A ground truth box."""

    box: tuple[float, float, float, float]
    """xyxy in pixels of the original image."""
    label: int
    crowd: bool
    detected: bool
    """Whether a detection above its class's threshold matches it."""


class DetectionBox(msgspec.Struct, frozen=True, kw_only=True):
    """A detection above its class's threshold."""

    box: tuple[float, float, float, float]
    label: int
    score: float
    error_type: str
    """One of ERROR_TYPES; empty for a true positive; "crowd" if it is in a crowd region and ignored."""


class ImageEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An image with its ground truth boxes and detections."""

    image_index: int
    """In the index of the data set."""
    path: str
    """Its file; for an image inside another file, that file followed by the image's name."""
    byte_range: tuple[int, int] | None
    """First byte and number of bytes inside that other file."""
    size: tuple[int, int] | None
    """Height and width in pixels; None if the annotations do not have them."""
    f1: float
    """2 tp / (2 tp + fp + fn), at IoU 0.5 and the classes' thresholds."""
    tp: int
    fp: int
    fn: int
    gt_boxes: list[GroundTruthBox]
    detections: list[DetectionBox]
    truncated_boxes: int = 0
    """Number of boxes left out because of the limit per image."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    step: int
    """Optimizer steps of the evaluated weights."""
    split: str
    metrics: Metrics
    curves: Curves
    """Mean over the classes."""
    classes: list[ClassEvaluation]
    confusions: list[ConfusionPair]
    """The most frequent first."""
    worst: list[ImageEvaluation]
    """Lowest F1 first; among equal ones, the one with more errors."""
    best: list[ImageEvaluation]
    """Highest F1 first; among equal ones, the one with more boxes."""
    threshold: float | None = None
    """Score threshold with the best F1 of all classes together, at IoU 0.5; None without true positives."""
    confusion_matrix: ConfusionMatrix | None = None
    """None in files of earlier versions."""


def read_evaluation(run: Path) -> Evaluation | None:
    """None if the run has none. Raises UsageError if another version of stoker wrote it, or it is damaged."""
    path = run / EVALUATION
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(regular_files.read_bytes(path), type=Evaluation)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise make_error(UsageError, "evaluation-of-another-version", path, cause=str(error)) from error
