"""Where a file of pretrained weights lies: the user's folder, torch's cache, else a download into one of the two.

torchvision's are checked against the hash in their name. What lies at an address of the user's (`gs://`, `s3://`,
`https://`) is kept under a name with a hash of its version, and fetched again when that changes. Either appears under
its name only when it is whole. What is inside a file is `load.py`.
"""

import hashlib
import os
import re
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import torch

from stoker.errors import WeightsError, writing
from stoker.storage.uri import expand_variables, is_uri, parse_uri

TIMEOUT_S = 30.0
"""Silence of a server, not a whole download, after which it counts as failed."""

WEIGHTS_DIR_VARIABLE = "STOKER_WEIGHTS_DIR"


def weights_dirs() -> list[Path]:
    """Where weights are looked up, in this order; a download goes to the first."""
    override = os.environ.get(WEIGHTS_DIR_VARIABLE)
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    return [Path(override).expanduser(), cache] if override else [cache]


def fetch_weights(url: str) -> tuple[Path, str]:
    """(file, sentence that says where it was) of the weights at `url`. Raises WeightsError when they cannot be had."""
    name = url.rsplit("/", 1)[1]
    for folder in weights_dirs():
        if (folder / name).is_file():
            return folder / name, f"found in {folder}"
    path = weights_dirs()[0] / name
    print(f"Downloading {url} to {path.parent}", file=sys.stderr, flush=True)
    try:
        _download(url, path)
    except (OSError, _WrongHash) as error:  # urllib's errors are OSErrors
        raise WeightsError(
            f"Pretrained weights could not be downloaded: {name}",
            location=url,
            cause=str(error),
            fix=f"download it elsewhere and put it into {path.parent} (or any folder, named by {WEIGHTS_DIR_VARIABLE}); "
            "or --weights FILE; or --weights none, which starts from random weights",
        ) from error
    return path, f"downloaded to {path.parent}"


def local_path(location: str) -> Path:
    """The file that a path or an address names, variables in it replaced; the object at an address is fetched once.

    Raises WeightsError where there is no such object, StorageError where it cannot be read or kept.
    """
    location = expand_variables(location)
    if not is_uri(location):
        return Path(location)
    from stoker.storage.download import download  # only where there is an address
    from stoker.storage.store import open_store

    uri = parse_uri(location)
    store = open_store(uri)
    info = store.stat(uri.key) if uri.key else None
    if info is None:
        raise WeightsError("There is no such object.", location=uri, fix="correct the address of the weights")
    stem, dot, suffix = uri.name.rpartition(".")
    version = f"{uri}\0{info.etag}\0{info.modified_s!r}\0{info.size_bytes}"
    digest = hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    path = weights_dirs()[0] / (f"{stem}-{digest}.{suffix}" if dot else f"{suffix}-{digest}")
    if not path.is_file() or path.stat().st_size != info.size_bytes:
        print(f"Downloading {uri} to {path.parent}", file=sys.stderr, flush=True)
        fix = f"make room, or name another folder by {WEIGHTS_DIR_VARIABLE}"
        with writing("The weights cannot be kept.", path.parent, fix=fix):
            download(store, uri.key, path)
    return path


class _WrongHash(Exception):
    pass


def _download(url: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file, urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            shutil.copyfileobj(response, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        _check_hash(Path(temporary), path.name)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide a shared cache from others
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _check_hash(path: Path, name: str) -> None:
    """torchvision's names end in the first digits of the file's SHA-256: `resnet50-0676ba61.pth`."""
    expected = re.search(r"-([0-9a-f]{8,})\.\w+$", name)
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if expected is None or not actual.startswith(expected[1]):
        expected_hash = expected[1] if expected else "a hash in the name"
        raise _WrongHash(f"what arrived is not the file: SHA-256 {actual[:12]}…, wanted {expected_hash}")
