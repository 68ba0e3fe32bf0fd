"""Detections and ground truth of a split as columns on the host, which the metrics are computed from. No torch.

`evaluate.py` and `inference/predict.py` create them; `coco.py`, `error_analysis.py` and `draw.py` read them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

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
    nothing = boxes_in_image(np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    return dataclasses.replace(nothing, image_indices=np.asarray(image_indices, np.int64))
