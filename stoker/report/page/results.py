"""The page's sections about what was learnt: the summary at the top, scores, mistakes, pictures, curves.

What the run did and ran on is `run_sections.py`.
"""

from collections.abc import Iterable, Sequence

from stoker.evaluation.document import ClassEvaluation, Evaluation
from stoker.evaluation.metrics import TWELVE
from stoker.report import format as fmt
from stoker.report.advice import KINDS, Advice, mistake_counts
from stoker.report.explain_terminal import cost
from stoker.report.page import charts as draw
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
from stoker.report.run_report import Report

STATES = {
    "live": ("●", "still running"),
    "finished": ("✓", "finished"),
    "preempted": ("❚❚", "stopped by a signal"),
    "failed": ("✕", "failed"),
    "dead": ("✕", "died"),
    "unknown": ("?", "end unknown"),
}
"""State → sign and words: never by colour alone."""
MARKS = {"critical": "✕ critical", "warning": "▲ warning", "info": "● to improve"}
ADVICE_SHOWN = 4
MOST_ROWS, OPEN_ROWS = 100, 20
"""Classes in a table; of more, the most frequent. Those beyond the second number are folded."""
NAMED = 8
"""Classes in a sentence."""
_TITLES = (
    "AP",
    "AP50",
    "AP75",
    "AP small",
    "AP medium",
    "AP large",
    "AR 1",
    "AR 10",
    "AR 100",
    "AR small",
    "AR medium",
    "AR large",
)


def head(report: Report) -> Markup:
    """Name, state, what was trained on what."""
    sign, words = STATES[report.why.state]
    state = tag("span", tag("span", sign, aria_hidden="true"), f" {words}", class_=f"state {report.why.state}")
    what = [tag("b", report.model), " on ", tag("b", report.data)] if report.model and report.data else []
    if not report.ours:
        what = ["a job that stoker watched" if report.why.watched else "a loop that stoker measured"]
    return tag(
        "header",
        tag("h1", report.run.rstrip("/").rpartition("/")[2], " ", state),
        tag("p", what, _sizes(report), " · " if what or report.best else "", _device(report), class_="what"),
    )


def _sizes(report: Report) -> str:
    metrics = report.best.metrics if report.best else None
    if metrics is None:
        return ""
    classes = fmt.plural(len(metrics.per_class), "class", "classes")
    return f" · {classes}, {fmt.plural(metrics.pictures, 'validation picture')}"


def _device(report: Report) -> str:
    gpu = report.environment.get("gpu")
    gpus = gpu.get("gpus") if isinstance(gpu, dict) else None
    names = [str(one.get("name")) for one in gpus if isinstance(one, dict)] if isinstance(gpus, list) else []
    if names:
        return f"{len(names)} × {names[0]}" if len(names) > 1 else names[0]
    cores = report.environment.get("cores")
    return f"{report.environment.get('cpu') or 'device unknown'}" + (f", {cores} cores" if cores else "")


def summary(report: Report, time_bar: Markup | None) -> Markup:
    """How good, how long, where the time went, what to do next."""
    why, best = report.why, report.best
    scored = [
        _tile("AP", fmt.metric(best.metrics.ap if best else None), _when(report)),
        _tile("AP50", fmt.metric(best.metrics.ap50 if best else None), "a box is right from IoU 0.5"),
    ]
    tiles = [
        *(scored if report.ours else []),
        _tile("time", fmt.duration(why.wall_s), f"{fmt.plural(why.steps, 'step')}, {fmt.number(why.img_per_s)} img/s"),
        _tile("device busy", fmt.share(why.productive_share), "of its time on optimizer steps"),
    ]
    if why.rate is not None:
        each = cost((why.rate.low, why.rate.high))
        listed = ", by the list" if why.rate.currency else ""
        tiles.append(_tile("cost", cost(why.cost(why.device_s)), f"at {each} per device-hour{listed}"))
    return tag(
        "section",
        tag("h2", "Summary", class_="hidden"),
        tag("dl", tiles, class_="tiles"),
        time_bar,
        _verdict(report),
        _advice(report.advice),
        id="summary",
    )


def _when(report: Report) -> str:
    """Of which step the AP is, and what it is now where that is another."""
    if report.best is None:
        return "not scored yet"
    newest = report.scored[-1]
    if newest.step == report.best.step:
        return f"at step {newest.step:,}"
    return f"best, at step {report.best.step:,}; at step {newest.step:,} {fmt.metric(newest.metrics.ap)}"


def _tile(name: str, value: str, note: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))


