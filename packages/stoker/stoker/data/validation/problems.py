"""What can be wrong with a data set: every kind of problem, what training does, the fix.

The kinds are rows of `stoker_watch/knowledge/problems.toml`, because `stoker why --explain` knows them, too.

The readers (`formats/`) and the cleaning (`clean.py`) add what they meet to a `ProblemCollector`. The index keeps the
counts and a few examples; `stoker data check` (`check.py`) shows everything, also problems inside image files. Not
here: errors that end the reading (`DataError`; their texts are in `stoker_watch/knowledge/data_errors.toml`).
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from stoker_watch.findings.finding import Severity
from stoker_watch.knowledge import read_toml

DEFAULT_MAX_BAD_FRACTION = 0.01
"""Fraction of the images that may be unusable, by default."""
DEFAULT_MAX_BAD_BOXES = 0.01
"""Fraction of the boxes that may be left out, by default. Of the five sets in shared/data, BCCD has most bad boxes, 2
of 4,888 (0.04 %); a set with a wrong list of classes had 96 of 116 (83 %) in its validation split."""
MAX_EXAMPLES = 5
"""Examples of a kind that the index keeps."""


class ProblemKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    """Follows a count: "3 boxes: zero size"."""
    unit: Literal["box", "image", "class", "file", "split"]
    action: Literal["fixed", "skipped", "refused", "kept"]
    effect: str
    """What training does, in words."""
    fix: str
    """What the user can do."""
    severity: Severity | None = None
    """Where it is not that of the action."""


PROBLEM_KINDS = msgspec.convert(read_toml("problems.toml"), dict[str, ProblemKind])
"""In the order of reports."""


@dataclass(frozen=True)
class Problem:
    """The problems of one kind in a data set."""

    kind: str
    """A key of `PROBLEM_KINDS`."""
    count: int
    examples: tuple[str, ...]
    """Each has file and line, or file and id, and the content: "a.jpg, annotation 7: [0, 0, 0, 5]"."""
    own_fix: str = ""
    """A fix for this data set that is more specific than that of the table."""

    @property
    def row(self) -> ProblemKind:
        return PROBLEM_KINDS[self.kind]

    @property
    def title(self) -> str:
        return self.row.title

    @property
    def fix(self) -> str:
        return self.own_fix or self.row.fix

    @property
    def drops_images(self) -> bool:
        """Whether it counts images that are not in the index."""
        return self.row.unit == "image" and self.row.action == "skipped"

    @property
    def is_bad_image(self) -> bool:
        """Whether it counts images that `--max-bad-fraction` limits; `--max-bad-boxes` limits those without boxes."""
        return self.drops_images and self.kind != "no-box-left"

    @property
    def drops_boxes(self) -> bool:
        """Whether it counts boxes that are left out though their image may be used."""
        return self.row.unit == "box" and self.row.action == "skipped" and self.kind != "box-of-unreadable-image"


@dataclass
class ProblemCollector:
    """Collects problems while a data set is read: all counts, and the first `max_examples` examples of each kind."""

    max_examples: int = MAX_EXAMPLES
    _counts: dict[str, int] = field(default_factory=dict)
    _examples: dict[str, list[str]] = field(default_factory=dict)

    def remaining_examples(self, kind: str) -> int:
        """Returns how many more examples of a kind are kept."""
        return self.max_examples - len(self._examples.get(kind, ()))

    def add(self, kind: str, example: str, count: int = 1) -> None:
        """Adds `count` problems of a kind, one of them described. Raises KeyError for a kind not in the table."""
        PROBLEM_KINDS[kind]
        self._counts[kind] = self._counts.get(kind, 0) + count
        examples = self._examples.setdefault(kind, [])
        if len(examples) < self.max_examples:
            # a file name may have bytes that are not Unicode, which neither the index nor JSON can hold
            examples.append(example.encode(errors="backslashreplace").decode())

    def clear(self) -> None:
        self._counts.clear()
        self._examples.clear()

    def num_bad_images(self) -> int:
        """Returns images that `--max-bad-fraction` limits."""
        return sum(problem.count for problem in self.summarize(0) if problem.is_bad_image)

    def summarize(self, max_examples: int | None = None) -> tuple[Problem, ...]:
        """Returns the problems in the order of the table, each with at most `max_examples` examples."""
        return tuple(
            Problem(k, self._counts[k], tuple(self._examples[k][:max_examples]))
            for k in PROBLEM_KINDS
            if k in self._counts
        )

    def describe(self) -> str | None:
        """Returns all kinds, each with its first example, for the cause of an error; None if there are none."""
        return "; ".join(f"{p.count:,} × {p.title}: {p.examples[0]}" for p in self.summarize()) or None


def max_bad_images(max_bad_fraction: float, num_images: int) -> int:
    """How many of `num_images` images (or boxes) may be unusable, rounded up: 0 only where the fraction is 0."""
    return max(1, math.ceil(round(max_bad_fraction * num_images, 9))) if max_bad_fraction > 0 else 0


def count_of_all(count: int, total: int, noun: str) -> str:
    """Returns a part as people read it: "28 of 405 images (7 %)"."""
    percent = 100 * count / max(1, total)
    digits = 0 if percent >= 1 or count == 0 else 2
    return f"{count:,} of {total:,} {noun} ({percent:.{digits}f} %)"
