"""The sections about the model: summary, metrics, error types, images, training curves.

The sections about the run (time, machine, settings, events) are in `run_sections.py`.
"""

from collections.abc import Iterable, Sequence

from stoker.evaluation.document import ClassEvaluation, Evaluation
from stoker.evaluation.metrics import COCO_SUMMARY
from stoker.findings.finding import Finding
from stoker.report import format as fmt
from stoker.report.advice import ERROR_TYPE_ADVICE, sum_error_types
from stoker.report.environment import gpu_names
from stoker.report.findings_terminal import format_cost
from stoker.report.page import charts as page_charts
from stoker.report.page.charts import Charts
from stoker.report.page.images import gallery, legend
from stoker.report.page.markup import (
    Child,
    Markup,
    bar,
    code,
    join,
    section,
    table,
    tag,
)
from stoker.report.run_report import RunReport
from stoker.report.terminal import COCO_TITLES

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
    return tag(
        "header",
        tag("h1", report.run.rstrip("/").rpartition("/")[2], " ", state),
        tag(
            "p", subject, _dataset_size(report), " · " if subject or report.best else "", _device(report), class_="what"
        ),
    )


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
    explanation, best = report.explanation, report.best
    score_tiles = [
        _tile("AP", fmt.metric(best.metrics.ap if best else None), _best_step_note(report)),
        _tile("AP50", fmt.metric(best.metrics.ap50 if best else None), "at IoU 0.5"),
    ]
    tiles = [
        *(score_tiles if report.is_native_run else []),
        _tile(
            "time",
            fmt.duration(explanation.wall_s),
            f"{fmt.plural(explanation.steps, 'step')}, {fmt.number(explanation.img_per_s)} img/s",
        ),
        _tile("device busy", fmt.percentage(explanation.productive_fraction), "fraction of time in optimizer steps"),
    ]
    if explanation.price_range is not None:
        price_text = format_cost((explanation.price_range.low, explanation.price_range.high))
        listed = ", list price" if explanation.price_range.currency else ""
        tiles.append(
            _tile(
                "cost", format_cost(explanation.cost(explanation.device_s)), f"at {price_text} per device-hour{listed}"
            )
        )
    return tag(
        "section",
        tag("h2", "Summary", class_="hidden"),
        tag("dl", tiles, class_="tiles"),
        time_bar,
        _verdict(report),
        _advice(report.advice),
        id="summary",
    )


def _best_step_note(report: RunReport) -> str:
    """The step of the best AP, and the newest AP if it differs."""
    if report.best is None:
        return "not evaluated yet"
    newest = report.eval_history[-1]
    if newest.step == report.best.step:
        return f"at step {newest.step:,}"
    return f"best, at step {report.best.step:,}; at step {newest.step:,} {fmt.metric(newest.metrics.ap)}"


def _tile(name: str, value: str, note: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))


def _verdict(report: RunReport) -> Markup:
    loss = report.explanation.largest_loss
    if loss is None:
        return tag("p", report.explanation.state_text, class_="verdict")
    cost_range = report.explanation.cost(loss.device_s)
    cost_text = f", cost {format_cost(cost_range)}" if cost_range is not None else ""
    return tag(
        "p",
        "Most time was lost in ",
        tag("b", loss.phase.replace("_", " ")),
        f": {fmt.duration(loss.device_s)}, {fmt.percentage(loss.fraction)}{cost_text} ({loss.meaning}). ",
        tag("a", "Time by phase", href="#time"),
        class_="verdict",
    )


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
        return section("results", "Results", _empty_note("The model was not evaluated yet."))
    metrics = best.metrics
    unread = f" ({metrics.missing:,} more could not be read)" if metrics.missing else ""
    image_count = fmt.plural(metrics.num_images, "image")
    description = (
        f"Best EMA weights, at step {best.step:,}, on {image_count}{unread} with "
        f"{fmt.plural(metrics.boxes, 'box', 'boxes')} of the validation split, COCO metrics."
    )
    numbers = [
        [title, fmt.metric(getattr(metrics, name))] for title, name in zip(COCO_TITLES, COCO_SUMMARY, strict=True)
    ]
    twelve = tag("dl", [tag("div", tag("dt", title), tag("dd", value)) for title, value in numbers], class_="twelve")
    parts: list[Child] = [tag("p", description), twelve]
    if evaluation is None:
        known = sorted((row for row in metrics.per_class if row.boxes), key=lambda row: -row.boxes)
        rows = [[row.name, fmt.count(row.boxes), fmt.metric(row.ap), fmt.metric(row.ap50)] for row in known[:MAX_ROWS]]
        parts.append(_collapsible_table("AP by class", ("class", "boxes", "AP", "AP50"), rows, right=(1, 2, 3)))
        return section("results", "Results", *parts)
    if evaluation.step != best.step:  # the run was killed between writing the two files
        parts.append(tag("p", f"Everything below is from step {evaluation.step:,}.", class_="note"))
    parts += [
        _classes(evaluation),
        tag(
            "div",
            page_charts.precision_recall(charts, evaluation),
            page_charts.precision_recall_by_class(charts, evaluation),
            class_="two",
        ),
        tag("h3", "Error types"),
        _error_types(evaluation),
        tag("div", _confusions(evaluation), page_charts.score_histogram(charts, evaluation), class_="two"),
    ]
    return section("results", "Results", *parts)


