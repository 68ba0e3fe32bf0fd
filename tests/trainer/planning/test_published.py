"""Predicted steps against training speeds that others published: the order of magnitude, on GPUs that were never here.

`python -m tests.trainer.planning.test_published` prints the table of docs/plan.md. The published runs are other
programs with older software, some of them limited by their loaders: they say what a GPU did at least.
"""

import dataclasses
import tempfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from stoker.config.settings import from_fields
from stoker.data.index import open_index
from stoker.planning.machines import GPUS
from stoker.planning.predict import StepPrediction, predict_steps

D2 = "detectron2 model zoo, 8 V100, 16 images per step, short side 640 to 800"
TV = "torchvision 0.3 release notes, 8 V100, 2 images each, short side 800"
ODTK = "NVIDIA ODTK README, DGX-1V, 90,000 steps of 16 images, short side 640 to 1024, with evaluations"
NV = "NVIDIA DeepLearningExamples, PyTorch/Detection/SSD, 22.10"


@dataclasses.dataclass(frozen=True)
class Published:
    """A speed: img_per_s of one GPU. size: height, width of the mean input."""

    model: str
    accelerator: str
    precision: str
    size: tuple[int, int]
    batch_size: int
    img_per_s: float
    source: str
    classes: int = 80
    same_model: bool = True
    at_least: bool = False
    """The whole training, with evaluations and a loader that limited it: what the GPU did at least."""


PUBLISHED = [
    Published("retinanet_resnet50_fpn", "v100-16", "fp32", (736, 992), 2, 2 / 0.200, f"{D2}: 0.200 s"),
    Published("retinanet_resnet101_fpn", "v100-16", "fp32", (736, 992), 2, 2 / 0.280, f"{D2}: 0.280 s"),
    Published("faster_rcnn_resnet50_fpn", "v100-16", "fp32", (736, 992), 2, 2 / 0.209, f"{D2}: 0.209 s"),
    Published("faster_rcnn_resnet50_fpn", "v100-16", "fp32", (800, 1088), 2, 2 / 0.2288, f"{TV}: 0.2288 s"),
    Published("retinanet_resnet50_fpn", "v100-16", "fp16", (832, 1120), 2, 50 / 7, f"{ODTK}: 7 h", at_least=True),
    Published("retinanet_resnet101_fpn", "v100-16", "fp16", (832, 1120), 2, 50 / 10, f"{ODTK}: 10 h",
              at_least=True),
    Published("retinanet_resnext50_32x4d_fpn", "h100", "fp16", (800, 800), 32, 4 * 1_170_301 / (37.009 * 60) / 8,
              "MLPerf training 3.0-2064, DGX H100: 37.0 min; 4 epochs, its reference convergence at 256 images", 264),
    Published("ssd300_vgg16", "a100-80", "fp16", (300, 300), 128, 724.41, f"{NV}: A100, its backbone is a ResNet-50",
              same_model=False),
    Published("ssd300_vgg16", "a100-80", "fp32", (300, 300), 128, 377.18, f"{NV}: A100, TF32", same_model=False),
    Published("ssd300_vgg16", "v100-16", "fp16", (300, 300), 64, 322.81, f"{NV}: V100", same_model=False),
    Published("ssd300_vgg16", "v100-16", "fp32", (300, 300), 32, 107.22, f"{NV}: V100, FP32", same_model=False),
]  # fmt: skip
MAX_FACTOR = 4.0
"""By which a prediction may be off: the order of magnitude."""


def write_data(folder: Path, classes: int) -> Path:
    """Four images with seven boxes each, as COCO has on average."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for n in range(2):
            for kind in ("images", "labels"):
                (folder / kind / split).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / "images" / split / f"{n}.jpg"), np.zeros((480, 640, 3), np.uint8))
            rows = [
                f"{label} 0.5 0.5 {size:.2f} {size:.2f}"
                for label, size in zip(rng.integers(0, classes, 7), rng.uniform(0.1, 0.9, 7), strict=True)
            ]
            (folder / "labels" / split / f"{n}.txt").write_text("\n".join(rows) + "\n")
    names = ", ".join(f"c{k}" for k in range(classes))
    (folder / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames: [{names}]\n")
    return folder


def predict(case: Published, folder: Path) -> StepPrediction:
    config = from_fields(
        {"data": write_data(folder, case.classes), "model": case.model, "image_size": case.size, "weights": "imagenet",
         "precision": case.precision, "max_bad_fraction": 1.0}
    )  # fmt: skip
    (prediction,) = predict_steps(config, open_index(folder), [GPUS[case.accelerator]], batch_size=case.batch_size)
    return prediction


@pytest.mark.slow
@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case.model}-{case.accelerator}-{case.source[:12]}")
def test_order_of_magnitude(case: Published, tmp_path: Path) -> None:
    prediction = predict(case, tmp_path)
    assert prediction.fits
    predicted = prediction.batch_size / prediction.step_s
    assert predicted / case.img_per_s > 1 / MAX_FACTOR
    assert case.at_least or predicted / case.img_per_s < MAX_FACTOR


def main() -> None:
    print("| model, input, batch | GPU, precision | published img/s | predicted | factor | in its band | source |")
    print("|---|---|---|---|---|---|---|")
    for case in PUBLISHED:
        with tempfile.TemporaryDirectory() as folder:
            found = predict(case, Path(folder))
        predicted, width = found.batch_size / found.step_s, 1 + found.step_error
        height, size_width = case.size
        inside = "yes" if predicted / width <= case.img_per_s <= predicted * width else "no"
        published = f"{'at least ' if case.at_least else ''}{case.img_per_s:.3g}"
        model = case.model + ("" if case.same_model else " (for SSD300 with ResNet-50)")
        print(
            f"| {model}, {size_width}×{height}, {case.batch_size} | {case.accelerator}, {case.precision} "
            f"| {published} | {predicted:.3g} ({predicted / width:.3g}–{predicted * width:.3g}) "
            f"| {predicted / case.img_per_s:.2f} | {inside} | {case.source} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
