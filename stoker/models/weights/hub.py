"""Finds files of pretrained weights: in the user's folder, in torch's cache, else by a download into one of the two.

torchvision's files are checked against the hash in their name. Files at a URI of the user (`gs://`, `s3://`,
`https://`) are cached under a name with a hash of their version, and downloaded again if that changes. A file gets its
name only when it is complete. `load.py` reads the files.
"""

import hashlib
import os
import socket
import sys
from http.client import HTTPException
from pathlib import Path

import torch

from stoker.errors import WeightsError, writing
from stoker.printable import print_text
from stoker.storage.uri import expand_variables, is_uri, parse_uri

TIMEOUT_S = 30.0
"""A download fails after this time without data."""

WEIGHTS_DIR_VARIABLE = "STOKER_WEIGHTS_DIR"


def weights_dirs() -> list[Path]:
    """Folders in which weights are searched, in this order; downloads go to the first."""
    override = os.environ.get(WEIGHTS_DIR_VARIABLE)
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    return [Path(override).expanduser(), cache] if override else [cache]


def find_weights(url: str) -> Path | None:
    """The file of the weights at `url`, if it was downloaded before."""
    name = url.rsplit("/", 1)[1]
    return next((folder / name for folder in weights_dirs() if (folder / name).is_file()), None)


def fetch_weights(url: str) -> tuple[Path, str]:
    """(file, sentence about where it was found) of the weights at `url`. Raises WeightsError if the download fails."""
    if (found := find_weights(url)) is not None:
        return found, f"found in {found.parent}"
    name = url.rsplit("/", 1)[1]
    path = weights_dirs()[0] / name
    print_text(f"Downloading {url} to {path.parent}", file=sys.stderr, flush=True)
    try:
        _download(url, path)
    except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: another hash
        raise WeightsError(
            f"Pretrained weights could not be downloaded: {name}",
            location=url,
            cause=str(error),
            fix=f"download it elsewhere and put it into {path.parent} (or a folder in {WEIGHTS_DIR_VARIABLE}); "
            "or --weights FILE; or --weights none, which starts from random weights",
        ) from error
    return path, f"downloaded to {path.parent}"


def local_path(location: str) -> Path:
    """The local file of a path or URI, with variables expanded; an object at a URI is downloaded once.

    Raises WeightsError if there is no such object, StorageError if it cannot be read or written to the cache.
    """
    location = expand_variables(location)
    if not is_uri(location):
        return Path(location)
    from stoker.storage.store import (
        download,  # only needed for a URI
        open_store,
    )

    uri = parse_uri(location)
    store = open_store(uri)
    info = store.stat(uri.key) if uri.key else None
    if info is None:
        raise WeightsError("There is no such object.", location=uri, fix="correct the URI of the weights")
    stem, dot, suffix = uri.name.rpartition(".")
    version = f"{uri}\0{info.etag}\0{info.modified_s!r}\0{info.size_bytes}"
    digest = hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    path = weights_dirs()[0] / (f"{stem}-{digest}.{suffix}" if dot else f"{suffix}-{digest}")
    if not path.is_file() or path.stat().st_size != info.size_bytes:
        print_text(f"Downloading {uri} to {path.parent}", file=sys.stderr, flush=True)
        fix = f"make room, or set {WEIGHTS_DIR_VARIABLE} to another folder"
        with writing("The weights cannot be written.", path.parent, fix=fix):
            download(store, uri.key, path)
    return path


def _download(url: str, path: Path) -> None:
    """torchvision's names end with the first digits of the file's SHA-256: `resnet50-0676ba61.pth`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    expected = torch.hub.HASH_REGEX.search(path.name)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        torch.hub.download_url_to_file(url, str(path), expected and expected[1], progress=sys.stderr.isatty())
    finally:
        socket.setdefaulttimeout(before)
