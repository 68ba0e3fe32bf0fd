"""What trials of batch sizes found is used again, and only where it still holds."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.config.settings import Config, from_fields
from stoker.data.index import Index, open_index
from stoker.hardware.device import Device, DeviceMemory
from stoker.training.defaults import auto_batch
from tests.drawn import draw


@dataclasses.dataclass(frozen=True)
class FakeAccelerator(Device):
    free_bytes: int = 10**10
    total_bytes: int = 10**11

    @property
    def is_cpu(self) -> bool:
        return False

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=self.total_bytes, free=self.free_bytes, peak=0)


CPU_DEVICE = torch.device("cpu")
GPU = FakeAccelerator(CPU_DEVICE)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return open_index(draw(tmp_path_factory.mktemp("drawn"), train=8, val=4))


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Config]:
    """The settings of the trials that were made; each finds twice the images of the one before it."""
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    made: list[Config] = []

    def choose(config: Config, *_: Any, **__: Any) -> tuple[int, int, str]:
        made.append(config)
        return 2 ** len(made), 1, "tried"

    monkeypatch.setattr(auto_batch, "find_batch_size", choose)
    return made


SETTINGS = from_fields({"model": "ember_n", "image_size": (64, 64), "mosaic": 0.0})


def choose(config: Config, index: Index, device: Device, num_images: int = 8) -> int:
    return auto_batch.choose_batch_size(config, index, device, recipe_batch_size=16, num_images=num_images)[0]


def test_the_same_command_does_not_repeat_the_trials(index: Index, trials: list[Config]) -> None:
    assert choose(SETTINGS, index, GPU) == 2
    same = SETTINGS.replace(seed=7)
    assert auto_batch.choose_batch_size(same, index, GPU, recipe_batch_size=16, num_images=8) == (
        2, 1, "tried; found by an earlier run",
    )  # fmt: skip
    assert len(trials) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"config": SETTINGS.replace(image_size=(96, 64))},
        {"config": SETTINGS.replace(model="ember_s")},
        {"config": SETTINGS.replace(precision="bf16")},
        {"device": FakeAccelerator(CPU_DEVICE, free_bytes=9 * 10**9)},
        {"device": FakeAccelerator(CPU_DEVICE, free_bytes=11 * 10**9)},
        {"device": FakeAccelerator(CPU_DEVICE, total_bytes=2 * 10**11)},
        {"num_images": 4},
    ],
)
@pytest.mark.usefixtures("trials")
def test_another_trial_where_the_first_says_nothing(index: Index, changed: dict[str, Any]) -> None:
    choose(SETTINGS, index, GPU)
    assert choose(**{"config": SETTINGS, "index": index, "device": GPU} | changed) == 4


@pytest.mark.usefixtures("trials")
def test_a_new_version_of_torch_or_stoker_tries_again(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choose(SETTINGS, index, GPU)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert choose(SETTINGS, index, GPU) == 4
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(auto_batch, "PACKAGE", tmp_path)
    assert choose(SETTINGS, index, GPU) == 8


@pytest.mark.usefixtures("trials")
def test_a_damaged_file_is_replaced(index: Index, tmp_path: Path) -> None:
    choose(SETTINGS, index, GPU)
    (file,) = (tmp_path / "batch-sizes").iterdir()
    file.write_bytes(b'{"free_bytes": ')
    assert choose(SETTINGS, index, GPU) == 4
    assert choose(SETTINGS, index, GPU) == 4


def test_on_a_cpu_only_the_timed_trials_are_kept(index: Index, trials: list[Config]) -> None:
    cpu = Device(CPU_DEVICE)
    assert [choose(SETTINGS, index, cpu) for _ in range(2)] == [2, 4]
    assert len(trials) == 2
    assert choose(SETTINGS.replace(auto_batch=True), index, cpu) == 8
