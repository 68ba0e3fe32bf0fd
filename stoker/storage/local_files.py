"""Files of the local disk: replaced as a whole or not at all, and where those lie that can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`STOKER_CACHE_DIR`, else `$XDG_CACHE_HOME/stoker`, else `~/.cache/stoker`. It need not exist."""
    if configured := os.environ.get("STOKER_CACHE_DIR"):
        return Path(configured).expanduser().absolute()
    if xdg_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg_cache).expanduser().absolute() / "stoker"
    return Path.home() / ".cache" / "stoker"


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Replaces a file as a whole: after a kill or a power cut it is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def fsync_folder(path: Path) -> None:
    """Makes renames inside a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
