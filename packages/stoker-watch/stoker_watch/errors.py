"""Every error that stoker raises on purpose, and the exit code of the process for each.

A message names what is wrong, where (file, line, id), why, which choices are valid and what to do. An exception that is
not a `StokerError` and reaches the top is a bug in stoker. `StokerError.__str__` lays a message out for the screen.
"""

import contextlib
import errno
import functools
import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

from stoker_watch.knowledge import read_toml
from stoker_watch.printable import printable

Error = TypeVar("Error", bound="StokerError")


class StokerError(Exception):
    """The root of the tree. `what` is one sentence; the other arguments fill the lines below it. location: file,
    `file:line`, URI or image id; cause: why, as far as known; choices: the valid values; fix: what to do."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        location: object = None,
        cause: str | None = None,
        choices: Iterable[object] = (),
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.location = None if location is None else str(location)
        self.cause = cause
        self.choices = tuple(str(choice) for choice in choices)
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        from stoker_watch.secrets import mask_secrets  # its patterns cost time, and most programs end without an error

        lines = [printable(mask_secrets(self.what))]
        if self.location is not None:
            lines.append(f"  where:  {printable(mask_secrets(self.location))}")
        if self.cause is not None:
            lines.append(f"  why:    {printable(mask_secrets(self.cause), newlines=True)}")
        if self.choices:
            lines.append(f"  valid:  {', '.join(map(printable, self.choices))}")
        if self.fix is not None:
            lines.append(f"  fix:    {printable(self.fix, newlines=True)}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        kind = functools.partial(
            type(self), location=self.location, cause=self.cause, choices=self.choices, fix=self.fix
        )  # pickle itself passes no keywords
        return (kind, (self.what,))


class UsageError(StokerError):
    """The command line or an API call asks for something that does not exist."""

    exit_code = 2


class RunFinished(UsageError):
    """The named run was trained to its end with these settings. Exit code 0: where a scheduler starts a command again
    that has done its work, for example because the machine was lost after it, nothing is left to do."""

    exit_code = 0


class ConfigError(UsageError):
    """A setting has a value it cannot have, or two settings contradict each other."""


class PreflightError(StokerError):
    """Training would fail: weights cannot be loaded, a device does not work, a disk is full."""

    exit_code = 3


class StorageError(PreflightError):
    """A path or URI cannot be read or written: a full disk, a missing folder, a bucket that denies access or does not
    answer."""


class ObjectMissing(StorageError):
    """The bucket answers and has no such object."""


class Conflict(StorageError):
    """A conditional write failed: the object exists already, or changed since the caller read it."""


class Unsupported(StorageError):
    """The store does not support the operation, for example listing a web server or a conditional write."""


class WeightsError(PreflightError):
    """Pretrained weights are missing, damaged, or belong to another architecture."""


class CheckpointError(PreflightError):
    """No checkpoint of the run can be read."""


class ParityError(PreflightError):
    """An exported model gives other detections than the model it was exported from."""


class DataError(StokerError):
    """The data set, or an image or record of it, cannot be used."""

    exit_code = 4


class OutOfMemoryError(StokerError):
    """The memory of the device or the host is too small for the smallest step that the settings allow."""

    exit_code = 5


class DivergedError(StokerError):
    """The loss or the gradients became non-finite and stayed so."""

    exit_code = 6


class HungError(StokerError):
    """The training made no progress for much longer than a step takes."""

    exit_code = 7


class RankError(StokerError):
    """A training of several ranks ended because one of them could not be reached, was killed, or met a bug."""


class SystemLimitError(StokerError):
    """The system gives this process no more files, threads, processes or memory; what it was about to do is not to
    blame."""


class Preempted(StokerError):
    """A signal stopped the run; its state is saved, and the same command continues it."""

    exit_code = 75


class CaptureFailed(Preempted):
    """A CUDA graph could not be captured; the same command, and `stoker train` by itself, continues without one."""


@functools.cache
def _texts() -> dict[str, dict[str, str]]:
    return read_toml("errors.toml") | read_toml("data_errors.toml")


def make_error(
    kind: type[Error],
    key: str,
    location: object = None,
    *,
    choices: Iterable[object] = (),
    cause: str | None = None,
    fix: str | None = None,
    **values: object,
) -> Error:
    """The error of a row of errors.toml or data_errors.toml, with `values`. cause, fix: where the row has none."""
    texts = {name: text.format(**values) for name, text in _texts()[key].items()}
    return kind(
        texts["what"], location=location, choices=choices, cause=texts.get("cause", cause), fix=texts.get("fix", fix)
    )


_FILES = (
    "This process, or the machine, has no free file descriptor.",
    "raise the limit (`ulimit -n 65536`, in Docker `--ulimit nofile`), or use fewer --workers",
)
_PROCESSES = (
    "The system gives this process no more threads or processes.",
    "raise the limit (`ulimit -u`, pids.max of the cgroup: `--pids-limit` in Docker, podPidsLimit in Kubernetes), or "
    "use fewer --workers and OMP_NUM_THREADS=1",
)
_MEMORY = (
    "The system gives this process no more memory.",
    "raise the limit of memory (`ulimit -v`, that of the container), or use fewer --workers",
)
_LIMITS = {errno.EMFILE: _FILES, errno.ENFILE: _FILES, errno.ENOMEM: _MEMORY, errno.EAGAIN: _PROCESSES}
"""errno → message and fix. Not in errors.toml, which cannot be opened without a descriptor."""


def system_limit(error: BaseException, location: object = None) -> SystemLimitError | None:
    """The limit of the system that an exception is about, or that caused it; None if it is about something else.
    Libraries in C++ pass on only the text of an errno."""
    if isinstance(error, SystemLimitError):
        return error
    text, number = str(error), getattr(error, "errno", None)
    limit = next((limit for code, limit in _LIMITS.items() if number == code or text.endswith(os.strerror(code))), None)
    if "can't start new thread" in text:  # CPython: Modules/_threadmodule.c
        limit = _PROCESSES
    if limit is not None:
        return SystemLimitError(limit[0], location=location, cause=f"{type(error).__name__}: {text}", fix=limit[1])
    return None if error.__cause__ is None else system_limit(error.__cause__, location)


@contextlib.contextmanager
def writing(what: str, location: object, *, fix: str | None = None) -> Iterator[None]:
    """A block that writes: an OSError inside is raised as a StorageError with the message `what`."""
    try:
        yield
    except OSError as error:
        raise StorageError(what, location=location, cause=error.strerror or str(error), fix=fix) from error


@contextlib.contextmanager
def needs_package(package: str, what: str) -> Iterator[None]:
    """A block that imports a library which only some jobs need; one that is missing or broken is raised as a
    PreflightError. package: as it is installed; what: what needs it, for example "A bucket"."""
    try:
        yield
    except ImportError as error:
        raise PreflightError(
            f"{what} needs the package {package}.", cause=str(error), fix=f"pip install {package}"
        ) from error


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """The choice closest to `value` (for a "did you mean" in a message), or None when none is close."""
    import difflib

    matches = difflib.get_close_matches(value, list(choices), n=1)
    return matches[0] if matches else None


def did_you_mean(what: str, name: str, choices: Iterable[str]) -> str:
    """The sentence `what`, without its end, and the choice closest to `name`: "There is no x; did you mean 'y'?"."""
    near = nearest(name, choices)
    return f"{what}; did you mean {near!r}?" if near else f"{what}."
