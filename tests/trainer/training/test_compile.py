"""Training by a compiled program: the same numbers as operator by operator, and its time in the ledger."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

from stoker.data.augment import augment_batch
from stoker.data.batch import Batch
from stoker.hardware.device import DTYPES
from stoker.hardware.selection import select_device
from stoker.models import build
from stoker.training import parallel, recorder, step
from stoker.training.local_ranks import TrainOptions
from stoker.training.optim import OptimizerStep
from stoker.training.ranks import Ranks
from stoker.training.run import train
from stoker.training.step import PlainStep, describe_compilation, make_augment_fn, make_loss_fn
from stoker_watch.runs.records import FINAL, STEPS, read_lines
from stoker_watch.runs.schemas import StepWindow
from tests import fakes
from tests.drawn import draw
from tests.fixtures.models_no_waits import make_stepper
from tests.fixtures.training_run import settings
from tests.fixtures.training_stability import RATE, events_of, make_gradients_nan
from tests.fixtures.training_stability import settings as unstable
from tests.trainer.models.samples import make_batch, settings_of
from tests.trainer.training.parallels import ignore, make_setup


@pytest.fixture(autouse=True)
def without_pointwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps have torch's 1 × 1 convolutions, and rounding differs."""
    monkeypatch.setattr("stoker.models.layers.pointwise.MIN_IMAGES", 0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


def compile_augmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: a run that compiles makes a program of its augmentation too, until compiling has failed."""
    first = iter([True])
    monkeypatch.setattr(
        parallel, "make_augment_fn", lambda data, *, compile: make_augment_fn(data, compile=next(first, compile))
    )


def apart(batch: Batch) -> Batch:
    """Its tensors share no memory, as the loader's do."""
    return Batch(*(tensor.clone() for tensor in batch))


def test_the_augmentation_is_compiled_before_the_first_image(monkeypatch: pytest.MonkeyPatch):
    """For whole batches, which a step has in parts, and for all stages: with mixup, with mosaics alone, without."""
    graphs = CompileCounter()
    monkeypatch.setattr(step, "COMPILE_BACKEND", graphs)
    monkeypatch.setattr(parallel, "make_loss_fn", lambda model, **_: make_loss_fn(model, compile=False))
    compile_augmentation(monkeypatch)
    torch._dynamo.reset()
    model = build(settings_of("retinanet_tiny_fpn"), 3).train()
    setup = make_setup(model, make_stepper(model, "sgd"), Ranks(), select_device("cpu"), micro_batches=2)
    setup.config.run.compile, setup.config.data = True, dataclasses.replace(fakes.AUGMENTATIONS, mixup=0.5)
    one = parallel.SingleProcess(setup, ignore)
    one.micro_batches = 2
    one.warm_up(lambda: apart(make_batch((3, 1, 0, 2), (64, 64), 3)))
    assert graphs.frame_count == 3
    kinds = set()
    for setup.progress in (0.0, 0.3, 0.499, 0.5, 0.7, 0.9, 1.0):
        batch = apart(make_batch((1, 2, 0, 3, 3, 1, 1, 2), (64, 64), 3, seed=int(100 * setup.progress)))
        found, expected = one.augment(batch), augment_batch(batch, setup.config.data, setup.progress)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        kinds.add((found.images.stride(), found.images.dtype))
    assert graphs.frame_count == 3
    assert kinds == {(batch.images.stride(), torch.uint8)}


@pytest.mark.slow
def test_a_compiled_training_equals_the_eager_one(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch.compile captures, and its plain backend runs what was captured: every last bit is the same."""
    monkeypatch.setattr(step, "COMPILE_BACKEND", "aot_eager")
    runs = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        run = tmp_path / str(compiled)
        train(settings(data, max_duration="3", compile=compiled, backbone_norm="bn"), TrainOptions(run_dir=str(run)))
        runs[compiled] = load_file(run / FINAL)
        compile_s = sum(window.phases.get("compile", 0.0) for window in read_lines(run, STEPS, StepWindow))
        assert (compile_s > 0) == compiled
        texts = [event.text for event in events_of(run, "info")]
        assert any(text.startswith("compiled: forward") for text in texts) == compiled
    assert runs[True].keys() == runs[False].keys()
    for name, tensor in runs[True].items():
        torch.testing.assert_close(runs[False][name], tensor, rtol=1e-4, atol=1e-6)


def skip_bf16(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Compiles nothing, and skips a graph that takes or returns bf16, as Inductor does on a GPU that emulates it
    (`_check_triton_bf16_support` in torch/_inductor/compile_fx.py)."""
    (outputs,) = graph.graph.find_nodes(op="output")
    returned = [node.meta["val"] for node in outputs.args[0] if node is not None]
    if any(getattr(value, "dtype", None) == torch.bfloat16 for value in (*inputs, *returned)):
        raise torch._dynamo.exc.SkipFrame("BF16 is not supported")
    return graph


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("retinanet_tiny_fpn", "fp16", ("info", "compiled: forward")),
        ("retinanet_tiny_fpn", "bf16", ("warning", "compiled in part: ")),
        pytest.param("ember_n", "fp16", ("info", "compiled: forward"), marks=pytest.mark.slow),
        pytest.param("dfine_n", "fp16", ("info", "compiled: forward"), marks=pytest.mark.slow),
    ],
)
def test_a_step_in_fp16_is_compiled_where_bf16_is_emulated(
    name: str, precision: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step, "COMPILE_BACKEND", aot_autograd(fw_compiler=skip_bf16))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(settings_of(name), 3).train()
    parallel = PlainStep(
        make_loss_fn(model, compile=True), make_stepper(model, "sgd"), None, torch.autocast("cpu", DTYPES[precision])
    )
    parallel.rehearse(make_batch((3, 1), (64, 64), 3))
    kind, text = describe_compilation(torch._dynamo.utils.counters)
    assert (kind, text[: len(expected[1])]) == expected


