"""Decodes whole batches of JPEGs on the device with nvJPEG, where cores are scarce, and chooses whether it is used.

The device decodes what the hardware supports: baseline JPEGs of one scan, gray or YCbCr, with an end marker after their
pixels (`decode.is_device_decodable`); it crops, resizes and rotates them, too. The CPU (`images/decode.py`) decodes
everything else, and alone decides about damage: a file that looks truncated or is refused here is loaded again by the
CPU, strictly, and is quarantined only if that fails. nvJPEG may not notice that coded pixels in the middle of a file
were overwritten.

nvJPEG is called through `decode_jpeg` of the package torchcodec, from 0.16 on; without the package the CPU decodes. It
makes its thread wait for the device, so it has a thread of its own (`worker_pool.py`). In 0.16 it writes its outputs
without regard to what the stream still reads from that memory (meta-pytorch/torchcodec#1634). So the stream must be
used for nothing else, and is synchronized before each call.

`measure_and_choose_decoder` measures the CPU on a sample of the run's own images, and a step, once, before a run. The
choice is a setting like any other (`--jpeg-decoder`), so a resumed run measures nothing.
"""

import functools
import io
import re
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from stoker.data.batch import PAD_COLOR
from stoker.data.images import decode
from stoker.data.images.decode import EXIF_TRANSFORMS, EncodedImage, is_device_decodable, to_stored_region
from stoker.data.index import Index
from stoker.data.loading.samples import BatchTask, LoaderSpec, SampleResult, SampleStream, compute_max_boxes
from stoker.data.loading.stats import Counters
from stoker.hardware.device import Device, SideStream
from stoker.hardware.memory_errors import is_out_of_memory
from stoker_watch.errors import DataError, ObjectMissing, PreflightError, make_error
from stoker_watch.hardware.cgroup import host_cores

MAX_PIXELS_PER_CALL = 2**26
"""Limit for the images of one call, 192 MiB: they must fit into what `training/defaults/dry_run.py` leaves free."""
NUM_SAMPLE_IMAGES = 64
"""Images that are tried, evenly spread over the training split."""
HOST_TIME_LIMIT_S = 5.0
"""Seconds after which no further image is decoded on the CPU."""
MIN_SPEEDUP = 1.1
"""Minimum speedup of training for which the device decodes: measurements at the start of a run are no more exact, and
only the CPU notices a file whose coded pixels are damaged."""
MIN_DEVICE_FRACTION = 0.5
"""Fraction of the images that the device must support: below, the cores decode most of them anyway."""

_EXIF_MARKER = re.compile(rb"\xff\xe1(?=..Exif\0\0)", re.DOTALL)
"""Coded pixels never contain it, as FF is escaped among them."""
_IGNORED_MARKER = b"\xff\xef"
"""APP15, which decoders skip."""

JpegDecoder = Literal["cpu", "nvjpeg"]
_WORKING: set[torch.device] = set()
"""Devices that have decoded an image in this process."""


@functools.cache
def decoding_stream(device: Device, train: bool) -> SideStream:
    """Returns the stream on which training images are decoded, or those of evaluations: one of each in a process. torch
    has few streams and gives them out again, and this one must be used for nothing else."""
    del train
    return device.make_stream()


class DeviceBatchDecoder:
    """Decodes on the device what the workers have left in `BatchTask.encoded`, batch by batch; what they have decoded
    is copied into the same tensor. on_message is called once, when the device refuses an image that the host decodes.
    Takes as much memory as the batch buffers on the host. Raises PreflightError where the device cannot decode."""

    def __init__(self, samples: SampleStream, device: Device, on_message: Callable[[str], None] | None) -> None:
        if (cause := unavailable_reason(device)) is not None:
            raise make_error(PreflightError, "device-cannot-decode", choices=["cpu"], cause=cause, name=device.name)
        self._samples, self._on_message = samples, on_message
        self._stream = decoding_stream(device, samples.train)
        self._padding = torch.tensor(PAD_COLOR, dtype=torch.uint8, device=device.torch_device)

    def decode(self, batch_task: BatchTask, counters: Counters) -> None:
        """Sets `batch_task.device_images`. All samples of the batch are loaded; no other thread uses it meanwhile."""
        start_s = time.perf_counter()
        encoded, batch_task.encoded = batch_task.encoded or {}, None  # what is loaded again, the host decodes
        host_images = batch_task.buffer.tensors[0]
        with self._stream.activate():
            images = self._padding.expand(host_images.shape).contiguous()
            refused = decode_into_batch(images, encoded, self._stream)
            for k, reason in refused.items():
                previous = batch_task.results[k]
                self._samples.reload(batch_task, k, Counters())
                result = batch_task.results[k]
                if isinstance(result, SampleResult) and result == previous and self._on_message is not None:
                    name = self._samples.index.display_source(result.image_index)
                    self._on_message(f"loader: nvJPEG refuses {name} ({reason}); the CPU decodes such images")
                    self._on_message = None
            for k in range(len(host_images)):
                if k not in encoded or k in refused:
                    images[k].copy_(host_images[k], non_blocking=True)
        batch_task.device_images = images, self._stream.record_ready()
        counters.device_decode_s += time.perf_counter() - start_s


