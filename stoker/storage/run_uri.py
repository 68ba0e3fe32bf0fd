"""A run whose folder is in a bucket: what it is called, and where its copies lie on this machine.

There are two copies below the cache folder. The *working copy* is written by a training (`training/bucket_run.py`) and
uploaded from there. The *reading copy* is fetched by the commands that only look (`download.py`) and holds what the
bucket held then. Not here: anything that speaks to a bucket.
"""

import hashlib
from pathlib import Path

from stoker.storage.local_files import cache_folder
from stoker.storage.uri import StorageUri, expand_variables, is_uri, parse_uri

URI_FILE = ".address"
"""In both copies: the run's address. Training goes on with that, where a person names the copy."""
LEASE_FILE = "lease.json"
WRITABLE_SCHEMES = ("gs", "s3")


def to_run_uri(text: str) -> StorageUri | None:
    """The address of the run that a person names; None: it is a folder of this machine. Raises ConfigError."""
    text = expand_variables(text)
    if is_uri(text):
        return parse_uri(text)
    uri_file = Path(text) / URI_FILE
    return parse_uri(uri_file.read_text(encoding="utf-8")) if uri_file.is_file() else None


def display_path(folder: Path) -> str:
    """What a person calls a run: its address, where the folder is a copy of one."""
    uri_file = folder / URI_FILE
    return uri_file.read_text(encoding="utf-8") if uri_file.is_file() else str(folder)


def working_copy(uri: StorageUri) -> Path:
    """The folder of this machine in which a run of a bucket is written."""
    safe_name = "".join(c if c.isalnum() or c in "._-" else "-" for c in uri.name)
    return cache_folder() / "runs" / f"{safe_name}-{hashlib.sha256(str(uri).encode()).hexdigest()[:12]}"


def reading_copy(uri: StorageUri) -> Path:
    """The folder of this machine into which a run of a bucket is fetched to be looked at."""
    folder = working_copy(uri)
    return folder.with_name(f"{folder.name}-read")
