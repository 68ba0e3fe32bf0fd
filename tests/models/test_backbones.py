"""Backbones and their maps: what is frozen is computed image by image on a CPU, with the same numbers."""

from typing import Any

import pytest
import torch
from torch import nn

from stoker.models import Detector, build
from tests.models.samples import make_batch, settings_of

CANVAS, CLASSES = (64, 96), 3
ON_BODIES = ["ember_mobilenet_v2", "retinanet_mobilenet_v2_fpn", "retinanet_resnet18_fpn", "faster_rcnn_resnet50_fpn"]


def sizes_of_calls(model: Detector, name: str) -> list[int]:
    """Fills, in later forward passes, with the number of images of each call of a child of the backbone."""
    seen: list[int] = []

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(len(inputs[0]))

    model.get_submodule(f"backbone.body.{name}").register_forward_pre_hook(note)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_BODIES)
def test_frozen_children_take_one_image_at_a_time_and_nothing_else_changes(name: str) -> None:
    torch.manual_seed(0)
    model = build(settings_of(name, backbone_norm="frozen_bn", trainable_backbone_layers=3), CLASSES).double().train()
    backbone = model.backbone.body  # type: ignore[union-attr]
    names = [child for child, _ in backbone.named_children()]  # type: ignore[union-attr]
    calls = sizes_of_calls(model, names[0]), sizes_of_calls(model, names[-1])
    pixels = model.normalize(make_batch((2, 1, 1), CANVAS, CLASSES).images).double()
    apart = backbone(pixels)  # type: ignore[operator]
    assert calls == ([1, 1, 1], [3])
    seen = pixels.clone().requires_grad_()  # what has a gradient is taken whole
    whole = backbone(seen)  # type: ignore[operator]
    assert calls == ([1, 1, 1, 3], [3, 3])
    assert list(apart) == list(whole)
    for child, map_ in apart.items():
        torch.testing.assert_close(map_, whole[child], rtol=1e-12, atol=1e-12)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours, theirs = (
        torch.autograd.grad(sum(map_.square().sum() for map_ in maps.values()), parameters, allow_unused=True)
        for maps in (apart, whole)
    )
    assert any(grad is not None for grad in ours)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("norm", "stages", "train"), [("bn", 3, True), ("frozen_bn", 5, True), ("frozen_bn", 3, False)]
)
def test_what_learns_or_takes_statistics_of_the_batch_sees_all_of_it(norm: str, stages: int, train: bool) -> None:
    model = build(
        settings_of("ember_mobilenet_v2", backbone_norm=norm, trainable_backbone_layers=stages), CLASSES
    ).train(train)
    calls = sizes_of_calls(model, "0")
    model(make_batch((1, 1, 1), CANVAS, CLASSES).images)
    assert calls == [3]
