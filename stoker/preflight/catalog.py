"""How probes of `stoker check` make findings: from the texts of `knowledge/check_machine.toml` and `check_files.toml`.

A probe is a function that returns findings, worst or not. What it could not find out is a finding of severity
`unknown`, with the reason: never an exception, never silence.

A row has the severity and the texts of one finding, with {names} for what the probe has measured or read. Where an id
has several texts, its rows are called id/variant. What is measured and when a finding is made is in the probes.
"""

from functools import cache

import msgspec

from stoker.findings.finding import Evidence, Finding, Severity
from stoker.knowledge import read_toml


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The texts of a finding."""

    title: str
    evidence: str = ""
    fix: str = ""
    severity: Severity = "warning"


@cache
def machine_rows() -> dict[str, Row]:
    return msgspec.convert(read_toml("check_machine.toml"), dict[str, Row])


@cache
def file_rows() -> dict[str, Row]:
    return msgspec.convert(read_toml("check_files.toml"), dict[str, Row])


def describe(name: str, place: str = "", /, *, severity: Severity | None = None, **values: object) -> Finding:
    """The finding of a row about the machine. name: id, or id/variant; severity: where it is not the row's own."""
    return _fill(machine_rows()[name], name, place, severity, values)


def describe_file(name: str, place: str = "", /, *, severity: Severity | None = None, **values: object) -> Finding:
    """The finding of a row about a Dockerfile, requirements or a script."""
    return _fill(file_rows()[name], name, place, severity, values)


def _fill(row: Row, name: str, place: str, severity: Severity | None, values: dict[str, object]) -> Finding:
    title, evidence, fix = (text.format(**values) for text in (row.title, row.evidence, row.fix))
    return make_finding(name.partition("/")[0], severity or row.severity, title, evidence, fix, place)


def make_finding(id: str, severity: Severity, title: str, evidence: str, fix: str = "", place: str = "") -> Finding:
    """A finding from its parts in their order. evidence: what was measured or read, and from where; may be empty."""
    items = [Evidence(text=evidence)] if evidence else []
    return Finding(id=id, severity=severity, title=title, evidence=items, fix=fix, place=place)


def ok(id: str, title: str, evidence: str, place: str = "") -> Finding:
    return make_finding(id, "ok", title, evidence, place=place)


def unknown(id: str, title: str, evidence: str, fix: str = "") -> Finding:
    return make_finding(id, "unknown", title, evidence, fix)
