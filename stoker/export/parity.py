"""Whether an exported file finds what the model finds: the two are run on the same pictures and compared box by box.

Two programs that add the same numbers in another order differ in the last digits, and where a digit decides (a score at
the threshold, two boxes that overlap by just the limit, two scores that are equal) one of them has a box that the other
has not. Such boxes are counted apart, each with its reason; any other difference is a ParityError.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import models
from stoker.errors import ParityError
from stoker.export.runtime import OnnxModel

BOX_PX, SCORE = 0.1, 1e-3
"""The largest differences of a box's corner, in pixels of the canvas, and of its score that are let pass."""
EDGE = 1e-4
"""How near to a threshold, or to each other, numbers must be for their last digits to decide."""
SAME_PX, SAME_SCORE = 4.0, 0.05
"""Within these, two boxes of a class are taken for the same one, whose difference is then measured."""
BATCH = 8
"""Pictures of the larger batch; a batch of one is compared as well."""


class Boxes(NamedTuple):
    """What was found in one picture."""

    boxes: NDArray[np.float32]
    """[N, 4], xyxy in pixels of the canvas."""
    scores: NDArray[np.float32]
    """[N]."""
    labels: NDArray[np.int64]
    """[N]."""


class Parity(NamedTuple):
    """The largest differences over some pictures."""

    pictures: int
    boxes: int
    """Boxes that both found."""
    box_px: float
    score: float
    at_edge: int
    """Boxes that only one of the two found, because a number lay within EDGE of what decides."""
    unexplained: tuple[str, ...]
    """The others that only one of the two found, in words."""

    def plus(self, other: "Parity") -> "Parity":
        return Parity(
            self.pictures + other.pictures, self.boxes + other.boxes, max(self.box_px, other.box_px),
            max(self.score, other.score), self.at_edge + other.at_edge, self.unexplained + other.unexplained,
        )  # fmt: skip

    @property
    def holds(self) -> bool:
        return not self.unexplained and self.box_px <= BOX_PX and self.score <= SCORE


NOTHING = Parity(0, 0, 0.0, 0.0, 0, ())


def compare(
    name: str, model: Boxes, file: Boxes, *, score_threshold: float, iou_threshold: float, slots: int
) -> Parity:
    """Compares what the model and the file found in the picture `name`. slots: K, the most that either reports."""
    pairs = _pairs(model, file)
    left = [np.setdiff1d(np.arange(len(side.scores)), pairs[:, k]) for k, side in enumerate((model, file))]
    box_px = np.abs(model.boxes[pairs[:, 0]] - file.boxes[pairs[:, 1]]).max(initial=0.0)
    score = np.abs(model.scores[pairs[:, 0]] - file.scores[pairs[:, 1]]).max(initial=0.0)
    alone = sorted(
        [(-float(side.scores[n]), k, int(n)) for k, side in enumerate((model, file)) for n in left[k]]
    )  # the best first: what a box did to others depends on whether it is explained itself
    sides, explained, unexplained = (model, file), (set[int](), set[int]()), []
    for _, k, n in alone:
        mine, other = sides[k], sides[1 - k]
        of_class = other.labels == mine.labels[n]
        rivals = np.flatnonzero(of_class & (other.scores >= mine.scores[n] - EDGE))
        overlap = _iou(mine.boxes[n], other.boxes[rivals])
        at_limit = np.abs(overlap - iou_threshold) <= EDGE
        tied = np.abs(other.scores[rivals] - mine.scores[n]) <= EDGE
        excused = np.isin(rivals, list(explained[1 - k]))
        suppressed = (overlap > iou_threshold - EDGE) & (at_limit | tied | excused)
        cut_off = len(other.scores) >= slots and mine.scores[n] <= other.scores.min() + EDGE
        if abs(mine.scores[n] - score_threshold) <= EDGE or cut_off or suppressed.any():
            explained[k].add(n)
        else:
            who = ("the model", "the file")[k]
            corners = ", ".join(f"{x:.1f}" for x in mine.boxes[n])
            unexplained.append(f"{name}: only {who} found class {mine.labels[n]} at ({corners}), {mine.scores[n]:.4f}")
    at_edge = len(explained[0]) + len(explained[1])
    return Parity(1, len(pairs), float(box_px), float(score), at_edge, tuple(unexplained))


