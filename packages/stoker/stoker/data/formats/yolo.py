"""YOLO: a text file of boxes per image. A part is one folder of images with the folder of their labels.

A row is `class x y width height`, normalized by width and height of the upright image; x and y are the center. Rows of
a segmentation data set (`class x1 y1 x2 y2 x3 y3 …`) and of oriented boxes become the box around their points. A sixth
number is a prediction's confidence and is not used. A row that cannot be read is dropped and reported; the rest of its
file and its image stay. The image sizes come from the headers. Format: https://docs.ultralytics.com/datasets/detect/.
"""

import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
import yaml

from stoker.data.formats import folders
from stoker.data.formats.images import ImageFile, TableBuilder, map_in_threads, resolve_names
from stoker.data.formats.tables import (
    SPLITS,
    AnnotatedImage,
    AnnotationTable,
    DatasetLayout,
    DatasetWriter,
    SplitFiles,
    display_path,
)
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

MAX_CLASSES = 100_000
"""Largest number of classes; the published set with the most, V3Det, has 13,204."""
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_CLASSES)]
Name = Annotated[str, msgspec.Meta(pattern=r"\S")]


class DatasetDefinition(msgspec.Struct):
    """The keys of a data.yaml or an obj.data file that are read."""

    train: str | list[str] = []
    """A split's folders and lists of images, as written."""
    val: str | list[str] = []
    valid: str | list[str] = []
    validation: str | list[str] = []
    test: str | list[str] = []
    path: str | None = None
    """The folder to which these are relative."""
    names: str | list[Name] | dict[Number, Name] = ""
    """Class names, or a file of them."""
    nc: Number | None = None
    kpt_shape: str | list[Number] = ""
    """Of a pose data set: number of keypoints, numbers per keypoint."""

    @property
    def splits(self) -> dict[str, list[str]]:
        """Split → its entries."""
        found: dict[str, list[str]] = {}
        for name in ("train", "val", "valid", "validation", "test"):
            value: str | list[str] = getattr(self, name)
            entries = [entry.strip() for entry in ([value] if isinstance(value, str) else value)]
            if used := [entry for entry in entries if entry.lower() not in _NULL_VALUES]:
                found.setdefault(folders.SPLIT_BY_NAME[name], used)
        return found

    @property
    def num_keypoint_values(self) -> int:
        """Numbers after the box in a row of a pose data set; 0: rows are boxes or polygons."""
        is_pose = isinstance(self.kpt_shape, list) and len(self.kpt_shape) == 2
        return math.prod(map(int, self.kpt_shape)) if is_pose else 0


