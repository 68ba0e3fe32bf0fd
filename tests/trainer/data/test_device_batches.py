"""Decoding on the device, by the same code on a CPU: what a run sees is as with the host, but for a few levels."""

import itertools
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from stoker.data.batch import PAD_COLOR, Batch
from stoker.data.images.headers import parse_header
from stoker.data.loading import device_decoder
from stoker.data.loading.device_decoder import is_device_decodable
from stoker.data.loading.samples import BatchTask
from stoker.data.loading.stats import Counters
from stoker.hardware.device import Device, ReadyEvent, SideStream
from stoker.training.defaults import checks
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker_watch.errors import DataError, PreflightError
from tests.drawn import draw
from tests.fixtures.data_device_batches import CMYK, COUNT, PNG, PROGRESSIVE, SmoothIndex, smooth_image
from tests.fixtures.torchcodec_fake import decoders as decoders
from tests.fixtures.training_run import settings
from tests.trainer.data.loading import InMemoryIndex, assert_same, image_indices_of, make, take, wait_until_full

NEAR = 3.0
"""Mean levels of 255 between the two, on smooth images. The host decodes at 1/2 … 1/8 and rounds regions to that."""


@pytest.fixture
def index(tmp_path: Path) -> SmoothIndex:
    return SmoothIndex(tmp_path)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stoker-loader")]


@pytest.fixture(autouse=True)
def no_log_is_left() -> None:
    for log in (STREAMS, WAITED, BLOCKED):
        log.clear()


@pytest.fixture(autouse=True)
def nothing_is_known_of_a_device() -> None:
    device_decoder._WORKING.clear()
    device_decoder.decoding_stream.cache_clear()


def stream(index: InMemoryIndex, count: int, **changes) -> list[Batch]:
    with make(index, **changes) as loader:
        return take(loader, count)


def assert_near(actual: list[Batch], expected: list[Batch]) -> None:
    """Everything but the pixels is the same; of the pixels, padding is, and images are near."""
    assert_same(
        [batch._replace(images=batch.rand) for batch in actual],
        [batch._replace(images=batch.rand) for batch in expected],
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        for k, (height, width) in enumerate(ours.resized_size.tolist()):
            apart = (ours.images[k].float() - theirs.images[k].float()).abs()
            assert apart[:, height:].sum() == apart[:, :, width:].sum() == 0, "padding"
            assert apart[:, :height, :width].mean() < NEAR, (int(ours.image_index[k]), float(apart.mean()))


# What the device takes.


def test_only_ordinary_jpegs_are_left_to_the_device(index: SmoothIndex) -> None:
    def taken(image_index: int) -> bool:
        data = index.path(image_index).read_bytes()
        return is_device_decodable(data, parse_header(data, index.path(image_index)))

    assert [image_index for image_index in range(COUNT) if not taken(image_index)] == [PNG, CMYK, PROGRESSIVE]
    index.damage(12, "truncated")
    index.damage(13, "no end")
    index.damage(14, "a block of zeros")
    assert not any(map(taken, (12, 13, 14)))


def test_a_jpeg_that_is_rgb_inside_is_left_to_the_host(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(smooth_image(40, 40, 0)).save(path, "JPEG", keep_rgb=True, subsampling=0)
    data = path.read_bytes()
    assert not is_device_decodable(data, parse_header(data, path))
    at = data.index(b"\xff\xee\x00\x0eAdobe")
    without = data[:at] + data[at + 16 :]  # Adobe's marker says it, and the names of the components do
    assert b"Adobe" not in without
    assert not is_device_decodable(without, parse_header(without, path))


def test_it_shrinks_as_pillow_does(tmp_path: Path) -> None:
    """Noise, of which a resize without antialiasing keeps far too much."""
    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (120, 160, 3), np.uint8)).save(path, "JPEG", quality=95)
    data = path.read_bytes()
    images = torch.zeros(1, 30, 32, 3, dtype=torch.uint8)
    image = device_decoder.EncodedImage(data, parse_header(data, path), (0, 0, 160, 120), (30, 32))
    assert not device_decoder.decode_into_batch(images, {0: image}, Device(torch.device("cpu")).make_stream())
    expected = np.asarray(Image.open(path).resize((32, 30), Image.Resampling.BILINEAR), np.float32)
    assert np.abs(images[0].numpy() - expected).mean() < 0.5


def test_the_end_marker_of_a_thumbnail_is_not_that_of_the_image(tmp_path: Path) -> None:
    """EXIF holds a whole JPEG, end marker and all; cut off behind it the image is truncated."""
    path = tmp_path / "a.jpg"
    Image.fromarray(smooth_image(40, 40, 0)).save(path, "JPEG")
    whole = path.read_bytes()
    inside = b"\xff\xe1" + (len(whole) + 2).to_bytes(2, "big") + whole
    data = whole[:2] + inside + whole[2:]
    assert is_device_decodable(data, parse_header(data, path))
    assert not is_device_decodable(data[:-2], parse_header(data, path))


