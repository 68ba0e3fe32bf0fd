"""The sizes of images, from their headers, for the formats that need and do not say them: YOLO, some CSV tables.

Boxes in shares of an image's width and height belong to the image as it is shown, turned as EXIF says. Not here: the
headers themselves (`stoker/data/images/headers.py`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.data.images import source
from stoker.data.images.headers import read_header
from stoker.errors import DataError

IO_WORKERS = 16
"""What waits is the disk: on a file system across a network, sixteen small reads at a time."""
CHUNK_SIZE = 64
"""Files per task: less, and handing out tasks costs more than reading them."""
REMOTE_IO_WORKERS = 64
"""For images in a bucket, of which each answer takes 10 … 100 ms and no processor."""
NOTICE_MIN_IMAGES = 2000
"""Images in a bucket from which on reading their sizes takes so long that it is said."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int = IO_WORKERS,
    chunk_size: int = CHUNK_SIZE,
) -> list[Result]:
    """The results of a function that waits for files, in the order of the items."""

    def run_chunk(start: int) -> list[Result]:
        return [function(item) for item in items[start : start + chunk_size]]

    with ThreadPoolExecutor(workers, "stoker-files") as pool:
        return [result for results in pool.map(run_chunk, range(0, len(items), chunk_size)) for result in results]


def read_sizes(paths: Sequence[Path]) -> tuple[NDArray[np.int32], dict[int, str]]:
    """int32 [R, 2], height and width of the upright images, 0 where they cannot be read; why not, by row."""
    sizes = np.zeros((len(paths), 2), np.int32)
    unreadable = {}
    if paths and (uri := source.path_to_uri(paths[0])) is not None:
        if len(paths) >= NOTICE_MIN_IMAGES:
            source.print_status(f"Reading the sizes of {len(paths):,} images, {uri} and on: the first bytes of each")
        results = map_in_threads(_read_size, paths, workers=REMOTE_IO_WORKERS, chunk_size=1)
    else:
        results = map_in_threads(_read_size, paths)
    for position, result in enumerate(results):
        if isinstance(result, str):
            unreadable[position] = result
        else:
            sizes[position] = result
    return sizes, unreadable


def _read_size(path: Path) -> tuple[int, int] | str:
    try:
        return read_header(path).size
    except DataError as error:
        return error.cause or error.what
