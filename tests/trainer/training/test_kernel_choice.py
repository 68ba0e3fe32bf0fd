"""The kernels of a training are chosen by measurement on a GPU, once for a run. Here a CPU passes for one; the Triton
kernels do not run on it, so their trial fails, and the separate operators remain. On a GPU: gpu/test_kernels.py.
"""

import contextlib
import dataclasses
import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.config.settings import Config
from stoker.hardware.device import Device
from stoker.models import Detector, build
from stoker.models.networks import BasicBlock
from stoker.training import make_step
from stoker.training.make_step import choose_kernels, compare_convs, measure_in_turn, try_kernel
from stoker.training.ranks import Ranks
from stoker_watch.runs.records import EVENTS, RunFolder, read_lines
from stoker_watch.runs.schemas import Event
from tests.trainer.models.samples import make_batch, settings_of

CLASSES = 3


@dataclasses.dataclass(frozen=True)
class PretendedGPU(Device):
    @property
    def kind(self) -> str:
        return "cuda"

    def autocast(self, precision: str) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def make_setup(folder: RunFolder, name: str = "retinanet_resnet18_fpn", *, compile: bool = False) -> Any:
    torch.manual_seed(0)
    return types.SimpleNamespace(
        device=PretendedGPU(torch.device("cpu")),
        config=Config().replace(precision="bf16", image_size=(64, 64), compile=compile),
        model=build(settings_of(name), CLASSES).train(),
        optimizer=types.SimpleNamespace(sharding=None),
        ranks=Ranks(),
        folder=folder,
        rank_batch_size=2,
        micro_batches=1,
        max_boxes=8,
        index=types.SimpleNamespace(class_names=("a", "b", "c")),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with contextlib.closing(RunFolder(tmp_path, 1)) as opened:
        yield opened


def events(path: Path) -> list[Event]:
    return list(read_lines(path, EVENTS, Event))


def fused(model: Detector) -> list[bool]:
    return [module.fused_convs for module in model.modules() if isinstance(module, BasicBlock)]


@pytest.mark.parametrize(("times", "is_taken"), [((1.0, 0.5, 0.0), True), ((1.0, 0.99, 0.0), False)])
def test_the_faster_side_is_taken(times: tuple[float, float, float], is_taken: bool) -> None:
    assert try_kernel(lambda: times)[0] is is_taken


@pytest.mark.parametrize("difference", [0.5, float("nan"), float("inf")])
def test_a_kernel_with_other_results_is_never_taken(difference: float) -> None:
    taken, reason = try_kernel(lambda: (1.0, 0.1, difference))
    assert not taken
    assert "differ" in reason


@pytest.mark.parametrize("error", [RuntimeError("no engine\nfound"), torch.OutOfMemoryError("full"), ImportError("no")])
def test_a_kernel_that_fails_is_not_taken(error: Exception) -> None:
    def compare() -> None:
        raise error

    taken, reason = try_kernel(compare)
    assert not taken
    assert "\n" not in reason


def test_the_choice_is_recorded_and_the_next_attempt_takes_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_step, "compare_convs", lambda *_: (2.0, 1.0, 0.0))
    monkeypatch.setattr(make_step, "compare_losses", lambda *_: (1.0, 2.0, 0.0))
    setup = make_setup(folder)
    assert not any(fused(setup.model))
    choose_kernels(setup, folder.event)
    assert all(fused(setup.model))
    assert not setup.model.fused_loss
    (event,) = events(folder.path)
    assert event.data["kernels"] == {"convs": True, "loss": False}
    assert "2e+03 ms separate, 1e+03 ms fused" in event.text

    monkeypatch.setattr(make_step, "compare_convs", lambda *_: pytest.fail("measured again"))
    resumed = make_setup(folder)
    choose_kernels(resumed, folder.event)
    assert all(fused(resumed.model))
    assert len(events(folder.path)) == 1


