"""A data set on a web server: COCO JSON or a CSV table at an https address, and the pictures beside it.

A web server lists nothing, so a folder cannot be named. The file says which pictures there are; in which folder they
are is found by asking for one of them where a local data set would have it. Then there is a mirror as of a bucket
(`bucket.py`), of which a picture's size is not known and its absence shows when it is read.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.data.formats.coco_entries import read_entries
from stoker.data.formats.coco_files import SPLIT_ALIASES
from stoker.data.formats.csv_files import TABLE_DIRS
from stoker.data.formats.csv_table import detect_csv_layout, iter_rows
from stoker.data.formats.tables import ANNOTATION_DIRS, IMAGE_DIRS, split_from_name
from stoker.data.remote.bucket import ResolvedDataset, lock_mirror, mirror_dir_for, mirror_root
from stoker.data.remote.mirror import FREE_SPACE_FIX, expected_file, invalid_name_reason, update_mirror
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError, writing
from stoker.storage.store import ObjectInfo, Store, open_store
from stoker.storage.uri import StorageUri

if TYPE_CHECKING:
    from stoker.data.remote.mirror import MirrorFile

SUFFIXES = (".json", ".csv")
MAX_PROBES = 3
"""Pictures that are asked for in each folder: the first one may be missing."""


def resolve_dataset(uri: StorageUri) -> ResolvedDataset:
    """The local path that stands for a file of annotations on a web server.

    Raises DataError for an address that is no such file, or whose pictures are nowhere; StorageError where the server
    cannot be reached.
    """
    if not uri.name.lower().endswith(SUFFIXES) or not uri.key:
        raise DataError(
            "A web server does not list what is in a folder.",
            location=uri,
            choices=[f"…/*{ending}" for ending in SUFFIXES],
            fix=f"name the file of annotations, e.g. {uri.child('annotations.json')}; the pictures are looked for"
            " beside it",
        )
    store = open_store(uri)
    info = store.stat(uri.key)
    if info is None:
        raise DataError("There is no such file.", location=uri, fix="correct the address")
    annotation_folders = (*ANNOTATION_DIRS, *TABLE_DIRS)
    base = uri.parent.parent if uri.parent.key and uri.parent.name.lower() in annotation_folders else uri.parent
    mirror_dir = mirror_dir_for(uri)
    relative_path = uri.key.removeprefix(base.key).lstrip("/")
    with (
        writing("The data set's copy in the cache cannot be written.", mirror_dir, fix=FREE_SPACE_FIX),
        lock_mirror(mirror_dir, base),
    ):
        root = mirror_root(mirror_dir, base)
        annotation_files = {relative_path: expected_file(info)}
        stat = (root / relative_path).stat() if (root / relative_path).is_file() else None
        if stat is None or (stat.st_size, stat.st_mtime_ns) != annotation_files[relative_path][1:]:
            update_mirror(store, root, annotation_files, uri)  # alone: older placeholders go
        update_mirror(store, root, annotation_files | _image_stubs(store, base, root / relative_path, uri), uri)
    return ResolvedDataset(root / relative_path, root, ())


def _image_stubs(store: Store, base: StorageUri, file: Path, uri: StorageUri) -> "dict[str, MirrorFile]":
    """The placeholders of the pictures that a file names."""
    names = [name for name in _listed_images(file) if invalid_name_reason(name) is None]
    folder = _find_image_folder(store, base, uri, names)
    image_paths = {f"{folder}/{name}" if folder else name for name in names}
    return {name: expected_file(ObjectInfo(base.child(name).key, 1, None, 0.0)) for name in sorted(image_paths)}


def _listed_images(file: Path) -> list[str]:
    if file.suffix.lower() == ".json":
        names: Iterable[str] = (image.file_name for image in read_entries(file, file.name, ProblemCollector()).images)
    else:
        layout = detect_csv_layout(file)
        if layout is None:
            return []
        names = (
            values[layout.file_column] for _, values in iter_rows(file, layout) if len(values) > layout.file_column
        )
    return list(dict.fromkeys(name.replace("\\", "/") for name in names if name))


def _find_image_folder(store: Store, base: StorageUri, uri: StorageUri, names: list[str]) -> str:
    """Where the pictures lie below `base`. Raises DataError where none of the first few is anywhere."""
    stem = uri.name.rpartition(".")[0]
    split = split_from_name(stem)
    split_folders = [stem.partition("_")[2] or stem, stem, *(SPLIT_ALIASES[split] if split else ())]
    sibling = uri.parent.key.removeprefix(base.key).strip("/")
    folders = [
        "",
        sibling,
        *IMAGE_DIRS[:2],
        *split_folders,
        *(f"images/{split_folder}" for split_folder in split_folders),
    ]
    for name in names[:MAX_PROBES]:
        for folder in dict.fromkeys(folders):
            if store.stat(base.child(f"{folder}/{name}" if folder else name).key) is not None:
                return folder
    raise DataError(
        "The pictures are not there." if names else "The file names no pictures.",
        location=uri,
        cause=f"{names[0]!r} is in none of these folders of {base}: "
        + ", ".join(f"{folder or '.'}" for folder in dict.fromkeys(folders))
        if names
        else None,
        fix="put the pictures beside the annotations, or write their folders into the file",
    )
