"""What the hook saw in a training loop: a debugging aid that stays on, a mistake that harms what is learned. Its kinds
are rows of `knowledge/mistakes.toml`."""

import functools
from statistics import median
from typing import Any, Literal

import msgspec

from stoker_watch.diagnosis.causes.cause import Cause, find_cause
from stoker_watch.diagnosis.causes.shared import make_evidence, make_finding
from stoker_watch.diagnosis.places.totals import find_places
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.findings.finding import SEVERITIES, Evidence, Finding
from stoker_watch.knowledge import read_toml

TRAINING_MISTAKE = find_cause("training_mistake")
_RECORDS_STACKS = r" \(python[\d.]+t?/(traceback|linecache)\.py\)$"
"""Innermost frames in which PyTorch's anomaly mode records the stack of an operation."""


class MistakeKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of `knowledge/mistakes.toml`, whose head explains the fields."""

    id: str
    cause: str
    """A row of causes.toml."""
    title: str
    text: str
    severity: Literal["info", "warning", "critical"]
    fix: str
    source: str
    printed: str = ""
    """Part of a line that a framework prints; empty: it prints none, or the hook sees it."""


@functools.cache
def mistake_kinds() -> dict[str, MistakeKind]:
    """All rows. Raises ValidationError for one of another form."""
    return {id: msgspec.convert({**row, "id": id}, MistakeKind) for id, row in read_toml("mistakes.toml").items()}


def mistakes_of(run: RunRecords, cause: Cause) -> list[tuple[MistakeKind, dict[str, Any]]]:
    """Those of the run that belong to a cause, with their values, the worst first. A kind that this version does not
    know is left out."""
    seen = [one for one in run.facts.get("mistakes") or () if isinstance(one, dict)]
    named = [(mistake_kinds().get(str(one.get("kind"))), one) for one in (*seen, *_losses_without_bound(run))]
    found = [(kind, one) for kind, one in named if kind is not None and kind.cause == cause.id]
    found = [(_REFINED[kind.id](run, kind) if kind.id in _REFINED else kind, one) for kind, one in found]
    return sorted(found, key=lambda entry: SEVERITIES.index(entry[0].severity))


def _in_memory(run: RunRecords, kind: MistakeKind) -> MistakeKind:
    """Graphs that are kept cost nothing where they are given back with the loss of their step: a warning only where
    memory rises far and falls again, or grows."""
    threshold = TRAINING_MISTAKE.threshold
    highest = swing = 0.0
    for value in run.host.rss.values:
        highest = max(highest, value)
        swing = max(swing, highest - value)
    grown = max(swing, run.host.rss.growth)
    if grown < threshold("kept_bytes") or grown < threshold("kept_fraction") * highest:
        return kind
    text = f"{kind.text}; the memory of the job rose by {grown / 2**30:,.1f} GiB"
    text += ", and was given back" if swing > run.host.rss.growth else ""
    return msgspec.structs.replace(kind, severity="warning", text=text)


def _with_zero_loss(run: RunRecords, kind: MistakeKind) -> MistakeKind:
    """Zero gradients with a loss of 0 come from labels that do not count, not from a dead layer."""
    losses = run.learning.loss.values
    if not losses or any(losses):
        return kind
    return msgspec.structs.replace(
        kind, text=f"{kind.text}; the loss is 0 in each step: no target of any sample counts"
    )


_REFINED = {"retained_graph": _in_memory, "zero_gradients": _with_zero_loss}
"""Kinds that other records of the run tell more of."""


def _losses_without_bound(run: RunRecords) -> list[dict[str, Any]]:
    """A loss that began above zero and falls below it faster and faster."""
    values, threshold = run.learning.loss.values, TRAINING_MISTAKE.threshold
    third = len(values) // 3
    if not third or len(values) < threshold("min_windows") or values[0] <= 0:
        return []
    middle, last = median(values[third:-third]), median(values[-third:])
    is_falling = last <= threshold("falls") * middle < 0
    if not is_falling or -last < threshold("below_zero") * values[0]:
        return []
    return [{"kind": "unbounded_loss", "place": "", "first": values[0], "last": last}]


def mistake_evidence(kind: MistakeKind, values: dict[str, Any]) -> Evidence:
    try:
        text = kind.text.format_map(values)
    except (KeyError, ValueError):  # written by another version
        text = kind.title
    if place := values.get("place"):
        text = f"{place}: {text}"
    return make_evidence(text, source="events.jsonl: data.facts.mistakes")


def debug_mode(run: RunRecords, cause: Cause) -> Finding | None:
    """What PyTorch's anomaly mode costs at least: the samples in which the stacks of operations are recorded; checking
    the gradients cannot be told from computing them. What the other aids cost is not known."""
    recording = find_places(run, leaf=_RECORDS_STACKS)
    if recording is None or all(kind.id != "anomaly" for kind, _ in mistakes_of(run, cause)):
        return _finding(run, cause)
    basis = "the samples in which it records stacks; checking the gradients comes on top of it"
    return _finding(run, cause, recording.seconds, basis)


def training_mistake(run: RunRecords, cause: Cause) -> Finding | None:
    return _finding(run, cause)


def _finding(run: RunRecords, cause: Cause, lost_s: float | None = None, estimate_basis: str = "") -> Finding | None:
    """The worst mistake has the title, the fix and the place; the others are evidence with their titles."""
    found = mistakes_of(run, cause)
    if not found:
        return None
    (kind, values), *others = found
    evidence = [mistake_evidence(kind, values)]
    evidence += [make_evidence(f"{other.title}. {mistake_evidence(other, its).text}") for other, its in others]
    return make_finding(
        run, cause, len(found), evidence, severity=kind.severity, title=kind.title, fix=kind.fix,
        place=str(values.get("place") or ""), lost_s=lost_s, estimate_basis=estimate_basis,
    )  # fmt: skip