# The same stream.


@pytest.mark.parametrize("scale_jitter_prob", [0.0, 0.7])
def test_a_run_sees_the_same_as_with_the_host(index: SmoothIndex, scale_jitter_prob: float) -> None:
    options = {"image_size": (64, 96), "scale_jitter_prob": scale_jitter_prob}
    actual = stream(index, 8, jpeg_decoder="nvjpeg", **options)
    assert_near(actual, stream(index, 8, **options))
    assert {*image_indices_of(actual)} == set(range(COUNT))


def test_pixels_really_come_from_the_device(
    index: SmoothIndex, monkeypatch: pytest.MonkeyPatch, decoders: ModuleType
) -> None:
    seen: list[int] = []

    def decode(inputs, **options):
        seen.append(len(inputs))
        return [torch.zeros_like(pixels) for pixels in real(inputs, **options)]

    real = decoders.decode_jpeg
    with make(index, jpeg_decoder="nvjpeg", workers=3, scale_jitter_prob=0.0) as loader:
        monkeypatch.setattr(decoders, "decode_jpeg", decode)
        actual = take(loader, 4)
    for batch in actual:
        for k, image_index in enumerate(batch.image_index.tolist()):
            height, width = batch.resized_size[k].tolist()
            black = int(batch.images[k, :, :height, :width].max()) == 0
            assert black == (image_index not in (PNG, CMYK, PROGRESSIVE))
    assert max(seen) > 1, "whole batches"


def test_nothing_depends_on_the_number_of_threads(index: SmoothIndex) -> None:
    expected = stream(index, 9, jpeg_decoder="nvjpeg", workers=1)
    for workers in (2, 5):
        assert_same(stream(index, 9, jpeg_decoder="nvjpeg", workers=workers), expected)


