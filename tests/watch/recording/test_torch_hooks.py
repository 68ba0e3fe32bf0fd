"""What is learnt from torch without the loop's help, and that torch is as before afterwards."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import stoker_watch
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.recording.ledger import Ledger
from stoker_watch.recording.torch_device import HOST_CLOCK

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo.callback")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_saving_is_a_checkpoint_and_torch_is_as_before_afterwards(run: Path) -> None:
    class Slow:
        def __reduce__(self) -> tuple[object, ...]:
            time.sleep(0.05)
            return (int, ())

    before = torch.save
    with stoker_watch.measure(run) as m:
        start_s = time.perf_counter()
        with m.step():
            assert torch.save is not before
            torch.save({"a": Slow()}, run / "a.pt")
        step_s = time.perf_counter() - start_s
        torch.save({"a": Slow()}, run / "b.pt")
    assert torch.save is before
    assert torch.load(run / "b.pt", weights_only=False) == {"a": 0}
    assert read_run(run).totals.phases["checkpoint"] >= 0.1
    assert read_run(run).totals.phases["compute"] <= step_s - 0.05, "the save is not part of the step"


def test_compiling_is_seen_wherever_it_happens(run: Path) -> None:
    handler = torch._dynamo.callback.callback_handler

    def compile_for(seconds: float) -> None:
        with handler.install_callbacks(torch._dynamo.callback.CallbackTrigger.DYNAMO, "0"):
            time.sleep(seconds)

    with stoker_watch.measure(run) as m:
        start_s = time.perf_counter()
        with m.step():
            compile_for(0.05)
        step_s = time.perf_counter() - start_s
        compile_for(0.03)
    assert read_run(run).totals.phases["compile"] >= 0.08
    assert read_run(run).totals.phases["compute"] <= step_s - 0.05, "the compilation is not part of the step"
    assert handler.start_callbacks == handler.end_callbacks == []


@pytest.mark.slow
def test_a_real_compilation_is_seen(run: Path) -> None:
    @torch.compile(backend="aot_eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).relu()

    with stoker_watch.measure(run) as m:
        for _ in range(2):
            with m.step():
                double(torch.ones(3, requires_grad=True)).sum().backward()
    assert read_run(run).totals.phases["compile"] > read_run(run).totals.phases["compute"]
    torch._dynamo.reset()


class Device:
    """An accelerator that is a second late."""

    on_host = False

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.moments = now, [5.0, 9.0]

    def make_clock(self) -> "Device":
        return self

    def record_event(self) -> float:
        return self.moments.pop(0)

    def resolve(self, event: float) -> float | None:
        return event if event <= self.now() else None


def test_a_device_that_comes_later_has_its_own_clock_from_then_on() -> None:
    now_s = 0.0
    ledger = Ledger(HOST_CLOCK, start_s=0.0, now=lambda: now_s)
    with ledger.compute():
        now_s = 3.0
    ledger.clock = Device(lambda: now_s)  # type: ignore[assignment]
    now_s = 4.0
    with ledger.compute():
        now_s = 9.0
    account = ledger.window(0.0)
    assert account is not None
    assert account.phases == {"compute": 7.0, "unattributed": 1.0, "host": 1.0}


def test_a_gpu_that_the_loop_does_not_use_is_not_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched() -> None:
        raise AssertionError("it was asked for")

    def built_for(check_available: bool = False) -> torch.device:
        assert not check_available, "CUDA would refuse to work in children that are forked off from now on"
        return torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for)
    for name in ("is_available", "device_count", "current_device_index"):
        monkeypatch.setattr(torch.accelerator, name, touched)
    with stoker_watch.measure(run) as m, m.step():
        pass
    assert read_run(run).totals.steps == 1
