"""The image files of a data set: their sizes, names on the disk and places; tables of them and their boxes.

`repair_names` corrects names that annotations write differently from the disk (`IMG_1.JPG` for `img_1.jpg`, é as one or
two characters, `%20`), if only one file fits; if all names are correct, the cost is one listing per folder.
`ImageLocator` finds images by their path, else by their name alone, near the annotations: paths are often those of
another machine (`C:/Users/me/1.jpg`). `report_outside`: "Files outside the folder" in docs/data.md. `TableBuilder`
makes an `AnnotationTable` of images and boxes, for all formats except COCO and TFRecord, which build arrays directly,
for speed. Not here: COCO's search for its images, Pascal VOC's, which goes by the stem.
"""

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.folders import SPLIT_BY_NAME, is_image_name
from stoker.data.formats.tables import (
    SPLITS,
    UNASSIGNED,
    XYXY,
    AnnotationTable,
    DatasetLayout,
    FolderTable,
    SplitFiles,
    display_path,
    group_by_folder,
)
from stoker.data.images import source
from stoker.data.images.headers import read_header
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

IO_WORKERS = 16
"""Threads that wait for the disk: on a network file system, sixteen small reads at a time."""
CHUNK_SIZE = 64
"""Files per task: with fewer, scheduling the tasks takes longer than reading the files."""
REMOTE_IO_WORKERS = 64
"""Threads for images in a bucket: a request takes 10 … 100 ms and almost no CPU."""
NOTICE_MIN_IMAGES = 2000
"""From this number of images in a bucket on, a status line tells that sizes are being read."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int = IO_WORKERS,
    chunk_size: int = CHUNK_SIZE,
) -> list[Result]:
    """Returns the results of a function that waits for files, in the order of the items."""

    def run_chunk(start: int) -> list[Result]:
        return [function(item) for item in items[start : start + chunk_size]]

    with ThreadPoolExecutor(workers, "stoker-files") as pool:
        return [result for results in pool.map(run_chunk, range(0, len(items), chunk_size)) for result in results]


def read_sizes(paths: Sequence[Path]) -> tuple[NDArray[np.int32], dict[int, str]]:
    """int32 [R, 2], height and width of the upright images, 0 where unreadable; and the reasons, by position."""
    if paths and (uri := source.path_to_uri(paths[0])) is not None:
        if len(paths) >= NOTICE_MIN_IMAGES:
            source.print_status(f"Reading the sizes of {len(paths):,} images from their first bytes, starting at {uri}")
        results = map_in_threads(_read_size, paths, workers=REMOTE_IO_WORKERS, chunk_size=1)
    else:
        results = map_in_threads(_read_size, paths)
    unreadable = {position: result for position, result in enumerate(results) if isinstance(result, str)}
    sizes = [(0, 0) if isinstance(result, str) else result for result in results]
    return np.array(sizes, np.int32).reshape(-1, 2), unreadable


def _read_size(path: Path) -> tuple[int, int] | str:
    try:
        return read_header(path).size
    except DataError as error:
        return error.cause or error.what


def repair_names(table: AnnotationTable, root: Path, problems: ProblemCollector) -> None:
    """Changes image names in place to the names of their files; each change is reported as a fixed problem."""
    for folder_index, indices in group_by_folder(table.folder_index, table.images_that_are_files()):
        image_indices, folder_name = indices.tolist(), table.folders[folder_index]
        folder = find_existing_dir(root / folder_name)
        if folder is None:
            continue
        if folder != root / folder_name:
            table.folders[folder_index] = os.path.relpath(folder, root) if folder.is_relative_to(root) else str(folder)
            problems.add("wrong-case-name", f"{folder_name}/: the folder is {folder.name}/", len(image_indices))
        repaired = resolve_names(folder, [table.file_names[image_index] for image_index in image_indices])
        for image_index in image_indices if repaired else ():
            written_name = table.file_names[image_index]
            if (file := repaired.get(written_name)) is not None:
                table.file_names[image_index] = file
                problems.add("wrong-case-name", f"{os.path.join(folder_name, written_name)!r}: the file is {file!r}")


def find_missing(
    root: Path,
    folders: Sequence[str],
    folder_index: NDArray[np.int32],
    file_names: Sequence[str],
    indices: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Returns [R], which of the images `indices` have no file, after `repair_names`. Lists each folder once instead of
    a stat per file: COCO's 118,287 images take a fraction of a second, also on a network file system."""
    is_missing = np.zeros(len(file_names), np.bool_)
    for number, in_folder in group_by_folder(folder_index, indices):
        folder = root / folders[number]
        absent = {file_names[image_index] for image_index in in_folder.tolist()} - list_file_names(folder)
        for image_index in in_folder.tolist() if absent else ():
            name = file_names[image_index]
            # macOS opens a name in another case or Unicode form, which a listing does not have
            is_missing[image_index] = name in absent and not (folder / name).is_file()
    return is_missing


