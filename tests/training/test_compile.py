"""Training by a compiled program: the same numbers as operator by operator, and its time in the ledger."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stoker.device import pick
from stoker.models import build
from stoker.records import FINAL, STEPS, StepWindow, read_lines
from stoker.training import forward
from stoker.training.forward import compile_now, losses_of
from stoker.training.loop import train
from stoker.training.optim import Stepper
from tests.drawn import draw
from tests.models.samples import make_batch, settings_of
from tests.models.test_no_waits import make_stepper
from tests.training.test_run import settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


def test_a_compiled_training_is_the_eager_one(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch.compile captures, and its plain backend runs what was captured: every last bit is the same."""
    monkeypatch.setattr(forward, "BACKEND", "aot_eager")
    runs = {}
    for eager in (True, False):
        torch._dynamo.reset()
        run = tmp_path / str(eager)
        train(settings(data, for_="3", eager=eager, norm="train"), run=str(run))
        runs[eager] = load_file(run / FINAL)
        compile_s = sum(window.phases.get("compile", 0.0) for window in read_lines(run, STEPS, StepWindow))
        assert (compile_s == 0) == eager
    assert runs[True].keys() == runs[False].keys()
    for name, tensor in runs[True].items():
        torch.testing.assert_close(runs[False][name], tensor, rtol=1e-4, atol=1e-6)


def test_compiling_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "BACKEND", "eager")
    torch._dynamo.reset()
    model = build(settings_of("retinanet_tiny_fpn", norm="train"), 3).train()
    stepper: Stepper = make_stepper(model, "sgd")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    case = make_batch((3, 1), (64, 64), 3)
    compute = losses_of(model, eager=False)
    compile_now(model, compute, stepper, case, pick("cpu").autocast("fp32"))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled
    compute(make_batch((2, 2), (64, 64), 3, seed=4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled  # the first step finds its program


@pytest.mark.slow
def test_a_training_through_inductor(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch._dynamo.reset()
    for eager in (True, False):
        train(settings(data, for_="4", eager=eager), run=str(tmp_path / str(eager)))
    whole, compiled = (load_file(tmp_path / name / FINAL) for name in ("True", "False"))
    for name, tensor in whole.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-2, atol=1e-3)
    assert any((tmp_path / "compiled").rglob("*"))