def test_large_images_are_decoded_a_few_at_a_time(index: SmoothIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stream(index, 4, jpeg_decoder="nvjpeg")
    monkeypatch.setattr(device_decoder, "MAX_PIXELS_PER_CALL", 1)
    assert_same(stream(index, 4, jpeg_decoder="nvjpeg"), expected)


def test_a_resumed_run_repeats_bit_for_bit(index: SmoothIndex) -> None:
    expected = stream(index, 10, jpeg_decoder="nvjpeg")
    with make(index, jpeg_decoder="nvjpeg") as loader:
        assert_same(take(loader, 3), expected[:3])
        state = loader.state_dict()
        loader.load_state_dict(state)  # in the middle of what was under way
        assert_same(take(loader, 3), expected[3:6])
    with make(index, jpeg_decoder="nvjpeg", workers=4) as loader:
        loader.load_state_dict(state)
        assert_same(take(loader, 7), expected[3:])


def test_an_evaluation_ends_with_fillers(index: SmoothIndex) -> None:
    options = {"train": False, "batch_size": 5}
    actual = stream(index, 9, jpeg_decoder="nvjpeg", **options)
    assert_near(actual, stream(index, 9, **options))
    assert image_indices_of(actual)[-4:] == [-1] * 4
    assert (actual[-1].images[-1].permute(1, 2, 0) == torch.tensor(PAD_COLOR, dtype=torch.uint8)).all()


# What is wrong with images.


def test_bad_images_are_in_quarantine_as_with_the_host(index: SmoothIndex) -> None:
    bad = {0: "truncated", 6: "no end", 7: "a block of zeros", 12: "table", 13: "empty", 14: "another size"}
    for image_index, how in bad.items():
        index.damage(image_index, how)
    index.path(15).unlink()
    reported: dict[str, list] = {"cpu": [], "nvjpeg": []}
    messages: list[str] = []
    actual = {
        decoder: stream(
            index,
            12,
            jpeg_decoder=decoder,
            max_bad_fraction=1.0,
            image_size=(64, 96),
            on_quarantine=reported[decoder].append,
            on_tuned=messages.append,
        )
        for decoder in ("cpu", "nvjpeg")
    }
    assert reported["nvjpeg"] == reported["cpu"]
    assert {one.image_index for one in reported["cpu"]} == {*bad, 15}
    assert_near(actual["nvjpeg"], actual["cpu"])
    assert not messages, "what the host refuses too is told by the quarantine"


def test_what_the_device_refuses_is_decoded_by_the_host(
    index: SmoothIndex, monkeypatch: pytest.MonkeyPatch, decoders: ModuleType
) -> None:
    """It fails whole batches because of one image: the others still come from it."""
    bad = index.path(0).read_bytes()

    def decode(inputs, **options):
        if any(bytes(data.numpy()).endswith(bad[-200:]) for data in inputs):
            raise RuntimeError("nvJPEG: not supported\nwith a stack")
        return real(inputs, **options)

    real = decoders.decode_jpeg
    ours: list[str] = []
    host = stream(index, 8, scale_jitter_prob=0.0)
    usual = stream(index, 8, scale_jitter_prob=0.0, jpeg_decoder="nvjpeg")
    with make(index, jpeg_decoder="nvjpeg", scale_jitter_prob=0.0, on_tuned=ours.append) as loader:
        monkeypatch.setattr(decoders, "decode_jpeg", decode)
        actual = take(loader, 8)
        assert loader.state_dict()["quarantined"] == {}
    for batch, by_device, by_host in zip(actual, usual, host, strict=True):
        for k, image_index in enumerate(batch.image_index.tolist()):
            assert torch.equal(batch.images[k], (by_host if image_index == 0 else by_device).images[k])
    (sentence,) = ours
    assert sentence == f"loader: nvJPEG refuses {index.path(0)} (nvJPEG: not supported); the CPU decodes such images"


def test_an_image_of_another_size_than_its_header_says_is_refused(
    index: SmoothIndex, monkeypatch: pytest.MonkeyPatch, decoders: ModuleType
) -> None:
    real = decoders.decode_jpeg
    with make(index, jpeg_decoder="nvjpeg") as loader:
        monkeypatch.setattr(decoders, "decode_jpeg", lambda *a, **b: [pixels[:, 1:] for pixels in real(*a, **b)])
        actual = take(loader, 4)
    assert_same(actual, stream(index, 4))


def test_a_sample_that_is_loaded_again_replaces_that_of_the_device(
    index: SmoothIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image fails once, in the second batch, and is whole when it is read ahead for the third or fourth: the
    quarantine, when the second is handed out, makes the host put another one in its place."""
    options = {"image_indices": np.arange(5, 13), "image_size": (64, 96)}
    image_index = image_indices_of(stream(index, 2, **options))[4]
    actual = {}
    for decoder in ("cpu", "nvjpeg"):
        failed: list[int] = []

        def read(asked: int, failed: list[int] = failed) -> bytes:
            if asked == image_index and not failed:
                failed.append(asked)
                raise OSError("once")
            return index.path(asked).read_bytes()

        monkeypatch.setattr(index, "read", read)
        with make(index, jpeg_decoder=decoder, max_bad_fraction=1.0, workers=1, **options) as loader:
            first = take(loader, 1)
            wait_until_full(loader)
            actual[decoder] = [*first, *take(loader, 4)]
            assert loader.state_dict()["quarantined"] == {image_index: 4}
    assert image_index not in image_indices_of(actual["cpu"])
    assert_near(actual["nvjpeg"], actual["cpu"])


def test_too_many_bad_images_end_it(index: SmoothIndex) -> None:
    for image_index in range(COUNT):
        index.damage(image_index, "truncated" if image_index == PNG else "table")
    with make(index, jpeg_decoder="nvjpeg") as loader, pytest.raises(DataError, match="can be used"):
        take(loader, 1)


def test_what_goes_wrong_on_its_thread_is_raised(index: SmoothIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_decoder, "decode_into_batch", lambda *_: 1 / 0)
    with make(index, jpeg_decoder="nvjpeg") as loader:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                next(loader)


# Around it.


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_it_can_be_closed_in_the_middle(index: SmoothIndex, taken: int) -> None:
    loader = make(index, jpeg_decoder="nvjpeg")
    for _ in range(taken):
        next(loader)
    loader.close()
    loader.close()


def test_its_time_is_counted(index: SmoothIndex) -> None:
    with make(index, jpeg_decoder="nvjpeg") as loader:
        take(loader, 2)
        wait_until_full(loader)
        seen = loader.stats()
    assert seen.total.device_decode_s > 0
    with make(index) as loader:
        take(loader, 2)
        assert loader.stats().total.device_decode_s == 0


def test_a_device_that_cannot_decode_is_refused_at_the_start(
    index: SmoothIndex, monkeypatch: pytest.MonkeyPatch, decoders: ModuleType
) -> None:
    def refuse(*_, **__):
        raise RuntimeError("torchcodec not compiled with nvJPEG support")

    monkeypatch.setattr(decoders, "decode_jpeg", refuse)
    with pytest.raises(PreflightError, match="--jpeg-decoder nvjpeg") as actual:
        make(index, jpeg_decoder="nvjpeg")
    assert "not compiled" in str(actual.value)


class Watched(Device):
    """A device whose streams note who waits on the host, and what happens in which order."""

    is_cpu = False

    def make_stream(self):
        return WatchedStream()

    def empty_host(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)


class WatchedStream(SideStream):
    def __init__(self):
        super().__init__(Device(torch.device("cpu")))
        self.log = []
        STREAMS.append(self)

    def synchronize(self):
        self.log.append("wait")
        WAITED.append(threading.current_thread().name)

    def record_ready(self):
        made = WatchedReady(self)
        self.log.append(made)
        return made

    def join(self, tensor, made, changes):
        self.log.append(("join", made))
        super().join(tensor, made, changes)

    def to_device(self, tensors):
        copies = [tensor.clone() for tensor in tensors]
        made = WatchedReady(self)
        self.log.append(made)
        return copies, made


class WatchedReady(ReadyEvent):
    def __init__(self, stream):
        super().__init__(None)
        self.stream = stream

    def synchronize(self):
        WAITED.append(threading.current_thread().name)

    def block_main_stream(self):
        BLOCKED.append(self)


STREAMS: list[WatchedStream] = []
WAITED: list[str] = []
BLOCKED: list[WatchedReady] = []


def test_only_its_own_thread_waits_for_the_device(
    index: SmoothIndex, monkeypatch: pytest.MonkeyPatch, decoders: ModuleType
) -> None:
    """And in the right order: the stream is drained before each decoding, that of the copies waits for the images,
    and training for the copies."""
    real = decoders.decode_jpeg

    def decode(inputs, **options):
        decoder.log.append("decode")
        return real(inputs, **options)

    with make(index, device=Watched(torch.device("cpu")), jpeg_decoder="nvjpeg") as loader:
        copies, _, decoder = STREAMS
        WAITED.clear()  # of the trial at the start
        monkeypatch.setattr(decoders, "decode_jpeg", decode)
        actual = [Batch(*(tensor.clone() for tensor in batch)) for batch in itertools.islice(loader, 8)]
    assert {*WAITED} == {"stoker-loader-device"}
    assert all(before == "wait" for before, after in itertools.pairwise(["", *decoder.log]) if after == "decode")
    joined = [made for kind, made in copies.log[::2] if kind == "join"]
    made = [entry for entry in decoder.log if isinstance(entry, WatchedReady)]
    assert joined[:8] == made[:8]
    assert copies.log[1::2][:8] == BLOCKED
    assert_near(actual, stream(index, 8))


def test_images_are_rotated_as_in_the_header(tmp_path: Path) -> None:
    """All eight orientations against Pillow's own transposition, without a resize: the same pixels but for chroma."""
    for turn in range(1, 9):
        path = tmp_path / f"{turn}.jpg"
        exif = Image.Exif()
        exif[0x0112] = turn
        Image.fromarray(smooth_image(24, 40, 1)).save(path, "JPEG", quality=95, subsampling=0, exif=exif)
        data = path.read_bytes()
        header = parse_header(data, path)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(path)))
        height, width = header.size
        images = torch.zeros(1, 48, 48, 3, dtype=torch.uint8)
        image = device_decoder.EncodedImage(data, header, (2, 1, width, height - 3), (height - 4, width - 2))
        assert not device_decoder.decode_into_batch(images, {0: image}, Device(torch.device("cpu")).make_stream())
        assert np.array_equal(images[0, : height - 4, : width - 2].numpy(), expected[1 : height - 3, 2:width])


