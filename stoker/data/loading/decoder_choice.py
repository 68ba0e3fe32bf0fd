"""Chooses whether the CPU or the device decodes JPEGs, by measurement, once, before a run begins.

`measure_and_choose_decoder` measures both decoders on a sample of the run's own images; `choose_decoder` is a pure
function of the timings. The choice is a setting like any other (`--jpeg-decoder`), written to config.toml, so a resumed
run measures nothing. Decoding on the device: `images/decode_device.py`. It is not used with a cache of decoded images:
the CPU fills the cache, and nothing in it is decoded twice.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.data.images import decode
from stoker.data.images.decode_device import EncodedImage, decode_into_batch, is_device_decodable, unavailable_reason
from stoker.data.loading.samples import LoaderSpec, SampleStream, compute_max_boxes
from stoker.data.loading.stats import Counters
from stoker.errors import DataError, ObjectMissing
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import Device

if TYPE_CHECKING:
    from stoker.data.index import Index

NUM_SAMPLE_IMAGES = 64
"""Images that are tried, evenly spread over the training split."""
HOST_TIME_LIMIT_S = 5.0
"""Seconds after which no further image is decoded on the CPU."""
MIN_SPEEDUP = 1.1
"""Minimum speedup of training for which the device decodes: measurements at the start of a run are no more exact, and
only the CPU notices a file whose coded pixels are damaged."""

NO_PATH = Path()
"""Path of an image in errors that are not shown."""

JpegDecoder = Literal["cpu", "nvjpeg"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderTimings:
    """Seconds are per image, on average."""

    host_decode_s: float
    """Of one core, decoding and resizing."""
    cores: int
    """Cores that can decode in addition to the thread that issues the steps."""
    step_s: float
    """Of the device, training."""
    device_decode_s: float | None = None
    """Of the device, decoding and resizing the images that it supports; None: it supports none."""
    device_fraction: float = 0.0
    """Fraction of the images that the device supports."""
    num_images: int = 0
    """Images that were measured."""


def choose_decoder(timings: DecoderTimings) -> tuple[JpegDecoder, str]:
    """The decoder and the reason.

    The device decodes where the cores cannot keep up with the steps and training becomes faster by it, even if decoding
    and steps take turns on the device (its JPEG engines, where it has some, work in parallel).
    """
    host_per_s, step_per_s = timings.cores / timings.host_decode_s, 1 / timings.step_s
    cores_text = "1 core decodes" if timings.cores == 1 else f"{timings.cores} cores decode"
    summary = f"{cores_text} {host_per_s:,.0f} images/s, steps take {step_per_s:,.0f}/s"
    if host_per_s >= step_per_s:
        return "cpu", summary
    if timings.device_decode_s is None or timings.device_fraction == 0:
        return "cpu", f"{summary}; but none of {timings.num_images} images is a JPEG that nvJPEG supports"
    device_limit_per_s = 1 / (timings.step_s + timings.device_fraction * timings.device_decode_s)
    host_limit_per_s = host_per_s / (1 - timings.device_fraction) if timings.device_fraction < 1 else device_limit_per_s
    reached_per_s = min(device_limit_per_s, host_limit_per_s)
    summary += f"; nvJPEG decodes {1 / timings.device_decode_s:,.0f}/s"
    if timings.device_fraction < 1:
        summary += f" of the {100 * timings.device_fraction:.0f} % that it supports"
    if reached_per_s < MIN_SPEEDUP * host_per_s:
        return "cpu", f"{summary}, which would leave {reached_per_s:,.0f}/s: nothing to gain"
    return "nvjpeg", f"{summary}: with it training reaches {reached_per_s:,.0f}/s or more"


def measure_and_choose_decoder(
    index: "Index",
    image_indices: NDArray[np.int64],
    device: Device,
    *,
    image_size: tuple[int, int],
    resize: str,
    batch_size: int,
    measure_step_s: Callable[[], float],
) -> tuple[JpegDecoder, str]:
    """`choose_decoder` for a data set and a device. measure_step_s: measures a step, in seconds per image; called only
    where it matters.

    Raises StorageError where a bucket cannot be read.
    """
    if device.is_cpu:
        return "cpu", "training is on the CPU"
    if (reason := unavailable_reason(device)) is not None:
        return "cpu", f"nvJPEG is not available: {reason}"
    images = _sample_images(index, image_indices, image_size, resize)
    host_decode_s = _time_host_decode(images, image_size)
    if host_decode_s is None:
        return "cpu", "no image could be measured"
    device_images = [image for image in images if is_device_decodable(image.data, image.header)]
    device_decode_s, num_decoded = _time_device_decode(device_images, device, image_size, batch_size)
    return choose_decoder(
        DecoderTimings(
            host_decode_s=host_decode_s,
            cores=max(1, host_cores() - 1),
            step_s=measure_step_s(),
            device_decode_s=device_decode_s,
            device_fraction=num_decoded / len(images),
            num_images=len(images),
        )
    )


class HostDecode(NamedTuple):
    """What loading an image costs a core."""

    seconds: float
    """To decode and resize it."""
    encoded_bytes: float
    images: int
    """That were measured."""


def measure_host_decode(
    index: "Index", image_indices: NDArray[np.int64], *, image_size: tuple[int, int], resize: str
) -> HostDecode | None:
    """Measured on a sample of the images; None where none can be decoded. Raises StorageError."""
    images = _sample_images(index, image_indices, image_size, resize)
    seconds = _time_host_decode(images, image_size, time.thread_time)
    if seconds is None:
        return None
    return HostDecode(seconds, sum(len(image.data) for image in images) / len(images), len(images))


def _sample_images(
    index: "Index", image_indices: NDArray[np.int64], image_size: tuple[int, int], resize: str
) -> list[EncodedImage]:
    """Images evenly spread over `image_indices`, as an evaluation reads them. Bad ones are left out; training will
    report them."""
    count = min(NUM_SAMPLE_IMAGES, len(image_indices))
    chosen = image_indices[np.linspace(0, len(image_indices) - 1, count).astype(np.int64)]
    spec = LoaderSpec(
        device=Device(torch.device("cpu")),
        batch_size=count,
        image_size=image_size,
        resize=resize,
        max_boxes=compute_max_boxes(index, chosen),
        seed=0,
        train=False,
    )
    samples, images = SampleStream(index, chosen, spec), []
    for plan in filter(None, samples.plan(0, count)):
        try:
            image = samples.read(plan, Counters())
        except (DataError, ObjectMissing, OSError):
            continue
        assert isinstance(image.data, bytes)
        assert image.header is not None
        geom = image.plan.geom
        images.append(EncodedImage(image.data, image.header, geom.region, geom.resized_size))
    return images


def _time_host_decode(
    images: Sequence[EncodedImage], image_size: tuple[int, int], clock: Callable[[], float] = time.perf_counter
) -> float | None:
    """Seconds of a core per image; None where none can be decoded."""
    out = np.empty((*image_size, 3), np.uint8)
    durations_s: list[float] = []
    loop_start_s = time.perf_counter()
    for image in [*images[:1], *images]:
        start_s = clock()
        height, width = image.resized_size
        try:
            decode.decode_into(image.data, NO_PATH, region=image.region, out=out[:height, :width], header=image.header)
        except DataError:
            continue
        durations_s.append(clock() - start_s)
        if time.perf_counter() - loop_start_s > HOST_TIME_LIMIT_S:
            break
    timed_s = durations_s[1:] or durations_s  # the first is a warm-up
    return sum(timed_s) / len(timed_s) if timed_s else None


def _time_device_decode(
    encoded: Sequence[EncodedImage], device: Device, image_size: tuple[int, int], batch_size: int
) -> tuple[float | None, int]:
    """(seconds of the device per image, in batches; None where it supports none; how many images it supports)."""
    stream = device.make_stream()
    batches = [dict(enumerate(encoded[start : start + batch_size])) for start in range(0, len(encoded), batch_size)]
    num_decoded = len(encoded)
    with stream.activate():
        images = torch.empty(
            (min(batch_size, NUM_SAMPLE_IMAGES), *image_size, 3), dtype=torch.uint8, device=device.torch_device
        )
        for encoded_batch in batches[:1]:
            decode_into_batch(images, encoded_batch, stream)  # warm-up
        stream.synchronize()
        start_s = time.perf_counter()
        for encoded_batch in batches:
            num_decoded -= len(decode_into_batch(images, encoded_batch, stream))
        stream.synchronize()
        duration_s = time.perf_counter() - start_s
    return (duration_s / num_decoded if num_decoded else None), num_decoded
