"""`stoker import pipeline.config`: a training of the TensorFlow Object Detection API as settings of stoker, and a
report that accounts for every field of the file, as data and on the screen."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import RenderableType
from rich.text import Text

from stoker.config.settings import Config, check_config, from_fields, to_toml
from stoker.data.formats.tfrecord_bytes import looks_like_label_map, read_label_map
from stoker.migration.fields import FieldAccount, FieldRow, Trap
from stoker.migration.text_format import Message, read_message
from stoker.migration.tf_inputs import read_inputs
from stoker.migration.tf_model import choose_detector, read_model
from stoker.migration.tf_training import read_training
from stoker.report.models import find_model
from stoker_watch import regular_files
from stoker_watch.errors import UsageError, writing
from stoker_watch.report import format as fmt
from stoker_watch.report.console import plain_text, print_renderables, table

_TPU = re.compile(r"\btpu-?\d+\b|\btpu-v\d", re.IGNORECASE)
"""In the names of the model zoo (`…_tpu-8.config`) and in comments."""


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a pipeline.config."""

    source: str
    architecture: str
    """The feature extractor of the API."""
    model: str
    settings: dict[str, Any]
    fields: list[FieldRow]
    """In the order of the file, then defaults of the API that matter."""
    traps: list[Trap]


def import_pipeline(path: Path, *, data: str | None = None) -> tuple[Config, ImportReport]:
    """The settings and the report. data: where the records are, if not where the file says. Raises ConfigError for a
    file that cannot be read or has no model that stoker knows."""
    pipeline = read_message(path)
    family, model, detector = choose_detector(pipeline.child("model"))
    account = FieldAccount(find_model(detector.model))
    read_model(account, family, model, detector)
    train = pipeline.child("train_config")
    read_training(account, train, model)
    read_inputs(account, pipeline, data)
    _compare_classes(account, pipeline, model)
    account.rest(pipeline)
    tpu = _TPU.search(path.name) or _TPU.search(regular_files.read_text(path, encoding="utf-8-sig"))
    if tpu or train.flag("use_bfloat16", False):
        account.trap("tpu", None, sign=tpu[0] if tpu else "use_bfloat16")
    config = from_fields(account.settings)
    check_config(config)
    rows = sorted(account.rows.values(), key=lambda row: (row.line is None, row.line or 0))
    report = ImportReport(
        source=str(path),
        architecture=model.child("feature_extractor").text("type"),
        model=detector.model,
        settings=config.set_fields(),
        fields=rows,
        traps=account.traps,
    )
    return config, report


def _compare_classes(account: FieldAccount, pipeline: Message, model: Message) -> None:
    """A trap where the label map that the file names, there or beside the file, has another number of classes."""
    reader = pipeline.child("train_input_reader")
    named = Path(reader.text("label_map_path") or "")
    found = next((path for path in (named, pipeline.location.parent / named.name) if path.is_file()), None)
    if found is None or not model.has("num_classes") or not looks_like_label_map(found):
        return
    ids, count = read_label_map(found).ids, int(model.number("num_classes", 0))
    if count != max(ids):
        line = model.lines.get("num_classes")
        account.trap("num-classes", line, count=count, path=found, ids=len(ids), largest=max(ids))


def write_config(config: Config, report: ImportReport, out: Path) -> None:
    """Writes config.toml. Raises UsageError if another file is there, StorageError if it cannot be written."""
    text = f"# Imported by `stoker import` from {report.source.splitlines()[0]} ({report.architecture}).\n"
    text += (
        "# Train with `stoker train --config` and this file; flags override it. What is not set here is derived.\n\n"
    )
    text += to_toml(config, {}).replace("[reasons]\n", "").rstrip() + "\n"
    with writing("The settings cannot be written.", out):
        if out.exists() and out.read_text() != text:
            raise UsageError("Another file is there already.", location=out, fix="--out FILE, or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


TITLES = {
    "not carried": ("not carried over", "red"),
    "substitute": ("carried over with a substitute", "yellow"),
    "exact": ("carried over exactly", "green"),
}
"""In the order of printing: what asks for a look comes first."""


def print_import(
    report: ImportReport, file: TextIO | None = None, *, width: int | None = None, show_exact: bool = True
) -> None:
    """Prints the fields by what became of them, and the traps. show_exact: also what was carried over exactly."""
    title = f"{report.source}: {report.architecture or 'no feature extractor'} becomes {report.model}"
    renderables: list[RenderableType] = [plain_text(title)]
    for status, (title, style) in TITLES.items():
        rows = [row for row in report.fields if row.status == status]
        is_counted = status == "exact" and not show_exact
        more = " (--all lists them)" if is_counted and rows else ""
        renderables += [Text(""), Text(f"{title}: {fmt.plural(len(rows), 'field')}{more}", style=style)]
        renderables += [] if is_counted else [_table(rows)]
    if report.traps:
        renderables += [Text(""), Text(f"known traps: {len(report.traps)}", style="bold")]
    for trap in report.traps:
        line = "" if trap.line is None else f" (line {trap.line})"
        renderables.append(plain_text(f"  {trap.name}{line}: {trap.text}"))
    print_renderables(renderables, file, width=width)


def _table(rows: Sequence[FieldRow]) -> RenderableType:
    rendered = table("line", "field", "value", "here", "", right=(0,))
    for row in rows:
        settings = ", ".join(f"{name} {fmt.setting(value)}" for name, value in row.settings.items())
        line = "" if row.line is None else str(row.line)
        rendered.add_row(line, row.field, row.value, settings, row.note)
    return rendered
