"""Decodes the entries of a COCO JSON file: all at once if all are valid, else one by one.

One by one, an invalid entry is reported and dropped, and numbers written as text are read. Image ids that are text,
such as "a/001", are replaced by numbers below -2**62, the same for the images and their annotations. A file that is not
JSON or has no list of images is a `DataError`. Not here: combining the entries (`coco.py`).
"""

import json
import mmap
from collections.abc import Callable, Iterable
from math import nan
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from stoker import regular_files
from stoker.data.formats.categories import Category
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
FORMAT_HINT = "https://cocodataset.org/#format-data describes the fields; correct the entry or export the file again"
MAX_QUOTED_CHARS = 120
"""Characters of an entry that are quoted in a message."""


class ImageEntry(msgspec.Struct, gc=False):
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


class CocoFile(msgspec.Struct):
    """The parts of a COCO file that are read."""

    images: list[ImageEntry]
    categories: list[Category]
    annotations: list[Annotation] = []


RawEntry = TypeVar("RawEntry")


class _RawFile(msgspec.Struct, Generic[RawEntry]):
    """The same with entries that are not checked: undecoded ones, or objects from Python's own parser."""

    images: list[RawEntry]
    categories: list[RawEntry] = []
    annotations: list[RawEntry] = []


class _ImageWithoutSize(msgspec.Struct):
    id: Id
    file_name: str


class _TextIdImage(msgspec.Struct):
    id: str
    file_name: str
    height: float | None = None
    width: float | None = None


class _TextIdAnnotation(msgspec.Struct):
    image_id: str
    category_id: Id
    bbox: tuple[float, ...] | None = None
    area: float | None = nan
    iscrowd: float | bool | None = False
    id: Any = None


class _TextIds:
    """Numbers for image ids that are text."""

    def __init__(self) -> None:
        self.number_by_text: dict[str, int] = {}

    def convert(self, entry: Any, entry_type: type[msgspec.Struct], convert: "Convert") -> Any:
        """The entry with a number in place of its text id; None if it is wrong in another way, too, or if it is an
        annotation of an image that is not listed."""
        try:
            if entry_type is ImageEntry:
                image = convert(entry, type=_TextIdImage)
                number = self.number_by_text.setdefault(image.id, -(2**62) - 1 - len(self.number_by_text))
                return ImageEntry(number, image.file_name, image.height, image.width)
            if entry_type is Annotation and self.number_by_text:
                box = convert(entry, type=_TextIdAnnotation)
                number = self.number_by_text[box.image_id]
                return Annotation(number, box.category_id, box.bbox, box.area, box.iscrowd, box.id)
        except (msgspec.ValidationError, KeyError):
            return None
        return None


Entry = TypeVar("Entry", bound=msgspec.Struct)
Convert = Callable[..., Any]
"""(entry, type=, strict=) → an object of that type. Raises msgspec.ValidationError."""


