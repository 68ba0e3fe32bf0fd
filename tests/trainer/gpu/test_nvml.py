"""What the driver says of a real GPU, beside work whose size is known. The units of the GPM counters rest on this."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from stoker_watch.recording.telemetry.gpu import GpuSampler  # noqa: E402
from stoker_watch.recording.telemetry.sampler import DriverSampler  # noqa: E402
from stoker_watch.runs.records import EVENTS, RunFolder, read_lines  # noqa: E402
from stoker_watch.runs.schemas import Event, GpuSample  # noqa: E402


def during(work: Callable[[], object], *, for_s: float = 2.0) -> tuple[GpuSample, int, float]:
    """(the first GPU's sample of that time, how often the work was done, seconds)"""
    gpus = GpuSampler()
    work()
    torch.cuda.synchronize()
    gpus.sample()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < for_s:
        work()
        count += 1
        if count % 8 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began
    return gpus.sample()[0], count, took_s


def has_gpm() -> None:
    sampler = GpuSampler()
    sampler.sample()
    if sampler.sample()[0].sm_active is None:
        pytest.skip("GPM counters begin with Hopper")


def test_a_gpu_that_multiplies_has_busy_multiprocessors_and_tensor_cores() -> None:
    has_gpm()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    sample, _, _ = during(lambda: a @ a)
    assert sample.sm_active is not None
    assert sample.sm_active > 0.8
    assert sample.tensor_active is not None
    assert sample.tensor_active > 0.4


def test_a_gpu_that_does_nothing_has_idle_multiprocessors() -> None:
    has_gpm()
    sample, _, _ = during(lambda: time.sleep(0.05))
    assert sample.sm_active is not None
    assert sample.sm_active < 0.05


def test_the_telemetry_opens_listens_and_ends(tmp_path: Path) -> None:
    with contextlib.closing(DriverSampler(RunFolder(tmp_path, 1))) as driver:
        deadline = time.monotonic() + 60
        while not (samples := driver.sample()) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert samples
    assert samples[0].memory_total_bytes
    assert [event.text for event in read_lines(tmp_path, EVENTS, Event)] == []
