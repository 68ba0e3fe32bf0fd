"""`stoker data check`: all problems of a data set, what training does about them, and how to fix them.

`check_dataset` reads the annotations as training does, then packed shards (`check_shards`) and every image
(`check_image_files`), and returns a `DatasetCheck`. It writes only the index, into the cache. No torch. An image that
fails here is one that the loader would quarantine: the same code decodes the file and compares its size with the
annotations. JPEGs are decoded at an eighth of their size, for which libjpeg still reads every coded byte. The kinds of
problems are in `problems.py`; the text on the terminal is made by `stoker/report/dataset.py`.
"""

import contextlib
import errno
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.formats.folders import KNOWN_SUFFIXES, SUFFIXES
from stoker.data.formats.images import REMOTE_IO_WORKERS
from stoker.data.formats.webdataset import INDEX_FILE, Shard, lost_shards, read_info
from stoker.data.images import source as image_source
from stoker.data.images.decode import decode_into
from stoker.data.images.headers import Header, parse_header
from stoker.data.index import Index, find_refusals, missing_images, open_index, suggest_location, unlisted_images
from stoker.data.validation.clean import SplitOptions
from stoker.data.validation.problems import (
    DEFAULT_MAX_BAD_BOXES,
    DEFAULT_MAX_BAD_FRACTION,
    Problem,
    ProblemCollector,
)
from stoker_watch.errors import DataError
from stoker_watch.findings.finding import Evidence, Finding, Severity, worst_first
from stoker_watch.hardware.cgroup import host_cores
from stoker_watch.storage.uri import expand_variables, is_uri, parse_uri

Progress = Callable[[int, int], None]
"""(images done, all images)."""
UNLIMITED = 2**62
MAX_SHOWN_EXAMPLES = 3
"""Places of a kind of problem in a finding; `--json` has all."""
SEVERITY_OF_ACTION: dict[str, Severity] = {"refused": "blocker", "skipped": "warning", "fixed": "info", "kept": "info"}
"""What training does with a problem, the worst first → the severity of the finding."""
PLURALS = {"box": "boxes", "class": "classes"}


class SplitCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Images and boxes of a split that were read, and those that can be used."""

    num_images: int
    num_usable_images: int
    num_boxes: int
    num_usable_boxes: int


class DatasetCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What `check_dataset` found. `items` are in the order of the table of kinds, with all their places."""

    data: str
    """As given by the user."""
    root: str | None = None
    """Folder that `locations` are relative to; None when nothing could be read."""
    format: str | None = None
    classes: tuple[str, ...] = ()
    splits: dict[str, SplitCounts] = {}
    num_images: int = 0
    """Images in all splits, including those that were left out because of their annotations."""
    num_usable_images: int = 0
    num_boxes: int = 0
    """Boxes in all splits, including those that were left out."""
    num_usable_boxes: int = 0
    decoded: bool = False
    """Whether the images were decoded; else only their existence was checked."""
    max_bad_fraction: float = DEFAULT_MAX_BAD_FRACTION
    """Fraction of the images that may be unusable."""
    max_bad_boxes: float = DEFAULT_MAX_BAD_BOXES
    """Fraction of the boxes that may be left out."""
    items: tuple[Problem, ...] = ()
    refusals: tuple[str, ...] = ()
    """Reasons why training would refuse this data set; empty: it would not."""
    notes: tuple[str, ...] = ()
    """The choices that were made while reading."""

    @property
    def findings(self) -> list[Finding]:
        """The problems as they are shown, those first that training refuses."""
        by_action = sorted(self.items, key=lambda problem: list(SEVERITY_OF_ACTION).index(problem.row.action))
        return worst_first(problem_finding(problem) for problem in by_action)

    def as_dict(self) -> dict[str, Any]:
        """Returns the output of `stoker data check --json`."""
        items = [
            {"kind": problem.kind}
            | msgspec.structs.asdict(problem.row)
            | {"fix": problem.fix, "count": problem.count, "locations": problem.examples}
            for problem in self.items
        ]
        return msgspec.structs.asdict(self) | {"items": items}

    @property
    def has_failed(self) -> bool:
        """Whether training would refuse the data set, or a packed shard has changed."""
        return bool(self.refusals) or any(item.kind == "changed-packed-shard" for item in self.items)


def problem_finding(problem: Problem) -> Finding:
    """Returns the problems of one kind, with the places of the first of them."""
    row, places = problem.row, [Evidence(text=text) for text in problem.examples[:MAX_SHOWN_EXAMPLES]]
    if problem.count > len(places):
        places.append(Evidence(text=f"… and {problem.count - len(places):,} more"))
    unit = row.unit if problem.count == 1 else PLURALS.get(row.unit, row.unit + "s")
    return Finding(
        id=problem.kind,
        severity=row.severity or SEVERITY_OF_ACTION[row.action],
        title=f"{problem.count:,} {unit}: {row.title}; {row.effect}",
        evidence=places,
        fix="" if problem.fix == "nothing" else problem.fix,
    )


