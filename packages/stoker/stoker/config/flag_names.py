"""Commands, flags and values that users of other tools type: translated, or answered with the right one.

`translate` runs on the arguments before they are parsed, `translate_keywords` on those of `stoker.train` and its
siblings. What they change is a note, as a setting may mean something else. The table is `knowledge/flags.toml`.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_type_hints

import msgspec

from stoker.config.keywords import Settings
from stoker.knowledge import read_toml
from stoker_watch.errors import ConfigError, UsageError, nearest
from stoker_watch.printable import print_text


class _Meaning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What names of other tools mean here: one of `flag`, `arguments`, `place`, `drop`, `folder`, `answer`."""

    names: tuple[str, ...]
    typed: str = ""
    """For values that match this regular expression, in any case; no value is the empty text."""
    flag: str = ""
    """They take one value and become this flag."""
    arguments: tuple[str, ...] = ()
    """They become these, with groups of `typed`; a switch that is off is left out."""
    place: int | None = None
    """Their value is this argument of the command, counted from 0."""
    drop: Literal["", "switch", "value"] = ""
    """They are left out, alone or with their value."""
    folder: str = ""
    """They are a part of the path that this flag takes: `project`/`name`."""
    answer: str = ""
    """stoker does not have them: what to do instead."""
    note: str = ""

    @property
    def takes_value(self) -> bool:
        return bool(self.flag or self.folder) or self.place is not None or self.drop == "value"


class _FlagTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """flags.toml. values: for some values of flags, before all others; flags: command → rows."""

    commands: tuple[_Meaning, ...]
    values: tuple[_Meaning, ...]
    flags: dict[str, tuple[_Meaning, ...]]


_LIKE_TRAIN = ("train", "check", "plan")
_TAKES_KEYWORDS = (*_LIKE_TRAIN, "predict", "export", "eval")
"""Commands in which `name=value` is `--name value`."""
_DOTTED = r"((?:[A-Z][A-Z0-9_]*\.)+[A-Z][A-Z0-9_]*)"
"""A setting of Detectron2: SOLVER.BASE_LR 0.01."""
_SWITCH_VALUES = ("true", "false", "yes", "no", "on", "off")


@functools.cache
def _table() -> _FlagTable:
    return msgspec.convert(read_toml("flags.toml"), _FlagTable)


def _meaning_of_value(flag: str, value: str | None) -> _Meaning | None:
    """What the value of a flag becomes, if it is not written as here."""
    text = re.sub(r"^[\[(]|[\])]$|\s", "", value or "")  # a list of Python
    for row in _table().values:
        if flag in row.names and (match := re.fullmatch(row.typed, text, re.IGNORECASE)):
            return msgspec.structs.replace(row, arguments=tuple(map(match.expand, row.arguments)))
    return None


def translate(
    arguments: Sequence[str], flags_of: Callable[[list[str]], Mapping[str, bool] | None]
) -> tuple[list[str], list[str]]:
    """(the arguments with the commands and flags of stoker, a note for each that was changed). `name=value` behind
    `stoker train` becomes `--name value`, underscores in flags become dashes. flags_of: the flags of the command that
    these arguments name, without `--`, and whether each is a switch; None: they are not translated. Raises UsageError
    that names all flags and values without a counterpart, and what to do instead."""
    arguments, notes = _find_command(list(arguments))
    is_plain = not any(re.match(f"-|.*=|{_DOTTED}", argument) for argument in arguments)
    own = None if is_plain or {"--help", "-h"} & set(arguments) else flags_of(arguments)
    if own is None:
        return arguments, notes
    flags, rest = _Flags(arguments, own), arguments[1:]
    while rest:
        flags.take(rest)
    return flags.finish(), notes + flags.notes


