"""KITTI: `training/label_2/*.txt` with images in `training/image_2/`, a line per object, boxes in pixels.

Also `labels/` with `images/` (NVIDIA TAO), a folder per split, and the lists `ImageSets/train.txt` and `val.txt`.
`DontCare` regions are crowd boxes of each class: detections in them are neither right nor wrong. Only the class and the
box of a line are read, as `public_sets.toml` says. Format: https://www.cvlibs.net/datasets/kitti/eval_object.php.
"""

import os
from dataclasses import replace
from pathlib import Path

from stoker.data.formats import folders
from stoker.data.formats.images import ImageFile, ImageLocator, TableBuilder
from stoker.data.formats.public import ObjectReader, fields_of, public_sets
from stoker.data.formats.tables import AnnotationTable, DatasetLayout
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error


def recognize(folder: Path) -> DatasetLayout | None:
    """Returns the KITTI data set in a folder (not in subfolders), or None."""

    def has_labels(path: Path) -> bool:
        return any(map(public_sets()["KITTI"].matches, folders.list_files(path, ".txt")[: folders.MAX_PROBES]))

    found = folders.find_annotated_dirs(folder, has_labels)
    if not found:
        return None
    parts = [folders.file_part(labels, split, folders.list_image_dirs(labels.parent)) for split, labels in found]
    lists, notes = folders.split_lists(folder / "ImageSets"), []
    if "train" not in lists and "trainval" in lists:
        lists = {"train": lists["trainval"]}
    if "train" in lists and len(parts) == 1:
        parts = [replace(parts[0], split=name, image_list=lists[name]) for name in ("train", "val") if name in lists]
        notes += ["not read: ImageSets/test.txt: the test images have no labels"] if "test" in lists else []
    description = f"KITTI ({os.path.relpath(found[0][1], folder)}/)"
    return DatasetLayout(format="kitti", description=description, root=folder, parts=tuple(parts), notes=tuple(notes))


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all label files. Raises DataError if none of the listed images has one."""
    builder = TableBuilder(layout, problems, box_id_kind="line")
    row = public_sets()["KITTI"]
    reader = ObjectReader(row, builder)
    unlisted: dict[str, tuple[Path, str]] = {}
    for part in layout.parts:
        locator = ImageLocator(layout.root, part)
        files = {file.stem: file for file in folders.list_files(part.annotations, ".txt")}
        found = {name: locator.find(f"{name}.png", f"{name}.jpg", name) for name in files}
        images = {name: image or (part.image_dirs[0], f"{name}.png") for name, image in found.items()}
        unlisted = images.copy() if part is layout.parts[0] else unlisted
        for name in files if part.image_list is None else _read_list(part.image_list):
            unlisted.pop(name, None)
            if name not in files:
                problems.add("no-annotation-file", f"{os.path.relpath(part.image_list or '', layout.root)}: {name}")
                continue
            location = os.path.relpath(files[name], layout.root)
            index = builder.add_image(ImageFile(*images[name], part.split_index), location)
            text = regular_files.read_text(files[name], encoding="utf-8-sig", errors="replace")
            for number, line in enumerate(text.splitlines(), 1):
                reader.add(fields_of(line, row) or None, index, number, f"{location}:{number}")
        builder.notes += locator.notes()
    for folder, name in unlisted.values():
        problems.add("not-in-a-split", os.path.relpath(folder / name, layout.root))
    if not builder.images:
        raise make_error(DataError, "kitti-without-labels", layout.parts[0].image_list)
    return builder.build(reader.add_ignored())


def _read_list(file: Path) -> list[str]:
    """Returns the names in a list, without a suffix or folders."""
    lines = regular_files.read_text(file, encoding="utf-8-sig", errors="replace").splitlines()
    return list(dict.fromkeys(Path(line.split()[0]).stem for line in lines if line.strip()))
