"""The sections about the model: summary, metrics, error types, images, training curves.

The sections about the run (time, machine, settings, events) are in `run_sections.py`.
"""

from collections.abc import Sequence
from typing import Any

from stoker.evaluation.metrics import COCO_SUMMARY, ClassEvaluation, Evaluation
from stoker.findings.finding import Finding
from stoker.report import format as fmt
from stoker.report.advice import sum_error_types
from stoker.report.environment import gpu_names
from stoker.report.page import charts as page_charts
from stoker.report.page.charts import Charts
from stoker.report.page.images import gallery, legend
from stoker.report.page.markup import (
    Child,
    Markup,
    absent,
    bar,
    bullets,
    code,
    details,
    join,
    note,
    section,
    table,
    tag,
)
from stoker.report.run_report import RunReport
from stoker.report.terminal import COCO_TITLES
from stoker.report.words import ERROR_TYPE_ADVICE

STATES = {
    "running": ("●", "running"),
    "finished": ("✓", "finished"),
    "preempted": ("❚❚", "stopped by a signal"),
    "failed": ("✕", "failed"),
    "killed": ("✕", "killed"),
    "unknown": ("?", "state unknown"),
}
"""State → symbol and text: color is never the only difference."""
SEVERITY_LABELS = {"critical": "✕ critical", "warning": "▲ warning", "info": "● info"}
MAX_ADVICE = 4
MAX_ROWS, MAX_OPEN_ROWS = 100, 20
"""Maximum number of classes in a table, the most frequent first; those after MAX_OPEN_ROWS are collapsed."""
MAX_NAMED_CLASSES = 8
"""Maximum number of classes in a sentence."""


def head(report: RunReport) -> Markup:
    """Name and state of the run, model, dataset, device."""
    sign, words = STATES[report.explanation.state]
    state = tag("span", tag("span", sign, aria_hidden="true"), f" {words}", class_=f"state {report.explanation.state}")
    subject = [tag("b", report.model), " on ", tag("b", report.data)] if report.model and report.data else []
    if not report.is_native_run:
        subject = ["recorded by stoker watch" if report.explanation.coverage else "recorded by stoker.measure"]
    name, separator = report.run.rstrip("/").rpartition("/")[2], " · " if subject or report.best else ""
    about = tag("p", subject, _dataset_size(report), separator, _device(report), class_="what")
    return tag("header", tag("h1", name, " ", state), about)


def _dataset_size(report: RunReport) -> str:
    metrics = report.best.metrics if report.best else None
    if metrics is None:
        return ""
    classes = fmt.plural(len(metrics.per_class), "class", "classes")
    return f" · {classes}, {fmt.plural(metrics.num_images, 'validation image')}"


def _device(report: RunReport) -> str:
    if names := gpu_names(report.environment):
        return f"{len(names)} × {names[0]}" if len(names) > 1 else names[0]
    cores = report.environment.get("cores")
    return f"{report.environment.get('cpu') or 'device unknown'}" + (f", {cores} cores" if cores else "")


def summary(report: RunReport, time_bar: Markup | None) -> Markup:
    """Metrics, time, time by phase, advice."""
    explanation, best, price = report.explanation, report.best, report.explanation.price_range
    work = f"{fmt.plural(explanation.steps, 'step')}, {fmt.number(explanation.img_per_s)} img/s"
    busy = fmt.percentage(explanation.productive_fraction)
    tiles = []
    if report.is_native_run:
        tiles = [
            ("AP", fmt.metric(best.metrics.ap if best else None), _best_step_note(report)),
            ("AP50", fmt.metric(best.metrics.ap50 if best else None), "at IoU 0.5"),
        ]
    tiles.append(("time", fmt.duration(explanation.wall_s), work))
    tiles.append(("device busy", busy, "fraction of time in optimizer steps"))
    if price is not None:
        listed = ", list price" if price.currency else ""
        at_price = f"at {fmt.cost_range((price.low, price.high))} per device-hour{listed}"
        tiles.append(("cost", fmt.cost_range(explanation.cost(explanation.device_s)), at_price))
    drawn = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", remark)))
        for name, value, remark in tiles
    ]
    title, numbers = tag("h2", "Summary", class_="hidden"), tag("dl", drawn, class_="tiles")
    return tag("section", title, numbers, time_bar, _verdict(report), _advice(report.advice), id="summary")


def _best_step_note(report: RunReport) -> str:
    """The step of the best AP, and the newest AP if it differs."""
    if report.best is None:
        return "not evaluated yet"
    newest = report.eval_history[-1]
    if newest.step == report.best.step:
        return f"at step {newest.step:,}"
    return f"best, at step {report.best.step:,}; at step {newest.step:,} {fmt.metric(newest.metrics.ap)}"


