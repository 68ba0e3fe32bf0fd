"""Reads the images that are converted or packed, and refuses those that training would skip."""

from pathlib import Path

from stoker.data.convert.item import UnsupportedImage
from stoker.data.images.headers import Header, parse_header
from stoker.data.index import Index
from stoker.errors import DataError


def read_image(index: Index, image_index: int, path: Path) -> tuple[bytes, Header]:
    """The encoded image and its header. Raises UnsupportedImage for an image that training would skip."""
    try:
        data = index.read(image_index)
        header = parse_header(data, path)
    except OSError as error:
        raise UnsupportedImage(error.strerror or str(error)) from error
    except DataError as error:
        raise UnsupportedImage(error.cause or error.what) from error
    height, width = index.original_size[image_index].tolist()
    size = header.as_annotated((height, width)).size
    if 0 not in (height, width) and (height, width) != size:
        raise UnsupportedImage(f"the annotations give {width} × {height} pixels, the image has {size[1]} × {size[0]}")
    return data, header
