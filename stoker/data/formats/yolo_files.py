"""Finds the files of a YOLO data set.

Recognized: a data.yaml (or obj.data) with folders or lists of images; without one, lists of images (train.txt),
`images/train` with `labels/train`, `train/images` with `train/labels`, `images/` with `labels/`, and label files next
to the images. A part is one folder of images with the folder of their labels. Not here: reading data.yaml
(`yolo_yaml.py`) and the label files (`yolo.py`).
"""

import os
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from stoker import regular_files
from stoker.data.formats.tables import (
    IMAGE_SUFFIXES,
    SPLIT_BY_NAME,
    SPLITS,
    DataErrors,
    DatasetLayout,
    SplitFiles,
    check_unannotated_splits,
    is_image_name,
    iter_split_dirs,
    list_split_pairs,
    list_subdirs,
    split_from_name,
)
from stoker.data.formats.yolo_yaml import DatasetDefinition, find_definition, find_names_files, read_definition
from stoker.errors import DataError

IMAGE_DIR_NAMES = ("images", "jpegimages")
"""The last of these in an image's path is replaced by "labels", as in Ultralytics and Darknet."""
MAX_WALKED_DIRS = 20_000
"""Folders below one that a description names; ImageNet has 1,000 per split."""
MAX_PROBES = 16
"""Label files that are read to recognize a YOLO data set without a data.yaml."""


def find(folder: Path) -> DatasetLayout | None:
    """The YOLO data set in a folder (not in subfolders), or None. Raises DataError if its data.yaml is wrong."""
    definition = find_definition(folder)
    if definition is not None:
        return from_file(definition)
    for description, parts, notes in _iter_layouts(folder):
        if parts and _has_rows(parts):
            names_files = find_names_files(_names_file_dirs(folder, parts))
            return DatasetLayout(
                format="yolo",
                description=description,
                root=folder,
                parts=tuple(parts),
                notes=tuple(notes),
                metadata_files=tuple(names_files),
            )
    return None


def from_file(file: Path) -> DatasetLayout:
    """The data set of a data.yaml or obj.data. Raises DataError if its images are absent."""
    definition = read_definition(file)
    base_dirs, notes = resolve_base_dirs(definition)
    parts: list[SplitFiles] = []
    substitutions: list[str] = []
    errors: list[DataError] = []
    for split in SPLITS:
        for entry in definition.splits.get(split, ()):
            path = resolve_path(entry, base_dirs)
            if path is None and split == "test":
                notes.append(f"the test split is left out: {entry!r} in {file.name} does not exist")
                continue
            if path is None:
                errors.append(
                    DataError(
                        f"The images of the {split} split do not exist.",
                        location=f"{file}: {split}: {entry}",
                        cause=f"{entry!r}, also without its first folders, is not in "
                        + ", ".join(str(base) for base in base_dirs),
                        fix="correct the line; delete it to split validation images off the training set"
                        if split == "val"
                        else "correct the line, or `path`, to which it is relative",
                    )
                )
                continue
            if path != _join(base_dirs[0], entry) or not path.is_relative_to(base_dirs[0]):
                substitutions.append(f"{entry!r} is read from {path}")
            if path.suffix.lower() == ".txt":
                parts += _parts_from_list(split, path, base_dirs)
            else:
                found_parts = list(_iter_parts_below(split, path))
                if not found_parts and split != "test":
                    errors.append(
                        DataError(
                            f"The {split} split has no images.",
                            location=path,
                            cause=f"{file} names this folder; no file in it ends in {', '.join(IMAGE_SUFFIXES)}",
                            fix="correct the line, or put the images there",
                        )
                    )
                parts += found_parts
    if errors:
        raise DataErrors(errors)
    if substitutions:
        notes.append(f"{file.name}: {', '.join(substitutions)}")
    metadata_files = (file, *(() if definition.class_names else find_names_files(_names_file_dirs(file.parent, parts))))
    return DatasetLayout(
        format="yolo",
        description=f"YOLO, {file.name}",
        root=base_dirs[0],
        parts=tuple(parts),
        notes=tuple(notes),
        metadata_files=metadata_files,
    )


