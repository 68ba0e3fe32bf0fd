"""Detections and ground truth as columns, and the metrics of an evaluation. No torch, so that reports can read them.

`evaluate.py` and `inference/predict.py` create them; `report/` and `inference/draw.py` show them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


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


def empty_detections(image_indices: Sequence[int] = ()) -> Detections:
    """No detections in `image_indices`."""
    return Detections(
        image_index=np.zeros(0, np.int64),
        boxes=np.zeros((0, 4), np.float32),
        score=np.zeros(0, np.float32),
        label=np.zeros(0, np.int64),
        image_indices=np.asarray(image_indices, np.int64),
    )


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


COCO_SUMMARY = (
    "ap",
    "ap50",
    "ap75",
    "ap_small",
    "ap_medium",
    "ap_large",
    "ar1",
    "ar10",
    "ar100",
    "ar_small",
    "ar_medium",
    "ar_large",
)
"""The fields of Metrics in COCO's order."""