def read_entries(path: Path, location: str, problems: ProblemCollector) -> tuple[CocoFile, list[str]]:
    """Decodes an annotation file; and notes. location: its name in messages. Raises DataError."""
    if path.stat().st_size == 0:
        raise DataError("The annotation file is empty.", location=path, fix="export or copy it again")
    with (
        regular_files.open_file(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        view = memoryview(data)
        with view[3:] if data[:3] == b"\xef\xbb\xbf" else view[:] as text, view:
            try:
                try:
                    return msgspec.json.decode(text, type=CocoFile), []
                except msgspec.ValidationError:
                    # the decoder stopped at the first invalid entry; what follows may not even be JSON
                    raw = msgspec.json.decode(bytes(text), type=_RawFile[msgspec.Raw])
                return _convert_each(path, raw, msgspec.json.decode, location, problems)
            except msgspec.ValidationError as error:
                raise _not_coco_error(path, error) from error
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if data.find(b"NaN") < 0 and data.find(b"Infinity") < 0:
                    raise _invalid_json_error(path, data, error) from error
                return _decode_with_nan(path, bytes(text), location, problems)
            except RecursionError as error:
                raise DataError("The annotations are nested too deeply.", location=path, fix=FORMAT_HINT) from error


def _decode_with_nan(path: Path, text: bytes, location: str, problems: ProblemCollector) -> tuple[CocoFile, list[str]]:
    """NaN and Infinity are not JSON, but Python writes them. Only their boxes are dropped, not the file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid_json_error(path, text, error) from error
    try:
        return msgspec.convert(data, type=CocoFile), []
    except msgspec.ValidationError:
        try:
            untyped = msgspec.convert(data, type=_RawFile[Any])
        except msgspec.ValidationError as error:
            raise _not_coco_error(path, error) from error
    return _convert_each(path, untyped, msgspec.convert, location, problems)


def _not_coco_error(path: Path, error: msgspec.ValidationError) -> DataError:
    return DataError(
        "The annotations are not COCO JSON for detection.", location=path, cause=str(error), fix=FORMAT_HINT
    )


def _convert_each(
    path: Path, raw: _RawFile[Any], convert: Convert, location: str, problems: ProblemCollector
) -> tuple[CocoFile, list[str]]:
    text_ids = _TextIds()

    def convert_entries(name: str, entry_type: type[Entry], problem_kind: str, items: Iterable[Any]) -> list[Entry]:
        valid = []
        for position, entry in enumerate(items):
            try:
                valid.append(convert(entry, type=entry_type))
                continue
            except msgspec.ValidationError as error:
                reason = str(error)
            entry_location = f'{location}, "{name}" number {position}: {_quote(entry)}'
            try:
                valid.append(convert(entry, type=entry_type, strict=False))
                problems.add("text-for-number", entry_location)
                continue
            except msgspec.ValidationError:
                with_number = text_ids.convert(entry, entry_type, convert)
            if with_number is not None:
                valid.append(with_number)
            else:
                without_size = _convert_without_size(entry, convert) if entry_type is ImageEntry else None
                if without_size is None:
                    problems.add(problem_kind, f"{entry_location}: {reason}")
                else:
                    problems.add("malformed-size", f"{entry_location}: {reason}")
                    valid.append(without_size)
        return valid

    file = CocoFile(
        convert_entries("images", ImageEntry, "malformed-image", raw.images),
        convert_entries("categories", Category, "malformed-class", raw.categories),
        convert_entries("annotations", Annotation, "malformed-annotation", raw.annotations),
    )
    for name in ("images", "annotations"):
        raw_entries = getattr(raw, name)
        if raw_entries and not getattr(file, name):
            reasons = [p for p in problems.summarize(1) if p.kind in ("malformed-image", "malformed-annotation")]
            raise DataError(
                f'No entry of "{name}" can be read.', location=path, cause=reasons[-1].examples[0], fix=FORMAT_HINT
            )
    if not text_ids.number_by_text:
        return file, []
    count, example = len(text_ids.number_by_text), next(iter(text_ids.number_by_text))
    return file, [f"{location}: {count:,} image ids are text, such as {example!r}"]


def _convert_without_size(entry: Any, convert: Convert) -> ImageEntry | None:
    try:
        without_size = convert(entry, type=_ImageWithoutSize, strict=False)
    except msgspec.ValidationError:
        return None
    return ImageEntry(without_size.id, without_size.file_name)


def _quote(entry: Any) -> str:
    text = bytes(entry).decode(errors="replace") if isinstance(entry, msgspec.Raw) else json.dumps(entry)
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "…"


def _invalid_json_error(path: Path, data: bytes | mmap.mmap, error: Exception) -> DataError:
    text = str(error)
    digits = text.rpartition("byte ")[2].rstrip(")")
    offset = int(digits) if digits.isdigit() else len(data)
    line = data[:offset].count(b"\n") + 1
    return DataError(
        "The annotation file is not valid JSON.",
        location=f"{path}:{line}",
        cause=f"{text} in a file of {len(data)} bytes",
        fix="export or copy it again; a truncated file ends in the middle of an entry",
    )
