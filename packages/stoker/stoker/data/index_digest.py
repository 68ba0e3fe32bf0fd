"""What the images and boxes of a data set were: text that a checkpoint keeps, so that a continued run notices a change.

A data set that was moved or copied is unchanged: paths are relative to its folder, and times are not compared. Of image
files, the sizes of a sample are. Not here: what a changed data set means for a run (`training/resume.py`).
"""

import base64
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.images import map_in_threads
from stoker.data.index import Index

MAX_FILE_SIZES = 4096
"""Images whose file size is compared, evenly spaced: on a network file system a stat takes up to a millisecond."""
MAX_EXAMPLES = 3
"""Images of a kind of change that are named."""


class _DigestedImages(msgspec.Struct):
    names: list[str]
    """Path and split of each image; for one inside another file, its name there."""
    contents: list[int]
    """A hash of its size in pixels, boxes and labels."""
    file_sizes: list[int]
    """In bytes; 0: not known, or not in the sample."""


def digest_images(index: Index, splits: Sequence[str]) -> str:
    """Returns the images of the splits in their order, with hashes, as ASCII text: about 15 bytes per image."""
    names: list[str] = []
    rows: list[int] = []
    seen: Counter[str] = Counter()
    folders = [os.path.basename(path) if os.path.isabs(path) else path for path in index._folders]
    file_names = index._file_names.to_pylist()
    for split in splits:
        for row in index.image_indices(split).tolist():
            is_embedded = index._byte_range[row, 1] > 0
            folder = "" if is_embedded else folders[index._folder_index[row]]
            name = f"{os.path.normpath(os.path.join(folder, file_names[row]))} ({split})"
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name} {seen[name]}")
            rows.append(row)
    contents = _hash_contents(index)[rows].tolist()
    images = _DigestedImages(names, contents, _file_sizes(index, rows))
    return base64.b85encode(zlib.compress(msgspec.json.encode(images), 1)).decode()


def describe_changes(before: str, now: str) -> list[str]:
    """What differs between two digests, in words with the first names. Raises ValueError for text that is none."""
    if before == now:
        return []
    old, new = _decode(before), _decode(now)
    old_rows = {name: row for row, name in enumerate(old.names)}
    new_rows = {name: row for row, name in enumerate(new.names)}
    both = [(name, old_rows[name], row) for name, row in new_rows.items() if name in old_rows]
    kinds = {
        "new": [name for name in new.names if name not in old_rows],
        "gone": [name for name in old.names if name not in new_rows],
        "with other boxes or another size": [name for name, a, b in both if old.contents[a] != new.contents[b]],
        "with another file size": [
            name
            for name, a, b in both
            if 0 not in (sizes := (old.file_sizes[a], new.file_sizes[b])) and len({*sizes}) > 1
        ],
    }
    changes = []
    for kind, found in kinds.items():
        if found:
            noun = "image" if len(found) == 1 else "images"
            listed = ", ".join(found[:MAX_EXAMPLES]) + (", …" if len(found) > MAX_EXAMPLES else "")
            changes.append(f"{len(found):,} {noun} {kind} ({listed})")
    return changes or (["the order of the images"] if old.names != new.names else [])


def _decode(text: str) -> _DigestedImages:
    try:
        return msgspec.json.decode(zlib.decompress(base64.b85decode(text)), type=_DigestedImages)
    except (ValueError, TypeError, zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"not a digest of images: {error}") from error


def _hash_contents(index: Index) -> NDArray[np.int64]:
    """Returns [R], a hash of each image's size in pixels and of its boxes, labels and crowd flags, in any order."""
    columns = [*index.boxes.view(np.uint32).T, index.labels, index.crowd]
    box_hash = _mix(columns, len(index.boxes))
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(box_hash, dtype=np.uint64)])
    per_image = totals[index.offsets[1:]] - totals[index.offsets[:-1]]
    return _mix([per_image, *index.original_size.T], len(index)).view(np.int64)


def _mix(columns: Iterable[NDArray[np.generic]], count: int) -> NDArray[np.uint64]:
    """Returns [count], a hash over columns [count]: the finalizer of SplitMix64 (Steele et al. 2014) after each."""
    mixed = np.zeros(count, np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _file_sizes(index: Index, rows: Sequence[int]) -> list[int]:
    sampled = {int(position) for position in np.linspace(0, len(rows) - 1, min(len(rows), MAX_FILE_SIZES))}

    def size(position: int) -> int:
        row = rows[position]
        if index._byte_range[row, 1]:
            return int(index._byte_range[row, 1])
        try:
            return os.stat(index.path_text(row)).st_size if position in sampled else 0
        except OSError:
            return 0  # missing: the loader reports it

    return map_in_threads(size, range(len(rows)))
