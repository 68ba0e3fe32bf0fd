"""nvJPEG on a real GPU: the images of the host, no wait in the training thread, nothing overwritten."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.config.settings import from_fields
from stoker.data.batch import Batch
from stoker.data.loading.device_decoder import measure_and_choose_decoder, unavailable_reason
from stoker.data.loading.loader import BUFFERS_IN_USE
from stoker.hardware.device import Device
from stoker.hardware.selection import select_device
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker_watch.runs.records import STEPS, read_lines
from stoker_watch.runs.schemas import StepWindow
from tests.drawn import draw
from tests.fixtures.data_device_batches import CMYK, COUNT, PNG, PROGRESSIVE, SmoothIndex
from tests.trainer.data.loading import PREFETCH_DEPTH, loader_threads, make

pytestmark = [
    pytest.mark.skipif(find_spec("torchcodec") is None, reason="needs the extra nvjpeg"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
NEAR = 4.0
"""Mean levels of 255 from the host: another resize, and chroma that is enlarged without libjpeg's smoothing."""


@pytest.fixture(scope="module")
def device() -> Device:
    return select_device("cuda")


@pytest.fixture
def images(tmp_path: Path) -> SmoothIndex:
    return SmoothIndex(tmp_path)


def stream(index: SmoothIndex, count: int, device: Device, **changes) -> list[Batch]:
    with make(index, device=device, image_size=(64, 96), **changes) as loader:
        return [Batch(*(tensor.cpu() for tensor in next(loader))) for _ in range(count)]


def test_this_build_has_nvjpeg(device: Device) -> None:
    assert unavailable_reason(device) is None


@pytest.mark.parametrize("crop", [0.0, 0.7])
def test_batches_are_those_of_the_host_but_for_a_few_levels(images: SmoothIndex, device: Device, crop: float) -> None:
    """Grey, all chroma samplings, all orientations of EXIF; PNG, CMYK and progressive are the host's own."""
    message: list[str] = []
    found = stream(images, 12, device, scale_jitter_prob=crop, jpeg_decoder="nvjpeg", on_tuned=message.append)
    expected = stream(images, 12, device, scale_jitter_prob=crop)
    for ours, theirs in zip(found, expected, strict=True):
        for name, a, b in zip(Batch._fields[1:], ours[1:], theirs[1:], strict=True):
            assert torch.equal(a, b), name
        for k, row in enumerate(ours.image_index.tolist()):
            height, width = ours.resized_size[k].tolist()
            apart = (ours.images[k].float() - theirs.images[k].float()).abs()
            assert apart[:, height:].sum() == apart[:, :, width:].sum() == 0, "padding"
            assert apart[:, :height, :width].mean() < (0.001 if row in (PNG, CMYK, PROGRESSIVE) else NEAR), row
    assert not [sentence for sentence in message if "refuses" in sentence]


def test_it_repeats_bit_for_bit(images: SmoothIndex, device: Device) -> None:
    first, second = (stream(images, 12, device, jpeg_decoder="nvjpeg", workers=workers) for workers in (1, 4))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_bad_images_are_in_quarantine_as_with_the_host(images: SmoothIndex, device: Device) -> None:
    bad = {0: "truncated", 6: "no end", 7: "a block of zeros", 12: "table", 13: "empty", 14: "another size"}
    for row, how in bad.items():
        images.damage(row, how)
    reported: dict[str, list] = {"cpu": [], "nvjpeg": []}
    for decoder, log in reported.items():
        stream(images, 12, device, jpeg_decoder=decoder, max_bad_fraction=1.0, on_quarantine=log.append)
    assert reported["nvjpeg"] == reported["cpu"]
    assert {one.image_index for one in reported["cpu"]} == bad.keys()


def test_the_training_thread_never_synchronizes_for_the_device(images: SmoothIndex, device: Device) -> None:
    """Batches that are made are handed over while the main stream is still at work on something long."""
    with make(images, device=device, image_size=(64, 96), jpeg_decoder="nvjpeg") as loader:
        next(loader)
        while loader.stats().ready < 4 * (
            PREFETCH_DEPTH + BUFFERS_IN_USE - 1
        ):  # all of the ring but what is handed out
            assert loader_threads()
        asleep = torch.Event(device.torch_device)
        torch.cuda._sleep(10**10)  # cycles: several seconds
        asleep.record(torch.accelerator.current_stream(device.torch_device))
        for _ in range(2):
            next(loader)
        assert not asleep.query()


def test_nothing_is_written_into_memory_that_is_still_read(images: SmoothIndex, device: Device) -> None:
    """While the device is busy for long, batches pile up behind it: each must still be what it was made as."""
    usual = stream(images, 24, device, jpeg_decoder="nvjpeg")
    matrix = torch.randn(8192, 8192, device=device.torch_device)
    sums = []
    with make(images, device=device, image_size=(64, 96), jpeg_decoder="nvjpeg") as loader:
        for _ in range(24):
            batch = next(loader)
            for _ in range(4):
                matrix = torch.tanh(matrix @ matrix)
            sums.append(batch.images.long().sum())  # issued now, done when the products are
            del batch
    assert [int(total) for total in sums] == [int(batch.images.long().sum()) for batch in usual]


def test_it_is_chosen_by_what_was_measured(images: SmoothIndex, device: Device) -> None:
    options = {"image_size": (64, 96), "resize": "letterbox"}
    decoder, why = measure_and_choose_decoder(images, np.arange(COUNT), device, **options, measure_step_s=lambda: 1e3)
    assert decoder == "cpu"
    assert "nvJPEG cannot" not in why
    _, why = measure_and_choose_decoder(images, np.arange(COUNT), device, **options, measure_step_s=lambda: 1e-9)
    assert "nvJPEG supports" in why


def test_a_training_with_it(tmp_path: Path) -> None:
    data = str(draw(tmp_path / "data", train=64))
    config = from_fields({"data": data, "model": "retinanet_tiny_fpn", "image_size": (64, 64), "batch_size": 8,
                          "max_duration": "100",
                          "device": "cuda", "jpeg_decoder": "nvjpeg"})  # fmt: skip
    result = train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    assert sum(window.window_steps for window in read_lines(result.run, STEPS, StepWindow)) == 100
