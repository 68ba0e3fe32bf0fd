"""URIs of objects: `gs://bucket/key`, `s3://bucket/key`, `https://host/key`; and environment variables in paths.

A URI is never a `pathlib.Path`, which drops one of its slashes. Only text is handled here; `store.py` reads objects.

A run in a bucket has two copies in the cache folder: the *working copy* that training writes and uploads
(`stoker/training/bucket_run.py`), and the *reading copy* with the files that other commands need (`store.py`).
"""

import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, unquote

from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, make_error, nearest
from stoker_watch.storage.local_files import cache_folder, safe_name

SCHEMES = ("gs", "s3", "https", "http")
URI_FILE = ".address"
"""In both copies: the URI of the run. If the user names the copy as the run, training continues with this URI."""
EVENT_LOG, LEASE_FILE = "events.jsonl", "lease.json"
"""Every run has events."""
WRITABLE_SCHEMES = ("gs", "s3")
EXAMPLES = "For example s3://my-bucket/data or gs://my-bucket/data."

_URI_PATTERN = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]+://|(?:{'|'.join(SCHEMES)}):/")
"""Includes unknown schemes, and the one slash that `pathlib` leaves: `parse_uri` reports what is wrong."""
_VARIABLE_PATTERN = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


@dataclass(frozen=True)
class StorageUri:
    """One object, or a prefix that is used like a folder. `parse_uri(str(uri))` is the same URI."""

    scheme: str
    """One of SCHEMES."""
    bucket: str
    """For https and http: host, or host:port."""
    key: str
    """Without a slash at either end; empty: the bucket itself. Percent codes of https and http are decoded."""

    def __str__(self) -> str:
        key = quote(self.key) if self.scheme in ("https", "http") else self.key
        return f"{self.scheme}://{self.bucket}" + (f"/{key}" if key else "")

    def child(self, name: str) -> "StorageUri":
        """The object `name`, which may have slashes, below this one."""
        return replace(self, key=f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of the key; for a bucket, its name."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> "StorageUri":
        """The URI without its last part; a bucket is its own parent."""
        return replace(self, key=self.key.rpartition("/")[0])


def is_uri(text: str) -> bool:
    """Whether the text is a URI rather than a local path. `parse_uri` may still refuse it."""
    return _URI_PATTERN.match(text) is not None


def parse_uri(text: str) -> StorageUri:
    """Raises ConfigError: an unknown scheme, no bucket, an empty part, a query, a password."""
    if not is_uri(text):
        raise make_error(ConfigError, "no-uri", text, fix=EXAMPLES)
    scheme, _, rest = text.partition(":")
    scheme = scheme.lower()
    if not rest.startswith("//"):
        raise make_error(ConfigError, "uri-with-one-slash", text, right=f"{scheme}://{rest.lstrip('/')}")
    if scheme == "file":
        raise make_error(ConfigError, "uri-of-a-file", text, path=unquote(rest[2:]))
    if scheme not in SCHEMES:
        closest, choices = nearest(scheme, SCHEMES), [f"{name}://" for name in SCHEMES]
        fix = f"Write {closest}:{rest}." if closest else EXAMPLES
        raise ConfigError(f"{scheme}:// is not supported.", location=text, choices=choices, fix=fix)
    bucket, _, key = rest[2:].partition("/")
    is_http = scheme in ("https", "http")
    if "@" in bucket:
        without_password = f"{scheme}://…@{bucket.rpartition('@')[2]}"
        raise make_error(ConfigError, "uri-with-a-password", without_password)
    if not bucket:
        what, example = ("host", "example.org") if is_http else ("bucket", "my-bucket")
        raise ConfigError(f"The URI has no {what}.", location=text, fix=f"For example {scheme}://{example}/data.")
    if is_http:
        if "?" in key or "#" in key:
            raise make_error(ConfigError, "uri-with-a-query", text.partition("?")[0])
        key = unquote(key)
    key = key.removesuffix("/")
    if any(part in ("", ".", "..") for part in key.split("/")) and key:
        raise make_error(ConfigError, "uri-with-an-empty-part", text)
    return StorageUri(scheme, bucket, key)


def expand_variables(text: str) -> str:
    """A path or a URI with `~`, `$NAME` and `${NAME}` replaced. Raises ConfigError for a variable without a value."""

    def value_of(match: re.Match[str]) -> str:
        name: str = match[1] if match[1] is not None else match[2]
        if value := os.environ.get(name):
            return value
        state = "set, but empty" if name in os.environ else "not set"
        closest = nearest(name, [other for other, value in os.environ.items() if value and other != name])
        fix = f"Did you mean ${closest}? Otherwise: export {name}=…" if closest else f"export {name}=…"
        raise ConfigError(f"The environment variable {name or '${}'} is {state}.", location=text, fix=fix)

    return os.path.expanduser(_VARIABLE_PATTERN.sub(value_of, text))


def to_run_uri(text: str) -> StorageUri | None:
    """The URI of a run that the user named; None: it is a local folder. Raises ConfigError."""
    text = expand_variables(text)
    if is_uri(text):
        return parse_uri(text)
    uri_file = Path(text) / URI_FILE
    return parse_uri(regular_files.read_text(uri_file)) if uri_file.is_file() else None


def display_path(folder: Path) -> str:
    """The name of a run in messages: its URI, if the folder is a copy of a run in a bucket."""
    uri_file = folder / URI_FILE
    return regular_files.read_text(uri_file) if uri_file.is_file() else str(folder)


def working_copy(uri: StorageUri) -> Path:
    """The local folder in which training writes a run of a bucket."""
    return cache_folder() / "runs" / f"{safe_name(uri.name)}-{hashlib.sha256(str(uri).encode()).hexdigest()[:12]}"


def reading_copy(uri: StorageUri) -> Path:
    """The local folder into which files of a run in a bucket are downloaded for reading."""
    folder = working_copy(uri)
    return folder.with_name(f"{folder.name}-read")