def resolve_base_dirs(definition: DatasetDefinition) -> tuple[tuple[Path, ...], list[str]]:
    """Folders to which paths may be relative, the most likely first (`path`, the file's folder, its parent); notes."""
    file_dir = definition.file.parent
    default_dirs = (file_dir, file_dir.parent)
    if definition.path is None:
        return default_dirs, []
    base = resolve_path(definition.path, default_dirs)
    if base is None or not base.is_dir():
        return default_dirs, [f"path {definition.path!r} of {definition.file.name} does not exist: {file_dir} is used"]
    notes = [f"path {definition.path!r} of {definition.file.name} is {base}"] if base != file_dir else []
    return tuple(dict.fromkeys((base, *default_dirs))), notes


def _join(base: Path, text: str) -> Path:
    return Path(os.path.normpath(base / Path(text.replace("\\", "/")).expanduser()))


def resolve_path(text: str, base_dirs: Iterable[Path], *, min_parts: int = 2) -> Path | None:
    """The file or folder of a written path: as written, relative to a base; else without its first folders.

    Exports contain the folders of another machine, and Roboflow's begin with a wrong `../`. At least `min_parts` parts
    of a longer path must exist, or its last one must be named after a split.
    """
    base_dirs = tuple(base_dirs)
    for base in base_dirs:
        if (candidate := _join(base, text)).exists():
            return candidate
    parts = [part for part in PurePosixPath(text.replace("\\", "/")).parts if part not in ("/", "..", ".")]
    parts = [part for part in parts if not part.endswith(":")]
    for start in range(len(parts)):
        tail = parts[start:]
        if len(tail) < min(min_parts, len(parts)) and split_from_name(tail[0]) is None:
            break
        for base in base_dirs:
            if (candidate := base.joinpath(*tail)).exists():
                return candidate
    return None


def read_image_list(image_list: Path, base_dirs: Iterable[Path]) -> dict[Path, list[str]]:
    """Folder → file names of the images in a list, in its order. A folder that does not exist is kept as written.

    base_dirs: the folders to which paths may be relative, besides the folder of the list.
    """
    search_dirs = (image_list.parent, *base_dirs)
    lines = regular_files.read_text(image_list, encoding="utf-8-sig", errors="surrogateescape").splitlines()
    folder_by_head: dict[str, Path] = {}
    names_by_folder: dict[Path, dict[str, None]] = {}
    for line in lines:
        entry = line.strip().replace("\\", "/")
        if not entry:
            continue
        head, _, name = entry.rpartition("/")
        folder = folder_by_head.get(head)
        if folder is None:
            path = resolve_path(entry, search_dirs, min_parts=1)
            if path is not None:
                folder = folder_by_head[head] = path.parent
            else:  # not stored, because the next image may exist; the folder follows from its own name
                folder = (resolve_path(head, search_dirs) if head else None) or _join(search_dirs[0], head)
        names_by_folder.setdefault(folder, {})[name] = None
    return {folder: list(names) for folder, names in names_by_folder.items()}


def _parts_from_list(split: str, image_list: Path, base_dirs: Iterable[Path]) -> Iterator[SplitFiles]:
    names_by_folder = read_image_list(image_list, base_dirs)
    if not names_by_folder:
        raise DataError(
            f"The {split} split is empty.",
            location=image_list,
            fix="list its images there, one per line, or delete the list",
        )
    for folder, names in names_by_folder.items():
        yield SplitFiles(
            split=split, annotations=find_labels_dir(folder, names), image_dirs=(folder,), image_list=image_list
        )


