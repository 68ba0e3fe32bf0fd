"""Looks for the causes of `catalogue.py` in a run's records: pure functions, records in, findings out.

A rule abstains (None) when what it looks for is not there, or when a record that it needs is missing: missing is not
zero. `read` sums the records up line by line, in bounded memory; `judge` asks every rule. What ended a run that neither
lives nor finished is `postmortem.py`.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker import records
from stoker.diagnose import postmortem
from stoker.diagnose.catalogue import CATALOGUE, IDLE_CORES_BELOW, SATURATED_FROM, STARTUP_LEAST_S
from stoker.files import write_whole
from stoker.schemas import DeviceSample, Event, Evidence, Finding, Quarantined, StepWindow
from stoker.storage.address import is_address
from stoker.totals import Totals, totals

_SHOWN = 3
"""Names that a finding's evidence lists at most."""


@dataclasses.dataclass(kw_only=True)
class Mean:
    """A mean of the samples that exist; None without any."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclasses.dataclass(kw_only=True)
class Records:
    """What the rules look at: sums, means and maxima over all attempts of a run. None: nobody recorded it."""

    totals: Totals
    price: float = 0.0
    """Money per device-hour; 0: unknown."""
    from_bucket: bool = False
    """The pictures lie in a bucket."""
    cached: bool = False
    """Decoded pictures are kept (`--cache`)."""
    threads_tuned: bool = False
    """The loader finds the number of its threads by itself (`--threads 0`)."""
    watched: bool = False
    """A job that stoker did not write: its phases are known only where its output tells them."""
    skipped: int = 0
    memory_peak_bytes: int | None = None
    checkpoint_failures: list[str] = dataclasses.field(default_factory=list)
    learning: dict[str, list[Event]] = dataclasses.field(default_factory=dict)
    """Kind → events about the loss and the rate, each of which is news."""
    quarantined: dict[str, str] = dataclasses.field(default_factory=dict)
    """Path → error."""
    host_memory: float | None = None
    """Most memory in use, share of the limit."""
    cpu_busy: Mean = dataclasses.field(default_factory=Mean)
    """Share of the cores."""
    cpu_others: Mean = dataclasses.field(default_factory=Mean)
    """Share of the cores that processes outside this run used."""
    psi_cpu: Mean = dataclasses.field(default_factory=Mean)
    withheld: Mean = dataclasses.field(default_factory=Mean)
    """Share of the processor time that this run wanted and its quota did not give."""
    gpu_busy: Mean = dataclasses.field(default_factory=Mean)
    """The driver's utilisation, of samples that show just the devices that train."""
    gpu_memory_bytes: int | None = None
    """Of the smallest GPU."""
    ended: postmortem.Ended | None = None
    """What is known of its end, where it neither lives nor finished."""

    def share(self, *phases: str) -> float:
        """Of all device time."""
        return self.seconds(*phases) / self.totals.device_s if self.totals.device_s > 0 else 0.0

    def seconds(self, *phases: str) -> float:
        return sum(self.totals.phases.get(phase, 0.0) for phase in phases)


def read(run: Path, price: float | None = None) -> Records:
    """The records of a run, live, dead or finished. price: money per device-hour, instead of the run's own setting."""
    settings = records.read_settings(run) or {}  # without their schema: a run of another version has them there too
    of_run = settings.get("run", {})
    seen = Records(
        totals=totals(run),
        price=float(of_run.get("price", 0.0)) if price is None else price,
        from_bucket=is_address(str(settings.get("data", {}).get("data", ""))),
        cached=of_run.get("cache", "none") != "none",
        threads_tuned=of_run.get("threads") == 0,
        ended=postmortem.of_run(run),
    )
    for window in records.read_lines(run, records.STEPS, StepWindow):
        seen.skipped += window.skipped
        if window.memory_peak_bytes is not None:
            seen.memory_peak_bytes = max(seen.memory_peak_bytes or 0, window.memory_peak_bytes)
    for event in records.read_lines(run, records.EVENTS, Event):
        seen.watched |= "watched" in event.data
        if event.kind == "checkpoint_failed":
            seen.checkpoint_failures.append(event.text)
        elif event.kind in records.LEARNING_KINDS:
            seen.learning.setdefault(event.kind, []).append(event)
    for line in records.read_lines(run, records.QUARANTINE, Quarantined):
        seen.quarantined[line.path] = line.error
    for sample in records.read_lines(run, records.DEVICES, DeviceSample):
        _add_sample(seen, sample)
    return seen


