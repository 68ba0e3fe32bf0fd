"""Boxes as columns, and the numbers that say how good a model's boxes are. No torch: reports read these anywhere.

Who fills them: `evaluate.py` and `predict.py`. Who shows them: `report/`, `draw.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detections:
    """N boxes that a model found in one or many images, as columns on the host. No object per box."""

    image_index: NDArray[np.int64]
    """[N], the image: its row in the index, or its place in the list of files."""
    boxes: NDArray[np.float32]
    """[N, 4], xyxy in pixels of the original image."""
    score: NDArray[np.float32]
    """[N], 0 … 1."""
    label: NDArray[np.int64]
    """[N], 0 … C-1."""
    image_indices: NDArray[np.int64]
    """[P], the images that the model looked at, also those in which it found nothing."""

    def __len__(self) -> int:
        return len(self.image_index)

    def select(self, mask: NDArray[Any]) -> "Detections":
        """The boxes of a mask or of indices."""
        columns = {name: getattr(self, name)[mask] for name in ("image_index", "boxes", "score", "label")}
        return Detections(image_indices=self.image_indices, **columns)

    def of_image(self, image_index: int) -> "Detections":
        """The boxes of one image, the best score first."""
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
    """[P], rows of the index."""
    image_index: NDArray[np.int64]
    """[K], the image of each box."""
    boxes: NDArray[np.float32]
    """[K, 4], xyxy in pixels of the original image."""
    label: NDArray[np.int64]
    """[K], 0 … C-1."""
    crowd: NDArray[np.bool_]
    """[K], regions with many objects: a detection inside one counts neither for nor against."""
    area: NDArray[np.float64]
    """[K], decides small, medium and large; the source's own where it says one."""
    class_names: tuple[str, ...]


def empty_detections(image_indices: Sequence[int] = ()) -> Detections:
    """Images in which nothing was found."""
    return Detections(
        image_index=np.zeros(0, np.int64),
        boxes=np.zeros((0, 4), np.float32),
        score=np.zeros(0, np.float32),
        label=np.zeros(0, np.int64),
        image_indices=np.asarray(image_indices, np.int64),
    )


class ClassMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One class. None: the evaluated images have no box of it that counts."""

    name: str
    ap: float | None
    ap50: float | None
    boxes: int
    """Ground truth boxes, without crowd boxes."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """The twelve COCO numbers, 0 … 1; None where COCO says -1, that is where no ground truth box is of that size.

    ap: mean over ten IoU thresholds 0.50 … 0.95 and over classes; ap50, ap75: at one threshold; small, medium, large:
    areas below 32², to 96², and above, in pixels of the original image; ar1 … ar100: recall with that many
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
    """Images that were evaluated."""
    boxes: int
    """Ground truth boxes, without crowd boxes."""
    detections: int
    missing: int = 0
    """Images of the split that could not be evaluated, because they could not be read."""


COCO_SUMMARY = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large",
          "ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large")  # fmt: skip
"""The fields of Metrics in COCO's own order."""
