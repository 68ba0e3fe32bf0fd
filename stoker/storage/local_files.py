"""Files of the local disk: replaced as a whole or not at all, and where those lie that can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`STOKER_CACHE_DIR`, else `$XDG_CACHE_HOME/stoker`, else `~/.cache/stoker`. It need not exist."""
    if own := os.environ.get("STOKER_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser().absolute() / "stoker"
    return Path.home() / ".cache" / "stoker"


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Replaces a file as a whole: after a kill or a power cut it is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