def _add_sample(seen: Records, sample: DeviceSample) -> None:
    if sample.memory_used_bytes is not None and sample.memory_limit_bytes:
        seen.host_memory = max(seen.host_memory or 0.0, sample.memory_used_bytes / sample.memory_limit_bytes)
    if sample.cpu:
        busy = sum(sample.cpu) / len(sample.cpu)
        seen.cpu_busy.add(busy)
        if sample.process_cpu is not None:
            seen.cpu_others.add(max(0.0, busy - sample.process_cpu / len(sample.cpu)))
    seen.psi_cpu.add(sample.psi_cpu)
    if sample.throttled_s is not None and sample.process_cpu is not None:
        wanted = sample.throttled_s + sample.process_cpu
        seen.withheld.add(sample.throttled_s / wanted if wanted > 0 else 0.0)
    if len(sample.gpus) == seen.totals.devices:
        for gpu in sample.gpus:
            seen.gpu_busy.add(gpu.utilisation)
    totals = [gpu.memory_total_bytes for gpu in sample.gpus if gpu.memory_total_bytes]
    if totals:
        seen.gpu_memory_bytes = min([*totals, *([seen.gpu_memory_bytes] if seen.gpu_memory_bytes else [])])


Rule = Callable[[Records], Finding | None]


def input_bound(seen: Records) -> Finding | None:
    evidence = [_phase(seen, "input_wait")]
    stages, waited_s = seen.totals.input, seen.seconds("input_wait")
    largest = max(stages, key=lambda stage: stages[stage], default="")
    if largest and waited_s > 0:
        share = stages[largest] / waited_s
        what = {"fetch": "the bucket" if seen.from_bucket else "reading files", "decode": "decoding and resizing"}
        text = f"of this {100 * share:.0f} % {largest}" + (f": {what[largest]}" if largest in what else "")
        evidence.append(Evidence(text=text, value=share, place=f"steps.jsonl: input.{largest}"))
    busy = seen.cpu_busy.value
    if busy is not None:
        text = f"the cores were {100 * busy:.0f} % busy"
        evidence.append(Evidence(text=text, value=busy, place="devices.jsonl: cpu"))
    hint = ""
    if largest == "fetch":
        where = "a bucket in the machine's own region" if seen.from_bucket else "a faster disk"
        first = f"{where} comes" if seen.cached else f"{where} or --cache comes"
        hint = f"; most of the wait is for bytes here, so {first} first"
    elif busy is not None and busy >= IDLE_CORES_BELOW:
        hint = "; the cores are busy here, so more --threads do not help"
    elif busy is not None and not seen.threads_tuned:
        hint = "; cores are idle here, so more --threads come first, or --threads 0, which finds their number"
    return _finding(seen, "input_bound", seen.share("input_wait"), evidence, lost_s=waited_s, more_fix=hint)


def starved_inside_steps(seen: Records) -> Finding | None:
    busy = seen.gpu_busy.value
    if busy is None:
        return None
    gap = seen.share("compute") - busy
    evidence = [
        _phase(seen, "compute"),
        Evidence(
            text=f"the driver saw kernels {100 * busy:.0f} % of the time", value=busy, place="devices.jsonl: gpus"
        ),
    ]
    return _finding(seen, "starved_inside_steps", gap, evidence, lost_s=gap * seen.totals.device_s)


def startup_heavy(seen: Records) -> Finding | None:
    seconds = seen.seconds("startup", "compile")
    if seconds < STARTUP_LEAST_S:
        return None
    evidence = [_phase(seen, "startup"), _phase(seen, "compile"), _attempts(seen)]
    return _finding(seen, "startup_heavy", seen.share("startup", "compile"), evidence, lost_s=seconds)


