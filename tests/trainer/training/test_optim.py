"""The step: a reference that skips bad steps by an `if` is what the fused, waitless one must equal."""

import copy
import itertools
import math
import types
import warnings

import pytest
import torch
from torch import Tensor, nn

from stoker.hardware.device import Device
from stoker.models import Detector, build
from stoker.training import make_optimizer, norm_stats
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import OptimizerStep
from stoker.training.resume import lr_at
from tests.fixtures.training_cuda_graph import ACCELERATOR
from tests.fixtures.training_optim import make_images, make_model, settings
from tests.host_sync import ForbidHostSync, RecordOperators
from tests.trainer.models.samples import make_batch, settings_of

CPU = Device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("optimizer", "precision", "clip"), list(itertools.product(["sgd", "adamw"], ["fp32", "fp16"], [0.0, 1.0]))
)
def test_a_bad_step_changes_nothing(optimizer: str, precision: str, clip: float):
    """20 steps of which three are not finite, the first among them, equal a reference that leaves those out."""
    ours = OptimizerStep(make_model(), settings(optimizer=optimizer, clip_grad_norm=clip), CPU, precision=precision)
    theirs = make_model()
    weights = [
        p for m in theirs for n, p in m.named_parameters() if n == "weight" and not isinstance(m, nn.BatchNorm2d)
    ]
    rest = [p for p in theirs.parameters() if not any(p is w for w in weights)]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    reference: torch.optim.Optimizer
    if optimizer == "sgd":
        reference = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    else:
        reference = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.999))
    for step in range(20):
        bad = step in (0, 7, 8)
        x = make_images(step, bad=bad)
        ours.backward(ours.model(x).square().mean())
        norm, skipped = ours.step(0.05, step)
        assert bool(skipped) == bad
        if bad:
            continue
        reference.zero_grad()
        theirs(x).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or float("inf"))
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=1e-6)
        reference.step()
    for (name, a), b in zip(ours.model.state_dict().items(), theirs.state_dict().values(), strict=True):
        if name != "1.num_batches_tracked":
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6, msg=name)