def _find_command(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments with the command of stoker for one of another tool, also `mode=train` and `detect train`."""
    typed, rest = (arguments[:1] or [""])[0], arguments[1:]
    if re.match("(task|mode)=", typed):
        mode = next((argument for argument in arguments if argument.startswith("mode=")), "mode=")
        typed, rest = mode.removeprefix("mode="), [argument for argument in arguments if argument != mode]
    rows = {name: row for row in _table().commands for name in row.names}
    if typed == "detect" and rest and (rest[0] in rows or rest[0] in _TAKES_KEYWORDS):
        typed, *rest = rest
    row = rows.get(typed)
    if row is None:
        return [typed, *rest][: len(arguments)], []
    if row.answer:
        raise UsageError(f"There is no `stoker {typed}`.", fix=row.answer)
    if row.arguments[0].startswith("-"):
        return [*rest, *row.arguments], []
    return [*row.arguments, *rest], [f"`{typed}` is `stoker {' '.join(row.arguments)}` here"]


class _Flags:
    """The arguments of one command while they are translated."""

    def __init__(self, arguments: Sequence[str], own: Mapping[str, bool]) -> None:
        table, command = _table().flags, arguments[0]
        self._shown = " ".join(arguments[:2]) if command == "data" else command
        rows = table.get("train" if command in _LIKE_TRAIN else command, ()) + table.get(f"only {command}", ())
        self.command, self.own, self.meanings = command, own, {name: row for row in rows for name in row.names}
        self.notes: list[str] = []
        self._out: list[str] = []
        self._end: list[str] = []
        self._places: dict[int, list[str]] = {}
        self._folder: dict[str, dict[str, str]] = {}
        self._left_out: dict[str, list[str]] = {}
        self._problems: dict[str, list[str]] = {}

    def take(self, rest: list[str]) -> None:
        """Translates the first of the arguments `rest`, with its value, and removes both."""
        typed = rest.pop(0)
        if typed == "--":
            self._end, rest[:] = list(rest), []
            return
        patterns = [r"--([^=]+)(?:=.*)?", r"-([a-z])"]
        if self.command in _TAKES_KEYWORDS:
            patterns += [r"([a-z][\w.]*)=.*", _DOTTED]  # a.b.name=1 is of OmegaConf and mmengine
        match = next(filter(None, (re.fullmatch(pattern, typed, re.DOTALL) for pattern in patterns)), None)
        if match is None or (len(match[1]) == 1 and match[1] not in self.meanings):
            self._out.append(typed)
            return
        name = match[1].rpartition(".")[2].lower().replace("_", "-")
        typed, equals, value = typed.partition("=")
        self._add(typed, name, value if equals else None, rest)

    def finish(self) -> list[str]:
        """The translated arguments. Raises UsageError for all that have no counterpart."""
        if self._problems:
            names = [name for names in self._problems.values() for name in names]
            fixes = [f"{', '.join(found)}: {fix}" for fix, found in self._problems.items()]
            fix = next(iter(self._problems)) if len(fixes) == 1 else "\n          ".join(fixes)
            raise ConfigError(f"`stoker {self._shown}` has no {', '.join(names)}.", fix=fix)
        for flag, parts in self._folder.items():
            path = f"{parts.get('project', 'runs')}/{parts.get('name', self.command)}"
            self._out += [f"--{flag}", path]
            self.notes.append(f"{' and '.join(parts)}: the folder is one path here, `--{flag} {path}`")
        for why, names in self._left_out.items():
            self.notes.append(f"left out: {', '.join(names)}: {why}")
        front = self._places.pop(0, [])
        others = [value for _, values in sorted(self._places.items()) for value in values]
        front, end = ([*front, *others], self._end) if front else ([], [*others, *self._end])
        return [self.command, *front, *self._out, *(["--", *end] if end else [])]

    def _add(self, typed: str, name: str, value: str | None, rest: list[str]) -> None:
        """Adds a flag: of this command, or what it means here if it is of another tool."""
        row = None if name in self.own else self.meanings.get(name)
        is_switch = self.own.get(name, row is not None and not row.takes_value)
        if value is None and rest and not rest[0].startswith("--"):
            is_off = row is not None and _meaning_of_value(name, rest[0]) is not None  # --mixup 0.0
            if not is_switch or is_off or rest[0].lower() in _SWITCH_VALUES:
                value = rest.pop(0)
        if value is not None or not is_switch:
            row = _meaning_of_value(name, value) or (row and _meaning_of_value(row.flag, value)) or row
        if row is not None and row.flag:
            self._note(f"{typed} is `--{row.flag}` here", row)
        if row is None or row.flag:
            self._add_own(typed, name if row is None else row.flag, value, rest)
        else:
            self._translate(row, typed, name, value)

    def _translate(self, row: _Meaning, typed: str, name: str, value: str | None) -> None:
        """Adds what a flag of another tool means that is no flag here."""
        shown = typed if not value else f"{typed} {value}" if typed.startswith("-") else f"{typed}={value}"
        if row.answer or (row.place is not None and not value):
            self._problems.setdefault(row.answer or "it needs a value", []).append(shown if row.typed else typed)
        elif row.drop or (row.arguments and not row.typed and value in ("0", "no", "off", "false", "False")):
            self._left_out.setdefault(row.note or "not needed here", []).append(shown)
        elif row.folder:
            self._folder.setdefault(row.folder, {})[name] = value or ""
        elif row.place is not None:
            self._places.setdefault(row.place, []).append(value or "")
            self.notes.append(f"{shown}: it is the argument `{value}` here")
        elif row.arguments[0][2:] not in self.own:
            self._left_out.setdefault(f"there is no `{row.arguments[0]}` here", []).append(shown)
        else:
            self._out += row.arguments
            text = " ".join(row.arguments)
            if shown.lower().replace("=", " ").lstrip("-") != text.lstrip("-"):
                self._note(f"{shown} is `{text}` here", row)

    def _note(self, text: str, row: _Meaning) -> None:
        self.notes.append(text + (row.note and f": {row.note}"))

    def _add_own(self, typed: str, name: str, value: str | None, rest: list[str]) -> None:
        """Adds a flag of this command, or refuses one that it does not have."""
        if name not in self.own:
            others = [other for other, row in self.meanings.items() if row.flag in self.own]
            near, all_ = nearest(name, [*self.own, *others]), "-all" if self.command == "train" else ""
            known = f"`stoker {self._shown} --help{all_}` lists the flags"
            self._problems.setdefault(f"did you mean `--{near}`?" if near else known, []).append(typed)
        elif value is None:
            self._out.append(f"--{name}")
        elif name == "image-size" and not re.fullmatch(r"[\d.]+", "".join(rest[:1])):
            self._out += [f"--{name}", value, value]
        else:
            is_one = self.own[name] or value.startswith("--")
            self._out += [f"--{name}={value}"] if is_one else [f"--{name}", value]


def translate_keywords(command: str, settings: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """The keywords of the function `stoker.COMMAND`, those of other tools translated as on the command line, with notes
    on stderr. settings: those that are settings, by name; own: parameters of the function itself. Raises UsageError."""
    kinds: dict[str, Any] = get_type_hints(Settings) | dict.fromkeys(own, str) | {"devices": int}
    fields: dict[str, Any] = {}
    typed: list[str] = []
    for name, value in {**own, **settings}.items():
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        is_own = name in kinds and (kinds[name] is bool or _meaning_of_value(name.replace("_", "-"), text) is None)
        if value is None or is_own:
            fields[name] = value
        else:
            typed.append(f"{name}={text}")
    flags = {name.replace("_", "-"): kind is bool for name, kind in kinds.items()}
    arguments, notes = translate([command, *typed], lambda _: flags)
    for note in notes:
        print_text(f"stoker: {note}", file=sys.stderr)
    found: dict[str, list[str]] = {"data": []}
    for argument in arguments[1:]:
        if argument.startswith("--"):
            found[argument[2:].replace("-", "_")] = []
        else:
            next(reversed(found.values())).append(argument)
    for name, texts in found.items():
        value = texts[0] if len(texts) == 1 else texts or True
        with contextlib.suppress(msgspec.ValidationError):  # the check of the settings says what is wrong with it
            value = msgspec.convert(value, kinds.get(name, str), strict=False)
        if texts or name != "data":
            fields[name] = value
    return fields
