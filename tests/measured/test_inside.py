"""What is learnt from torch without the loop's help, and that torch is as before afterwards."""

import time
from pathlib import Path

import pytest
import torch
import torch._dynamo.callback

import stoker
from stoker.measured.inside import LateClock
from stoker.totals import totals


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_saving_is_a_checkpoint_and_torch_is_as_before_afterwards(run: Path) -> None:
    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            time.sleep(0.05)
            return (int, ())

    before = torch.save
    with stoker.measure(run) as m:
        with m.step():
            assert torch.save is not before
            torch.save({"a": Slow()}, run / "a.pt")
        torch.save({"a": Slow()}, run / "b.pt")
    assert torch.save is before
    assert torch.load(run / "b.pt", weights_only=False) == {"a": 0}
    assert totals(run).phases["checkpoint"] >= 0.1
    assert totals(run).phases["compute"] < 0.05


def test_compiling_is_seen_wherever_it_happens(run: Path) -> None:
    handler = torch._dynamo.callback.callback_handler

    def compile_for(seconds: float) -> None:
        with handler.install_callbacks(torch._dynamo.callback.CallbackTrigger.DYNAMO, "0"):
            time.sleep(seconds)

    with stoker.measure(run) as m:
        with m.step():
            compile_for(0.05)
        compile_for(0.03)
    assert totals(run).phases["compile"] >= 0.08
    assert totals(run).phases["compute"] < 0.05
    assert handler.start_callbacks == handler.end_callbacks == []


@pytest.mark.slow
def test_a_real_compilation_is_seen(run: Path) -> None:
    @torch.compile(backend="aot_eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).relu()

    with stoker.measure(run) as m:
        for _ in range(2):
            with m.step():
                double(torch.ones(3, requires_grad=True)).sum().backward()
    assert totals(run).phases["compile"] > totals(run).phases["compute"]
    torch._dynamo.reset()


class Device:
    """An accelerator whose marks are numbers."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def make_clock(self) -> "Device":
        return self

    def mark(self) -> str:
        return "5.0"

    def resolve(self, mark: str) -> float:
        return float(mark)

    def drop(self, mark: str) -> None:
        self.dropped.append(mark)


def test_marks_of_the_host_are_resolved_also_when_a_device_has_come() -> None:
    clock, device = LateClock(), Device()
    early = clock.mark()
    assert clock.on_host
    clock.follow(device)  # type: ignore[arg-type]
    assert not clock.on_host
    assert clock.resolve(early) == early
    assert clock.resolve(clock.mark()) == 5.0
    clock.drop(early)
    clock.drop(clock.mark())
    assert device.dropped == ["5.0"]
