"""Public data sets in layouts of their own: VisDrone, CrowdHuman, TT100K, WIDER FACE, DOTA, BDD100K, xView and others.

`public_sets.toml` has a row for each: where its files are, how they begin, and where the image, the box and the class of
an object are. Lines of text become objects with the names of their columns, so that text and JSON are read alike. What a
row calls ignored becomes a crowd box. Not here: sets that are COCO JSON (Objects365, LVIS), tables with names of columns
or an image per row (SKU-110K, Global Wheat: `csv.py`), KITTI.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from stoker.data.formats import folders
from stoker.data.formats.images import Box, ImageFile, ImageLocator, TableBuilder, is_usable_name
from stoker.data.formats.tables import XYXY, AnnotationTable, DatasetLayout, SplitFiles, bound_points
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

SUFFIXES = (".odgt", ".geojson", ".json", ".txt")
Record = tuple[str, Any]
"""Place in a file, for messages, and what is there: about an image, or about one object and its image."""


class PublicSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of `public_sets.toml`, which says what the fields mean."""

    name: str
    source: str
    dirs: tuple[str, ...]
    suffix: str
    first_bytes: str
    content: Literal["json", "json-lines", "lines", "blocks"]
    per_image: bool = False
    rename: tuple[str, str] = ("^.*/", "")
    images: tuple[str, ...] = ()
    delimiter: str = ""
    columns: tuple[str, ...] = ()
    records: str = ""
    image: str = ""
    objects: str = ""
    box: tuple[str, ...]
    box_format: Literal["xyxy", "xywh", "polygon"] = "xyxy"
    label: str = ""
    classes: dict[str, str] = {}
    ignored: dict[str, tuple[str, ...]] = {}
    unlisted: Literal["reported", "counted"] = "reported"

    def matches(self, file: Path) -> bool:
        is_named = file.name.endswith(self.suffix)
        return is_named and re.search(self.first_bytes.encode(), folders.read_head(file), re.M | re.S) is not None


