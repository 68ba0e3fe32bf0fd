"""How splits, folders and files of data sets are recognized by their names, and annotation files by their first bytes.

Also recognizes formats that stoker does not read, to tell how to convert them (`formats.toml`). Not here: which format
a folder has (`finder.py`), the images that annotations name (`images.py`).
"""

import functools
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from importlib import resources
from itertools import islice
from pathlib import Path

import msgspec

from stoker.data.formats.tables import SPLITS, DatasetLayout, SplitFiles
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

SPLIT_BY_NAME = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "validate": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Files with these suffixes (lower case) are images where no annotation names them."""
SUFFIXES = {
    "jpeg": (".jpg", ".jpeg", ".jpe", ".jfif"), "png": (".png",), "webp": (".webp",), "bmp": (".bmp", ".dib"),
    "tiff": (".tif", ".tiff"), "gif": (".gif",), "pnm": (".ppm", ".pnm", ".pgm", ".pbm"),
    "jpeg 2000": (".jp2", ".j2k", ".jpx"),
}  # fmt: skip
"""Image format (`headers.KINDS`) → suffixes of its files, the usual one first."""
KNOWN_SUFFIXES = frozenset(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
_DATA_SUFFIXES = (".xml", ".txt", ".json", ".csv", ".record", ".tfrecord", ".tfrecords", ".tfrec", ".tar", ".parquet")
IMAGE_DIRS = ("images", "JPEGImages", "image_2", "data", "imgs", "pictures")
"""Usual names of image folders: those of COCO, Pascal VOC, KITTI and FiftyOne, and two that people use."""
ANNOTATION_DIRS = (
    "annotations", "annotation", "annots", "annot", "annos", "anno", "xmls", "xml", "labels", "label", "label_2",
)  # fmt: skip
"""Names of folders that contain only annotations. They may have subfolders: CVAT writes one per task."""
MAX_SEARCHED_DIRS = 256
"""Folders that are searched for images that are not near their annotations."""
HEAD_BYTES = 1 << 16
MAX_PROBES = 16
"""Files of a folder whose first bytes are read, to see whether the folder has a format at all."""


def is_image_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def base_name(path: str) -> str:
    """Returns the file name at the end of a path with "/" or "\\", without NUL characters; empty if there is none."""
    name = path.replace("\\", "/").rpartition("/")[2].replace("\0", "")
    return "" if name in (".", "..") else name


def split_from_name(name: str) -> str | None:
    """Returns the split in a file name: "instances_train2017" is "train", "my-validation" and "eval.record" are "val";
    None if there is not exactly one. A folder `eval` is no split: TensorFlow writes its logs there."""
    words = {**SPLIT_BY_NAME, "eval": "val"}
    splits = {words[token] for token in re.split(r"[^a-z]+", name.lower()) if token in words}
    return splits.pop() if len(splits) == 1 else None


def file_part(file: Path, split: str | None = None, image_dirs: Iterable[Path] = ()) -> SplitFiles:
    """Returns the part of an annotation file or a shard; the split is in its name unless given."""
    return SplitFiles(split=split or split_from_name(file.name), annotations=file, image_dirs=unique(image_dirs))


def unique(paths: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(paths))


def sort_parts(parts: Iterable[SplitFiles]) -> tuple[SplitFiles, ...]:
    """Returns parts in the order of SPLITS, those without a split last."""
    return tuple(sorted(parts, key=lambda part: SPLITS.index(part.split) if part.split else len(SPLITS)))


def root_of(file: Path, annotation_dirs: tuple[str, ...] = ANNOTATION_DIRS) -> Path:
    """Returns the folder of the data set to which an annotation file belongs."""
    return file.parent.parent if file.parent.name.lower() in annotation_dirs else file.parent


def read_head(path: Path) -> bytes:
    """The first bytes of a file, without a byte order mark; none if it cannot be read, or is not a regular file."""
    try:
        with os.fdopen(regular_files.open_fd(path), "rb") as file:  # also of a pointer of Git LFS
            return file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
        return b""


def list_subdirs(folder: Path) -> dict[str, Path]:
    """Returns the subfolders of a folder by lower-case name, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    return {name.lower(): folder / name for name in names}


