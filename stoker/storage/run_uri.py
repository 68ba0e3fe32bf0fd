"""A run in a bucket: its URI, and the paths of its copies on this machine. Nothing here accesses a bucket.

There are two copies in the cache folder. Training writes the *working copy* and uploads it (`training/bucket_run.py`).
Commands that only read download the files that they need into the *reading copy* (`download.py`).
"""

import hashlib
from pathlib import Path

from stoker.storage.local_files import cache_folder, safe_name
from stoker.storage.uri import StorageUri, expand_variables, is_uri, parse_uri

URI_FILE = ".address"
"""In both copies: the URI of the run. If the user names the copy as the run, training continues with this URI."""
LEASE_FILE = "lease.json"
WRITABLE_SCHEMES = ("gs", "s3")


def to_run_uri(text: str) -> StorageUri | None:
    """The URI of a run that the user named; None: it is a local folder. Raises ConfigError."""
    text = expand_variables(text)
    if is_uri(text):
        return parse_uri(text)
    uri_file = Path(text) / URI_FILE
    return parse_uri(uri_file.read_text(encoding="utf-8")) if uri_file.is_file() else None


def display_path(folder: Path) -> str:
    """The name of a run in messages: its URI, if the folder is a copy of a run in a bucket."""
    uri_file = folder / URI_FILE
    return uri_file.read_text(encoding="utf-8") if uri_file.is_file() else str(folder)


def working_copy(uri: StorageUri) -> Path:
    """The local folder in which training writes a run of a bucket."""
    return cache_folder() / "runs" / f"{safe_name(uri.name)}-{hashlib.sha256(str(uri).encode()).hexdigest()[:12]}"


def reading_copy(uri: StorageUri) -> Path:
    """The local folder into which files of a run in a bucket are downloaded for reading."""
    folder = working_copy(uri)
    return folder.with_name(f"{folder.name}-read")