def _iter_parts_below(split: str | None, base: Path) -> Iterator[SplitFiles]:
    """A part for every folder with images, at or below one."""
    visited: set[str] = set()
    for dirpath, folders, files in os.walk(base, followlinks=True):
        real = os.path.realpath(dirpath)
        if real in visited:  # a link to a folder above
            folders.clear()
            continue
        visited.add(real)
        if len(visited) > MAX_WALKED_DIRS:
            fix = "name the folder of the images: a `path` such as / contains the whole disk"
            raise DataError(f"There are more than {MAX_WALKED_DIRS:,} folders below it.", location=base, fix=fix)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = [name for name in files if is_visible_image(name)]
        if names:
            yield SplitFiles(
                split=split, annotations=find_labels_dir(Path(dirpath), names), image_dirs=(Path(dirpath),)
            )


def is_visible_image(name: str) -> bool:
    """Whether a file name is that of an image, and not hidden."""
    return is_image_name(name) and not name.startswith(".")


def find_labels_dir(folder: Path, names: Iterable[str]) -> Path:
    """The folder of the label files of images: with `images` in its path replaced by `labels`, the folder itself, or a
    folder `labels` next to it or in it; the first that has a label of one of these images."""
    names = list(names)
    candidates = [folder, folder.parent / "labels", folder / "labels", folder.parent / "labels" / folder.name]
    last = next((n for n in reversed(range(len(folder.parts))) if folder.parts[n].lower() in IMAGE_DIR_NAMES), None)
    if last is not None:
        above, below = Path(*folder.parts[:last]), folder.parts[last + 1 :]
        candidates[:0] = [above.joinpath(word, *below) for word in ("labels", "Labels")]
    existing = [directory for directory in dict.fromkeys(candidates) if directory.is_dir()]
    with_labels = (directory for directory in existing if match_labels(names, list_label_files(directory)))
    return next(with_labels, next((directory for directory in existing if directory != folder), candidates[0]))


