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
from stoker.data.formats.csv_files import TABLE_FOLDERS
from stoker.data.formats.csv_table import layout_of, rows_of
from stoker.data.formats.tables import ANNOTATION_FOLDERS, PICTURE_FOLDERS, split_in_name
from stoker.data.remote.bucket import Placed, held, home_of, root_in
from stoker.data.remote.mirror import FIX_ROOM, complaint, expected, update
from stoker.data.validation.problems import Problems
from stoker.errors import DataError, writing
from stoker.storage.store import ObjectInfo, Store, open_store
from stoker.storage.uri import Address

if TYPE_CHECKING:
    from stoker.data.remote.mirror import File

ENDINGS = (".json", ".csv")
PROBES = 3
"""Pictures that are asked for in each folder: the first one may be missing."""


def place_of(address: Address) -> Placed:
    """The local path that stands for a file of annotations on a web server.

    Raises DataError for an address that is no such file, or whose pictures are nowhere; StorageError where the server
    cannot be reached.
    """
    if not address.name.lower().endswith(ENDINGS) or not address.key:
        raise DataError(
            "A web server does not list what is in a folder.",
            place=address,
            choices=[f"…/*{ending}" for ending in ENDINGS],
            fix=f"name the file of annotations, e.g. {address.child('annotations.json')}; the pictures are looked for"
            " beside it",
        )
    store = open_store(address)
    info = store.stat(address.key)
    if info is None:
        raise DataError("There is no such file.", place=address, fix="correct the address")
    above = (*ANNOTATION_FOLDERS, *TABLE_FOLDERS)
    base = address.parent.parent if address.parent.key and address.parent.name.lower() in above else address.parent
    home = home_of(address)
    inner = address.key.removeprefix(base.key).lstrip("/")
    with writing("The data set's copy in the cache cannot be written.", home, fix=FIX_ROOM), held(home, base):
        root = root_in(home, base)
        annotations = {inner: expected(info)}
        stat = (root / inner).stat() if (root / inner).is_file() else None
        if stat is None or (stat.st_size, stat.st_mtime_ns) != annotations[inner][1:]:
            update(store, root, annotations, address)  # alone: older placeholders go
        update(store, root, annotations | _pictures(store, base, root / inner, address), address)
    return Placed(root / inner, root, ())


def _pictures(store: Store, base: Address, file: Path, address: Address) -> "dict[str, File]":
    """The placeholders of the pictures that a file names."""
    names = [name for name in _named_in(file) if complaint(name) is None]
    folder = _folder_of(store, base, address, names)
    known = {f"{folder}/{name}" if folder else name for name in names}
    return {name: expected(ObjectInfo(base.child(name).key, 1, None, 0.0)) for name in sorted(known)}


def _named_in(file: Path) -> list[str]:
    if file.suffix.lower() == ".json":
        names: Iterable[str] = (one.file_name for one in read_entries(file, file.name, Problems()).images)
    else:
        layout = layout_of(file)
        if layout is None:
            return []
        names = (values[layout.file] for _, values in rows_of(file, layout) if len(values) > layout.file)
    return list(dict.fromkeys(name.replace("\\", "/") for name in names if name))


def _folder_of(store: Store, base: Address, address: Address, names: list[str]) -> str:
    """Where the pictures lie below `base`. Raises DataError where none of the first few is anywhere."""
    stem = address.name.rpartition(".")[0]
    split = split_in_name(stem)
    tails = [stem.partition("_")[2] or stem, stem, *(SPLIT_ALIASES[split] if split else ())]
    beside = address.parent.key.removeprefix(base.key).strip("/")
    folders = ["", beside, *PICTURE_FOLDERS[:2], *tails, *(f"images/{tail}" for tail in tails)]
    for name in names[:PROBES]:
        for folder in dict.fromkeys(folders):
            if store.stat(base.child(f"{folder}/{name}" if folder else name).key) is not None:
                return folder
    raise DataError(
        "The pictures are not there." if names else "The file names no pictures.",
        place=address,
        cause=f"{names[0]!r} is in none of these folders of {base}: "
        + ", ".join(f"{folder or '.'}" for folder in dict.fromkeys(folders))
        if names
        else None,
        fix="put the pictures beside the annotations, or write their folders into the file",
    )
