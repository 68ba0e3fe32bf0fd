"""Finds the files of a TFRecord data set and the label maps that may belong to it.

Recognized: files called *.record, *.tfrecord and similar, whole or numbered (`train.record-00003-of-00010`), plain or
gzip, in one folder or in `train/`, `valid/`, `test/`; one such file; a pattern ("train.record*"). The split is in the
name of the file or of that folder. Not here: reading the files (`tfrecord.py`) and label maps (`label_map.py`).
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from stoker import regular_files
from stoker.data.formats import label_map
from stoker.data.formats.tables import (
    SPLITS,
    DatasetLayout,
    SplitFiles,
    check_unannotated_splits,
    iter_split_dirs,
    list_subdirs,
    split_from_name,
)
from stoker.data.formats.tfrecord_frames import HEADER_BYTES, is_record_header

GZIP_MAGIC = b"\x1f\x8b"
_SUFFIX = re.compile(r"\.(tf_?records?|tfrec|records?)(?=$|[-.])", re.IGNORECASE)
SUFFIXES = (".record", ".records", ".tfrecord", ".tfrecords", ".tf_record", ".tfrec")
SIBLING_DIRS = (
    "annotations", "labels", "label_map", "label_maps", "labelmap", "labelmaps", "data", "training", "configs",
)  # fmt: skip
"""Folders next to that of the records in which people keep label maps. Other folders may be other data sets, with their
own maps."""
_SHARD_NAME = re.compile(r"(.*)-(\d{3,7})-of-(\d{3,7})(.*)", re.DOTALL)


def find(folder: Path) -> DatasetLayout | None:
    """The TFRecord data set in a folder or in its split folders, or None."""
    parts, notes = _find_parts(folder, None)
    if parts:
        return _make_layout(folder, parts, notes)
    for split, path in iter_split_dirs(folder):
        inner, inner_notes = _find_parts(path, split)
        parts += inner
        notes += inner_notes
    return _make_layout(folder, parts, notes + check_unannotated_splits(folder, parts)) if parts else None


def from_file(path: Path) -> DatasetLayout:
    """The data set of a single file."""
    return _make_layout(
        path.parent, [SplitFiles(split=split_from_name(path.name), annotations=path, image_dirs=())], []
    )


def strip_shard_number(name: str) -> str:
    """The name of a numbered file without its number: "train.record" for "train.record-00003-of-00010"."""
    match = _SHARD_NAME.fullmatch(name)
    return name if match is None else match[1] + match[4]


def from_glob(data: Path) -> DatasetLayout | None:
    """The data set of the files that match a pattern; None if there are none."""
    folder = data.parent.resolve()
    paths = [path for path in sorted(folder.glob(data.name)) if path.is_file() and _is_shard(path)]
    parts = [SplitFiles(split=split_from_name(path.name), annotations=path, image_dirs=()) for path in paths]
    return _make_layout(folder, parts, []) if parts else None


def _make_layout(root: Path, parts: list[SplitFiles], notes: list[str]) -> DatasetLayout:
    parts = sorted(parts, key=lambda part: SPLITS.index(part.split) if part.split else len(SPLITS))
    shards = f"{len(parts)} files" if len(parts) > 1 else "one file"
    folders = list(dict.fromkeys(part.annotations.parent for part in parts))
    return DatasetLayout(
        format="tfrecord",
        description=f"TFRecord in {shards}",
        root=root,
        parts=tuple(parts),
        notes=tuple(notes),
        # other programs use .record files too; if there is nothing else, reading them reports what is wrong
        is_certain=any(_has_tfrecord_header(part.annotations) for part in parts),
        metadata_files=tuple(_find_label_maps(folders, root)),
    )


def _find_parts(folder: Path, split: str | None) -> tuple[list[SplitFiles], list[str]]:
    """The shards in a folder, sorted, and notes on those that are not read."""
    with os.scandir(folder) as entries:  # there may be a hundred thousand, all of them images
        names = sorted(entry.name for entry in entries if "rec" in entry.name.lower() or "-of-" in entry.name)
    paths = [folder / name for name in names if _is_shard(folder / name) and (folder / name).is_file()]
    present = {path.name for path in paths}
    duplicates = [path for path in paths if path.suffix == ".gz" and path.name[: -len(".gz")] in present]
    paths = [path for path in paths if path not in duplicates]
    notes = [f"{path.name} is not read, because {path.stem} exists too" for path in duplicates]
    return [
        SplitFiles(split=split or split_from_name(path.name), annotations=path, image_dirs=()) for path in paths
    ], notes


def _is_shard(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if _SUFFIX.search(path.name) is not None:
        return True
    return _SHARD_NAME.fullmatch(path.name) is not None and path.is_file() and _has_tfrecord_header(path)


def _has_tfrecord_header(path: Path) -> bool:
    """Whether a file is empty or begins like a plain or a gzip shard."""
    if not path.is_file():
        return False
    with regular_files.open_file(path) as file:
        head = file.read(HEADER_BYTES)
    return not head or head.startswith(GZIP_MAGIC) or is_record_header(head)


def describe_missing_shards(paths: Iterable[Path]) -> Iterator[str]:
    """For each numbered series with missing files, a message with their numbers."""
    series: dict[tuple[Path, str, int, str, int], None] = {}
    for path in paths:
        if match := _SHARD_NAME.fullmatch(path.name):
            head, number, total, tail = match.groups()
            series[path.parent, head, int(total), tail, len(number)] = None
    for folder, head, count, tail, digits in series:
        names = {path.name for path in folder.iterdir()}
        suffix = f"-of-{count:0{digits}}{tail}"
        absent = [number for number in range(count) if f"{head}-{number:0{digits}}{suffix}" not in names]
        if absent:
            listed = ", ".join(f"{number:0{digits}}" for number in absent[:10])
            more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
            yield f"{folder / head}-*{suffix}: {len(absent)} of {count} are missing, numbers {listed}{more}"


def _find_label_maps(folders: list[Path], root: Path) -> list[Path]:
    """The label maps of the nearest folder that has any: with the records, below, above, in a sibling folder."""
    sibling_dirs = [path for name, path in list_subdirs(root.parent).items() if name in SIBLING_DIRS and path != root]
    for directories, pattern in (
        ([*folders, root], "*.pbtxt"),
        ([root], "*/*.pbtxt"),
        ([root.parent], "*.pbtxt"),
        (sibling_dirs, "*.pbtxt"),
    ):
        files = (path for directory in dict.fromkeys(directories) for path in sorted(directory.glob(pattern)))
        if nearest := [path for path in files if path.is_file() and label_map.looks_like_label_map(path)]:
            return nearest
    return []


def is_in_sibling_dir(path: Path, root: Path) -> bool:
    """Whether a label map is in a folder next to that of the records: it may belong to another data set."""
    return path.parent != root.parent and not path.is_relative_to(root)
