"""Recognizes data sets in formats that stoker does not read, by names and first bytes, to tell how to convert them.

The commands of panlabel 0.7 were run on small data sets, except those for Labelbox and Unity Perception; those of
Datumaro, FiftyOne, Supervisely and Ultralytics are from their documentation. Used for error messages, and by
`coco.py`, because many tools have "annotations" in their JSON. Not here: the formats that are read (`finder.py`).
"""

import functools
import json
import os
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import resources
from itertools import islice
from pathlib import Path

import msgspec

from stoker.data.formats.folders import MAX_PROBES, MAX_SEARCHED_DIRS, read_head


class OtherFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `others.toml`, which says what the fields mean."""

    name: str
    pattern: str
    fix: str
    first_bytes: str | None = None


class _Rows(msgspec.Struct):
    format: tuple[OtherFormat, ...]


@functools.cache
def other_formats() -> tuple[OtherFormat, ...]:
    """In the order in which they are tried on a file."""
    text = (resources.files("stoker.data.formats") / "others.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=_Rows).format


def recognize_file(file: Path, head: bytes) -> OtherFormat | None:
    """The format of a file, from its name and its first bytes."""
    name = f"{file.parent.name}/{file.name}".lower()
    candidates = (row for row in other_formats() if fnmatch(name, row.pattern))
    return next((row for row in candidates if re.search((row.first_bytes or "").encode(), head, re.DOTALL)), None)


def recognize(data: Path) -> tuple[str, Path, str] | None:
    """(format, a file of it, how to convert) of a file or folder; None if no format is recognized."""
    for file in [data] if data.is_file() else _iter_files(data):
        if (row := recognize_file(file, read_head(file))) is not None:
            return row.name, file, _fill_in(row.fix, file, data if data.is_dir() else data.parent)
    return None


def _fill_in(fix: str, file: Path, data: Path) -> str:
    out_name = f"{file.stem}.coco.json" if file.parent == data else f"{file.parent.name}-{file.stem}.coco.json"
    places = {"data": data, "file": file, "folder": file.parent, "parent": file.parent.parent, "out": data / out_name}
    return fix.format(
        **{name: shlex.quote(str(path)) for name, path in places.items()}, paths=json.dumps([str(data), f"{data}-coco"])
    )


def _iter_files(folder: Path) -> Iterator[Path]:
    """The first few files of each suffix, of the folder and those below it."""
    for path, folders, names in islice(os.walk(folder), MAX_SEARCHED_DIRS):
        folders.sort()
        seen: dict[str, int] = {}
        for name in sorted(names):
            suffix = os.path.splitext(name)[1].lower()
            seen[suffix] = seen.get(suffix, 0) + 1
            if seen[suffix] <= MAX_PROBES:
                yield Path(path, name)