def evaluation_heavy(seen: Records) -> Finding | None:
    return _of_phase(seen, "evaluation_heavy", "eval")


def checkpoint_heavy(seen: Records) -> Finding | None:
    return _of_phase(seen, "checkpoint_heavy", "checkpoint")


def unattributed_time(seen: Records) -> Finding | None:
    return None if seen.watched else _of_phase(seen, "unattributed_time", "unattributed")


def work_lost_to_restarts(seen: Records) -> Finding | None:
    evidence = [_phase(seen, "recovery"), _attempts(seen)]
    return _finding(seen, "work_lost_to_restarts", seen.share("recovery"), evidence, lost_s=seen.seconds("recovery"))


def steps_skipped(seen: Records) -> Finding | None:
    if not seen.totals.steps:
        return None
    share = seen.skipped / seen.totals.steps
    text = f"{seen.skipped:,} of {seen.totals.steps:,} steps were skipped"
    evidence = [Evidence(text=text, value=float(seen.skipped), place="steps.jsonl: skipped")]
    return _finding(seen, "steps_skipped", share, evidence, lost_s=share * seen.seconds("compute"))


def rate_lowered(seen: Records) -> Finding | None:
    return _of_events(seen, "rate_lowered", "slowed", rate="rate")


def loss_spikes(seen: Records) -> Finding | None:
    return _of_events(seen, "loss_spikes", "loss_spike", rate="try")


def rate_too_high(seen: Records) -> Finding | None:
    return _of_events(seen, "rate_too_high", "rate_too_high", rate="try")


def rate_too_low(seen: Records) -> Finding | None:
    return _of_events(seen, "rate_too_low", "rate_too_low", rate="try")


def checkpoints_failed(seen: Records) -> Finding | None:
    failed = seen.checkpoint_failures
    evidence = [Evidence(text=text, place="events.jsonl: checkpoint_failed") for text in failed[:_SHOWN]]
    return _finding(seen, "checkpoints_failed", len(failed), evidence)


def quarantined_pictures(seen: Records) -> Finding | None:
    bad = list(seen.quarantined.items())
    evidence = [Evidence(text=f"{len(bad):,} pictures", value=float(len(bad)), place="quarantine.jsonl")]
    evidence += [Evidence(text=f"{path}: {error}", place="quarantine.jsonl") for path, error in bad[:_SHOWN]]
    return _finding(seen, "quarantined_pictures", len(bad), evidence)


def host_memory_near_limit(seen: Records) -> Finding | None:
    if seen.host_memory is None:
        return None
    text = f"at most {100 * seen.host_memory:.0f} % of the limit was in use"
    evidence = [Evidence(text=text, value=seen.host_memory, place="devices.jsonl: memory_used_bytes")]
    return _finding(seen, "host_memory_near_limit", seen.host_memory, evidence)


def gpu_memory_near_limit(seen: Records) -> Finding | None:
    if seen.memory_peak_bytes is None or seen.gpu_memory_bytes is None:
        return None
    share = seen.memory_peak_bytes / seen.gpu_memory_bytes
    text = f"{seen.memory_peak_bytes / 2**30:.1f} of {seen.gpu_memory_bytes / 2**30:.1f} GiB were allocated"
    return _finding(seen, "gpu_memory_near_limit", share,
                    [Evidence(text=text, value=share, place="steps.jsonl: memory_peak_bytes")])  # fmt: skip


