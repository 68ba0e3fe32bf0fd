"""What can be wrong with a data set: every kind, what training does about it, and how it is mended.

The readers (`formats/`) and the cleaning (`clean.py`) put what they meet into a `Problems`; the index keeps the counts
and a few examples, `stoker data check` (`check.py`) everything. Not here: errors that end the reading, which are
`DataError`s, and what is wrong inside the pictures (`check.py` finds it, with kinds from this table).
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FEW = 5
"""Examples of a kind that the index keeps."""


class Kind(NamedTuple):
    """A row of the table of what can be wrong."""

    title: str
    """In words, after a count: "3 boxes: zero size"."""
    unit: Literal["box", "picture", "class", "file", "split"]
    action: Literal["fixed", "skipped", "refused", "kept"]
    does: str
    """What training does, in words."""
    fix: str
    """What the user can do."""


KINDS: dict[str, Kind] = {
    "no-box": Kind("no box", "box", "skipped", "the annotation is left out", "give it a box, or delete it"),
    "not-a-number": Kind("not a number", "box", "skipped", "the box is left out", "correct or delete the box"),
    "negative-size": Kind("negative size", "box", "skipped", "the box is left out", "swap its corners"),
    "zero-size": Kind("zero size", "box", "skipped", "the box is left out", "correct or delete the box"),
    "outside": Kind("outside the picture", "box", "skipped", "the box is left out", "correct or delete the box"),
}
"""Everything that can be wrong, by id; a kind that is not here cannot be reported."""


@dataclass(frozen=True)
class Problem:
    """What was found of one kind."""

    kind: str
    """A key of KINDS."""
    count: int
    examples: tuple[str, ...]
    """Each names the place, file and line or id, and what is there: "a.jpg, annotation 7: [0, 0, 0, 5]"."""

    @property
    def title(self) -> str:
        return KINDS[self.kind].title


@dataclass
class Problems:
    """Collects what is wrong while a data set is read: all counts, and the first `limit` examples of each kind."""

    limit: int = FEW
    _counts: dict[str, int] = field(default_factory=dict)
    _examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, example: str, count: int = 1) -> None:
        """One more of a kind (`count` more, of which one is described). Raises KeyError for a kind not in KINDS."""
        KINDS[kind]
        self._counts[kind] = self._counts.get(kind, 0) + count
        examples = self._examples.setdefault(kind, [])
        if len(examples) < self.limit:
            examples.append(example)

    def found(self) -> tuple[Problem, ...]:
        """In the order of KINDS."""
        return tuple(Problem(k, self._counts[k], tuple(self._examples[k])) for k in KINDS if k in self._counts)
