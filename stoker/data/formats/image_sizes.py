"""Image sizes from the image headers, for formats that need them and do not give them: YOLO, some CSV tables.

Normalized boxes refer to the upright image, after the EXIF rotation. Not here: parsing the headers
(`stoker/data/images/headers.py`).
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
"""Threads that wait for the disk: on a network file system, sixteen small reads at a time."""
CHUNK_SIZE = 64
"""Files per task: with fewer, scheduling the tasks takes longer than reading the files."""
REMOTE_IO_WORKERS = 64
"""Threads for images in a bucket: a request takes 10 … 100 ms and almost no CPU."""
NOTICE_MIN_IMAGES = 2000
"""From this number of images in a bucket on, a status line tells that sizes are being read."""

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
    """int32 [R, 2], height and width of the upright images, 0 where unreadable; and the reasons, by position."""
    sizes = np.zeros((len(paths), 2), np.int32)
    unreadable = {}
    if paths and (uri := source.path_to_uri(paths[0])) is not None:
        if len(paths) >= NOTICE_MIN_IMAGES:
            source.print_status(f"Reading the sizes of {len(paths):,} images from their first bytes, starting at {uri}")
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