def check_dataset(
    data: str | Path,
    *,
    format: str | None = None,
    classes: Sequence[str] = (),
    allow_outside: bool = False,
    decode_images: bool = True,
    workers: int | None = None,
    max_bad_fraction: float = DEFAULT_MAX_BAD_FRACTION,
    max_bad_boxes: float = DEFAULT_MAX_BAD_BOXES,
    splits: SplitOptions | None = None,
    progress: Progress = lambda _done, _all: None,
) -> DatasetCheck:
    """Checks a data set: a folder, a file, or "demo".

    format, classes, allow_outside, splits: see `open_index`. decode_images: False only checks that they exist.
    workers: default, the cores. max_bad_fraction, max_bad_boxes: as in training. progress: called in this thread with
    the images done and their number, for packed shards first.

    Also returns a report for a data set that cannot be read. Raises UsageError for an unknown format or class.
    """
    problems = ProblemCollector(max_examples=UNLIMITED)
    try:
        index = open_index(
            data, format=format, classes=tuple(classes), allow_outside=allow_outside, splits=splits, problems=problems
        )
    except DataError as error:
        problems.add("unreadable-set", str(error))
        with contextlib.suppress(DataError):  # the same one
            if (folder := packed_folder(data)) is not None:
                check_shards(
                    folder, problems, read=decode_images, workers=workers or _num_workers(folder), progress=progress
                )
        return DatasetCheck(
            data=str(data),
            items=problems.summarize(),
            refusals=(error.what,),
            max_bad_fraction=max_bad_fraction,
            max_bad_boxes=max_bad_boxes,
        )
    num_dropped_images = sum(problem.count for problem in problems.summarize() if problem.drops_images)
    num_workers = workers or _num_workers(index.root)
    if (index.root / INDEX_FILE).is_file():
        check_shards(index.root, problems, read=decode_images, workers=num_workers, progress=progress)
    if decode_images:
        usable = check_image_files(index, problems, workers=num_workers, progress=progress)
    else:
        usable = np.ones(len(index), np.bool_)
        for image_index in missing_images(index):
            usable[image_index] = False
            problems.add("missing-image", os.path.relpath(index.path(image_index), index.root))
    _report_unlisted(index, problems)
    found_problems = []
    num_dropped_boxes = 0
    for problem in problems.summarize():
        if problem.kind == "missing-image":
            problem = replace(problem, own_fix=suggest_location(index.root, index.root / problem.examples[0]))
        if problem.drops_boxes or problem.kind == "box-of-unreadable-image":
            num_dropped_boxes += problem.count
        uris = tuple(image_source.paths_to_uris(text, index.root) for text in problem.examples)
        found_problems.append(replace(problem, examples=uris))
    counts = {split: _count_split(index, index.image_indices(split), usable) for split in index.splits}
    refusals = find_refusals(
        index, max_bad_fraction=max_bad_fraction, max_bad_boxes=max_bad_boxes, usable=usable if decode_images else None
    )
    return DatasetCheck(
        data=str(data),
        root=index.source,
        format=index.format,
        classes=index.class_names,
        splits=counts,
        num_images=len(index) + num_dropped_images,
        num_usable_images=int(usable.sum()),
        num_boxes=len(index.boxes) + num_dropped_boxes,
        num_usable_boxes=sum(split.num_usable_boxes for split in counts.values()),
        decoded=decode_images,
        max_bad_fraction=max_bad_fraction,
        max_bad_boxes=max_bad_boxes,
        items=tuple(found_problems),
        refusals=tuple(error.what for error in refusals),
        notes=index.notes,
    )


def _report_unlisted(index: Index, problems: ProblemCollector) -> None:
    found = {problem.kind: problem.examples for problem in problems.summarize()}
    named = {*found.get("not-in-a-split", ()), *(text.rpartition(": ")[0] for text in found.get("no-box-left", ()))}
    named.update(found.get("missing-image", ()))
    for path in unlisted_images(index):
        if (name := os.path.relpath(path, index.root)) not in named:
            problems.add("unlabeled-image", name)


def _num_workers(root: Path) -> int:
    """Returns the cores; many more for images in a bucket, since reading them is mostly waiting."""
    return max(host_cores(), REMOTE_IO_WORKERS) if image_source.path_to_uri(root) else host_cores()


def _count_split(index: Index, image_indices: NDArray[np.int64], usable: NDArray[np.bool_]) -> SplitCounts:
    boxes = index.offsets[image_indices + 1] - index.offsets[image_indices]
    return SplitCounts(
        num_images=len(image_indices),
        num_usable_images=int(usable[image_indices].sum()),
        num_boxes=int(boxes.sum()),
        num_usable_boxes=int(boxes[usable[image_indices]].sum()),
    )


