"""The entries of a COCO JSON file: decoded at once where all are as COCO has them, else one by one.

One by one, an entry that does not fit is put among the problems and left out; numbers written as text are read. What
makes the whole file meaningless (no JSON, no list of pictures) is a `DataError`. Not here: what the entries mean
together (`coco.py`).
"""

import json
import mmap
from collections.abc import Callable, Iterable
from math import nan
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from stoker.data.formats.categories import Category
from stoker.data.validation.problems import Problems
from stoker.errors import DataError

Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
FORMAT = "https://cocodataset.org/#format-data describes the fields; correct the entry or export the file again"
SHOWN = 120
"""Characters of an entry that a message quotes."""


class Picture(msgspec.Struct, gc=False):
    """An entry of COCO's "images"."""

    id: Id
    file_name: str
    height: float | None = None
    width: float | None = None


class Annotation(msgspec.Struct, gc=False):
    """An entry of COCO's "annotations"."""

    image_id: Id
    category_id: Id
    bbox: tuple[float, ...] | None = None
    area: float | None = nan
    iscrowd: float | bool | None = False
    id: Any = None


class File(msgspec.Struct):
    """What is read of a COCO file."""

    images: list[Picture]
    categories: list[Category]
    annotations: list[Annotation] = []


class _RawFile(msgspec.Struct):
    """The same with entries that nobody has looked at."""

    images: list[msgspec.Raw]
    categories: list[msgspec.Raw] = []
    annotations: list[msgspec.Raw] = []


class _LooseFile(msgspec.Struct):
    """The same of what Python's own parser made."""

    images: list[Any]
    categories: list[Any] = []
    annotations: list[Any] = []


class _PictureWithoutSize(msgspec.Struct):
    id: Id
    file_name: str


Entry = TypeVar("Entry", bound=msgspec.Struct)
Convert = Callable[..., Any]
"""(entry, type=, strict=) → an object of that type; raises msgspec.ValidationError."""


def read_entries(path: Path, where: str, problems: Problems) -> File:
    """Decodes an annotation file. where: its name in messages. Raises DataError."""
    if path.stat().st_size == 0:
        raise DataError("The annotation file is empty.", place=path, fix="export or copy it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        view = memoryview(content)
        with view[3:] if content[:3] == b"\xef\xbb\xbf" else view[:] as text, view:
            try:
                try:
                    return msgspec.json.decode(text, type=File)
                except msgspec.ValidationError:
                    # it stops at the first entry that does not fit; what comes behind may not even be JSON
                    raw = msgspec.json.decode(bytes(text), type=_RawFile)
                return _one_by_one(path, raw, msgspec.json.decode, where, problems)
            except msgspec.ValidationError as error:
                raise _no_coco(path, error) from error
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if content.find(b"NaN") < 0 and content.find(b"Infinity") < 0:
                    raise _malformed(path, content, error) from error
                return _with_nan(path, bytes(text), where, problems)


def _with_nan(path: Path, text: bytes, where: str, problems: Problems) -> File:
    """NaN and Infinity are not JSON, but Python writes them: their boxes are to be dropped and named, not the file."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _malformed(path, text, error) from error
    try:
        return msgspec.convert(content, type=File)
    except msgspec.ValidationError:
        try:
            loose = msgspec.convert(content, type=_LooseFile)
        except msgspec.ValidationError as error:
            raise _no_coco(path, error) from error
    return _one_by_one(path, loose, msgspec.convert, where, problems)


def _no_coco(path: Path, error: msgspec.ValidationError) -> DataError:
    return DataError("The annotations are not COCO JSON for detection.", place=path, cause=str(error), fix=FORMAT)


def _one_by_one(path: Path, raw: _RawFile | _LooseFile, convert: Convert, where: str, problems: Problems) -> File:
    def entries(name: str, kind: type[Entry], complaint: str, found: Iterable[Any]) -> list[Entry]:
        fitting = []
        for number, entry in enumerate(found):
            try:
                fitting.append(convert(entry, type=kind))
                continue
            except msgspec.ValidationError as error:
                reason = str(error)
            place = f'{where}, "{name}" number {number}: {_quoted(entry)}'
            try:
                fitting.append(convert(entry, type=kind, strict=False))
                problems.add("text-for-number", place)
            except msgspec.ValidationError:
                bare = _without_size(entry, convert) if kind is Picture else None
                if bare is None:
                    problems.add(complaint, f"{place}: {reason}")
                else:
                    problems.add("malformed-size", f"{place}: {reason}")
                    fitting.append(bare)
        return fitting

    file = File(
        entries("images", Picture, "malformed-picture", raw.images),
        entries("categories", Category, "malformed-class", raw.categories),
        entries("annotations", Annotation, "malformed-annotation", raw.annotations),
    )
    for name in ("images", "annotations"):
        found = getattr(raw, name)
        if found and not getattr(file, name):
            reasons = [p for p in problems.found(1) if p.kind in ("malformed-picture", "malformed-annotation")]
            raise DataError(f'No entry of "{name}" can be read.', place=path, cause=reasons[-1].examples[0], fix=FORMAT)
    return file


def _without_size(entry: Any, convert: Convert) -> Picture | None:
    try:
        bare = convert(entry, type=_PictureWithoutSize, strict=False)
    except msgspec.ValidationError:
        return None
    return Picture(bare.id, bare.file_name)


def _quoted(entry: Any) -> str:
    text = bytes(entry).decode(errors="replace") if isinstance(entry, msgspec.Raw) else json.dumps(entry)
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _malformed(path: Path, content: bytes | mmap.mmap, error: Exception) -> DataError:
    text = str(error)
    digits = text.rpartition("byte ")[2].rstrip(")")
    at = int(digits) if digits.isdigit() else len(content)
    line = content[:at].count(b"\n") + 1
    return DataError(
        "The annotation file is not valid JSON.",
        place=f"{path}:{line}",
        cause=f"{text} in a file of {len(content)} bytes",
        fix="export or copy it again; a truncated file ends in the middle of an entry",
    )
