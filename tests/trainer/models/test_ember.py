"""Ember: its losses against a slow reading of the papers, its two ways to an answer, and what a step must be."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.optim import AdamW
from torchvision.ops import generalized_box_iou_loss

from stoker.export import graph, parity
from stoker.inference.runtime import OnnxModel
from stoker.models import Detector, build
from stoker.models.ember import (
    Ember,
    EmberOutputs,
    assign_task_aligned,
    boxes_to_ltrb,
    distribution_focal_loss,
)
from stoker.models.fcos import ltrb_to_boxes
from stoker.models.layers.losses import soft_binary_cross_entropy
from stoker.models.weights import model_file
from stoker_watch.errors import ConfigError
from tests.host_sync import ForbidHostSync
from tests.trainer.models.samples import make_batch, settings_of

# The constants of the paper and of LOG.md, "Ember"; not imported, so that a change in the module fails.
REG_MAX, TAL_TOPK, MIN_STRIDE = 16, 10, 8
CLASS_WEIGHT, BOX_WEIGHT, DFL_WEIGHT = 2.0, 2.5, 0.5

CLASSES, CANVAS = 5, (64, 96)
COUNTS = (3, 0, 9, 1)


def some_model(**changes: object) -> Ember:
    """With a start that is far from timid: scores and boxes differ from point to point."""
    torch.manual_seed(1)
    model = build(settings_of("ember_n", **changes), CLASSES).train()
    assert isinstance(model, Ember)
    with torch.no_grad():
        for heads in model.head.values():
            for head in heads.classes:
                head[-1].bias.fill_(-1.0)
                head[-1].weight.normal_(std=0.1)
            for head in heads.sides:
                head[-1].weight.normal_(std=0.2)
    return model


@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.1, 3.0, 12.0]), block=st.sampled_from([1, 88, None]))
@settings(max_examples=40, deadline=None)
def test_soft_cross_entropy_and_its_gradient_are_those_of_torch(seed: int, spread: float, block: int | None) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = (torch.randn(3, 11, 4, generator=draw, dtype=torch.float64) * spread).requires_grad_()
    label, quality = torch.randint(0, 4, (3, 11), generator=draw), torch.rand(3, 11, generator=draw).double()
    quality = torch.where(quality < 0.5, 0.0, quality)
    dense = functional.one_hot(label, 4) * quality[..., None]
    weight = torch.rand(3, generator=draw).double()
    expected = functional.binary_cross_entropy_with_logits(logits, dense, reduction="none").sum((1, 2))
    (wanted,) = torch.autograd.grad((expected * weight).sum(), logits)
    ours = soft_binary_cross_entropy(logits, label, quality, block=block)
    (grad,) = torch.autograd.grad((ours * weight).sum(), logits)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(grad, wanted)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_distribution_loss_is_that_of_the_paper(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    sides = torch.randn(6, 4 * REG_MAX, generator=draw, dtype=torch.float64)
    distances = torch.rand(6, 4, generator=draw, dtype=torch.float64) * (REG_MAX + 2) - 1
    for row, wanted, found in zip(
        sides, distances.tolist(), distribution_focal_loss(sides, distances).tolist(), strict=True
    ):
        costs = []
        for side, distance in zip(row.view(4, REG_MAX).softmax(-1).tolist(), wanted, strict=True):
            inside = min(max(distance, 0.0), REG_MAX - 1.01)
            i = math.floor(inside)
            costs.append(-((i + 1 - inside) * math.log(side[i]) + (inside - i) * math.log(side[i + 1])))
        assert found == pytest.approx(sum(costs) / 4, rel=1e-9)


def test_distances_are_the_inverse_of_decoding() -> None:
    centre, unit = torch.rand(7, 2) * 50, torch.tensor([8.0, 8, 8, 16, 16, 32, 32])
    distances = torch.rand(7, 4) * 15
    torch.testing.assert_close(boxes_to_ltrb(ltrb_to_boxes(distances, centre, unit), centre, unit), distances)


@pytest.mark.parametrize("nms_free", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_loss_is_that_of_the_points_with_boxes_taken_one_by_one(nms_free: bool) -> None:
    model = some_model(nms_free=nms_free).double()
    batch = make_batch(COUNTS, CANVAS, CLASSES)
    batch = batch._replace(boxes=batch.boxes.double())
    raw = model(batch.images)
    raw = raw._replace(points=raw.points._replace(center=raw.points.center.double(), stride=raw.points.stride.double()))
    losses = model.loss(raw, batch)
    for before, predicted, most in (("", raw.one_to_many, TAL_TOPK), ("one_", raw.one_to_one, 1)):
        if predicted is None:
            assert not any(name.startswith("one_") for name in losses)
            continue
        logits, sides = predicted
        centre, unit = raw.points.center, raw.points.stride
        bins = torch.arange(REG_MAX).double()
        boxes = ltrb_to_boxes((sides.unflatten(-1, (4, REG_MAX)).softmax(-1) * bins).sum(-1), centre, unit)
        with torch.no_grad():
            slot, quality = assign_task_aligned(
                logits, boxes, centre, batch.boxes, batch.labels, batch.valid, center_radius=MIN_STRIDE / 2, topk=most
            )
        total = max(1.0, quality.sum().item())
        dense, overlaps, spreads = torch.zeros_like(logits), logits.new_zeros(()), logits.new_zeros(())
        for b, a in (slot >= 0).nonzero().tolist():
            box = batch.boxes[b, slot[b, a]]
            dense[b, a, batch.labels[b, slot[b, a]]] = quality[b, a]
            overlaps = overlaps + generalized_box_iou_loss(boxes[b, a], box)
            spread = distribution_focal_loss(sides[b, a], boxes_to_ltrb(box, centre[a], unit[a]))
            spreads = spreads + spread
        classes = functional.binary_cross_entropy_with_logits(logits, dense, reduction="sum")
        expected = {
            "classification": CLASS_WEIGHT * classes / total,
            "bbox_regression": BOX_WEIGHT * overlaps / total,
            "bbox_distribution": DFL_WEIGHT * spreads / total,
        }
        parameters = [p for p in model.parameters() if p.requires_grad]
        for name, value in expected.items():
            torch.testing.assert_close(losses[before + name], value, rtol=1e-5, atol=1e-7)
            ours, theirs = (
                torch.autograd.grad(some, parameters, retain_graph=True, allow_unused=True)
                for some in (losses[before + name], value)
            )
            for one, other in zip(ours, theirs, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_a_batch_without_boxes_has_a_finite_loss_and_makes_no_host_sync() -> None:
    model = build(settings_of("ember_n", nms_free=True), CLASSES).train()
    batch = make_batch((0, 0), CANVAS, CLASSES)
    with ForbidHostSync():
        losses = model.loss(model(batch.images), batch)
        sum(losses.values()).backward()
    assert losses["classification"] > 0
    assert losses["bbox_regression"] == losses["bbox_distribution"] == 0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.slow
def test_its_loss_falls() -> None:
    torch.manual_seed(0)
    model = build(settings_of("ember_n"), 3).train()
    batch = make_batch((3, 1), CANVAS, 3)
    optimizer = AdamW(model.parameters(), lr=2e-3)
    history = []
    for _ in range(12):
        optimizer.zero_grad()
        with ForbidHostSync():
            loss = sum(model.loss(model(batch.images), batch).values(), torch.zeros(()))
            loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.8 * history[0]


@pytest.mark.slow
@pytest.mark.parametrize(("nms_free", "steps"), [(False, 60), (True, 240)])
def test_it_learns(nms_free: bool, steps: int) -> None:
    torch.manual_seed(0)
    model = build(settings_of("ember_n", nms_free=nms_free), 3).train()
    batch = make_batch((3, 0, 5, 1), CANVAS, 3)
    middle = (batch.boxes[..., :2] + batch.boxes[..., 2:]) / 2
    half = ((batch.boxes[..., 2:] - batch.boxes[..., :2]) / 2).clamp(min=6.0)  # noise has no objects of two pixels
    batch = batch._replace(boxes=torch.cat((middle - half, middle + half), -1))
    optimizer = AdamW(model.parameters(), lr=2e-3)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        with ForbidHostSync():
            loss = sum(model.loss(model(batch.images), batch).values(), torch.zeros(()))
            loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.5 * history[0]
    found = found_by(model.train(), batch, nms_free)
    boxes = batch.boxes[0][batch.valid[0]]
    reached = [max(overlap(one, other) for other in found.boxes[0].tolist()) for one in boxes.tolist()]
    assert sum(reached) / len(reached) > 0.6


def overlap(a: list[float], b: list[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def found_by(model: Detector, batch, nms_free: bool):
    """With the statistics of this batch: the running ones are not settled after a few steps."""
    with torch.no_grad():
        raw = model(batch.images)
        raw = raw if nms_free else EmberOutputs(raw.one_to_many, None, raw.points, raw.num_points_per_level)
        return model.decode(raw, batch.resized_size, batch.scale, batch.original_size, score_threshold=0.01)


def test_without_nms_it_makes_no_host_sync_and_gives_the_best_scores() -> None:
    model = some_model(nms_free=True).eval()
    batch = make_batch((0, 0), CANVAS, CLASSES)
    with torch.no_grad(), ForbidHostSync():
        raw = model(batch.images)
        found = model.decode(
            raw, batch.resized_size, batch.scale, batch.original_size, score_threshold=0.05, max_detections=7
        )
    assert raw.one_to_many is None, "what is not used is not computed"
    assert found.boxes.shape == (2, 7, 4)
    assert found.valid.all()
    expected = raw.one_to_one.logits.sigmoid().flatten(1).topk(7, dim=1).values
    torch.testing.assert_close(found.scores, expected)
    few = model.decode(raw, batch.resized_size, batch.scale, batch.original_size, score_threshold=0.9999)
    assert few.boxes.shape == (2, 100, 4)
    assert not few.valid.any()
    assert few.boxes.abs().sum() == few.scores.sum() == few.labels.sum() == 0


def test_the_second_heads_do_not_change_what_the_first_learn() -> None:
    batch = make_batch(COUNTS, CANVAS, CLASSES)
    model = some_model(nms_free=True)
    losses = model.loss(model(batch.images), batch)
    names = [name for name, _ in model.named_parameters()]
    alone = sum((value for name, value in losses.items() if name.startswith("one_")), torch.zeros(()))
    grads = torch.autograd.grad(alone, list(model.parameters()), allow_unused=True)
    learns = {name for name, grad in zip(names, grads, strict=True) if grad is not None}
    assert learns == {name for name in names if name.startswith("head.one.")}


def test_a_depthwise_neck_has_no_other_convolutions_of_3_by_3() -> None:
    model, plain = some_model(depthwise=True), some_model()
    for kind, dense in ((model, 0), (plain, 10)):  # two of each of four blocks and one before each halving
        convolutions = [part for part in kind.backbone.neck.modules() if isinstance(part, nn.Conv2d)]
        large = [part for part in convolutions if part.kernel_size == (3, 3) and part.groups == 1]
        assert len(large) == dense
    batch = make_batch(COUNTS, CANVAS, CLASSES)
    sum(model.loss(model(batch.images), batch).values(), torch.zeros(())).backward()
    assert all(weight.grad is not None for weight in model.backbone.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"nms_free": True}, {"depthwise": True}])
def test_the_onnx_file_finds_what_the_model_finds(tmp_path: Path, changes: dict[str, bool]) -> None:
    model = some_model(**changes).eval()
    names = tuple(str(label) for label in range(CLASSES))
    metadata = model_file.ModelMetadata(
        settings=model.settings, class_names=names, image_size=CANVAS, resize="letterbox"
    )
    thresholds = {"score_threshold": 0.25, "iou_threshold": model.iou_threshold}
    path = tmp_path / "some.onnx"
    path.write_bytes(graph.build_onnx(graph.Spec(model, metadata, **thresholds)))
    file = OnnxModel(path, num_threads=1)
    images = make_batch((0, 0, 0), CANVAS, CLASSES, seed=3).images.numpy()
    inside = np.array([CANVAS, (50, 60), CANVAS], np.int32)
    found, _ = parity.compare_outputs(model, file, images, inside, ["a", "b", "c"], max_detections=100, **thresholds)
    parity.require_parity(found, "it")
    assert found.num_boxes > 20
    if model.settings.nms_free:
        assert b"NonMaxSuppression" not in path.read_bytes()
        with pytest.raises(ConfigError, match="without NMS"):
            file.run(images, inside, score_threshold=0.25, iou_threshold=0.5)