CHUNK_BYTES = 1 << 24
"""Bytes of a shard that a thread has in memory."""


def packed_folder(data: str | Path) -> Path | None:
    """The folder of a packed data set, of one in a bucket its mirror; else None. Raises DataError, StorageError."""
    location = expand_variables(os.fspath(data))
    path = Path(location)
    if is_uri(location):
        from stoker.data import remote  # imports what is only needed for buckets

        path = remote.resolve_dataset(parse_uri(location), ()).path
    return path if (path / INDEX_FILE).is_file() else None


def check_shards(folder: Path, problems: ProblemCollector, *, read: bool, workers: int, progress: Progress) -> None:
    """Adds the shards that are not as they were packed to `problems`. read: also compares the checksums.

    progress: called with the images in the shards that were read, and in all. Raises DataError for an index that cannot
    be read, StorageError for a bucket that cannot be read."""
    shards = read_info(folder / INDEX_FILE).shards
    lost = lost_shards(folder, shards)
    for shard, text in lost:
        is_there = (folder / shard.name).exists()
        problems.add("cut-packed-shard" if is_there else "missing-packed-shard", f"{shard.name} {text}")
    if not read:
        return
    lost_names = {shard.name for shard, _ in lost}
    rest = [shard for shard in shards if shard.name not in lost_names]
    done, total = 0, sum(shard.num_images for shard in rest)
    with ThreadPoolExecutor(workers) as pool:
        for shard, text in zip(rest, pool.map(lambda shard: _compare(folder, shard), rest), strict=True):
            if text:
                problems.add("changed-packed-shard", f"{shard.name} with {shard.num_images:,} images: {text}")
            done += shard.num_images
            progress(done, total)


def _compare(folder: Path, shard: Shard) -> str:
    """Returns what is wrong with the content of a shard of the right size; empty if nothing is."""
    path, digest = folder / shard.name, hashlib.sha256()
    remote_object = image_source.find_remote(path)
    try:
        for start in range(0, shard.size_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, shard.size_bytes - start)
            if remote_object is None:
                digest.update(image_source.read_local(path, (start, length)))
            else:
                digest.update(image_source.read_object(remote_object, start, length))
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    if digest.hexdigest() != shard.sha256:
        return f"SHA-256 {digest.hexdigest()[:12]}…, not {shard.sha256[:12]}…"
    return ""


CHUNK_SIZE = 16
"""Images of a task of a thread."""
DECODE_SHRINK = {"jpeg": 8}
"""Scale denominator of decoding. Other formats are decoded at full size and resized by 2, where that is cheapest."""
MAGIC_BYTES = (b"\xff\xd8", b"\x89P", b"BM", b"GIF", b"RIFF", b"II", b"MM")
"""First bytes of a damaged image, where the rest of its header cannot be read."""
GRAY_MODES, ALPHA_MODES = ("1", "L", "LA", "La", "I"), ("LA", "La", "PA", "RGBA", "RGBa")
"""Pillow's names of channels."""


class _ImageCheck(NamedTuple):
    image_index: int
    problems: list[tuple[str, str]]
    """(kind, details)."""
    usable: bool
    digest: bytes
    """Hash of the file; empty when it could not be read."""


def check_image_files(
    index: Index, problems: ProblemCollector, *, workers: int, progress: Progress
) -> NDArray[np.bool_]:
    """Checks all images and adds their problems to `problems`. Returns bool [R], which images can be used."""
    usable = np.zeros(len(index), np.bool_)
    indices_by_digest: dict[bytes, list[int]] = {}
    chunks = [range(start, min(start + CHUNK_SIZE, len(index))) for start in range(0, len(index), CHUNK_SIZE)]
    thread_state = threading.local()
    with ThreadPoolExecutor(workers) as pool:
        done = 0
        # `map` returns the results in order, so reports do not depend on the threads; it cancels the rest on an error
        for results in pool.map(lambda chunk: [_check_image(index, i, thread_state) for i in chunk], chunks):
            for result in results:
                usable[result.image_index] = result.usable
                for kind, text in result.problems:
                    path = _relative_path(index, result.image_index)
                    problems.add(kind, f"{path}: {text}" if text else path)
                if result.digest:
                    indices_by_digest.setdefault(result.digest, []).append(result.image_index)
            done += len(results)
            progress(done, len(index))
    _report_duplicates(index, indices_by_digest, problems)
    return usable


