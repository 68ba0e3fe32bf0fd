"""Why a rank ended, as it tells the other ranks and the process that started it. No torch."""

import os
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stoker import errors
from stoker.errors import Preempted, RankError, StokerError

REPORTS_VARIABLE = "STOKER_RANK_REPORTS"
"""Folder in which the ranks that one `stoker train` started leave their failures, and rank 0 the result."""


class Failure(msgspec.Struct, kw_only=True):
    """The error that ended a rank."""

    rank: int
    t: float
    """Unix time, seconds."""
    text: str
    exit_code: int
    is_consequence: bool = False
    """Another rank had ended before."""
    trace: str = ""
    """The traceback, if it is a bug."""
    error: str = ""
    """The class of a StokerError in `errors.py`; its arguments follow. Empty for other errors."""
    what: str = ""
    location: str | None = None
    cause: str | None = None
    choices: tuple[str, ...] = ()
    fix: str | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException, *, is_consequence: bool = False) -> "Failure":
        own = cls(rank=rank, t=time.time(), text=_encodable(str(error)), exit_code=1, is_consequence=is_consequence)
        if not isinstance(error, StokerError):
            own.text = f"{type(error).__name__}: {own.text}"
            own.trace = _encodable("".join(traceback.format_exception(error)))
            return own
        own.error = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        own.exit_code, own.what = error.exit_code, _encodable(error.what)
        own.location, own.cause, own.fix = (
            None if text is None else _encodable(text) for text in (error.location, error.cause, error.fix)
        )
        own.choices = tuple(map(_encodable, error.choices))
        return own

    def as_error(self) -> StokerError:
        """The error, in the name of its rank where that is not rank 0."""
        if not self.error:
            cause = self.trace.rstrip() or self.text
            return RankError(f"Rank {self.rank} ended with an error, which is a bug in stoker.", cause=cause)
        what = f"Rank {self.rank}: {self.what}" if self.rank and not self.what.startswith("Rank ") else self.what
        kind: type[StokerError] = getattr(errors, self.error)
        return kind(what, location=self.location, cause=self.cause, choices=self.choices, fix=self.fix)


def _encodable(text: str) -> str:
    """With escapes for what is no UTF-8: bytes in the names of files, which Python keeps as lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def write_report(failure: Failure, folder: str | None = None) -> None:
    """Leaves the failure for the process that started this rank, if `stoker train --devices` did."""
    folder = os.environ.get(REPORTS_VARIABLE) if folder is None else folder
    if folder:
        Path(folder, f"failure-{failure.rank}.json").write_bytes(msgspec.json.encode(failure))


def read_reports(folder: Path) -> list[Failure]:
    """The failures that the ranks left."""
    return [msgspec.json.decode(path.read_bytes(), type=Failure) for path in folder.glob("failure-*.json")]


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The one that ended the job: the earliest that is not the consequence of another; of an error that all ranks
    raise, and where all were stopped, that of rank 0."""

    def is_stopped(failure: Failure) -> bool:
        return failure.exit_code == Preempted.exit_code

    ordered = sorted(failures, key=lambda failure: (failure.is_consequence, is_stopped(failure), failure.t))
    if not ordered:
        return None
    first = ordered[0]
    same = [other for other in ordered if other.text == first.text or (is_stopped(first) and is_stopped(other))]
    return min(same, key=lambda failure: failure.rank)
