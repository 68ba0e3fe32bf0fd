"""`stoker data split`: new splits of a data set as lists of images, without changing the data set.

Splits are stratified by class (`clean.py`). Images that belong together stay in one split: near-duplicates, or
images whose names have the same part. Near-duplicates differ in few bits of a difference hash: whether each of 16 × 16
cells of the gray image is darker than its right neighbor (Krawetz 2013, "Kind of Like That", hackerfactor.com). `stoker
train DATA --splits OUT` uses the lists. Not here: the split that training draws itself (`clean.py`).
"""

import io
import os
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.formats.tables import SPLITS
from stoker.data.index import Index, boxes_of
from stoker.data.validation.clean import stratify
from stoker_watch.errors import UsageError, make_error
from stoker_watch.storage.local_files import write_atomic

HASH_SIDE = 16
"""Cells of the difference hash along each side."""
MAX_DIFFERENT_BITS = 14
"""Of 256. In the five sets of shared/data, 95 % of the copies of half the size, 10 % brighter, or saved again with JPEG
quality 95 differ from their image in at most 14 bits; different images in at least 15, but for a near-duplicate (6)."""
MIN_CONTRAST = 4.0
"""Standard deviation of the gray cells, of 255, below which an image is too flat to be compared."""
BLOCK = 512
"""Images that are compared with all others at once."""

Progress = Callable[[int, int], None]
"""(images done, all images)."""


class SplitCount(msgspec.Struct, frozen=True, kw_only=True):
    num_images: int
    num_boxes: int
    boxes_by_class: dict[str, int]


class NewSplits(msgspec.Struct, frozen=True, kw_only=True):
    splits: dict[str, SplitCount]
    files: dict[str, str]
    num_images: int
    num_groups: int
    """Groups of at least two images that stay together."""
    num_grouped_images: int
    num_unreadable: int
    """Images that cannot be decoded, and so are in no group of near-duplicates."""
    kept_test: bool
    """Whether the test split is that of the source."""


def make_splits(
    index: Index,
    out: Path,
    *,
    val_fraction: float,
    test_fraction: float | None = None,
    group_by: str | None = None,
    seed: int = 0,
    workers: int = 4,
    progress: Progress = lambda _done, _all: None,
) -> NewSplits:
    """Writes train.txt, val.txt and test.txt into `out`: paths of images relative to the root of the data set.

    test_fraction: None keeps the test split of the source, if it has one. group_by: a pattern; images whose paths have
    the same match (its groups, if it has some) stay together. None: near-duplicates do.
    Raises UsageError for impossible fractions or patterns, and for a folder that is not empty.
    """
    fractions = (1 - val_fraction - (test_fraction or 0), val_fraction, test_fraction or 0)
    _refuse_arguments(index, out, fractions)
    kept_test = test_fraction is None and "test" in index.splits
    kept = set(index.image_indices("test").tolist()) if kept_test else set()
    names = [os.path.relpath(index.path(image_index), index.root) for image_index in range(len(index))]
    first_by_name = {name: image_index for image_index, name in reversed(list(enumerate(names)))}
    chosen = np.array(sorted(set(first_by_name.values()) - kept), np.int64)
    if len(chosen) < 2:
        raise UsageError("There are fewer than two images to split.", location=index.source)
    chosen_names = [names[i] for i in chosen.tolist()]
    if group_by is None:
        groups, num_unreadable = group_near_duplicates(index, chosen, workers=workers, progress=progress)
    else:
        groups, num_unreadable = group_by_name(chosen_names, group_by), 0
    boxes, place = boxes_of(index, chosen)
    used = ~index.crowd[boxes]
    split_of = stratify(place[used], index.labels[boxes[used]], chosen_names, fractions, seed=seed, groups=groups)
    images = {split: chosen[split_of == number] for number, split in enumerate(SPLITS)}
    if kept_test:
        images["test"] = index.image_indices("test")
    out.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for split, image_indices in images.items():
        if len(image_indices):
            lines = sorted(names[image_index] for image_index in image_indices.tolist())
            write_atomic(out / f"{split}.txt", ("\n".join(lines) + "\n").encode())
            files[split] = str(out / f"{split}.txt")
    group_sizes = [size for size in Counter(groups).values() if size > 1]
    return NewSplits(
        splits={split: _count(index, image_indices) for split, image_indices in images.items() if len(image_indices)},
        files=files,
        num_images=sum(map(len, images.values())),
        num_groups=len(group_sizes),
        num_grouped_images=sum(group_sizes),
        num_unreadable=num_unreadable,
        kept_test=kept_test,
    )


