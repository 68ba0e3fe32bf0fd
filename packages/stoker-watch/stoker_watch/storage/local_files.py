"""Files on the local disk: the cache folder, and files that are replaced as a whole or not at all."""

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

MAX_TEMPORARY_NAME_BYTES = 150
"""A longer name is hashed in the name of its temporary file: file systems allow 255 bytes."""
MIN_STALE_AGE_S = 60.0
"""A younger temporary folder may not be locked yet."""


def cache_folder() -> Path:
    """`STOKER_CACHE_DIR`, else `$XDG_CACHE_HOME/stoker`, else `~/.cache/stoker`. It need not exist."""
    if configured := os.environ.get("STOKER_CACHE_DIR"):
        return Path(configured).expanduser().absolute()
    if xdg_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg_cache).expanduser().absolute() / "stoker"
    return Path.home() / ".cache" / "stoker"


def safe_name(text: str) -> str:
    """The text with every character that is not a letter, a digit or one of `._-` replaced by `-`."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text)


def format_bytes(count: int) -> str:
    """1.23 GB, 45.6 MB, 789 kB, 12 bytes: for messages about copies and the cache."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path next to `path`. It replaces `path` at the end of the block, and is removed after an exception.
    The block does any fsync. A link in place of either is replaced, and its target is not written."""
    name = os.fsencode(path.name)
    shown = path.name if len(name) <= MAX_TEMPORARY_NAME_BYTES else blake2b(name, digest_size=8).hexdigest()
    # two containers may share a folder and have equal process ids
    temporary = path.with_name(f".{shown}.{platform.node()}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a kill, or a link that someone else put there
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes | memoryview, *, durable: bool = True, private: bool = False) -> None:
    """Replaces a file as a whole: after a kill it is the old or the new one. durable: also after a power cut.
    private: only the user may read it."""
    with atomic_path(path) as temporary, temporary.open("xb") as file:  # x: never through a link
        if private:
            temporary.chmod(0o600)
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Makes renames inside a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end, with those of the same prefix that killed processes of this user
    left: a process that lives holds a lock on its folder. Raises OSError if there is no space."""
    for stale in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _locked_folder(stale) as status:
            if status.st_uid == os.geteuid() and status.st_mtime < time.time() - MIN_STALE_AGE_S:
                shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a file system without locks
                stack.enter_context(_locked_folder(folder))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a process that outlives this one may still write there


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[os.stat_result]:
    """Raises OSError if it is locked, or is no folder: a FIFO of that name is not waited for, a link not followed."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(fd)
    finally:
        os.close(fd)
