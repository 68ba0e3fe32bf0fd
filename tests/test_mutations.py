"""Changes constants of losses, matching, decoding and metrics in a copy of the package; a default test must fail.

So these tests do not take the constants from the code that they check.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    file: str
    """In one of the packages."""
    old: str
    new: str
    test: str
    """In `tests/trainer/`; a test of the default suite."""


MUTATIONS = {
    "focal alpha": Mutation(
        "knowledge/models.toml", 'focal_alpha = { value = 0.25, reason = "Ret',
        'focal_alpha = { value = 0.5, reason = "Ret',
        "models/test_retinanets.py::test_numbers_are_those_of_torchvision[retinanet_tiny_fpn]",
    ),
    "focal loss of negatives": Mutation(
        "models/layers/losses.py", "neg_derivative.mul_(1 - alpha)", "neg_derivative.mul_(alpha)",
        "models/test_losses.py::test_focal_loss_and_gradient_are_those_of_torchvision",
    ),
    "assigner alpha": Mutation(
        "models/ember.py", "ALPHA, BETA = 1.0, 6.0", "ALPHA, BETA = 0.5, 6.0",
        "models/test_aligned.py::test_it_is_what_the_paper_says",
    ),
    "assigner beta": Mutation(
        "models/ember.py", "ALPHA, BETA = 1.0, 6.0", "ALPHA, BETA = 1.0, 5.0",
        "models/test_aligned.py::test_it_is_what_the_paper_says",
    ),
    "assigner top k": Mutation(
        "models/ember.py", "TAL_TOPK = 10", "TAL_TOPK = 13",
        "models/test_ember.py::test_the_loss_is_that_of_the_points_with_boxes_taken_one_by_one",
    ),
    "IoU of a negative anchor": Mutation(
        "models/layers/matching.py", "best_iou < bg_iou_thresh", "best_iou < 0.9 * bg_iou_thresh",
        "models/test_matching.py::test_thresholds_are_exact",
    ),
    "FCOS center sampling": Mutation(
        "models/fcos.py", "CENTER_SAMPLING_RADIUS = 1.5", "CENTER_SAMPLING_RADIUS = 2.0",
        "models/test_fcos.py::test_positives_are_within_one_and_a_half_strides_of_the_center",
    ),
    "box encoding weights": Mutation(
        "models/layers/boxes.py", "(10.0, 10.0, 5.0, 5.0)", "(10.0, 10.0, 4.0, 4.0)",
        "models/test_ssd.py::test_losses_and_gradients_are_those_of_torchvision",
    ),
    "size clamp of decoded boxes": Mutation(
        "models/layers/boxes.py", "math.log(1000 / 16)", "math.log(500 / 16)",
        "models/test_boxes.py",
    ),
    "hard negatives": Mutation(
        "models/ssd.py", "neg_to_pos_ratio: int = 3", "neg_to_pos_ratio: int = 2",
        "models/test_ssd.py::test_losses_and_gradients_are_those_of_torchvision",
    ),
    "smooth L1 beta": Mutation(
        "models/faster_rcnn.py", "SMOOTH_L1_BETA = 1 / 9", "SMOOTH_L1_BETA = 1 / 8",
        "models/test_faster_rcnn.py::test_losses_and_gradients_are_those_of_torchvision",
    ),
    "NMS threshold": Mutation(
        "models/detector.py", "iou_threshold: float = 0.5", "iou_threshold: float = 0.6",
        "models/test_retinanets.py::test_thresholds_are_torchvisions_defaults",
    ),
    "detections per image": Mutation(
        "models/layers/postprocess.py", "MAX_DETECTIONS = 100", "MAX_DETECTIONS = 300",
        "models/test_retinanets.py::test_thresholds_are_torchvisions_defaults",
    ),
    "COCO areas": Mutation(
        "evaluation/coco.py", "(0, 32**2), (32**2, 96**2)", "(0, 24**2), (24**2, 96**2)",
        "evaluation/test_evaluate.py::test_boxes_of_few_sizes_at_few_places_score_as_pycocotools",
    ),
    "COCO recalls": Mutation(
        "runs/evaluation.py", "NUM_RECALL_POINTS = 101", "NUM_RECALL_POINTS = 11",
        "evaluation/test_evaluate.py::test_boxes_of_few_sizes_at_few_places_score_as_pycocotools",
    ),
    "COCO detections": Mutation(
        "evaluation/coco.py", "MAX_DETECTIONS = 100", "MAX_DETECTIONS = 50",
        "evaluation/test_evaluate.py::test_more_than_a_hundred_detections_in_an_image_score_as_pycocotools",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its tests."""
    root = tmp_path_factory.mktemp("mutated")
    for name in ("packages", "tests", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=list(MUTATIONS))
def test_a_default_test_fails(mutation: Mutation, package: Path) -> None:
    (path,) = package.glob(f"packages/*/*/{mutation.file}")
    text = path.read_text()
    assert text.count(mutation.old) == 1
    path.write_text(text.replace(mutation.old, mutation.new))
    options = ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/trainer/{mutation.test}"]
    try:
        done = subprocess.run(
            command,
            cwd=package,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        path.write_text(text)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "= FAILURES =" in done.stdout
