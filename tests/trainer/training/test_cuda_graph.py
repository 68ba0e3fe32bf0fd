"""A step can be replayed by a CUDA graph: proved on a CPU, where the device passes for an accelerator.

The operators of two steps are equal, whatever their learning rate, decay and number, and what outlives a step keeps its
address. A graph is emulated: the operators that were recorded once are called again, with the tensors they had then.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.config.settings import OptimSettings
from stoker.hardware.device import Device
from stoker.models import Detector, build
from stoker.training import loop, parallel, recorder, start
from stoker.training.local_ranks import TrainOptions
from stoker.training.loss_sums import LossAccumulator
from stoker.training.make_step import CudaGraphStep
from stoker.training.optim import OptimizerStep
from stoker.training.run import train
from stoker.training.step import PlainStep, make_loss_fn, train_step
from stoker_watch.runs.records import EVENTS, FINAL, STEPS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from tests import fakes
from tests.drawn import draw, run_stoker
from tests.fixtures.training_cuda_graph import (
    CPU,
    Accelerator,
    Work,
    batch_of,
    make_bad,
    poisonable,
    run_steps,
    saved_state,
)
from tests.fixtures.training_optim import make_images, make_model
from tests.fixtures.training_optim import settings as optim_settings
from tests.fixtures.training_stability import events_of
from tests.fixtures.training_stability import settings as unstable
from tests.host_sync import ForbidHostSync, RecordOperators
from tests.trainer.models.oracle import SMALL_MODELS
from tests.trainer.models.samples import settings_of

CASES = [("retinanet_tiny_fpn", "sgd", 2), ("retinanet_tiny_fpn", "adamw", 1), ("retinanet_tiny_fpn", "muon", 1)]
SLOW_CASES = [(name, "adamw", 1) for name in SMALL_MODELS if name != "retinanet_tiny_fpn"]


def marked(default: int) -> list[object]:
    """Parameters of a test: the first `default` cases; all others in the slow suite."""
    cases = [*CASES, *SLOW_CASES]
    return [*cases[:default], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[default:])]


@pytest.mark.parametrize(("name", "optimizer", "micro_batches"), marked(2))
def test_steps_issue_the_same_operators_on_the_same_addresses(name: str, optimizer: str, micro_batches: int) -> None:
    work, records, batch = Work(name, optimizer, micro_batches), [], batch_of(0)
    addresses = [work.addresses()]
    del addresses[0]["sums"]  # the names of the losses are not known yet
    for step in range(3):
        work.optimizer.set_scalars(0.1 / (step + 1), 2 * step)  # a decay of 0.1, 0.25, 0.36
        with RecordOperators() as record, ForbidHostSync():
            work.step(batch)
        work.accumulator.read(work.accumulator.take(), 1)
        if step == 1:  # a rollback
            work.optimizer.load_state_dict(saved_state(work.optimizer), work.optimizer.ema_model.state_dict())
            work.accumulator.load_skipped_streak([tensor.clone() for tensor in work.accumulator.skipped_streak()])
            work.accumulator.reset()
        records.append(record.operators)
        addresses.append(work.addresses())
    assert len(records[1]) > 100  # the first step makes the anchors
    for one, other in zip(records[1], records[2], strict=True):
        assert one == other
    assert addresses[0] == {name: address for name, address in addresses[1].items() if name != "sums"}
    assert addresses[1] == addresses[2] == addresses[3]


class EmulatedCapture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators with the tensors that they read and wrote, and calls them again with the same tensors.

    The recorded step has no effect: what it wrote to tensors from outside is restored, as if nothing had run.
    """

    def warm_up(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.own: set[int] = set()
        self.before: list[tuple[Tensor, Tensor]] = []
        self.kept: list[Any] = []
        with self:
            step()
        with torch.no_grad():
            for tensor, value in reversed(self.before):
                tensor.copy_(value)
        return self.replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self.save(argument, value)
        for argument in func._schema.arguments:
            self.save(argument, kwargs.get(argument.name))
        result = func(*args, **kwargs)
        inputs = {storage_of(leaf) for leaf in tensors_of((args, kwargs))}
        self.own |= {storage_of(leaf) for leaf in tensors_of(result)} - inputs
        if func.namespace != "profiler":
            self.calls.append((func, args, kwargs, result))
        return result

    def save(self, argument: Any, value: Any) -> None:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or argument.name in ("running_mean", "running_var"):  # batch_norm does not declare these
            outside = [leaf for leaf in tensors_of(value) if storage_of(leaf) not in self.own]
            self.before.extend((leaf, leaf.detach().clone()) for leaf in outside)

    def replay(self) -> None:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, recorded in self.calls:
                result = func(*args, **kwargs)
                for old, new in zip(tensors_of(recorded), tensors_of(result), strict=True):
                    if storage_of(old) != storage_of(new):
                        old.copy_(new)


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize(("name", "optimizer", "micro_batches"), marked(1))
def test_a_replayed_training_equals_the_eager_one(name: str, optimizer: str, micro_batches: int) -> None:
    """Bit for bit, with steps that are skipped, a rollback, and another batch, learning rate and number each step. When
    mosaics end, the step is captured again."""
    eager, replayed = (Work(name, optimizer, micro_batches) for _ in range(2))
    capture = EmulatedCapture()
    record, captures = capture.record, []
    capture.record = lambda step: (captures.append(replayed.progress), record(step))[1]  # type: ignore[method-assign]
    readings = run_steps(eager, eager.step)
    assert [reading.skipped_steps for reading in readings] == [1, 1, 0]
    assert str(run_steps(replayed, CudaGraphStep(replayed.step, capture, replayed.makes_mosaics))) == str(readings)
    assert captures == [3 / 6, 6 / 6]
    for (name, expected), tensor in zip(eager.persistent().items(), replayed.persistent().values(), strict=True):
        assert torch.equal(expected, tensor), name


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_device_scalars_train_as_numbers_do(optimizer: str) -> None:
    steppers = [
        OptimizerStep(make_model(), optim_settings(optimizer=optimizer, ema_decay=0.9), device(CPU), precision="fp16")
        for device in (Device, Accelerator)
    ]
    assert [isinstance(stepper.completed_steps, Tensor) for stepper in steppers] == [False, True]
    for stepper in steppers:
        for step in range(20):
            stepper.backward(stepper.model(make_images(step, bad=step in (0, 7))).square().mean())
            stepper.step(0.05 / (1 + step), step)
    numbers, scalars = ({**s.model.state_dict(), "ema": s.ema_model.state_dict()["4.weight"]} for s in steppers)
    for name, expected in numbers.items():
        torch.testing.assert_close(scalars[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_a_replay_leaves_the_host_one_operator_besides_it() -> None:
    """Augmentation and all of training are in the graph; what is left is the copy of the batch."""

    class Counted(EmulatedCapture):
        def record(self, step: Callable[[], None]) -> Callable[[], None]:
            super().record(step)
            return lambda: None  # what a replay issues is the graph's own

    work, capture = Work("retinanet_tiny_fpn", "adamw", 1), Counted()
    step = CudaGraphStep(work.step, capture, work.makes_mosaics)
    for done in range(6):
        work.optimizer.set_scalars(0.1, done)
        batch = batch_of(done)
        with RecordOperators() as record:
            step(batch)
    assert [name for name, _ in record.operators] == ["aten::_foreach_copy_"]
    assert sum("grid_sampler" in str(call[0]) for call in capture.calls) == 1  # the mosaics


FAILING_CAPTURE = """
import contextlib, sys
from stoker_watch.cli import app
from stoker.training import make_step, start

class FailingCapture:
    warm_up = staticmethod(contextlib.nullcontext)

    def record(self, step):
        {before}
        raise RuntimeError("operation not permitted when stream is capturing")

derive = start.derive

def derive_with_graph(*args):
    config, reasons = derive(*args)
    return config.replace(cuda_graph=True), reasons

start.derive = derive_with_graph
make_step.CudaCapture = FailingCapture
app.main()
"""
FLAGS = [
    "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "4", "--steps", "12",
    "--eval-every", "0", "--checkpoint-every", "8", "--mosaic", "0.4", "--precision", "fp32", "--workers", "2",
]  # fmt: skip


def run_failing(data: Path, cwd: Path, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """`stoker train` on a CPU that passes for a GPU, whose capture fails; the process that follows is unchanged."""
    command = [sys.executable, "-c", FAILING_CAPTURE.format(before=before), "train", str(data), *FLAGS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--run-dir", "failing"], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.mark.slow
def test_a_failed_capture_restarts_the_process_without_a_graph(shapes: Path, tmp_path: Path) -> None:
    """From the last checkpoint, and the weights are those without a graph."""
    done = run_failing(shapes, tmp_path)
    assert done.returncode == 0, done.stderr
    code, output = run_stoker("train", shapes, *FLAGS, "--run-dir", "eager", cwd=tmp_path)
    assert code == 0, output
    events = list(read_lines(tmp_path / "failing", EVENTS, Event))
    failed = [e for e in events if e.kind == "cuda_graph_failed"]
    assert [(e.attempt, e.step) for e in failed] == [(1, 3)]
    assert "RuntimeError: operation not permitted when stream is capturing" in failed[0].text
    seconds = sum(w.wall_s for w in read_lines(tmp_path / "failing", STEPS, StepWindow) if w.attempt == 2)
    assert seconds < events[-1].t - failed[0].t + 0.5  # the second begins to count where the first has ended
    assert (tmp_path / "failing" / FINAL).read_bytes() == (tmp_path / "eager" / FINAL).read_bytes()


@pytest.mark.slow
def test_a_stop_signal_in_a_capture_that_fails_is_heeded(shapes: Path, tmp_path: Path) -> None:
    done = run_failing(shapes, tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert done.returncode == 75, done.stderr
    kinds = [event.kind for event in read_lines(tmp_path / "failing", EVENTS, Event)]
    assert kinds[-1] == "preempted"
    assert "resumed" not in kinds


@pytest.mark.slow
def test_a_run_with_a_graph_and_a_rollback_equals_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop itself, from the first step over an evaluation and a rollback to the final weights."""
    data = draw(tmp_path / "shapes")

    def make_step(model: Detector, chosen: OptimSettings, device: Device, **named: Any) -> OptimizerStep:
        return OptimizerStep(model, chosen, Accelerator(device.torch_device), **named)

    monkeypatch.setattr(start, "OptimizerStep", make_step)
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    monkeypatch.setattr(parallel, "make_loss_fn", lambda *args, **named: poisonable(make_loss_fn(*args, **named)))
    poison_batches(monkeypatch, lambda step, rollbacks: 8 <= step < 16 and rollbacks == 0)
    capture, ends, without_graph = EmulatedCapture(), [], loop.Training.__init__

    def with_graph(self: loop.Training, *args: Any, **named: Any) -> None:
        without_graph(self, *args, **named)
        self.train._train = CudaGraphStep(self.train._train, capture)

    for has_graph in (False, True):
        monkeypatch.setattr(loop.Training, "__init__", with_graph if has_graph else without_graph)
        changes = {"max_duration": "20", "eval_every": "6", "checkpoint_every": "6", "backbone_norm": "bn"}
        run = train(unstable(data, **changes), TrainOptions(run_dir=str(tmp_path / str(has_graph)))).run
        assert len(events_of(run, "rolled_back")) == 1
        ends.append(load_file(run / FINAL))
    assert capture.calls
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        assert torch.equal(ends[1][name], tensor), name


def poison_batches(patch: pytest.MonkeyPatch, poisoned: Callable[[int, int], bool]) -> None:
    """The losses are infinite at the steps, counted from 0, and rollbacks for which `poisoned` says so."""
    step = loop.Training.step

    def poisoned_step(self: loop.Training) -> None:
        next_batch = self.parallel.next_batch
        if poisoned(self.state.step, self.recovery.rollback_count):
            self.parallel.next_batch = lambda loader: make_bad(next_batch(loader))  # type: ignore[method-assign]
        step(self)
        self.parallel.next_batch = next_batch  # type: ignore[method-assign]

    patch.setattr(loop.Training, "step", poisoned_step)


def check_on_fake_accelerator(name: str) -> None:
    """Steps at full size in bf16, with fused AdamW, issue the same operators. Changes the process: `tests.fakes`."""
    fakes.install()
    trial = fakes.Trial(model=name, optimizer="adamw", batch=32, slots=100, image_size=(640, 640))
    model, records = build(settings_of(name), trial.classes), []
    with fakes.fake_tensors():
        fakes.to_fake(model).train()
        batch, optimizer = fakes.fake_batch(trial), fakes.make_stepper(trial, model)
        accumulator = LossAccumulator(Device(torch.device(fakes.DEVICE)), max_skipped_steps=3)
        for step in range(3):
            optimizer.set_scalars(0.1 / (step + 1), 2 * step)
            with RecordOperators() as record, ForbidHostSync():
                loss_fn, autocast = make_loss_fn(model, compile=False), fakes.Autocast("bf16")
                train_step(PlainStep(loss_fn, optimizer, accumulator, autocast), batch)
            records.append(record.operators)
    assert records[1] == records[2]
    assert any("fused_adamw" in operator and ".tensor_lr" in operator for operator, _ in records[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn", "ember_n"])
def test_steps_in_mixed_precision_issue_the_same_operators(name: str) -> None:
    code = f"from tests.trainer.training.test_cuda_graph import check_on_fake_accelerator as check; check({name!r})"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, check=True)
