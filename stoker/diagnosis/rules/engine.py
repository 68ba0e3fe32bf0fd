"""Asks every rule, weighs experiments, leaves out what says the same less exactly, and puts the findings in order."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.diagnosis import postmortem
from stoker.diagnosis.catalogue import CATALOGUE, common
from stoker.diagnosis.failure_signatures import UNEXPLAINED
from stoker.diagnosis.reader import read
from stoker.diagnosis.rules import (
    allocation,
    communication,
    data_loading,
    gpus,
    imminent_failure,
    learning,
    memory,
    observability,
    parallel_work,
)
from stoker.diagnosis.run_data import Records
from stoker.runs import records
from stoker.runs.schemas import Evidence, Finding, Probe
from stoker.storage.local_files import write_whole

Rule = Callable[[Records], Finding | None]

_FILES = (
    data_loading,
    parallel_work,
    learning,
    memory,
    communication,
    allocation,
    gpus,
    observability,
    imminent_failure,
)

RULES: tuple[Rule, ...] = tuple(rule for file in _FILES for rule in file.RULES)
"""Named as the causes they look for."""

_SEVERITIES = ("critical", "warning", "info")
_WORDLESS = UNEXPLAINED | {"preempted", "interrupted"}
"""Ends that say how, and not why: a hang before them says more."""
_SAID_BY = {"disk_full": ("disk_nearly_full",)}
"""End → causes that it has said."""


def diagnose(run: Path) -> list[Finding]:
    """What ended a run that did not finish; then what it lost and why: what is about to end it, then the largest loss
    first, then what cost no time, and last what is only told."""
    return judge(read(run))


def judge(seen: Records) -> list[Finding]:
    """`diagnose` on records that are read already."""
    judged = [weigh(finding, seen.probes) for rule in RULES if (finding := rule(seen)) is not None]
    left_out = {other for finding in judged if finding.severity != "info" or _is_told_only(finding)
                for other in CATALOGUE[finding.cause].over}  # fmt: skip
    rest = sorted((finding for finding in judged if finding.cause not in left_out), key=_order)
    died = postmortem.explain(seen.ended) if seen.ended is not None else []
    if died and died[0].cause in _WORDLESS:
        hung = [finding for finding in rest if finding.cause == "hung"]
        return [*hung, *died, *(finding for finding in rest if finding.cause != "hung")]
    ended_by = {finding.cause for finding in died}
    said = {"hung"} | {cause for end in ended_by for cause in _SAID_BY.get(end, ())} if ended_by else set()
    return died + [finding for finding in rest if finding.cause not in said]


def _is_told_only(finding: Finding) -> bool:
    """Whether its cause is never more than info, so that it replaces others though it is."""
    cause = CATALOGUE[finding.cause]
    return cause.warn_from is None and cause.critical_from is None


def _order(finding: Finding) -> tuple[int, float, int, str]:
    lost_s, severity = finding.lost_device_s or 0.0, _SEVERITIES.index(finding.severity)
    if finding.severity == "info":
        rank = 3
    elif not lost_s:
        rank = 0 if finding.severity == "critical" else 2
    else:
        rank = 1
    return rank, -lost_s, severity, finding.cause


def weigh(finding: Finding, probes: dict[str, Probe]) -> Finding:
    """With what an experiment says of its cause, where there was one: it confirms, refutes, or leaves it open."""
    what = CATALOGUE[finding.cause].probe
    probe = probes.get(what)
    if probe is None:
        return finding
    text = (
        f"{what.replace('_', ' ')}: {probe.before_img_per_s:,.1f} img/s before, {probe.after_img_per_s:,.1f} after, "
        f"{probe.ratio:.2f} times (90 %: {probe.ratio_low:.2f} to {probe.ratio_high:.2f}) in {probe.steps} steps"
    )
    evidence = [*finding.evidence, Evidence(text=text, value=probe.ratio, place="probes.jsonl")]
    if probe.ratio_low >= common("confirmed"):
        confidence = max(finding.confidence or 0.0, common("confirmed_to"))
        return msgspec.structs.replace(
            finding, evidence=evidence, confidence=confidence, verified=f"confirmed by {text}"
        )
    shares = [line.value for line in finding.evidence[:1] if line.value is not None and 0 < line.value < 1]
    hoped = 1 / (1 - shares[0]) - 1 if shares else 0.0
    if probe.ratio_high - 1 < common("refuted") * hoped:
        return msgspec.structs.replace(finding, evidence=evidence, severity="info", confidence=common("refuted_to"),
                                       verified=f"refuted by {text}")  # fmt: skip
    return msgspec.structs.replace(finding, evidence=evidence)


def write_findings(run: Path, findings: list[Finding]) -> None:
    """Replaces findings.json of the run."""
    write_whole(run / records.FINDINGS, msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")
