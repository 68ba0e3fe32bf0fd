"""Prints `stoker why RUN`: the time by phase, its cost, at most five findings, advice, experiments.

The data comes from `explain.py`. Neighbors: `compare_terminal.py` prints two runs, `runs_summary_terminal.py` many.
"""

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.findings.finding import Finding
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables, table
from stoker.report.explain import RunExplanation
from stoker.report.findings_terminal import explain_line, finding_lines, format_cost
from stoker.runs.schemas import Probe

MAX_FINDINGS = 5
"""Findings that are printed; `--json` has all."""
PROBE_LABELS = {
    "cached_batch": "one batch, kept on the device",
    "double_batch": "double batch size",
    "no_allreduce": "no gradient all-reduce",
    "compiled": "compiled",
    "fewer_workers": "fewer workers",
    "more_workers": "more workers",
}
"""Kind of experiment → what it changes."""


def print_explanation(explanation: RunExplanation, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints to `file`, default stdout."""
    trailing: list[RenderableType] = [
        *_findings(explanation),
        *_notes(explanation),
        *_advice(explanation.sizing_advice),
        *_experiments(explanation.probes),
        "",
        _sources_line(explanation),
        *explain_line([*explanation.findings[:MAX_FINDINGS], *explanation.notes, *explanation.sizing_advice]),
    ]
    if not explanation.phases:
        message = "No time is recorded yet: the run has not reached its first step."
        has_more = bool(explanation.findings or explanation.sizing_advice or explanation.probes)
        print_renderables([_facts(explanation), "", message, *(trailing if has_more else [])], file, width=width)
        return
    print_renderables(
        [_facts(explanation), "", _phases(explanation), "", *_verdict(explanation), *trailing], file, width=width
    )


def _facts(explanation: RunExplanation) -> RenderableType:
    facts = table("", "", header=False)
    facts.add_row("run", plain_text(explanation.run))
    facts.add_row("state", plain_text(explanation.state_text))
    lost = f", {fmt.plural(explanation.lost_steps, 'step')} repeated" if explanation.lost_steps else ""
    facts.add_row("time", f"{fmt.duration(explanation.wall_s)} on {fmt.plural(explanation.devices, 'device')}, "
                  f"{fmt.plural(max(0, explanation.attempts - 1), 'restart')}{lost}")  # fmt: skip
    speed = f", {fmt.plural(explanation.num_images, 'image')}, {fmt.number(explanation.img_per_s)} img/s on average"
    unknown = explanation.coverage and not explanation.num_images
    facts.add_row("work", f"{fmt.plural(explanation.steps, 'step')}{' according to its output' if unknown else speed}")
    if (
        explanation.price_range is not None and explanation.price_range.currency
    ):  # a list price; the user knows a price that they set
        price_text = format_cost((explanation.price_range.low, explanation.price_range.high))
        facts.add_row(
            "price",
            plain_text(
                f"{price_text} {explanation.price_range.currency} per device-hour: {explanation.price_range.source}"
            ),
        )
    for tier, status in explanation.coverage.items():
        facts.add_row("recorded", plain_text(f"{tier}: {status}"))
    return facts


def _phases(explanation: RunExplanation) -> RenderableType:
    has_price = explanation.price_range is not None
    numbers = ("device time", "fraction", *(["cost"] if has_price else []))
    rendered = table("phase", *numbers, "", right=range(1, 1 + len(numbers)))
    for name, row in explanation.rows():
        cost_cell = [format_cost(explanation.cost(row.device_s))] if has_price else []
        rendered.add_row(
            name, fmt.duration(row.device_s), fmt.percentage(row.fraction), *cost_cell, plain_text(row.meaning, "dim")
        )
    total = [format_cost(explanation.cost(explanation.device_s))] if has_price else []
    rendered.add_row("total", fmt.duration(explanation.device_s), "100 %", *total, "")
    return rendered


def _verdict(explanation: RunExplanation) -> Iterator[str]:
    if explanation.productive_fraction is None:
        has_clock = any(status.startswith("recorded: ") for status in explanation.coverage.values())
        reason = "its clock saw no step of training" if has_clock else "the job was not timed from inside"
        yield f"The fraction of time that the device trained is not known: {reason}."
        return
    productive = f"The device trained {fmt.percentage(explanation.productive_fraction)} of the time."
    loss = explanation.largest_loss
    if loss is None:
        yield productive
        return
    cost_text = f", cost {format_cost(explanation.cost(loss.device_s))}" if explanation.price_range is not None else ""
    lost = f"{fmt.duration(loss.device_s)}, {fmt.percentage(loss.fraction)}{cost_text}"
    yield f"{productive} Most time was lost in {loss.phase}: {lost} ({loss.meaning})."


def _findings(explanation: RunExplanation) -> Iterator[RenderableType]:
    if not explanation.findings:
        yield "The diagnosis found nothing else."
        return
    for finding in explanation.findings[:MAX_FINDINGS]:
        yield ""
        yield from finding_lines(finding, explanation.cost(finding.lost_device_s))
    more = len(explanation.findings) - MAX_FINDINGS
    if more > 0:
        yield ""
        yield plain_text(f"{more} more: stoker why {explanation.run} --json")


def _notes(explanation: RunExplanation) -> Iterator[RenderableType]:
    if explanation.notes:
        yield ""
    for note in explanation.notes:
        yield from finding_lines(note)


def _advice(advice: list[Finding]) -> Iterator[RenderableType]:
    if advice:
        yield ""
        yield Text("Advice on the size of the machine", "bold")
    for sizing in advice:
        yield from finding_lines(sizing)


def _experiments(probes: list[Probe]) -> Iterator[RenderableType]:
    if not probes:
        return
    yield ""
    yield Text("Experiments", "bold")
    rendered = table("changed", "img/s before", "after", "ratio", "90 % interval", right=(1, 2, 3))
    for row in probe_rows(probes):
        rendered.add_row(*map(plain_text, row))
    yield rendered


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


def _sources_line(explanation: RunExplanation) -> RenderableType:
    return plain_text(f"evidence: {', '.join(explanation.evidence_paths)} in {explanation.run}", "dim")
