"""Who decodes: a table of measured numbers and decisions, and the measuring itself, on a CPU."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.data.loading import device_decoder
from stoker.data.loading.device_decoder import choose_decoder, measure_and_choose_decoder
from stoker.hardware.device import Device
from tests.fixtures.data_device_batches import CMYK, COUNT, PNG, PROGRESSIVE, SmoothIndex
from tests.fixtures.torchcodec_fake import decoders as decoders

CPU = Device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("rates", "decoder", "why"),
    [
        ((10_000, 500, 1.0), "cpu", "the cores decode 10,000 images/s, steps take 500/s"),
        (
            (500, 1_250, 1.0),
            "nvjpeg",
            "the cores decode 500 images/s, steps take 1,250/s; nvJPEG supports 100 % of the images",
        ),
        ((1_000, 1_090, 1.0), "cpu", "the cores decode 1,000 images/s, steps take 1,090/s"),  # too little to gain
        ((1_000, 10_000, 0.4), "cpu", "but nvJPEG supports only 40 % of the images"),
        ((1_000, 10_000, 0.6), "nvjpeg", "nvJPEG supports 60 % of the images"),
    ],
)
def test_the_decision(rates: tuple[float, float, float], decoder: str, why: str) -> None:
    actual, reason = choose_decoder(*rates)
    assert (actual, why in reason) == (decoder, True), reason


class Other(Device):
    """A CPU that passes for a device without streams, so that it is measured."""

    is_cpu = has_streams = False


def decided(index: SmoothIndex, device: Device, step_s: float) -> tuple[str, str]:
    return measure_and_choose_decoder(
        index,
        np.arange(COUNT),
        device,
        image_size=(64, 64),
        resize="letterbox",
        measure_step_s=lambda: step_s,
    )


@pytest.fixture
def index(tmp_path: Path) -> SmoothIndex:
    return SmoothIndex(tmp_path)


@pytest.fixture(autouse=True)
def nothing_is_known_of_a_device() -> None:
    device_decoder._WORKING.clear()
    device_decoder.decoding_stream.cache_clear()


def test_on_a_cpu_it_is_the_host_and_nothing_is_measured(index: SmoothIndex) -> None:
    for image_index in range(COUNT):
        index.path(image_index).unlink()
    assert decided(index, CPU, 1.0) == ("cpu", "training is on the CPU")


def test_without_nvjpeg_it_is_the_host(index: SmoothIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    decoder, why = decided(index, Other(torch.device("cpu")), 1.0)
    assert decoder == "cpu"
    assert why.startswith("nvJPEG is not available: it needs torchcodec (`pip install 'stoker[nvjpeg]'`)")


def test_both_are_measured_on_the_runs_own_images(index: SmoothIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad ones are left out, what the device does not take counts as the host's."""
    index.damage(0, "empty")
    index.damage(12, "truncated")
    index.path(15).unlink()
    actual: list[tuple[float, float, float]] = []
    monkeypatch.setattr(device_decoder, "choose_decoder", lambda *rates: (actual.append(rates), real(*rates))[1])
    real = choose_decoder
    assert decided(index, Other(torch.device("cpu")), 100.0)[0] == "cpu"
    ((host_per_s, step_per_s, device_fraction),) = actual
    kept = COUNT - 2  # whose header can be read
    assert device_fraction == (kept - len((PNG, CMYK, PROGRESSIVE, 12))) / kept
    assert host_per_s > 0
    assert step_per_s == 0.01


def test_the_host_is_chosen_where_the_device_takes_none(index: SmoothIndex) -> None:
    for image_index in range(COUNT):
        if image_index != PNG:
            index.damage(image_index, "no end")
    decoder, why = decided(index, Other(torch.device("cpu")), 1e-9)
    assert decoder == "cpu"
    assert "supports only 0 % of the images" in why


def test_images_that_cannot_be_read_at_all_are_no_reason_to_stop(index: SmoothIndex) -> None:
    for image_index in range(COUNT):
        index.path(image_index).unlink()
    assert decided(index, Other(torch.device("cpu")), 1.0) == ("cpu", "no image could be measured")
