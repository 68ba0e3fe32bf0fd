"""Out of memory while training: the run goes on in smaller micro-batches, as if it had begun with them."""

import importlib.util
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stoker.data.batch import Batch
from stoker.hardware.memory_errors import is_out_of_memory
from stoker.training import evaluator, loop, make_step, step
from stoker.training.local_ranks import TrainOptions
from stoker.training.optim import OptimizerStep
from stoker.training.out_of_memory import halve
from stoker.training.parallel import SingleProcess
from stoker.training.run import train
from stoker.training.state import BatchSizes, count_micro_batches
from stoker_watch.errors import OutOfMemoryError, Preempted
from stoker_watch.runs.records import EVENTS, STEPS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from tests.drawn import draw
from tests.fixtures.training_out_of_memory import settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.fixture(scope="module")
def halves(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in two micro-batches from its first step on."""
    return train(
        settings(data, grad_accum_steps=2), TrainOptions(run_dir=str(tmp_path_factory.mktemp("halves") / "run"))
    ).run


def fail(call: Callable[..., Any], at: int, *, after: bool = False, times: int = 1) -> Callable[..., Any]:
    """`call`, without memory at its n-th use, from 0; after: when it has done its work."""
    uses = iter(range(10**9))

    def wrapper(*arguments: Any, **named: Any) -> Any:
        fails = at <= next(uses) < at + times
        if fails and not after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnother line")
        result = call(*arguments, **named)
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return result

    return wrapper


def memory_events(run: Path) -> list[Event]:
    return [event for event in read_lines(run, EVENTS, Event) if event.kind == "out_of_memory"]


POINTS = {
    "augmentation": (step, "augment_batch", False),
    "backward": (OptimizerStep, "backward", True),
    "norm of the gradient": (torch, "_foreach_norm", False),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_step_is_repeated_as_if_it_had_begun_in_halves(
    point: str, data: Path, halves: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running statistics of norms, gradients and sums of losses of the failed attempt leave no trace."""
    target, name, after = POINTS[point]
    monkeypatch.setattr(target, name, fail(getattr(target, name), 0, after=after))
    run = train(settings(data), TrainOptions(run_dir=str(tmp_path / "run"))).run
    assert (run / "final.safetensors").read_bytes() == (halves / "final.safetensors").read_bytes()
    losses = [
        [window.losses for window in read_lines(r, STEPS, StepWindow) if window.window_steps] for r in (run, halves)
    ]
    assert losses[0][0] == losses[1][0]
    (event,) = memory_events(run)
    assert event.step == 0
    assert event.data["micro_batch_size"] == 2
    assert "2 micro-batches of 2 images instead of 4; its batch stays 4" in event.text
    assert "Another line" not in event.text


def test_a_half_applied_update_is_never_saved(data: Path, halves: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerStep, "update_ema", fail(OptimizerStep.update_ema, 1))
        with pytest.raises(OutOfMemoryError, match="while the weights were updated") as caught:
            train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert caught.value.exit_code == 5
    run = train(settings(data), TrainOptions(run_dir=str(tmp_path / "run"))).run
    assert (run / "final.safetensors").read_bytes() == (halves / "final.safetensors").read_bytes()


def test_a_resumed_run_keeps_the_smaller_micro_batch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    train_step = make_step.train_step

    def counting(parallel: SingleProcess, batch: Batch) -> None:
        counts.append(parallel.micro_batches)
        train_step(parallel, batch)

    monkeypatch.setattr(make_step, "train_step", counting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerStep, "backward", fail(OptimizerStep.backward, 1))
        patch.setattr(loop.Training, "step", stop_at(3))
        with pytest.raises(Preempted):
            train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert counts == [1, 1, 2, 2, 2, 2]  # the second step is tried twice


def stop_at(step: int) -> Callable[..., None]:
    train_one = loop.Training.step

    def wrapper(self: loop.Training) -> None:
        train_one(self)
        if self.state.step == step:
            self.stopper.request.request("SIGTERM")

    return wrapper


def test_an_evaluation_is_repeated_and_training_keeps_its_size(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(settings(data), TrainOptions(run_dir=str(tmp_path / "whole")))
    monkeypatch.setattr(evaluator, "detect", fail(evaluator.detect, 0, times=2))
    result = train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert result.metrics.ap == whole.metrics.ap
    assert (result.run / "final.safetensors").read_bytes() == (whole.run / "final.safetensors").read_bytes()
    assert [(e.data["micro_batch_size"], e.data["eval_batch_size"]) for e in memory_events(result.run)] == [
        (4, 2),
        (4, 1),
    ]


@pytest.mark.parametrize("activity", ["training", "evaluation"])
def test_where_nothing_smaller_is_left_the_run_ends(
    activity: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, name = (OptimizerStep, "backward") if activity == "training" else (evaluator, "detect")
    monkeypatch.setattr(target, name, fail(getattr(target, name), 0, times=100))
    with pytest.raises(OutOfMemoryError, match=f"Out of memory in {activity}, also with") as caught:
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert "nvidia-smi" in str(caught.value)
    last = list(read_lines(tmp_path / "run", EVENTS, Event))[-1]
    assert (last.kind, last.data["exit_code"]) == ("failed", 5)


@given(st.integers(1, 256), st.integers(1, 256), st.booleans())
def test_halving_ends_at_the_smallest_micro_batch(batch_size: int, max_size: int, has_norms: bool) -> None:
    model = nn.BatchNorm2d(1) if has_norms else nn.Identity()
    size = batch_size // count_micro_batches(batch_size, max_size)
    assert batch_size % size == 0
    assert size <= max(1, max_size)
    sizes = BatchSizes(size, size)
    for _ in range(10):
        smaller = halve(sizes, "training", batch_size=batch_size, model=model)
        assert batch_size % smaller.train == 0
        assert smaller == sizes or smaller.train <= sizes.train // 2
        assert smaller.eval == size
        sizes = smaller
    assert halve(sizes, "training", batch_size=batch_size, model=model) == sizes
    assert not has_norms or sizes.train >= min(2, size)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes."), True),
        (RuntimeError("C++ compile error\n\nOutput:\ncc1plus: out of memory allocating 65536 bytes"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def texts_in(package: str, files: str, pattern: bytes) -> list[str]:
    """The texts of a pattern in the installed files of a package: what it can print, not what we remember of it."""
    if (spec := importlib.util.find_spec(package)) is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    found: set[str] = set()
    for path in sorted(Path(next(iter(spec.submodule_search_locations))).glob(files)):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found.update(text.decode() for text in re.findall(pattern, content))
    if not found:
        pytest.skip(f"a build of {package} without {files}")
    return sorted(found)


def test_what_cudnn_says_without_memory():
    statuses = texts_in("nvidia", "*/lib/libcudnn_graph.so*", rb"CUDNN_STATUS_\w*ALLOC\w*FAILED")
    assert any("DEVICE" in status for status in statuses)
    assert all(is_out_of_memory(RuntimeError(f"cuDNN error: {status}")) for status in statuses)


def test_what_triton_says_without_memory():
    """Its launcher writes a prefix, then CUDA's description of the error."""
    prefixes = texts_in("triton", "backends/nvidia/driver.c", rb'prefix = "(Triton Error[^"]*)"')
    (description,) = texts_in("nvidia", "*/lib/libcudart.so.*", rb"\0(out of memory)\0")
    for prefix in prefixes:
        assert is_out_of_memory(RuntimeError(prefix + description))
        assert not is_out_of_memory(RuntimeError(prefix + "invalid argument"))


@pytest.mark.parametrize(
    ("free_gib", "cached_bytes", "expected"), [(0.5, 0, True), (40, 0, False), (0.5, 40 * 2**30, False)]
)
def test_no_convolution_fits_the_memory_that_is_left(
    free_gib: float, cached_bytes: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch swallows what each convolution lacked, and says the same where a GPU is too old for all of them."""
    # cuDNN's forward and backward plans: the rest of the file has other engines
    texts = texts_in("torch", "lib/libtorch_cuda.so", rb"(?:GET|FIND) was unable to find an engine[ \w]+")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    sizes = int(free_gib * 2**30), 80 * 2**30
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: sizes)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: 30 * 2**30 + cached_bytes)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: 30 * 2**30)
    assert [is_out_of_memory(RuntimeError(text)) for text in texts] == [expected] * 2


def test_no_convolution_without_a_device() -> None:
    assert not is_out_of_memory(RuntimeError("GET was unable to find an engine to execute this computation"))
