"""The device's seam, as far as a CPU shows it."""

import subprocess
import sys
import threading
import time

import pytest
import torch

from stoker.hardware.block_size import block_size, block_size_for_memory
from stoker.hardware.device import Device
from stoker_watch.recording.ledger import Ledger

FAULTS = """
import resource, sys
import torch
from stoker.hardware.cpu import configure_malloc
if sys.argv[1] == "keep":
    configure_malloc()


def step():
    return [torch.zeros(side * 2**20) for side in range(9, 14)]


for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_kept_for_the_next_step():
    """A step's 220 MiB cost 56,320 faults of a page, or 110 of a huge one, where they are given back after it."""

    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    given_back = faults("give back")
    if given_back < 1000:
        pytest.skip("this kernel does not count faults")
    assert faults("keep") < given_back / 2


def test_blocks_depend_on_the_memory_of_an_accelerator():
    assert block_size(torch.zeros(1)) < block_size_for_memory(10**9) == 2**23
    for gigabytes in (24, 80, 141):  # six fp32 numbers for each element
        assert block_size_for_memory(gigabytes * 10**9) * 6 * 4 == pytest.approx(gigabytes * 10**9 / 8)
    assert block_size_for_memory(10**12) == 2**30 == block_size(torch.zeros(1, device="meta"))


class LateDevice:
    """In torch's place: an accelerator that does what it was given late, and on which a host wait raises.

    Its own clock counts milliseconds from somewhere, as CUDA's does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began_s = time.perf_counter()
        self.late_s = 0.0
        self.made: list[LateEvent] = []
        self.may_wait = True
        monkeypatch.setattr(torch, "Event", lambda *_, **__: LateEvent(self))
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: self.wait())
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: None)

    def wait(self) -> None:
        assert self.may_wait, "the host waits for the device"


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.at_s: float | None = None
        device.made.append(self)

    def record(self, _: object) -> None:
        self.at_s = time.perf_counter() + self.device.late_s

    def query(self) -> bool:
        assert self.at_s is not None
        return self.at_s <= time.perf_counter()

    def synchronize(self) -> None:
        self.device.wait()

    def elapsed_time(self, later: "LateEvent") -> float:
        assert self.at_s is not None
        assert later.at_s is not None
        assert self.query(), "CUDA raises where one is not reached"
        assert later.query(), "CUDA raises where one is not reached"
        return (later.at_s - self.at_s) * 1e3


def test_a_thread_that_uses_a_stream_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread has GPU 0. Leaving a stream's block sets the device from before: on GPU 0 that makes a context."""
    current, history = threading.local(), list[int]()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device_index = device.index

        def __enter__(self) -> None:
            self.before = getattr(current, "index", 0)
            current.index = self.device_index

        def __exit__(self, *_: object) -> None:
            current.index = self.before
            history.append(self.before)

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: setattr(current, "index", index))
    stream = Device(torch.device("cuda", 1)).make_stream()

    def use() -> None:
        with stream.activate():
            assert current.index == 1

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert history == [1]


def test_thousands_of_steps_need_few_events_and_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = LateDevice(monkeypatch)
    ledger = Ledger(Device(torch.device("cuda", 0)).make_clock(), start_s=time.perf_counter())
    fake.may_wait = False
    for _ in range(3_000):
        with ledger.compute():
            pass
    prompt = len(fake.made)
    account = ledger.window(0.0)
    assert prompt <= 4, "each is free again when its step is seen done"
    assert account is not None
    assert account.host_bound_steps == 3_000
    assert sum(account.phases.values()) == pytest.approx(account.wall_s)


def test_nvtx_ranges_only_with_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = Device(torch.device("cuda", 0)), Device(torch.device("cpu"))
    for name in ("STOKER_NVTX", "NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert gpu.make_nvtx_ranges() is None
    for name in ("STOKER_NVTX", "NSYS_PROFILING_SESSION_ID"):
        monkeypatch.setenv(name, "1")
        assert gpu.make_nvtx_ranges() is not None
        assert cpu.make_nvtx_ranges() is None
        monkeypatch.delenv(name)


def test_cpu_needs_no_events() -> None:
    ledger = Ledger(Device(torch.device("cpu")).make_clock(), start_s=time.perf_counter())
    with ledger.compute():
        pass
    account = ledger.window(0.0)
    assert account is not None
    assert account.host_bound_steps is None
