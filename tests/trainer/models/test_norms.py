"""Norms: which kind stands where, what they do with a single value, and constants that follow their module."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from stoker.models import build
from stoker.models.layers.norms import FrozenBatchNorm2d, SafeBatchNorm2d, SafeSyncBatchNorm
from tests.trainer.models.samples import make_batch, settings_of

WITH_NORMS = ("retinanet_tiny_fpn", "retinanet_mobilenet_v2_fpnlite", "ssdlite320_mobilenet_v3_large")
"""Models that have norms outside the backbone, too."""


@pytest.mark.parametrize("name", WITH_NORMS)
def test_the_setting_is_the_kind_of_all_norms_but_that_none_is_frozen_outside_the_backbone(name: str) -> None:
    for setting, of_backbone, elsewhere in (
        ("frozen_bn", FrozenBatchNorm2d, SafeBatchNorm2d),
        ("bn", SafeBatchNorm2d, SafeBatchNorm2d),
        ("sync_bn", SafeSyncBatchNorm, SafeSyncBatchNorm),
    ):
        model = build(settings_of(name, backbone_norm=setting), 2)
        norms = {
            n: type(m)
            for n, m in model.named_modules()
            if isinstance(m, (nn.modules.batchnorm._BatchNorm, FrozenBatchNorm2d))
        }
        inside = {n: kind for n, kind in norms.items() if n.startswith(("backbone.body.", "backbone.features."))}
        assert set(inside.values()) == {of_backbone}
        assert {kind for n, kind in norms.items() if n not in inside} == {elsewhere}


@pytest.mark.parametrize("name", ["retinanet_tiny_fpn", "retinanet_mobilenet_v2_fpnlite"])
def test_one_image_whose_coarsest_map_is_one_place_can_be_trained_on(name: str) -> None:
    """torch's BatchNorm raises ValueError there; SSDlite's test is in test_ssd.py."""
    model = build(settings_of(name), 2).train()
    batch = make_batch((3,), (32, 32), 2)
    sum(model.loss(model(batch.images), batch).values(), torch.zeros(())).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def some_frozen() -> FrozenBatchNorm2d:
    norm, draw = FrozenBatchNorm2d(5), torch.Generator().manual_seed(3)
    norm.load_state_dict({name: torch.rand(5, generator=draw) + 0.1 for name in norm.state_dict()})
    return norm


def exact(norm: FrozenBatchNorm2d, x: torch.Tensor) -> torch.Tensor:
    mean, var, weight, bias = norm.running_mean, norm.running_var, norm.weight, norm.bias
    return functional.batch_norm(x, mean, var, weight, bias, training=False, eps=norm.eps)


def test_a_frozen_norm_in_another_type_is_as_exact_as_the_type() -> None:
    norm, x = some_frozen().double(), torch.randn(2, 5, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(norm(x), exact(norm, x), rtol=1e-14, atol=1e-14)


def test_a_copy_of_a_folded_backbone_has_constants_of_its_own() -> None:
    """As the averaged model is a copy of the trained one, and gets its weights from a checkpoint."""
    model = build(settings_of("retinanet_tiny_fpn", backbone_norm="frozen_bn"), 2).eval()
    twin = copy.deepcopy(model)
    images = make_batch((0,), (32, 32), 2).images
    with torch.no_grad():
        before = model(images).logits
        twin.load_state_dict(
            {
                name: tensor * 1.5 if name.startswith("backbone.body.stem.1.weight") else tensor
                for name, tensor in model.state_dict().items()
            }
        )
        assert torch.equal(model(images).logits, before)
        assert not torch.equal(twin(images).logits, before)
