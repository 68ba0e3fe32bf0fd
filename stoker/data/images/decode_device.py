"""Decodes whole batches of JPEGs on the device with nvJPEG, crops, resizes and rotates them, where cores are scarce.

It decodes what the hardware supports: baseline JPEGs of one scan, gray or YCbCr, with an end marker after their pixels
(`is_device_decodable`). The CPU (`decode.py`) decodes everything else, and alone decides about damage: a file that
looks truncated or is refused here is decoded by the CPU, strictly, and is quarantined only if that fails. nvJPEG may
not notice that coded pixels in the middle of a file were overwritten. The caller: `loading/device_batches.py`; whether
it is used: `loading/decoder_choice.py`.

nvJPEG is called through torchvision's `decode_jpeg` (deprecated since 0.29 in favor of TorchCodec, still available).
It makes its thread wait for the device, so it never runs on the training thread. It writes its outputs without regard
to what the stream still reads from that memory (pytorch/vision#9606, meta-pytorch/torchcodec#1634). So the stream must
be used for nothing else, and is synchronized before each call.
"""

import io
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from stoker.data.images.decode import EXIF_TRANSFORMS, Region, to_stored_region
from stoker.data.images.headers import Header
from stoker.errors import PreflightError
from stoker.hardware.device import Device, SideStream

MAX_PIXELS = 2**25
"""Limit for an image that the device decodes: its RGB floats take 400 MiB while it is resized."""
MAX_PIXELS_PER_CALL = 2**26
"""Limit for the images of one call, 192 MiB: they must fit into what `training/defaults/dry_run.py` leaves free."""
CHROMA_SUBSAMPLINGS = {0x11, 0x21, 0x12, 0x22, 0x41, 0x42, 0x14, 0x24}
"""Supported luma samples per chroma sample, across and down (nvJPEG's nvjpegChromaSubsampling_t)."""

ZERO_RUN = bytes(64)
"""Occurs where a block of the file was never written or got lost. libjpeg warns of it, nvJPEG may not. Flat color may
contain it, too: then the CPU decodes the image."""


class EncodedImage(NamedTuple):
    """An image that is to be decoded, and its geometry."""

    data: bytes
    header: Header
    region: Region
    """Of the upright image."""
    resized_size: tuple[int, int]
    """Height and width that the region fills, at the top left of the model input."""


def is_device_decodable(data: bytes, header: Header) -> bool:
    """Whether the device can decode an image: a baseline JPEG, all components in one scan, followed by an end marker.

    Runs for every image: 20 µs for one of 350 KB. How RGB JPEGs are recognized: libjpeg's jdapimin.c.
    """
    height, width = header.stored_size
    if header.image_format != "jpeg" or header.channels not in (1, 3) or height * width > MAX_PIXELS:
        return False
    offset, frame_offset = 2, -1
    while offset + 4 <= len(data) and data[offset] == 0xFF:
        marker, length = data[offset + 1], data[offset + 2] << 8 | data[offset + 3]
        if marker == 0xC0:
            frame_offset = offset
        elif marker == 0xDA:
            return (
                frame_offset > 0
                and data[offset + 4] == header.channels
                and (header.channels == 1 or _is_ycbcr(data, frame_offset))
                and data.rfind(b"\xff\xd9") >= offset + 2 + length
                and ZERO_RUN not in data[offset:]
            )
        elif not (marker in (0xC4, 0xDB, 0xDD, 0xFE) or 0xE0 <= marker <= 0xEF) or _is_adobe_rgb(data, offset):
            return False
        offset += 2 + length
    return False


def _is_adobe_rgb(data: bytes, offset: int) -> bool:
    return (
        data.startswith(b"\xff\xee", offset)
        and data.startswith(b"Adobe", offset + 4)
        and data[offset + 15 : offset + 16] == b"\0"
    )


def _is_ycbcr(data: bytes, frame_offset: int) -> bool:
    ids, samplings = data[frame_offset + 10 : frame_offset + 19 : 3], data[frame_offset + 11 : frame_offset + 19 : 3]
    return ids != b"RGB" and samplings[0] in CHROMA_SUBSAMPLINGS and samplings[1:] == b"\x11\x11"


