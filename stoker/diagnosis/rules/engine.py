"""Asks every rule, weighs experiments, leaves out what says the same less exactly, and puts the findings in order."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.diagnosis import postmortem
from stoker.diagnosis.catalogue import CATALOG, common_threshold
from stoker.diagnosis.failure_signatures import UNEXPLAINED
from stoker.diagnosis.reader import read_run
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
from stoker.diagnosis.run_data import RunRecords
from stoker.runs import records
from stoker.runs.schemas import Evidence, Finding, Probe
from stoker.storage.local_files import write_atomic

Rule = Callable[[RunRecords], Finding | None]

_MODULES = (
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

RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in module.RULES)
"""Named as the causes they look for."""

_SEVERITIES = ("critical", "warning", "info")
_UNINFORMATIVE_ENDS = UNEXPLAINED | {"preempted", "interrupted"}
"""Ends that say how, and not why: a hang before them says more."""
_COVERED_CAUSES = {"disk_full": ("disk_nearly_full",)}
"""End → causes that it has said."""


def diagnose(run_dir: Path) -> list[Finding]:
    """What ended a run that did not finish; then what it lost and why: what is about to end it, then the largest loss
    first, then what cost no time, and last what is only told."""
    return run_rules(read_run(run_dir))


def run_rules(run: RunRecords) -> list[Finding]:
    """`diagnose` on records that are read already."""
    findings = [apply_probe_result(finding, run.probes) for rule in RULES if (finding := rule(run)) is not None]
    superseded = {other for finding in findings if finding.severity != "info" or _is_info_only(finding)
                for other in CATALOG[finding.cause].supersedes}  # fmt: skip
    remaining = sorted((finding for finding in findings if finding.cause not in superseded), key=_sort_key)
    end_findings = postmortem.explain(run.termination) if run.termination is not None else []
    if end_findings and end_findings[0].cause in _UNINFORMATIVE_ENDS:
        hung = [finding for finding in remaining if finding.cause == "hung"]
        return [*hung, *end_findings, *(finding for finding in remaining if finding.cause != "hung")]
    failure_ids = {finding.cause for finding in end_findings}
    covered = (
        {"hung"} | {cause for failure_id in failure_ids for cause in _COVERED_CAUSES.get(failure_id, ())}
        if failure_ids
        else set()
    )
    return end_findings + [finding for finding in remaining if finding.cause not in covered]


def _is_info_only(finding: Finding) -> bool:
    """Whether its cause is never more than info, so that it replaces others though it is."""
    cause = CATALOG[finding.cause]
    return cause.warning_threshold is None and cause.critical_threshold is None


def _sort_key(finding: Finding) -> tuple[int, float, int, str]:
    lost_s, severity = finding.lost_device_s or 0.0, _SEVERITIES.index(finding.severity)
    if finding.severity == "info":
        rank = 3
    elif not lost_s:
        rank = 0 if finding.severity == "critical" else 2
    else:
        rank = 1
    return rank, -lost_s, severity, finding.cause


def apply_probe_result(finding: Finding, probes: dict[str, Probe]) -> Finding:
    """With what an experiment says of its cause, where there was one: it confirms, refutes, or leaves it open."""
    probe_kind = CATALOG[finding.cause].probe
    probe = probes.get(probe_kind)
    if probe is None:
        return finding
    text = (
        f"{probe_kind.replace('_', ' ')}: {probe.before_img_per_s:,.1f} img/s before, {probe.after_img_per_s:,.1f} after, "
        f"{probe.ratio:.2f} times (90 %: {probe.ratio_low:.2f} to {probe.ratio_high:.2f}) in {probe.steps} steps"
    )
    evidence = [*finding.evidence, Evidence(text=text, value=probe.ratio, source="probes.jsonl")]
    if probe.ratio_low >= common_threshold("confirmed"):
        confidence = max(finding.confidence or 0.0, common_threshold("confirmed_to"))
        return msgspec.structs.replace(
            finding, evidence=evidence, confidence=confidence, probe_result=f"confirmed by {text}"
        )
    fractions = [line.value for line in finding.evidence[:1] if line.value is not None and 0 < line.value < 1]
    expected_gain = 1 / (1 - fractions[0]) - 1 if fractions else 0.0
    if probe.ratio_high - 1 < common_threshold("refuted") * expected_gain:
        return msgspec.structs.replace(finding, evidence=evidence, severity="info", confidence=common_threshold("refuted_to"),
                                       probe_result=f"refuted by {text}")  # fmt: skip
    return msgspec.structs.replace(finding, evidence=evidence)


def write_findings(run_dir: Path, findings: list[Finding]) -> None:
    """Replaces findings.json of the run."""
    write_atomic(run_dir / records.FINDINGS, msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")
