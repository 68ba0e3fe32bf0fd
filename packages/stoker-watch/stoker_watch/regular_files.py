"""Opens files whose names come from data: a data set, a run folder, a checkpoint, the header of a model file.

Such a name may be that of a device, a FIFO or a folder: reading one fills the memory or never ends. Only regular files
of bounded size are opened here. Everything else is an OSError, which callers handle like a file that cannot be read.
Not here: whether a name may leave the data set's folder (`stoker/data/formats/images.py`); files that are replaced as
a whole (`storage/local_files.py`).
"""

import errno
import os
import stat
import zipfile
from io import BufferedReader
from pathlib import Path

from stoker_watch.errors import system_limit

MAX_BYTES = 1 << 30
"""The largest file that is read as a whole, by default. Raw pixels of 18,900 × 18,900 RGB have this size."""
MAX_ANNOTATION_BYTES = 1 << 34
"""The largest annotation file of a whole data set: those of Objects365 and Open Images have 2 to 6 GB."""
MAX_TOML_BYTES = 1 << 20
"""A file of settings, which has a few kilobytes."""
_KINDS = {stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
"""O_NONBLOCK: opening a FIFO would wait for its writer. The open file is tested: no other can take its place."""
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


POINTER = b"version https://git-lfs"
"""The first bytes of a pointer, which has less than 1024: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md."""


class PointerError(OSError):
    """A file whose content Git LFS has not downloaded: it has a few lines about it in its place."""


def open_fd(path: str | Path, *, max_bytes: int | None = None, flags: int = 0, mode: int = 0o666) -> int:
    """A file descriptor for reading. Raises OSError for what is no regular file, or larger than `max_bytes`;
    SystemLimitError if there is no free descriptor, or memory for one. flags: more of `os.open`; with NO_LINKS a link
    is an OSError, too. mode: of a file that they create."""
    try:
        fd = os.open(path, flags | _FLAGS, mode)
    except OSError as error:
        if (limit := system_limit(error, path)) is not None:  # no reader may take it for a damaged file
            raise limit from error
        if error.errno == errno.ELOOP and flags & NO_LINKS:
            raise OSError(errno.ELOOP, "it is a link, and links are not followed here", os.fspath(path)) from error
        raise
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special file")
            raise OSError(errno.EINVAL, f"it is a {kind}, not a file", os.fspath(path))
        if max_bytes is not None and status.st_size > max_bytes:
            size = f"it has {status.st_size:,} bytes; at most {max_bytes:,} are read"
            raise OSError(errno.EFBIG, size, os.fspath(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(path: str | Path, *, max_bytes: int | None = None, flags: int = 0) -> BufferedReader:
    """The same as a binary file object. Raises PointerError for a file that Git LFS has not downloaded."""
    fd = open_fd(path, max_bytes=max_bytes, flags=flags)
    if os.fstat(fd).st_size < 1024 and os.pread(fd, len(POINTER), 0) == POINTER:
        os.close(fd)
        text = "it is a pointer of Git LFS instead of the file, which `git lfs pull` gets"
        raise PointerError(errno.EINVAL, text, os.fspath(path))
    return os.fdopen(fd, "rb")


def no_links(path: str, flags: int) -> int:
    """An `opener` of `open` for files that are written where others may have put a link, a FIFO or a device."""
    return open_fd(path, flags=flags | NO_LINKS)


def read_bytes(path: str | Path, *, max_bytes: int = MAX_BYTES, flags: int = 0) -> bytes:
    """The content of a regular file: no more than the size that it has when it is opened."""
    with open_file(path, max_bytes=max_bytes, flags=flags) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: str | Path, *, encoding: str = "utf-8", errors: str = "strict", max_bytes: int = MAX_BYTES) -> str:
    """The text of a regular file, with its line ends as they are. Raises OSError, UnicodeDecodeError."""
    return read_bytes(path, max_bytes=max_bytes).decode(encoding, errors)


def open_torch_file(path: str | Path) -> BufferedReader:
    """A file that `torch.save` wrote. Raises OSError if it is an archive that unpacks to more bytes than it has, which
    could fill the memory: torch compresses nothing. Of a damaged archive also the errors of `zipfile`."""
    file = open_file(path)
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
            size = os.fstat(file.fileno()).st_size
            if unpacked > size:
                text = f"its {size:,} bytes unpack to {unpacked:,}, and torch.save compresses nothing"
                raise OSError(errno.EFBIG, text, os.fspath(path))
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
