"""What the samples of a run's stacks add up to: a place, and a cost, which is time in a place or a phase."""

import msgspec

TAKES_CORES = "cpu_wait"
"""Phase of a cost of loader workers that slow steps on a CPU, as they take the cores that both want."""


class SampledPlace(msgspec.Struct, frozen=True, kw_only=True):
    """All samples in one place of the processes of a role and rank: a line of the job's own code and what it called.
    `schemas.Place` explains line, function, call and kind."""

    role: str
    """training, worker or thread."""
    rank: int
    line: str
    function: str
    call: str
    part: str
    """The part of stoker, in a training of its own; rules only judge lines of the user."""
    callers: str
    """The lines of the job's own code that called its function, the nearest first, of most of the samples."""
    kind: str
    samples: int
    seconds: float
    """Wall time of the process; of workers, which are sampled in turn, of each of them."""
    low_s: float
    high_s: float
    """95 % interval by Wilson, Journal of the American Statistical Association 22, 1927."""


class PlaceTotal(SampledPlace, frozen=True, kw_only=True):
    """What the rules know of a place; `places/totals.py` adds it up."""

    is_startup: bool
    """Before the first steps."""
    leaves: dict[str, int]
    """Innermost frame → samples."""
    windows: int
    """Lines of stacks.jsonl in which it was seen: one is a single call, or several in the same seconds."""
    window_fraction: float
    """The same as a fraction of the lines of its role and rank, before or after the first steps."""
    bursts: int
    """Groups of consecutive lines in which it was seen."""
    grown: tuple[float, float] | None = None
    """The fractions of a line of stacks.jsonl that it had at the beginning and at the end, if it takes ever more."""

    @property
    def file_and_function(self) -> tuple[str, str]:
        return self.line.rpartition(":")[0], self.function

    @property
    def thread(self) -> tuple[str, int]:
        """Role and rank; the workers of all ranks do the same, and count as those of rank 0."""
        return self.role, self.rank if self.role == "training" else 0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Time that was spent in one place, or in what no place has of a phase."""

    phase: str
    """Of the ledger; of a place in a phase without a name, that which its samples belong to; or TAKES_CORES."""
    seconds: float
    """Device-seconds, over the whole run."""
    steady_s: float
    """Those after the start."""
    place_s: float = 0.0
    """Those of its place in all phases."""
    role: str = "training"
    """Who did it: the training thread, or loader workers and threads while that waited for them."""
    rank: int = 0
    does: str = ""
    """What it is of a wait for input: "decode", "read", "work"; else empty."""
    place: PlaceTotal | None = None
    """Where most of it is, with the seconds of that; of a worker, those of its own time. None: only the phase is
    known."""
    whole: PlaceTotal | None = None
    """All of it, with the line that calls it, if the place is only a part."""
    parts: tuple[PlaceTotal, ...] = ()
    """Places that it consists of, the largest first."""
    awaited_in: PlaceTotal | None = None
    """Where the training thread waited for it; None: for input, or not at all."""

    @property
    def low_s(self) -> float:
        """Low end of the interval of `place_s`, by its samples."""
        sampled = self.whole or self.place
        return self.place_s * sampled.low_s / sampled.seconds if sampled is not None and sampled.seconds else 0.0
