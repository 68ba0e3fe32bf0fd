"""Accounts for every field of a file that is imported: each gets exactly one row of the report.

The readers (`tf_*.py`) call `carry` or `drop` for the fields that they compute settings from; all others are looked up
in `knowledge/pipeline_fields.toml` (`rest`). What a field becomes is not decided here.
"""

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from stoker.config.architectures import Architecture
from stoker.config.settings import SECTION_OF
from stoker.knowledge import read_toml
from stoker.migration.text_format import Message, Scalar

Status = Literal["exact", "substitute", "not carried"]
MODEL_SETTINGS_OF_ALL = ("model", "weights", "backbone_norm", "trainable_backbone_layers")
"""Settings of the section `model` that every architecture has."""


UNKNOWN = "no field of the API that stoker knows: misspelled, or newer than release 2.8"
_INDEX = re.compile(r"\[\d+\]")


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `pipeline_fields.toml`, which says what the fields mean."""

    fields: tuple[str, ...]
    note: str = ""
    status: Status = "not carried"
    values: tuple[Scalar, ...] | None = None
    models: tuple[str, ...] = ("*",)
    settings: dict[str, Scalar] = {}
    """Values of stoker's settings; "{value}" is the number in the file."""
    default: Scalar | None = None
    """The API's value where the message lacks the field: the row is about that case only."""

    def matches(self, path: str, values: list[Scalar], model: str) -> bool:
        has_values = self.values is None or set(values) <= set(self.values)
        is_for_model = any(fnmatchcase(model, pattern) for pattern in self.models)
        return has_values and is_for_model and any(fnmatchcase(path, pattern) for pattern in self.fields)


class ModelChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a feature extractor of the API becomes."""

    pattern: str
    """It is compared with the type without `_keras`; the first that matches counts."""
    model: str
    note: str


class PipelineKnowledge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: tuple[_Rule, ...]
    detectors: dict[str, tuple[ModelChoice, ...]]
    fallbacks: dict[str, str]
    """Family of the API → the usual model of it."""
    resizers: dict[str, dict[str, int]]
    """Resizer → the fields with its sides, and their defaults."""
    colors: dict[str, dict[str, tuple[float, float, dict[str, float]]]]
    """Augmentation → setting (the largest distance from the center, up to the limit) → (center, limit, defaults)."""
    traps: dict[str, str]
    """Name → its text, in which {names} stand for values."""
    scales: dict[str, tuple[tuple[str, float], tuple[str, float]]]
    """Augmentation → (field, its default) of the smallest and of the largest scale; without a field the default."""


@functools.cache
def knowledge() -> PipelineKnowledge:
    return msgspec.convert(read_toml("pipeline_fields.toml"), PipelineKnowledge)


class FieldRow(msgspec.Struct, frozen=True, kw_only=True):
    """A field of the file, and what became of it."""

    field: str
    """`train_config.batch_size`; with an index where the message is one of several."""
    line: int | None
    """None: the field is not in the file, and the default of the API applies."""
    value: str
    status: Status
    settings: dict[str, Any] = {}
    """The settings of stoker that it decides."""
    note: str = ""
    """What differs (a substitute), or why it has no counterpart (not carried)."""
    is_unknown: bool = False


class Trap(msgspec.Struct, frozen=True, kw_only=True):
    """Something that TensorFlow does silently and that people trip over."""

    name: str
    line: int | None
    text: str


@dataclasses.dataclass
class FieldAccount:
    """The rows so far, the settings that they decide, and the traps."""

    model: Architecture
    """The architecture that is trained: it has only some of the settings."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: dict[str, FieldRow] = dataclasses.field(default_factory=dict)
    """By path."""
    traps: list[Trap] = dataclasses.field(default_factory=list)

    def drop(self, message: Message, name: str, reason: str, *, is_unknown: bool = False) -> None:
        """The field has no counterpart. name: "" for the message itself, if it is empty."""
        self._add(message, name, status="not carried", note=reason, is_unknown=is_unknown)

    def whole(self, message: Message, settings: dict[str, Any], note: str) -> None:
        """A substitute for every open field of a message that becomes one thing."""
        for owner, name in message.leaves():
            if _path(owner, name) not in self.rows:
                self.carry(owner, name, "substitute", settings, note)

    def trap(self, name: str, line: int | None, **values: object) -> str:
        """Adds a trap; returns its text."""
        self.traps.append(Trap(name=name, line=line, text=knowledge().traps[name].format(**values)))
        return self.traps[-1].text

    def rest(self, pipeline: Message) -> None:
        """A row for every field that has none yet, from `pipeline_fields.toml`, and for defaults of the API in it."""
        rules, of_absent = [rule for rule in knowledge().rows if rule.default is None], defaultdict(list)
        for rule in knowledge().rows:
            for field in rule.fields if rule.default is not None else ():
                folder, _, name = field.rpartition(".")
                of_absent[folder].append((name, rule))
        for message in pipeline.walk():
            folder = _INDEX.sub("", message.path)
            for name, rule in of_absent.get(folder, ()):
                is_open = message.join(name) not in self.rows and not message.has(name)
                if is_open and rule.matches(f"{folder}.{name}", [], self.model.name):
                    self._apply(rule, message, name, [])
        for owner, name in pipeline.leaves():
            if _path(owner, name) in self.rows:
                continue
            path, values = _INDEX.sub("", _path(owner, name)), owner.scalars.get(name, [])
            found = next((rule for rule in rules if rule.matches(path, values, self.model.name)), None)
            if found is not None:
                self._apply(found, owner, name, values)
                continue
            self.drop(owner, name, UNKNOWN, is_unknown=True)
            line = owner.lines.get(name, owner.line)
            self.trap("unknown-field", line, path=path, reason=UNKNOWN)

    def _apply(self, rule: _Rule, owner: Message, name: str, values: list[Scalar]) -> None:
        note = rule.note.replace("{model}", self.model.name).replace("{value}", _written(values) if values else "")
        settings = {
            key: owner.number(name, 0.0) if value == "{value}" and rule.default is None
            else rule.default if value == "{value}" else value
            for key, value in rule.settings.items()
        }  # fmt: skip
        if rule.status == "not carried":
            self.drop(owner, name, note)
        else:
            self.carry(owner, name, rule.status, settings, note)

    def carry(self, message: Message, name: str, status: Status, settings: dict[str, Any], note: str) -> None:
        """exact: the field means the same here; substitute: the nearest that stoker has, and the note says what
        differs. A field of settings that the model does not have is dropped."""
        known = (*MODEL_SETTINGS_OF_ALL, *self.model.defaults)
        missing = [setting for setting in settings if SECTION_OF[setting] == "model" and setting not in known]
        if missing and len(missing) == len(settings):
            flags = ", ".join(f"--{setting.replace('_', '-')}" for setting in missing)
            self.drop(message, name, f"{self.model.name} has no {flags}")
            return
        settings = {setting: value for setting, value in settings.items() if setting not in missing}
        self.settings |= settings
        self._add(message, name, status=status, settings=settings, note=note)

    def _add(self, message: Message, name: str, **fields: Any) -> None:
        path = _path(message, name)
        assert path not in self.rows, f"{path} has two rows"
        inside = message.messages.get(name)
        values = message.scalars.get(name)
        line = inside[0].line if inside else message.lines.get(name) if name else message.line
        value = "{…}" if inside else "{}" if not name else "(default)" if values is None else _written(values)
        self.rows[path] = FieldRow(field=path, line=line, value=value, **fields)


def _path(message: Message, name: str) -> str:
    return message.join(name) if name else message.path


def _written(values: Sequence[Scalar]) -> str:
    """The values as the file has them, without quotes."""
    words = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"
