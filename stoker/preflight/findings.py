"""What a probe of `stoker check` has found.

A probe is a function that returns findings, worst or not. What it could not find out is a finding of severity
`unknown`, with the reason: never an exception, never silence.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

Severity = Literal["blocker", "warning", "unknown", "ok"]
"""blocker: training would fail, or would silently not do what was asked; warning: it would be slower, cost more or be
at risk; unknown: could not be found out here; ok: tested, and in order."""
SEVERITIES: tuple[Severity, ...] = ("blocker", "warning", "unknown", "ok")
"""Worst first."""


class CheckFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One tested thing."""

    id: str
    """cpu_only_build; stable, for scripts."""
    severity: Severity
    title: str
    """One clause, with the figure that matters."""
    evidence: str
    """What was measured or read, and from where."""
    fix: str = ""
    """A command or a change; empty if nothing is to be done."""
    place: str = ""
    """FILE:LINE, an environment variable, a device; empty for the machine as a whole."""


def make_finding(
    id: str, severity: Severity, title: str, evidence: str, fix: str = "", place: str = ""
) -> CheckFinding:
    """A CheckFinding, from its parts in their order."""
    return CheckFinding(id=id, severity=severity, title=title, evidence=evidence, fix=fix, place=place)


def ok(id: str, title: str, evidence: str, place: str = "") -> CheckFinding:
    return make_finding(id, "ok", title, evidence, place=place)


def unknown(id: str, title: str, evidence: str, fix: str = "") -> CheckFinding:
    return make_finding(id, "unknown", title, evidence, fix)


def worst_first(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """By severity, otherwise in the order found."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
