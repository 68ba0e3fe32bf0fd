"""All causes with their rules; runs them on a run's records, weighs experiments, leaves out superseded causes, and
sorts the findings.

The rules are in `causes/`, functions with the id of a row of `knowledge/causes.toml`; `notes.py` has what needs no
action; `reader.py` reads the records; `postmortem.py` explains an end.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker_watch.diagnosis import postmortem
from stoker_watch.diagnosis.causes import gpu, host, input, learning, mistakes, overhead, steps
from stoker_watch.diagnosis.causes.cause import COMMON_THRESHOLDS, Cause, cause_ids, common_threshold, find_cause
from stoker_watch.diagnosis.endings import UNEXPLAINED, endings
from stoker_watch.diagnosis.places.costly import describe_place, has_workers, list_places
from stoker_watch.diagnosis.places.loading import count_blocked
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.findings.finding import SEVERITIES, Evidence, Finding
from stoker_watch.runs import records
from stoker_watch.runs.schemas import WITHOUT_GRADIENTS, Probe
from stoker_watch.storage.local_files import write_atomic

Rule = Callable[[RunRecords, Cause], Finding | None]
"""A pure function: a run's records and the row of the cause in, a finding out. None: the cause is not there, or a
record that the rule needs is missing."""

_TOPICS = (input, steps, learning, mistakes, host, overhead, gpu)
_RULES_BY_NAME = {name: rule for topic in _TOPICS for name, rule in vars(topic).items()}
RULES: tuple[tuple[Cause, Rule], ...] = tuple((find_cause(id), _RULES_BY_NAME[id]) for id in cause_ids())
CATALOG: dict[str, Cause] = {cause.id: cause for cause, _ in RULES}

_COVERED_CAUSES = {"disk_full": ("disk_nearly_full",)}
"""Failure id → causes that it includes."""
_LOADING_KINDS = ("input_wait", "decode")
_NO_EVALUATION = re.compile(
    r"(shutil|zipfile|tarfile|gzip|bz2|lzma|subprocess|os|time|socket|smtplib|ftplib|requests|urllib|boto3|botocore"
    r"|google\.cloud|wandb|mlflow|torch\.(jit|onnx|export))\."
)
"""Calls that evaluate nothing: archives, other programs, waits, transfers, exports of a model."""
_MEMORY_ENDINGS = ("oom_killed", "host_out_of_memory")
"""Endings that a leak of host memory explains: it then comes before them."""


def diagnose(run_dir: Path) -> list[Finding]:
    """What ended a run that did not finish, after the leak of memory that led to it; then the critical findings, what
    will soon end it before what cost time; then the warnings, and last the findings with severity info; of each, the
    largest loss first. An end by request explains nothing that is wrong, so it follows the warnings; what the output
    shows of a job that did not fail follows all that cost time."""
    return run_rules(read_run(run_dir))


def run_rules(run: RunRecords) -> list[Finding]:
    """`diagnose` on records that are read already."""
    end_findings = postmortem.explain(run.termination) if run.termination is not None else []
    run.ended_for_memory = bool(end_findings) and end_findings[0].id in _MEMORY_ENDINGS
    findings = [
        apply_probe_result(finding, run.probes) for cause, rule in RULES if (finding := rule(run, cause)) is not None
    ]
    findings = _without_guesses(run, findings)
    superseded = {
        other.id for finding in findings if finding.severity != "info"
        for other in findings if _supersedes(run, finding, other)
    }  # fmt: skip
    remaining = sorted((finding for finding in findings if finding.id not in superseded), key=_sort_key)
    if remaining and remaining[0].id == "python_bound":  # often in the nature of a program; a mistake never is
        severity = remaining[0].severity
        mistakes = [one for one in remaining if one.id == "training_mistake" and one.severity == severity]
        remaining = [*mistakes, *(one for one in remaining if one not in mistakes)]
    if end_findings and end_findings[0].id == "hang":
        shown = msgspec.structs.replace(end_findings[0], evidence=end_findings[0].evidence + host.stuck_evidence(run))
        end_findings[0] = host.name_stuck(run, shown)
    end_findings, remaining = _merge_divergence(run, end_findings, remaining)
    if not end_findings:
        if any(finding.id == "hung" for finding in remaining):
            explained = postmortem.explain_hang(run.read_output(), has_stepped=run.totals.steps > 0)
            return [*explained, *remaining]
        return remaining
    is_stop, is_info = endings()[end_findings[0].id].role == "stop", end_findings[0].severity == "info"
    if is_stop or is_info:
        faults = [
            finding for finding in remaining
            if (finding.severity != "info" and finding.id != "cpu_contention")
            or (is_info and not is_stop and finding.lost_device_s)
        ]  # fmt: skip
        return [*faults, *end_findings, *(finding for finding in remaining if finding not in faults)]
    if end_findings[0].id in UNEXPLAINED:
        hung = [finding for finding in remaining if finding.id == "hung"]
        return [*hung, *end_findings, *(finding for finding in remaining if finding.id != "hung")]
    covered = {"hung"}
    for end_finding in end_findings:
        covered.update(_COVERED_CAUSES.get(end_finding.id, ()))
    leaks = [finding for finding in remaining if run.ended_for_memory and finding.id == "host_memory_leak"]
    return [*leaks, *end_findings, *(f for f in remaining if f.id not in covered and f not in leaks)]


def _merge_divergence(
    run: RunRecords, ends: list[Finding], others: list[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """The loss that the output shows to be NaN or infinite is the one that the records know more of: one finding."""
    lost = next((finding for finding in others if finding.id == "non_finite_loss"), None)
    ended = next((finding for finding in ends if finding.id == "diverged"), None)
    sudden, fix = learning.find_sudden(run)
    if lost is None and ended is not None and ended.severity == "critical" and sudden is not None:
        merged = msgspec.structs.replace(ended, evidence=[*ended.evidence, sudden], fix=fix)
        return [merged if end is ended else end for end in ends], others
    if lost is None or ended is None or ended.severity != lost.severity:
        return ends, others
    merged = msgspec.structs.replace(lost, id=ended.id, title=ended.title, evidence=[*ended.evidence, *lost.evidence])
    return [merged if end is ended else end for end in ends], [other for other in others if other is not lost]


def _supersedes(run: RunRecords, finding: Finding, other: Finding) -> bool:
    """Whether a finding takes the place of another one: its row says so, and this run's records do."""
    return other.id in CATALOG[finding.id].supersedes and _explains(run, finding, other)


