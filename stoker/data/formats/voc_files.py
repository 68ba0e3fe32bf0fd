"""Which files make up a Pascal VOC data set.

Recognised: `Annotations/` (or `xml/`, `labels/` …) beside `JPEGImages/` (or `images/` …), with or without
`ImageSets/Main`, also with folders inside both; `annotations/train/` with `images/train/`; XML files beside the
pictures in one folder; any of these in `train/`, `valid/`, `test/`. Not here: what is in the files (`voc.py`).
"""

from pathlib import Path

from stoker.data.formats.tables import (
    ANNOTATION_FOLDERS,
    SPLITS,
    Found,
    Part,
    annotation_files,
    picture_folders,
    pictures_of_split,
    split_folders,
    subfolders,
    without_annotations,
)


def find(folder: Path) -> Found | None:
    """The Pascal VOC data set in a folder (not below it), or None."""
    annotations = _annotations(folder)
    if annotations is not None:
        parts, notes = _listed(folder, annotations)
        return Found(
            format="voc",
            layout=f"Pascal VOC in {annotations.relative_to(folder)}/",
            root=folder,
            parts=tuple(parts),
            notes=tuple(notes),
        )
    parts = []
    for split, path in split_folders(folder):
        place = _annotations(path) or (path if _has_xml(path) else None)
        if place is not None:
            parts.append(Part(split=split, annotations=place, pictures=picture_folders(path)))
    if parts:
        notes = without_annotations(folder, parts)
        return Found(
            format="voc", layout="Pascal VOC per split folder", root=folder, parts=tuple(parts), notes=tuple(notes)
        )
    if _has_xml(folder):
        part = Part(split=None, annotations=folder, pictures=picture_folders(folder))
        return Found(format="voc", layout="Pascal VOC, XML files in one folder", root=folder, parts=(part,))
    return None


def xml_in(folder: Path) -> list[Path]:
    """The XML files of a folder of annotations."""
    return [Path(file) for file in annotation_files(folder, (".xml",))]


def _has_xml(folder: Path) -> bool:
    return any(True for _ in annotation_files(folder, (".xml",)))


def _annotations(folder: Path) -> Path | None:
    """The folder of XML files in a folder."""
    below = subfolders(folder)
    place = next((below[name] for name in ANNOTATION_FOLDERS if name in below and _has_xml(below[name])), None)
    if place is None:
        return None
    inner = subfolders(place).get("xmls")  # the Oxford pets' habit
    return place if inner is None or not _has_xml(inner) else inner


def _per_split(folder: Path, annotations: Path) -> list[Part]:
    """The parts of a folder of annotations in which every XML file is in a folder named after its split."""
    inside = [(split, path) for split, path in split_folders(annotations) if _has_xml(path)]
    if not inside or len(xml_in(annotations)) > sum(len(xml_in(path)) for _, path in inside):
        return []
    usual = picture_folders(folder)
    return [
        Part(split=split, annotations=path, pictures=tuple(dict.fromkeys([*pictures_of_split(folder, split), *usual])))
        for split, path in inside
    ]


def _listed(folder: Path, annotations: Path) -> tuple[list[Part], list[str]]:
    """The splits of ImageSets/Main; one part without a split where there are none.

    Only train, val, trainval and test: a file like aeroplane_train.txt says which pictures show that class.
    """
    pictures = picture_folders(folder)
    main = folder / "ImageSets" / "Main"
    lists = {name: main / f"{name}.txt" for name in (*SPLITS, "trainval") if (main / f"{name}.txt").is_file()}
    notes = []
    both = lists.pop("trainval", None)
    if both is not None and "train" not in lists:
        lists["train"] = both
        if "val" in lists:
            notes.append("not read: ImageSets/Main/val.txt, its pictures are part of trainval.txt")
            del lists["val"]
    parts = [
        Part(split=split, annotations=annotations, pictures=pictures, listing=lists[split])
        for split in SPLITS
        if split in lists
    ]
    parts = parts or _per_split(folder, annotations)
    return parts or [Part(split=None, annotations=annotations, pictures=pictures)], notes
