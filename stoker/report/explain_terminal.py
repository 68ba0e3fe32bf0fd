"""What `stoker why RUN` prints: where the time went, what that cost, at most five findings, advice, experiments.

What it says is `explain.py`'s; two runs and many are `compare_terminal.py` and `runs_summary_terminal.py`. `cost` is
the one place where money gets its text.
"""

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from stoker.report import format as fmt
from stoker.report.console import plain_text, print_parts, table
from stoker.report.explain import Why
from stoker.report.sizing import Sizing
from stoker.runs.schemas import Evidence, Finding, Probe

FINDINGS_SHOWN = 5
"""The rest is counted."""
PROBE_WORDS = {
    "cached_batch": "one batch, kept on the device",
    "twice_the_batch": "twice the batch",
    "no_exchange": "no exchange of gradients",
    "compiled": "compiled",
    "fewer_threads": "fewer threads",
    "more_threads": "more threads",
}
"""What an experiment changes, in a few words."""


def print_why(why: Why, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Where the time of a run went, in seconds, percent and money; the largest loss; what to change."""
    ends: list[RenderableType] = [*_findings(why), *_advice(why.advice), *_experiments(why.probes), "", _places(why)]
    if not why.phases:
        first = "No time is recorded yet: the run did not come to its first step."
        has_more = bool(why.findings or why.advice or why.probes)  # what ended it, above all
        print_parts([_facts(why), "", first, *(ends if has_more else [])], file, width=width)
        return
    print_parts([_facts(why), "", _phases(why), "", *_verdict(why), *ends], file, width=width)


def cost(money: tuple[float, float] | None) -> str:
    """1.20, or from the least to the most, 1.20–3.40; `n/a` where no price is known."""
    if money is None:
        return fmt.MISSING
    low, high = map(fmt.money, money)
    return low if low == high else f"{low}–{high}"


def _facts(why: Why) -> RenderableType:
    facts = table("", "", header=False)
    facts.add_row("run", plain_text(why.run))
    facts.add_row("state", plain_text(why.state_text))
    lost = f", {fmt.plural(why.steps_lost, 'step')} done again" if why.steps_lost else ""
    facts.add_row("time", f"{fmt.duration(why.wall_s)} on {fmt.plural(why.devices, 'device')}, "
                  f"{fmt.plural(max(0, why.attempts - 1), 'restart')}{lost}")  # fmt: skip
    speed = f", {fmt.plural(why.pictures, 'picture')}, {fmt.number(why.img_per_s)} img/s over all of the time"
    unknown = why.watched and not why.pictures
    facts.add_row("work", f"{fmt.plural(why.steps, 'step')}{' that its output tells' if unknown else speed}")
    if why.rate is not None and why.rate.currency:  # who gave a price knows it
        each = cost((why.rate.low, why.rate.high))
        facts.add_row("price", plain_text(f"{each} {why.rate.currency} per device-hour: {why.rate.source}"))
    for tier, said in why.watched.items():
        facts.add_row("seen", plain_text(f"{tier}: {said}"))
    return facts


def _phases(why: Why) -> RenderableType:
    money = why.rate is not None
    numbers = ("device time", "share", *(["cost"] if money else []))
    made = table("phase", *numbers, "", right=range(1, 1 + len(numbers)))
    for name, row in why.lines():
        paid = [cost(why.cost(row.device_s))] if money else []
        made.add_row(name, fmt.duration(row.device_s), fmt.share(row.share), *paid, plain_text(row.meaning, "dim"))
    total = [cost(why.cost(why.device_s))] if money else []
    made.add_row("total", fmt.duration(why.device_s), "100 %", *total, "")
    return made


def _verdict(why: Why) -> Iterator[str]:
    if why.productive_share is None:
        yield "How much of the time the device trained is not known: no clock was inside the job."
        return
    productive = f"The device trained {fmt.share(why.productive_share)} of the time."
    loss = why.largest_loss
    if loss is None:
        yield productive
        return
    paid = f", cost {cost(why.cost(loss.device_s))}" if why.rate is not None else ""
    yield (f"{productive} The largest loss is {loss.phase}: {fmt.duration(loss.device_s)}, {fmt.share(loss.share)}"
           f"{paid} ({loss.meaning}).")  # fmt: skip


def _findings(why: Why) -> Iterator[RenderableType]:
    if not why.findings:
        yield "No rule of the diagnosis found more than that."
        return
    for finding in why.findings[:FINDINGS_SHOWN]:
        yield ""
        yield from finding_lines(finding, why.cost(finding.lost_device_s))
    more = len(why.findings) - FINDINGS_SHOWN
    if more > 0:
        yield ""
        yield plain_text(f"{more} more: stoker why {why.run} --json")


def finding_lines(finding: Finding, money: tuple[float, float] | None = None) -> Iterator[RenderableType]:
    """A finding: what, what it cost, each number with its place, the fix, how sure it is."""
    paid = f", cost {cost(money)}" if money is not None else ""
    lost = f" ({fmt.duration(finding.lost_device_s)} lost{paid})" if finding.lost_device_s is not None else ""
    style = "bold red" if finding.severity == "critical" else "bold yellow" if finding.severity == "warning" else "bold"
    yield Text.assemble((f"{finding.severity}: ", style), (finding.title, "bold"), lost)
    yield from map(_evidence, finding.evidence)
    command = unsaid_command(finding)
    yield indented(f"fix: {finding.fix}" + (f" ({command})" if command else ""))
    if finding.confidence is not None:
        yield indented(f"confidence: {fmt.share(finding.confidence)}")
    if finding.verified:
        yield indented(f"verified: {finding.verified}")


def unsaid_command(finding: Finding) -> str | None:
    """The command of a finding, where the words of its fix do not have it already."""
    return finding.command if finding.command and finding.command not in finding.fix else None


def indented(text: str) -> RenderableType:
    """A text below the one before, also where it is wrapped."""
    return Padding(plain_text(text), (0, 0, 0, 2), expand=False)


def _evidence(one: Evidence) -> RenderableType:
    return indented(one.text + (f"  [{one.place}]" if one.place else ""))


def _advice(advice: list[Sizing]) -> Iterator[RenderableType]:
    if advice:
        yield ""
        yield Text("Advice on the machine", "bold")
    for one in advice:
        yield plain_text(f"{one.title}: {one.fix}")
        yield from map(_evidence, one.evidence)


def _experiments(probes: list[Probe]) -> Iterator[RenderableType]:
    if not probes:
        return
    yield ""
    yield Text("Experiments", "bold")
    made = table("changed", "img/s before", "after", "ratio", "90 % interval", right=(1, 2, 3))
    for row in experiments(probes):
        made.add_row(*map(plain_text, row))
    yield made


def experiments(probes: list[Probe]) -> Iterator[tuple[str, str, str, str, str]]:
    """Rows: what was changed, pictures/s before and after, their ratio, its interval or why there is none."""
    for one in probes:
        what = PROBE_WORDS.get(one.what, one.what)
        if one.reason:
            yield what, "", "", "", f"not measured: {one.reason}"
            continue
        unclear = " (unclear)" if one.ratio_low < 1 < one.ratio_high else ""
        interval = f"{one.ratio_low:.2f} … {one.ratio_high:.2f}{unclear}, {fmt.plural(one.steps, 'step')} each"
        yield (what, fmt.number(one.before_img_per_s), fmt.number(one.after_img_per_s), f"{one.ratio:.2f}",
               interval + (", by itself" if one.automatic else ""))  # fmt: skip


def _places(why: Why) -> RenderableType:
    return plain_text(f"evidence: {', '.join(why.places)} in {why.run}", "dim")
