"""`stoker import pipeline.config`: a training of the TensorFlow Object Detection API as settings of stoker, and a
report that accounts for every field of the file."""

import re
from pathlib import Path
from typing import Any

import msgspec

from stoker import regular_files
from stoker.config.settings import Config, check, from_fields, to_toml
from stoker.errors import UsageError, writing
from stoker.migration.fields import FieldAccount, FieldRow, Trap
from stoker.migration.text_format import Message, read_message
from stoker.migration.tf_inputs import read_inputs
from stoker.migration.tf_model import choose_detector, read_model
from stoker.migration.tf_training import read_training
from stoker.report.models import find_model

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
    """The settings and the report. data: where the records are, if not where the file says.

    Raises ConfigError for a file that cannot be read or has no model that stoker knows.
    """
    pipeline = read_message(path)
    family, model, detector = choose_detector(pipeline.child("model"))
    account = FieldAccount(find_model(detector.model))
    read_model(account, family, model, detector)
    train = pipeline.child("train_config")
    read_training(account, train, model)
    read_inputs(account, pipeline, model, data)
    _read_averages(account, pipeline.child("eval_config"))
    account.rest(pipeline)
    _warn_about_tpu(account, path, uses_bfloat16=train.flag("use_bfloat16", False))
    config = from_fields(account.settings)
    check(config)
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


def _read_averages(account: FieldAccount, config: Message) -> None:
    """Which weights are evaluated."""
    if not config.has("use_moving_averages"):
        return
    averaged = account.settings.get("ema_decay", 0) > 0
    if config.flag("use_moving_averages", False) is averaged:
        account.exact(config, "use_moving_averages")
    else:
        what = "the averaged weights are evaluated and saved" if averaged else "there are no averaged weights"
        account.substitute(config, "use_moving_averages", {}, what)


def _warn_about_tpu(account: FieldAccount, path: Path, *, uses_bfloat16: bool) -> None:
    found = _TPU.search(path.name) or _TPU.search(regular_files.read_text(path, encoding="utf-8-sig"))
    if found or uses_bfloat16:
        what = f"{found[0]}: " if found else "use_bfloat16: "
        text = (
            f"{what}the file is for a TPU (TPUStrategy). stoker does not train on TPUs: take a machine with an NVIDIA "
            "GPU (--device cuda, bf16 by itself). batch_size was chosen for the memory of all TPU cores: a batch that "
            "does not fit is split into micro-batches"
        )
        account.trap("tpu", None, text)


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
