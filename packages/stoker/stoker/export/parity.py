"""Compares the detections of an exported file with those of the model, box by box, on the same images.

Programs that add the same numbers in another order differ in the last digits. Where these decide (a score at the
threshold, an IoU at the NMS threshold, two equal scores), one program has a box that the other does not have. Such
boxes are counted as ties; any other difference is a ParityError.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import models
from stoker.inference.runtime import ExportedModel
from stoker.models.layers.boxes import iou
from stoker.models.layers.postprocess import BatchDetections
from stoker_watch.errors import ParityError, make_error

MAX_BOX_DIFF_PX, MAX_SCORE_DIFF = 0.1, 1e-3
"""Largest allowed differences of a box's coordinates, in pixels of the model input, and of its score."""
TIE_TOLERANCE = 1e-4
"""Numbers that are this close to a threshold, or to each other, count as equal."""
MATCH_PX, MATCH_SCORE = 4.0, 0.05
"""Two boxes of a class within these differences count as the same box, whose difference is then measured."""
BATCH_SIZE = 8
"""Images of the larger batch; batches of one are compared as well."""


class ImageDetections(NamedTuple):
    """N detections in one image, as numbers of the host, best score first."""

    boxes: NDArray[np.float32]
    """[N, 4], xyxy in pixels of the model input."""
    scores: NDArray[np.float32]
    labels: NDArray[np.int64]


def of_image(found: BatchDetections, n: int) -> ImageDetections:
    valid = found.valid[n]
    return ImageDetections(*(column[n][valid].numpy() for column in found[:3]))


class Parity(NamedTuple):
    """The largest differences over some images."""

    num_images: int
    num_boxes: int
    """Boxes that both detect."""
    max_box_diff_px: float
    max_score_diff: float
    num_ties: int
    """Boxes that only one of the two detects because of a tie within TIE_TOLERANCE."""
    unexplained: tuple[str, ...]
    """Descriptions of the other boxes that only one of the two detects."""

    def merge(self, other: "Parity") -> "Parity":
        return Parity(
            self.num_images + other.num_images,
            self.num_boxes + other.num_boxes,
            max(self.max_box_diff_px, other.max_box_diff_px),
            max(self.max_score_diff, other.max_score_diff),
            self.num_ties + other.num_ties,
            self.unexplained + other.unexplained,
        )

    @property
    def passed(self) -> bool:
        return (
            not self.unexplained and self.max_box_diff_px <= MAX_BOX_DIFF_PX and self.max_score_diff <= MAX_SCORE_DIFF
        )


def compare_detections(
    name: str,
    model: ImageDetections,
    file: ImageDetections,
    *,
    score_threshold: float,
    iou_threshold: float,
    max_detections: int,
) -> Parity:
    """Compares the detections of model and file in the image `name`; max_detections: the limit of both."""
    pairs = _match_boxes(model, file)
    unpaired = [
        np.setdiff1d(np.arange(len(detections.scores)), pairs[:, k]) for k, detections in enumerate((model, file))
    ]
    box_diff_px = np.abs(model.boxes[pairs[:, 0]] - file.boxes[pairs[:, 1]]).max(initial=0.0)
    score_diff = np.abs(model.scores[pairs[:, 0]] - file.scores[pairs[:, 1]]).max(initial=0.0)
    model_and_file, explained, unexplained = (model, file), (set[int](), set[int]()), []
    # best first: a box explains others only if it is explained itself
    unpaired_ranked = sorted((-float(model_and_file[k].scores[n]), k, int(n)) for k in (0, 1) for n in unpaired[k])
    for _, k, n in unpaired_ranked:
        own, other = model_and_file[k], model_and_file[1 - k]
        of_class = other.labels == own.labels[n]
        rivals = np.flatnonzero(of_class & (other.scores >= own.scores[n] - TIE_TOLERANCE))
        overlap = iou(torch.from_numpy(own.boxes[n : n + 1]), torch.from_numpy(other.boxes[rivals]))[0].numpy()
        at_limit = np.abs(overlap - iou_threshold) <= TIE_TOLERANCE
        tied = np.abs(other.scores[rivals] - own.scores[n]) <= TIE_TOLERANCE
        is_explained = np.isin(rivals, list(explained[1 - k]))
        suppressed = (overlap > iou_threshold - TIE_TOLERANCE) & (at_limit | tied | is_explained)
        beyond_max = len(other.scores) >= max_detections and own.scores[n] <= other.scores.min() + TIE_TOLERANCE
        if abs(own.scores[n] - score_threshold) <= TIE_TOLERANCE or beyond_max or suppressed.any():
            explained[k].add(n)
        else:
            who = ("the model", "the file")[k]
            xyxy = ", ".join(f"{x:.1f}" for x in own.boxes[n])
            unexplained.append(f"{name}: only {who} found class {own.labels[n]} at ({xyxy}), {own.scores[n]:.4f}")
    num_ties = len(explained[0]) + len(explained[1])
    return Parity(1, len(pairs), float(box_diff_px), float(score_diff), num_ties, tuple(unexplained))


