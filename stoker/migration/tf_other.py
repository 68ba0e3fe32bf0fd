"""The fields of a pipeline.config that no other reader asks for: `knowledge/pipeline_fields.toml` has the reasons why
they have no counterpart, or need none; what it lacks is reported as unknown."""

import re
from fnmatch import fnmatchcase

import msgspec

from stoker.knowledge import read_toml
from stoker.migration.fields import FieldAccount, Status
from stoker.migration.text_format import Message


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fields: tuple[str, ...]
    """Patterns of paths."""
    note: str
    status: Status = "not carried"


UNKNOWN = "no field of the API that stoker knows: misspelled, or newer than release 2.8"
_INDEX = re.compile(r"\[\d+\]")


def read_eval_config(account: FieldAccount, config: Message) -> None:
    """Metrics, and which weights are evaluated."""
    if config.has("metrics_set"):
        metrics = set(config.texts("metrics_set"))
        if metrics <= {"coco_detection_metrics"}:
            account.exact(config, "metrics_set", note="the twelve COCO metrics")
        else:
            note = "the twelve COCO metrics of boxes; AP50 is the Pascal VOC criterion"
            account.substitute(config, "metrics_set", {}, note)
    if config.has("use_moving_averages"):
        averaged = account.settings.get("ema_decay", 0) > 0
        if config.flag("use_moving_averages", False) is averaged:
            account.exact(config, "use_moving_averages")
        else:
            what = "the averaged weights are evaluated and saved" if averaged else "there are no averaged weights"
            account.substitute(config, "use_moving_averages", {}, what)


def read_rest(account: FieldAccount, pipeline: Message) -> None:
    """A row for every field that has none yet."""
    rows = msgspec.convert(read_toml("pipeline_fields.toml")["rows"], list[_Row])
    for owner, name in pipeline.leaves():
        if not account.is_open(owner, name):
            continue
        path = _INDEX.sub("", owner.join(name) if name else owner.path)
        status, reason = next(
            ((row.status, row.note) for row in rows if any(fnmatchcase(path, pattern) for pattern in row.fields)),
            (None, UNKNOWN),
        )
        if status == "exact":
            account.exact(owner, name, note=reason)
        else:
            account.drop(owner, name, reason, is_unknown=status is None)
            if status is None:
                line = owner.lines.get(name, owner.line)
                account.trap("unknown-field", line, f"{path}: {reason}; TensorFlow would refuse the file")
