"""A run whose folder is in a bucket: what it is called, and where its copies lie on this machine.

There are two copies below the cache folder. The *working copy* is written by a training (`training/bucket_run.py`) and
uploaded from there. The *reading copy* is fetched by the commands that only look (`download.py`) and holds what the
bucket held then. Not here: anything that speaks to a bucket.
"""

import hashlib
from pathlib import Path

from stoker.storage.local_files import cache_folder
from stoker.storage.uri import Address, expand, is_address, parse

MARK = ".address"
"""In both copies: the run's address. Training goes on with that, where a person names the copy."""
LEASE = "lease.json"
WRITABLE = ("gs", "s3")


def address_of(text: str) -> Address | None:
    """The address of the run that a person names; None: it is a folder of this machine. Raises ConfigError."""
    text = expand(text)
    if is_address(text):
        return parse(text)
    mark = Path(text) / MARK
    return parse(mark.read_text(encoding="utf-8")) if mark.is_file() else None


def shown(folder: Path) -> str:
    """What a person calls a run: its address, where the folder is a copy of one."""
    mark = folder / MARK
    return mark.read_text(encoding="utf-8") if mark.is_file() else str(folder)


def working_copy(address: Address) -> Path:
    """The folder of this machine in which a run of a bucket is written."""
    readable = "".join(c if c.isalnum() or c in "._-" else "-" for c in address.name)
    return cache_folder() / "runs" / f"{readable}-{hashlib.sha256(str(address).encode()).hexdigest()[:12]}"


def reading_copy(address: Address) -> Path:
    """The folder of this machine into which a run of a bucket is fetched to be looked at."""
    folder = working_copy(address)
    return folder.with_name(f"{folder.name}-read")