def list_file_names(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file()}


def resolve_names(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Name → file name, for those `names` that are not a file in `folder` but fit exactly one that has none of the
    names itself. Raises OSError if the folder cannot be listed."""
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        present = {entry.name for entry in entries}
    requested = set(names)
    absent, unclaimed = requested - present, present - requested
    matches: dict[str, str] = {}
    for key in (_fold_name, lambda name: _fold_name(unquote(name))):
        files_by_key, absent_by_key = _group_by_key(unclaimed, key), _group_by_key(absent, key)
        for k in absent_by_key.keys() & files_by_key.keys():
            if len(absent_by_key[k]) == len(files_by_key[k]) == 1:
                (name,), (file,) = absent_by_key[k], files_by_key[k]
                absent, unclaimed = absent - {name}, unclaimed - {file}
                if not (folder / name).is_file():  # macOS opens a name in any case and Unicode form: no change needed
                    matches[name] = file
    return matches


def find_existing_dir(folder: Path) -> Path | None:
    """A folder, or the only one that fits if parts of its path are written differently; None if there is none."""
    if folder.is_dir():
        return folder
    if folder == folder.parent or (parent := find_existing_dir(folder.parent)) is None:
        return None
    found = parent / resolve_names(parent, [folder.name]).get(folder.name, folder.name)
    return found if found.is_dir() else None


def _group_by_key(names: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return groups


def _fold_name(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).strip()


MAX_NAME_BYTES = 255
"""Longest file name, in bytes, that file systems allow."""


def is_usable_name(path: str) -> bool:
    """Whether a path, with "/" or "\\", can be that of a file: its last part is not empty, and none is too long."""
    try:
        parts = path.replace("\\", "/").encode().split(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can contain
        return False
    return bool(parts[-1]) and "\0" not in path and max(map(len, parts)) <= MAX_NAME_BYTES


class ImageLocator:
    """Finds the images that annotations name. Lists each folder once."""

    def __init__(self, root: Path, part: SplitFiles) -> None:
        self._root = root
        own_dir = part.annotations if part.annotations.is_dir() else part.annotations.parent
        self._base_dirs = tuple(dict.fromkeys((own_dir, root, *part.image_dirs)))
        self._listings: dict[Path, set[str]] = {}
        self._located: dict[tuple[str, Path | None], tuple[Path, str]] = {}
        self._counts: Counter[str] = Counter()
        self._default_dir = part.image_dirs[0]
        self._dir_by_name: dict[str, Path] = {}
        self._name_by_key: dict[str, str] = {}
        """Name without its suffix, case-folded name with and without it → name."""
        self._duplicates: set[str] = set()
        for folder in part.image_dirs:
            for name in sorted(self._list_dir(folder)):
                if self._dir_by_name.setdefault(name, folder) != folder and part.split is None:
                    self._duplicates.add(name)
        names = [name for name in self._dir_by_name if is_image_name(name)]
        stems = [os.path.splitext(name)[0] for name in names]
        for keys in (stems, map(str.casefold, names), map(str.casefold, stems)):
            for key, name in zip(keys, names, strict=True):
                self._name_by_key.setdefault(key, name)

    def _list_dir(self, folder: Path) -> set[str]:
        if folder not in self._listings:
            self._listings[folder] = set(os.listdir(folder)) if folder.is_dir() else set()
        return self._listings[folder]

    def locate(self, text: str, folder: Path | None = None) -> tuple[Path, str]:
        """Returns folder and name of the image that annotations name; the most likely folder if it is absent. folder:
        that of the annotation file, if it is not the same for all: paths relative to it are tried first."""
        if (text, folder) not in self._located:
            self._located[text, folder] = self._search(text.replace("\\", "/"), folder)
        return self._located[text, folder]

    def exists(self, folder: Path, name: str) -> bool:
        return name in self._list_dir(folder)

    def find(self, *texts: str, folder: Path | None = None) -> tuple[Path, str] | None:
        """Folder and name of the first that is there of several texts that may mean an image; None if none is."""
        located = (self.locate(text, folder) for text in texts if text)
        return next((found for found in located if self.exists(*found)), None)

    def _search(self, text: str, own_dir: Path | None) -> tuple[Path, str]:
        head, _, name = text.rpartition("/")
        is_local = bool(head) and "://" not in text
        base_dirs = self._base_dirs if own_dir is None else (own_dir, *self._base_dirs)
        for base in base_dirs if is_local else base_dirs[:1] if own_dir is not None else ():
            folder = Path(os.path.normpath(base / head)) if is_local else base
            if name in self._list_dir(folder):
                return folder, name
        is_clear = name in self._dir_by_name and name not in self._duplicates
        parts = [] if is_clear else [part for part in head.split("/") if part not in ("", ".", "..")]
        for start, base in product(range(1, len(parts)), base_dirs):
            if name in self._list_dir(folder := base.joinpath(*parts[start:])):
                self._counts["image paths are found without their first folders"] += 1
                return folder, name
        corrected = self._name_by_key.get(name) or self._name_by_key.get(name.casefold())
        if name not in self._dir_by_name and corrected is not None:
            self._counts["images have other names than in the annotations, in case or without a suffix"] += 1
            name = corrected
        if name in self._dir_by_name:
            self._counts["image names have folders that do not exist: they are ignored"] += bool(head)
            self._counts["image names exist in several folders: the first is used"] += name in self._duplicates
            return self._dir_by_name[name], name
        return Path(os.path.normpath(base_dirs[0] / head)) if is_local else own_dir or self._default_dir, name

    def split_from_folder(self, folder: Path) -> str | None:
        inside = folder.relative_to(self._root).parts if folder.is_relative_to(self._root) else ()
        return next((split for part in inside if (split := SPLIT_BY_NAME.get(part.lower()))), None)

    def split_index(self, split: str | None, folder: Path) -> int:
        """Returns the index into SPLITS of the split, else of the one in the path of the image's folder; or
        UNASSIGNED."""
        name = split or self.split_from_folder(folder)
        return UNASSIGNED if name is None else SPLITS.index(name)

    def notes(self) -> list[str]:
        return [f"{count:,} {description}" for description, count in self._counts.items() if count]


OUTSIDE = "outside-path"


def report_outside(
    table: AnnotationTable, layout: DatasetLayout, data: Path, problems: ProblemCollector, *, allowed: bool
) -> NDArray[np.bool_]:
    """Adds a problem for each image outside the data set, or one note where that is allowed; notes on folder links. If
    all of them are of the test split, which training does not read, it is one problem, and that split is left out.
    Returns [R], the images to leave out. data: what the user named. To a folder belongs everything in it, also below a
    link; to a file, the folder that its format gives it, and those that a YOLO description or its lists name."""
    own_dirs = [os.path.realpath(data if data.is_dir() else layout.root)]
    if not data.is_dir():
        own_dirs += [os.path.abspath(folder) for part in layout.parts for folder in part.image_dirs]
    outside = _find_outside(table, layout.root, own_dirs)
    is_test: NDArray[np.bool_] = table.split == SPLITS.index("test")
    nothing = np.zeros(len(is_test), np.bool_)
    if not outside:
        return nothing
    count, first = f"{len(outside):,} images are outside the", next(iter(outside.values()))
    if allowed:
        table.notes.append(f"{count} folder, as --allow-outside allows: {first}")
    elif is_test[list(outside)].all() and not is_test.all():
        problems.add("unreadable-test-split", f"{count} data set's folder: {first}")
        return is_test
    for location in () if allowed else outside.values():
        problems.add(OUTSIDE, location)
    return nothing


def _find_outside(table: AnnotationTable, root: Path, own_dirs: list[str]) -> dict[int, str]:
    """Returns where each image that is in none of `own_dirs` is; adds notes on folder links."""
    real_dirs = [os.path.realpath(folder) for folder in own_dirs]
    outside: dict[int, str] = {}
    for folder_index, image_indices in group_by_folder(table.folder_index, table.images_that_are_files()):
        folder = os.path.normpath(os.path.join(root, table.folders[folder_index]))
        if not os.path.isdir(folder):
            continue  # its images are missing, wherever it is
        names = {image_index: table.file_names[image_index] for image_index in image_indices.tolist()}
        if not is_below(folder, own_dirs):
            outside |= {image_index: os.path.join(folder, name) for image_index, name in names.items()}
            continue
        real_folder = os.path.realpath(folder)
        if not is_below(real_folder, real_dirs):
            table.notes.append(f"{os.path.relpath(folder, own_dirs[0])}/ is a link to {real_folder}")
        with os.scandir(folder) as entries:
            links = {entry.name for entry in entries if entry.is_symlink()}
        for image_index, name in names.items() if links else ():
            target = os.path.realpath(os.path.join(folder, name)) if name in links else real_folder
            if not is_below(target, (real_folder, *real_dirs)):
                outside[image_index] = f"{os.path.join(folder, name)}, a link to {target}"
    return outside


def is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(os.path.join(folder, "")) for folder in folders)


Bound = Callable[[], tuple[XYXY, str]]
"""Gives the box of a shape, and what the shape is, if not a box."""
MAX_NORMALIZED = 1.05
"""The largest coordinate of a normalized box. A box in pixels is almost never this small."""
Content = TypeVar("Content")


class ImageFile(NamedTuple):
    folder: Path
    name: str
    split: int
    """Index into SPLITS, or UNASSIGNED."""
    size: tuple[int, int] = (0, 0)
    """Height and width in pixels; 0: not given."""


class Box(NamedTuple):
    image_index: int
    label: int | str
    """Index of the class, or its name."""
    xyxy: XYXY
    """In pixels, or normalized by width and height of the upright image."""
    box_id: int
    """Number of the box in its source, for messages: a line, or the number of the object."""
    is_normalized: bool = False
    is_crowd: bool = False


class TableBuilder:
    """Collects the images and boxes of a data set, and the problems and notes about them."""

    def __init__(self, layout: DatasetLayout, problems: ProblemCollector, *, box_id_kind: str) -> None:
        """box_id_kind: what the number of a box is, for messages: "line", "object"."""
        self.layout, self.problems, self._box_id_kind = layout, problems, box_id_kind
        self.notes = list(layout.notes)
        self.counts: Counter[str] = Counter()
        """Description → count: become notes, "3 × point, which has no box and is not read"."""
        self.images: list[ImageFile] = []
        self.locations: list[str] = []
        """File of each image, and number in it, for formats that list images themselves."""
        self.boxes: list[Box] = []
        """In any order."""
        self.bad_boxes: list[int] = []
        """The image of each box that was left out: an image that loses all of its boxes is not background."""
        self._images_with_skipped: set[int] = set()

    def add_image(self, image: ImageFile, location: str = "") -> int:
        self.images.append(image)
        self.locations.append(location)
        return len(self.images) - 1

    def add_box(self, label: int | str, xyxy: XYXY, box_id: int, *, is_normalized: bool = False) -> None:
        """Adds a box to the image that was added last."""
        self.boxes.append(Box(len(self.images) - 1, label, xyxy, box_id, is_normalized))

    def drop_box(self, kind: str, example: str) -> None:
        """Reports a box of the image that was added last, which cannot be used."""
        self.problems.add(kind, example)
        self.bad_boxes.append(len(self.images) - 1)

    def skip_shape(self, kind: str) -> None:
        """Counts a shape without a box, such as a point, of the image that was added last. An image that has nothing
        else is not background."""
        self.counts[f"{kind}, which has no box and is not read"] += 1
        self._images_with_skipped.add(len(self.images) - 1)

    def add_shape(
        self, labels: Sequence[str], bound: Bound, number: int, location: str, *, is_normalized: bool = False
    ) -> None:
        """Adds the box of a shape to the image that was added last, for each of its classes. A KeyError, TypeError or
        ValueError of `bound`, and a shape without a class, become problems."""
        try:
            xyxy, kind = bound()
        except (KeyError, TypeError, ValueError) as error:
            reason = f"there is no {error}" if isinstance(error, KeyError) else error
            self.drop_box("malformed-box", f"{location}: {reason}")
            return
        if not labels:
            self.drop_box("no-class", location)
        elif kind:
            self.counts[f"{kind}: the box around it is used"] += 1
        for label in labels:
            self.add_box(label, xyxy, number, is_normalized=is_normalized)

    def detect_units(self, file: Path, first_box: int) -> None:
        """Marks the boxes from `first_box` on as normalized if most are within 0 … 1; the others are then dropped."""
        boxes = self.boxes[first_box:]
        xyxy = np.array([box.xyxy for box in boxes], np.float64).reshape(-1, 4)
        max_coordinate = np.abs(xyxy).max(1, initial=0)  # NaN if one coordinate is
        is_small = max_coordinate <= MAX_NORMALIZED
        if not 2 * np.count_nonzero(is_small) > len(boxes):
            return
        self.notes.append(f"{file.name}: boxes are within 0 … 1, normalized by image width and height")
        del self.boxes[first_box:]
        for box, is_large in zip(boxes, (np.isfinite(max_coordinate) & ~is_small).tolist(), strict=True):
            if is_large:
                quoted = ", ".join(f"{value:g}" for value in box.xyxy)
                place = self.locations[box.image_index] and f"{self.locations[box.image_index]}, {self._box_id_kind} "
                self.problems.add("not-normalized", f"{place or f'{file.name}:'}{box.box_id}: [{quoted}]")
                self.bad_boxes.append(box.image_index)
            else:
                self.boxes.append(box._replace(is_normalized=True))

    def location(self) -> Path:
        """Returns what an error about the whole data set names."""
        return self.layout.root if len(self.layout.parts) > 1 else self.layout.parts[0].annotations

    def build(self, class_names: Sequence[str] | None = None, *, read_headers: bool = True) -> AnnotationTable:
        """Returns the table of the images, in their order, and their boxes. class_names: default, those of the boxes
        (`name_classes`); boxes of other classes are dropped and reported. read_headers: read absent sizes from the
        image headers; needed for normalized boxes, which are dropped and reported if their image cannot be read."""
        images, boxes, root = self.images, self.boxes, self.layout.root
        size = np.array([image.size for image in images], np.int32).reshape(-1, 2)
        is_normalized = np.array([box.is_normalized for box in boxes], np.bool_)
        image_index = np.array([box.image_index for box in boxes], np.int64)
        xyxy = np.array([box.xyxy for box in boxes], np.float64).reshape(-1, 4)
        keep = np.ones(len(boxes), np.bool_)
        unmeasured = np.zeros(0, np.int64)
        if read_headers:
            # sizes in the annotations may be wrong, so normalized boxes always use the header
            has_normalized = np.isin(np.arange(len(images)), image_index[is_normalized])
            unmeasured = np.flatnonzero((size == 0).any(1) | has_normalized)
            size[unmeasured], failures = read_sizes([images[i].folder / images[i].name for i in unmeasured.tolist()])
            reasons = {int(unmeasured[number]): reason for number, reason in failures.items()}
            xyxy[is_normalized] *= size[image_index[is_normalized]][:, [1, 0, 1, 0]]
            keep = ~(is_normalized & np.isin(image_index, list(reasons)))
            for i, count in Counter(image_index[~keep].tolist()).items():
                self.problems.add("box-of-unreadable-image", f"{self._image_path(i)}: {reasons[i]}", count)
        if class_names is not None:
            keep &= self._find_known_classes(class_names)
        order = np.flatnonzero(keep)
        order = order[np.argsort(image_index[order], kind="stable")]
        boxes = [boxes[i] for i in order.tolist()]
        class_names = name_classes(boxes) if class_names is None else class_names
        label_by_name = {name: label for label, name in enumerate(class_names)}
        labels = [box.label if isinstance(box.label, int) else label_by_name[box.label] for box in boxes]
        folders = FolderTable(root)
        folder_index = [folders.add(str(image.folder)) for image in images]
        return AnnotationTable(
            class_names=list(class_names),
            category_ids=list(range(len(class_names))),
            folders=folders.paths(),
            folder_index=np.array(folder_index, np.int32),
            file_names=[image.name for image in images],
            split=np.array([image.split for image in images], np.int8),
            original_size=size,
            image_id=np.arange(len(images), dtype=np.int64),
            image_index=image_index[order],
            boxes=xyxy[order],
            labels=np.array(labels, np.int32),
            crowd=np.array([box.is_crowd for box in boxes], np.bool_),
            area=np.full(len(boxes), np.nan),
            box_id=np.array([box.box_id for box in boxes], np.int64),
            box_id_kind=self._box_id_kind,
            sizes_from_headers=len(unmeasured) > 0,
            num_bad_boxes=np.bincount(np.array(self.bad_boxes, np.int64), minlength=len(images)),
            notes=[*self.notes, *(f"{count:,} × {description}" for description, count in self.counts.items() if count)],
        )

    def _image_path(self, image_index: int) -> str:
        image = self.images[image_index]
        return display_path(image.folder / image.name, self.layout.root)

    def _find_known_classes(self, class_names: Sequence[str]) -> NDArray[np.bool_]:
        """Returns [K], whether the class of each box is one of these; the others are reported."""
        listed = set(class_names)
        is_known = np.array([isinstance(box.label, int) or box.label in listed for box in self.boxes], np.bool_)
        for box in (self.boxes[i] for i in np.flatnonzero(~is_known).tolist()):
            self.problems.add("unknown-class", f"{self._image_path(box.image_index)}: {box.label!r}")
            self.bad_boxes.append(box.image_index)
        return is_known

    def drop_ambiguous_images(self, *, by_stem: bool = False) -> None:
        """Drops images that have only skipped shapes, and an identical second entry of an image in a split. If its
        entries differ, all are dropped: which one is right is not known. by_stem: the file with the image's own stem
        is. Raises DataError if no image is left."""
        boxes_of: dict[int, list[Box]] = {}
        for box in self.boxes:
            boxes_of.setdefault(box.image_index, []).append(box)
        entries: dict[tuple[int, Path, str], list[int]] = {}
        without_box = self._images_with_skipped - boxes_of.keys() - set(self.bad_boxes)
        self.counts["image with such shapes only, which is left out"] += len(without_box)
        for index, image in enumerate(self.images):
            if index not in without_box:
                entries.setdefault((image.split, image.folder, image.name), []).append(index)
        kept: dict[int, int] = {}
        for indices in entries.values():
            name, places = self.images[indices[0]].name, [self.locations[index] for index in indices]
            contents = [[box[1:3] for box in boxes_of.get(index, ())] for index in indices]
            is_same = all(content == contents[0] for content in contents)
            stem = os.path.splitext(name)[0]
            chosen = [0] if is_same else [k for k, place in enumerate(places) if by_stem and Path(place).stem == stem]
            if len(chosen) != 1:
                self.problems.add("listed-twice", f"{name}: {', '.join(places)}")
                continue
            own = places.pop(chosen[0])
            kept[indices[chosen[0]]] = len(kept)
            text = f"{name}, as {own}" if is_same else f"about {name}, as {own} is"
            for place in places:
                self.problems.add("copied-entry" if is_same else "label-without-image", f"{place}: {text}")
        if not kept:
            cause = self.problems.describe()
            raise make_error(DataError, "no-annotated-image", self.layout.parts[0].annotations, cause=cause)
        self.images = [self.images[index] for index in kept]
        self.boxes = [box._replace(image_index=kept[index]) for index in kept for box in boxes_of.get(index, ())]
        self.bad_boxes = [kept[index] for index in self.bad_boxes if index in kept]


def name_classes(boxes: Sequence[Box]) -> list[str]:
    """Returns the classes of the boxes by name; if all names are numbers, by number; class 0, class 1, … for boxes that
    have the index of their class."""
    if boxes and isinstance(boxes[0].label, int):
        return [f"class {number}" for number in range(max(int(box.label) for box in boxes) + 1)]
    names = {str(box.label) for box in boxes}
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), name))
    return sorted(names)


def read_json(path: Path, type: type[Content], *, what: str, fix: str = "export it again") -> Content:
    """Returns the content of a JSON file, numbers also if they are text. Raises OSError, and DataError for a file that
    is not JSON or has another content. what: says so in the error: "The file is not an export of Label Studio."."""
    data = regular_files.read_bytes(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES).removeprefix(b"\xef\xbb\xbf")
    try:
        return msgspec.json.decode(data, type=type, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(what, location=path, cause=str(error), fix=fix) from error
