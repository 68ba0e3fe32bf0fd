"""What the threads found becomes the truth here, sample by sample in the order of the stream: the quarantine.

Runs in the thread that asks for batches. So nothing depends on which thread was first.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker.data.loading.counters import Counters
from stoker.data.loading.samples import Outcome, Quarantine, Samples
from stoker.data.loading.worker_pool import Work
from stoker.data.validation.problems import tolerated
from stoker.errors import DataError, StorageError

if TYPE_CHECKING:
    from stoker.data.index import Index


class Commit:
    """max_bad: share of the pictures that may be in quarantine; on_quarantine is told of each when it gets there."""

    def __init__(
        self,
        index: "Index",
        samples: Samples,
        *,
        max_bad: float,
        on_quarantine: Callable[[Quarantine], None] | None,
        counters: Counters,
    ) -> None:
        self._index, self._samples, self._max_bad = index, samples, max_bad
        self._on_quarantine, self._counters = on_quarantine, counters
        self._errors: dict[int, str] = {}

    def is_empty(self, work: Work) -> bool:
        """Whether committing this batch, whose samples are all there, would change nothing."""
        return all(
            isinstance(outcome, Outcome)
            and not outcome.failures
            and (self._samples.usable(outcome.row, work.start + k) if outcome.row >= 0 else not self._samples.train)
            for k, outcome in enumerate(work.outcomes)
        )

    def batch(self, work: Work) -> None:
        """Commits a batch whose samples are all there.

        A thread reads ahead, so it may have used a picture that an earlier position has put into quarantine meanwhile
        (it failed once, then not again): that sample is loaded anew, here. So the stream is the one that a single
        thread would have made. Raises what a thread raised, and DataError when too many pictures cannot be used.
        """
        samples = self._samples
        for k, outcome in enumerate(work.outcomes):
            position = work.start + k
            if isinstance(outcome, BaseException):
                raise outcome
            assert outcome is not None
            if outcome.row >= 0 and not samples.usable(outcome.row, position):
                outcome = samples.load(work.slot, k, position, self._counters, [])
                work.again.append(k)
            for row, error in outcome.failures:
                if samples.usable(row, position):
                    self._quarantine(row, error, position, outcome.row)
            if samples.train and outcome.row < 0:
                raise self._unusable(f"None of the {len(samples.quarantined):,} pictures tried can be used.")
            if len(samples.quarantined) > tolerated(self._max_bad, len(samples)):
                raise self._unusable(
                    f"{len(samples.quarantined):,} of {len(samples):,} pictures cannot be used; "
                    f"up to {self._max_bad:.3g} of them may be bad."
                )

    def _quarantine(self, row: int, error: Exception, position: int, replaced_by: int) -> None:
        text = _in_one_line(error)
        self._samples.quarantined[row] = position
        self._errors[row] = text
        if self._on_quarantine is not None:
            self._on_quarantine(Quarantine(row, self._index.place(row), text, position, replaced_by))

    def _unusable(self, what: str) -> DataError:
        bad = list(self._samples.quarantined)
        named = [f"{self._index.place(row)}: {self._errors.get(row, 'failed in an earlier start')}" for row in bad[:5]]
        more = [f"and {len(bad) - len(named):,} more"] if len(bad) > len(named) else []
        return DataError(
            what,
            place=self._index.source,
            cause="\n          ".join(named + more),
            fix=f"`stoker data check {self._index.source}` names all of them: repair them, remove them from the"
            " annotations, or allow more with --max-bad; if all are gone, check the path and the mount",
        )


def _in_one_line(error: Exception) -> str:
    if isinstance(error, DataError | StorageError):
        return error.what if error.cause is None else f"{error.what} {error.cause}"
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
