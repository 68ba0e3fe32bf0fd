"""ONNX files of D-FINE and DEIMv2: what they find, without NMS. RF-DETR's: `tests/trainer/models/test_rf_detr.py`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.export import graph, parity
from stoker.inference.runtime import OnnxModel
from stoker.models import build
from stoker.models.weights import model_file
from tests.trainer.models.samples import make_batch, settings_of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dfine_n", "deimv2_pico"])
def test_the_file_finds_what_the_model_finds(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    canvas, classes = (128, 96), tuple("abcde")
    model = build(settings_of(name), len(classes)).train()
    with torch.no_grad():
        model(make_batch((0, 0), canvas, len(classes)).images)  # the norms learn what the images are like
    for head in model.class_heads():
        torch.nn.init.normal_(model.get_submodule(head.name).weight, std=0.3)
    model.eval()
    metadata = model_file.ModelMetadata(
        settings=model.settings, class_names=classes, image_size=canvas, resize="letterbox"
    )
    thresholds = {"score_threshold": 0.01, "iou_threshold": model.iou_threshold}
    path = tmp_path / "some.onnx"
    path.write_bytes(graph.build_onnx(graph.Spec(model, metadata, **thresholds)))
    assert b"NonMaxSuppression" not in path.read_bytes()
    images = make_batch((0, 0, 0), canvas, len(classes), seed=3).images.numpy()
    inside = np.array([canvas, (50, 60), canvas], np.int32)
    file = OnnxModel(path, num_threads=1)
    found, _ = parity.compare_outputs(model, file, images, inside, ["a", "b", "c"], max_detections=100, **thresholds)
    parity.require_parity(found, "it")
    assert found.num_boxes > 20