def _check_image(index: Index, image_index: int, thread_state: threading.local) -> _ImageCheck:
    path = index.path(image_index)
    annotated_size = (int(index.original_size[image_index, 0]), int(index.original_size[image_index, 1]))
    data, digest, usable = b"", b"", False
    problems: list[tuple[str, str]] = []
    try:
        data = index.read(image_index)
        digest = blake2b(data, digest_size=16).digest() if data else b""
        file_header = parse_header(data, path)
        header = file_header.as_annotated(annotated_size)
        problems += _image_warnings(data, file_header, annotated_size, path)
        if 0 not in annotated_size and header.size != annotated_size:
            text = f"{annotated_size[1]} × {annotated_size[0]} in the annotations"
            problems.append(("size-disagrees", f"{text}, {header.size[1]} × {header.size[0]} in the file"))
        else:
            _decode(data, header, path, thread_state)
            usable = True
    except DataError as error:
        problems.append((_classify_error(error, data), error.cause or ""))
    except OSError as error:
        kind = "missing-image" if error.errno in (errno.ENOENT, errno.ENOTDIR) else "unreadable-image"
        problems.append((kind, "" if kind == "missing-image" else error.strerror or str(error)))
    return _ImageCheck(image_index, problems, usable, digest)


def _classify_error(error: DataError, data: bytes) -> str:
    if not data:
        return "empty-image"
    if error.what.endswith("is too large."):  # `headers.parse_header`; `tests/trainer/data/test_hostile.py` checks it
        return "too-large-image"
    return "damaged-image" if data.startswith(MAGIC_BYTES) else "not-an-image"


def _decode(data: bytes, header: Header, path: Path, thread_state: threading.local) -> None:
    height, width = header.size
    shrink = DECODE_SHRINK.get(header.image_format, 2)
    shape = max(1, height // shrink), max(1, width // shrink), 3
    size = shape[0] * shape[1] * 3
    buffer: NDArray[np.uint8] | None = getattr(thread_state, "memory", None)
    if buffer is None or buffer.size < size:
        buffer = thread_state.memory = np.empty(size, np.uint8)
    decode_into(data, path, region=(0, 0, width, height), out=buffer[:size].reshape(shape), header=header)


def _image_warnings(
    data: bytes, header: Header, annotated_size: tuple[int, int], path: Path
) -> Iterator[tuple[str, str]]:
    """Yields (kind, details) of what an image that can be used has. annotated_size: height and width."""
    if header.is_orientation_ambiguous(annotated_size):
        yield "ambiguous-rotation", f"EXIF orientation {header.orientation}"
    elif header.orientation != 1:
        action = "rotated upright" if header.size == annotated_size else "not rotated"
        size = f"{annotated_size[1]} × {annotated_size[0]}"
        yield "rotated-image", f"EXIF orientation {header.orientation}, {action}: {size}"
    suffix = os.path.splitext(path.name)[1].lower()
    if suffix in KNOWN_SUFFIXES and suffix not in SUFFIXES[header.image_format]:
        yield "misnamed-image", header.image_format.upper()
    mode, _, bit_depth = _mode(data, header).partition(";")
    kinds = {
        "gray-image": mode in GRAY_MODES, "cmyk-image": mode == "CMYK", "deep-image": bit_depth.startswith("16"),
        "transparent-image": mode in ALPHA_MODES,
    }  # fmt: skip
    yield from ((kind, "") for kind, is_so in kinds.items() if is_so)


def _mode(data: bytes, header: Header) -> str:
    """Returns channels as Pillow names them, followed by ";16" where they have 16 bits; "" when not known."""
    if header.image_format == "jpeg":
        return {1: "L", 4: "CMYK"}.get(header.channels, "RGB")
    if header.image_format == "png":
        bit_depth, color_type = data[24], data[25]
        return {0: "L", 4: "LA", 6: "RGBA"}.get(color_type, "RGB") + (";16" if bit_depth == 16 else "")
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.mode
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # decoding reports the problem
        return ""


def _report_duplicates(index: Index, indices_by_digest: dict[bytes, list[int]], problems: ProblemCollector) -> None:
    duplicate_groups = [image_indices for image_indices in indices_by_digest.values() if len(image_indices) > 1]
    if not duplicate_groups:
        return
    split_by_image = {
        image_index: split for split in index.splits for image_index in index.image_indices(split).tolist()
    }
    for image_indices in duplicate_groups:
        index_by_name = {_relative_path(index, image_index): image_index for image_index in image_indices}
        if len(index_by_name) == 1:
            continue  # one file in two splits: reported by its name (`clean.py`)
        splits = {split_by_image[image_index] for image_index in image_indices}
        text = ", ".join(f"{name} ({split_by_image[image_index]})" for name, image_index in index_by_name.items())
        problems.add("copied-image" if len(splits) == 1 else "same-image-in-two-splits", text)


def _relative_path(index: Index, image_index: int) -> str:
    return os.path.relpath(index.path(image_index), index.root)
