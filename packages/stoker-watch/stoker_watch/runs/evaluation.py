"""The COCO metrics of an evaluation; evaluation.json, with the errors of a model; small copies of its images.

The files have a bounded size for any data set; `stoker/training/evaluator.py` writes them, `report/` shows them;
what their fields mean is in docs/run-folder.md.
"""

import contextlib
from pathlib import Path

import msgspec

from stoker_watch import regular_files
from stoker_watch.errors import UsageError, make_error
from stoker_watch.runs.records import EVALUATION, THUMBNAILS


class ClassMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A class. None: the evaluated images have no ground truth box of it."""

    name: str
    ap: float | None
    ap50: float | None
    boxes: int


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
    boxes: int
    detections: int
    missing: int = 0


COCO_SUMMARY = Metrics.__struct_fields__[:12]
"""The fields of Metrics in COCO's order."""
COCO_TITLES = ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large",
           "AR 1", "AR 10", "AR 100", "AR small", "AR medium", "AR large")  # fmt: skip
"""What they are called."""
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


class ClassEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A class. Counts are at its score `threshold` and at IoU 0.5."""

    name: str
    boxes: int
    ap: float | None
    ap50: float | None
    threshold: float | None
    f1: float | None
    precision: float | None
    recall: float | None
    tp: int
    error_types: dict[str, int]
    tp_scores: list[int]
    fp_scores: list[int]
    curves: Curves | None


class ConfusionPair(msgspec.Struct, frozen=True, kw_only=True):
    """How often a box of one class was detected as another; labels 0 … C-1."""

    gt_label: int
    pred_label: int
    count: int


class ConfusionMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """What each ground truth box was detected as, and each other detection: all count once."""

    labels: list[int]
    counts: list[list[int]]


class GroundTruthBox(msgspec.Struct, frozen=True, kw_only=True):
    """A ground truth box."""

    box: tuple[float, float, float, float]
    label: int
    crowd: bool
    detected: bool


class DetectionBox(msgspec.Struct, frozen=True, kw_only=True):
    """A detection above its class's threshold."""

    box: tuple[float, float, float, float]
    label: int
    score: float
    error_type: str


class ImageEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An image with its ground truth boxes and detections."""

    image_index: int
    path: str
    byte_range: tuple[int, int] | None
    size: tuple[int, int] | None
    f1: float
    tp: int
    fp: int
    fn: int
    gt_boxes: list[GroundTruthBox]
    detections: list[DetectionBox]
    truncated_boxes: int = 0


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    step: int
    split: str
    metrics: Metrics
    curves: Curves
    classes: list[ClassEvaluation]
    confusions: list[ConfusionPair]
    worst: list[ImageEvaluation]
    best: list[ImageEvaluation]
    confusion_matrix: ConfusionMatrix
    threshold: float | None = None


class Thumbnail(msgspec.Struct, frozen=True, kw_only=True):
    """A small copy of an image, upright as its boxes."""

    original_size: tuple[int, int]
    size: tuple[int, int]
    jpeg: bytes
    error: str = ""


class Thumbnails(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    step: int
    images: dict[int, Thumbnail]


def read_evaluation(run: Path) -> Evaluation | None:
    """None if the run has none. Raises UsageError if another version of stoker wrote it, or it is damaged."""
    path = run / EVALUATION
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(regular_files.read_bytes(path), type=Evaluation)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise make_error(UsageError, "evaluation-of-another-version", path, cause=str(error)) from error


def read_thumbnails(run: Path, step: int) -> dict[int, Thumbnail]:
    """The copies for the evaluation at `step`, by image; empty if the run has none, or the file is damaged."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        thumbnails = msgspec.json.decode(regular_files.read_bytes(run / THUMBNAILS), type=Thumbnails)
        return thumbnails.images if thumbnails.step == step else {}
    return {}
