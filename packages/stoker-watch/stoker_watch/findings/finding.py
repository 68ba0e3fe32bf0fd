"""What a command found: `why`, `check`, `data check`, the report and the alerts all return `Finding`s.

A rule takes facts and returns findings, worst or not; what it could not find out is a finding of severity `unknown` or
none, never an exception. Printing is in `stoker_watch/report/findings_terminal.py`; what an id means, in
`stoker_watch/diagnosis/reference.py`.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

Severity = Literal["blocker", "critical", "warning", "info", "unknown", "ok"]
"""Worst first. blocker: training would fail, or would silently not do what was asked; critical: the job failed, will
soon, or loses much; warning: slower, dearer or at risk; info: worth knowing; unknown: could not be found out here; ok:
tested, and in order."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A number, and where in the records it stands."""

    text: str
    """What was measured."""
    value: float | None = None
    """The number."""
    source: str = ""
    """File and field of the record."""

    def __post_init__(self) -> None:
        _mask(self, "text")  # it may quote the output of a job


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was found. In JSON, `id` is called `cause`."""

    id: str = msgspec.field(name="cause")
    """Stable, for scripts; `stoker why --explain ID` explains it."""
    severity: Severity
    """blocker, critical, warning, info, unknown or ok."""
    title: str
    """One sentence."""
    evidence: list[Evidence] = []
    """Measurements that support it."""
    lost_device_s: float | None = None
    """Device-seconds that this cause took."""
    lost_cost: float | None = None
    """The same in money."""
    fix: str = ""
    """What to do; empty: nothing."""
    command: str | None = None
    """Command that does it."""
    confidence: float | None = None
    """Confidence in the cause, 0 … 1."""
    probe_result: str | None = None
    """Result of an experiment: before and after."""
    config_patch: dict[str, Any] = {}
    """Settings of config.toml that fix it, by name."""
    place: str = ""
    """FILE:LINE, an environment variable, a device, a field of a record; empty: the whole run or machine."""

    def __post_init__(self) -> None:
        _mask(self, "title", "place")

    @property
    def evidence_text(self) -> str:
        """All evidence in one line, without its sources."""
        return "; ".join(item.text for item in self.evidence)

    @property
    def extra_command(self) -> str | None:
        """The command, unless the text of the fix contains it."""
        return self.command if self.command and self.command not in self.fix else None


def _mask(struct: msgspec.Struct, *names: str) -> None:
    from stoker_watch.secrets import mask_secrets  # its patterns cost time, and the command line imports this module

    for name in names:
        msgspec.structs.force_setattr(struct, name, mask_secrets(getattr(struct, name)))


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """By severity, otherwise in the order found."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
