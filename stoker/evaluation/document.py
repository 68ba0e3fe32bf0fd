"""evaluation.json: how good a model is, and where it is wrong, so that a report can be made where there is no model.

The schema and its reader; of bounded size whatever the data set. Who fills it: `evaluate.appraise`, from
`error_analysis.py`;
`training/loop.py` writes it. Who shows it: `report/`. docs/run-folder.md describes it for people.
"""

from pathlib import Path

import msgspec

from stoker.config import old_names
from stoker.errors import UsageError
from stoker.evaluation.metrics import Metrics
from stoker.runs.records import EVALUATION

NUM_RECALL_POINTS = 101
"""A precision-recall curve has a value at each recall of 0, 0.01, …, 1, as COCO's."""
HISTOGRAM_BINS = 20
"""A histogram of scores has this many equal bins of 0 … 1."""
ERROR_TYPES = ("localization", "class", "both", "duplicate", "background", "missed")
"""What can be wrong, after TIDE (Bolya et al., ECCV 2020); `error_analysis.py` says when it is which."""


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Interpolated precision at the recalls 0, 0.01, …, 1; empty where no ground truth box counts."""

    iou50: list[float]
    iou75: list[float]
    mean: list[float]
    """Over the ten IoU thresholds 0.50 … 0.95: its mean is AP."""


class ClassEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One class. Counts are at its `threshold`, at IoU 0.5."""

    name: str
    boxes: int
    """Ground truth boxes, without crowd boxes."""
    ap: float | None
    ap50: float | None
    threshold: float | None
    """The score from which on detections give the best F1 at IoU 0.5; None where nothing right was found."""
    f1: float | None
    precision: float | None
    recall: float | None
    tp: int
    error_types: dict[str, int]
    """Kind → count; one of ERROR_TYPES; a kind that is absent did not occur."""
    tp_scores: list[int]
    """Histogram of the scores of all detections, also below the threshold, that are right at IoU 0.5."""
    fp_scores: list[int]
    """The same of those that are wrong."""
    curves: Curves | None
    """None where the data set has so many classes that only the most frequent have theirs."""


class ConfusionPair(msgspec.Struct, frozen=True, kw_only=True):
    """How often a box of one class was found as another; labels 0 … C-1."""

    gt_label: int
    """Label of the ground truth box."""
    pred_label: int
    """Label of the detection."""
    count: int
    """How often."""


class GroundTruthBox(msgspec.Struct, frozen=True, kw_only=True):
    """A ground truth box of a image."""

    box: tuple[float, float, float, float]
    """xyxy in pixels of the original image."""
    label: int
    crowd: bool
    detected: bool
    """Whether a detection above its class's threshold is right about it."""


class DetectionBox(msgspec.Struct, frozen=True, kw_only=True):
    """A detection above its class's threshold."""

    box: tuple[float, float, float, float]
    label: int
    score: float
    error_type: str
    """One of ERROR_TYPES; empty when it is right; "crowd" when it lies in a crowd region and does not count."""


class ImageEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A image with what is in it and what was found in it."""

    image_index: int
    """Of the index."""
    path: str
    """Its file; for one inside another file, that file with the image's name behind it."""
    byte_range: tuple[int, int] | None
    """Where it lies in that other file: first byte and number of bytes."""
    size: tuple[int, int] | None
    """Height and width in pixels; None where the annotations do not say."""
    f1: float
    """2 right / (2 right + wrong + not found), at IoU 0.5 and the classes' thresholds."""
    tp: int
    fp: int
    fn: int
    gt_boxes: list[GroundTruthBox]
    detections: list[DetectionBox]
    truncated_boxes: int = 0
    """Boxes beyond the most that are kept of a image."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    step: int
    """Optimizer steps of the weights that were scored."""
    split: str
    metrics: Metrics
    curves: Curves
    """Mean over the classes."""
    classes: list[ClassEvaluation]
    confusions: list[ConfusionPair]
    """The most frequent first."""
    worst: list[ImageEvaluation]
    """Lowest F1 first; of equal ones, the one with more errors."""
    best: list[ImageEvaluation]
    """Highest F1 first; of equal ones, the one with more boxes."""


def read_evaluation(run: Path) -> Evaluation | None:
    """None when the run has none. Raises UsageError when another version of stoker wrote it, or it is damaged."""
    path = run / EVALUATION
    if not path.exists():
        return None
    try:
        return old_names.decode(path.read_bytes(), Evaluation)
    except msgspec.DecodeError as error:
        raise UsageError(
            "The run's evaluation is not what this stoker writes.",
            location=path,
            cause=str(error),
            fix="read the run with the version of stoker that environment.json beside it names, or delete the file",
        ) from error
