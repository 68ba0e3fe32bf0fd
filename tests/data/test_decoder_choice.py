"""Who decodes: a table of measured numbers and decisions, and the measuring itself, on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.loading import device_decoder
from stoker.data.loading.device_decoder import DecoderTimings, choose_decoder, measure_and_choose_decoder
from stoker.hardware.device import Device
from tests.fixtures.data_device_batches import CMYK, COUNT, PNG, PROGRESSIVE, SmoothIndex

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")

CPU = Device(torch.device("cpu"))


@pytest.mark.parametrize(
    ("measured", "decoder", "why"),
    [
        (
            DecoderTimings(
                host_decode_s=1.5e-3, cores=15, step_s=2e-3, device_decode_s=1e-4, device_fraction=1.0, num_images=64
            ),
            "cpu",
            "the cores decode 10,000 images/s, steps take 500/s",
        ),
        (
            DecoderTimings(
                host_decode_s=2e-3, cores=1, step_s=0.8e-3, device_decode_s=0.2e-3, device_fraction=1.0, num_images=64
            ),
            "nvjpeg",
            "the cores decode 500 images/s, steps take 1,250/s; nvJPEG decodes 5,000/s: with it training reaches "
            "1,000/s or more",
        ),
        (
            # The cores feed nine tenths of it; nvJPEG would cost a fifth of the device.
            DecoderTimings(
                host_decode_s=1e-3, cores=1, step_s=0.9e-3, device_decode_s=0.2e-3, device_fraction=1.0, num_images=64
            ),
            "cpu",
            "the cores decode 1,000 images/s, steps take 1,111/s; nvJPEG decodes 5,000/s, which would leave 909/s: "
            "nothing to gain",
        ),
        (
            # Without JPEG engines it may be slower than the cores.
            DecoderTimings(
                host_decode_s=1e-3, cores=3, step_s=0.2e-3, device_decode_s=1e-3, device_fraction=1.0, num_images=64
            ),
            "cpu",
            "the cores decode 3,000 images/s, steps take 5,000/s; nvJPEG decodes 1,000/s, which would leave 833/s: "
            "nothing to gain",
        ),
        (
            DecoderTimings(host_decode_s=2e-3, cores=2, step_s=0.5e-3, num_images=20),
            "cpu",
            "the cores decode 1,000 images/s, steps take 2,000/s; but none of 20 images is a JPEG that nvJPEG supports",
        ),
        (
            # What the host still has to decode bounds it.
            DecoderTimings(
                host_decode_s=2e-3, cores=2, step_s=0.1e-3, device_decode_s=0.1e-3, device_fraction=0.5, num_images=64
            ),
            "nvjpeg",
            "the cores decode 1,000 images/s, steps take 10,000/s; nvJPEG decodes 10,000/s of the 50 % that it "
            "supports: with it training reaches 2,000/s or more",
        ),
        (
            DecoderTimings(
                host_decode_s=2e-3, cores=2, step_s=0.1e-3, device_decode_s=0.1e-3, device_fraction=0.05, num_images=64
            ),
            "cpu",
            "the cores decode 1,000 images/s, steps take 10,000/s; nvJPEG decodes 10,000/s of the 5 % that it "
            "supports, which would leave 1,053/s: nothing to gain",
        ),
    ],
)
def test_the_decision(measured: DecoderTimings, decoder: str, why: str) -> None:
    assert choose_decoder(measured) == (decoder, why)


SECONDS = st.floats(1e-6, 1.0)


@given(host_s=SECONDS, cores=st.integers(1, 200), step_s=SECONDS, device_s=SECONDS, share=st.floats(0.01, 1.0))
def test_more_cores_never_make_it_the_devices(
    host_s: float, cores: int, step_s: float, device_s: float, share: float
) -> None:
    def decoder(cores: int) -> str:
        return choose_decoder(
            DecoderTimings(
                host_decode_s=host_s,
                cores=cores,
                step_s=step_s,
                device_decode_s=device_s,
                device_fraction=share,
                num_images=64,
            )
        )[0]

    if decoder(cores + 1) == "nvjpeg":
        assert decoder(cores) == "nvjpeg"


class Other(Device):
    """A CPU that passes for a device, so that it is measured."""

    is_cpu = False


def decided(index: SmoothIndex, device: Device, step_s: float) -> tuple[str, str]:
    return measure_and_choose_decoder(
        index,
        np.arange(COUNT),
        device,
        image_size=(64, 64),
        resize="letterbox",
        batch_size=3,
        measure_step_s=lambda: step_s,
    )


@pytest.fixture
def index(tmp_path: Path) -> SmoothIndex:
    return SmoothIndex(tmp_path)


def test_on_a_cpu_it_is_the_host_and_nothing_is_measured(index: SmoothIndex) -> None:
    for image_index in range(COUNT):
        index.path(image_index).unlink()
    assert decided(index, CPU, 1.0) == ("cpu", "training is on the CPU")


def test_without_nvjpeg_it_is_the_host(index: SmoothIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torchvision.io, "decode_jpeg")
    decoder, why = decided(index, Other(torch.device("cpu")), 1.0)
    assert decoder == "cpu"
    assert why == f"nvJPEG is not available: torchvision {torchvision.__version__} no longer has decode_jpeg"


def test_both_are_measured_on_the_runs_own_images(index: SmoothIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad ones are left out, what the device does not take counts as the host's."""
    index.damage(0, "empty")
    index.damage(12, "truncated")
    index.path(15).unlink()
    actual: list[DecoderTimings] = []
    monkeypatch.setattr(device_decoder, "choose_decoder", lambda measured: (actual.append(measured), real(measured))[1])
    real = choose_decoder
    monkeypatch.setattr(device_decoder, "host_cores", lambda: 5)
    assert decided(index, Other(torch.device("cpu")), 100.0)[0] == "cpu"
    (measured,) = actual
    kept = COUNT - 2  # whose header can be read
    assert measured.num_images == kept
    assert measured.device_fraction == (kept - len((PNG, CMYK, PROGRESSIVE, 12))) / kept
    assert (measured.cores, measured.step_s) == (4, 100.0)
    assert measured.device_decode_s is not None
    assert min(measured.host_decode_s, measured.device_decode_s) > 0


def test_the_host_is_chosen_where_the_device_takes_none(index: SmoothIndex) -> None:
    for image_index in range(COUNT):
        if image_index != PNG:
            index.damage(image_index, "no end")
    decoder, why = decided(index, Other(torch.device("cpu")), 1e-9)
    assert decoder == "cpu"
    assert "none of 16 images is a JPEG" in why


def test_images_that_cannot_be_read_at_all_are_no_reason_to_stop(index: SmoothIndex) -> None:
    for image_index in range(COUNT):
        index.path(image_index).unlink()
    assert decided(index, Other(torch.device("cpu")), 1.0) == ("cpu", "no image could be measured")
