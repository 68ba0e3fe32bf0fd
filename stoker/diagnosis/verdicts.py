"""docs/verdicts.md, of the catalogue and the ways to die: `python -m stoker.diagnosis.verdicts > docs/verdicts.md`.

For people: every verdict that `stoker why` can give, what it rests on, and what to do. A test holds the file to this.
"""

from collections.abc import Iterator

from stoker.diagnosis.catalogue import CATALOGUE, COMMON, REASONS, Cause, catalogue_hash
from stoker.diagnosis.failure_signatures import DEATHS, Death

_SOURCES = {
    "R": "seen from a job made to die so",
    "B": "it stands in an installed library",
    "I": "in public issue threads",
}


def verdicts() -> str:
    """The page."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    losses, deaths = list(CATALOGUE.values()), list(DEATHS.values())
    yield "# Verdicts"
    yield ""
    yield (
        f"What `stoker why` can say of a run: {len(losses)} causes of lost time, lost quality or a death to come, and "
        f"{len(deaths)} ways to end. Made of `stoker/diagnose/causes/` and `stoker/diagnosis/failure_signatures.py` by "
        "`python -m stoker.diagnosis.verdicts > docs/verdicts.md`; do not edit it here. "
        f"The catalogue's hash is `{catalogue_hash()}`: equal hashes, equal thresholds."
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
    for name, limit in COMMON.items():
        yield f"| `{name}` | {_number(limit.value)} | {_cell(limit.said)} |"
    for reason in REASONS:
        rows = [cause for cause in losses if cause.reason == reason]
        ends = [death for death in deaths if death.reason == reason]
        if not rows and not ends:
            continue
        yield ""
        yield f"## {reason[0].upper() + reason[1:]}"
        for cause in rows:
            yield from _cause(cause)
        for death in ends:
            yield from _death(death)


def _cause(cause: Cause) -> Iterator[str]:
    yield ""
    yield f"### `{cause.id}`: {cause.title}"
    yield ""
    yield f"*Looks like*: {cause.looks_like}."
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| needs | {_cell('; '.join(f'`{need}`' for need in cause.needs))} |"
    yield f"| measures | {_cell(cause.measure)} |"
    yield f"| thresholds | {_thresholds(cause)} |"
    yield f"| their source | {_cell(cause.source)} |"
    for name, limit in cause.limits.items():
        yield f"| `{name}` {_number(limit.value)} | {_cell(limit.said)} |"
    if cause.over:
        yield f"| stands for | {', '.join(f'`{other}`' for other in cause.over)}, which say the same less exactly |"
    if cause.probe:
        yield f"| experiment | `{cause.probe}`: faster with it confirms, as fast as before refutes |"
    yield f"| confidence | {100 * cause.confidence:.0f} % |"
    yield f"| fix | {_cell(cause.fix)} |"
    if cause.fix_elsewhere:
        yield f"| fix in other jobs | {_cell(cause.fix_elsewhere)} |"
    if cause.command:
        yield f"| command | `{cause.command}` |"
    if cause.patch:
        yield f"| settings | {', '.join(f'`{name} = {_toml(value)}`' for name, value in cause.patch.items())} |"


def _death(death: Death) -> Iterator[str]:
    yield ""
    yield f"### `{death.id}`: {death.title}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| severity | {death.severity} |"
    for sign in death.signs:
        said = ", ".join(_SOURCES[letter] for letter in sign.source)
        harmless = "; also printed by jobs that go on" if sign.harmless else ""
        ends = f"; in a traceback that ends in `{_cell(sign.ends.pattern)}`" if sign.ends is not None else ""
        yield f"| line | `{_cell(sign.pattern.pattern)}` ({said}{harmless}{ends}) |"
    if not death.signs:
        yield "| known by | exit code, signal, counters and files, not by what it printed |"
    yield f"| fix | {_cell(death.fix)} |"


def _thresholds(cause: Cause) -> str:
    way = "at most" if cause.below else "from"
    named = (("info", cause.info_from), ("warning", cause.warn_from), ("critical", cause.critical_from))
    return ", ".join(f"{name} {way} {_number(value)}" for name, value in named if value is not None)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(verdicts(), end="")
