"""Losses that lie on a device, and how many images a batch has."""

import math
from collections import UserDict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.recording.hook.stoker_hook.instruments import count_images
from stoker_watch.recording.torch_hooks import ScalarLogger

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")


class SlowStream:
    """Copies that are there when they are told to be; a device of the tests, since tensors of a real one are not."""

    torch_device = torch.device("cuda:0")

    def __init__(self) -> None:
        self.arrived = False
        self.waited = False

    def scalars_to_host(self, values: list[list[torch.Tensor]]) -> "SlowStream":
        self.arrived = False
        self.tensors = [torch.stack([value.as_subclass(torch.Tensor) for value in one]) for one in values]
        return self

    def done(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.waited = self.arrived = True


class OnDevice(torch.Tensor):
    """A tensor that says it lies on an accelerator."""

    device = torch.device("cuda:0")  # type: ignore[assignment]

    def to(self, *_: object) -> "OnDevice":  # type: ignore[override]
        return self


def on_device(value: float) -> torch.Tensor:
    return torch.tensor(value).as_subclass(OnDevice)


def test_a_device_loss_is_in_a_later_line_without_a_wait() -> None:
    logged, device = ScalarLogger(), SlowStream()
    for value in (1.0, 3.0):
        logged.add({"loss": on_device(value), "lr": 0.5})
    assert logged.take(device) == ({"losses": {}, "lr": 0.5, "grad_norm": None}, None)  # type: ignore[arg-type]
    logged.add({"loss": on_device(10.0)})
    assert logged.take(device)[0]["losses"] == {}, "the copies of the window before are still under way"  # type: ignore[arg-type]
    device.arrived = True
    assert logged.take(device)[0]["losses"] == {"total": 2.0}  # type: ignore[arg-type]
    assert not device.waited
    assert logged.take(device, wait=True)[0]["losses"] == {"total": 10.0}  # type: ignore[arg-type]
    assert logged.take(device, wait=True)[0]["losses"] == {}  # type: ignore[arg-type]


def test_later_changes_of_the_loss_tensor_do_not_matter() -> None:
    logged, device = ScalarLogger(), SlowStream()
    loss = on_device(1.0)
    logged.add({"loss": loss})
    loss.zero_()
    assert logged.take(device, wait=True)[0]["losses"] == {"total": 1.0}  # type: ignore[arg-type]


def test_losses_of_an_unknown_device_do_not_accumulate() -> None:
    logged, device = ScalarLogger(), SlowStream()
    for value in range(100):
        logged.add({"loss": on_device(value)})
        assert logged.take(None)[0]["losses"] == {}
    assert logged.take(device, wait=True)[0]["losses"] == {"total": 99.0}  # type: ignore[arg-type]


@given(st.lists(st.floats(width=32), min_size=1))
def test_means_are_over_the_finite_values(values: list[float]) -> None:
    logged = ScalarLogger()
    for value in values:
        logged.add({"loss": torch.tensor(value), "grad_norm": value})
    finite = [value for value in values if math.isfinite(value)]
    reading, not_finite = logged.take(None)
    assert (not_finite is not None) is (len(finite) < len(values))
    if finite:
        assert reading["losses"]["total"] == pytest.approx(sum(finite) / len(finite), rel=1e-5)
        assert reading["grad_norm"] == reading["losses"]["total"]
    else:
        assert (reading["losses"], reading["grad_norm"]) == ({}, None)


Pair = namedtuple("Pair", "images boxes")
T, SEQUENCES, VOLUME, GRAY, PIL = (
    torch.zeros(6, 3, 8, 8), torch.zeros(16, 24, 24), torch.zeros(1, 9, 9, 9), torch.zeros(9, 8), Image.new("L", (8, 8))
)  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "images"),
    [
        (torch.zeros(5, 3, 8, 8), 5),
        (np.zeros((4, 2)), 4),
        ([torch.zeros(3, 2), torch.zeros(3)], 3),
        ((torch.zeros(3, 2), [1, 2, 3]), 3),
        (([torch.zeros(3, 8, 8)] * 2, [{}, {}]), 2),
        ([(torch.zeros(3, 8, 8), {})] * 7, 7),
        ([{"image": torch.zeros(3, 8, 8)}] * 7, 7),
        ({"name": "a", "pixels": torch.zeros(6, 1)}, 6),
        (UserDict(pixels=torch.zeros(6, 1)), 6),
        (Pair(torch.zeros(2, 3), torch.zeros(2, 4)), 2),
        (torch.tensor(1.0), 0),
        ("text", 0),
        ([], 0),
        (7, 0),
        (None, 0),
        (((torch.zeros(3, 8, 8),), ({},)), 1),
        ([torch.zeros(3, 8, 8)] * 5, 5),
        ((torch.zeros(32, 20, 4),) * 4, 32),
        ([torch.zeros(32, 5, 3), torch.zeros(32, 20, 8), torch.zeros(32, 20, 1), torch.zeros(32, 1, 1)], 32),
        ([SEQUENCES, SEQUENCES, SEQUENCES], 16),
        ([torch.zeros(32, 128)] * 5, 32),
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 9), torch.zeros(3, 7, 8)], 3),
        ([np.zeros((64, 80, 3))] * 5, 5),
        ([torch.zeros(8, 9), torch.zeros(9, 9), torch.zeros(7, 8), torch.zeros(8, 8)], 4),
        ({"epoch": 3, "image": T}, 6),
        ({"mask": None, "image": T}, 6),
        ({"epoch": torch.tensor(3), "image": T}, 6),
        ({"inputs": {"image": T}, "labels": torch.zeros(6)}, 6),
        (("a name", T), 6),
        ((3, T), 6),
        ([None, T], 6),
        ([("a.png", "b.png"), T[:2]], 2),
        (({"image": T, "size": T}, torch.zeros(6)), 6),
        ([{"image": T}, torch.zeros(6)], 6),
        (({"image": T}, {"boxes": [{}] * 6}), 6),
        ([{"image": T[0]}, {"image": T[0]}], 2),
        (tuple(zip(*[(VOLUME, 1)] * 7, strict=True)), 7),
        (tuple(zip(*[(GRAY, 1)] * 7, strict=True)), 7),
        (tuple(zip(*[(PIL, 1)] * 7, strict=True)), 7),
        (tuple(zip(*[(T[0], {})] * 7, strict=True)), 7),
        (tuple(zip(*[(T[0], T[0])] * 7, strict=True)), 7),
        ([(T[0], T[0])] * 7, 7),
        ([[T[0], 1]] * 7, 7),
        (([PIL] * 5, [1] * 5), 5),
        (([GRAY] * 5, [1] * 5), 5),
        ([PIL] * 5, 5),
    ],
)
def test_a_batch_is_as_long_as_its_first_column(batch: object, images: int) -> None:
    assert count_images(batch) == images
