"""Reads the description of a YOLO data set: data.yaml (Ultralytics), obj.data (Darknet, CVAT), lists of class names.

All YAML values are read as text, because a class may be called `no`, `on` or `1.0`. Not here: finding the images
(`yolo_files.py`), reading label files (`yolo.py`).
Format: https://docs.ultralytics.com/datasets/detect/.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stoker import regular_files
from stoker.data.formats.tables import SPLIT_BY_NAME
from stoker.errors import DataError

YAML_SUFFIXES = (".yaml", ".yml")
NAMES_FILES = ("classes.txt", "obj.names", "classes.names", "_darknet.labels", "notes.json", "predefined_classes.txt")
"""Files with only the class names: from LabelImg, Darknet, Roboflow, Label Studio."""
MAX_BYTES = 1 << 20
"""A data.yaml has a few kilobytes; a larger file is something else."""
MAX_CLASSES = 100_000
"""Largest number of classes; the published set with the most, V3Det, has 13,204."""
_NULL_VALUES = ("", "~", "null", "none")


@dataclass(frozen=True, kw_only=True)
class DatasetDefinition:
    """The content of a data.yaml or an obj.data file."""

    file: Path
    splits: dict[str, tuple[str, ...]]
    """Split → its folders and lists of images, as written."""
    path: str | None
    """The folder to which these are relative, as written."""
    class_names: tuple[str, ...] | None
    """None if the file names no classes."""
    num_classes: int | None
    """The separate number of classes (nc)."""
    num_keypoint_values: int
    """Numbers after the box in a row of a pose data set; 0: rows are boxes or polygons."""


def is_definition_name(path: Path) -> bool:
    """Whether a file has the suffix of a data.yaml or obj.data."""
    return path.suffix.lower() in (*YAML_SUFFIXES, ".data")


def find_definition(folder: Path) -> Path | None:
    """The data.yaml or obj.data of a folder. Raises DataError if several files could be it."""
    files = sorted(path for path in folder.iterdir() if is_definition_name(path))
    candidates = [path for path in files if _looks_like_definition(path)]
    for stem in ("data", "dataset", folder.name.lower()):
        if preferred := [path for path in candidates if path.stem.lower() == stem]:
            return preferred[0]
    if len(candidates) > 1:
        raise DataError(
            f"{len(candidates)} files could describe the data set.",
            location=folder,
            choices=[path.name for path in candidates],
            fix=f"name one of them instead of the folder, e.g. {candidates[0]}",
        )
    return candidates[0] if candidates else None


def _looks_like_definition(path: Path) -> bool:
    """Whether a file has a split and classes as keys: data folders contain other YAML files too."""
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return False
    text = regular_files.read_text(path, encoding="utf-8-sig", errors="replace", max_bytes=MAX_BYTES)
    keys = {match.lower() for match in re.findall(r"^[\"']?(\w+)[\"']?\s*[:=]", text, re.MULTILINE)}
    splits = keys & SPLIT_BY_NAME.keys()
    has_usual_name = path.stem.lower() in ("data", "dataset")
    return bool(splits) and ("names" in keys or "nc" in keys or has_usual_name)


def read_definition(file: Path) -> DatasetDefinition:
    """Reads a data.yaml or obj.data. Raises DataError that names the file and the key."""
    if file.suffix.lower() == ".data":
        data: Any = _parse_assignments(file)
    else:
        try:
            text = regular_files.read_text(file, encoding="utf-8-sig", max_bytes=MAX_BYTES)
            data = yaml.load(text, Loader=yaml.BaseLoader)  # reads all values as text
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            raise DataError(
                "The description of the data set is not valid YAML.",
                location=file if mark is None else f"{file}:{mark.line + 1}",
                cause=str(getattr(error, "problem", None) or error),
                fix="correct the line; names with special characters need quotes",
            ) from error
        except UnicodeDecodeError as error:
            raise DataError(
                "A text file is not UTF-8.", location=file, cause=str(error), fix="save it as UTF-8"
            ) from error
        except RecursionError as error:
            raise _definition_error(file, "its lists are nested too deeply", "write the file again") from error
    if not isinstance(data, dict):
        raise _definition_error(file, "it has no keys", "see https://docs.ultralytics.com/datasets/detect/")
    splits: dict[str, tuple[str, ...]] = {}
    for split_name in ("train", "val", "valid", "validation", "test"):
        entries = _parse_entries(file, split_name, data.get(split_name, ""))
        if entries and SPLIT_BY_NAME[split_name] not in splits:
            splits[SPLIT_BY_NAME[split_name]] = entries
    if not splits:
        raise _definition_error(
            file, "it names no images: there is no train, val or test", "add lines such as `train: images/train`"
        )
    path = data.get("path", "")
    if not isinstance(path, str):
        raise _definition_error(file, "path is not one folder", "name one folder, and the splits relative to it")
    kpt_shape = data.get("kpt_shape", ["0", "0"])
    kpt_dims = [_parse_int(file, "kpt_shape", value) for value in kpt_shape] if isinstance(kpt_shape, list) else []
    num_classes = data.get("nc", data.get("classes", "") if file.suffix.lower() == ".data" else "")
    return DatasetDefinition(
        file=file,
        splits=splits,
        path=None if path.lower() in _NULL_VALUES else path,
        class_names=_parse_names(file, data.get("names", "")),
        num_classes=_parse_int(file, "nc", num_classes)
        if isinstance(num_classes, str) and num_classes.lower() not in _NULL_VALUES
        else None,
        num_keypoint_values=kpt_dims[0] * kpt_dims[1] if len(kpt_dims) == 2 else 0,
    )


def _parse_assignments(file: Path) -> dict[str, str]:
    """The `key = value` lines of Darknet's obj.data."""
    lines = regular_files.read_text(file, encoding="utf-8-sig", errors="replace", max_bytes=MAX_BYTES).splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip(): value.strip() for key, _, value in pairs}


