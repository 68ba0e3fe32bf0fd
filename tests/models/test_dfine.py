"""D-FINE and DEIMv2 against transformers in float64: predictions, each term of the losses, gradients; names of
weights. The oracle is `detr_oracle.py`."""

from collections.abc import Iterator

import pytest
import torch

from stoker.models import build
from stoker.models.dfine import LOSS_WEIGHTS, DFine
from stoker.models.dfine_weights import convert_dfine
from stoker.models.layers.denoising import make_denoising_queries
from stoker.models.layers.set_criterion import make_truth
from tests.models.detr_oracle import CONFIGS, give_noise, labels_of, make_oracle, oracle_terms
from tests.models.samples import make_batch, settings_of

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


@pytest.mark.slow
def test_without_the_union_of_matchings(monkeypatch: pytest.MonkeyPatch) -> None:
    check_losses("dfine_n", "vfl", monkeypatch, union=False)


def check_losses(name: str, kind: str, monkeypatch: pytest.MonkeyPatch, *, union: bool = True) -> None:
    oracle, model = make_pair(name, kind)
    model.union = model.union and union
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
        scale = wanted_gradients[key].norm() + 1e-9
        assert (gradient - wanted_gradients[key]).norm() < 1e-4 * scale, key
