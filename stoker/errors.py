"""Every error that stoker raises on purpose, and the exit code each one ends the process with.

A message names what is wrong, where (file, line, id), why, which choices are valid and what to do. An exception that is
not a `StokerError` and reaches the top is a bug of ours. The screen's layout of a message is `StokerError.__str__`.
"""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class StokerError(Exception):
    """The root. `what` is one sentence; the rest fills the lines under it.

    place: file, `file:line`, address or picture id; cause: why, as far as known; choices: what would have been valid;
    fix: what to do, a command where there is one.
    """

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
        lines = [self.what]
        if self.location is not None:
            lines.append(f"  where:  {self.location}")
        if self.cause is not None:
            lines.append(f"  why:    {self.cause}")
        if self.choices:
            lines.append(f"  valid:  {', '.join(self.choices)}")
        if self.fix is not None:
            lines.append(f"  fix:    {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.location, self.cause, self.choices, self.fix))


def _rebuild(
    kind: type[StokerError],
    what: str,
    location: str | None,
    cause: str | None,
    choices: tuple[str, ...],
    fix: str | None,
) -> StokerError:
    return kind(what, location=location, cause=cause, choices=choices, fix=fix)


class UsageError(StokerError):
    """The command line or an API call asks for something that does not exist."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting has a value it cannot have, or two settings contradict each other."""


class PreflightError(StokerError):
    """Training would fail: weights that cannot be had, a device that does not work, a disk without room."""

    exit_code = 3


class StorageError(PreflightError):
    """A place cannot be read or written: a full disk, a missing folder, a bucket that refuses or does not answer."""


class ObjectMissing(StorageError):
    """The bucket answers, and has no such object."""


class Conflict(StorageError):
    """The object exists, or is not the one that the caller saw, and the write was to happen only if not."""


class Unsupported(StorageError):
    """The store cannot do this at all: list a web server, write only where nothing is."""


class WeightsError(PreflightError):
    """Pretrained weights are missing, damaged, or belong to another architecture."""


class CheckpointError(PreflightError):
    """No checkpoint of the run can be read."""


class ParityError(PreflightError):
    """An exported model does not answer as the model it was made from."""


class DataError(StokerError):
    """The data set, or one picture or record of it, cannot be used."""

    exit_code = 4


class OutOfMemoryError(StokerError):
    """The device or the host has too little memory for the smallest step that the settings allow."""

    exit_code = 5


class DivergedError(StokerError):
    """The loss or the gradients stopped being finite and stayed so."""

    exit_code = 6


class HungError(StokerError):
    """Nothing moved for longer than the limit."""

    exit_code = 7


class Preempted(StokerError):
    """A signal asked the run to stop; its state is saved and the same command continues it."""

    exit_code = 75


@contextlib.contextmanager
def writing(what: str, location: object, *, fix: str | None = None) -> Iterator[None]:
    """A block that writes: an OSError inside is raised as a StorageError that says `what`, for example "The report
    cannot be written."."""
    try:
        yield
    except OSError as error:
        raise StorageError(what, location=location, cause=error.strerror or str(error), fix=fix) from error


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """The choice most like `value` (for a "did you mean" in a message), or None when none is close."""
    matches = difflib.get_close_matches(value, list(choices), n=1)
    return matches[0] if matches else None