def decode_into_batch(images: Tensor, encoded: Mapping[int, EncodedImage], stream: SideStream) -> dict[int, str]:
    """Writes decoded images into their places of `images`, uint8 [B, H, W, 3], and nothing else.

    encoded: place → image. Resized bilinearly with antialiasing, as in Pillow. Returns what the decoder refused:
    place → its message. Call it inside `stream.activate()`; the calling thread waits for the stream. A call of the
    decoder that is too large or fails, which does not say for which image, is made again for each half of the images.
    """
    if not encoded:
        return {}
    try:
        num_pixels = sum(image.header.stored_size[0] * image.header.stored_size[1] for image in encoded.values())
        if len(encoded) > 1 and num_pixels > MAX_PIXELS_PER_CALL:
            raise RuntimeError("too many pixels for one call")
        decoded = _decode([image.data for image in encoded.values()], images.device, stream)
    except RuntimeError as error:
        if len(encoded) == 1:
            return dict.fromkeys(encoded, str(error).partition("\n")[0])
        places = list(encoded)
        halves = places[: len(places) // 2], places[len(places) // 2 :]
        first, second = (decode_into_batch(images, {k: encoded[k] for k in half}, stream) for half in halves)
        return first | second
    refused: dict[int, str] = {}
    for (k, image), pixels in zip(encoded.items(), decoded, strict=True):
        if tuple(pixels.shape) != (3, *image.header.stored_size):
            refused[k] = f"it decodes to {tuple(pixels.shape)}, its header says {image.header.stored_size}"
            continue
        height, width = image.resized_size
        images[k, :height, :width] = _crop_resize_orient(pixels, image).permute(1, 2, 0)
    return refused


def _decode(encoded: list[bytes], device: torch.device, stream: SideStream) -> list[Tensor]:
    """Returns RGB, uint8 [3, h, w] each, as stored, on the device. Raises RuntimeError when it cannot decode one of
    them, ImportError without torchcodec.

    torchcodec would rotate by EXIF, which it is made not to find: annotations may be those of the stored pixels.
    """
    from torchcodec.decoders import decode_jpeg  # an optional dependency

    inputs = [
        torch.frombuffer(bytearray(_EXIF_MARKER.sub(_IGNORED_MARKER, data)), dtype=torch.uint8) for data in encoded
    ]
    stream.synchronize()
    decoded: list[Tensor] = decode_jpeg(inputs, mode="RGB", device=device)
    return decoded


def _crop_resize_orient(pixels: Tensor, image: EncodedImage) -> Tensor:
    """Returns the upright region of the stored pixels uint8 [3, h, w] in its final size."""
    is_transposed, flip_vertical, flip_horizontal = EXIF_TRANSFORMS[image.header.orientation]
    x0, y0, x1, y1 = to_stored_region(image.region, image.header)
    size = image.resized_size[::-1] if is_transposed else image.resized_size
    cropped = pixels[None, :, y0:y1, x0:x1]
    if (y1 - y0, x1 - x0) != size:
        resized = functional.interpolate(cropped.float(), size, mode="bilinear", antialias=True)
        cropped = resized.round_().clamp_(0, 255).to(torch.uint8)
    oriented = cropped[0].flip([axis for axis, enabled in ((1, flip_vertical), (2, flip_horizontal)) if enabled])
    return oriented.transpose(1, 2) if is_transposed else oriented


def unavailable_reason(device: Device) -> str | None:
    """Why a device cannot decode images; None where it has decoded one. Raises what says that memory is exhausted."""
    if device.torch_device in _WORKING:
        return None
    if device.kind not in ("cpu", "cuda") or torch.version.hip is not None:
        return "nvJPEG needs an NVIDIA GPU"
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "JPEG")
    stream = decoding_stream(device, train=True)
    try:
        with stream.activate():
            _decode([file.getvalue()], device.torch_device, stream)
    except ImportError as error:
        return f"it needs torchcodec (`pip install 'stoker[nvjpeg]'`): {str(error).partition(chr(10))[0]}"
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return str(error).partition("\n")[0]
    _WORKING.add(device.torch_device)
    return None