def _verdict(report: Report) -> Markup:
    loss = report.why.largest_loss
    if loss is None:
        return tag("p", report.why.state_text, class_="verdict")
    money = report.why.cost(loss.device_s)
    paid = f", cost {cost(money)}" if money is not None else ""
    return tag(
        "p",
        "The largest loss of time is ",
        tag("b", loss.phase.replace("_", " ")),
        f": {fmt.duration(loss.device_s)}, {fmt.share(loss.share)}{paid} ({loss.meaning}). ",
        tag("a", "All of the time", href="#time"),
        class_="verdict",
    )


def _advice(advice: list[Advice]) -> Markup:
    title = tag("h3", "What to do next")
    if not advice:
        return join(title, tag("p", "Nothing stands out: no rule of the diagnosis found a loss worth mending."))
    shown = [_one_advice(one) for one in advice[:ADVICE_SHOWN]]
    rest = [_one_advice(one) for one in advice[ADVICE_SHOWN:]]
    more = tag("details", tag("summary", f"{len(rest)} more"), tag("ol", rest, class_="advice")) if rest else None
    return join(title, tag("ol", shown, class_="advice"), more)


def _one_advice(one: Advice) -> Markup:
    command = [" ", code(one.command)] if one.command else []
    because = tag("span", one.because, class_="because") if one.because else None
    return tag(
        "li",
        tag("span", MARKS[one.severity], class_=f"mark {one.severity}"),
        " ",
        tag("b", one.title),
        because,
        tag("span", tag("span", "Fix: "), one.fix, command, class_="fix"),
        class_=one.severity,
    )


def scores(report: Report, charts: Charts) -> Markup:
    """The twelve numbers, classes, curves, mistakes."""
    best, evaluation = report.best, report.evaluation
    if best is None:
        return section("results", "Results", _absent("The model has not been scored yet."))
    metrics = best.metrics
    unread = f" ({metrics.missing:,} more could not be read)" if metrics.missing else ""
    seen = fmt.plural(metrics.pictures, "picture")
    says = (
        f"Of the best averaged weights, at step {best.step:,}, on {seen}{unread} with "
        f"{fmt.plural(metrics.boxes, 'box', 'boxes')} of the validation split, as COCO counts."
    )
    numbers = [[title, fmt.metric(getattr(metrics, name))] for title, name in zip(_TITLES, TWELVE, strict=True)]
    twelve = tag("dl", [tag("div", tag("dt", title), tag("dd", value)) for title, value in numbers], class_="twelve")
    parts: list[Child] = [tag("p", says), twelve]
    if evaluation is None:
        known = sorted((one for one in metrics.per_class if one.boxes), key=lambda one: -one.boxes)[:MOST_ROWS]
        rows = [[one.name, fmt.count(one.boxes), fmt.metric(one.ap), fmt.metric(one.ap50)] for one in known]
        parts.append(_folded("AP by class", ("class", "boxes", "AP", "AP50"), rows, right=(1, 2, 3)))
        return section("results", "Results", *parts)
    if evaluation.step != best.step:  # a run that was killed between the two files
        parts.append(tag("p", f"All below is of step {evaluation.step:,}.", class_="note"))
    parts += [
        _classes(evaluation),
        tag(
            "div",
            draw.precision_recall(charts, evaluation),
            draw.precision_recall_by_class(charts, evaluation),
            class_="two",
        ),
        tag("h3", "Mistakes"),
        _mistakes(evaluation),
        tag("div", _confusions(evaluation), draw.score_histogram(charts, evaluation), class_="two"),
    ]
    return section("results", "Results", *parts)


def _classes(evaluation: Evaluation) -> Markup:
    classes = sorted((of for of in evaluation.classes if of.boxes), key=lambda of: -of.boxes)
    absent = [of.name for of in evaluation.classes if not of.boxes]
    rows = [
        [
            of.name,
            fmt.count(of.boxes),
            fmt.metric(of.ap) if of.ap is None else tag("span", fmt.metric(of.ap), " ", bar(of.ap), class_="nobr"),
            fmt.metric(of.ap50),
            _number(of.threshold),
            _number(of.precision),
            _number(of.recall),
            _number(of.f1),
            _worst_kind(of),
        ]
        for of in classes[:MOST_ROWS]
    ]
    heads = ("class", "boxes", "AP", "AP50", "best score", "precision", "recall", "F1", "most frequent mistake")
    note = (
        "Best score: the threshold with the best F1 at IoU 0.5, to use as --conf; precision, recall, F1 and mistakes "
        "are those at it."
    )
    if len(classes) > MOST_ROWS:
        note += f" The {len(classes) - MOST_ROWS:,} rarest are in the JSON alone."
    if absent:
        more = f" and {len(absent) - NAMED:,} more" if len(absent) > NAMED else ""
        note += f" Without a true box in this split: {', '.join(absent[:NAMED])}{more}."
    return join(_folded("By class", heads, rows, right=range(1, 8)), tag("p", note, class_="note"))