def named_subdirs(folder: Path, names: Iterable[str]) -> list[Path]:
    """Returns the subfolders with one of the names, in any case, in the order of the names."""
    subdirs = list_subdirs(folder)
    return [subdirs[name.lower()] for name in names if name.lower() in subdirs]


def list_image_dirs(folder: Path) -> tuple[Path, ...]:
    """Returns the image folders in a folder, in any case, and the folder itself as the last."""
    return (*named_subdirs(folder, IMAGE_DIRS), folder)


def list_names(folder: Path, suffixes: str | tuple[str, ...], *, files_only: bool = False) -> list[str]:
    """Returns the names in a folder with a suffix (lower case), sorted, without hidden ones; none if it is absent. Also
    those that are no files, such as links to files that are gone: leaving them out would lose images or their boxes."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name.lower().endswith(suffixes)
            and not entry.name.startswith(".")
            and (not files_only or entry.is_file())
        )


def list_files(folder: Path, suffixes: str | tuple[str, ...]) -> list[Path]:
    return [folder / name for name in list_names(folder, suffixes, files_only=True)]


def iter_annotation_files(folder: Path, suffixes: str | tuple[str, ...]) -> Iterator[str]:
    """Yields the paths of the files with one of the suffixes (lower case), sorted, without hidden ones; also those in
    subfolders if the folder has the name of an annotation folder."""
    recursive = folder.name.lower() in ANNOTATION_DIRS
    for dirpath, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if recursive and not name.startswith("."))
        names = sorted(name for name in files if name.lower().endswith(suffixes) and not name.startswith("."))
        yield from (os.path.join(dirpath, name) for name in names)


def iter_split_dirs(folder: Path) -> Iterator[tuple[str, Path]]:
    """The subfolders that are named after a split, in the order of SPLITS. Of several, those with images, if any, else
    with other data: TensorFlow's tutorials keep checkpoints in training/. Raises DataError for two of one split."""
    subdirs = list_subdirs(folder)
    for split in SPLITS:
        paths = [path for name, path in subdirs.items() if SPLIT_BY_NAME.get(name) == split]
        if len(paths) > 1:
            kinds = ([path for path in paths if has_files(path, own)] for own in (IMAGE_SUFFIXES, _DATA_SUFFIXES))
            paths = next(filter(None, kinds), paths)
        if len(paths) > 1:
            names = [path.name for path in paths]
            raise make_error(DataError, "two-split-folders", folder, choices=names, split=split)
        yield from ((split, path) for path in paths)


