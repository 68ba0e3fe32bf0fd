"""docs/verdicts.md, of the catalogue and the ways to die: `python -m stoker.diagnosis.verdicts > docs/verdicts.md`.

For people: every verdict that `stoker why` can give, what it rests on, and what to do. A test holds the file to this.
"""

from collections.abc import Iterator

from stoker.diagnosis.catalog import CATALOG, catalog_hash
from stoker.diagnosis.causes.cause import COMMON_THRESHOLDS, REASONS, Cause
from stoker.diagnosis.failure_signatures import FAILURE_SIGNATURES, FailureSignature

_PATTERN_ORIGINS = {
    "R": "seen from a job made to die so",
    "B": "it stands in an installed library",
    "I": "in public issue threads",
}


def render_verdicts() -> str:
    """The page."""
    return "\n".join(_page_lines()) + "\n"


def _page_lines() -> Iterator[str]:
    causes, failures = list(CATALOG.values()), list(FAILURE_SIGNATURES.values())
    yield "# Verdicts"
    yield ""
    yield (
        f"What `stoker why` can say of a run: {len(causes)} causes of lost time, lost quality or a death to come, and "
        f"{len(failures)} ways to end. Made of `stoker/diagnose/causes/` and `stoker/diagnosis/failure_signatures.py` by "
        "`python -m stoker.diagnosis.verdicts > docs/verdicts.md`; do not edit it here. "
        f"The catalogue's hash is `{catalog_hash()}`: equal hashes, equal thresholds."
    )
    yield ""
    yield (
        "A verdict is silent where a record that it needs is missing. Shares of time are of the time after the start "
        "(imports, weights, compiling, the first window of steps), so short runs are judged like long ones. Of several "
        "verdicts about the same seconds only the most exact is given. Confidence without an experiment: 90 % where "
        "a clock measured it, 70 % where counters agree, 50 % where something else could look the same."
    )
    yield ""
    yield "| limit of all | | |"
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


def _cause_section(cause: Cause) -> Iterator[str]:
    yield ""
    yield f"### `{cause.id}`: {cause.title}"
    yield ""
    yield f"*Looks like*: {cause.symptom}."
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| needs | {_escape_cell('; '.join(f'`{need}`' for need in cause.required_records))} |"
    yield f"| measures | {_escape_cell(cause.metric)} |"
    yield f"| thresholds | {_format_thresholds(cause)} |"
    yield f"| their source | {_escape_cell(cause.source)} |"
    for name, threshold in cause.thresholds.items():
        yield f"| `{name}` {_format_number(threshold.value)} | {_escape_cell(threshold.description)} |"
    if cause.supersedes:
        yield f"| stands for | {', '.join(f'`{other}`' for other in cause.supersedes)}, which say the same less exactly |"
    if cause.probe:
        yield f"| experiment | `{cause.probe}`: faster with it confirms, as fast as before refutes |"
    yield f"| confidence | {100 * cause.confidence:.0f} % |"
    yield f"| fix | {_escape_cell(cause.fix)} |"
    if cause.external_fix:
        yield f"| fix in other jobs | {_escape_cell(cause.external_fix)} |"
    if cause.command:
        yield f"| command | `{cause.command}` |"
    if cause.config_patch:
        yield f"| settings | {', '.join(f'`{name} = {_to_toml(value)}`' for name, value in cause.config_patch.items())} |"


def _failure_section(failure: FailureSignature) -> Iterator[str]:
    yield ""
    yield f"### `{failure.id}`: {failure.title}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| severity | {failure.severity} |"
    for log_pattern in failure.log_patterns:
        origins = ", ".join(_PATTERN_ORIGINS[letter] for letter in log_pattern.origins)
        harmless = "; also printed by jobs that go on" if log_pattern.harmless else ""
        traceback_note = (
            f"; in a traceback that ends in `{_escape_cell(log_pattern.traceback_end.pattern)}`"
            if log_pattern.traceback_end is not None
            else ""
        )
        yield f"| line | `{_escape_cell(log_pattern.regex.pattern)}` ({origins}{harmless}{traceback_note}) |"
    if not failure.log_patterns:
        yield "| known by | exit code, signal, counters and files, not by what it printed |"
    yield f"| fix | {_escape_cell(failure.fix)} |"


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
    print(render_verdicts(), end="")