def _verdict(report: RunReport) -> Markup:
    sentence = report.explanation.verdict()
    if not sentence:
        return tag("p", report.explanation.state_text, class_="verdict")
    return tag("p", sentence, " ", tag("a", "Time by phase", href="#time"), class_="verdict")


def _advice(advice: list[Finding]) -> Markup:
    title = tag("h3", "What to do next")
    if not advice:
        return join(title, tag("p", "No advice: the diagnosis found nothing to improve."))
    shown = [_advice_item(item) for item in advice[:MAX_ADVICE]]
    rest = [_advice_item(item) for item in advice[MAX_ADVICE:]]
    more = tag("details", tag("summary", f"{len(rest)} more"), tag("ol", rest, class_="advice")) if rest else None
    return join(title, tag("ol", shown, class_="advice"), more)


def _advice_item(advice: Finding) -> Markup:
    command = [" ", code(advice.extra_command)] if advice.extra_command else []
    reason = tag("span", advice.evidence_text, class_="reason") if advice.evidence else None
    return tag(
        "li",
        tag("span", SEVERITY_LABELS[advice.severity], class_=f"mark {advice.severity}"),
        " ",
        tag("b", advice.title),
        reason,
        tag("span", tag("span", "Fix: "), advice.fix, command, class_="fix"),
        class_=advice.severity,
    )


def scores(report: RunReport, charts: Charts) -> Markup:
    """COCO metrics, classes, curves, error types."""
    best, evaluation = report.best, report.evaluation
    if best is None:
        return section("results", "Results", absent("The model was not evaluated yet."))
    metrics = best.metrics
    unread = f" ({metrics.missing:,} more could not be read)" if metrics.missing else ""
    image_count = fmt.plural(metrics.num_images, "image")
    description = (
        f"Best EMA weights, at step {best.step:,}, on {image_count}{unread} with "
        f"{fmt.plural(metrics.boxes, 'box', 'boxes')} of the validation split, COCO metrics."
    )
    numbers = ((title, getattr(metrics, name)) for title, name in zip(COCO_TITLES, COCO_SUMMARY, strict=True))
    twelve = [tag("div", tag("dt", title), tag("dd", fmt.metric(value))) for title, value in numbers]
    parts: list[Child] = [tag("p", description), tag("dl", twelve, class_="twelve")]
    if evaluation is None:
        known = sorted((row for row in metrics.per_class if row.boxes), key=lambda row: -row.boxes)
        rows = [[row.name, fmt.count(row.boxes), fmt.metric(row.ap), fmt.metric(row.ap50)] for row in known[:MAX_ROWS]]
        parts.append(_collapsible_table("AP by class", ("class", "boxes", "AP", "AP50"), rows))
        return section("results", "Results", *parts)
    if evaluation.step != best.step:  # the run was killed between writing the two files
        parts.append(note(f"Everything below is from step {evaluation.step:,}."))
    means, by_class = (
        page_charts.precision_recall(charts, evaluation),
        page_charts.precision_recall_by_class(charts, evaluation),
    )
    parts += [
        _classes(evaluation),
        tag("div", means, by_class, class_="two"),
        tag("h3", "Error types"),
        _error_types(evaluation),
        tag("div", _confusions(evaluation), page_charts.score_histogram(charts, evaluation), class_="two"),
    ]
    return section("results", "Results", *parts)


def _classes(evaluation: Evaluation) -> Markup:
    classes = sorted((row for row in evaluation.classes if row.boxes), key=lambda row: -row.boxes)
    absent_names = [row.name for row in evaluation.classes if not row.boxes]

    def ap_cell(ap: float | None) -> Child:
        return fmt.metric(ap) if ap is None else tag("span", fmt.metric(ap), " ", bar(ap), class_="nobr")

    rows = [
        [
            row.name,
            fmt.count(row.boxes),
            ap_cell(row.ap),
            fmt.metric(row.ap50),
            *(fmt.MISSING if x is None else f"{x:.2f}" for x in (row.threshold, row.precision, row.recall, row.f1)),
            _most_frequent_error(row),
        ]
        for row in classes[:MAX_ROWS]
    ]
    heads = ("class", "boxes", "AP", "AP50", "best score", "precision", "recall", "F1", "most frequent error")
    text = (
        "Best score: the threshold with the best F1 at IoU 0.5, to use as --conf; precision, recall, F1 and errors "
        "are at this threshold."
    )
    if len(classes) > MAX_ROWS:
        text += f" The {len(classes) - MAX_ROWS:,} rarest are only in the JSON."
    if absent_names:
        more = f" and {len(absent_names) - MAX_NAMED_CLASSES:,} more" if len(absent_names) > MAX_NAMED_CLASSES else ""
        text += f" Without ground truth in this split: {', '.join(absent_names[:MAX_NAMED_CLASSES])}{more}."
    return join(_collapsible_table("By class", heads, rows), note(text))


