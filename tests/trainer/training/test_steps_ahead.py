"""How far the host may issue steps ahead of the device: on a device whose work ends late, and in a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stoker.hardware.device import Device, ReadyEvent
from stoker.hardware.host_sync import allowed_host_syncs
from stoker.training.local_ranks import TrainOptions
from stoker.training.parallel import SingleProcess
from stoker.training.run import train
from stoker_watch.recording.ledger import Ledger
from tests.drawn import draw
from tests.fixtures.training_cuda_graph import Work
from tests.fixtures.training_run import settings
from tests.trainer.training.parallels import ignore, make_setup


class LateDevice:
    """A host clock that moves only when told, and a device that takes its work in order, as `torch.device("cpu")`.
    It is the clock of a ledger too, and its own event."""

    has_streams, on_host, is_cpu = True, False, False
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.now_s = self.free_s = 0.0
        self.idle_s: list[float] = []

    def work(self, seconds: float) -> None:
        self.idle_s.append(max(0.0, self.now_s - self.free_s))
        self.free_s = max(self.now_s, self.free_s) + seconds

    def record_event(self) -> float:
        return max(self.now_s, self.free_s)

    def resolve(self, at_s: float) -> float | None:
        return at_s if at_s <= self.now_s else None

    def record_issued(self) -> ReadyEvent:
        return LateEvent(self, self.record_event())

    def make_stream(self) -> None:
        """It copies nothing."""

    def autocast(self, _: str) -> None:
        """It computes nothing."""


class LateEvent(ReadyEvent):
    def __init__(self, device: LateDevice, at_s: float) -> None:
        self.device, self.at_s = device, at_s

    def synchronize(self) -> None:
        assert allowed_host_syncs()
        self.device.now_s = max(self.device.now_s, self.at_s)


@pytest.mark.parametrize(("host_s", "hiccup_s"), [(0.01, 0.0), (0.01, 1.5), (3.0, 0.0)])
def test_the_host_is_two_steps_ahead_and_the_device_never_waits_for_it(host_s: float, hiccup_s: float) -> None:
    """A step takes the device a second, a replay the host hundredths. A delay of a step and a half costs nothing, and
    nothing is waited for where the host is slower. What is waited for is `compute` in the ledger, not a loss."""
    device, work = LateDevice(), Work("retinanet_tiny_fpn", "sgd", 1)
    parallel = SingleProcess(make_setup(work.model, work.optimizer, SimpleNamespace(), device), ignore)  # type: ignore[arg-type]
    ledger, ahead = Ledger(device, start_s=0.0, now=lambda: device.now_s), []
    for step in range(20):
        with ledger.compute():
            device.now_s += host_s + hiccup_s * (step == 10)
            device.work(1.0)
            parallel.limit_steps_ahead()
        ahead.append(device.free_s - device.now_s)
    window = ledger.window(0.0)
    assert window is not None
    if host_s < 1:
        assert ahead[0] == 1.0
        assert max(ahead) == pytest.approx(2.0, abs=2 * host_s)
        assert device.idle_s[1:] == [0.0] * 19
        assert window.phases == {"compute": pytest.approx(window.wall_s)}
    else:
        assert device.now_s == 20 * host_s, "the host has waited for nothing"


def test_each_step_of_a_run_waits_for_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def record(_: Device) -> ReadyEvent:
        step = sum(entry.startswith("issued") for entry in log)
        log.append(f"issued {step}")
        event = ReadyEvent(None)
        event.synchronize = lambda: log.append(f"waited for {step}")  # type: ignore[method-assign]
        return event

    monkeypatch.setattr(Device, "record_issued", record)
    train(settings(draw(tmp_path / "shapes"), max_duration="5"), TrainOptions(run_dir=str(tmp_path / "run")))
    assert log == [
        "issued 0", "issued 1", "issued 2", "waited for 0", "issued 3", "waited for 1", "issued 4", "waited for 2",
    ]  # fmt: skip
