"""RF-DETR against transformers in float64: predictions, each term of the losses, gradients; names of weights; what a
step needs. The oracle has the published sizes, with a small grid of positions where that saves time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RfDetrConfig, RfDetrForObjectDetection
from transformers.loss.loss_lw_detr import LwDetrHungarianMatcher, LwDetrImageLoss

from stoker.export import graph, parity
from stoker.inference.runtime import OnnxModel
from stoker.models import MODELS, build
from stoker.models.detr_weights import convert_rf_detr
from stoker.models.rf_detr import RFDETR
from stoker.models.weights import model_file
from tests.host_sync import ForbidHostSync
from tests.trainer.models.samples import make_batch, settings_of

CLASSES, QUERIES, SIDE = 5, 12, 96
SIDES = {"rf_detr_n": (384, 2), "rf_detr_s": (512, 3), "rf_detr_m": (576, 4), "rf_detr_l": (704, 4)}
"""Image size and layers of the decoder; from the paper's code."""
SIZES = [name if name == "rf_detr_n" else pytest.param(name, marks=pytest.mark.slow) for name in SIDES]


def make_oracle(name: str, classes: int, queries: int, *, side: int) -> Any:
    """The model with random weights, far from the timid ones that training starts with."""
    torch.manual_seed(0)
    backbone = {
        "model_type": "rf_detr_dinov2", "hidden_size": 384, "num_attention_heads": 6, "patch_size": 16,
        "num_windows": 2, "image_size": side, "out_features": ["stage3", "stage6", "stage9", "stage12"],
    }  # fmt: skip
    config = RfDetrConfig(
        backbone_config=backbone, decoder_layers=SIDES[name][1], decoder_n_points=2, num_queries=queries,
        num_labels=classes, dropout=0.0, attn_implementation="eager",
    )  # fmt: skip
    model = RfDetrForObjectDetection(config)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if tensor.dim() > 1 and "embeddings" not in key:
                tensor.normal_(std=0.7 * tensor[0].numel() ** -0.5)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_pair(name: str) -> tuple[Any, RFDETR]:
    oracle = make_oracle(name, CLASSES, QUERIES, side=SIDE).double()
    network = {**MODELS[name].network, "positions": SIDE // 16}
    model = RFDETR(settings_of(name, queries=QUERIES), CLASSES, **network).double()
    model.load_state_dict(convert_rf_detr(oracle.state_dict(), model))
    return oracle, model


def pixels_of(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in
                 ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))  # fmt: skip
    return (images.double() / 255 - mean) / std


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("side", [SIDE, 160])
def test_predictions_equal_those_of_transformers(name: str, side: int) -> None:
    """At the size of the learned positions, and at another one."""
    oracle, model = make_pair(name)
    images = make_batch((0, 0), (side, side), CLASSES).images
    with torch.no_grad():
        expected, found = oracle.eval()(pixels_of(images)), model.eval()(images)
    assert expected.logits.std() > 0.05
    torch.testing.assert_close(found.logits[0], expected.logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.boxes[0], expected.pred_boxes, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", SIZES)
def test_losses_and_gradients_equal_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, model = make_pair(name)
    oracle.train(), model.train()
    batch = make_batch((3, 0, 7), (SIDE, SIDE), CLASSES)
    labels = []
    for boxes, classes, valid in zip(batch.boxes.double(), batch.labels, batch.valid, strict=True):
        x1, y1, x2, y2 = (boxes[valid] / SIDE).unbind(1)
        centers = torch.stack(((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1), 1)
        labels.append({"boxes": centers, "class_labels": classes[valid]})
    total: list[LwDetrImageLoss] = []
    matchings: list[Any] = []
    matcher = LwDetrHungarianMatcher.forward

    def record(self: Any, outputs: Any, targets: Any, group_detr: int) -> Any:
        matchings.append(matcher(self, outputs, targets, group_detr))
        return matchings[-1]

    monkeypatch.setattr(LwDetrHungarianMatcher, "forward", record)
    out = oracle(pixels_of(batch.images), labels=labels)
    del total
    outputs = model(batch.images)
    terms = model.loss_terms(outputs, batch)
    layers = SIDES[name][1]
    suffixes = [*(f"_{n}" for n in range(layers - 1)), "", "_enc"]
    for ours, theirs in {"class": "loss_ce", "bbox": "loss_bbox", "giou": "loss_giou"}.items():
        expected = torch.stack([out.loss_dict[theirs + suffix] for suffix in suffixes])
        torch.testing.assert_close(terms[ours], expected, rtol=1e-5, atol=1e-6)
    assert len(matchings) == layers + 1
    sum(model.loss(outputs, batch).values()).backward()  # type: ignore[union-attr]
    # transformers' sum has no name for some of the layers: summed here.
    weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    sum(weights[key] * out.loss_dict[key + suffix] for key in weights for suffix in suffixes).backward()
    expected_grads = convert_rf_detr(
        {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in oracle.named_parameters()}, model
    )
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        scale = expected_grads[key].abs().max().clamp(min=1e-3)
        assert (parameter.grad - expected_grads[key]).abs().max() <= 1e-4 * scale, key


@pytest.mark.parametrize("name", SIZES)
def test_all_published_tensors_have_a_place(name: str) -> None:
    """In the real shapes, with 91 classes, with and without the prefix of a whole model."""
    side = SIDES[name][0]
    with torch.device("meta"):
        oracle = make_oracle(name, 91, 300, side=side)
        model = build(settings_of(name), 91)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    published = oracle.state_dict()
    for prefix in ("model.", ""):
        found = convert_rf_detr({key.replace("model.", prefix, 1): value for key, value in published.items()}, model)
        assert {key: tensor.shape for key, tensor in found.items()} == shapes
    assert len(published) == len(shapes) + 1  # the token of masked patches
    assert MODELS[name].default_image_size == side


def test_fewer_queries_take_the_first_of_each_group() -> None:
    oracle = make_oracle("rf_detr_n", 3, 12, side=96)
    model = RFDETR(settings_of("rf_detr_n", queries=5), 3, num_layers=2, positions=6)
    found = convert_rf_detr(oracle.state_dict(), model)["query_feat.weight"]
    table = oracle.model.query_feat.weight.detach()
    assert torch.equal(found, torch.cat([table[group * 12 : group * 12 + 5] for group in range(13)]))


def small(queries: int = 20, classes: int = CLASSES) -> RFDETR:
    torch.manual_seed(0)
    return RFDETR(settings_of("rf_detr_n", queries=queries), classes, num_layers=2, positions=6)


def test_windows_of_an_image_that_is_not_square_are_windows() -> None:
    """A layer within windows does not carry what is at the right edge to the left one."""
    model = small().eval()
    images = make_batch((0,), (64, 160), CLASSES).images
    with torch.no_grad():
        changed = images.clone()
        changed[..., 80:] = 255 - changed[..., 80:]
        first, second = (model.backbone(model.normalize(x))[0] for x in (images, changed))
    assert torch.equal(first[..., :5], second[..., :5])
    assert not torch.isclose(first[..., 5:], second[..., 5:]).all()


@pytest.mark.slow
def test_a_step_is_one_graph_without_waits() -> None:
    model, batch = small().train(), make_batch((3, 0, 12), (96, 128), CLASSES)
    torch._dynamo.reset()
    step = torch.compile(lambda batch: model.loss(model(batch.images), batch), fullgraph=True, backend="eager")
    with ForbidHostSync():
        expected = model.loss(model(batch.images), batch)
        torch.stack(list(expected.values())).sum().backward()
    found = step(batch)
    for name, term in found.items():
        torch.testing.assert_close(term, expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_losses_stay_finite_at_the_limits_of_16_bits(dtype: torch.dtype, scale: float) -> None:
    """Heads that predict the largest numbers of a dtype; boxes of no size, of half a pixel, of the whole image."""
    model, batch = small().train(), make_batch((3, 0, 16), (96, 96), CLASSES)
    batch.boxes[0, batch.valid[0].nonzero()[0]] = torch.tensor([10.0, 10.0, 10.0, 10.0])
    batch.boxes[2, :2] = torch.tensor([[5.0, 5.0, 5.5, 5.5], [0.0, 0.0, 96.0, 96.0]])
    limit = torch.finfo(dtype).max
    with torch.no_grad():
        for head in (model.class_embed, *model.enc_out_class_embed):
            head.weight.normal_(std=min(scale, limit))
        for mlp in (model.bbox_embed, *model.enc_out_bbox_embed):
            mlp.layers[-1].weight.normal_(std=min(scale, limit))
    with torch.autocast("cpu", dtype):
        terms = model.loss(model(batch.images), batch)
    assert all(term.isfinite() for term in terms.values()), terms
    sum(terms.values()).backward()  # type: ignore[union-attr]
    if scale == 1.0:  # larger ones overflow fp16 on the way back through the backbone
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_500_boxes_and_400_queries() -> None:
    """More boxes than queries: each query gets one. More than 300 detections of an image."""
    model = small(queries=400, classes=2)
    batch = make_batch((500, 3), (352, 352), 2, slots=500)
    terms = model.train().loss(model(batch.images), batch)
    assert all(term.isfinite() for term in terms.values())
    outputs = model.eval()(batch.images)
    options = {"score_threshold": 0.0, "max_detections": 400}
    found = model.decode(outputs, batch.resized_size, batch.scale, batch.original_size, **options)
    assert found.valid.sum(1).min() > 300


@pytest.mark.slow
def test_it_learns() -> None:
    model, batch = small(classes=3).train(), make_batch((3, 0, 5, 1), (96, 96), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    history = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = sum(model.loss(model(batch.images), batch).values())
        loss.backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.92 * history[0], history


@pytest.mark.slow
def test_the_onnx_file_finds_what_the_model_finds(tmp_path: Path) -> None:
    model, canvas = small().eval(), (96, 96)
    with torch.no_grad():
        for head in (model.class_embed, model.enc_out_class_embed[0]):
            head.weight.normal_(std=0.3)
        model.bbox_embed.layers[-1].weight.normal_(std=0.02)
    names = tuple(str(label) for label in range(CLASSES))
    metadata = model_file.ModelMetadata(
        settings=model.settings, class_names=names, image_size=canvas, resize="letterbox"
    )
    thresholds = {"score_threshold": 0.01, "iou_threshold": model.iou_threshold}
    path = tmp_path / "some.onnx"
    path.write_bytes(graph.build_onnx(graph.Spec(model, metadata, **thresholds)))
    file = OnnxModel(path, num_threads=1)
    images = make_batch((0, 0, 0), canvas, CLASSES, seed=3).images.numpy()
    inside = np.array([canvas, (50, 60), canvas], np.int32)
    found, _ = parity.compare_outputs(model, file, images, inside, ["a", "b", "c"], max_detections=100, **thresholds)
    parity.require_parity(found, "it")
    assert found.num_boxes > 20
    assert b"NonMaxSuppression" not in path.read_bytes()
