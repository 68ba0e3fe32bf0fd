"""Public data sets in layouts of their own: VisDrone, CrowdHuman, TT100K, WIDER FACE, DOTA, BDD100K, xView and others.

`public_sets.toml` has a row for each: where its files are, how they begin, and where the image, the box and the class of
an object are. Lines of text become objects with the names of their columns, so text and JSON are read alike. Not here:
sets that are COCO JSON (Objects365, LVIS) or tables with names of columns or an image per row (SKU-110K, Global Wheat:
`csv.py`); the files of KITTI (`kitti.py`, which reads their lines with `ObjectReader`).
"""

import os
import re
from collections.abc import Iterator, Mapping
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
    delimiter: str | None = None
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
def public_sets() -> dict[str, PublicSet]:
    """Returns the rows by their names."""
    text = (resources.files("stoker.data.formats") / "public_sets.toml").read_text(encoding="utf-8")
    rows = msgspec.toml.decode(text, type=dict[str, tuple[PublicSet, ...]])["set"]
    return {row.name: row for row in rows}


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the public set of a file, or of a folder (of its subfolders only those of the row); None if it is none."""
    root = path if path.is_dir() else folders.root_of(path)
    for row in public_sets().values():
        found = (
            list(_find_annotations(path, row)) if path.is_dir() else [path] * (not row.per_image and row.matches(path))
        )
        if found:
            parts = folders.sort_parts(_make_part(root, file, row) for file in found)
            names = ", ".join(os.path.relpath(file, root) for file in found[:3])
            return DatasetLayout(format="public", description=f"{row.name} ({names})", root=root, parts=parts)
    return None


def _find_annotations(folder: Path, row: PublicSet) -> Iterator[Path]:
    """Yields the files of a row, or the folders of a file for each image."""
    directories = (path for pattern in row.dirs for path in (sorted(folder.glob(pattern)) if pattern else [folder]))
    for directory in filter(Path.is_dir, folders.unique(directories)):
        matching = [file for file in islice(_iter_files(directory, row), folders.MAX_PROBES) if row.matches(file)]
        yield from [directory] if row.per_image and matching else matching


def _iter_files(directory: Path, row: PublicSet) -> Iterator[Path]:
    subdirs = folders.list_subdirs(directory).values() if row.per_image else ()
    return chain(folders.list_files(directory, row.suffix.lower()), *(_iter_files(path, row) for path in subdirs))


def _make_part(root: Path, file: Path, row: PublicSet) -> SplitFiles:
    split, own_dir = folders.split_from_name(file.name), file if row.per_image else file.parent
    patterns = [pattern.format(split=split or "*") for pattern in row.images]
    own = [path for base in (root, own_dir) for pattern in patterns for path in sorted(base.glob(pattern))]
    nearby = [*folders.iter_nearby_dirs(own_dir, root, split), *folders.list_dirs_below(root)]
    return folders.file_part(file, split, [*own, *nearby])


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if a file is not JSON, or if no image is named."""
    sets, first = public_sets(), layout.parts[0].annotations
    row = sets.get(layout.description.partition(" (")[0]) or next(row for row in sets.values() if row.matches(first))
    builder = TableBuilder(layout, problems, box_id_kind="object")
    reader = ObjectReader(row, builder)
    index_by_image: dict[tuple[int, Path, str], int] = {}
    for part in layout.parts:
        locator = ImageLocator(layout.root, part)
        for file in _iter_files(part.annotations, row) if row.per_image else [part.annotations]:
            location = os.path.relpath(file, layout.root)
            for number, (place, record) in enumerate(_iter_records(file, location, row, problems), 1):
                name = re.sub(*row.rename, os.path.splitext(location)[0]) if row.per_image else _get(record, row.image)
                if not isinstance(name, str) or not is_usable_name(name):
                    problems.add("malformed-image", f"{location}{place}: it names no image")
                    continue
                folder, name = _locate(locator, name)
                key = locator.split_index(part.split, folder), folder, name
                if (index := index_by_image.get(key)) is None:
                    index = index_by_image[key] = builder.add_image(ImageFile(folder, name, key[0]), location)
                objects = _items(_get(record, row.objects)) if row.objects else [record]
                for position, item in enumerate(objects, 1 if row.objects else number):
                    reader.add(item, index, position, f"{location}{place}")
        builder.notes += locator.notes()
    if not builder.images:
        raise DataError("The annotations name no image.", location=builder.location(), fix="copy them again")
    return builder.build(reader.add_ignored())