def _collapsible_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Child]]) -> Markup:
    """A table of classes; if there are many, the later ones are collapsed."""
    right = [column for column, head in enumerate(heads) if head not in ("class", "most frequent error")]
    if len(rows) <= MAX_OPEN_ROWS:
        return table(title, heads, rows, right=right, wide=(0,))
    first = f"{title}, the {MAX_OPEN_ROWS} most frequent"
    rest = f"{title}, the next {len(rows) - MAX_OPEN_ROWS}"
    rest_table = table(rest, heads, rows[MAX_OPEN_ROWS:], right=right, wide=(0,), hidden=True)
    return join(table(first, heads, rows[:MAX_OPEN_ROWS], right=right, wide=(0,)), details(rest, rest_table))


def _most_frequent_error(row: ClassEvaluation) -> str:
    name, count = max(row.error_types.items(), key=lambda item: item[1], default=("", 0))
    return f"{name} ({count:,})" if count else "none"


def _error_types(evaluation: Evaluation) -> Markup:
    counts = sum_error_types(evaluation)
    if not counts:
        return tag("p", "No errors at the best thresholds, at IoU 0.5.")
    max_count = max(counts.values())
    rows = [
        [name, fmt.count(count), bar(count / max_count, color="var(--c3)"), *ERROR_TYPE_ADVICE[name]]
        for name, count in counts.most_common()
    ]
    tp = sum(class_eval.tp for class_eval in evaluation.classes)
    title = (
        f"Errors at the best score of each class ({tp:,} true positives, "
        f"{fmt.plural(evaluation.metrics.boxes, 'ground truth box', 'ground truth boxes')}); error types of TIDE"
    )
    return table(title, ("error type", "count", "", "meaning", "what to check"), rows, right=(1,), wide=(3, 4))


def _confusions(evaluation: Evaluation) -> Markup:
    if not evaluation.confusions:
        return note("No detection has an accurate box and a wrong class.")
    names = [class_eval.name for class_eval in evaluation.classes]
    rows = [
        [names[confusion.gt_label], names[confusion.pred_label], fmt.count(confusion.count)]
        for confusion in evaluation.confusions[:10]
    ]
    return table("Most frequently confused classes", ("ground truth", "prediction", "count"), rows, right=(2,))


def images(report: RunReport) -> Markup:
    """The worst and the best images, with boxes."""
    evaluation = report.evaluation
    if evaluation is None:
        return section("images", "Images", absent("There is no evaluation with images."))
    names = [class_eval.name for class_eval in evaluation.classes]
    description = (
        "Images of the validation split. F1 is at IoU 0.5 and the best score of each class. Only errors have labels; "
        "all boxes have tooltips."
    )
    parts: list[Child] = [tag("p", description), legend()]
    for title, examples in (("Worst", evaluation.worst), ("Best", evaluation.best)):
        parts += [tag("h3", title), gallery(examples, names) if examples else note("None.")]
    return section("images", "Images", *parts)


_STEP_CURVES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("lr", "Learning rate", "of the last step of a window", {}),
    ("grad_norm", "Gradient norm", "before clipping", {"yaxis": {"type": "log"}}),
    ("img_per_s", "Throughput", "images per second", {"yaxis": page_charts.FROM_ZERO}),
    (
        "memory_peak_bytes",
        "Memory",
        "peak of allocated device memory, GiB",
        {"scale": 2.0**-30, "yaxis": page_charts.FROM_ZERO},
    ),
)
"""Curve, title, description, options."""


def curves(report: RunReport, charts: Charts) -> Markup:
    """Training curves by step."""
    drawn = [page_charts.scores(charts, report), page_charts.loss(charts, report)]
    drawn += [
        page_charts.step_curve(charts, report, name, title, description, **options)
        for name, title, description, options in _STEP_CURVES
    ]
    shown = [item for item in drawn if item is not None]
    if not shown:
        return section("training", "Training", absent("No optimizer step is recorded."))
    restarts = [
        f"attempt {item.attempt} resumed at step {item.step:,}, {fmt.duration(item.after_s)} after the start; "
        f"the previous attempt was {item.previous_end}"
        for item in report.restarts[-page_charts.MAX_RESTARTS :]
    ]
    return section(
        "training",
        "Training",
        note("Points are means over several records; the light band is the range from minimum to maximum."),
        bullets(restarts, class_="note"),
        tag("div", shown, class_="two"),
    )
