"""One cast for all weights and one increment for all norms' counts change no loss, no gradient and no state."""

import copy
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from stoker.data.batch import Batch
from stoker.models import Detector, build
from stoker.models.layers.norms import BatchCounts
from stoker.models.layers.weight_casts import WeightCasts
from stoker.training import step
from stoker.training.step import make_loss_fn
from tests.trainer.models.samples import make_batch, settings_of

CASES = {
    "ember": settings_of("ember_n"),
    "checkpointed": settings_of("ember_n", activation_checkpointing=True),
    "checkpointed, folded norms": settings_of(
        "retinanet_resnet18_fpn", trainable_backbone_layers=3, activation_checkpointing=True
    ),
    "folded norms and frozen stages": settings_of("retinanet_resnet18_fpn", trainable_backbone_layers=3),
    "norms of shared heads": settings_of("retinanet_mobilenet_v2_fpnlite"),
    "fcos": settings_of("fcos_resnet18_fpn"),
    "two stages": settings_of("faster_rcnn_resnet18_fpn"),
    "ssd": settings_of("ssdlite320_mobilenet_v3_large"),
    "transformer": settings_of("dfine_n"),
    "transformer with heads in fp32": settings_of("rf_detr_n"),
}


def two_micro_batches(model: Detector) -> dict[str, torch.Tensor]:
    """Losses, gradients and state after two micro-batches in bf16. The last one has a norm with a single value."""
    results = {}
    compute = make_loss_fn(model, compile=False)
    torch.manual_seed(1)  # of the noise of queries, and of samples
    for n, batch in enumerate((make_batch((3, 1), (64, 64), 3), make_batch((2,), (32, 32), 3, seed=1))):
        with torch.autocast("cpu", torch.bfloat16):
            losses = compute(batch)
        results |= {f"{name} {n}": loss.detach() for name, loss in losses.items()}
        torch.stack(list(losses.values())).sum().backward()
    results |= {f"{name}.grad": weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return results | model.state_dict()


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_state_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    one = build(CASES[name], 3).train()
    other = copy.deepcopy(one)
    expected = two_micro_batches(one)
    monkeypatch.setattr(step, "is_on_accelerator", lambda _: True)
    found = two_micro_batches(other)
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    layouts = [(n, w.grad.stride()) for n, w in other.named_parameters() if w.grad is not None]
    assert layouts == [(n, w.grad.stride()) for n, w in one.named_parameters() if w.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["folded norms and frozen stages", "norms of shared heads", "transformer"])
def test_a_compiled_program_takes_the_cast_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all steps, which casts no weight that it gets and no gradient that it gives, with the numbers of
    eager mode. Inside, it casts what a folded norm is multiplied into, in the same pass."""
    weights = {tuple(weight.shape) for weight in build(CASES[name], 3).parameters() if weight.dim() > 1}
    casts: list[tuple[int, ...]] = []

    def compiler(graph: fx.GraphModule, _: object) -> Callable[..., object]:
        is_backward = any("tangents" in node.name for node in graph.graph.nodes)
        for node in graph.graph.nodes:
            others = node.users if is_backward else node.all_input_nodes
            is_at_border = any(other.op in ("placeholder", "output") for other in others)
            if "_to_copy" in str(node.target) and is_at_border and tuple(node.meta["val"].shape) in weights:
                casts.append(tuple(node.meta["val"].shape))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(step, "is_on_accelerator", lambda _: True)
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = build(CASES[name], 3).train()
        graphs = CompileCounterWithBackend(aot_autograd(fw_compiler=compiler))
        monkeypatch.setattr(step, "COMPILE_BACKEND", graphs)
        torch._dynamo.reset()
        compute = make_loss_fn(model, compile=is_compiled)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(make_batch((3, 1), (64, 64), 3).images)  # makes the anchors
        results: dict[str, torch.Tensor] = {}
        for n in range(3):
            batch = Batch(*(tensor.clone() for tensor in make_batch((3, 1), (64, 64), 3, seed=n)))
            with torch.autocast("cpu", torch.bfloat16):
                losses = compute(batch)
            results |= {f"{name} {n}": loss.detach() for name, loss in losses.items()}
            torch.stack(list(losses.values())).sum().backward()
        found.append(results | {n: w.grad for n, w in model.named_parameters() if w.grad is not None})
        assert graphs.frame_count == is_compiled
    assert not casts
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    model = build(settings_of("retinanet_resnet18_fpn", backbone_norm="bn"), 3).train()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    with (
        pytest.raises(KeyError),
        torch.autocast("cpu", torch.bfloat16),
        WeightCasts(model).apply("cpu"),
        BatchCounts(model).defer(),
    ):
        raise KeyError
    for before, now in ((parameters, dict(model.named_parameters())), (buffers, dict(model.named_buffers()))):
        assert before.keys() == now.keys()
        assert all(before[name] is now[name] for name in before)


def test_nothing_is_cast_without_autocast() -> None:
    model = build(settings_of("ember_n"), 3)
    with WeightCasts(model).apply("cpu"):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
