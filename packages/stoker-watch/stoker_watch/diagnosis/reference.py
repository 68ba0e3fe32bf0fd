"""What an id means: of each cause, ending and note, problem of a data set, and finding of other commands.

`explain_id` is `stoker why --explain ID`; `scripts/write_causes.py` makes docs/causes.md of all of them (`make docs`).
"""

import difflib

import msgspec

from stoker_watch.diagnosis.causes.cause import REASONS, Cause, NoteKind, Threshold, fill_apis
from stoker_watch.diagnosis.endings import Ending, endings, line_patterns
from stoker_watch.diagnosis.engine import CATALOG
from stoker_watch.diagnosis.notes import NOTES
from stoker_watch.errors import UsageError
from stoker_watch.knowledge import read_toml

Rows = list[tuple[str, str]]
"""(what it is, the text)."""


class Meaning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of `knowledge/findings.toml`, whose head explains the fields."""

    commands: tuple[str, ...]
    severity: str
    meaning: str
    threshold: str = ""
    source: str = ""
    fix: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    title: str
    section: str
    """The reason for lost time, or the command that finds it."""
    rows: Rows


def all_entries() -> list[Entry]:
    """The entries of all ids, in the order of the page. An id may have several: one for each command."""
    found = [_cause_entry(cause) for cause in CATALOG.values()] + [_ending_entry(row) for row in endings().values()]
    found.sort(key=lambda entry: REASONS.index(entry.section))
    found += [_note_entry(kind) for kind, _ in NOTES]
    found += [_problem_entry(kind, row) for kind, row in read_toml("problems.toml").items()]
    others = msgspec.convert(read_toml("findings.toml"), dict[str, Meaning])
    return found + [_other_entry(id, row) for id, row in others.items()]


def explain_id(id: str) -> list[Entry]:
    """The entries of an id. Raises UsageError, with similar ids, if there is none."""
    entries = all_entries()
    found = [entry for entry in entries if entry.id == id]
    if not found:
        similar = dict.fromkeys(difflib.get_close_matches(id, [entry.id for entry in entries], n=5, cutoff=0.5))
        fix = f"similar ids: {', '.join(similar)}" if similar else "`stoker why RUN` prints the id of each finding"
        raise UsageError(f"No finding has the id {id!r}.", fix=fix)
    return found


def _present(*rows: tuple[str, str]) -> Rows:
    return [(name, text) for name, text in rows if text]


def _cause_entry(cause: Cause) -> Entry:
    settings = ", ".join(
        f"{name} = {msgspec.json.encode(value).decode()}" for name, value in cause.config_patch.items()
    )
    rows = _present(
        ("symptom", cause.symptom),
        ("needs", "; ".join(cause.required_records)),
        ("measures", cause.metric),
        ("thresholds", _format_thresholds(cause)),
        ("their source", cause.source),
        *threshold_rows(cause.thresholds),
        ("replaces", ", ".join(cause.supersedes)),
        ("experiment", cause.probe and f"{cause.probe}: if the run is faster with it, the cause is confirmed"),
        ("confidence", f"{100 * cause.confidence:.0f} %"),
        ("fix", fill_apis(cause.fix)),
        ("fix in other jobs", fill_apis(cause.external_fix)),
        ("command", cause.command or ""),
        ("settings", settings),
    )
    return Entry(id=cause.id, title=cause.title, section=cause.reason, rows=rows)


def _ending_entry(ending: Ending) -> Entry:
    lines: Rows = []
    for pattern in line_patterns():
        if pattern.ending is ending:
            harmless = "; jobs that continue print it too" if pattern.harmless else ""
            within = pattern.traceback_end
            suffix = f"; in a traceback that ends in `{within}`" if within is not None else ""
            lines.append(("line", f"`{pattern.text}`{harmless}{suffix}"))
    lines = lines or [("recognized by", "exit code, signal, counters and files, not by its output")]
    rows = [("severity", ending.severity), *lines, ("seen", "; ".join(ending.seen)), ("fix", ending.fix)]
    return Entry(id=ending.id, title=ending.title, section=ending.reason, rows=rows)


def _note_entry(kind: NoteKind) -> Entry:
    omitted = _present(("omitted with", ", ".join(kind.omitted_with)))
    rows = [("severity", "info: it explains time or names missing records, and needs no action")]
    return Entry(id=kind.id, title=kind.title, section="notes of `stoker why`",
                 rows=[*rows, *threshold_rows(kind.thresholds), *omitted])  # fmt: skip


def _problem_entry(kind: str, row: dict[str, str]) -> Entry:
    """row: a `data.validation.problems.ProblemKind`."""
    rows = [("counts", row["unit"]), ("training", f"{row['action']}: {row['effect']}"), ("fix", row["fix"])]
    return Entry(id=kind, title=row["title"], section="problems of data sets: `stoker data check`", rows=rows)


def _other_entry(id: str, row: Meaning) -> Entry:
    commands = ", ".join(f"`stoker {command}`" for command in row.commands)
    rows = _present(("severity", row.severity), ("threshold", row.threshold), ("source", row.source), ("fix", row.fix))
    return Entry(id=id, title=row.meaning, section=f"found by {commands}", rows=rows)


def threshold_rows(thresholds: dict[str, Threshold]) -> Rows:
    return [(f"{name}: {_format_number(row.value)}", row.description) for name, row in thresholds.items()]


def _format_thresholds(cause: Cause) -> str:
    comparison = "at most" if cause.lower_is_worse else "from"
    known = [(name, value) for name, value in reversed(cause.levels()) if value is not None]
    return ", ".join(f"{name} {comparison} {_format_number(value)}" for name, value in known)


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