def _match_boxes(model: ImageDetections, file: ImageDetections) -> NDArray[np.int64]:
    """[P, 2]: indices of equal boxes, nearest first, each used once."""
    box_diff = np.abs(model.boxes[:, None] - file.boxes[None]).max(axis=2, initial=0.0)
    scores = np.abs(model.scores[:, None] - file.scores[None])
    same = (model.labels[:, None] == file.labels[None]) & (box_diff <= MATCH_PX) & (scores <= MATCH_SCORE)
    rows, columns = np.nonzero(same)
    nearest = np.argsort(
        box_diff[rows, columns] / MAX_BOX_DIFF_PX + scores[rows, columns] / MAX_SCORE_DIFF, kind="stable"
    )
    unmatched = np.ones(len(model.scores), bool), np.ones(len(file.scores), bool)
    pairs = []
    for row, column in zip(rows[nearest].tolist(), columns[nearest].tolist(), strict=True):
        if unmatched[0][row] and unmatched[1][column]:
            unmatched[0][row] = unmatched[1][column] = False
            pairs.append((row, column))
    return np.array(pairs, np.int64).reshape(-1, 2)


def compare_outputs(
    model: "models.Detector",
    exported: ExportedModel,
    images: NDArray[np.uint8],
    resized_size: NDArray[np.int32],
    names: Sequence[str],
    *,
    score_threshold: float,
    iou_threshold: float,
    max_detections: int,
) -> tuple[Parity, float]:
    """Runs both on P images, the file one by one and in batches: (comparison, seconds per image of the file).

    The counts of boxes are from single images; the differences are the largest of both.

    images: [P, 3, H, W]; resized_size: [P, 2]; names: of the images. The model runs in fp32 on the CPU.
    """
    thresholds = {"score_threshold": score_threshold, "iou_threshold": iou_threshold}
    limits: dict[str, Any] = {**thresholds, "max_detections": max_detections}
    total, durations_s = Parity(0, 0, 0.0, 0.0, 0, ()), []
    exported.run(images[:1], resized_size[:1], **thresholds)  # warm-up
    for start in range(0, len(images), BATCH_SIZE):
        stop = min(start + BATCH_SIZE, len(images))
        batched = exported.run(images[start:stop], resized_size[start:stop], **thresholds)
        for k, i in enumerate(range(start, stop)):
            model_detections = _run_model(model, images[i], resized_size[i], **limits)
            start_s = time.perf_counter()
            single = exported.run(images[i : i + 1], resized_size[i : i + 1], **thresholds)
            durations_s.append(time.perf_counter() - start_s)
            for output, position in ((single, 0), (batched, k)):
                result = compare_detections(names[i], model_detections, of_image(output, position), **limits)
                if output is batched:  # counted already
                    result = result._replace(num_images=0, num_boxes=0, num_ties=0)
                total = total.merge(result)
    return total, float(np.median(durations_s))


def _run_model(
    model: "models.Detector", image: NDArray[np.uint8], resized_size: NDArray[np.int32], **limits: Any
) -> ImageDetections:
    """limits: those of `Detector.decode`."""
    input_size = torch.from_numpy(resized_size[None])
    with torch.no_grad():
        outputs = model(torch.from_numpy(image[None]))
        return of_image(model.decode(outputs, input_size, torch.ones(1, 2), input_size, **limits), 0)


def require_parity(parity: Parity, location: object, exported_by: str = "ONNX") -> None:
    """Raises ParityError with the largest differences unless `parity.passed`."""
    if parity.passed:
        return
    causes = [
        f"largest differences on {parity.num_images} images: "
        f"{parity.max_box_diff_px:.3g} px (at most {MAX_BOX_DIFF_PX} allowed), "
        f"{parity.max_score_diff:.3g} of a score (at most {MAX_SCORE_DIFF:g} allowed); "
        f"{len(parity.unexplained)} boxes that only one of the two detects",
        *parity.unexplained[:3],
    ]
    cause = "\n          ".join(causes)
    raise make_error(ParityError, "detections-differ", location, cause=cause, program=exported_by)
