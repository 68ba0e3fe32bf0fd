"""Encodes images again at about the size at which they are trained: smaller files, and less to decode."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simplejpeg

from stoker.data.images.decode import decode, decode_resized
from stoker.data.images.headers import Header

MAX_PSNR_DB = 99.0
"""Reported for pixels that are the same: their PSNR is infinite."""


class Shrunk(NamedTuple):
    data: bytes
    """A JPEG without EXIF: its pixels are upright."""
    size: tuple[int, int]
    """Height and width."""
    psnr_db: float | None


def shrink(
    data: bytes, path: Path, header: Header, *, max_size: tuple[int, int], quality: int, measure: bool = False
) -> Shrunk | None:
    """The image reduced to fit into `max_size`; None if it does.

    header: `Header.as_annotated`. max_size: height and width. measure: also compares the decoded result with the pixels
    that were encoded. Raises DataError for an image that cannot be decoded.
    """
    height, width = header.size
    scale = min(max_size[0] / height, max_size[1] / width)
    if scale >= 1:
        return None
    size = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = np.ascontiguousarray(decode_resized(data, path, header, size))
    encoded = simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420")
    psnr_db = None
    if measure:
        mse = float(np.square(decode(encoded, path).astype(np.float32) - pixels).mean())
        psnr_db = min(MAX_PSNR_DB, 20 * math.log10(255) - 10 * math.log10(mse)) if mse else MAX_PSNR_DB
    return Shrunk(encoded, size, psnr_db)
