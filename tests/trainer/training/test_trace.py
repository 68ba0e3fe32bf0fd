"""Profiler windows taken while something trains: when, what they cost, and that nothing they meet ends the training.

The profiler of torch is real where the host is looked at. What it would record of a GPU is simulated.
"""

import collections
import contextlib
import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker.hardware.device import Device
from stoker.training import trace
from stoker.training.trace import (
    BUDGET_FRACTION,
    EVERY_S,
    FIRST_STEP,
    MAX_CHROME_TRACES,
    WINDOW_STEPS,
    Tracer,
    make_profiler,
    read_events,
)
from stoker_watch.runs.records import TRACE_FILES, TRACES, RunFolder, read_lines
from stoker_watch.runs.schemas import TraceWindow

CPU, GPU = Device(torch.device("cpu")), Device(torch.device("cuda", 0))


class Run:
    """A training around a tracer, on a clock that moves only when told."""

    def __init__(self, path: Path, device: Device, *, chrome: bool = False) -> None:
        self.now_s = 0.0
        self.step = 0
        self.said: list[tuple[str, str]] = []
        self.phases: collections.Counter[str] = collections.Counter()
        self.folder = RunFolder(path, 2)
        self.tracer = Tracer(device, self.folder, self, self.say, chrome=chrome, now=lambda: self.now_s)

    def say(self, kind: str, text: str, /, **_: Any) -> None:
        self.said.append((kind, text))

    @contextlib.contextmanager
    def phase(self, name: str, /) -> Iterator[None]:
        began_s = self.now_s
        yield
        self.phases[name] += self.now_s - began_s

    def steps(self, count: int, took_s: float, work: Callable[[], None] = lambda: None) -> None:
        for _ in range(count):
            work()
            self.now_s += took_s
            self.step += 1
            self.tracer.after_step(self.step)

    def settle(self) -> None:
        """Lets the thread that makes a line end, as it does long before the next window."""
        if self.tracer._writer is not None:
            self.tracer._writer.join()


class Cupti:
    """In the profiler's place: a GPU whose step is a launch, a kernel of 3 ms and a gap of 1 ms (simulated)."""

    created = 0
    costs_s = 0.0
    run: Run | None = None
    broken = ""

    def __init__(self, kind: str) -> None:
        assert kind == "cuda"
        Cupti.created += 1
        if self.broken == "start":
            raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")
        self.began_ns = time.time_ns()

    def __enter__(self) -> None:
        assert self.run is not None
        self.run.now_s += self.costs_s / 2

    def __exit__(self, *_: object) -> None:
        assert self.run is not None
        self.run.now_s += self.costs_s / 2
        if self.broken == "stop":
            raise RuntimeError("CUPTI_ERROR_UNKNOWN")
        self.kineto_results = SimpleNamespace(events=lambda: [] if self.broken == "silent" else self.events())

    def events(self) -> list[Any]:
        at_ns = time.time_ns() + 1_000_000_000
        rows = []
        for n in range(4):
            rows.append(("CPU", "cudaLaunchKernel", at_ns + n * 4_000_000, 5_000, n + 1, False))
            rows.append(("CUDA", "sm90_s16816gemm", at_ns + n * 4_000_000 + 10_000, 3_000_000, n + 1, False))
            rows.append(("CUDA", "stoker", at_ns, 99_000_000, 0, True))  # an annotation is no work
        return [event(*row) for row in rows]