def decode_into_batch(images: Tensor, encoded: Mapping[int, EncodedImage], stream: SideStream) -> dict[int, str]:
    """Writes decoded images into their places of `images`, uint8 [B, H, W, 3], and nothing else.

    encoded: place → image. Resized bilinearly with antialiasing, as in Pillow. Returns what the decoder refused:
    place → its message. Call it inside `stream.activate()`; the calling thread waits for the stream.
    """
    refused: dict[int, str] = {}
    for batch_indices in _group_for_calls(encoded):
        _decode_group(images, encoded, batch_indices, stream, refused)
    return refused


def _group_for_calls(encoded: Mapping[int, EncodedImage]) -> Iterator[list[int]]:
    """The places in groups of at most MAX_PIXELS_PER_CALL pixels."""
    batch_indices: list[int] = []
    num_pixels = 0
    for k, image in encoded.items():
        image_pixels = image.header.stored_size[0] * image.header.stored_size[1]
        if batch_indices and num_pixels + image_pixels > MAX_PIXELS_PER_CALL:
            yield batch_indices
            batch_indices, num_pixels = [], 0
        batch_indices.append(k)
        num_pixels += image_pixels
    if batch_indices:
        yield batch_indices


def _decode_group(
    images: Tensor,
    encoded: Mapping[int, EncodedImage],
    batch_indices: list[int],
    stream: SideStream,
    refused: dict[int, str],
) -> None:
    """One call of the decoder; where it fails, which does not say for which image, one for each half."""
    try:
        decoded = _decode([encoded[k].data for k in batch_indices], images.device, stream)
    except RuntimeError as error:
        if len(batch_indices) == 1:
            refused[batch_indices[0]] = str(error).partition("\n")[0]
            return
        half = len(batch_indices) // 2
        for part in (batch_indices[:half], batch_indices[half:]):
            _decode_group(images, encoded, part, stream, refused)
        return
    for k, pixels in zip(batch_indices, decoded, strict=True):
        image = encoded[k]
        if tuple(pixels.shape) != (3, *image.header.stored_size):
            refused[k] = f"it decodes to {tuple(pixels.shape)}, its header says {image.header.stored_size}"
            continue
        height, width = image.resized_size
        images[k, :height, :width] = _crop_resize_orient(pixels, image).permute(1, 2, 0)


def _decode(encoded: list[bytes], device: torch.device, stream: SideStream) -> list[Tensor]:
    """RGB, uint8 [3, h, w] each, as stored, on the device. Raises RuntimeError when it cannot decode one of them."""
    import torchvision  # not at the top: everything that loads images imports this module

    inputs = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in encoded]
    stream.synchronize()
    decoded: list[Tensor] = torchvision.io.decode_jpeg(inputs, torchvision.io.ImageReadMode.RGB, device)
    return decoded


def _crop_resize_orient(pixels: Tensor, image: EncodedImage) -> Tensor:
    """The stored pixels uint8 [3, h, w] → the upright region in its final size."""
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
    """Why a device cannot decode images; None where it has just decoded one."""
    import torchvision

    if device.kind not in ("cpu", "cuda") or torch.version.hip is not None:
        return "nvJPEG needs an NVIDIA GPU"
    if not hasattr(torchvision.io, "decode_jpeg"):
        return f"torchvision {torchvision.__version__} no longer has decode_jpeg"
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "JPEG")
    stream = device.make_stream()
    try:
        with stream.activate():
            _decode([file.getvalue()], device.torch_device, stream)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def require_device_decoder(device: Device) -> None:
    """Raises PreflightError where a device cannot decode images."""
    if (cause := unavailable_reason(device)) is not None:
        raise PreflightError(
            f"--jpeg-decoder nvjpeg: {device.name} cannot decode images.",
            cause=cause,
            choices=("cpu",),
            fix="--jpeg-decoder cpu in a new run; a run that began with nvjpeg continues where nvJPEG is available",
        )
