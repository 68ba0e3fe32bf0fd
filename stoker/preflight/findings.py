"""Helpers with which probes of `stoker check` make their findings.

A probe is a function that returns findings, worst or not. What it could not find out is a finding of severity
`unknown`, with the reason: never an exception, never silence.
"""

from stoker.findings.finding import Evidence, Finding, Severity, worst_first

__all__ = ["Finding", "Severity", "make_finding", "ok", "unknown", "worst_first"]


def make_finding(id: str, severity: Severity, title: str, evidence: str, fix: str = "", place: str = "") -> Finding:
    """A finding from its parts in their order. evidence: what was measured or read, and from where; may be empty."""
    items = [Evidence(text=evidence)] if evidence else []
    return Finding(id=id, severity=severity, title=title, evidence=items, fix=fix, place=place)


def ok(id: str, title: str, evidence: str, place: str = "") -> Finding:
    return make_finding(id, "ok", title, evidence, place=place)


def unknown(id: str, title: str, evidence: str, fix: str = "") -> Finding:
    return make_finding(id, "unknown", title, evidence, fix)
