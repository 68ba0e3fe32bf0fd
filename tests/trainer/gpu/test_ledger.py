"""The ledger's marks beside CUPTI on a real GPU: how busy, how starved, at what price. Skipped without one."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.hardware.device import Device
from stoker.hardware.selection import select_device
from stoker.training.trace import WINDOW_STEPS, Tracer
from stoker_watch.recording.ledger import Ledger, TimeBreakdown
from stoker_watch.runs.records import TRACE_FILES, TRACES, RunFolder, read_lines
from stoker_watch.runs.schemas import TraceWindow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture(scope="module")
def device() -> Device:
    return select_device("cuda")


def say(kind: str, text: str, /, **data: Any) -> None:
    assert kind != "warning", (text, data)


class Work:
    """Products of matrices: `long_s` seconds of the device for some 20 µs of the host."""

    def __init__(self, device: Device, long_s: float) -> None:
        self.matrix = torch.randn(4096, 4096, device=device.torch_device, dtype=torch.bfloat16)
        for count in (3, 20):  # the first products choose their kernels
            device.synchronize()
            began_s = time.perf_counter()
            self.products(count)
            device.synchronize()
        self.count = max(1, round(long_s * 20 / (time.perf_counter() - began_s)))

    def products(self, count: int) -> None:
        for _ in range(count):
            self.matrix = torch.tanh(self.matrix @ self.matrix)

    def __call__(self) -> None:
        self.products(self.count)


def train(
    device: Device, steps: int, work: Callable[[], None], folder: Path, *, wait_s: float = 0.0
) -> tuple[TimeBreakdown, list[TraceWindow]]:
    """Steps with a wait for input before each, the middle ones under the profiler."""
    ledger = Ledger(device.make_clock(), start_s=time.perf_counter())
    tracer = Tracer(device, RunFolder(folder, 1), ledger, say)
    for step in range(steps):
        with ledger.phase("input_wait"):
            time.sleep(wait_s)
        with ledger.compute():
            work()
        if step == steps // 2:
            tracer.request()
        tracer.after_step(step + 1)
    device.synchronize()
    account = ledger.finish()
    tracer.close()
    assert account is not None
    return account, list(read_lines(folder, TRACES, TraceWindow))


def test_profiler_windows_see_the_share_that_the_marks_see(device: Device, tmp_path: Path):
    """The device has 20 ms of work and 30 ms without in each step."""
    work = Work(device, 0.02)
    account, (line,) = train(device, 60, work, tmp_path, wait_s=0.05)
    by_marks = account.phases["compute"] / (account.wall_s - account.phases.get("idle", 0.0))
    by_cupti = line.busy_s / line.wall_s
    assert line.window_steps == WINDOW_STEPS
    assert by_cupti == pytest.approx(by_marks, abs=0.05)
    assert line.launches == pytest.approx(2 * WINDOW_STEPS * work.count, rel=0.05)
    assert line.tensor_core_fraction is not None
    assert line.tensor_core_fraction > 0.5
    assert line.gaps[0].duration_s == pytest.approx(0.03, rel=0.5)
    assert (tmp_path / TRACE_FILES).is_dir()


def test_a_device_that_is_never_out_of_work_does_not_starve(device: Device, tmp_path: Path):
    account, (line,) = train(device, 200, Work(device, 0.01), tmp_path)
    assert account.host_bound_steps == pytest.approx(0, abs=4)  # the first, and those around the profiler
    assert line.busy_s > 0.9 * line.wall_s


def test_a_host_that_is_slow_inside_a_step_starves_the_device(device: Device, tmp_path: Path):
    """The marks call it computing; the count and the profiler's windows say that it is not."""
    work = Work(device, 0.0005)

    def slow() -> None:
        for _ in range(5):
            work()
            time.sleep(0.004)

    account, (line,) = train(device, 60, slow, tmp_path)
    assert account.phases["compute"] > 0.8 * (account.wall_s - account.phases.get("idle", 0.0))
    assert account.host_bound_steps == pytest.approx(60, abs=3)
    assert line.busy_s < 0.5 * line.wall_s
    assert line.gaps[0].duration_s > 0.002
    assert line.gaps[0].host_op == "", "Python"


def test_an_exchange_that_the_step_waits_for_is_what_it_takes_on_the_device(device: Device):
    """A stream of its own, as a collective's; the step's stream waits for it, the thread does not."""
    work, side = Work(device, 0.02), torch.Stream(device.torch_device)
    other = Work(device, 0.03)
    ledger = Ledger(device.make_clock(), start_s=time.perf_counter())
    for _ in range(20):
        with ledger.compute():
            work()
            with ledger.phase("comm"):
                side.wait_stream(torch.accelerator.current_stream())
                with side:
                    other()
                torch.accelerator.current_stream().wait_stream(side)
    device.synchronize()
    account = ledger.finish()
    assert account is not None
    assert account.phases["comm"] == pytest.approx(0.03 * 20, rel=0.15)
    assert account.phases["compute"] == pytest.approx(0.02 * 20, rel=0.15)


@pytest.mark.parametrize("long_s", [0.01, 0.0])
def test_the_ledger_costs_less_than_a_hundredth_of_a_step(device: Device, tmp_path: Path, long_s: float):
    """Against the same steps without, in turn; of 10 ms, and such as the host is just able to issue (3 ms)."""
    work = Work(device, long_s)
    pieces = 1 if long_s else 60

    def steps(ledger: Ledger | None, tracer: Tracer) -> float:
        device.synchronize()
        began_s = time.perf_counter()
        for number in range(20):
            if ledger is None:
                for _ in range(pieces):
                    work()
            else:
                with ledger.phase("input_wait"):
                    pass
                with ledger.compute():
                    for _ in range(pieces):
                        work()
                tracer.after_step(number)
                ledger.window()
        device.synchronize()
        return time.perf_counter() - began_s

    ledger = Ledger(device.make_clock(), start_s=time.perf_counter())
    tracer = Tracer(device, RunFolder(tmp_path, 1), ledger, say)
    ratios = [steps(ledger, tracer) / steps(None, tracer) for _ in range(25)]
    assert statistics.median(ratios) < 1.01, sorted(ratios)


def test_a_window_of_the_profiler_is_within_its_budget(device: Device, tmp_path: Path):
    ledger = Ledger(device.make_clock(), start_s=time.perf_counter())
    work = Work(device, 0.02)
    costs = []
    for _ in range(3):
        tracer = Tracer(device, RunFolder(tmp_path, 1), ledger, say)
        for step in range(20):
            if step == 5:
                tracer.request()
            with ledger.compute():
                work()
            tracer.after_step(step + 1)
        tracer.close()
        costs.append(tracer.cost_s)
    print("seconds that each profiler window cost:", costs)
    assert statistics.median(costs[1:]) < 0.9  # 0.3 % of five minutes