@cache
def public_sets() -> tuple[PublicSet, ...]:
    text = (resources.files("stoker.data.formats") / "public_sets.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=dict[str, tuple[PublicSet, ...]])["set"]


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the public set of a file, or of a folder (not of its subfolders, except those of the row); else None."""
    for row in public_sets():
        root = path
        if path.is_file():
            root = folders.root_of(path)
            found = [path] if not row.per_image and row.matches(path) else []
        else:
            found = list(_find_annotations(path, row))
        if found:
            parts = folders.sort_parts(_make_part(root, file, row) for file in found)
            names = ", ".join(os.path.relpath(file, root) for file in found[:3])
            return DatasetLayout(format="public", description=f"{row.name} ({names})", root=root, parts=parts)
    return None


def _find_annotations(folder: Path, row: PublicSet) -> Iterator[Path]:
    """Yields the files of a row, or the folders of a file for each image."""
    directories = (path for pattern in row.dirs for path in (sorted(folder.glob(pattern)) if pattern else [folder]))
    for directory in folders.unique(directories):
        files = list(islice(_iter_files(directory, row), folders.MAX_PROBES)) if directory.is_dir() else []
        matching = [file for file in files if row.matches(file)]
        yield from ([directory] if row.per_image and matching else matching)


def _iter_files(directory: Path, row: PublicSet) -> Iterator[Path]:
    if not row.per_image:
        return iter(folders.list_files(directory, row.suffix))
    below = (_iter_files(path, row) for path in folders.list_subdirs(directory).values())
    return chain(folders.list_files(directory, row.suffix.lower()), *below)


def _make_part(root: Path, file: Path, row: PublicSet) -> SplitFiles:
    split = folders.split_from_name(file.name)
    own_dir = file if row.per_image else file.parent
    patterns = [pattern.format(split=split or "*") for pattern in row.images]
    own = [path for base in (root, own_dir) for pattern in patterns for path in sorted(base.glob(pattern))]
    nearby = [*folders.iter_nearby_dirs(own_dir, root, split), *folders.list_dirs_below(root)]
    return folders.file_part(file, split, [*own, *nearby])


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if a file is not JSON, or if no image is named."""
    builder = TableBuilder(layout, problems, box_id_kind="object")
    index_by_image: dict[tuple[int, Path, str], int] = {}
    ignored: list[Box] = []
    for part in layout.parts:
        files = [part.annotations]
        row = next(row for row in public_sets() if layout.description.startswith(f"{row.name} ("))
        if row.per_image:
            files = list(_iter_files(part.annotations, row))
        locator = ImageLocator(layout.root, part)
        for file in files:
            location = os.path.relpath(file, layout.root)
            for number, (place, record) in enumerate(_iter_records(file, location, row, problems), 1):
                name = re.sub(*row.rename, os.path.splitext(location)[0]) if row.per_image else _get(record, row.image)
                if not isinstance(name, str) or not is_usable_name(name):
                    problems.add("malformed-image", f"{location}{place}: it names no image")
                    continue
                folder, name = _locate(locator, name)
                image = ImageFile(folder, name, locator.split_index(part.split, folder))
                if (index := index_by_image.get(image[:3])) is None:
                    index = index_by_image[image[:3]] = builder.add_image(image, location)
                objects = _items(_get(record, row.objects)) if row.objects else [record]
                for position, item in enumerate(objects, 1 if row.objects else number):
                    _add_object(item, position, f"{location}{place}", row, index, builder, ignored)
        builder.notes += locator.notes()
    if not builder.images:
        raise DataError("The annotations name no image.", location=builder.location(), fix="copy them again")
    used = {str(box.label) for box in (*builder.boxes, *ignored) if box.label}
    names = [name for name in dict.fromkeys(row.classes.values()) if name in used] or sorted(used)
    names = names or list(dict.fromkeys(row.classes.values()))
    if ignored:
        text = f"{len(builder.boxes):,} objects; {len(ignored):,} ignored regions, which are no targets"
        builder.notes.append(f"{text}: each is a crowd box, of each class if it has none itself")
    for box in ignored:
        builder.boxes += [box._replace(label=name) for name in ([box.label] if box.label else names)]
    return builder.build(names)


def _iter_records(file: Path, location: str, row: PublicSet, problems: ProblemCollector) -> Iterator[Record]:
    data = regular_files.read_bytes(file, max_bytes=regular_files.MAX_ANNOTATION_BYTES).removeprefix(b"\xef\xbb\xbf")
    if row.content == "json":
        yield from _iter_json(file, data, row)
    elif row.content == "json-lines":
        for number, line in enumerate(data.splitlines(), 1):
            try:
                yield f":{number}", msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                if line.strip():
                    problems.add("unreadable-annotations", f"{location}:{number}: it is not JSON: {error}")
    else:
        lines = [line.strip() for line in data.decode("utf-8", "surrogateescape").splitlines()]
        yield from _iter_blocks(lines, row) if row.content == "blocks" else _iter_lines(lines, row)


def _iter_json(file: Path, data: bytes, row: PublicSet) -> Iterator[Record]:
    try:  # a list is decoded entry by entry: objects need many times the memory of their text
        is_list = data.lstrip()[:1] == b"["
        document: Any = msgspec.json.decode(data, type=list[msgspec.Raw]) if is_list else msgspec.json.decode(data)
        for number, entry in enumerate(_items(_get(document, row.records)) if row.records or is_list else [document]):
            yield f", entry {number}", msgspec.json.decode(entry) if isinstance(entry, msgspec.Raw) else entry
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise make_error(DataError, "invalid-json", file, text=str(error), num_bytes=len(data)) from error


def _iter_lines(lines: list[str], row: PublicSet) -> Iterator[Record]:
    """Yields the objects in lines of text; of a file about one image, without any, the image."""
    used = [(number, line) for number, line in enumerate(lines, 1) if line and not re.match(r"[a-z]+:", line)]
    if row.per_image and not used:
        yield "", None
    for number, line in used:
        yield f":{number}", _fields(line, row)


def _iter_blocks(lines: list[str], row: PublicSet) -> Iterator[Record]:
    """Yields images with their objects. After the number 0 is a line of zeros, which is no object."""
    starts = [number for number, line in enumerate(lines) if folders.is_image_name(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        count = next((int(line) for line in lines[start + 1 : start + 2] if line.isdecimal()), 0)
        objects = [_fields(line, row) for line in lines[start + 2 : min(end, start + 2 + count)]]
        yield f":{start + 1}", {row.image: lines[start], row.objects: objects}


def _fields(line: str, row: PublicSet) -> dict[str, str]:
    return dict(zip(row.columns, line.split(row.delimiter), strict=False))


def _get(value: Any, path: str) -> Any:
    """Returns the value at a path; None where there is none."""
    for key in path.split(".") if path else ():
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else []


def _locate(locator: ImageLocator, name: str) -> tuple[Path, str]:
    if name.lower().endswith(tuple(folders.KNOWN_SUFFIXES)):
        return locator.locate(name)
    with_suffix = (f"{name}{suffix}" for suffix in folders.IMAGE_SUFFIXES)
    return locator.find(*with_suffix, name) or locator.locate(f"{name}.jpg")


def _add_object(
    item: Any, number: int, place: str, row: PublicSet, index: int, builder: TableBuilder, ignored: list[Box]
) -> None:
    """Adds the box of an object to an image, or to the ignored ones; reports or counts one without a usable box."""
    if item is None:
        return
    values = [_get(item, path) for path in row.box]
    written = str(_get(item, row.label)) if row.label else next(iter(row.classes))
    name = row.classes.get(written, "") if row.classes else written
    is_ignored = any(str(_get(item, path)).lower() in texts for path, texts in row.ignored.items())
    if not name and not is_ignored and row.unlisted == "counted":
        builder.counts[f"{written}, which is no class of objects and is not read"] += 1
    elif all(value is None for value in values) and row.content == "json":
        builder.counts[f"{written} without a box, which is not read"] += 1
    elif not name and not is_ignored:
        builder.problems.add("unknown-class", f"{place}, object {number}: {written!r}")
        builder.bad_boxes.append(index)
    elif (xyxy := _bound(values, row)) is None:
        builder.problems.add("malformed-box", f"{place}, object {number}: {str(item)[:60]}")
        builder.bad_boxes.append(index)
    else:
        box = Box(index, name, xyxy, number, is_crowd=is_ignored)
        (ignored if is_ignored else builder.boxes).append(box)


def _bound(values: list[Any], row: PublicSet) -> XYXY | None:
    """Returns the box of numbers, of a list or of a text of them; None if they cannot be read."""
    content: Any = values[0] if len(row.box) == 1 else values
    content = content.split(",") if isinstance(content, str) else content
    try:
        numbers = [float(number) for item in content for number in (item if isinstance(item, list) else [item])]
        if row.box_format == "polygon":
            return bound_points(list(zip(numbers[::2], numbers[1::2], strict=True)))
        a, b, c, d = numbers
    except (TypeError, ValueError):
        return None
    return cast(XYXY, (a, b, a + c, b + d) if row.box_format == "xywh" else (a, b, c, d))
