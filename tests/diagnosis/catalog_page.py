"""Generates docs/causes.md from the catalog, the failures and the notes.

usage: python -m tests.diagnosis.catalog_page > docs/causes.md     A test compares the file with the output.
"""

from collections.abc import Iterator

from stoker.diagnosis.catalog import CATALOG, catalog_hash
from stoker.diagnosis.causes.cause import COMMON_THRESHOLDS, REASONS, Cause, Threshold
from stoker.diagnosis.endings import Ending, endings, line_patterns
from stoker.diagnosis.notes import NOTES, NoteKind


def render_page() -> str:
    return "\n".join(_page_lines()) + "\n"


def _page_lines() -> Iterator[str]:
    causes, failures = list(CATALOG.values()), list(endings().values())
    yield "# Causes"
    yield ""
    yield (
        "On programs whose author had not seen the rules, the first finding was right in 60 of 72 jobs with a fault "
        "(83 %) and 20 of 22 healthy jobs had no warning, at the first reading: [benchmarks.md]"
        "(benchmarks.md#the-diagnosis). On failures of kinds that the rules do not list, 72 % of the logs are named "
        "right, of listed kinds 91 % ([LOG.md](../LOG.md#what-a-log-says-of-a-jobs-end))."
    )
    yield ""
    yield (
        f"What `stoker why` can find in a run: {len(causes)} causes of lost time, lost quality or a coming failure, "
        f"{len(failures)} ways to end, and {len(NOTES)} notes. Generated from `stoker/knowledge/causes.toml`, "
        "`endings.toml` and `notes.py` by `python -m tests.diagnosis.catalog_page > docs/causes.md`; do not "
        f"edit it here. The catalog's hash is `{catalog_hash()}`: equal hashes mean equal thresholds. How to add a "
        "cause: [add-a-cause.md](add-a-cause.md)."
    )
    yield ""
    yield (
        "A cause is not reported if a record that it needs is missing. Fractions of time are of the time after the "
        "start (imports, weights, compiling, the first window of steps), so short runs are judged like long ones. Of "
        "several causes of the same lost time only the most exact one is given. Confidence without an experiment: 90 "
        "% if a clock measured it, 70 % if counters agree, 50 % if something else could look the same."
    )
    yield ""
    yield "| common threshold | | |"
    yield "|---|---|---|"
    for name, threshold in COMMON_THRESHOLDS.items():
        yield f"| `{name}` | {_format_number(threshold.value)} | {_escape_cell(threshold.description)} |"
    for reason in REASONS:
        matching_causes = [cause for cause in causes if cause.reason == reason]
        matching_failures = [failure for failure in failures if failure.reason == reason]
        if not matching_causes and not matching_failures:
            continue
        yield ""
        yield f"## {reason[0].upper() + reason[1:]}"
        for cause in matching_causes:
            yield from _cause_section(cause)
        for failure in matching_failures:
            yield from _failure_section(failure)
    yield ""
    yield "## Notes"
    yield ""
    yield "Lines below the findings. They explain time or name missing records, and need no action."
    for kind in NOTES:
        yield from _note_section(kind)


def _cause_section(cause: Cause) -> Iterator[str]:
    yield ""
    yield f"### `{cause.id}`: {cause.title}"
    yield ""
    yield f"*Symptom*: {cause.symptom}."
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| needs | {_escape_cell('; '.join(f'`{record}`' for record in cause.required_records))} |"
    yield f"| measures | {_escape_cell(cause.metric)} |"
    yield f"| thresholds | {_format_thresholds(cause)} |"
    yield f"| their source | {_escape_cell(cause.source)} |"
    yield from _threshold_rows(cause.thresholds)
    if cause.supersedes:
        superseded = ", ".join(f"`{other}`" for other in cause.supersedes)
        yield f"| replaces | {superseded}: less exact causes of the same lost time |"
    if cause.probe:
        yield f"| experiment | `{cause.probe}`: if the run is faster with it, the cause is confirmed, else refuted |"
    yield f"| confidence | {100 * cause.confidence:.0f} % |"
    yield f"| fix | {_escape_cell(cause.fix)} |"
    if cause.external_fix:
        yield f"| fix in other jobs | {_escape_cell(cause.external_fix)} |"
    if cause.command:
        yield f"| command | `{cause.command}` |"
    if cause.config_patch:
        settings = ", ".join(f"`{name} = {_to_toml(value)}`" for name, value in cause.config_patch.items())
        yield f"| settings | {settings} |"


def _failure_section(failure: Ending) -> Iterator[str]:
    yield ""
    yield f"### `{failure.id}`: {failure.title}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| severity | {failure.severity} |"
    patterns = [pattern for pattern in line_patterns() if pattern.ending is failure]
    for pattern in patterns:
        harmless = "; jobs that continue print it too" if pattern.harmless else ""
        traceback_note = (
            f"; in a traceback that ends in `{_escape_cell(pattern.traceback_end)}`"
            if pattern.traceback_end is not None
            else ""
        )
        yield f"| line | `{_escape_cell(pattern.text)}`{harmless}{traceback_note} |"
    if not patterns:
        yield "| recognized by | exit code, signal, counters and files, not by its output |"
    yield f"| seen | {_escape_cell('; '.join(failure.seen))} |"
    yield f"| fix | {_escape_cell(failure.fix)} |"


def _note_section(kind: NoteKind) -> Iterator[str]:
    yield ""
    yield f"### `{kind.id}`: {kind.title}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield from _threshold_rows(kind.thresholds)
    if kind.omitted_with:
        yield f"| omitted with | {', '.join(f'`{cause}`' for cause in kind.omitted_with)} |"


def _threshold_rows(thresholds: dict[str, Threshold]) -> Iterator[str]:
    for name, threshold in thresholds.items():
        yield f"| `{name}` {_format_number(threshold.value)} | {_escape_cell(threshold.description)} |"


def _format_thresholds(cause: Cause) -> str:
    comparison = "at most" if cause.lower_is_worse else "from"
    levels = (
        ("info", cause.info_threshold),
        ("warning", cause.warning_threshold),
        ("critical", cause.critical_threshold),
    )
    return ", ".join(f"{name} {comparison} {_format_number(value)}" for name, value in levels if value is not None)


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _to_toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(render_page(), end="")
