"""Which files make up a TFRecord data set, and which label maps may be theirs.

Recognised: files called *.record, *.tfrecord and the like, whole or numbered (`train.record-00003-of-00010`), plain or
gzip, in one folder or in `train/`, `valid/`, `test/`; one such file; a pattern ("train.record*"). Their split is in the
name of the file or of that folder. Not here: what is in the files (`tfrecord.py`), reading label maps (`label_map.py`).
"""

import os
import re
from collections.abc import Iterable, Iterator
from glob import has_magic
from pathlib import Path

from stoker.data.formats import label_map
from stoker.data.formats.tables import (
    SPLITS,
    Found,
    Part,
    split_folders,
    split_in_name,
    subfolders,
    without_annotations,
)
from stoker.data.formats.tfrecord_frames import HEADER_BYTES, begins_a_record

GZIP = b"\x1f\x8b"
_ENDING = re.compile(r"\.(tf_?records?|tfrec|records?)(?=$|[-.])", re.IGNORECASE)
ENDINGS = (".record", ".records", ".tfrecord", ".tfrecords", ".tf_record", ".tfrec")
BESIDE = ("annotations", "labels", "label_map", "label_maps", "labelmap", "labelmaps", "data", "training", "configs")
"""Folders beside that of the records in which people keep label maps. Others may be other data sets, with maps of
their own."""
_NUMBERED = re.compile(r"(.*)-(\d{3,7})-of-(\d{3,7})(.*)", re.DOTALL)


def find(folder: Path) -> Found | None:
    """The TFRecord data set in a folder or in its split folders (not further below), or None."""
    parts, notes = _parts(folder, None)
    if parts:
        return _found(folder, parts, notes)
    for split, path in split_folders(folder):
        inner, more = _parts(path, split)
        parts += inner
        notes += more
    return _found(folder, parts, notes + without_annotations(folder, parts)) if parts else None


def from_file(path: Path) -> Found:
    """The data set of a single file."""
    return _found(path.parent, [Part(split=split_in_name(path.name), annotations=path, pictures=())], [])


def without_number(name: str) -> str:
    """The name of a file of a numbered series without its number: "train.record" of "train.record-00003-of-00010"."""
    match = _NUMBERED.fullmatch(name)
    return name if match is None else match[1] + match[4]


def is_pattern(data: Path) -> bool:
    """Whether the name of a file that does not exist is a pattern: "train.record*", "train.record-?????-of-00010"."""
    return has_magic(data.name)


def from_pattern(data: Path) -> Found | None:
    """The data set of the files in a folder whose names fit a pattern; None where there are none."""
    folder = data.parent.resolve()
    paths = [path for path in sorted(folder.glob(data.name)) if path.is_file() and _by_name(path)]
    parts = [Part(split=split_in_name(path.name), annotations=path, pictures=()) for path in paths]
    return _found(folder, parts, []) if parts else None


def _found(root: Path, parts: list[Part], notes: list[str]) -> Found:
    parts = sorted(parts, key=lambda part: SPLITS.index(part.split) if part.split else len(SPLITS))
    shards = f"{len(parts)} files" if len(parts) > 1 else "one file"
    folders = list(dict.fromkeys(part.annotations.parent for part in parts))
    return Found(
        format="tfrecord",
        layout=f"TFRecord in {shards}",
        root=root,
        parts=tuple(parts),
        notes=tuple(notes),
        # other programs have .record files, too; where nothing else is found, reading says what is wrong with these
        sure=any(_begins_well(part.annotations) for part in parts),
        descriptions=tuple(_label_maps(folders, root)),
    )


def _parts(folder: Path, split: str | None) -> tuple[list[Part], list[str]]:
    """The shards in a folder by name, and notes on those that are not read."""
    with os.scandir(folder) as entries:  # of which there may be a hundred thousand, all pictures
        names = sorted(entry.name for entry in entries if "rec" in entry.name.lower() or "-of-" in entry.name)
    paths = [folder / name for name in names if _by_name(folder / name) and (folder / name).is_file()]
    plain = {path.name for path in paths}
    twice = [path for path in paths if path.suffix == ".gz" and path.name[: -len(".gz")] in plain]
    paths = [path for path in paths if path not in twice]
    notes = [f"{path.name} is not read: {path.stem} is there, too" for path in twice]
    return [Part(split=split or split_in_name(path.name), annotations=path, pictures=()) for path in paths], notes


def _by_name(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    if _ENDING.search(path.name) is not None:
        return True
    return _NUMBERED.fullmatch(path.name) is not None and path.is_file() and _begins_well(path)


def _begins_well(path: Path) -> bool:
    """Whether a file is empty or begins as a plain or a gzip shard does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    return not head or head.startswith(GZIP) or begins_a_record(head)


def missing_shards(paths: Iterable[Path]) -> Iterator[str]:
    """For each numbered series, the numbers that its names promise and that are not in its folder, in words."""
    series: dict[tuple[Path, str, int, str, int], None] = {}
    for path in paths:
        if match := _NUMBERED.fullmatch(path.name):
            head, number, total, tail = match.groups()
            series[path.parent, head, int(total), tail, len(number)] = None
    for folder, head, count, tail, digits in series:
        names = {path.name for path in folder.iterdir()}
        of = f"-of-{count:0{digits}}{tail}"
        absent = [number for number in range(count) if f"{head}-{number:0{digits}}{of}" not in names]
        if absent:
            shown = ", ".join(f"{number:0{digits}}" for number in absent[:10])
            more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
            yield f"{folder / head}-*{of}: {len(absent)} of {count} are missing, numbers {shown}{more}"


def _label_maps(folders: list[Path], root: Path) -> list[Path]:
    """Label maps of the nearest place that has any: with the records, below them, above them, in a folder beside."""
    beside = [path for name, path in subfolders(root.parent).items() if name in BESIDE and path != root]
    for places, pattern in (
        ([*folders, root], "*.pbtxt"),
        ([root], "*/*.pbtxt"),
        ([root.parent], "*.pbtxt"),
        (beside, "*.pbtxt"),
    ):
        files = (path for place in dict.fromkeys(places) for path in sorted(place.glob(pattern)))
        if nearest := [path for path in files if path.is_file() and label_map.looks_like_one(path)]:
            return nearest
    return []


def is_beside(path: Path, root: Path) -> bool:
    """Whether a label map lies in a folder beside that of the records: it may belong to another data set."""
    return path.parent != root.parent and not path.is_relative_to(root)
