"""D-FINE and DEIMv2 against transformers in float64: predictions, each term of the losses, gradients; names of
weights. The oracle is `detr_oracle.py`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.config.settings import OptimSettings
from stoker.hardware.device import Device
from stoker.models import build
from stoker.models.detr_weights import convert_dfine
from stoker.models.dfine import LOSS_WEIGHTS, DFine
from stoker.models.layers.box_distribution import decode_sides
from stoker.models.layers.denoising import make_denoising_queries
from stoker.models.layers.set_criterion import make_truth
from stoker.training.optim import OptimizerStep
from tests.trainer.models.detr_oracle import CONFIGS, give_noise, labels_of, make_oracle, oracle_terms
from tests.trainer.models.samples import make_batch, settings_of

CLASSES, QUERIES, CANVAS = 5, 24, (96, 128)
DEFAULT = ("dfine_n", "deimv2_pico")
SIZES = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_pair(name: str, class_loss: str = "vfl") -> tuple[torch.nn.Module, DFine]:
    oracle = make_oracle(name, CLASSES, QUERIES)
    model = build(settings_of(name, queries=QUERIES, class_loss=class_loss), CLASSES).double()
    assert isinstance(model, DFine)
    tensors = convert_dfine(oracle.state_dict(), model)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all(key.endswith("num_batches_tracked") for key in missing)
    return oracle, model


@pytest.mark.parametrize("name", SIZES)
def test_predictions_equal_those_of_transformers(name: str) -> None:
    oracle, model = make_pair(name)
    images = make_batch((0, 0), CANVAS, CLASSES).images
    with torch.no_grad():
        expected, found = oracle.eval()(images.double() / 255), model.eval()(images).decoded
    assert expected.logits.std() > 0.05
    torch.testing.assert_close(found.logits[-1], expected.logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.boxes[-1], expected.pred_boxes, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_losses_and_gradients_equal_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = settings_of(name).class_loss
    check_losses(name, kind, monkeypatch)


@pytest.mark.slow
def test_dfine_with_the_loss_of_deim(monkeypatch: pytest.MonkeyPatch) -> None:
    check_losses("dfine_n", "mal", monkeypatch)


def check_losses(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, model = make_pair(name, kind)
    batch = make_batch((4, 4), CANVAS, CLASSES)
    batch = batch._replace(boxes=batch.boxes.double(), rand=batch.rand.double())
    outputs = model.train()(batch.images)
    truth = make_truth(batch.boxes, batch.labels, batch.valid, CANVAS, torch.float64)
    noisy = make_denoising_queries(truth, batch.rand, CLASSES)
    assert (noisy.group >= 0).all()
    give_noise(monkeypatch, noisy, batch)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # theirs has casts
    stable = torch.argsort
    monkeypatch.setattr(torch, "argsort", lambda x, **options: stable(x, stable=True, **options))
    out = oracle.train().model(batch.images.double() / 255, labels=labels_of(batch))
    expected = oracle_terms(oracle, out, labels_of(batch), kind, union=model.union)
    terms = model.loss_terms(outputs, batch)
    assert terms.keys() == {key for key in expected if model.local or not key.startswith(("fgl", "ddf"))}
    for key, term in terms.items():
        wanted = expected[key][: len(term)] / 1.0  # theirs has 0 for the last layer's distillation
        found = term * LOSS_WEIGHTS[key.removesuffix("_dn")]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    assert all(expected[key][len(term) :].abs().sum() < 1e-12 for key, term in terms.items())
    torch.cat([expected[key] for key in terms]).sum().backward()
    sum(model.loss(outputs, batch).values()).backward()
    gradients = {key: p.grad for key, p in oracle.named_parameters(remove_duplicate=False) if p.grad is not None}
    wanted_gradients = convert_dfine(gradients, model)
    own = {key: p.grad for key, p in model.named_parameters()}
    assert own.keys() - wanted_gradients.keys() == set()
    for key, gradient in own.items():
        scale = wanted_gradients[key].norm() + 1e-8  # biases before a norm have 0, but for rounding
        assert (gradient - wanted_gradients[key]).norm() < 1e-4 * scale, key


class CountOperators(TorchDispatchMode):
    """Of all operators, and of those that compute something: the others are views."""

    count = computing = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.computing += not (func.is_view or func is torch.ops.aten.detach.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "limit", "computing"),
    [
        ("deimv2_pico", 4000, 2400),
        pytest.param("dfine_l", 7000, 4000, marks=pytest.mark.slow),
        pytest.param("dfine_x", 7700, 4500, marks=pytest.mark.slow),
    ],
)
def test_a_step_issues_few_operators(name: str, limit: int, computing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.models.layers.pointwise.MIN_IMAGES", 0)  # its views are for one thread of a CPU
    torch.set_default_dtype(torch.float32)
    model, batch = build(settings_of(name), CLASSES).train(), make_batch((3, 0), CANVAS, CLASSES)
    with CountOperators() as counter:
        sum(model.loss(model(batch.images), batch).values()).backward()
    print(f"{name}: {counter.count} operators, {counter.computing} compute")
    assert counter.count <= limit
    assert counter.computing <= computing


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deimv2_pico", "dfine_n"])
def test_a_step_is_one_graph(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    model, batch = build(settings_of(name), CLASSES).train(), make_batch((3, 0), CANVAS, CLASSES)
    model(batch.images)
    compiled = torch.compile(lambda b: model.loss(model(b.images), b), backend="eager", fullgraph=True, dynamic=False)
    found, expected = compiled(batch), model.loss(model(batch.images), batch)
    for key, loss in expected.items():
        torch.testing.assert_close(found[key], loss, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_extreme_predictions_have_finite_losses_and_gradients(dtype: torch.dtype, scale: float) -> None:
    """Logits and sides at the limits of a half-precision type: boxes whose right side is left of their left one,
    boxes without any size, scores of exactly 0 and 1."""
    torch.set_default_dtype(torch.float32)
    model = build(settings_of("dfine_n", queries=QUERIES), CLASSES).train()
    assert isinstance(model, DFine)
    limit = min(torch.finfo(dtype).max * scale, torch.finfo(dtype).max) if scale >= 1 else torch.finfo(dtype).tiny
    batch = make_batch((5, 0), CANVAS, CLASSES)
    boxes = batch.boxes.clone()
    boxes[0, batch.valid[0].nonzero()[0]] = torch.tensor([10.0, 10.0, 10.0 + 1e-3, 10.0 + 1e-3])
    batch = batch._replace(boxes=boxes)
    outputs = model(batch.images)
    signs = torch.Generator().manual_seed(0)

    def extreme(tensor: Tensor) -> Tensor:
        some = torch.randint(-1, 2, tensor.shape, generator=signs).to(dtype) * limit
        return some.to(dtype).float().requires_grad_()

    leaves: list[Tensor] = []

    def decode(encoded: Any, noisy: Any) -> Any:
        real = type(model).decode_queries(model, encoded, noisy)
        sides, logits = extreme(real.side_logits), extreme(real.logits)
        reference = torch.rand(real.first_boxes.shape, generator=signs).to(dtype).float() * real.first_boxes.detach()
        decoded = decode_sides(sides, reference, model.decoder.distances)
        leaves.extend((sides, logits))
        return real._replace(side_logits=sides, logits=logits, boxes=decoded - 0.3, first_logits=logits[0],
                             first_boxes=reference)  # fmt: skip

    model.decode_queries = decode  # type: ignore[method-assign]
    losses = model.loss(outputs, batch)
    assert all(loss.isfinite() for loss in losses.values()), losses
    sum(losses.values()).backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_step_survives_overflows(dtype: torch.dtype) -> None:
    """Feed-forward layers whose products overflow fp16 give neither NaN nor infinite losses. Their gradients are finite
    in bf16 and not in fp16: the step is skipped there, with a smaller loss scale for the next one."""
    torch.set_default_dtype(torch.float32)
    model, batch = build(settings_of("deimv2_pico"), CLASSES).train(), make_batch((3, 0), CANVAS, CLASSES)
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.mlp.down_proj.weight.mul_(1e4)
    precision = "fp16" if dtype == torch.float16 else "bf16"
    settings = OptimSettings(
        optimizer="adamw", momentum=0.9, weight_decay=0.0, clip_grad_norm=0.1, ema_decay=0.0, backbone_lr_mult=1.0
    )
    optimizer = OptimizerStep(model, settings, Device(torch.device("cpu")), precision=precision)
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.autocast("cpu", dtype):
        losses = model.loss(model(batch.images), batch)
    assert all(loss.isfinite() for loss in losses.values()), losses
    optimizer.backward(torch.stack(list(losses.values())).sum())
    norm, found_inf = optimizer.step(1e-4, 0)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    if dtype == torch.bfloat16:
        assert norm.isfinite()
        assert found_inf == 0
        assert any(changed)
    else:
        assert optimizer.loss_scale is not None
        assert (found_inf == 1) == (optimizer.loss_scale < 2.0**14) == (not any(changed))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