def _parse_entries(file: Path, key: str, value: Any) -> tuple[str, ...]:
    entries = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str) for entry in entries):
        raise _definition_error(file, f"{key} is neither a path nor a list of paths", f"write `{key}: images/{key}`")
    return tuple(entry.strip() for entry in entries if entry.strip().lower() not in _NULL_VALUES)


def _parse_int(file: Path, key: str, value: Any) -> int:
    if not (isinstance(value, str) and value.strip().isascii() and value.strip().isdigit()):
        raise _definition_error(
            file, f"{key} has {str(value)[:60]!r}, which is not a whole number", f"correct {key}, or delete it"
        )
    if len(value.strip()) > len(str(MAX_CLASSES)) or int(value) > MAX_CLASSES:
        raise _definition_error(
            file, f"{key} has the number {value.strip()[:60]}; at most {MAX_CLASSES:,} is possible", f"correct {key}"
        )
    return int(value)


def _parse_names(file: Path, value: Any) -> tuple[str, ...] | None:
    """The class names, from a list, a mapping from numbers, or the path of a file of names."""
    if isinstance(value, str):
        if value.lower() in _NULL_VALUES:
            return None
        relative_path = value.replace("\\", "/")
        for candidate in (file.parent / relative_path, file.parent / relative_path.rpartition("/")[2]):
            if candidate.is_file():
                return read_names(candidate)
        raise _definition_error(
            file, f"names is {value!r}, neither a list nor an existing file", "write `names: [first, second]`"
        )
    if isinstance(value, list):
        values = dict(enumerate(value))
    else:
        values = {_parse_int(file, "names", key): name for key, name in value.items()}
    unnamed = [number for number, name in values.items() if not isinstance(name, str) or not name.strip()]
    if unnamed:
        raise _definition_error(
            file, f"class {unnamed[0]} has no name, or one that is not text", "give every class a name"
        )
    gaps = sorted(set(range(max(values, default=-1) + 1)) - values.keys())
    if gaps:
        raise _definition_error(
            file,
            f"names has {len(values)} classes up to number {max(values)}, but none with the number {gaps[0]}",
            f"give class {gaps[0]} a name; numbers begin at 0 and have no gaps",
        )
    return tuple(values[number].strip() for number in range(len(values))) or None


def _definition_error(file: Path, cause: str, fix: str) -> DataError:
    return DataError("The description of the data set cannot be used.", location=file, cause=cause, fix=fix)


def find_names_files(folders: list[Path]) -> list[Path]:
    """The files of class names in some folders, which may be absent."""
    candidates = dict.fromkeys(folder / name for folder in folders for name in NAMES_FILES)
    existing = [path for path in candidates if path.is_file()]
    if not existing:  # Darknet's may have any name: coco.names
        others = (path for folder in folders if folder.is_dir() for path in folder.glob("*.names"))
        existing = sorted(path for path in others if path.is_file() and not path.name.startswith("."))
    return [path for path in existing if path.suffix != ".json" or b'"categories"' in regular_files.read_bytes(path)]


def read_names(file: Path) -> tuple[str, ...]:
    """The class names in a file: one per line, or Label Studio's notes.json. Raises DataError."""
    try:
        if file.suffix.lower() == ".json":
            categories = json.loads(regular_files.read_text(file, encoding="utf-8-sig"))["categories"]
            name_by_id = {int(entry["id"]): str(entry["name"]) for entry in categories}
            lines = [name_by_id[number] for number in range(len(name_by_id))]
        else:
            lines = [line.strip() for line in regular_files.read_text(file, encoding="utf-8-sig").splitlines()]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            "The list of class names cannot be read.",
            location=file,
            cause=f"{type(error).__name__}: {error}",
            fix="write one name per line, in the order of the class numbers, as UTF-8",
        ) from error
    while lines and not lines[-1]:
        lines.pop()
    if not lines or not all(lines):
        location = f"{file}:{lines.index('') + 1}" if lines else file
        raise DataError(
            "The list of class names has an empty line." if lines else "The list of class names is empty.",
            location=location,
            cause="the number of a class is the number of its line",
            fix="write one name per line",
        )
    return tuple(lines)