def _pairs(model: Boxes, file: Boxes) -> NDArray[np.int64]:
    """[P, 2]: the same boxes of the two, nearest first, each once."""
    apart = np.abs(model.boxes[:, None] - file.boxes[None]).max(axis=2, initial=0.0)
    scores = np.abs(model.scores[:, None] - file.scores[None])
    same = (model.labels[:, None] == file.labels[None]) & (apart <= SAME_PX) & (scores <= SAME_SCORE)
    rows, columns = np.nonzero(same)
    nearest = np.argsort(apart[rows, columns] / BOX_PX + scores[rows, columns] / SCORE, kind="stable")
    free = np.ones(len(model.scores), bool), np.ones(len(file.scores), bool)
    pairs = []
    for row, column in zip(rows[nearest].tolist(), columns[nearest].tolist(), strict=True):
        if free[0][row] and free[1][column]:
            free[0][row] = free[1][column] = False
            pairs.append((row, column))
    return np.array(pairs, np.int64).reshape(-1, 2)


def _iou(box: NDArray[np.float32], boxes: NDArray[np.float32]) -> NDArray[np.float64]:
    one, many = box.astype(np.float64), boxes.astype(np.float64)
    sides = np.minimum(one[2:], many[:, 2:]) - np.maximum(one[:2], many[:, :2])
    shared = sides.clip(min=0).prod(axis=1)
    union = (one[2:] - one[:2]).prod() + (many[:, 2:] - many[:, :2]).prod(axis=1) - shared
    overlap: NDArray[np.float64] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return overlap


def measure(
    model: "models.Detector",
    file: OnnxModel,
    images: NDArray[np.uint8],
    content: NDArray[np.int32],
    names: Sequence[str],
    *,
    score_threshold: float,
    iou_threshold: float,
    slots: int,
) -> tuple[Parity, float]:
    """Runs both on P pictures, the file one by one and in batches, and compares. Second: seconds a picture of the file.

    Counts of boxes are those of one by one; differences are the largest of both ways.

    images: [P, 3, H, W]; content: [P, 2]; names: of the pictures. The model runs in fp32 on the CPU.
    """
    thresholds = {"score_threshold": score_threshold, "iou_threshold": iou_threshold}
    total, took_s = NOTHING, []
    file.run(images[:1], content[:1], **thresholds)  # the first run allocates
    for start in range(0, len(images), BATCH):
        rows = range(start, min(start + BATCH, len(images)))
        many = file.run(images[rows.start : rows.stop], content[rows.start : rows.stop], **thresholds)
        for k, row in enumerate(rows):
            of_model = _of_model(model, images[row], content[row], slots=slots, **thresholds)
            started = time.perf_counter()
            single = file.run(images[row : row + 1], content[row : row + 1], **thresholds)
            took_s.append(time.perf_counter() - started)
            for answer, at in ((single, 0), (many, k)):
                count = int(answer.count[at])
                of_file = Boxes(answer.boxes[at, :count], answer.scores[at, :count], answer.labels[at, :count])
                found = compare(names[row], of_model, of_file, slots=slots, **thresholds)
                if answer is many:  # counted already
                    found = found._replace(pictures=0, boxes=0, at_edge=0)
                total = total.plus(found)
    return total, float(np.median(took_s))


def _of_model(
    model: "models.Detector",
    image: NDArray[np.uint8],
    content: NDArray[np.int32],
    *,
    score_threshold: float,
    iou_threshold: float,
    slots: int,
) -> Boxes:
    inside = torch.from_numpy(content[None])
    with torch.no_grad():
        found = model.decode(
            model(torch.from_numpy(image[None])), inside, torch.ones(1, 2), inside,
            score_threshold=score_threshold, iou_threshold=iou_threshold, detections=slots,
        )  # fmt: skip
    valid = found.valid[0]
    return Boxes(found.boxes[0][valid].numpy(), found.scores[0][valid].numpy(), found.labels[0][valid].numpy())


def require(parity: Parity, place: object) -> None:
    """Raises ParityError with the largest differences when the file is not as good as the model."""
    if parity.holds:
        return
    more = len(parity.unexplained) - 3
    raise ParityError(
        "The exported file does not find what the model finds; it is not kept.",
        place=place,
        cause="\n          ".join([
            f"largest differences on {parity.pictures} pictures: {parity.box_px:.3g} px (at most {BOX_PX} allowed), "
            f"{parity.score:.3g} of a score (at most {SCORE:g} allowed); "
            f"{len(parity.unexplained)} boxes that only one of the two finds",
            *parity.unexplained[:3],
            *([f"and {more} more"] if more > 0 else []),
        ]),
        fix="another --opset or version of onnxruntime; the model itself is untouched",
    )  # fmt: skip
