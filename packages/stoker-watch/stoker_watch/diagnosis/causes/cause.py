"""What a cause is: `Cause`, a row of `knowledge/causes.toml`, its thresholds and reasons. The rules are in the other
files of this folder."""

import functools
import re
from typing import Any, Literal, get_args

import msgspec

from stoker_watch.findings.finding import SEVERITIES, Severity
from stoker_watch.knowledge import read_toml

Reason = Literal[
    "GPU under-utilized (host- or launch-bound)",
    "data loading",
    "architecture and hyper-parameters",
    "memory",
    "communication",
    "allocation and scheduling",
    "observability gaps",
    "failure: GPU memory",
    "failure: host memory",
    "failure: shared memory",
    "failure: driver or library mismatch",
    "failure: storage",
    "failure: paths or environment",
    "failure: bad records",
    "failure: divergence",
    "failure: hang",
    "failure: preemption",
    "unknown",
]
"""The seven reasons for an idle GPU, and the ways in which a job fails."""

REASONS: tuple[str, ...] = get_args(Reason)
LEVELS: tuple[Severity, ...] = ("critical", "warning", "info")
"""Severities of causes, the worst first."""


class Threshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number that a rule compares with. description: what it bounds, and where the number comes from."""

    value: int | float
    description: str


class Cause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of `knowledge/causes.toml`."""

    id: str
    title: str
    reason: Reason
    symptom: str
    """What the user sees."""
    required_records: tuple[str, ...]
    """Records without which the rule abstains, as `file: field`."""
    metric: str
    """The measured value that is compared with the three thresholds."""
    info_threshold: int | float | None = None
    warning_threshold: int | float | None = None
    critical_threshold: int | float | None = None
    """There is no finding below the lowest of them. None: the cause never has that severity."""
    lower_is_worse: bool = False
    """A value is beyond a threshold when it is below it."""
    source: str
    """Where the thresholds come from."""
    thresholds: dict[str, Threshold] = {}
    """Further thresholds of the rule, by name."""
    explains: tuple[str, ...] = ()
    """Phases of the costs that it may explain; "*": also any other. Empty: it is a state of the job, and no cost."""
    supersedes: tuple[str, ...] = ()
    """Less exact causes: they do not explain a cost that this one does, or are left out when this state is found."""
    leads_to: tuple[str, ...] = ()
    """Endings that it explains: it then comes before them."""
    is_end: bool = False
    """It describes a job that does not go on, and says nothing beside an end that is explained."""
    order: int = 0
    """Among findings of one severity: lower ones first, equal ones by what was lost."""
    probe: str = ""
    """The experiment (one of schemas.PROBE_KINDS) that makes the run faster if the cause is present."""
    confidence: float
    """Without a probe. 0.9: measured by a clock; 0.7: counters agree; 0.5: something else could look the same."""
    tell: str = ""
    """What would show that it is this one of several possible causes."""
    fix: str
    external_fix: str = ""
    """The fix for a job that `stoker train` did not run, without stoker's flags; empty: the same as `fix`. Names in
    braces are those of `apis.toml`."""
    other_fixes: dict[str, str] = {}
    """The fix in some cases that the rule distinguishes, by the rule's name for the case."""
    command: str | None = None
    """A command to run, or flags to add to the command line."""
    config_patch: dict[str, Any] = {}
    """Settings of config.toml that fix it, by name."""

    def threshold(self, name: str) -> float:
        return self.thresholds[name].value

    def severity(self, measured: float) -> Severity | None:
        """The severity of a measured value; None: below all thresholds."""
        sign = -1 if self.lower_is_worse else 1
        reached = (level for level, value in self.levels() if value is not None and sign * measured >= sign * value)
        return next(reached, None)

    def levels(self) -> list[tuple[Severity, int | float | None]]:
        """Severities and their thresholds, the worst first."""
        thresholds = self.critical_threshold, self.warning_threshold, self.info_threshold
        return list(zip(LEVELS, thresholds, strict=True))


class NoteKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of `knowledge/notes.toml`, whose head explains the fields."""

    id: str
    title: str
    text: str
    record: str
    thresholds: dict[str, Threshold] = {}
    omitted_with: tuple[str, ...] = ()

    def threshold(self, name: str) -> float:
        return self.thresholds[name].value


@functools.cache
def find_note(id: str) -> NoteKind:
    """The row of a note. Raises KeyError if there is none, ValidationError for a row of another form."""
    return msgspec.convert({**read_toml("notes.toml")[id], "id": id}, NoteKind)


@functools.cache
def _tables() -> dict[str, Any]:
    return read_toml("causes.toml")


def cause_ids() -> list[str]:
    return [id for id in _tables() if id != "common_thresholds"]


@functools.cache
def find_cause(id: str) -> Cause:
    """The row of a cause. Raises KeyError if there is none, ValidationError for a row of another form."""
    row = _tables()[id]
    thresholds = {name: _resolve(value) for name, value in row.get("thresholds", {}).items()}
    return msgspec.convert({**row, "id": id, "thresholds": thresholds}, Cause)


def _resolve(threshold: dict[str, Any] | str) -> dict[str, Any]:
    """A text is the name of the threshold of another cause: `input_bound.min_wait_s`."""
    if not isinstance(threshold, str):
        return threshold
    other, _, name = threshold.partition(".")
    return _resolve(_tables()[other]["thresholds"][name])


@functools.cache
def _apis() -> dict[str, Any]:
    return read_toml("apis.toml")


def fill_apis(text: str, frameworks: str = "", loader: str = "") -> str:
    """The text of a fix with the names that a job's framework and loader have for it. frameworks, loader: names as the
    records have them; empty: not known."""
    tables = _apis()
    rows = tables["framework"]
    name = next(name for name, row in rows.items() if name == "any" or re.search(row["pattern"], frameworks))
    parent = rows[name].get("parent", "")
    parent = "torch" if parent == "tensorflow" and "on torch" in frameworks else parent
    names = rows["any"] | rows.get(parent, {}) | rows[name]
    if loader and name in ("keras", "tensorflow", "jax", "any"):  # the others have arguments for their own loader
        names |= next((row for row in tables["loader"].values() if re.search(row["pattern"], loader)), {})
    return text.format_map(names)


COMMON_THRESHOLDS = msgspec.convert(_tables()["common_thresholds"], dict[str, Threshold])
"""Thresholds that all rules share."""


def common_threshold(name: str) -> float:
    return COMMON_THRESHOLDS[name].value


def worst(severities: "list[Severity | None]") -> Severity | None:
    """The highest of some severities; None where there is none."""
    return min((severity for severity in severities if severity is not None), key=SEVERITIES.index, default=None)
