"""JPEG on the device: whole batches decoded by nvJPEG, cropped, resized and turned into the canvas, where the host is
short of cores.

It takes what its hardware takes: baseline JPEGs of one scan, grey or YCbCr, with an end marker behind their pixels
(`is_ordinary`). Everything else stays with the host, `decode.py`, and so does every judgement: a file that looks
truncated or is refused here is decoded by the host, strictly, and is in quarantine only if that fails. What nvJPEG
may not say is that coded pixels in the middle of a file were overwritten. Who hands it batches: `device_batches.py`;
whether it is used at all: `decoder_choice.py`.

torchvision's `decode_jpeg` is the way to nvJPEG (deprecated from 0.29 on in favour of TorchCodec, and still there).
It makes its thread wait for the device, so it never runs on the training thread. Its outputs are written without
regard to what the stream still reads from that memory (pytorch/vision#9606, meta-pytorch/torchcodec#1634): the stream,
which must be nobody else's, is drained before each call.
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
"""Of a picture that the device decodes: its RGB floats take 400 MiB while it is resized."""
MAX_PIXELS_PER_CALL = 2**26
"""Of the pictures of one call, 192 MiB: what a trial of batches leaves free (`trial.HEADROOM`) must do."""
CHROMA_SUBSAMPLINGS = {0x11, 0x21, 0x12, 0x22, 0x41, 0x42, 0x14, 0x24}
"""How many luma samples, across and down, a chroma sample may belong to (nvJPEG's nvjpegChromaSubsampling_t)."""

ZERO_RUN = bytes(64)
"""Seen where a block of the file was never written or got lost: libjpeg complains of such, nvJPEG need not. Flat colour
may look so, too: then the host decodes it."""


class EncodedImage(NamedTuple):
    """A picture that is still to be decoded, and where it goes."""

    data: bytes
    header: Header
    region: Region
    """Of the picture as it is shown."""
    resized_size: tuple[int, int]
    """Height and width that the region fills, at the canvas's top left."""


def is_device_decodable(data: bytes, header: Header) -> bool:
    """Whether the device can take a picture: a baseline JPEG, all its components in one scan, the end marker behind it.

    It is asked for every picture: 20 µs for one of 350 KB. Which JPEGs are RGB inside: libjpeg's jdapimin.c.
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
    """Writes pictures into their places of images, uint8 [B, H, W, 3]; beside them nothing is touched.

    encoded: place → picture. Resized bilinearly with antialiasing, as Pillow does. Returns what the decoder refused:
    place → its words. To be called inside `stream.issue()`; the calling thread waits for the stream.
    """
    refused: dict[int, str] = {}
    for batch_indices in _group_for_calls(encoded):
        _decode_group(images, encoded, batch_indices, stream, refused)
    return refused


def _group_for_calls(encoded: Mapping[int, EncodedImage]) -> Iterator[list[int]]:
    """The places in groups of at most PIXELS_AT_ONCE."""
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
    """One call; where it fails, which says nothing about any one picture, its halves."""
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
            refused[k] = f"it decodes to {tuple(pixels.shape)}, its header promises {image.header.stored_size}"
            continue
        height, width = image.resized_size
        images[k, :height, :width] = _crop_resize_orient(pixels, image).permute(1, 2, 0)


def _decode(encoded: list[bytes], device: torch.device, stream: SideStream) -> list[Tensor]:
    """RGB, uint8 [3, h, w] each, as stored, on the device. Raises RuntimeError when it cannot decode one of them."""
    import torchvision  # not at the head: all that loads pictures imports this module

    inputs = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in encoded]
    stream.synchronize()
    decoded: list[Tensor] = torchvision.io.decode_jpeg(inputs, torchvision.io.ImageReadMode.RGB, device)
    return decoded


def _crop_resize_orient(pixels: Tensor, image: EncodedImage) -> Tensor:
    """The stored pixels uint8 [3, h, w] → what is shown of them, in the size in which it is shown."""
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
    """Why pictures cannot be decoded on a device; None where one has just been."""
    import torchvision

    if device.kind not in ("cpu", "cuda") or torch.version.hip is not None:
        return "nvJPEG is for NVIDIA's GPUs"
    if not hasattr(torchvision.io, "decode_jpeg"):
        return f"torchvision {torchvision.__version__} has no decode_jpeg any more"
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
    """Raises PreflightError where pictures cannot be decoded on a device."""
    if (cause := unavailable_reason(device)) is not None:
        raise PreflightError(
            f"{device.name} cannot decode pictures, as --jpeg-decoder nvjpeg wants it.",
            cause=cause,
            choices=("cpu",),
            fix="--jpeg-decoder cpu in a new run; a run that began with nvjpeg goes on where it can be had",
        )
