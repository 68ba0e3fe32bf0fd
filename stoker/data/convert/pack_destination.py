"""Where packed shards are written: a folder, or a prefix of a bucket. Every file is there as a whole or not at all."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stoker.data.formats.shard_index import WORK_DIR
from stoker.errors import UsageError, writing
from stoker.storage.local_files import write_atomic
from stoker.storage.uri import StorageUri, expand_variables, is_uri, parse_uri

if TYPE_CHECKING:
    from stoker.storage.store import Store

WRITABLE_SCHEMES = ("gs", "s3")


class Destination(Protocol):
    """Names are relative, with slashes."""

    text: str
    """As users know it: a path or a URI."""

    def sizes(self) -> dict[str, int]:
        """Name → bytes of every file."""

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None: ...

    def delete(self, name: str) -> None:
        """No error if there is no such file."""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Keeps other processes of this machine from packing into it. Raises UsageError if one does."""


def open_destination(text: str) -> Destination:
    """Raises UsageError for what cannot be written."""
    location = expand_variables(text)
    if not is_uri(location):
        return _Folder(Path(location).absolute())
    uri = parse_uri(location)
    if uri.scheme not in WRITABLE_SCHEMES:
        raise UsageError(
            f"{location!r} cannot be written.", choices=["a folder", "gs://…", "s3://…"], fix="name one of these"
        )
    return _Prefix(uri)


class _Folder:
    def __init__(self, path: Path) -> None:
        self.path, self.text = path, str(path)

    def sizes(self) -> dict[str, int]:
        if not self.path.exists():
            return {}
        if not self.path.is_dir():
            raise UsageError(f"{self.text!r} is a file.", fix="name a folder that does not exist, or is empty")
        found = {}
        for folder, _, names in os.walk(self.path):
            for name in names:
                file = os.path.join(folder, name)
                found[os.path.relpath(file, self.path)] = os.lstat(file).st_size
        return found

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        file = self.path / name
        with writing("The packed data set cannot be written.", file, fix="free disk space, or name a writable folder"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, data)

    def delete(self, name: str) -> None:
        file = self.path / name
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files are in its folder
            if file.parent != self.path:
                file.parent.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        lock = self.path / WORK_DIR / "lock"
        with writing("The folder cannot be created.", lock, fix="name a writable folder"):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("a")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"Another process is packing into {self.text!r}.", fix="wait for it, or name another folder"
                ) from error
            except OSError:
                pass  # a mount without locks; two processes write the same files as a whole
            yield
            self.delete(f"{WORK_DIR}/lock")


class _Prefix:
    def __init__(self, uri: StorageUri) -> None:
        self._uri, self.text = uri, str(uri)

    @property
    def _store(self) -> "Store":
        from stoker.storage.store import open_store  # needed, and imported, for buckets only

        return open_store(self._uri)

    def _key(self, name: str) -> str:
        return self._uri.child(name).key

    def sizes(self) -> dict[str, int]:
        prefix = self._key("")
        return {info.key.removeprefix(prefix): info.size_bytes for info in self._store.list(self._uri.key)}

    def read(self, name: str) -> bytes:
        return self._store.read(self._key(name))

    def write(self, name: str, data: bytes) -> None:
        self._store.write(self._key(name), data)

    def delete(self, name: str) -> None:
        self._store.delete(self._key(name))

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