def test_the_ema_follows_the_weights():
    stepper = OptimizerStep(make_model(), settings(ema_decay=0.5), CPU, precision="fp32")
    expected = copy.deepcopy(stepper.model)
    for step in range(30):
        stepper.backward(stepper.model(make_images(step, bad=step == 4)).square().mean())
        stepper.step(0.05, step)
        decay = min(0.5, (1 + step) / (10 + step))
        with torch.no_grad():
            for a, p in zip(expected.parameters(), stepper.model.parameters(), strict=True):
                a.lerp_(p, 1 - decay)
    for a, b in zip(expected.parameters(), stepper.ema_model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    average, model = stepper.ema_model[1], stepper.model[1]  # type: ignore[index]
    assert torch.equal(average.running_mean, model.running_mean)
    assert torch.isfinite(model.running_var).all()


def test_state_continues_exactly():
    one = OptimizerStep(make_model(), settings(optimizer="adamw", ema_decay=0.9), CPU, precision="fp16")
    for step in range(5):
        one.backward(one.model(make_images(step, bad=False)).square().mean())
        one.step(0.01, step)
    state, averaged = copy.deepcopy(one.state_dict()), copy.deepcopy(one.ema_model.state_dict())
    two = OptimizerStep(make_model(), settings(optimizer="adamw", ema_decay=0.9), CPU, precision="fp16")
    two.load_state_dict(state, averaged)
    for stepper in (one, two):
        for step in range(5, 12):
            stepper.backward(stepper.model(make_images(step, bad=step == 9)).square().mean())
            stepper.step(0.01, step)
    for a, b in zip(one.ema_model.state_dict().values(), two.ema_model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_the_backbone_has_its_own_lr_and_its_state_continues(optimizer: str):
    """At a tenth it moves a tenth as far in a first step; the rest moves as without. Norms are never decayed."""

    def moved(factor: float) -> tuple[OptimizerStep, dict[str, Tensor]]:
        torch.manual_seed(0)
        model = build(settings_of("retinanet_tiny_fpn", backbone_norm="bn"), 3).train()
        stepper = OptimizerStep(model, settings(optimizer=optimizer, backbone_lr_mult=factor), CPU, precision="fp32")
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        batch = make_batch((3, 2), (64, 64), classes=3)
        stepper.backward(torch.stack(list(model.loss(model(batch.images), batch).values())).sum())
        stepper.step(0.01, 0)
        return stepper, {name: p.detach() - before[name] for name, p in model.named_parameters()}

    (stepper, tenth), (_, whole) = moved(0.1), moved(1.0)
    body = {name for name in whole if name.startswith(Detector.backbone_prefixes)}
    assert set() < body < set(whole)
    for name, way in whole.items():
        torch.testing.assert_close(tenth[name], way * (0.1 if name in body else 1.0), rtol=1e-3, atol=2e-7, msg=name)
    groups = stepper._optimizer.param_groups
    assert {(g["lr"], g["weight_decay"]) for g in groups} == {(r, d) for r in (0.01, 0.001) for d in (0.01, 0.0)}
    again, _ = moved(0.1)
    again.load_state_dict(copy.deepcopy(stepper.state_dict()), copy.deepcopy(stepper.ema_model.state_dict()))
    for one in (stepper, again):
        batch = make_batch((3, 2), (64, 64), classes=3)
        one.backward(torch.stack(list(one.model.loss(one.model(batch.images), batch).values())).sum())
        one.step(0.02, 1)
    for a, b in zip(stepper.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_skipped_streak_continues_from_its_state():
    one, two = LossAccumulator(CPU, max_skipped_steps=3), LossAccumulator(CPU, max_skipped_steps=3)
    losses, bad = {"a": torch.tensor(1.0)}, torch.tensor(1.0)
    for step in range(2):
        one.add(losses, bad, bad, step)
    assert two.load_skipped_streak([tensor.clone() for tensor in one.skipped_streak()]) is None
    two.add(losses, bad, bad, 2)
    assert two.read(two.take(), 1).diverged_step == 2
    assert LossAccumulator(CPU, max_skipped_steps=3).load_skipped_streak(two.skipped_streak()) == 2


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_step_and_accumulator_never_wait_for_the_device(optimizer: str):
    stepper = OptimizerStep(make_model(), settings(optimizer=optimizer, ema_decay=0.9), CPU, precision="fp16")
    meter = LossAccumulator(CPU, max_skipped_steps=3)
    x = make_images(0, bad=False)
    for step in range(2):
        with ForbidHostSync():
            loss = stepper.model(x).square().mean()
            stepper.backward(loss)
            stepper.set_scalars(0.1, step)
            clipped = stepper.clip()
            stepper.update(clipped)
            stepper.update_ema()
            assert clipped.tensor_norms is not None
            meter.add({"loss": loss}, clipped.grad_norm, clipped.found_inf, step, clipped.tensor_norms)


def test_the_norm_of_each_gradient_has_its_name():
    stepper = OptimizerStep(make_model(), settings(), CPU, precision="fp16")
    stepper.backward(stepper.model(make_images(0, bad=False)).square().mean())
    scale = float(stepper.loss_scale)
    expected = {name: float(p.grad.square().sum().sqrt()) / scale for name, p in stepper.model.named_parameters()}
    clipped = stepper.clip()
    assert dict(zip(stepper.names, clipped.tensor_norms.tolist(), strict=True)) == pytest.approx(expected, rel=1e-4)
    assert float(clipped.grad_norm) == pytest.approx(math.hypot(*expected.values()), rel=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_update_ratios_are_what_the_last_step_changed(optimizer: str):
    stepper = OptimizerStep(make_model(), settings(optimizer=optimizer), CPU, precision="fp32")
    for step in range(6):
        before = {name: weight.detach().clone() for name, weight in stepper.model.named_parameters()}
        stepper.backward(stepper.model(make_images(step, bad=False)).square().mean())
        stepper.step(0.01, step)
    expected = {
        name: ((weight - before[name]).norm() / weight.norm()).item()
        for name, weight in stepper.model.named_parameters()
        if weight.dim() > 1
    }
    # AdamW's decay, 0.01 of the learning rate, is no part of its moments.
    assert stepper.update_ratios() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert min(expected.values()) > 1e-3


def test_without_momentum_there_are_no_update_ratios():
    assert OptimizerStep(make_model(), settings(momentum=0.0), CPU, precision="fp32").update_ratios() == {}


def test_the_accumulator_keeps_the_norms_of_the_step_with_the_largest_loss():
    meter, ok, skipped = LossAccumulator(CPU, max_skipped_steps=9), torch.tensor(0.0), torch.tensor(1.0)
    steps = [
        (4, 2.0, [1.0, 2.0], ok),
        (5, 7.0, [30.0, 4.0], ok),
        (6, math.nan, [math.nan] * 2, skipped),
        (7, 3.0, [2.0, 3.0], ok),
    ]
    for step, loss, norms, found_inf in steps:
        meter.add({"a": torch.tensor(loss)}, torch.tensor(norms[0]), found_inf, step, torch.tensor(norms))
    stats = meter.read(meter.take(), 4)
    assert (stats.worst_step, stats.worst_norms, stats.mean_norms) == (5, [30.0, 4.0], [11.0, 3.0])
    meter.add({"a": torch.tensor(1.0)}, ok, ok, 8, torch.tensor([5.0, 6.0]))
    assert meter.read(meter.take(), 1).worst_step == 8, "a window of its own"
    meter.add({"a": torch.tensor(math.nan)}, ok, skipped, 9, torch.tensor([5.0, 6.0]))
    assert meter.read(meter.take(), 1).worst_step is None


def test_the_accumulator_averages_finite_steps_and_keeps_the_diverged_step():
    meter = LossAccumulator(CPU, max_skipped_steps=3)
    nan = torch.tensor(float("nan"))
    for step, bad in enumerate([0, 1, 0, 1, 1, 1, 1]):
        value = nan if bad else torch.tensor(float(step))
        meter.add({"a": value, "b": torch.tensor(1.0) if not bad else nan}, value, torch.tensor(float(bad)), step)
    reading = meter.read([t.clone() for t in meter.take()], 7)
    assert reading.losses == {"a": 1.0, "b": 1.0, "total": 2.0}
    assert (reading.grad_norm, reading.skipped_steps, reading.diverged_step) == (1.0, 5, 5)
    meter.add({"a": torch.tensor(4.0), "b": torch.tensor(0.0)}, torch.tensor(2.0), torch.tensor(0.0), 7)
    assert meter.read(meter.take(), 1).losses["a"] == 4.0


def test_schedules():
    shape = {
        name: [lr_at(settings(lr_scheduler=name, warmup_steps=0), 100, progress / 10) / 0.1 for progress in range(11)]
        for name in ("cosine", "multistep", "exponential", "constant")
    }
    assert shape["constant"] == [1.0] * 11
    assert shape["multistep"] == pytest.approx([1] * 7 + [0.1] * 2 + [0.01] * 2)
    assert shape["exponential"] == pytest.approx([100 ** (-n / 10) for n in range(11)])
    assert shape["cosine"][0] == pytest.approx(1)
    assert shape["cosine"][5] == pytest.approx(0.505)
    assert shape["cosine"][10] == pytest.approx(0.01)
    warm = [lr_at(settings(warmup_steps=10), step, 0.0) for step in range(11)]
    assert warm == sorted(warm)
    assert warm[9] == pytest.approx(0.1)


def test_the_ema_keeps_no_autograd_history():
    """A graph of all steps so far would grow by a third of a MiB a step for the smallest model."""
    ours = OptimizerStep(make_model(), settings(ema_decay=0.9), CPU, precision="fp32")
    for step in range(3):
        ours.backward(ours.model(make_images(step, bad=False)).square().mean())
        ours.step(0.05, step)
    assert not [name for name, average in ours.ema_model.named_parameters() if average.requires_grad or average.grad_fn]


@pytest.mark.parametrize("is_xla", [False, True])
def test_the_ema_of_an_accelerator_is_moved_in_one_pass(is_xla: bool, monkeypatch: pytest.MonkeyPatch):
    """By one operator for all weights, which it only reads, in their memory formats; on XLA by operators that it has.
    The weight of a step is a tensor: 9/10, 9/11, 9/12 while the decay warms up."""
    for module in (make_optimizer, norm_stats):
        monkeypatch.setattr(module, "XLA_KINDS", frozenset({"cpu"} if is_xla else ()))
    model = make_model().to(memory_format=torch.channels_last)
    stepper = OptimizerStep(model, settings(ema_decay=0.9), ACCELERATOR, precision="fp32")
    expected = {name: average.double() for name, average in stepper.ema_model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    before = copy.deepcopy(list(model.parameters()))
    for step in range(3):
        stepper.set_scalars(0.1, step)
        with RecordOperators() as record, ForbidHostSync():
            stepper.update_ema()
        passes = [name for name, _ in record.operators if name != "aten::copy_"]  # of the running statistics
        assert (passes == ["aten::_fused_sgd_.tensor_lr"]) != is_xla
        for name, parameter in model.named_parameters():
            expected[name] += 9 / (10 + step) * (parameter.double() - expected[name])
    for name, average in stepper.ema_model.named_parameters():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("is_capturing", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_optimizer_may_be_captured(optimizer: str, is_capturing: bool, monkeypatch: pytest.MonkeyPatch):
    """torch's own check, where CUDA is there and its stream is capturing; without a graph, no warning either."""
    stepper = OptimizerStep(make_model(), settings(optimizer=optimizer), CPU, precision="fp32")
    stream = types.SimpleNamespace(is_capturing=lambda: is_capturing)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # this and the next is what torch 2.11 asks
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    stepper.backward(stepper.model(make_images(0, bad=False)).square().mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepper.step(0.05, 0)