def _explains(run: RunRecords, finding: Finding, other: Finding) -> bool:
    """Whether a finding is the reason of the time that a less exact one has lost. A line is so if who loads the data is
    there for most of it. A line that reads is explained by slow storage."""
    is_most = (finding.lost_device_s or 0.0) >= (other.lost_device_s or 0.0) / 2
    if finding.id == "workers_start_again" and run.steady.worker_starts:  # by the clock, not a part seen by chance
        return is_most
    if finding.id == "straggler" and other.id == "communication_bound":  # waiting for a rank, and exchanging gradients
        return is_most
    if finding.id in ("straggler", "python_bound") and other.id == "heavy_place":
        return bool(other.place) and other.place == finding.place
    if other.id == "evaluation_heavy":  # its clock goes up to the next step of training
        calls = (place.call for place in run.places if place.line == finding.place and not place.is_startup)
        return is_most and any(map(_NO_EVALUATION.match, calls))
    if other.id == "heavy_place":
        here = [place for place in run.places if place.line == other.place and not place.is_startup]
        return 2 * sum(map(count_blocked, here)) > sum(place.samples for place in here)
    if finding.id != "heavy_place" or not finding.place:
        return finding.id != "heavy_place" or other.id != "slow_decode"
    here = [place for place in run.places if finding.place in (place.line, *place.callers.split(" < "))]
    loads = any(place.role != "training" or place.kind in _LOADING_KINDS for place in here)
    despite_workers = has_workers(run) and all(place.role == "training" for place in here)
    if other.id == "slow_decode" and not despite_workers:  # a line of the job's own, not one that reads images
        loads = loads and 2 * sum(map(count_blocked, here)) <= sum(place.samples for place in here)
    return loads and is_most


def _without_guesses(run: RunRecords, findings: list[Finding]) -> list[Finding]:
    """No warning rests on evidence below `min_confidence`: what took the time is then the finding, and the causes are
    listed as possible, each with what would tell. Without lost time it is info. A guess is left out if a certain
    finding of the same reason has at least as much of the lost time, or one has its place."""
    minimum = common_threshold("min_confidence")
    kept, guesses = list[Finding](), dict[str, list[Finding]]()
    for finding in findings:
        if finding.severity == "info" or finding.confidence is None or finding.confidence >= minimum:
            kept.append(finding)
        elif not finding.lost_device_s:
            kept.append(msgspec.structs.replace(finding, severity="info"))
        else:
            guesses.setdefault(CATALOG[finding.id].reason, []).append(finding)
    certain = [finding for finding in kept if finding.severity != "info"]
    for reason, group in guesses.items():
        less_exact = {id for finding in group for id in CATALOG[finding.id].supersedes}
        group.sort(key=lambda finding: (finding.id in less_exact, -(finding.confidence or 0.0)))
        possible = _possible_causes(run, group, loads=reason == "data loading")
        is_told = any(
            CATALOG[finding.id].reason == reason
            and (finding.lost_device_s or 0.0) >= (possible.lost_device_s or 0.0)
            and not _supersedes(run, possible, finding)
            for finding in certain
        )
        is_told |= any(finding.place == possible.place != "" for finding in certain)
        is_explained = any(_supersedes(run, finding, guess) for finding in certain for guess in group)
        if not is_told and not is_explained:
            kept.append(possible)
    return kept