def test_images_that_were_annotated_as_stored_are_not_rotated(tmp_path: Path) -> None:
    path = tmp_path / "6.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(smooth_image(24, 40, 1)).save(path, "JPEG", quality=95, subsampling=0, exif=exif)
    data = path.read_bytes()
    header = parse_header(data, path).as_annotated((24, 40))
    images = torch.zeros(1, 24, 40, 3, dtype=torch.uint8)
    image = device_decoder.EncodedImage(data, header, (0, 0, 40, 24), (24, 40))
    assert not device_decoder.decode_into_batch(images, {0: image}, Device(torch.device("cpu")).make_stream())
    assert np.array_equal(images[0].numpy(), np.asarray(Image.open(path)))


@pytest.mark.slow
def test_an_evaluation_of_a_training_decodes_where_the_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bool] = []
    decode = device_decoder.DeviceBatchDecoder.decode

    def recording(self: device_decoder.DeviceBatchDecoder, batch_task: BatchTask, counters: Counters) -> None:
        if batch_task.encoded:
            decoded.append(self._samples.train)
        decode(self, batch_task, counters)

    monkeypatch.setattr(device_decoder.DeviceBatchDecoder, "decode", recording)
    monkeypatch.setattr(checks, "refuse_conflicts", lambda *_: None)  # nvJPEG needs a GPU
    train(
        settings(draw(tmp_path / "shapes"), max_duration="2", jpeg_decoder="nvjpeg"),
        TrainOptions(run_dir=str(tmp_path / "run")),
    )
    assert {*decoded} == {True, False}