def test_a_cpu_and_a_divided_model_keep_the_separate_operators(folder: RunFolder) -> None:
    for changes in ({"device": Device(torch.device("cpu"))}, {"optimizer": types.SimpleNamespace(sharding=object())}):
        setup = make_setup(folder)
        vars(setup).update(changes)
        choose_kernels(setup, lambda *_, **__: pytest.fail("measured"))
        assert not any(fused(setup.model))


@pytest.mark.parametrize("compile", [False, True])
def test_the_trial_measures_every_convolution_and_leaves_the_model_as_it_was(folder: RunFolder, compile: bool) -> None:
    setup = make_setup(folder, compile=compile)
    before = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}
    batch = make_batch((1, 2), (64, 64), CLASSES, slots=8)
    found = compare_convs(setup, batch)
    assert found is not None
    separate_s, fused_s, difference = found
    assert separate_s > 0
    assert fused_s > 0
    assert difference == 0  # on a CPU, the same operators in the same order
    assert setup.model.training
    assert not any(fused(setup.model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in setup.model.state_dict().items())


def test_every_shape_is_counted_as_often_as_it_occurs(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-18 has 8 blocks of two convolutions, and two heads have four convolutions at each of five levels."""
    monkeypatch.setattr(make_step, "measure_in_turn", lambda *_: (1.0, 2.0))
    found = compare_convs(make_setup(folder), make_batch((1, 2), (64, 64), CLASSES, slots=8))
    assert found is not None
    num_convs = 8 * 2 + 2 * 4 * 5
    assert found[:2] == (num_convs, 2 * num_convs)


def test_a_wrong_result_is_seen(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    right = make_step.separate_conv_relu

    def wrong(*args: Any) -> Any:
        return right(*args) + 0.1

    monkeypatch.setattr(make_step, "separate_conv_relu", wrong)
    monkeypatch.setattr(make_step, "measure_in_turn", lambda *_: (2.0, 1.0))
    taken, reason = try_kernel(
        lambda: compare_convs(make_setup(folder), make_batch((1, 2), (64, 64), CLASSES, slots=8))
    )
    assert not taken
    assert "differ" in reason


def test_a_model_without_such_parts_is_not_for_it(folder: RunFolder) -> None:
    setup = make_setup(folder, "fcos_resnet18_fpn")
    batch = make_batch((1, 2), (64, 64), CLASSES, slots=8)
    assert make_step.compare_losses(setup, batch) is None


def test_a_loss_that_cannot_run_is_not_taken_and_leaves_the_model_as_it_was(folder: RunFolder) -> None:
    """Without a GPU, Triton has nothing to launch a kernel on."""
    pytest.importorskip("triton")
    setup = make_setup(folder, "retinanet_tiny_fpn")
    before = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}
    choose_kernels(setup, folder.event)
    (event,) = events(folder.path)
    assert event.data["kernels"] == {"convs": False, "loss": False}  # its norms are trained: nothing to fuse
    assert "convs: separate, not for this model" in event.text
    assert "loss: separate, " in event.text
    assert "Error" in event.text
    assert setup.model.training
    assert not setup.model.fused_loss
    assert all(torch.equal(tensor, before[name]) for name, tensor in setup.model.state_dict().items())


def test_measurements_take_turns_and_the_shortest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = itertools.count()
    monkeypatch.setattr(make_step.time, "perf_counter", lambda: float(next(clock)) ** 2)
    device = PretendedGPU(torch.device("cpu"))
    separate_s, fused_s = measure_in_turn(lambda: calls.append("s"), lambda: calls.append("f"), device)
    assert "".join(calls) == ("s" * make_step.CALLS + "f" * make_step.CALLS) * (make_step.ROUNDS + 1)
    # Readings 0 and 1 of the squared clock begin the warm-up; then 2, 3 and 4, 5 are the shortest round.
    assert (separate_s, fused_s) == ((9 - 4) / make_step.CALLS, (25 - 16) / make_step.CALLS)
