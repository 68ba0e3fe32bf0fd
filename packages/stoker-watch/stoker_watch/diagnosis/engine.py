"""All causes with their rules; runs them on a run's records and costs, weighs experiments, and sorts the findings.

The rules are in `causes/`, functions with the id of a row of `knowledge/causes.toml`. Those of costs explain a cost of
`costs.py`; each second of a cost is in at most one finding, that of the most exact cause that explains it. Those of
states (memory that grows, a loss that diverges, a GPU that is not used) look at the whole run. `notes.py` has what
needs no action; `reader.py` reads the records; `postmortem.py` explains an end.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from stoker_watch.diagnosis.causes import gpu, hang, host, input, learning, memory, mistakes, overhead, steps
from stoker_watch.diagnosis.causes.cause import COMMON_THRESHOLDS, Cause, cause_ids, common_threshold, find_cause
from stoker_watch.diagnosis.causes.explanation import Explanation, make_cost_finding
from stoker_watch.diagnosis.endings import endings
from stoker_watch.diagnosis.places.sampled import Cost
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.findings.finding import SEVERITIES, Evidence, Finding
from stoker_watch.runs import records
from stoker_watch.runs.schemas import Probe
from stoker_watch.storage.local_files import write_atomic

_TOPICS = (input, steps, learning, mistakes, memory, host, hang, overhead, gpu)
_RULES_BY_NAME: dict[str, Callable[..., object]] = {
    name: rule for topic in _TOPICS for name, rule in vars(topic).items()
}


def _rule_of(id: str) -> Callable[..., object]:
    """The function of a row of causes.toml. Raises LookupError with what is missing."""
    if id not in _RULES_BY_NAME:
        files = ", ".join(topic.__name__.rpartition(".")[2] for topic in _TOPICS)
        raise LookupError(
            f"causes.toml has a row [{id}], and no file of causes/ that the engine imports ({files}) has a function "
            f"{id}: write it, and add a new file to _TOPICS in {__name__} (docs/add-a-cause.md)"
        )
    return _RULES_BY_NAME[id]


RULES: tuple[tuple[Cause, Callable[..., object]], ...] = tuple((find_cause(id), _rule_of(id)) for id in cause_ids())
"""Of a cause that explains costs: (the run, a cost) → Explanation or None; of another one: (the run, its row) → Finding
or None. Both are pure functions; None also where a record that the rule needs is missing."""
CATALOG: dict[str, Cause] = {cause.id: cause for cause, _ in RULES}

_LAST = 2
"""`order` of a cause that delays all, and is no fault of the job."""


def diagnose(run_dir: Path) -> list[Finding]:
    """What ended a run that did not finish, after the leak of memory that led to it; then the critical findings, what
    will soon end it before what cost time; then the warnings, and last the findings with severity info; of each, the
    largest loss first. An end by request explains nothing that is wrong, so it follows the warnings; what the output
    shows of a job that did not fail follows all that cost time."""
    return run_rules(read_run(run_dir))


def run_rules(run: RunRecords) -> list[Finding]:
    """`diagnose` on records that are read already."""
    states = (rule(run, cause) for cause, rule in RULES if not cause.explains)
    of_states = [apply_probe_result(found, run.probes) for found in states if isinstance(found, Finding)]
    findings = _without_guesses([*explain_costs(run), *of_states])
    superseded = {
        other for found in findings if found.severity != "info"
        for other in CATALOG[found.id].supersedes if not (CATALOG[found.id].explains and CATALOG[other].explains)
    }  # fmt: skip
    remaining = sorted((found for found in findings if found.id not in superseded), key=_sort_key)
    ends = hang.explain_hang(run, list(run.endings), remaining)
    if not run.endings:  # it lives, or went well
        return [*ends, *remaining]
    return _with_ends(*learning.merge_divergence(run, ends, remaining))


def _with_ends(ends: list[Finding], others: list[Finding]) -> list[Finding]:
    """All findings in their order: what led to the end, the end, and the rest without what the end includes."""
    end, kind = ends[0], endings()[ends[0].id]
    if kind.role == "stop":
        before = [one for one in others if one.severity != "info" and CATALOG[one.id].order < _LAST]
    elif end.severity == "info":
        before = [
            one for one in others if (one.severity != "info" and CATALOG[one.id].order < _LAST) or one.lost_device_s
        ]
    else:
        before = [one for one in others if end.id in CATALOG[one.id].leads_to]
        included = {id for one in ends for id in endings()[one.id].includes}
        others = [one for one in others if one in before or not (CATALOG[one.id].is_end or one.id in included)]
    return [*before, *ends, *(one for one in others if one not in before)]


def explain_costs(run: RunRecords) -> list[Finding]:
    """The findings of all costs: of the causes that explain them, the most exact first. What is below the thresholds of
    one is left for less exact ones; so is what only info has, or what nothing but a guess explains."""
    costs = _OpenCosts(run.costs)
    findings: list[Finding] = []
    weak: list[tuple[Finding, list[int]]] = []
    for cause, rule in _by_exactness():
        groups: dict[tuple[str, str], list[tuple[int, Explanation]]] = {}
        for index in costs.open_to(cause):
            if isinstance(found := rule(run, run.costs[index]), Explanation):
                groups.setdefault((found.title, found.place), []).append((index, found))
        for group in groups.values():
            finding = make_cost_finding(
                run, cause, [(run.costs[index], costs.left[index], found) for index, found in group]
            )
            if finding is None:
                continue
            finding = apply_probe_result(finding, run.probes)
            if finding.severity == "info" or _is_guess(finding):
                weak.append((finding, [index for index, _ in group]))
                costs.guess(cause, (index for index, _ in group if finding.severity != "info"))
            else:
                findings.append(finding)
                costs.take(cause, group)
    return [*findings, *_weak_findings(run, weak, costs)]


class _OpenCosts:
    """What is left of the costs while causes explain them, one after the other."""

    def __init__(self, costs: Sequence[Cost]) -> None:
        self.costs = costs
        self.left = [cost.seconds for cost in costs]
        self.explained: list[set[str]] = [set() for _ in costs]
        self._guessed: list[set[str]] = [set() for _ in costs]

    def open_to(self, cause: Cause) -> list[int]:
        """Costs that the cause may explain: no more exact one does. A guess only holds off a cause that is more exact
        than none: that just says what the phase is."""
        found: list[int] = []
        for index, cost in enumerate(self.costs):
            more_exact = self.explained[index] | (self._guessed[index] if _exactness()[cause.id] == 1 else set())
            is_known = any(cause.id in CATALOG[other].supersedes for other in more_exact)
            if self.left[index] > 0 and not is_known and not {"*", cost.phase}.isdisjoint(cause.explains):
                found.append(index)
        return found

    def guess(self, cause: Cause, indices: Iterable[int]) -> None:
        for index in indices:
            self._guessed[index].add(cause.id)

    def take(self, cause: Cause, group: Iterable[tuple[int, Explanation]]) -> None:
        for index, found in group:
            self.left[index] -= found.saved * self.left[index]
            if not found.leaves_rest:
                self.explained[index].add(cause.id)

    def free_s(self, indices: Iterable[int]) -> float:
        """Seconds of some costs that nothing certain explains."""
        return sum(self.left[index] for index in indices if not self.explained[index])


def _is_guess(finding: Finding) -> bool:
    return finding.confidence is not None and finding.confidence < common_threshold("min_confidence")


def _weak_findings(run: RunRecords, weak: Sequence[tuple[Finding, list[int]]], costs: _OpenCosts) -> list[Finding]:
    """Info, and what guesses say of costs that nothing certain explains: what took the time is then the finding, and
    the causes are listed as possible, each with what would tell."""
    found: list[Finding] = []
    guesses: dict[str, list[tuple[Finding, list[int]]]] = {}
    for finding, indices in weak:
        if finding.lost_device_s and 2 * costs.free_s(indices) < finding.lost_device_s:
            continue
        if finding.severity == "info" or not finding.lost_device_s:
            found.append(msgspec.structs.replace(finding, severity="info"))
        else:
            guesses.setdefault(CATALOG[finding.id].reason, []).append((finding, indices))
    return [*found, *(overhead.possible_causes(run, group) for group in guesses.values())]


@functools.cache
def _exactness() -> dict[str, int]:
    """Cause of costs → how many causes it is more exact than, one above the other."""
    of_costs = {cause.id: cause for cause, _ in RULES if cause.explains}
    known: dict[str, int] = {}

    def level(id: str) -> int:
        if id not in known:
            known[id] = 1 + max((level(other) for other in of_costs[id].supersedes if other in of_costs), default=0)
        return known[id]

    return {id: level(id) for id in of_costs}


def _by_exactness() -> list[tuple[Cause, Callable[..., object]]]:
    levels = _exactness()
    rules = [(cause, rule) for cause, rule in RULES if cause.explains]
    return sorted(rules, key=lambda entry: (-levels.get(entry[0].id, 1), -entry[0].confidence, entry[0].id))


def _without_guesses(findings: Iterable[Finding]) -> list[Finding]:
    """No warning rests on evidence below `min_confidence`: without lost time it is info."""
    return [
        msgspec.structs.replace(finding, severity="info") if finding.severity != "info" and _is_guess(finding)
        and not finding.lost_device_s else finding
        for finding in findings
    ]  # fmt: skip


def _sort_key(finding: Finding) -> tuple[int, bool, int, float, str]:
    severity = SEVERITIES.index(finding.severity)
    is_imminent = finding.severity == "critical" and not finding.lost_device_s
    return severity, not is_imminent, CATALOG[finding.id].order, -(finding.lost_device_s or 0.0), finding.id


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
