"""A data set on a web server: an annotation file (COCO JSON or a CSV table) at an https address, and its images.

A web server lists nothing, so a folder cannot be named. The annotation file lists the images; their folder is found by
requesting the first images where a local data set would have them. The mirror is like that of a bucket (`bucket.py`),
except that the size of an image is not known, and a missing image is noticed when it is read.
"""

from collections.abc import Iterable
from pathlib import Path

from stoker.data.formats.coco import SPLIT_ALIASES, read_entries
from stoker.data.formats.csv import TABLE_DIRS, detect_csv_layout, iter_rows
from stoker.data.formats.folders import ANNOTATION_DIRS, IMAGE_DIRS, split_from_name
from stoker.data.remote.bucket import locked_mirror
from stoker.data.remote.mirror import expected_file, invalid_name_reason, update_mirror
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError
from stoker.storage.store import ObjectInfo, Store, open_store
from stoker.storage.uri import StorageUri

SUFFIXES = (".json", ".csv")
MAX_PROBES = 3
"""Images that are requested in each folder: the first ones may be missing."""


def sync_mirror(uri: StorageUri) -> tuple[Path, Path]:
    """(annotation file, mirror) on the local disk, up to date, for an annotation file on a web server.

    Raises DataError for a URI that is not such a file, or whose images are not found; StorageError where the server
    cannot be reached.
    """
    if not uri.name.lower().endswith(SUFFIXES) or not uri.key:
        raise DataError(
            "A web server does not list the files of a folder.",
            location=uri,
            choices=[f"…/*{suffix}" for suffix in SUFFIXES],
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
    with locked_mirror(uri, base) as root:
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