def choose_decoder(host_per_s: float, step_per_s: float, device_fraction: float) -> tuple[JpegDecoder, str]:
    """Lets the device decode where the cores cannot keep up with the steps, and says the reason. Images per second:
    that the cores decode, and that the steps take. device_fraction: of the images, that the device can decode."""
    summary = f"the cores decode {host_per_s:,.0f} images/s, steps take {step_per_s:,.0f}/s"
    if MIN_SPEEDUP * host_per_s >= step_per_s:
        return "cpu", summary
    if device_fraction < MIN_DEVICE_FRACTION:
        return "cpu", f"{summary}; but nvJPEG supports only {100 * device_fraction:.0f} % of the images"
    return "nvjpeg", f"{summary}; nvJPEG supports {100 * device_fraction:.0f} % of the images"


def measure_and_choose_decoder(
    index: Index,
    image_indices: NDArray[np.int64],
    device: Device,
    *,
    image_size: tuple[int, int],
    resize: str,
    measure_step_s: Callable[[], float],
) -> tuple[JpegDecoder, str]:
    """`choose_decoder` for a data set and a device. measure_step_s: measures a step, in seconds per image; called only
    where it matters. Raises StorageError where a bucket cannot be read."""
    if device.is_cpu:
        return "cpu", "training is on the CPU"
    if (reason := unavailable_reason(device)) is not None:
        return "cpu", f"nvJPEG is not available: {reason}"
    host = measure_host_decode(index, image_indices, image_size=image_size, resize=resize)
    if host is None:
        return "cpu", "no image could be measured"
    cores = max(1, host_cores() - 1)  # besides the thread that issues the steps
    return choose_decoder(cores / host.seconds, 1 / measure_step_s(), host.device_fraction)


class HostDecode(NamedTuple):
    """What loading an image costs a core."""

    seconds: float
    """To decode and resize it."""
    encoded_bytes: float
    images: int
    """That were measured."""
    device_fraction: float
    """Of these, that the device can decode."""


def measure_host_decode(
    index: Index, image_indices: NDArray[np.int64], *, image_size: tuple[int, int], resize: str
) -> HostDecode | None:
    """Measured on images evenly spread over `image_indices`, as an evaluation reads them. Bad ones are left out, as
    training will report them; None where none can be decoded. Raises StorageError."""
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
    samples, images = SampleStream(index, chosen, spec), list[EncodedImage]()
    for plan in filter(None, samples.plan(0, count)):
        try:
            loaded = samples.read(plan, Counters())
        except (DataError, ObjectMissing, OSError):
            continue
        assert isinstance(loaded.data, bytes)
        assert loaded.header is not None
        geom = loaded.plan.geom
        images.append(EncodedImage(loaded.data, loaded.header, geom.region, geom.resized_size))
    out = np.empty((*image_size, 3), np.uint8)
    durations_s: list[float] = []
    loop_start_s = time.perf_counter()
    for image in [*images[:1], *images]:
        start_s = time.thread_time()
        height, width = image.resized_size
        try:
            decode.decode_into(image.data, "", region=image.region, out=out[:height, :width], header=image.header)
        except DataError:
            continue
        durations_s.append(time.thread_time() - start_s)
        if time.perf_counter() - loop_start_s > HOST_TIME_LIMIT_S:
            break
    timed_s = durations_s[1:] or durations_s  # the first is a warm-up
    if not timed_s:
        return None
    encoded_bytes = sum(len(image.data) for image in images) / len(images)
    num_device = sum(is_device_decodable(image.data, image.header) for image in images)
    return HostDecode(sum(timed_s) / len(timed_s), encoded_bytes, len(images), num_device / len(images))
