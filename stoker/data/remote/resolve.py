"""From the URI of a data set or of images to the local path that stands for it, in a mirror that is up to date.

Mirrors of buckets are made by `bucket.py`. On a web server, which lists nothing, a data set is an annotation file (COCO
JSON or a CSV table), which lists the images; their folder is found by requesting the first images where a local data
set would have them. Its mirror is like that of a bucket, except that the size of an image is not known, and a missing
image is noticed when it is read.
"""

import contextlib
from collections.abc import Iterable, Iterator
from glob import has_magic
from pathlib import Path
from typing import NamedTuple

from stoker.data.formats.coco import SPLIT_ALIASES, read_entries
from stoker.data.formats.csv import TABLE_DIRS, detect_csv_layout, iter_rows
from stoker.data.formats.folders import ANNOTATION_DIRS, IMAGE_DIRS, split_from_name
from stoker.data.formats.tfrecord import strip_shard_number
from stoker.data.images.source import paths_to_uris
from stoker.data.remote import bucket
from stoker.data.remote.mirror import expected_file, invalid_name_reason, update_mirror
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError, StokerError
from stoker.storage.store import ObjectInfo, Store, open_store
from stoker.storage.uri import StorageUri

WEB_SCHEMES = ("https", "http")
WEB_SUFFIXES = (".json", ".csv")
MAX_PROBES = 3
"""Images that are requested in each folder of a web server: the first ones may be missing."""


class ResolvedDataset(NamedTuple):
    """The local path that stands for a URI."""

    path: Path
    """A folder, an annotation file, or a pattern of such files, in the mirror."""
    root: Path
    """The mirror."""
    notes: tuple[str, ...] = ()
    """Differences between the mirror and the bucket, in words."""


def resolve_dataset(uri: StorageUri, suffixes: tuple[str, ...]) -> ResolvedDataset:
    """The local path of a data set. For a file with one of `suffixes`, the folder that has its images is mirrored.

    Raises DataError where there is no data set, StorageError where the store cannot be read or the disk is full.
    """
    if uri.scheme in WEB_SCHEMES:
        path, root = _sync_web_mirror(uri)
        return ResolvedDataset(path, root)
    is_file = has_magic(uri.name) or strip_shard_number(uri.name).lower().endswith(suffixes)
    folder_uri = image_folder_uri(uri) if is_file and uri.key else uri
    root, notes = bucket.sync_mirror(folder_uri)
    return ResolvedDataset(root / uri.key.removeprefix(folder_uri.key).lstrip("/"), root, notes)


def resolve_images(uri: StorageUri) -> Path:
    """The local path of images without annotations: a folder, an image, or a pattern. Raises as `resolve_dataset`.

    A single image gets a mirror of its own, so that its folder need not be listed.
    """
    if uri.scheme in WEB_SCHEMES or (uri.key and not has_magic(uri.key)):
        store = open_store(uri)
        if uri.key and (info := store.stat(uri.key)) is not None:
            with bucket.locked_mirror(uri, uri.parent) as root:
                update_mirror(store, root, {uri.name: expected_file(info)}, uri)
            return root / uri.name
        if uri.scheme in WEB_SCHEMES:
            raise DataError("There is no such image.", location=uri, fix="name one; a web server lists no folders")
    folder_uri = uri
    while has_magic(folder_uri.key):
        folder_uri = folder_uri.parent
    return bucket.sync_mirror(folder_uri).root / uri.key.removeprefix(folder_uri.key).lstrip("/")


def image_folder_uri(file: StorageUri) -> StorageUri:
    """The folder in which the images of an annotation file are."""
    return file.parent.parent if file.parent.name.lower() in ANNOTATION_DIRS and file.parent.key else file.parent


@contextlib.contextmanager
def uris_in_errors(root: Path) -> Iterator[None]:
    """Replaces paths in a mirror by URIs in the errors of the block."""
    try:
        yield
    except StokerError as error:
        location, cause, fix = (text and paths_to_uris(text, root) for text in (error.location, error.cause, error.fix))
        choices = [paths_to_uris(choice, root) for choice in error.choices]
        what = paths_to_uris(error.what, root)
        raise type(error)(what, location=location, cause=cause, choices=choices, fix=fix) from error


def _sync_web_mirror(uri: StorageUri) -> tuple[Path, Path]:
    """(annotation file, mirror) on the local disk, up to date, for an annotation file on a web server.

    Raises DataError for a URI that is not such a file, or whose images are not found; StorageError where the server
    cannot be reached.
    """
    if not uri.name.lower().endswith(WEB_SUFFIXES) or not uri.key:
        raise DataError(
            "A web server does not list the files of a folder.",
            location=uri,
            choices=[f"…/*{suffix}" for suffix in WEB_SUFFIXES],
            fix=f"name the annotation file, e.g. {uri.child('annotations.json')}; its images are searched for near it",
        )
    store = open_store(uri)
    info = store.stat(uri.key)
    if info is None:
        raise DataError("There is no such file.", location=uri, fix="correct the address")
    in_annotation_dir = uri.parent.key and uri.parent.name.lower() in (*ANNOTATION_DIRS, *TABLE_DIRS)
    base = uri.parent.parent if in_annotation_dir else uri.parent
    name = uri.key.removeprefix(base.key).lstrip("/")
    file = expected_file(info)
    with bucket.locked_mirror(uri, base) as root:
        stat = (root / name).stat() if (root / name).is_file() else None
        if stat is None or (stat.st_size, stat.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
            update_mirror(store, root, {name: file}, uri)  # also removes the placeholders of the old version
        image_names = [image for image in _listed_images(root / name) if invalid_name_reason(image) is None]
        folder = _find_image_folder(store, base, uri, image_names)
        paths = sorted({f"{folder}/{image}" if folder else image for image in image_names})
        stubs = {path: expected_file(ObjectInfo(base.child(path).key, 1, None, 0.0)) for path in paths}
        update_mirror(store, root, {name: file} | stubs, uri)
    return root / name, root


def _listed_images(file: Path) -> list[str]:
    names: Iterable[str] = ()
    if file.suffix.lower() == ".json":
        names = (image.file_name for image in read_entries(file, file.name, ProblemCollector())[0].images)
    elif (layout := detect_csv_layout(file)) is not None:
        column = layout.file_column
        names = (values[column] for _, values in iter_rows(file, layout) if len(values) > column)
    return list(dict.fromkeys(name.replace("\\", "/") for name in names if name))


def _find_image_folder(store: Store, base: StorageUri, uri: StorageUri, names: list[str]) -> str:
    """The folder of the images below `base`. Raises DataError where none of the first few images is found."""
    if not names:
        raise DataError("The file names no images.", location=uri, fix="name a file that lists images")
    stem = uri.name.rpartition(".")[0]
    split = split_from_name(stem)
    split_folders = [stem.partition("_")[2] or stem, stem, *(SPLIT_ALIASES[split] if split else ())]
    own_folder = uri.parent.key.removeprefix(base.key).strip("/")
    folders = ["", own_folder, *IMAGE_DIRS[:2], *split_folders, *(f"images/{folder}" for folder in split_folders)]
    folders = list(dict.fromkeys(folders))
    for name in names[:MAX_PROBES]:
        for folder in folders:
            if store.stat(base.child(f"{folder}/{name}" if folder else name).key) is not None:
                return folder
    raise DataError(
        "The images are not found.",
        location=uri,
        cause=f"{names[0]!r} is in none of these folders of {base}: {', '.join(folder or '.' for folder in folders)}",
        fix="put the images next to the annotation file, or write their folders into it",
    )
