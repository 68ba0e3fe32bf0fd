"""Finds the files of a Pascal VOC data set.

Recognized: `Annotations/` (or `xml/`, `labels/` …) next to `JPEGImages/` (or `images/` …), with or without
`ImageSets/Main`, also with subfolders in both; `annotations/train/` with `images/train/`; XML files and images in one
folder; any of these in `train/`, `valid/`, `test/`. Not here: reading the files (`voc.py`).
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from stoker import regular_files
from stoker.data.formats.annotated_dirs import read_head
from stoker.data.formats.cvat import is_cvat
from stoker.data.formats.tables import (
    ANNOTATION_DIRS,
    SPLITS,
    DatasetLayout,
    SplitFiles,
    check_unannotated_splits,
    iter_annotation_files,
    iter_split_dirs,
    iter_split_image_dirs,
    list_image_dirs,
    list_split_pairs,
    list_subdirs,
    split_list_names,
)

MAX_PROBES = 64
"""Lines of a list that are tried, to see whether it is about the annotated images."""


def find(folder: Path) -> DatasetLayout | None:
    """The Pascal VOC data set in a folder (not in subfolders), or None."""
    notes: list[str] = []
    if (annotations := _find_annotation_dir(folder)) is not None:
        description = f"Pascal VOC in {annotations.relative_to(folder)}/"
        parts, notes = _parts_from_lists(folder, annotations)
        present = {part.split for part in parts}
        others = [part for part in _iter_split_folders(folder) if part.split not in ("train", *present)]
        if others and present == {None}:  # Annotations/ and Validation_Annotations/: the first are for training
            parts = [replace(part, split="train") for part in parts]
        parts += others
    elif parts := list(_iter_split_folders(folder)):
        description = "Pascal VOC per split folder"
        notes = check_unannotated_splits(folder, parts)
    elif _has_xml(folder):
        description = "Pascal VOC, XML files in one folder"
        parts = [SplitFiles(split=None, annotations=folder, image_dirs=list_image_dirs(folder))]
    else:
        return None
    return DatasetLayout(format="voc", description=description, root=folder, parts=tuple(parts), notes=tuple(notes))


def _iter_split_folders(folder: Path) -> Iterator[SplitFiles]:
    for split, path in iter_split_dirs(folder):
        annotations = _find_annotation_dir(path) or (path if _has_xml(path) else None)
        if annotations is not None:
            yield SplitFiles(split=split, annotations=annotations, image_dirs=list_image_dirs(path))
    for split, images, annotations in list_split_pairs(folder):
        if _has_xml(annotations):
            yield SplitFiles(split=split, annotations=annotations, image_dirs=(images,))


def list_xml(folder: Path) -> list[Path]:
    """The XML files in a folder of annotations."""
    return [Path(file) for file in iter_annotation_files(folder, (".xml",))]


def _has_xml(folder: Path) -> bool:
    return any(not is_cvat(read_head(Path(file))) for file in iter_annotation_files(folder, (".xml",)))


def _find_annotation_dir(folder: Path) -> Path | None:
    """The subfolder that contains the XML files."""
    subdirs = list_subdirs(folder)
    directory = next((subdirs[name] for name in ANNOTATION_DIRS if name in subdirs and _has_xml(subdirs[name])), None)
    if directory is None:
        return None
    inner = list_subdirs(directory).get("xmls")  # as in the Oxford-IIIT Pet data set
    return directory if inner is None or not _has_xml(inner) else inner


def _make_split_parts(folder: Path, annotations: Path) -> list[SplitFiles]:
    """The parts if every XML file is in a subfolder named after its split; else none."""
    split_dirs = [(split, path) for split, path in iter_split_dirs(annotations) if _has_xml(path)]
    if not split_dirs or len(list_xml(annotations)) > sum(len(list_xml(path)) for _, path in split_dirs):
        return []
    image_dirs = list_image_dirs(folder)
    return [
        SplitFiles(
            split=split,
            annotations=path,
            image_dirs=tuple(dict.fromkeys([*iter_split_image_dirs(folder, split), *image_dirs])),
        )
        for split, path in split_dirs
    ]


def _parts_from_lists(folder: Path, annotations: Path) -> tuple[list[SplitFiles], list[str]]:
    """The splits of the lists in ImageSets/Main, ImageSets or the folder itself, and notes; without such lists one part
    without a split.

    Only train, val, trainval and test: a file such as aeroplane_train.txt lists the images with that class.
    """
    image_dirs = list_image_dirs(folder)
    notes = []
    lists: dict[str, Path] = {}
    for directory in (folder / "ImageSets" / "Main", folder / "ImageSets", folder):
        lists = split_list_names(directory)
        if lists and directory == folder:
            names = [lists[split].name for split in (*SPLITS, "trainval") if split in lists]
            for_training = lists.get("train", lists.get("trainval"))
            if for_training is None or not _lists_name_files(for_training, annotations):
                notes.append(f"not read: {', '.join(names)}: no line names an annotated image for training")
                lists = {}
            else:
                notes.append(f"splits: those of {', '.join(names)}")
        if lists:
            break
    trainval = lists.pop("trainval", None)
    if trainval is not None and "train" not in lists:
        lists["train"] = trainval
        if "val" in lists:
            notes.append("not read: ImageSets/Main/val.txt, because trainval.txt contains its images")
            del lists["val"]
    parts = [
        SplitFiles(split=split, annotations=annotations, image_dirs=image_dirs, image_list=lists[split])
        for split in SPLITS
        if split in lists
    ]
    parts = parts or _make_split_parts(folder, annotations)
    return parts or [SplitFiles(split=None, annotations=annotations, image_dirs=image_dirs)], notes


def match_list_entry(entry: str, known: Mapping[str, Path], by_stem: Mapping[str, Path]) -> Path | None:
    """The XML file of a line of a list: a name with or without the image's suffix, perhaps followed by 1 or -1, or a
    path, perhaps of another machine. known: by relative path without suffix; by_stem: by name without suffix."""
    for text in (entry, os.path.splitext(entry)[0], entry.split()[0]):
        if text in known:
            return known[text]
    for text in (entry, entry.split()[0]):
        name = text.replace("\\", "/").rpartition("/")[2]
        for stem in (os.path.splitext(name)[0], name):
            if stem in by_stem:
                return by_stem[stem]
    return None


def index_xml(annotations: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """The XML files of a folder by relative path without suffix, and by their stem where only one has it."""
    paths = list_xml(annotations)
    known = {str(path.relative_to(annotations).with_suffix("")): path for path in paths}
    counts = Counter(path.stem for path in paths)
    return known, {path.stem: path for path in paths if counts[path.stem] == 1}


def _lists_name_files(image_list: Path, annotations: Path) -> bool:
    known, by_stem = index_xml(annotations)
    text = regular_files.read_text(image_list, encoding="utf-8-sig", errors="surrogateescape")
    lines = islice((line.strip() for line in text.splitlines() if line.strip()), MAX_PROBES)
    return any(match_list_entry(line, known, by_stem) is not None for line in lines)