def has_files(folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Returns whether a file with one of the suffixes (lower case) is in a folder or below it."""
    levels = islice(os.walk(folder), MAX_SEARCHED_DIRS)
    return any(name.lower().endswith(suffixes) for _, _, names in levels for name in names)


def find_files(folder: Path, dir_names: Sequence[str], list_own: Callable[[Path], Iterable[Path]]) -> list[SplitFiles]:
    """Returns the annotation files in a folder or in one of the named folders in it, else those of its split folders.
    list_own: those directly in a folder."""
    for path in (folder, *named_subdirs(folder, dir_names)):
        if files := list(list_own(path)):
            return [file_part(file) for file in files]
    return [
        file_part(file, split)
        for split, path in iter_split_dirs(folder)
        for directory in (path, *named_subdirs(path, dir_names))
        for file in list_own(directory)
    ]


def iter_split_image_dirs(folder: Path, split: str) -> Iterator[Path]:
    """Yields the folders named after a split in a folder and in its image folders."""
    for image_dir in list_image_dirs(folder):
        yield from (path for name, path in list_subdirs(image_dir).items() if split_from_name(name) == split)


def split_lists(folder: Path) -> dict[str, Path]:
    """The lists train.txt, val.txt, test.txt and trainval.txt in a folder, also under the other names of the splits."""
    words = {**SPLIT_BY_NAME, "trainval": "trainval"}
    found = [(split, folder / f"{word}.txt") for word, split in words.items()]
    return {split: path for split, path in reversed(found) if path.is_file()}


_WORDS = [word.lower() for word in (*IMAGE_DIRS, "image", "img", "photos", *ANNOTATION_DIRS) if word != "data"]
_SPLIT, _KIND = "|".join(SPLIT_BY_NAME), "|".join(_WORDS)
_PAIRED_DIR = re.compile(
    rf"(?P<split1>{_SPLIT})[^a-z]*(?P<kind1>{_KIND})|(?P<kind2>{_KIND})[^a-z]*(?P<split2>{_SPLIT})"
)


def list_split_pairs(folder: Path) -> list[tuple[str, Path, Path]]:
    """Returns (split, images, annotations) of subfolders such as Validation_Images and Validation_Annotations,
    train_images and train_labels, in the order of SPLITS."""
    found: dict[tuple[str, str], Path] = {}
    for name, path in list_subdirs(folder).items():
        if (match := _PAIRED_DIR.fullmatch(name)) is not None:
            word = match["kind1"] or match["kind2"]
            kind = "annotations" if word in ANNOTATION_DIRS else "images"
            found[SPLIT_BY_NAME[match["split1"] or match["split2"]], kind] = path
    pairs = [(split, found.get((split, "images")), found.get((split, "annotations"))) for split in SPLITS]
    return [(split, images, annotations) for split, images, annotations in pairs if images and annotations]


def list_dirs_below(root: Path) -> list[Path]:
    """Returns the folders up to two levels below the root, at most MAX_SEARCHED_DIRS, to search for images."""
    levels = (folder for path in list_subdirs(root).values() for folder in (path, *list_subdirs(path).values()))
    return list(islice(levels, MAX_SEARCHED_DIRS))


def iter_nearby_dirs(own_dir: Path, root: Path, split: str | None) -> Iterator[Path]:
    """Folders that may contain the images of an annotation file in `own_dir`, those named after its split first."""
    base_dirs = unique((own_dir, root))
    for base in base_dirs:
        yield from iter_split_image_dirs(base, split) if split is not None else ()
    for base in base_dirs:
        yield from list_image_dirs(base)
    for base in base_dirs:
        split_dirs = [item for image_dir in list_image_dirs(base) for item in list_subdirs(image_dir).items()]
        for name, path in split_dirs:
            if split_from_name(name) is not None:
                yield path
                yield from list_image_dirs(path)


def check_unannotated_splits(folder: Path, parts: Iterable[SplitFiles]) -> list[str]:
    """Returns notes on split folders without annotations. Raises DataError if the training or validation split has
    images without annotations; test images are often published so. A folder without images is no split."""
    notes, parts = [], tuple(parts)
    for split, path in iter_split_dirs(folder):
        if split not in [part.split for part in parts]:
            if not has_files(path, IMAGE_SUFFIXES):
                notes.append(f"{path.name}/ has neither images nor annotations: it is no split")
                continue
            if split != "test":
                raise make_error(DataError, "split-folder-without-annotations", path, split=split, other=parts[0])
            notes.append(f"{path.name}/ has no annotations and is left out")
    return notes


def files_by_split(files: Iterable[Path]) -> list[tuple[str | None, list[Path]]]:
    """Returns the annotation files of each split, by their names, in the order of SPLITS. Files whose name has no split
    are used only if no other file is there."""
    by_split: dict[str | None, list[Path]] = {}
    for path in files:
        by_split.setdefault(split_from_name(path.stem), []).append(path)
    if len(by_split) > 1:
        by_split.pop(None, None)
    return [(split, by_split[split]) for split in (*SPLITS, None) if split in by_split]


def several_files_error(folder: Path, files: list[Path], split: str | None, *, fix: str) -> DataError:
    what = f"{len(files)} files could be the annotations" + (f" of the {split} split." if split else ".")
    fix = f"{fix}, or move the others away"
    return DataError(what, location=folder, choices=[path.name for path in files], fix=fix)


def find_annotated_dirs(folder: Path, is_annotated: Callable[[Path], object]) -> list[tuple[str | None, Path]]:
    """Returns (split, folder) of each folder with annotation files of a format that does not prescribe names: one for
    all, or one per split, among the images or in a folder of their own. is_annotated: whether a folder has any."""
    image_dirs = list_image_dirs(folder)
    for directory in (folder, *named_subdirs(folder, ANNOTATION_DIRS), *image_dirs[:-1]):
        if is_annotated(directory):
            return [(None, directory)]
    for parent in image_dirs[::-1]:
        found: list[tuple[str | None, Path]] = []
        for name, path in list_subdirs(parent).items():
            if (split := SPLIT_BY_NAME.get(name)) is not None:
                candidates = (path, *named_subdirs(path, ANNOTATION_DIRS), *list_image_dirs(path)[:-1])
                found += [(split, own) for own in filter(is_annotated, candidates)][:1]
        if found:
            return found
    return []


def layout_of_files(
    format: str, title: str, root: Path, files: Sequence[tuple[str | None, Path]]
) -> DatasetLayout | None:
    """Returns the data set of some files, or folders, of annotations (split, path) whose images may be in any folder;
    None without files."""
    if not files:
        return None
    parts = []
    for split, path in files:
        own_dir = path if path.is_dir() else path.parent
        image_dirs = unique([*iter_nearby_dirs(own_dir, root, split), *list_dirs_below(root)])
        parts.append(SplitFiles(split=split, annotations=path, image_dirs=image_dirs))
    names = files[0][1].name if len(files) == 1 else f"{len(files)} files"
    return DatasetLayout(format=format, description=f"{title} ({names})", root=root, parts=tuple(parts))


def recognize_files(
    path: Path,
    format: str,
    title: str,
    suffix: str | tuple[str, ...],
    has_format: Callable[[bytes], bool],
    *,
    file_per_image: bool = False,
) -> DatasetLayout | None:
    """Returns the data set of a file with a format that prescribes no names, or of all such files in a folder; else
    None. has_format: tells it from the first bytes of a file. file_per_image: a part is then a folder of them."""
    if path.is_file():
        files = [(split_from_name(path.stem), path)] if has_format(read_head(path)) else []
        return layout_of_files(format, title, root_of(path), files)

    def list_own(folder: Path) -> list[Path]:
        """Returns nothing if the first few files of the folder are of another format."""
        files = [Path(file) for file in iter_annotation_files(folder, suffix)]
        usual = [file for file in files[MAX_PROBES:] if file.stem == "annotations"]
        if not any(has_format(read_head(file)) for file in [*files[:MAX_PROBES], *usual]):
            return []
        return [folder] if file_per_image else [file for file in files if has_format(read_head(file))]

    found = [(split, own) for split, folder in find_annotated_dirs(path, list_own) for own in list_own(folder)]
    if not file_per_image:
        found = [(split or split_from_name(file.stem), file) for split, file in found]
    return layout_of_files(format, title, path, found)


class UnreadFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `formats.toml`, which says what the fields mean."""

    name: str
    pattern: str
    fix: str
    first_bytes: str | None = None
    what: str = "The data set has the format {name}, which is not read."


class FormatTexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `formats.toml`."""

    expected: dict[str, str]
    format: tuple[UnreadFormat, ...]
    """In the order in which they are tried on a file."""


@functools.cache
def format_texts() -> FormatTexts:
    text = (resources.files("stoker.data.formats") / "formats.toml").read_text(encoding="utf-8")
    return msgspec.toml.decode(text, type=FormatTexts)


def recognize_file(file: Path, head: bytes) -> UnreadFormat | None:
    name = f"{file.parent.name}/{file.name}".lower()
    candidates = (row for row in format_texts().format if fnmatch(name, row.pattern))
    return next((row for row in candidates if re.search((row.first_bytes or "").encode(), head, re.DOTALL)), None)


def refuse_unread(data: Path) -> None:
    """Raises DataError, with the command that converts it, for a file or folder in a format that is not read."""
    files = [data] if data.is_file() else _iter_files(data)
    found = [(row, file) for file in files if (row := recognize_file(file, read_head(file))) is not None]
    if found:
        row, file = min(found, key=lambda item: format_texts().format.index(item[0]))
        fix = row.fix.format(data=shlex.quote(str(data if data.is_dir() else data.parent)))
        raise DataError(row.what.format(name=row.name), location=file, fix=fix)


def _iter_files(folder: Path) -> Iterator[Path]:
    """Yields the first MAX_PROBES files of each suffix, of the folder and those below it."""
    for path, folders, names in islice(os.walk(folder), MAX_SEARCHED_DIRS):
        folders.sort()
        seen = Counter[str]()
        for name in sorted(names):
            seen[suffix := os.path.splitext(name)[1].lower()] += 1
            if seen[suffix] <= MAX_PROBES:
                yield Path(path, name)
