"""Public data sets in layouts of their own: KITTI, VisDrone, CrowdHuman, WIDER FACE, DOTA, BDD100K, xView and others.

`public_sets.toml` has a row for each: where its files are, how they begin, and where the image, the box and the class
of an object are. Lines of text become objects with the names of their columns, so text and JSON are read alike. Not
here: sets that are COCO JSON (Objects365, LVIS) or tables with a header or an image per row (SKU-110K, Global Wheat:
`csv.py`).
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

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
    format: str = "public"
    source: str
    dirs: tuple[str, ...] = ()
    suffix: str
    first_bytes: str
    content: Literal["json", "json-lines", "lines", "blocks"]
    per_image: bool = False
    lists: str = ""
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

    def image_name(self, location: str) -> str:
        return re.sub(*self.rename, os.path.splitext(location)[0])

    def matches(self, file: Path) -> bool:
        is_named = file.name.endswith(self.suffix)
        return is_named and re.search(self.first_bytes.encode(), folders.read_head(file), re.M | re.S) is not None


@cache
def public_sets() -> dict[str, PublicSet]:
    """Returns the rows by their names."""
    text = (resources.files("stoker.data.formats") / "public_sets.toml").read_text(encoding="utf-8")
    rows = msgspec.toml.decode(text, type=dict[str, tuple[PublicSet, ...]])["set"]
    return {row.name: row for row in rows}


def recognize(path: Path, format: str = "public") -> DatasetLayout | None:
    """Returns the public set of a file, or of a folder (of its subfolders only those of the row); None if it is none.
    format: of the rows that are tried."""
    root = path if path.is_dir() else folders.root_of(path)
    for row in (row for row in public_sets().values() if row.format == format):
        if path.is_dir():
            found = list(_find_annotations(path, row))
        else:
            found = [] if row.per_image or not row.matches(path) else [(folders.split_from_name(path.name), path)]
        if found:
            last = {split: (split, file) for split, file in found} if row.per_image else dict(enumerate(found))
            older, found = [file for split, file in found if (split, file) not in last.values()], list(last.values())
            parts = folders.sort_parts(_make_part(root, split, file, row) for split, file in found)
            lists = folders.split_lists(root / row.lists) if row.lists and len(parts) == 1 else {}
            if "train" in lists or "trainval" in lists:
                lists.setdefault("train", lists.get("trainval", Path()))
                parts = tuple(replace(parts[0], split=s, image_list=lists[s]) for s in ("train", "val") if s in lists)
            notes = [f"not read: {row.lists}/test.txt: the test images have no labels"] if "test" in lists else []
            notes += [f"not read: {os.path.relpath(file, root)}/, as there is another" for file in older]
            title = f"{row.name} ({', '.join(os.path.relpath(file, root) for _, file in found[:3])})"
            return DatasetLayout(format=format, description=title, root=root, parts=parts, notes=tuple(notes))
    return None


def _find_annotations(folder: Path, row: PublicSet) -> Iterator[tuple[str | None, Path]]:
    """Yields the files of a row, or the folders of a file for each image, with their splits."""

    def list_own(directory: Path) -> list[Path]:
        files = islice(_iter_files(directory, row), folders.MAX_PROBES)
        return [file for file in files if row.matches(file)]

    yield from folders.find_annotated_dirs(folder, list_own) if not row.dirs else ()
    directories = (path for pattern in row.dirs for path in (sorted(folder.glob(pattern)) if pattern else [folder]))
    for directory in filter(Path.is_dir, folders.unique(directories)):
        for file in [directory] * bool(list_own(directory)) if row.per_image else list_own(directory):
            yield folders.split_from_name(file.name), file


def _iter_files(directory: Path, row: PublicSet) -> Iterator[Path]:
    """Yields the files in a folder whose names may be those of a row; with `dirs`, also in the folders below it."""
    subdirs = folders.list_subdirs(directory).values() if row.per_image and row.dirs else ()
    return chain(folders.list_files(directory, row.suffix.lower()), *(_iter_files(path, row) for path in subdirs))


def _make_part(root: Path, split: str | None, file: Path, row: PublicSet) -> SplitFiles:
    own_dir = file if row.per_image else file.parent
    patterns = [pattern.format(split=split or "*") for pattern in row.images]
    image_dirs = [path for base in (root, own_dir) for pattern in patterns for path in sorted(base.glob(pattern))]
    image_dirs += folders.list_image_dirs(own_dir.parent) if row.per_image else ()
    if row.dirs:
        image_dirs += [*folders.iter_nearby_dirs(own_dir, root, split), *folders.list_dirs_below(root)]
    return folders.file_part(file, split, image_dirs)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if a file is not JSON, or if no image is named."""
    sets, first = public_sets(), layout.parts[0].annotations
    row = sets.get(layout.description.partition(" (")[0]) or next(row for row in sets.values() if row.matches(first))
    builder = TableBuilder(layout, problems, box_id_kind="object")
    reader = _ObjectReader(row, builder)
    index_by_image: dict[tuple[int, Path, str], int] = {}
    read_files: set[Path] = set()
    for part in layout.parts:
        locator = ImageLocator(layout.root, part)
        files = _listed_files(part, row, problems) if row.per_image else [part.annotations]
        read_files.update(files)
        for file in files:
            location = os.path.relpath(file, layout.root)
            for number, (place, record) in enumerate(_iter_records(file, location, row, problems), 1):
                name = row.image_name(location) if row.per_image else _get(record, row.image)
                if not isinstance(name, str) or not is_usable_name(name):
                    problems.add("malformed-image", f"{location}{place}: it names no image")
                    continue
                folder, name = _locate(locator, name)
                key = locator.split_index(part.split, folder), folder, name
                if (index := index_by_image.get(key)) is None:
                    index = index_by_image[key] = builder.add_image(ImageFile(folder, name, key[0]), location)
                objects = _items(_get(record, row.objects)) if row.objects else [record] * bool(record)
                for position, item in enumerate(objects, 1 if row.objects else number):
                    reader.add(item, index, position, f"{location}{place}")
        builder.notes += locator.notes()
    if row.lists:  # images with a file and in no list
        for file in sorted(set(_iter_files(first, row)) - read_files):
            folder, name = _locate(locator, row.image_name(os.path.relpath(file, layout.root)))
            problems.add("not-in-a-split", os.path.relpath(folder / name, layout.root))
    if not builder.images:
        fix, cause = "copy them again", problems.describe()
        raise DataError("The annotations name no image.", location=builder.location(), cause=cause, fix=fix)
    return builder.build(reader.add_ignored())


