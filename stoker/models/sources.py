"""Where a file of pretrained weights lies: the user's folder, torch's cache, else a download into one of the two.

A download is checked against the hash in its name and appears under that name only when it is whole. What is inside a
file is `weights.py`.
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

from stoker.errors import WeightsError

TIMEOUT_S = 30.0
"""Silence of a server, not a whole download, after which it counts as failed."""

FOLDER_VARIABLE = "STOKER_WEIGHTS_DIR"


def folders() -> list[Path]:
    """Where weights are looked up, in this order; a download goes to the first."""
    own = os.environ.get(FOLDER_VARIABLE)
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    return [Path(own).expanduser(), cache] if own else [cache]


def fetch(url: str) -> tuple[Path, str]:
    """(file, sentence that says where it was) of the weights at `url`. Raises WeightsError when they cannot be had."""
    name = url.rsplit("/", 1)[1]
    for folder in folders():
        if (folder / name).is_file():
            return folder / name, f"found in {folder}"
    path = folders()[0] / name
    print(f"Downloading {url} to {path.parent}", file=sys.stderr, flush=True)
    try:
        _download(url, path)
    except (OSError, _WrongHash) as error:  # urllib's errors are OSErrors
        raise WeightsError(
            f"Pretrained weights could not be downloaded: {name}",
            place=url,
            cause=str(error),
            fix=f"download it elsewhere and put it into {path.parent} (or any folder, named by {FOLDER_VARIABLE}); "
            "or --weights FILE; or --weights none, which starts from random weights",
        ) from error
    return path, f"downloaded to {path.parent}"


class _WrongHash(Exception):
    pass


def _download(url: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file, urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            shutil.copyfileobj(answer, file, 1 << 20)
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
        wanted = expected[1] if expected else "a hash in the name"
        raise _WrongHash(f"what arrived is not the file: SHA-256 {actual[:12]}…, wanted {wanted}")