IMAGE_DIR_NAMES = ("images", "jpegimages")
"""The last of these in an image's path is replaced by "labels", as in Ultralytics and Darknet."""
MAX_WALKED_DIRS = 20_000
"""Folders below one that a description names; ImageNet has 1,000 per split."""


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the YOLO data set of a data.yaml or obj.data, or of a folder (not in subfolders); None for a folder
    without. Raises DataError if its data.yaml is wrong, or if its images are absent."""
    if (definition := path if path.is_file() else _find_definition(path)) is not None:
        return _layout_of_definition(definition)
    for description, parts, notes in _iter_layouts(path):
        if parts and _has_rows(parts):
            return DatasetLayout(
                format="yolo",
                description=description,
                root=path,
                parts=tuple(parts),
                notes=tuple(notes),
                metadata_files=_find_names_files(path, parts),
            )
    return None


def _layout_of_definition(file: Path) -> DatasetLayout:
    definition = _read_definition(file)
    home = Path(os.path.expanduser("~")).resolve()
    too_wide = {home, *home.parents, *file.parent.resolve().parent.parents}
    class_names = _choose_names(file, definition.names)
    base_dirs, notes = _resolve_base_dirs(definition, file)
    parts: list[SplitFiles] = []
    substitutions: list[str] = []
    for split, entry in [(name, entry) for name in SPLITS for entry in definition.splits.get(name, ())]:
        path = _resolve_path(entry, base_dirs)
        if path is None and split == "test":
            notes.append(f"the test split is left out: {entry!r} in {file.name} does not exist")
            continue
        if path is None:
            cause = f"{entry!r}, also without its first folders, is not in {', '.join(map(str, base_dirs))}"
            near = _find_split_folder(split, folders.unique((base_dirs[0], file.parent)))
            meant = f"did you mean {split}: {near}? Else " if near else ""
            location = f"{file}: {split}: {entry}"
            raise make_error(DataError, "yolo-split-not-found", location, cause=cause, split=split, meant=meant)
        if path.resolve() in too_wide:
            raise make_error(DataError, "yolo-split-too-wide", f"{file}: {split}: {entry}", split=split, path=path)
        if path != _join(base_dirs[0], entry) or not path.is_relative_to(base_dirs[0]):
            substitutions.append(f"{entry!r} is read from {path}")
        is_list = path.suffix.lower() == ".txt"
        found = list(_parts_from_list(split, path, base_dirs) if is_list else _iter_parts_below(split, path))
        if not found and split == "test":
            notes.append(f"the test split is left out: {path} has no images")
        elif not found:
            suffixes = ", ".join(folders.IMAGE_SUFFIXES)
            raise make_error(DataError, "yolo-split-without-images", path, split=split, file=file, suffixes=suffixes)
        parts += found
    if substitutions:
        notes.append(f"{file.name}: {', '.join(substitutions)}")
    return DatasetLayout(
        format="yolo",
        description=f"YOLO, {file.name}",
        root=base_dirs[0],
        parts=tuple(parts),
        notes=tuple(notes),
        metadata_files=(
            file,
            *(_named_file(file, definition.names) if class_names else _find_names_files(file.parent, parts)),
        ),
    )


def _find_split_folder(split: str, base_dirs: Iterable[Path]) -> str | None:
    """Returns a folder near a description that has images and the name of a split, as the description would name it."""
    for base in base_dirs:
        for folder in folders.list_dirs_below(base):
            parts = folder.relative_to(base).parts
            if split in map(folders.split_from_name, parts) and any(map(_is_visible_image, os.listdir(folder))):
                return "/".join(parts)
    return None


def _resolve_base_dirs(definition: DatasetDefinition, file: Path) -> tuple[tuple[Path, ...], list[str]]:
    """Folders to which paths may be relative, the most likely first (`path`, the file's folder, its parent); notes."""
    file_dir = file.parent
    default_dirs = (file_dir, file_dir.parent)
    if definition.path is None:
        return default_dirs, []
    base = _resolve_path(definition.path, default_dirs)
    if base is None or not base.is_dir():
        return default_dirs, [f"path {definition.path!r} of {file.name} does not exist: {file_dir} is used"]
    notes = [f"path {definition.path!r} of {file.name} is {base}"] if base != file_dir else []
    return folders.unique((base, *default_dirs)), notes


def _join(base: Path, text: str) -> Path:
    return Path(os.path.normpath(base / os.path.expanduser(text.replace("\\", "/"))))  # of no user: as it is written


def _resolve_path(text: str, base_dirs: Iterable[Path], *, min_parts: int = 2) -> Path | None:
    """Returns the file or folder of a written path: as written, relative to a base; else without its first folders,
    which may be those of another machine, or Roboflow's wrong `../`. At least `min_parts` parts of a longer path must
    exist, or its last one must be named after a split."""
    base_dirs = tuple(base_dirs)
    candidates = [_join(base, text) for base in base_dirs]
    parts = PurePosixPath(text.replace("\\", "/")).parts
    parts = tuple(part for part in parts if part not in ("/", "..", ".") and not part.endswith(":"))
    for start in range(len(parts)):
        if len(parts) - start < min(min_parts, len(parts)) and folders.split_from_name(parts[start]) is None:
            break
        candidates += [base.joinpath(*parts[start:]) for base in base_dirs]
    return next(filter(Path.exists, candidates), None)


def _read_image_list(image_list: Path, base_dirs: Iterable[Path]) -> dict[Path, list[str]]:
    """Returns folder → file names of the images in a list, in its order. A folder that does not exist is kept as
    written. base_dirs: the folders to which paths may be relative, besides the folder of the list."""
    search_dirs = (image_list.parent, *base_dirs)
    lines = regular_files.read_text(image_list, encoding="utf-8-sig", errors="surrogateescape").splitlines()
    folder_by_head: dict[str, Path] = {}
    names_by_folder: dict[Path, dict[str, None]] = {}
    for entry in filter(None, (line.strip().replace("\\", "/") for line in lines)):
        head, _, name = entry.rpartition("/")
        if (folder := folder_by_head.get(head)) is None:
            if (path := _resolve_path(entry, search_dirs, min_parts=1)) is not None:
                folder = folder_by_head[head] = path.parent
            else:  # not stored, because the next image may exist; the folder follows from its own name
                folder = (_resolve_path(head, search_dirs) if head else None) or _join(search_dirs[0], head)
        names_by_folder.setdefault(folder, {})[name] = None
    return {folder: list(names) for folder, names in names_by_folder.items()}


def _parts_from_list(split: str, image_list: Path, base_dirs: Iterable[Path]) -> Iterator[SplitFiles]:
    names_by_folder = _read_image_list(image_list, base_dirs)
    if not names_by_folder and split != "test":
        raise make_error(DataError, "empty-list", image_list, split=split)
    for folder, names in names_by_folder.items():
        yield replace(folders.file_part(_find_labels_dir(folder, names), split, (folder,)), image_list=image_list)


def _iter_parts_below(split: str | None, base: Path) -> Iterator[SplitFiles]:
    """Yields a part for every folder with images, at or below one."""
    visited: set[str] = set()
    for dirpath, dirnames, files in os.walk(base, followlinks=True):
        real = os.path.realpath(dirpath)
        if real in visited:  # a link to a folder above
            dirnames.clear()
            continue
        visited.add(real)
        if len(visited) > MAX_WALKED_DIRS:
            raise make_error(DataError, "yolo-too-many-folders", base, max_walked_dirs=MAX_WALKED_DIRS)
        dirnames[:] = sorted(name for name in dirnames if not name.startswith("."))
        if names := [name for name in files if _is_visible_image(name)]:
            folder = Path(dirpath)
            yield SplitFiles(split=split, annotations=_find_labels_dir(folder, names), image_dirs=(folder,))


def _is_visible_image(name: str) -> bool:
    return folders.is_image_name(name) and not name.startswith(".")


def _find_labels_dir(folder: Path, names: list[str]) -> Path:
    """Returns the folder of the label files of images: with `images` in its path replaced by `labels`, the folder
    itself, or a folder `labels` next to it or in it; the first that has a label of one of these images."""
    candidates = [folder, folder.parent / "labels", folder / "labels", folder.parent / "labels" / folder.name]
    last = next((n for n in reversed(range(len(folder.parts))) if folder.parts[n].lower() in IMAGE_DIR_NAMES), None)
    if last is not None:
        above, below = Path(*folder.parts[:last]), folder.parts[last + 1 :]
        candidates[:0] = [above.joinpath(word, *below) for word in ("labels", "Labels")]
    existing = [directory for directory in dict.fromkeys(candidates) if directory.is_dir()]
    with_labels = (directory for directory in existing if match_labels(names, _list_label_files(directory)))
    return next(with_labels, next((directory for directory in existing if directory != folder), candidates[0]))


def _list_label_files(folder: Path) -> list[str]:
    return folders.list_names(folder, (".txt",))


def _list_image_names(folder: Path) -> list[str]:
    return folders.list_names(folder, folders.IMAGE_SUFFIXES)


def match_labels(image_names: Iterable[str], label_names: Iterable[str]) -> dict[str, str]:
    """Returns image name → name of its label file. It has the same stem; if there is none, the same stem in another
    case or Unicode form, unless it belongs to another image."""
    by_stem = {os.path.splitext(label_name)[0]: label_name for label_name in label_names}
    stems = {image_name: os.path.splitext(image_name)[0] for image_name in image_names}
    matches = {image_name: by_stem[stem] for image_name, stem in stems.items() if stem in by_stem}
    if len(matches) == len(stems):
        return matches
    labels_by_folded_stem: dict[str, list[str]] = {}
    for stem in by_stem.keys() - stems.values():
        labels_by_folded_stem.setdefault(_fold_stem(stem), []).append(by_stem[stem])
    for image_name, stem in stems.items():
        if image_name not in matches and len(candidates := labels_by_folded_stem.get(_fold_stem(stem), [])) == 1:
            matches[image_name] = candidates[0]
    return matches


def _fold_stem(stem: str) -> str:
    return unicodedata.normalize("NFC", stem).casefold()


_Layout = tuple[str, list[SplitFiles], list[str]]
"""Description, parts (perhaps none), notes."""


def _iter_layouts(folder: Path) -> Iterator[_Layout]:
    """Yields the possible layouts without a data.yaml."""
    pairs = [
        SplitFiles(split=split, annotations=labels, image_dirs=(images,))
        for split, images, labels in folders.list_split_pairs(folder)
        if _list_label_files(labels)
    ]
    if any(part.split == "train" for part in pairs):
        yield "YOLO in folders of images and of labels per split", pairs, []
    for description, parts, notes in chain(
        _iter_listed(folder), _iter_in_image_dir(folder), _iter_per_split(folder), _iter_in_one_folder(folder)
    ):
        if pairs and {part.split for part in parts} == {None}:
            parts = [*(replace(part, split="train") for part in parts), *pairs]
        yield description, parts, notes


def _iter_listed(folder: Path) -> Iterator[_Layout]:
    lists = [(split, folder / f"{word}.txt") for word, split in folders.SPLIT_BY_NAME.items()]
    first_lines = (_read_first_line(path).decode(errors="replace") if path.is_file() else "" for _, path in lists)
    lists = [pair for pair, line in zip(lists, first_lines, strict=True) if folders.is_image_name(line)]
    parts = [part for split, path in lists for part in _parts_from_list(split, path, ())]
    yield "YOLO with lists of images", parts, []


def _iter_in_image_dir(folder: Path) -> Iterator[_Layout]:
    images = _image_dir_of(folder)
    if images is None or not (_has_labels_dir(folder) or _list_label_files(images)):
        return
    split_of = {path: folders.split_from_name(name) for name, path in folders.list_subdirs(images).items()}
    by_split = [(split, path) for split in SPLITS for path in split_of if split_of[path] == split]
    if by_split:
        others = [path.name for path, split in split_of.items() if split is None]
        if _list_image_names(images):
            others.append("the images directly in it")
        notes = [f"of {images.name}/, left out: {', '.join(others)}, in no split"] if others else []
        yield "YOLO in images/ and labels/", [p for s, path in by_split for p in _iter_parts_below(s, path)], notes
    yield "YOLO in images/ and labels/", list(_iter_parts_below(None, images)), []


def _iter_per_split(folder: Path) -> Iterator[_Layout]:
    parts = []
    has_labels = _has_labels_dir(folder)
    for split, path in folders.iter_split_dirs(folder):
        if has_labels or _has_labels_dir(path) or _list_label_files(path):
            base = _image_dir_of(path) or path
            parts += [part for part in _iter_parts_below(split, base) if _list_label_files(part.annotations)]
    if parts and _has_rows(parts):
        yield "YOLO per split folder", parts, folders.check_unannotated_splits(folder, parts)


def _iter_in_one_folder(folder: Path) -> Iterator[_Layout]:
    if _list_label_files(folder) or _has_labels_dir(folder):
        names = _list_image_names(folder)
        part = SplitFiles(split=None, annotations=_find_labels_dir(folder, names), image_dirs=(folder,))
        yield "YOLO, label files and images in one folder", [part] if names else [], []


def _image_dir_of(folder: Path) -> Path | None:
    return next(iter(folders.named_subdirs(folder, IMAGE_DIR_NAMES)), None)


def _has_labels_dir(folder: Path) -> bool:
    return "labels" in folders.list_subdirs(folder)


def _has_rows(parts: list[SplitFiles]) -> bool:
    """Returns whether the text files of images are YOLO labels: others, such as captions, may be next to images too."""
    num_checked = 0
    for part in parts:
        labels = match_labels(_list_image_names(part.image_dirs[0]), _list_label_files(part.annotations))
        for name in labels.values():
            line = _read_first_line(part.annotations / name)
            if _looks_like_row(line):
                return True
            num_checked += line != b""
            if num_checked >= folders.MAX_PROBES:
                return False
    return False


def _read_first_line(path: Path) -> bytes:
    return folders.read_head(path).partition(b"\n")[0].strip()


def _looks_like_row(line: bytes) -> bool:
    """Returns whether a line is a class and at least four numbers."""
    try:
        return len([float(field) for field in line.split()]) >= 5
    except ValueError:
        return False


YAML_SUFFIXES = (".yaml", ".yml")
NAMES_FILES = ("classes.txt", "obj.names", "classes.names", "_darknet.labels", "notes.json", "predefined_classes.txt")
"""Files with only the class names: from LabelImg, Darknet, Roboflow, Label Studio."""
MAX_BYTES = 1 << 20
"""A data.yaml has a few kilobytes; a larger file is something else."""
_NULL_VALUES = ("", "~", "null", "none")


def _is_definition_name(path: Path) -> bool:
    return path.suffix.lower() in (*YAML_SUFFIXES, ".data")


def _find_definition(folder: Path) -> Path | None:
    """Returns the data.yaml or obj.data of a folder. Raises DataError if several files could be it."""
    files = sorted(path for path in folder.iterdir() if _is_definition_name(path))
    candidates = [path for path in files if _looks_like_definition(path)]
    for stem in ("data", "dataset", folder.name.lower()):
        if preferred := [path for path in candidates if path.stem.lower() == stem]:
            return preferred[0]
    if len(candidates) > 1:
        names = [path.name for path in candidates]
        raise make_error(DataError, "yolo-several-descriptions", folder, choices=names, example=candidates[0])
    return candidates[0] if candidates else None


def _looks_like_definition(path: Path) -> bool:
    """Returns whether a file has a split and classes as keys: data folders contain other YAML files too."""
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return False
    text = regular_files.read_text(path, encoding="utf-8-sig", errors="replace", max_bytes=MAX_BYTES)
    keys = {match.lower() for match in re.findall(r"^[\"']?(\w+)[\"']?\s*[:=]", text, re.MULTILINE)}
    has_classes = "names" in keys or "nc" in keys or path.stem.lower() in ("data", "dataset")
    return has_classes and not keys.isdisjoint(folders.SPLIT_BY_NAME)


def _read_definition(file: Path) -> DatasetDefinition:
    """Reads a data.yaml or obj.data. Raises DataError that names the file and the key."""
    data = _parse_assignments(file) if file.suffix.lower() == ".data" else _parse_yaml(file)
    if isinstance(data, dict):
        data = {k: v for k, v in data.items() if not (isinstance(v, str) and v.strip().lower() in _NULL_VALUES)}
    try:
        keys = msgspec.convert(data, type=DatasetDefinition, strict=False)
        if not keys.splits:
            raise msgspec.ValidationError("it names no images: there is no train, val or test")
    except msgspec.ValidationError as error:
        raise make_error(DataError, "yolo-unusable-description", file, cause=str(error)) from error
    return keys


def _parse_yaml(file: Path) -> Any:
    """Returns the content of a YAML file, with all values as text. Raises DataError."""
    try:
        return yaml.load(regular_files.read_text(file, encoding="utf-8-sig", max_bytes=MAX_BYTES), yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        location = file if mark is None else f"{file}:{mark.line + 1}"
        cause = "its lists are nested too deeply" if isinstance(error, RecursionError) else str(problem or error)
        raise make_error(DataError, "yolo-invalid-yaml", location, cause=cause) from error


def _parse_assignments(file: Path) -> dict[str, str]:
    """Returns the `key = value` lines of Darknet's obj.data, with the keys of a data.yaml."""
    lines = regular_files.read_text(file, encoding="utf-8-sig", errors="replace", max_bytes=MAX_BYTES).splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#"))
    values = {key.strip(): value.strip() for key, _, value in pairs}
    return {"nc": values["classes"], **values} if "classes" in values else values


def _choose_names(file: Path, written: str | list[str] | dict[int, str]) -> tuple[str, ...] | None:
    """Returns the class names, from a list, a mapping from numbers, or the path of a file of names."""
    if isinstance(written, str):
        if not written:
            return None
        if found := _named_file(file, written):
            return _read_names(found[0])
        cause = f"names is {written!r}, neither a list nor an existing file"
        raise make_error(DataError, "yolo-unusable-description", file, cause=cause)
    names = dict(enumerate(written)) if isinstance(written, list) else written
    if names and max(names) >= len(names):
        gap = next(number for number in range(len(names)) if number not in names)
        cause = f"names has {len(names)} classes up to number {max(names)}, but none with the number {gap}"
        raise make_error(DataError, "yolo-unusable-description", file, cause=cause)
    return tuple(names[number].strip() for number in range(len(names))) or None


def _named_file(file: Path, written: str | list[str] | dict[int, str]) -> list[Path]:
    """Returns the file of class names that a description names, if it does."""
    if not isinstance(written, str) or not written:
        return []
    path = written.replace("\\", "/")
    candidates = file.parent / path, file.parent / path.rpartition("/")[2]
    return [candidate for candidate in candidates if candidate.is_file()][:1]


def _find_names_files(root: Path, parts: Iterable[SplitFiles]) -> tuple[Path, ...]:
    """Returns the files of class names near the labels of a data set."""
    labels = [part.annotations for part in parts][: folders.MAX_PROBES]
    directories = folders.unique([root, root / "labels", *labels, *(path.parent for path in labels)])
    candidates = folders.unique(folder / name for folder in directories for name in NAMES_FILES)
    existing = [path for path in candidates if path.is_file()]
    if not existing:  # Darknet's may have any name: coco.names
        others = (path for folder in directories if folder.is_dir() for path in folder.glob("*.names"))
        existing = sorted(path for path in others if path.is_file() and not path.name.startswith("."))
    return tuple(
        file for file in existing if file.suffix != ".json" or b'"categories"' in regular_files.read_bytes(file)
    )


def _read_names(file: Path) -> tuple[str, ...]:
    """Returns the class names in a file: one per line, or Label Studio's notes.json. Raises DataError."""
    try:
        if file.suffix.lower() == ".json":
            categories = json.loads(regular_files.read_text(file, encoding="utf-8-sig"))["categories"]
            name_by_id = {int(entry["id"]): str(entry["name"]) for entry in categories}
            lines = [name_by_id[number] for number in range(len(name_by_id))]
        else:
            lines = [line.strip() for line in regular_files.read_text(file, encoding="utf-8-sig").splitlines()]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise make_error(DataError, "yolo-unreadable-names", file, cause=cause) from error
    while lines and not lines[-1]:
        lines.pop()
    if not lines or not all(lines):
        raise make_error(DataError, "yolo-empty-name", f"{file}:{lines.index('') + 1 if lines else 1}")
    return tuple(lines)


NORMALIZED_TOLERANCE = 0.1
"""How far the center and the size of a box may exceed 0 … 1. Rounding and boxes drawn over the edge exceed it by a few
percent; values in pixels are above 1.1, except for boxes in the first pixel."""
MAX_UNNAMED_CLASSES = 10_000
"""If the number of classes is not given, a larger class number is an error in the row."""


@dataclass
class _RowFormat:
    """What the data set as a whole says about its rows."""

    class_names: tuple[str, ...] | None
    num_keypoint_values: int
    other_row_kinds: Counter[str] = field(default_factory=Counter)
    """Number of rows that are not plain boxes, by description."""


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all label files and the headers of all images. Raises DataError if the classes cannot be determined."""
    builder = TableBuilder(layout, problems, box_id_kind="line")
    row_format = _read_row_format(layout, builder.notes)
    images, label_files = _list_images(layout, problems)
    texts = map_in_threads(lambda file: b"" if file is None else regular_files.read_bytes(file), label_files)
    for image, file, text in zip(images, label_files, texts, strict=True):
        builder.add_image(image)
        if file is not None:
            _read_rows(text, display_path(file, layout.root), row_format, builder)
    class_names = row_format.class_names
    if class_names is None:
        called = "called class 0, class 1, …; a data.yaml with `names` sets them"
        builder.notes.append(f"the classes have no names: {called}")
    table = builder.build(class_names)
    table.notes += [f"{count:,} {description}" for description, count in row_format.other_row_kinds.items()]
    return table


def _read_row_format(layout: DatasetLayout, notes: list[str]) -> _RowFormat:
    """Returns the classes and the content of rows, from the files that describe the data set."""
    class_names, num_classes, num_keypoint_values = None, None, 0
    metadata_files = list(layout.metadata_files)
    if metadata_files and _is_definition_name(metadata_files[0]):
        file = metadata_files.pop(0)
        definition = _read_definition(file)
        class_names, num_classes = _choose_names(file, definition.names), definition.nc
        num_keypoint_values = definition.num_keypoint_values
    if class_names is None and metadata_files:
        first, *others = metadata_files
        class_names = _read_names(first)
        for other in others:
            if (other_names := _read_names(other)) != class_names:
                cause = f"{', '.join(class_names[:10])}; {', '.join(other_names[:10])}"
                raise make_error(DataError, "yolo-names-differ", f"{first} and {other}", cause=cause)
        notes.append(f"classes: {display_path(first, layout.root)}")
    if class_names is None and num_classes:
        class_names = tuple(f"class {number}" for number in range(num_classes))
        notes.append(f"the {num_classes} classes have no names: called class 0, class 1, …")
    elif class_names is not None and num_classes is not None and num_classes != len(class_names):
        notes.append(f"nc is {num_classes}, but names has {len(class_names)} classes: names is used")
    return _RowFormat(class_names, num_keypoint_values)


def _list_images(layout: DatasetLayout, problems: ProblemCollector) -> tuple[list[ImageFile], list[Path | None]]:
    """Returns all images and their label files, in the order of the parts; within a part as listed, else by name."""
    definitions = [path for path in layout.metadata_files[:1] if _is_definition_name(path)]
    base_dirs = _resolve_base_dirs(_read_definition(definitions[0]), definitions[0])[0] if definitions else ()
    names_by_list: dict[Path, dict[Path, list[str]]] = {}
    label_names: dict[Path, list[str]] = {}
    used: set[Path] = set()
    images: list[ImageFile] = []
    label_files: list[Path | None] = []
    for part in layout.parts:
        folder = part.image_dirs[0]
        if part.image_list is None:
            names = _list_image_names(folder)
        else:
            if part.image_list not in names_by_list:
                names_by_list[part.image_list] = _read_image_list(part.image_list, base_dirs)
            names = names_by_list[part.image_list][folder]
            files = resolve_names(folder, names)  # headers are read before `repair_names` runs
            for written_name, file in files.items():
                problems.add("wrong-case-name", f"{written_name!r}: the file is {str(folder / file)!r}")
            names = [files.get(name, name) for name in names]
        if part.annotations not in label_names:
            label_names[part.annotations] = _list_label_files(part.annotations)
        label_by_image = match_labels(names, label_names[part.annotations])
        counts = Counter(label_by_image.values())
        for name in names:
            label_file = part.annotations / label_by_image[name] if name in label_by_image else None
            if label_file is None:
                problems.add("no-label-file", display_path(folder / name, layout.root))
            elif counts[label_file.name] > 1 and label_file not in used:
                place = display_path(folder / name, layout.root)
                problems.add("shared-label-file", f"{place}: {display_path(label_file, layout.root)}")
            images.append(ImageFile(folder, name, part.split_index))
            label_files.append(label_file)
        used.update(part.annotations / label_name for label_name in label_by_image.values())
    _report_unmatched_labels(layout, label_names, used, problems)
    return images, label_files


def _report_unmatched_labels(
    layout: DatasetLayout, label_names: dict[Path, list[str]], used: set[Path], problems: ProblemCollector
) -> None:
    """Reports label files without an image, and images with a label file that no list of a split names."""
    listed_dirs = {part.annotations: part.image_dirs[0] for part in layout.parts if part.image_list is not None}
    for folder, names in label_names.items():
        unused = [folder / name for name in names if name not in NAMES_FILES and folder / name not in used]
        images = _list_image_names(listed_dirs[folder]) if folder in listed_dirs and unused else []
        image_by_stem = {os.path.splitext(name)[0]: name for name in images}
        for file in unused:
            if file.stem in image_by_stem:
                image = listed_dirs[folder] / image_by_stem[file.stem]
                problems.add("not-in-a-split", os.path.relpath(image, layout.root))
            elif folder not in listed_dirs and _looks_like_row(_read_first_line(file)):
                problems.add("label-without-image", display_path(file, layout.root))


def _read_rows(text: bytes, location: str, row_format: _RowFormat, builder: TableBuilder) -> None:
    """Adds the usable rows of a label file to the last image; the others are reported with their line."""
    class_names = row_format.class_names
    max_classes = MAX_UNNAMED_CLASSES if class_names is None else len(class_names)
    for line, row_bytes in enumerate(text.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        fields = row_bytes.split()
        if not fields:
            continue
        try:
            label, *values = [float(value) for value in fields]
        except ValueError:
            builder.drop_box("malformed-row", f"{_quote(location, line, row_bytes)}, not only numbers")
            continue
        if values == [-1, -1, -1, -1]:
            builder.drop_box("placeholder-box", _quote(location, line, row_bytes))
        elif not (label.is_integer() and label >= 0):
            builder.drop_box("malformed-row", f"{_quote(location, line, row_bytes)}, class {label:g}")
        elif (box := _parse_box(values, row_format)) is None:
            reason = f"{len(values)} numbers after the class"
            builder.drop_box("malformed-row", f"{_quote(location, line, row_bytes)}, {reason}")
        elif label >= max_classes:
            hint = "" if class_names is None else f", the classes are 0 … {max_classes - 1}"
            builder.drop_box("unknown-class", f"{location}:{line}: class {label:g}{hint}")
        elif not _is_normalized(*box):
            builder.drop_box("not-normalized", _quote(location, line, row_bytes))
        else:
            builder.add_box(int(label), box, line, is_normalized=True)


def _quote(location: str, line: int, row: bytes) -> str:
    return f"{location}:{line}: {row[:60].decode(errors='replace')!r}"


def _parse_box(values: list[float], row_format: _RowFormat) -> tuple[float, float, float, float] | None:
    """Returns the corners from the numbers after the class; None if no kind of row has so many."""
    num_values = len(values)
    if (row_format.num_keypoint_values and num_values == 4 + row_format.num_keypoint_values) or _has_keypoints(values):
        row_format.other_row_kinds["rows have keypoints: their boxes are read"] += 1
    elif num_values == 5:
        row_format.other_row_kinds["rows have a sixth number, a confidence, which is not used"] += 1
    elif num_values >= 6 and num_values % 2 == 0:
        row_format.other_row_kinds["rows are polygons: the boxes around them are used"] += 1
        return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])
    elif num_values != 4:
        return None
    x, y, width, height = values[:4]
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _has_keypoints(values: list[float]) -> bool:
    """Whether a box is followed by three or more keypoints (x, y, visibility 0 … 2), also without a data.yaml."""
    return len(values) >= 13 and len(values) % 3 == 1 and all(value in (0, 1, 2) for value in values[6::3])


def _is_normalized(x1: float, y1: float, x2: float, y2: float) -> bool:
    """Whether center and size of a box can be normalized. NaN and infinity pass, because `clean.py` reports them."""
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        return True
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    return min(x, y) >= -NORMALIZED_TOLERANCE and max(x, y, x2 - x1, y2 - y1) <= 1 + NORMALIZED_TOLERANCE


class YoloWriter(DatasetWriter):
    """`images/<split>/`, a text file per image in `labels/<split>/`, `data.yaml` with the class names. A line is `class
    x y width height`, normalized and within 0 … 1: Ultralytics drops an image with other values. It has no crowd
    boxes."""

    image_dir = "images/{split}"
    box_orientation = "upright"
    supports_crowd = False

    def add(self, image: AnnotatedImage) -> None:
        lines = []
        for (x1, y1, x2, y2), label in zip(self.normalized_boxes(image).tolist(), image.labels.tolist(), strict=True):
            cxcywh = ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)
            lines.append(" ".join((str(label), *(f"{value:.9g}" for value in cxcywh))) + "\n")
        labels_dir = self.folder / "labels" / image.split
        labels_dir.mkdir(parents=True, exist_ok=True)
        # also without boxes, because an image without a label file looks forgotten
        (labels_dir / f"{os.path.splitext(image.name)[0]}.txt").write_text("".join(lines))

    def finish(self) -> None:
        # no `path`, so that the folders stay relative to this file when it is moved
        splits = [f"{split}: images/{split}\n" for split in self.written_splits]
        names = [f"  {label}: {json.dumps(name, ensure_ascii=False)}\n" for label, name in enumerate(self.class_names)]
        text = "".join([*splits, f"nc: {len(self.class_names)}\n", "names:\n", *names])
        (self.folder / "data.yaml").write_text(text, encoding="utf-8")