def list_label_files(folder: Path) -> list[str]:
    """The .txt files in a folder, sorted; none if it does not exist."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name.lower().endswith(".txt"))
    return [name for name in names if not name.startswith(".")]


def match_labels(image_names: Iterable[str], label_names: Iterable[str]) -> dict[str, str]:
    """Image name → name of its label file. It has the same stem; if there is none, the same stem in another case or
    Unicode form, unless it belongs to another image."""
    by_stem = {os.path.splitext(label_name)[0]: label_name for label_name in label_names}
    stems = {image_name: os.path.splitext(image_name)[0] for image_name in image_names}
    matches = {image_name: by_stem[stem] for image_name, stem in stems.items() if stem in by_stem}
    if len(matches) == len(stems):
        return matches
    labels_by_folded_stem: dict[str, list[str]] = {}
    for stem in by_stem.keys() - stems.values():
        labels_by_folded_stem.setdefault(_fold_name(stem), []).append(by_stem[stem])
    for image_name, stem in stems.items():
        if image_name not in matches and len(candidates := labels_by_folded_stem.get(_fold_name(stem), [])) == 1:
            matches[image_name] = candidates[0]
    return matches


def _fold_name(stem: str) -> str:
    return unicodedata.normalize("NFC", stem).casefold()


def _iter_layouts(folder: Path) -> Iterator[tuple[str, list[SplitFiles], list[str]]]:
    """The possible layouts without a data.yaml: description, parts (perhaps none), notes."""
    pairs = [
        SplitFiles(split=split, annotations=labels, image_dirs=(images,))
        for split, images, labels in list_split_pairs(folder)
        if list_label_files(labels)
    ]
    if any(part.split == "train" for part in pairs):
        yield "YOLO in folders of images and of labels per split", pairs, []
    for description, parts, notes in _iter_usual_layouts(folder):
        if pairs and {part.split for part in parts} == {None}:
            parts = [*(replace(part, split="train") for part in parts), *pairs]
        yield description, parts, notes


def _iter_usual_layouts(folder: Path) -> Iterator[tuple[str, list[SplitFiles], list[str]]]:
    subdirs = list_subdirs(folder)
    lists = [(split, folder / f"{word}.txt") for word, split in SPLIT_BY_NAME.items()]
    lists = [(split, path) for split, path in lists if path.is_file() and _is_image_list(path)]
    yield (
        "YOLO with lists of images",
        [part for split, path in lists for part in _parts_from_list(split, path, ())],
        [],
    )
    images = next((subdirs[word] for word in IMAGE_DIR_NAMES if word in subdirs), None)
    if images is not None and ("labels" in subdirs or list_label_files(images)):
        image_subdirs = list_subdirs(images)
        splits = [(split, path) for name, path in image_subdirs.items() if (split := split_from_name(name)) is not None]
        if splits:
            splits.sort(key=lambda item: SPLITS.index(item[0]))
            others = [path.name for path in image_subdirs.values() if path not in [path for _, path in splits]]
            if any(is_visible_image(name) for name in os.listdir(images)):
                others.append("the images directly in it")
            notes = [f"of {images.name}/, left out: {', '.join(others)}, in no split"] if others else []
            yield "YOLO in images/ and labels/", [p for s, path in splits for p in _iter_parts_below(s, path)], notes
        yield "YOLO in images/ and labels/", list(_iter_parts_below(None, images)), []
    parts = []
    for split, path in iter_split_dirs(folder):
        inner = list_subdirs(path)
        if "labels" in inner or "labels" in subdirs or list_label_files(path):
            base = next((inner[word] for word in IMAGE_DIR_NAMES if word in inner), path)
            parts += [part for part in _iter_parts_below(split, base) if list_label_files(part.annotations)]
    if parts and _has_rows(parts):
        yield "YOLO per split folder", parts, check_unannotated_splits(folder, parts)
    if list_label_files(folder) or "labels" in subdirs:
        names = [name for name in sorted(os.listdir(folder)) if is_visible_image(name)]
        part = SplitFiles(split=None, annotations=find_labels_dir(folder, names), image_dirs=(folder,))
        yield "YOLO, label files and images in one folder", [part] if names else [], []


def _is_image_list(path: Path) -> bool:
    with regular_files.open_file(path) as file:
        return is_image_name(file.readline(4096).decode("utf-8-sig", errors="replace").strip())


def _has_rows(parts: list[SplitFiles]) -> bool:
    """Whether the text files of images are YOLO labels: others, such as captions, may be next to images too."""
    num_checked = 0
    for part in parts:
        if not part.image_dirs[0].is_dir():  # a list has paths of another machine
            continue
        with os.scandir(part.image_dirs[0]) as entries:
            image_names = [entry.name for entry in entries if is_visible_image(entry.name)]
        for name in match_labels(image_names, list_label_files(part.annotations)).values():
            if not (line := _read_first_line(part.annotations / name)):
                continue
            if looks_like_row(line):
                return True
            num_checked += 1
            if num_checked >= MAX_PROBES:
                return False
    return False


def _read_first_line(path: Path) -> bytes:
    with regular_files.open_file(path) as file:
        head = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
    return head.partition(b"\n")[0].strip()


def looks_like_row(line: bytes) -> bool:
    """Whether a line is a class and at least four numbers."""
    try:
        return len([float(field) for field in line.split()]) >= 5
    except ValueError:
        return False


def is_label_file(path: Path) -> bool:
    """Whether a text file begins like YOLO labels."""
    return looks_like_row(_read_first_line(path))


def _names_file_dirs(folder: Path, parts: Iterable[SplitFiles]) -> list[Path]:
    """The folders that may contain a list of class names."""
    labels = [part.annotations for part in parts][:MAX_PROBES]
    return list(dict.fromkeys([folder, folder / "labels", *labels, *(path.parent for path in labels)]))