def _folded(title: str, heads: Sequence[str], rows: Sequence[Sequence[Child]], *, right: Iterable[int]) -> Markup:
    """A table of classes, of which the first are seen and the others, where there are many, wait behind a line."""
    right = tuple(right)
    if len(rows) <= OPEN_ROWS:
        return table(title, heads, rows, right=right, wide=(0,))
    rest = f"{title}, the next {len(rows) - OPEN_ROWS}"
    return join(
        table(f"{title}, the {OPEN_ROWS} most frequent", heads, rows[:OPEN_ROWS], right=right, wide=(0,)),
        tag("details", tag("summary", rest), table(rest, heads, rows[OPEN_ROWS:], right=right, wide=(0,), hidden=True)),
    )


def _number(value: float | None) -> str:
    return fmt.MISSING if value is None else f"{value:.2f}"


def _worst_kind(of: ClassEvaluation) -> str:
    kind = max(of.mistakes, key=lambda name: of.mistakes[name], default=None)
    return "none" if kind is None else f"{kind} ({of.mistakes[kind]:,})"


def _mistakes(evaluation: Evaluation) -> Markup:
    counts = mistake_counts(evaluation)
    if not counts:
        return tag("p", "None at the best thresholds, at IoU 0.5.")
    most = max(counts.values())
    rows = [
        [kind, fmt.count(counts[kind]), bar(counts[kind] / most, colour="var(--c3)"), *KINDS[kind]]
        for kind in sorted(counts, key=lambda name: -counts[name])
    ]
    right = sum(of.right for of in evaluation.classes)
    title = (
        f"What is wrong at each class's best score ({right:,} detections are right, of "
        f"{fmt.plural(evaluation.metrics.boxes, 'true box', 'true boxes')}); kinds after TIDE"
    )
    return table(title, ("mistake", "count", "", "what it is", "where to look"), rows, right=(1,), wide=(3, 4))


def _confusions(evaluation: Evaluation) -> Markup:
    if not evaluation.confusions:
        return tag("p", "No object was found in the right place as another class.", class_="note")
    names = [of.name for of in evaluation.classes]
    rows = [[names[one.true], names[one.found], fmt.count(one.count)] for one in evaluation.confusions[:10]]
    return table("Most frequently confused classes", ("is", "found as", "count"), rows, right=(2,))


def pictures(report: Report) -> Markup:
    """The worst and the best, with boxes."""
    evaluation = report.evaluation
    if evaluation is None:
        return section("pictures", "Pictures", _absent("There is no evaluation with pictures."))
    names = [of.name for of in evaluation.classes]
    parts: list[Child] = [
        tag(
            "p",
            "Of the validation split. F1 counts boxes that are right at IoU 0.5 and each class's best score; only "
            "mistakes carry their names, all boxes say theirs when pointed at.",
        ),
        legend(),
    ]
    for title, found in (("Worst", evaluation.worst), ("Best", evaluation.best)):
        shown = gallery(found, names) if found else tag("p", "None.", class_="note")
        parts += [tag("h3", title), shown]
    return section("pictures", "Pictures", *parts)


def curves(report: Report, charts: Charts) -> Markup:
    """What was recorded by steps."""
    drawn: Iterable[Markup | None] = [
        draw.scores(charts, report),
        draw.loss(charts, report),
        draw.one_curve(charts, report, "rate", "Learning rate", "of the last step of a window"),
        draw.one_curve(charts, report, "grad_norm", "Norm of the gradient", "before clipping", yaxis={"type": "log"}),
        draw.one_curve(
            charts, report, "img_per_s", "Speed", "pictures trained on per second", yaxis={"rangemode": "tozero"}
        ),
        draw.one_curve(
            charts,
            report,
            "memory_peak_bytes",
            "Memory",
            "most that the device had allocated so far, GiB",
            scale=1 / 2**30,
            yaxis={"rangemode": "tozero"},
        ),
    ]
    shown = [one for one in drawn if one is not None]
    if not shown:
        return section("training", "Training", _absent("No optimizer step is recorded."))
    says = "Points are means of what was recorded there; a pale band behind a curve reaches from least to greatest."
    restarts = [
        tag(
            "li",
            f"attempt {one.attempt} went on from step {one.step:,}, {fmt.duration(one.after_s)} after the start; "
            f"the one before was {one.ended}",
        )
        for one in report.restarts[-30:]
    ]
    listed = tag("ul", restarts, class_="note") if restarts else None
    return section("training", "Training", tag("p", says, class_="note"), listed, tag("div", shown, class_="two"))


def _absent(sentence: str) -> Markup:
    return tag("p", sentence, class_="absent")