def _listed_files(part: SplitFiles, row: PublicSet, problems: ProblemCollector) -> list[Path]:
    """Returns the files of a part with a file for each image, those in its list if it has one."""
    files = {file.stem: file for file in _iter_files(part.annotations, row)}
    if part.image_list is None:
        return list(_iter_files(part.annotations, row))
    lines = regular_files.read_text(part.image_list, encoding="utf-8-sig", errors="replace").splitlines()
    names = list(dict.fromkeys(Path(line.split()[0]).stem for line in lines if line.strip()))
    for name in (name for name in names if name not in files):
        problems.add("no-annotation-file", f"{row.lists}/{part.image_list.name}: {name}")
    return [files[name] for name in names if name in files]


def _iter_records(file: Path, location: str, row: PublicSet, problems: ProblemCollector) -> Iterator[tuple[str, Any]]:
    """Yields what is about an image, or about one object and its image, with its place in the file."""
    data = regular_files.read_bytes(file, max_bytes=regular_files.MAX_ANNOTATION_BYTES).removeprefix(b"\xef\xbb\xbf")
    if row.content == "json":
        yield from _iter_json(file, data, row)
        return
    lines = [(n, line.strip()) for n, line in enumerate(data.decode("utf-8", "surrogateescape").splitlines(), 1)]
    if row.content == "json-lines":
        for number, line in filter(itemgetter(1), lines):
            try:
                yield f":{number}", msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                problems.add("unreadable-annotations", f"{location}:{number}: it is not JSON: {error}")
    elif row.content == "blocks":  # the image, the number of its objects, and their lines, or a line of zeros for none
        for number, name in lines:
            if folders.is_image_name(name):
                count = next((int(line) for _, line in lines[number : number + 1] if line.isdecimal()), 0)
                objects = [_fields(line, row) for _, line in lines[number + 1 : number + 1 + count]]
                yield f":{number}", {row.image: name, row.objects: objects}
    else:
        used: list[tuple[str, Any]] = [
            (f":{n}", _fields(line, row)) for n, line in lines if line and not re.match(r"[a-z]+:", line)
        ]
        yield from used or [("", None)] * row.per_image  # None: an image without objects


def _iter_json(file: Path, data: bytes, row: PublicSet) -> Iterator[tuple[str, Any]]:
    try:  # a list is decoded entry by entry: objects need many times the memory of their text
        is_list = data.lstrip()[:1] == b"["
        document: Any = msgspec.json.decode(data, type=list[msgspec.Raw]) if is_list else msgspec.json.decode(data)
        for number, entry in enumerate(_items(_get(document, row.records)) if row.records or is_list else [document]):
            yield f", entry {number}", msgspec.json.decode(entry) if is_list else entry
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise make_error(DataError, "invalid-json", file, text=str(error), num_bytes=len(data)) from error


def _fields(line: str, row: PublicSet) -> dict[str, str]:
    return {**dict(zip(row.columns, line.split(row.delimiter), strict=False)), "": line}


def _get(value: Any, path: str) -> Any:
    """Returns the value at a path; None where there is none."""
    for key in path.split(".") if path else ():
        value = {str(n): item for n, item in enumerate(value)} if isinstance(value, list) else value
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []


def _locate(locator: ImageLocator, name: str) -> tuple[Path, str]:
    has_suffix = name.lower().endswith(tuple(folders.KNOWN_SUFFIXES))
    names = [name] if has_suffix else [f"{name}{suffix}" for suffix in (*folders.IMAGE_SUFFIXES, "")]
    return locator.find(*names) or locator.locate(names[0])


class _ObjectReader:
    """Adds the objects of images to a table. Those that the row calls ignored become crowd boxes at the end."""

    def __init__(self, row: PublicSet, builder: TableBuilder) -> None:
        self._row, self._builder = row, builder
        self._ignored: list[Box] = []

    def add(self, item: Any, image_index: int, number: int, place: str) -> None:
        """Adds the box of an object; reports or counts one without a usable box or class."""
        row, builder = self._row, self._builder
        values = [_get(item, path) for path in row.box]
        written = str(_get(item, row.label)) if row.label else next(iter(row.classes))
        is_ignored = any(str(_get(item, path)).lower() in texts for path, texts in row.ignored.items())
        name = row.classes.get(written, "") if row.classes else written * (not is_ignored)
        problem = ""
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
            text = repr(item[""][:60]) if "" in item else f"object {number}: {str(item)[:60]}"
            builder.problems.add(problem, f"{place}: {text}")
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
    return (a, b, a + c, b + d) if row.box_format == "xywh" else (a, b, c, d)
