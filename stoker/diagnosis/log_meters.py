"""Time that a job prints itself: many training scripts print for each step how long it took, and how long of this the
loop waited for data. In a log, without a record, nothing else says why a job is slow.

Formats: examples/imagenet and its descendants (`Time 0.15 (0.16)  Data 0.001 (0.002)`), timm, torchvision's references
and DETR (`time: 0.41  data: 0.01`), MMDetection and mmengine, Detectron2, YOLOX (`iter_time`, `data_time`),
PaddleDetection (`batch_cost`, `reader_cost`).
"""

import re

from stoker.diagnosis.causes.cause import fill_apis, find_cause
from stoker.diagnosis.causes.shared import make_evidence
from stoker.diagnosis.run_data import LogLine
from stoker.findings.finding import Finding

_SECONDS = r"[:= ]\s{0,6}(\d{1,6}\.\d{1,9})(?=s?[\s,(]|$)"
_STEP = re.compile(rf"(?<![a-z_])(?:(?:iter_|batch_)?time|batch_cost){_SECONDS}", re.IGNORECASE)
_DATA = re.compile(rf"(?<![a-z_])(?:data(?:_time)?|reader_cost){_SECONDS}", re.IGNORECASE)
MIN_LINES = 8
"""Lines with both times, at least. Only their second half counts: loaders start, and caches fill, in the first."""
MIN_FRACTION = 0.2
"""Fraction of the printed time below which there is no finding (heuristic): a few lines are a sample of the steps."""


def find_printed_wait(lines: tuple[LogLine, ...]) -> Finding | None:
    """`input_bound`, if the steps of the second half of the log waited for data for much of their time."""
    times = [
        (float(step[1]), float(data[1]), line)
        for line in lines
        if (step := _STEP.search(line.text)) is not None and (data := _DATA.search(line.text)) is not None
    ]
    late = times[len(times) // 2 :]
    total_s, waited_s = sum(step for step, _, _ in late), sum(data for _, data, _ in late)
    if len(times) < MIN_LINES or not MIN_FRACTION * total_s <= waited_s <= total_s:
        return None
    cause, longest = find_cause("input_bound"), max(late, key=lambda time: time[1])
    text = f"the last {len(late)} lines with times print {total_s:,.1f} s of steps, {waited_s:,.1f} s of them for data"
    return Finding(
        id=cause.id,
        severity="critical",
        title=cause.title,
        evidence=[
            make_evidence(text, waited_s / total_s, longest[2].source.partition(":")[0]),
            make_evidence(longest[2].text.strip()[:200], longest[1], longest[2].source),
        ],
        fix=fill_apis(cause.external_fix),
        confidence=cause.confidence,
    )