def _refuse_arguments(index: Index, out: Path, fractions: tuple[float, float, float]) -> None:
    _, val, test = fractions
    if not (0 < val < 1 and 0 <= test < 1 and val + test < 1):
        raise UsageError("The fractions leave no image for training.", choices=["two fractions that add up to below 1"])
    if out.resolve().is_relative_to(index.root.resolve()):
        raise UsageError("OUT is in the folder of the data set.", location=out, fix="name a folder outside of it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError("OUT is not an empty folder.", location=out, fix="name a folder that does not exist yet")


def _count(index: Index, image_indices: NDArray[np.int64]) -> SplitCount:
    labels = index.labels[boxes_of(index, image_indices)[0]]
    counts = np.bincount(labels, minlength=len(index.class_names)).tolist()
    by_class = dict(zip(index.class_names, counts, strict=True))
    return SplitCount(num_images=len(image_indices), num_boxes=len(labels), boxes_by_class=by_class)


def group_by_name(names: list[str], pattern: str) -> list[int]:
    """Returns a group number for each name: the same where the pattern matches the same text. Raises UsageError if it
    is not a pattern, or if it matches no name."""
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--group-by {pattern!r} is not a regular expression.", cause=str(error)) from error
    number_by_key: dict[object, int] = {}
    groups = []
    num_matches = 0
    for position, name in enumerate(names):
        match = regex.search(name)
        num_matches += match is not None
        key: object = position if match is None else match.groups() or match[0]
        groups.append(number_by_key.setdefault(key, len(number_by_key)))
    if not num_matches:
        raise make_error(UsageError, "group-by-without-match", pattern=pattern, listed=", ".join(names[:3]))
    return groups


def group_near_duplicates(
    index: Index, image_indices: NDArray[np.int64], *, workers: int, progress: Progress
) -> tuple[list[int], int]:
    """Returns a group number for each of some images, the same for near-duplicates; and how many cannot be decoded."""

    def hash_of(image_index: int) -> NDArray[np.bool_] | None:
        try:
            return difference_hash(index.read(image_index))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # `data check` names them
            return None

    hashes: dict[int, NDArray[np.bool_]] = {}
    num_unreadable = 0
    with ThreadPoolExecutor(workers) as pool:
        for position, bits in enumerate(pool.map(hash_of, image_indices.tolist())):
            if bits is None:
                num_unreadable += 1
            elif bits.size:
                hashes[position] = bits
            progress(position + 1, len(image_indices))
    return find_groups(len(image_indices), hashes), num_unreadable


def difference_hash(data: bytes) -> NDArray[np.bool_]:
    """[256] bits of an encoded image; none if it is too flat. Raises what Pillow does for one that it cannot decode."""
    with Image.open(io.BytesIO(data)) as image:
        image.draft("L", (8 * HASH_SIDE, 8 * HASH_SIDE))
        small = image.convert("L").resize((HASH_SIDE + 1, HASH_SIDE), Image.Resampling.BOX)
    cells = np.asarray(small, np.float32)
    if cells.std() < MIN_CONTRAST:
        return np.zeros(0, np.bool_)
    return (cells[:, 1:] > cells[:, :-1]).reshape(-1)


def find_groups(count: int, hashes: dict[int, NDArray[np.bool_]]) -> list[int]:
    """A group number for each of `count` images: that of the first image of its group. hashes: position → bits."""
    group = np.arange(count)
    positions = np.array(sorted(hashes), np.int64)
    if len(positions):
        # the number of different bits of two hashes is |a| + |b| - 2 a·b
        bits = np.stack([hashes[position] for position in positions.tolist()]).astype(np.float32)
        ones = bits.sum(1)
        for start in range(0, len(positions), BLOCK):
            stop = min(start + BLOCK, len(positions))
            different = ones[start:stop, None] + ones[None, start:] - 2 * (bits[start:stop] @ bits[start:].T)
            for row in different <= MAX_DIFFERENT_BITS:  # not pair by pair: a camera that stands still has millions
                near = np.unique(group[positions[start:][row]])
                if len(near) > 1:
                    group[np.isin(group, near)] = near[0]
    return list(map(int, group))