def test_a_switched_off_compiler_is_said():
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(disable=True):  # as TORCHDYNAMO_DISABLE=1 does
        torch.compile(lambda x: x + 1, backend="eager", dynamic=False)(torch.ones(3))
    assert describe_compilation(torch._dynamo.utils.counters)[0] == "warning"


def test_what_torch_did_not_compile_is_said():
    def break_graph(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        torch._dynamo.graph_break()
        return doubled + 1

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(break_graph, backend="eager", dynamic=False)(torch.ones(3))
    kind, text = describe_compilation(torch._dynamo.utils.counters)
    assert kind == "warning"
    assert text.startswith("compiled in part: 2 graphs of 2 functions, 1 graph breaks; Call to `torch._dynamo.graph_br")


@pytest.mark.slow
def test_a_run_whose_compiler_fails_trains_without(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(step, "COMPILE_BACKEND", broken)
    weights = []
    for compiled in (False, True):
        torch._dynamo.reset()
        if compiled:
            compile_augmentation(monkeypatch)
        changes = {"max_duration": "3", "compile": compiled, "backbone_norm": "bn"}
        run = train(settings(data, **changes), TrainOptions(run_dir=str(tmp_path / str(compiled)))).run
        weights.append(load_file(run / FINAL))
        warnings = [event.text for event in events_of(run, "warning") if "compil" in event.text]
        assert len(warnings) == compiled
    assert warnings[0].startswith("compiling failed, training without: BackendCompilerFailed")
    assert "Failed to find C compiler" in warnings[0]
    for name, tensor in weights[0].items():
        assert torch.equal(weights[1][name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", ["6", "0"])
def test_a_compiled_training_with_a_rollback_equals_the_eager_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_every: str
):
    """To a checkpoint, and to the first step: the program that is there steps with the weights that are loaded."""
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    monkeypatch.setattr(step, "COMPILE_BACKEND", "eager")
    make_gradients_nan(monkeypatch, lambda step, rate: step >= 8 and rate > 0.8 * RATE)
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        changes = {
            "checkpoint_every": checkpoint_every,
            "eval_every": "0",
            "max_duration": "16",
            "backbone_norm": "bn",
        }
        run = train(
            unstable(data, compile=compiled, **changes), TrainOptions(run_dir=str(tmp_path / str(compiled)))
        ).run
        assert len(events_of(run, "rolled_back")) == 1
        ends.append(load_file(run / FINAL))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiling_does_not_change_the_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "COMPILE_BACKEND", "eager")
    torch._dynamo.reset()
    model = build(settings_of("retinanet_tiny_fpn", backbone_norm="bn"), 3).train()
    stepper: OptimizerStep = make_stepper(model, "sgd")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    case = make_batch((3, 1), (64, 64), 3)
    compute = make_loss_fn(model, compile=True)
    PlainStep(compute, stepper, None, select_device("cpu").autocast("fp32")).rehearse(case)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled
    compute(make_batch((2, 2), (64, 64), 3, seed=4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled  # the first step finds its program


@pytest.mark.slow
def test_the_inductor_step_equals_the_eager_one_and_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Losses and gradients, not trained weights: AdamW makes a whole step of a rounding error in a gradient near 0."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    model = build(settings_of("retinanet_tiny_fpn"), 3).train()
    stepper: OptimizerStep = make_stepper(model, "sgd")
    batch, autocast = make_batch((3, 1), (64, 64), 3), select_device("cpu").autocast("fp32")
    found, hits = [], []
    for is_compiled in (False, True, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compute = make_loss_fn(model, compile=is_compiled)
        if is_compiled:
            PlainStep(compute, stepper, None, autocast).rehearse(make_batch((2, 2), (64, 64), 3, seed=4))
            hits.append(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
        losses = PlainStep(compute, stepper, None, autocast).forward_backward(batch)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        stepper.zero_grad()
        found.append(losses | gradients)
    assert hits[0] == 0 < hits[1]
    for compiled in found[1:]:
        assert compiled.keys() == found[0].keys()
        for name, tensor in found[0].items():
            # a sum of many terms near 0 is rounded relative to its terms; measured: 2e-5 of the largest value
            torch.testing.assert_close(compiled[name], tensor, rtol=1e-3, atol=1e-6 + 1e-4 * float(tensor.abs().max()))