def _classes(evaluation: Evaluation) -> Markup:
    classes = sorted(
        (class_eval for class_eval in evaluation.classes if class_eval.boxes), key=lambda class_eval: -class_eval.boxes
    )
    absent = [class_eval.name for class_eval in evaluation.classes if not class_eval.boxes]
    rows = [
        [
            class_eval.name,
            fmt.count(class_eval.boxes),
            fmt.metric(class_eval.ap)
            if class_eval.ap is None
            else tag("span", fmt.metric(class_eval.ap), " ", bar(class_eval.ap), class_="nobr"),
            fmt.metric(class_eval.ap50),
            _number(class_eval.threshold),
            _number(class_eval.precision),
            _number(class_eval.recall),
            _number(class_eval.f1),
            _most_frequent_error(class_eval),
        ]
        for class_eval in classes[:MAX_ROWS]
    ]
    heads = ("class", "boxes", "AP", "AP50", "best score", "precision", "recall", "F1", "most frequent error")
    note = (
        "Best score: the threshold with the best F1 at IoU 0.5, to use as --conf; precision, recall, F1 and errors "
        "are at this threshold."
    )
    if len(classes) > MAX_ROWS:
        note += f" The {len(classes) - MAX_ROWS:,} rarest are only in the JSON."
    if absent:
        more = f" and {len(absent) - MAX_NAMED_CLASSES:,} more" if len(absent) > MAX_NAMED_CLASSES else ""
        note += f" Without ground truth in this split: {', '.join(absent[:MAX_NAMED_CLASSES])}{more}."
    return join(_collapsible_table("By class", heads, rows, right=range(1, 8)), tag("p", note, class_="note"))


def _collapsible_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[Child]], *, right: Iterable[int]
) -> Markup:
    """A table of classes; if there are many, the later ones are collapsed."""
    right = tuple(right)
    if len(rows) <= MAX_OPEN_ROWS:
        return table(title, heads, rows, right=right, wide=(0,))
    rest = f"{title}, the next {len(rows) - MAX_OPEN_ROWS}"
    return join(
        table(f"{title}, the {MAX_OPEN_ROWS} most frequent", heads, rows[:MAX_OPEN_ROWS], right=right, wide=(0,)),
        tag(
            "details",
            tag("summary", rest),
            table(rest, heads, rows[MAX_OPEN_ROWS:], right=right, wide=(0,), hidden=True),
        ),
    )


def _number(value: float | None) -> str:
    return fmt.MISSING if value is None else f"{value:.2f}"


def _most_frequent_error(class_eval: ClassEvaluation) -> str:
    error_type = max(class_eval.error_types, key=lambda name: class_eval.error_types[name], default=None)
    return "none" if error_type is None else f"{error_type} ({class_eval.error_types[error_type]:,})"


def _error_types(evaluation: Evaluation) -> Markup:
    counts = sum_error_types(evaluation)
    if not counts:
        return tag("p", "No errors at the best thresholds, at IoU 0.5.")
    max_count = max(counts.values())
    rows = [
        [
            error_type,
            fmt.count(counts[error_type]),
            bar(counts[error_type] / max_count, color="var(--c3)"),
            *ERROR_TYPE_ADVICE[error_type],
        ]
        for error_type in sorted(counts, key=lambda name: -counts[name])
    ]
    tp = sum(class_eval.tp for class_eval in evaluation.classes)
    title = (
        f"Errors at the best score of each class ({tp:,} true positives, "
        f"{fmt.plural(evaluation.metrics.boxes, 'ground truth box', 'ground truth boxes')}); error types of TIDE"
    )
    return table(title, ("error type", "count", "", "meaning", "what to check"), rows, right=(1,), wide=(3, 4))


def _confusions(evaluation: Evaluation) -> Markup:
    if not evaluation.confusions:
        return tag("p", "No detection has an accurate box and a wrong class.", class_="note")
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
        return section("images", "Images", _empty_note("There is no evaluation with images."))
    names = [class_eval.name for class_eval in evaluation.classes]
    parts: list[Child] = [
        tag(
            "p",
            "Images of the validation split. F1 is at IoU 0.5 and the best score of each class. Only errors have "
            "labels; all boxes have tooltips.",
        ),
        legend(),
    ]
    for title, examples in (("Worst", evaluation.worst), ("Best", evaluation.best)):
        rendered = gallery(examples, names) if examples else tag("p", "None.", class_="note")
        parts += [tag("h3", title), rendered]
    return section("images", "Images", *parts)


def curves(report: RunReport, charts: Charts) -> Markup:
    """Training curves by step."""
    drawn: Iterable[Markup | None] = [
        page_charts.scores(charts, report),
        page_charts.loss(charts, report),
        page_charts.step_curve(charts, report, "lr", "Learning rate", "of the last step of a window"),
        page_charts.step_curve(charts, report, "grad_norm", "Gradient norm", "before clipping", yaxis={"type": "log"}),
        page_charts.step_curve(
            charts, report, "img_per_s", "Throughput", "images per second", yaxis={"rangemode": "tozero"}
        ),
        page_charts.step_curve(
            charts,
            report,
            "memory_peak_bytes",
            "Memory",
            "peak of allocated device memory, GiB",
            scale=1 / 2**30,
            yaxis={"rangemode": "tozero"},
        ),
    ]
    shown = [item for item in drawn if item is not None]
    if not shown:
        return section("training", "Training", _empty_note("No optimizer step is recorded."))
    description = "Points are means over several records; the light band is the range from minimum to maximum."
    restarts = [
        tag(
            "li",
            f"attempt {item.attempt} resumed at step {item.step:,}, {fmt.duration(item.after_s)} after the start; "
            f"the previous attempt was {item.previous_end}",
        )
        for item in report.restarts[-30:]
    ]
    listed = tag("ul", restarts, class_="note") if restarts else None
    return section(
        "training", "Training", tag("p", description, class_="note"), listed, tag("div", shown, class_="two")
    )


def _empty_note(sentence: str) -> Markup:
    return tag("p", sentence, class_="absent")
