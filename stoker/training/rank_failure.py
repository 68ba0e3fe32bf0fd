"""Why a rank ended, as it tells the other ranks and the process that started it. No torch."""

import base64
import os
import pickle
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import msgspec

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
    """The StokerError, pickled, in base64."""

    @classmethod
    def of(cls, rank: int, error: BaseException, *, is_consequence: bool = False) -> "Failure":
        is_named = isinstance(error, StokerError)
        return cls(
            rank=rank,
            t=time.time(),
            text=str(error) if is_named else f"{type(error).__name__}: {error}",
            exit_code=error.exit_code if isinstance(error, StokerError) else 1,
            is_consequence=is_consequence,
            trace="" if is_named else "".join(traceback.format_exception(error)),
            error=base64.b64encode(pickle.dumps(error)).decode() if is_named else "",
        )

    def as_error(self) -> StokerError:
        """The error, in the name of its rank where that is not rank 0."""
        if not self.error:
            cause = self.trace.rstrip() or self.text
            return RankError(f"Rank {self.rank} ended with an error, which is a bug in stoker.", cause=cause)
        error: StokerError = pickle.loads(base64.b64decode(self.error))  # of a rank of this job
        if self.rank and not error.what.startswith("Rank "):
            error.what = f"Rank {self.rank}: {error.what}"
        return error


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