def _iter_records(file: Path, location: str, row: PublicSet, problems: ProblemCollector) -> Iterator[tuple[str, Any]]:
    """Yields what is about an image, or about one object and its image, with its place in the file."""
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
    elif row.content == "blocks":  # the image, the number of its objects, and their lines, or a line of zeros for none
        lines = [line.strip() for line in data.decode("utf-8", "surrogateescape").splitlines()]
        for start, name in enumerate(lines):
            if folders.is_image_name(name):
                count = next((int(line) for line in lines[start + 1 : start + 2] if line.isdecimal()), 0)
                objects = [fields_of(line, row) for line in lines[start + 2 : start + 2 + count]]
                yield f":{start + 1}", {row.image: name, row.objects: objects}
    else:
        lines = [line.strip() for line in data.decode("utf-8", "surrogateescape").splitlines()]
        used = [(n, line) for n, line in enumerate(lines, 1) if line and not re.match(r"[a-z]+:", line)]
        yield from ((f":{n}", fields_of(line, row)) for n, line in used)
        if row.per_image and not used:
            yield "", None  # an image without objects


def _iter_json(file: Path, data: bytes, row: PublicSet) -> Iterator[tuple[str, Any]]:
    try:  # a list is decoded entry by entry: objects need many times the memory of their text
        is_list = data.lstrip()[:1] == b"["
        document: Any = msgspec.json.decode(data, type=list[msgspec.Raw]) if is_list else msgspec.json.decode(data)
        for number, entry in enumerate(_items(_get(document, row.records)) if row.records or is_list else [document]):
            yield f", entry {number}", msgspec.json.decode(entry) if is_list else entry
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise make_error(DataError, "invalid-json", file, text=str(error), num_bytes=len(data)) from error


def fields_of(line: str, row: PublicSet) -> dict[str, str]:
    """Returns the fields of a line by the names of their columns."""
    return dict(zip(row.columns, line.split(row.delimiter), strict=False))


def _get(value: Any, path: str) -> Any:
    """Returns the value at a path; None where there is none."""
    for key in path.split(".") if path else ():
        if isinstance(value, list):
            value = dict(enumerate(value)).get(int(key))
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []


def _locate(locator: ImageLocator, name: str) -> tuple[Path, str]:
    if name.lower().endswith(tuple(folders.KNOWN_SUFFIXES)):
        return locator.locate(name)
    return locator.find(*(f"{name}{suffix}" for suffix in folders.IMAGE_SUFFIXES), name) or locator.locate(
        f"{name}.jpg"
    )


class ObjectReader:
    """Adds the objects of images to a table. Those that the row calls ignored become crowd boxes at the end."""

    def __init__(self, row: PublicSet, builder: TableBuilder) -> None:
        self._row, self._builder = row, builder
        self._ignored: list[Box] = []

    def add(self, item: Any, image_index: int, number: int, place: str) -> None:
        """Adds the box of an object; reports or counts one without a usable box or class. None: there is no object."""
        row, builder = self._row, self._builder
        values = [_get(item, path) for path in row.box]
        written = str(_get(item, row.label)) if row.label else next(iter(row.classes))
        is_ignored = any(str(_get(item, path)).lower() in texts for path, texts in row.ignored.items())
        name = row.classes.get(written, "") if row.classes else written * (not is_ignored)
        problem = ""
        if item is None:
            return
        if not name and not is_ignored and row.unlisted == "counted":
            builder.counts[f"{written}, which is no class of objects and is not read"] += 1
        elif all(value is None for value in values) and row.content == "json":
            builder.counts[f"{written} without a box, which is not read"] += 1
        elif (xyxy := _bound(values, row)) is None:
            problem = "malformed-box" if row.content.startswith("json") else "malformed-row"
        elif not name and not is_ignored:
            problem = "unknown-class"
        else:
            box = Box(image_index, name, xyxy, number, is_crowd=is_ignored)
            (self._ignored if is_ignored else builder.boxes).append(box)
        if problem:
            builder.problems.add(problem, f"{place}: {written!r} of {str(item)[:60]}")
            builder.bad_boxes.append(image_index)

    def add_ignored(self) -> list[str]:
        """Adds the ignored objects as crowd boxes of their class, or of each class. Returns the classes."""
        builder, classes = self._builder, list(dict.fromkeys(self._row.classes.values()))
        used = {str(box.label) for box in (*builder.boxes, *self._ignored) if box.label}
        names = [name for name in classes if name in used] or sorted(used) or classes
        if self._ignored:
            text = f"{len(builder.boxes):,} objects; {len(self._ignored):,} ignored regions, which are no targets"
            builder.notes.append(f"{text}: each is a crowd box, of each class if it has none itself")
        for box in self._ignored:
            builder.boxes += [box._replace(label=name) for name in ([box.label] if box.label else names)]
        return names


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