def event(device: str, name: str, start_ns: int, took_ns: int, correlation: int, annotation: bool) -> Any:
    values = {
        "device_type": SimpleNamespace(name=device), "name": name, "start_ns": start_ns, "duration_ns": took_ns,
        "correlation_id": correlation, "is_user_annotation": annotation,
    }  # fmt: skip
    return SimpleNamespace(**{key: (lambda value=value: value) for key, value in values.items()})


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(trace, "make_profiler", Cupti)
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)  # real seconds would count against a budget of simulated ones
    for name in ("STOKER_NVTX", "NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    run = Run(tmp_path, GPU)
    monkeypatch.setattr(Cupti, "run", run)
    monkeypatch.setattr(Cupti, "created", 0)
    yield run
    run.tracer.close()


def lines(run: Run) -> list[TraceWindow]:
    run.settle()
    return list(read_lines(run.folder.path, TRACES, TraceWindow))


def test_a_window_is_taken_when_training_is_steady_and_again_after_minutes(gpu: Run) -> None:
    gpu.steps(FIRST_STEP, 0.1)
    assert Cupti.created == 0, "not in the first minute"
    gpu.steps(700, 0.1)
    (line,) = lines(gpu)
    assert (line.attempt, line.step, line.window_steps, line.launches) == (2, 600 + WINDOW_STEPS + 1, WINDOW_STEPS, 4)
    assert line.busy_s == pytest.approx(0.012)
    assert sorted(gap.duration_s for gap in line.gaps)[:3] == [pytest.approx(0.001)] * 3
    assert line.tensor_core_fraction == 1
    gpu.steps(int(2 * EVERY_S / 0.1), 0.1, gpu.settle)
    assert len(lines(gpu)) == 3
    assert gpu.said == []


def test_a_window_says_how_much_it_slowed_its_steps(gpu: Run) -> None:
    gpu.steps(600, 0.1)
    assert Cupti.created == 1
    gpu.steps(WINDOW_STEPS + 1, 0.13)
    (line,) = lines(gpu)
    assert line.slowdown == pytest.approx(1.3)
    gpu.steps(int(EVERY_S / 0.1) + WINDOW_STEPS + 2, 0.1, gpu.settle)
    assert lines(gpu)[1].slowdown == pytest.approx(1.0)


def test_windows_that_cost_more_come_less_often(gpu: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cupti, "costs_s", 3.0)
    gpu.steps(100_000, 0.1, gpu.settle)
    assert gpu.now_s > 10_000
    assert 3 * Cupti.created <= BUDGET_FRACTION * gpu.now_s + 3
    assert Cupti.created >= 0.8 * BUDGET_FRACTION * gpu.now_s / 3
    assert gpu.phases == {"idle": pytest.approx(3 * Cupti.created)}


def test_what_is_no_step_is_in_no_window(gpu: Run) -> None:
    gpu.steps(601, 0.1)
    assert Cupti.created == 1
    gpu.tracer.abandon()
    gpu.steps(100, 0.1)
    assert lines(gpu) == []
    gpu.steps(4_000, 0.1)
    assert len(lines(gpu)) == 1


@pytest.mark.parametrize("broken", ["start", "stop"])
def test_a_profiler_that_fails_is_said_once_and_training_goes_on(
    gpu: Run, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(Cupti, "broken", broken)
    gpu.steps(20_000, 0.1, gpu.settle)
    ((kind, text),) = gpu.said
    assert (kind, Cupti.created) == ("warning", 1)
    assert "CUPTI_ERROR" in text


def test_a_profiler_that_sees_no_kernel_is_said(gpu: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cupti, "broken", "silent")
    gpu.steps(20_000, 0.1, gpu.settle)
    assert lines(gpu) == []
    assert [kind for kind, _ in gpu.said] == ["warning"]
    assert Cupti.created == 1


def test_nsight_keeps_its_place(gpu: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    run = Run(gpu.folder.path, GPU)
    run.steps(2_000, 0.1)
    assert Cupti.created == 0


def work() -> None:
    layer = torch.nn.Conv2d(3, 4, 3)
    layer(torch.ones(1, 3, 16, 16)).sum().backward()


def test_a_cpu_is_traced_only_when_asked_and_only_as_a_chrome_trace(tmp_path: Path) -> None:
    run = Run(tmp_path, CPU)
    run.steps(1_000, 0.1)
    assert not (tmp_path / TRACE_FILES).exists()
    run.tracer.request()
    run.steps(WINDOW_STEPS + 2, 0.1, work)
    run.tracer.close()
    (path,) = (tmp_path / TRACE_FILES).iterdir()
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"aten::conv2d", "aten::convolution_backward"} <= names
    assert not (tmp_path / TRACES).exists()
    ((kind, text),) = run.said
    assert (kind, path.name in text, "steps 1,002 to 1,006" in text) == ("info", True, True)


def test_chrome_traces_of_a_run_begin_when_it_is_steady_and_go_on_within_the_budget(tmp_path: Path) -> None:
    run = Run(tmp_path, CPU, chrome=True)
    run.steps(FIRST_STEP + WINDOW_STEPS + 1, 0.1)
    run.settle()
    assert len(list((tmp_path / TRACE_FILES).iterdir())) == 1
    run.steps(int(EVERY_S / 0.1) + WINDOW_STEPS + 1, 0.1)
    run.tracer.close()
    assert len(list((tmp_path / TRACE_FILES).iterdir())) == 2


def test_chrome_traces_are_bounded(tmp_path: Path) -> None:
    run = Run(tmp_path, CPU)
    for _ in range(MAX_CHROME_TRACES + 3):
        run.tracer.request()
        run.steps(WINDOW_STEPS + 2, 0.1)
        run.settle()
    run.tracer.close()
    kept = sorted(path.name for path in (tmp_path / TRACE_FILES).iterdir())
    assert len(kept) == MAX_CHROME_TRACES
    assert kept[-1] == f"attempt-2-step-{run.step:08d}.json.gz"


def test_what_torch_records_can_be_read() -> None:
    """The part of torch that is not promised: where it changes, this fails, and runs say a warning."""
    base_ns = time.time_ns()
    with make_profiler(None) as profiler:
        work()
    found = read_events(profiler, base_ns)
    assert {"aten::conv2d", "aten::convolution_backward"} <= {moment.name for moment in found}
    assert {moment.kind for moment in found} == {"op"}
    assert all(0 <= moment.start_s < 60 for moment in found), "Unix time"


def test_on_cuda_it_collects_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what torch chooses when the profiler is made; it is not started, as there is no device."""
    kinds = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.autograd.profiler, "_supported_activities", lambda: kinds)
    profiler = make_profiler("cuda")
    assert profiler.profiler_kind == torch.autograd.profiler.ProfilerState.KINETO
    assert profiler.kineto_activities == kinds
