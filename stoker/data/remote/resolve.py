"""From the URI of a data set or of images to the local path that stands for it, in a mirror that is up to date.

Mirrors of buckets are made by `bucket.py`, mirrors of web servers, which cannot list objects, by `web.py`.
"""

import contextlib
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path
from typing import NamedTuple

from stoker.data.formats.folders import ANNOTATION_DIRS
from stoker.data.formats.tfrecord import strip_shard_number
from stoker.data.images.source import paths_to_uris
from stoker.data.remote import bucket, web
from stoker.data.remote.mirror import expected_file, update_mirror
from stoker.errors import DataError, StokerError
from stoker.storage.store import open_store
from stoker.storage.uri import StorageUri

WEB_SCHEMES = ("https", "http")


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
        path, root = web.sync_mirror(uri)
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