def cpu_contention(seen: Records) -> Finding | None:
    """The worse of the container's quota, and other processes on cores that are all in use."""
    withheld, busy, others = seen.withheld.value or 0.0, seen.cpu_busy.value, seen.cpu_others.value
    evidence = []
    if withheld:
        text = f"the CPU quota withheld {100 * withheld:.0f} % of the processor time that the run wanted"
        evidence.append(Evidence(text=text, value=withheld, place="devices.jsonl: throttled_s"))
    taken = 0.0
    if busy is not None and others is not None and busy >= SATURATED_FROM:
        taken = others
        text = f"the cores were {100 * busy:.0f} % busy, {100 * others:.0f} % with other processes"
        evidence.append(Evidence(text=text, value=others, place="devices.jsonl: cpu, process_cpu"))
    if seen.psi_cpu.value is not None:
        text = f"some task waited for a core {100 * seen.psi_cpu.value:.0f} % of the time"
        evidence.append(Evidence(text=text, value=seen.psi_cpu.value, place="devices.jsonl: psi_cpu"))
    return _finding(seen, "cpu_contention", max(withheld, taken), evidence)


RULES: tuple[Rule, ...] = (
    input_bound, starved_inside_steps, startup_heavy, evaluation_heavy, checkpoint_heavy, checkpoints_failed,
    steps_skipped, rate_lowered, loss_spikes, rate_too_high, rate_too_low,
    work_lost_to_restarts, unattributed_time, host_memory_near_limit, gpu_memory_near_limit,
    quarantined_pictures, cpu_contention,
)  # fmt: skip
"""Named as the causes they look for."""

_SEVERITIES = ("critical", "warning", "info")


def diagnose(run: Path) -> list[Finding]:
    """What ended a run that did not finish; then what it lost and why, the largest loss first, then the gravest."""
    return judge(read(run))


def judge(seen: Records) -> list[Finding]:
    """`diagnose` on records that are read already."""
    found = [finding for rule in RULES if (finding := rule(seen)) is not None]
    died = postmortem.explain(seen.ended) if seen.ended is not None else []
    return died + sorted(found, key=lambda f: (-(f.lost_device_s or 0.0), _SEVERITIES.index(f.severity), f.cause))


def write_findings(run: Path, findings: list[Finding]) -> None:
    """Replaces findings.json of the run."""
    write_whole(run / records.FINDINGS, msgspec.json.format(msgspec.json.encode(findings), indent=2) + b"\n")


def _of_phase(seen: Records, cause: str, phase: str) -> Finding | None:
    return _finding(seen, cause, seen.share(phase), [_phase(seen, phase)], lost_s=seen.seconds(phase))


def _of_events(seen: Records, cause: str, kind: str, *, rate: str) -> Finding | None:
    """rate: the number of the events' data that is the rate to try; the newest event knows best."""
    events = seen.learning.get(kind, [])
    evidence = [Evidence(text=event.text, place=f"events.jsonl: {kind}") for event in events[-_SHOWN:]]
    tried = events[-1].data.get(rate) if events else None
    return _finding(seen, cause, len(events), evidence, command=None if tried is None else f"--rate {tried:.2g}")


def _finding(
    seen: Records,
    cause_id: str,
    measured: float,
    evidence: list[Evidence],
    *,
    lost_s: float | None = None,
    more_fix: str = "",
    command: str | None = None,
) -> Finding | None:
    """The finding of a cause, where what was measured reaches its threshold."""
    cause = CATALOGUE[cause_id]
    if measured < cause.warn_from:
        return None
    critical = cause.critical_from is not None and measured >= cause.critical_from
    return Finding(
        cause=cause.id,
        severity="critical" if critical else "warning",
        title=cause.title,
        evidence=evidence,
        lost_device_s=lost_s,
        lost_money=lost_s * seen.price / 3600 if lost_s is not None and seen.price > 0 else None,
        fix=cause.fix + more_fix,
        command=command or cause.command,
    )


def _phase(seen: Records, phase: str) -> Evidence:
    share = seen.share(phase)
    text = f"{phase}: {seen.seconds(phase):,.1f} device-seconds, {100 * share:.1f} % of the run"
    return Evidence(text=text, value=share, place=f"steps.jsonl: phases.{phase}")


def _attempts(seen: Records) -> Evidence:
    count = seen.totals.attempts
    return Evidence(text=f"{count} attempts", value=float(count), place="events.jsonl: attempt")
