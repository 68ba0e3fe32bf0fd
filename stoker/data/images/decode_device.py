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

from stoker.data.images.decode import TURNS, Region, as_stored
from stoker.data.images.headers import Header
from stoker.errors import PreflightError
from stoker.hardware.device import Device, SideStream

MOST_PIXELS = 2**25
"""Of a picture that the device decodes: its RGB floats take 400 MiB while it is resized."""
PIXELS_AT_ONCE = 2**26
"""Of the pictures of one call, 192 MiB: what a trial of batches leaves free (`trial.HEADROOM`) must do."""
SAMPLINGS = {0x11, 0x21, 0x12, 0x22, 0x41, 0x42, 0x14, 0x24}
"""How many luma samples, across and down, a chroma sample may belong to (nvJPEG's nvjpegChromaSubsampling_t)."""

ZEROED = bytes(64)
"""Seen where a block of the file was never written or got lost: libjpeg complains of such, nvJPEG need not. Flat colour
may look so, too: then the host decodes it."""


class Encoded(NamedTuple):
    """A picture that is still to be decoded, and where it goes."""

    data: bytes
    header: Header
    region: Region
    """Of the picture as it is shown."""
    content: tuple[int, int]
    """Height and width that the region fills, at the canvas's top left."""


def is_ordinary(data: bytes, header: Header) -> bool:
    """Whether the device can take a picture: a baseline JPEG, all its components in one scan, the end marker behind it.

    It is asked for every picture: 20 µs for one of 350 KB. Which JPEGs are RGB inside: libjpeg's jdapimin.c.
    """
    height, width = header.stored
    if header.kind != "jpeg" or header.channels not in (1, 3) or height * width > MOST_PIXELS:
        return False
    at, frame = 2, -1
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker == 0xC0:
            frame = at
        elif marker == 0xDA:
            return (
                frame > 0
                and data[at + 4] == header.channels
                and (header.channels == 1 or _is_ycbcr(data, frame))
                and data.rfind(b"\xff\xd9") >= at + 2 + length
                and ZEROED not in data[at:]
            )
        elif not (marker in (0xC4, 0xDB, 0xDD, 0xFE) or 0xE0 <= marker <= 0xEF) or _is_adobe_rgb(data, at):
            return False
        at += 2 + length
    return False


def _is_adobe_rgb(data: bytes, at: int) -> bool:
    return data.startswith(b"\xff\xee", at) and data.startswith(b"Adobe", at + 4) and data[at + 15 : at + 16] == b"\0"


def _is_ycbcr(data: bytes, frame: int) -> bool:
    ids, samplings = data[frame + 10 : frame + 19 : 3], data[frame + 11 : frame + 19 : 3]
    return ids != b"RGB" and samplings[0] in SAMPLINGS and samplings[1:] == b"\x11\x11"


def fill(images: Tensor, encoded: Mapping[int, Encoded], stream: SideStream) -> dict[int, str]:
    """Writes pictures into their places of images, uint8 [B, H, W, 3]; beside them nothing is touched.

    encoded: place → picture. Resized bilinearly with antialiasing, as Pillow does. Returns what the decoder refused:
    place → its words. To be called inside `stream.issue()`; the calling thread waits for the stream.
    """
    refused: dict[int, str] = {}
    for places in _calls(encoded):
        _decode_some(images, encoded, places, stream, refused)
    return refused


def _calls(encoded: Mapping[int, Encoded]) -> Iterator[list[int]]:
    """The places in groups of at most PIXELS_AT_ONCE."""
    places: list[int] = []
    pixels = 0
    for k, picture in encoded.items():
        more = picture.header.stored[0] * picture.header.stored[1]
        if places and pixels + more > PIXELS_AT_ONCE:
            yield places
            places, pixels = [], 0
        places.append(k)
        pixels += more
    if places:
        yield places


def _decode_some(
    images: Tensor, encoded: Mapping[int, Encoded], places: list[int], stream: SideStream, refused: dict[int, str]
) -> None:
    """One call; where it fails, which says nothing about any one picture, its halves."""
    try:
        decoded = _decode([encoded[k].data for k in places], images.device, stream)
    except RuntimeError as error:
        if len(places) == 1:
            refused[places[0]] = str(error).partition("\n")[0]
            return
        half = len(places) // 2
        for some in (places[:half], places[half:]):
            _decode_some(images, encoded, some, stream, refused)
        return
    for k, pixels in zip(places, decoded, strict=True):
        picture = encoded[k]
        if tuple(pixels.shape) != (3, *picture.header.stored):
            refused[k] = f"it decodes to {tuple(pixels.shape)}, its header promises {picture.header.stored}"
            continue
        height, width = picture.content
        images[k, :height, :width] = _placed(pixels, picture).permute(1, 2, 0)


def _decode(pictures: list[bytes], device: torch.device, stream: SideStream) -> list[Tensor]:
    """RGB, uint8 [3, h, w] each, as stored, on the device. Raises RuntimeError when it cannot decode one of them."""
    import torchvision  # not at the head: all that loads pictures imports this module

    inputs = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in pictures]
    stream.wait()
    decoded: list[Tensor] = torchvision.io.decode_jpeg(inputs, torchvision.io.ImageReadMode.RGB, device)
    return decoded


def _placed(pixels: Tensor, picture: Encoded) -> Tensor:
    """The stored pixels uint8 [3, h, w] → what is shown of them, in the size in which it is shown."""
    swapped, upside_down, mirrored = TURNS[picture.header.orientation]
    x0, y0, x1, y1 = as_stored(picture.region, picture.header)
    size = picture.content[::-1] if swapped else picture.content
    shown = pixels[None, :, y0:y1, x0:x1]
    if (y1 - y0, x1 - x0) != size:
        resized = functional.interpolate(shown.float(), size, mode="bilinear", antialias=True)
        shown = resized.round_().clamp_(0, 255).to(torch.uint8)
    turned = shown[0].flip([axis for axis, is_it in ((1, upside_down), (2, mirrored)) if is_it])
    return turned.transpose(1, 2) if swapped else turned


def why_not(device: Device) -> str | None:
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
        with stream.issue():
            _decode([file.getvalue()], device.torch_device, stream)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def require(device: Device) -> None:
    """Raises PreflightError where pictures cannot be decoded on a device."""
    if (cause := why_not(device)) is not None:
        raise PreflightError(
            f"{device.name} cannot decode pictures, as --decoder nvjpeg wants it.",
            cause=cause,
            choices=("host",),
            fix="--decoder host in a new run; a run that began with nvjpeg goes on where it can be had",
        )