def _possible_causes(run: RunRecords, group: list[Finding], *, loads: bool) -> Finding:
    """The place of some uncertain findings: a line, if stacks show one, else the phase."""
    first = max(group, key=lambda finding: finding.lost_device_s or 0.0)
    place = next((place for place in list_places(run) if place.low_s > 0 and place.kind != WITHOUT_GRADIENTS
                  and loads == (place.role != "training" or place.kind in _LOADING_KINDS)), None)  # fmt: skip
    sources = [item.source.partition("phases.")[2] for item in first.evidence]
    where = next((f"the phase {name}" for name in sources if name), "the training thread")
    if place is not None:
        where = describe_place(place)
    severity = min((guess.severity for guess in group), key=SEVERITIES.index)
    if (first.lost_device_s or 0.0) < common_threshold("min_guessed_fraction") * run.steady_device_s:
        severity = "info"  # neither certain nor large
    told = [
        f"{guess.title} ({guess.confidence or 0:.0%}; it is so if {CATALOG[guess.id].tell}; then: {guess.fix})"
        for guess in group
    ]
    return msgspec.structs.replace(
        first,
        id="heavy_place",
        title=f"{first.lost_device_s or 0:,.0f} s in {where}; the cause is not certain",
        severity=severity,
        evidence=list({item.text: item for guess in group for item in guess.evidence}.values()),
        fix="Possible causes: " + "; ".join(told),
        command=None,
        config_patch={},
        confidence=None,  # the seconds are certain, and what they are of is not
        place="" if place is None else place.line,
    )


def _sort_key(finding: Finding) -> tuple[int, bool, bool, float, str]:
    """What other processes took is a part of the time of every phase, and no fault of the job: it is the last of its
    severity."""
    severity = SEVERITIES.index(finding.severity)
    is_imminent = finding.severity == "critical" and not finding.lost_device_s
    delays_all = finding.id == "cpu_contention"
    return severity, not is_imminent, delays_all, -(finding.lost_device_s or 0.0), finding.id


def apply_probe_result(finding: Finding, probes: dict[str, Probe]) -> Finding:
    """The finding with the result of the experiment for its cause, if there was one: confirmed, refuted, or open."""
    probe_kind = CATALOG[finding.id].probe
    probe = probes.get(probe_kind)
    if probe is None:
        return finding
    text = (
        f"{probe_kind.replace('_', ' ')}: {probe.before_img_per_s:,.1f} img/s before, {probe.after_img_per_s:,.1f} "
        f"after, {probe.ratio:.2f} times (95 %: {probe.ratio_low:.2f} to {probe.ratio_high:.2f}) in {probe.steps} steps"
    )
    evidence = [*finding.evidence, Evidence(text=text, value=probe.ratio, source="probes.jsonl")]
    if probe.ratio_low >= common_threshold("confirmed"):
        confidence = max(finding.confidence or 0.0, common_threshold("confirmed_confidence"))
        return msgspec.structs.replace(
            finding, evidence=evidence, confidence=confidence, probe_result=f"confirmed by {text}"
        )
    fractions = [line.value for line in finding.evidence[:1] if line.value is not None and 0 < line.value < 1]
    expected_gain = 1 / (1 - fractions[0]) - 1 if fractions else 0.0
    if probe.ratio_high - 1 < common_threshold("refuted") * expected_gain:
        return msgspec.structs.replace(
            finding,
            evidence=evidence,
            severity="info",
            confidence=common_threshold("refuted_confidence"),
            probe_result=f"refuted by {text}",
        )
    return msgspec.structs.replace(finding, evidence=evidence)


def write_findings(run_dir: Path, findings: list[Finding]) -> None:
    write_atomic(run_dir / records.FINDINGS, msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")


def catalog_hash() -> str:
    """12 hex digits of the SHA-256 of all causes and common thresholds: equal hashes mean equal thresholds."""
    data = {"causes": sorted(CATALOG.values(), key=lambda cause: cause.id), "common": COMMON_THRESHOLDS}
    return hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()[:12]
