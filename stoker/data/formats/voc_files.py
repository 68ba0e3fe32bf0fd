"""Finds the files of a Pascal VOC data set.

Recognized: `Annotations/` (or `xml/`, `labels/` …) next to `JPEGImages/` (or `images/` …), with or without
`ImageSets/Main`, also with subfolders in both; `annotations/train/` with `images/train/`; XML files and images in one
folder; any of these in `train/`, `valid/`, `test/`. Not here: reading the files (`voc.py`).
"""

from collections.abc import Iterator
from pathlib import Path

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
    list_subdirs,
)


def find(folder: Path) -> DatasetLayout | None:
    """The Pascal VOC data set in a folder (not in subfolders), or None."""
    notes: list[str] = []
    if (annotations := _find_annotation_dir(folder)) is not None:
        description = f"Pascal VOC in {annotations.relative_to(folder)}/"
        parts, notes = _parts_from_lists(folder, annotations)
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


def list_xml(folder: Path) -> list[Path]:
    """The XML files in a folder of annotations."""
    return [Path(file) for file in iter_annotation_files(folder, (".xml",))]


def _has_xml(folder: Path) -> bool:
    return any(True for _ in iter_annotation_files(folder, (".xml",)))


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
    """The splits of ImageSets/Main, and notes; without such lists one part without a split.

    Only train, val, trainval and test: a file such as aeroplane_train.txt lists the images with that class.
    """
    image_dirs = list_image_dirs(folder)
    main = folder / "ImageSets" / "Main"
    lists = {name: main / f"{name}.txt" for name in (*SPLITS, "trainval") if (main / f"{name}.txt").is_file()}
    notes = []
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
