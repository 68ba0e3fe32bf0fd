"""Step times in a log: many training scripts print how long a step took, and how much of this the loop waited for
data. In a log without a record, nothing else says why a job is slow.

Formats: examples/imagenet and its descendants (`Time 0.15 (0.16)  Data 0.001 (0.002)`), timm, torchvision's references
and DETR (`time: 0.41  data: 0.01`), MMDetection and mmengine, Detectron2, YOLOX (`iter_time`, `data_time`),
PaddleDetection (`batch_cost`, `reader_cost`), Lightning's SimpleProfiler.
"""

import re

from stoker_watch.diagnosis.causes.cause import fill_apis
from stoker_watch.diagnosis.causes.input import INPUT_BOUND
from stoker_watch.diagnosis.causes.shared import make_evidence
from stoker_watch.diagnosis.run_data import LogLine
from stoker_watch.findings.finding import Finding

_SECONDS = r"[:= ]\s{0,6}(\d{1,6}\.\d{1,9})(?=s?[\s,(]|$)"
_STEP = re.compile(rf"(?<![a-z_])(?:(?:iter_|batch_)?time|batch_cost){_SECONDS}", re.IGNORECASE)
_DATA = re.compile(rf"(?<![a-z_])(?:data(?:_time)?|reader_cost){_SECONDS}", re.IGNORECASE)
_EVALUATION = re.compile(r"(?i)^\W*(test|val\w*|eval\w*)\b|epoch ?\((val|test)\)|model_time|evaluator_time")
_NUMBER = r"\s{0,99}(\d{1,9}(?:\.\d{1,9})?(?:e[+-]\d\d)?)\s{0,99}"
_PROFILED = re.compile(rf"train_dataloader_next[^|]{{0,200}}\|{_NUMBER}\|{_NUMBER}\|{_NUMBER}\|{_NUMBER}")
"""A row of Lightning's SimpleProfiler: mean, calls, seconds, percent of the whole."""
MIN_LINES, MIN_FRACTION = 8, 0.2
FEWEST_LINES, FRACTION_OF_FEW = 3, 0.5
"""Lines with both times, and the fraction of the time of their second half, at least: few lines have to say it more
clearly (heuristic: they are a sample of the steps). In the first half loaders start, and caches fill."""


def find_printed_wait(lines: tuple[LogLine, ...]) -> Finding | None:
    """`input_bound`, if the steps of the second half of the log waited for data for much of their time."""
    profiled = [(float(row[4]), line) for line in lines if (row := _PROFILED.search(line.text)) is not None]
    if profiled and profiled[-1][0] >= 100 * MIN_FRACTION:
        text = f"Lightning's profiler: {profiled[-1][0]:.0f} % of the time was for the next batch"
        return _make_finding(text, profiled[-1][0] / 100, profiled[-1][1])
    times = [
        (float(step[1]), float(data[1]), line)
        for line in lines
        if (step := _STEP.search(line.text)) is not None
        and (data := _DATA.search(line.text)) is not None
        and not _EVALUATION.search(line.text)
    ]
    late = times[len(times) // 2 :]
    total_s, waited_s = sum(step for step, _, _ in late), sum(data for _, data, _ in late)
    minimum = MIN_FRACTION if len(times) >= MIN_LINES else FRACTION_OF_FEW
    if len(times) < FEWEST_LINES or not 0 < minimum * total_s <= waited_s <= total_s:
        return None
    text = f"the last {len(late)} lines with times print {total_s:,.1f} s of steps, {waited_s:,.1f} s of them for data"
    return _make_finding(text, waited_s / total_s, max(late, key=lambda time: time[1])[2])


def _make_finding(text: str, fraction: float, line: LogLine) -> Finding:
    cause = INPUT_BOUND
    evidence = [make_evidence(text, fraction), make_evidence(line.text.strip()[:200], source=line.source)]
    return Finding(
        id=cause.id, severity="critical", title=cause.title, evidence=evidence, fix=fill_apis(cause.external_fix),
        confidence=cause.confidence,
    )  # fmt: skip
