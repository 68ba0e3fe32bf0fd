"""Prints `stoker why RUN`: the time by phase, its cost, at most five findings, advice, experiments; `stoker why LOG`.

The data comes from `explain.py`. `compare.py` prints two runs, `runs_summary_tables.py` many.
"""

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType

from stoker.report import format as fmt
from stoker.report.console import facts, plain_text, print_renderables, table
from stoker.report.explain import LogExplanation, RunExplanation
from stoker.report.findings_terminal import explain_line, finding_lines
from stoker.report.words import PROBE_LABELS
from stoker.runs.schemas import Probe

MAX_FINDINGS = 5
"""Findings that are printed; `--json` has all."""
PROBE_HEADS = ("changed", "img/s before", "after", "ratio", "90 % interval")


def print_explanation(explanation: RunExplanation, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints to `file`, default stdout."""
    renderables: list[RenderableType] = [facts(_facts(explanation)), ""]
    if explanation.phases:
        renderables += [_phases(explanation), "", _verdict(explanation)]
    else:
        renderables.append("No time is recorded yet: the run has not reached its first step.")
    if explanation.phases or explanation.findings or explanation.sizing_advice or explanation.probes:
        renderables += _details(explanation)
    print_renderables(renderables, file, width=width)


def _facts(explanation: RunExplanation) -> Iterator[tuple[str, str]]:
    yield "run", explanation.run
    yield "state", explanation.state_text
    lost = f", {fmt.plural(explanation.lost_steps, 'step')} repeated" if explanation.lost_steps else ""
    restarts = fmt.plural(max(0, explanation.attempts - 1), "restart")
    yield "time", f"{fmt.duration(explanation.wall_s)} on {fmt.plural(explanation.devices, 'device')}, {restarts}{lost}"
    speed = f", {fmt.plural(explanation.num_images, 'image')}, {fmt.number(explanation.img_per_s)} img/s on average"
    unknown = explanation.coverage and not explanation.num_images
    yield "work", f"{fmt.plural(explanation.steps, 'step')}{' according to its output' if unknown else speed}"
    price = explanation.price_range
    if price is not None and price.currency:  # a list price; the user knows a price that they set
        yield "price", f"{fmt.cost_range((price.low, price.high))} {price.currency} per device-hour: {price.source}"
    for tier, status in explanation.coverage.items():
        yield "recorded", f"{tier}: {status}"


def _phases(explanation: RunExplanation) -> RenderableType:
    rows: list[list[RenderableType]] = [
        [name, *explanation.time_cells(row.device_s, row.fraction), plain_text(row.meaning, "dim")]
        for name, row in explanation.rows()
    ]
    rows.append(["total", *explanation.time_cells(explanation.device_s, 1.0)])
    heads = ("phase", "device time", "fraction", *(["cost"] if explanation.price_range is not None else []), "")
    return table(*heads, right=range(1, len(heads) - 1), rows=rows)


def _verdict(explanation: RunExplanation) -> str:
    if explanation.productive_fraction is None:
        has_clock = any(status.startswith("recorded: ") for status in explanation.coverage.values())
        reason = "its clock saw no step of training" if has_clock else "the job was not timed from inside"
        return f"The fraction of time that the device trained is not known: {reason}."
    trained = f"The device trained {fmt.percentage(explanation.productive_fraction)} of the time."
    return f"{trained} {explanation.verdict()}".rstrip()


def _details(explanation: RunExplanation) -> Iterator[RenderableType]:
    """Findings, notes, advice, experiments, sources."""
    findings, advice = explanation.findings[:MAX_FINDINGS], explanation.sizing_advice
    if not findings:
        yield "The diagnosis found nothing else."
    for finding in findings:
        yield ""
        yield from finding_lines(finding, explanation.cost(finding.lost_device_s))
    if len(explanation.findings) > MAX_FINDINGS:
        yield ""
        yield f"{len(explanation.findings) - MAX_FINDINGS} more: stoker why {explanation.run} --json"
    for title, others in (("", explanation.notes), ("Advice on the size of the machine", advice)):
        if others:
            yield ""
        if others and title:
            yield plain_text(title, "bold")
        for finding in others:
            yield from finding_lines(finding)
    if explanation.probes:
        yield ""
        yield plain_text("Experiments", "bold")
        yield table(*PROBE_HEADS, right=(1, 2, 3), rows=probe_rows(explanation.probes))
    yield ""
    yield plain_text(f"evidence: {', '.join(explanation.evidence_paths)} in {explanation.run}", "dim")
    yield from explain_line([*findings, *explanation.notes, *advice])


def probe_rows(probes: list[Probe]) -> Iterator[tuple[str, str, str, str, str]]:
    """Rows: the change, img/s before and after, their ratio, its interval or the reason why there is none."""
    for probe in probes:
        label = PROBE_LABELS.get(probe.probe, probe.probe)
        if probe.reason:
            yield label, "", "", "", f"not measured: {probe.reason}"
            continue
        unclear = " (unclear)" if probe.ratio_low < 1 < probe.ratio_high else ""
        interval = f"{probe.ratio_low:.2f} … {probe.ratio_high:.2f}{unclear}, {fmt.plural(probe.steps, 'step')} each"
        yield (label, fmt.number(probe.before_img_per_s), fmt.number(probe.after_img_per_s), f"{probe.ratio:.2f}",
               interval + (", automatic" if probe.automatic else ""))  # fmt: skip


def print_log_explanation(explanation: LogExplanation, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints each finding with its evidence, then what is not known."""
    size = f"{fmt.plural(explanation.lines, 'line')}, {fmt.size(explanation.size_bytes)}"
    findings = explanation.findings[:MAX_FINDINGS]
    renderables: list[RenderableType] = [f"{explanation.log}: a log, not a recorded run; {size}"]
    if not findings:
        renderables += ["", "It contains no known reason for the end of a job."]
    for finding in findings:
        renderables += ["", *finding_lines(finding)]
    if len(explanation.findings) > MAX_FINDINGS:
        renderables += ["", f"{len(explanation.findings) - MAX_FINDINGS} more: stoker why {explanation.log} --json"]
    renderables += ["", "Not known from the log alone:", *(f"  {text}" for text in explanation.not_known)]
    renderables += explain_line(findings)
    renderables.append("Next time, record the job with `stoker watch -- COMMAND` to get numbers.")
    print_renderables(renderables, file, width=width)
