"""Flags that users of other tools type: translated, or answered with the right one.

`translate` runs on the arguments before they are parsed. What it changes is printed as a note, so that a user notices
when a setting means something else. The table is `knowledge/flags.toml`.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from stoker.errors import UsageError
from stoker.knowledge import read_toml


class _Meaning(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What flags of other tools mean here: one of `flag`, `arguments`, `answer`."""

    names: tuple[str, ...] = ()
    flag: str = ""
    """They take one value and become this flag."""
    values: dict[str, str] = {}
    """How values are written here; `*`: all others."""
    change: Literal["hours", "device", "epochs"] | None = None
    """A function of _CHANGES for the value."""
    note: str = ""
    arguments: tuple[str, ...] = ()
    """They are on or off and become these; `=False` becomes `off`."""
    off: tuple[str, ...] = ()
    answer: str = ""
    """stoker does not have them: what to do instead."""

    def new_value(self, name: str, value: str) -> str:
        """The value of the flag `name` as it is written here."""
        if self.change is not None:
            return _CHANGES[self.change](name, value)
        return self.values.get(value.lower(), self.values.get("*", value))


def _hours(_: str, value: str) -> str:
    return value if re.search(r"[a-z]", value) else f"{value}h"


def _cuda_device(_: str, value: str) -> str:
    if value.partition(":")[0].lower() in ("tpu", "xla"):
        raise UsageError(f"--device {value} does not exist.", fix=_meanings("train")["tpu"].answer)
    return f"cuda:{value}" if value.isdecimal() else value


_CHANGES: dict[str, Callable[[str, str], str]] = {
    "hours": _hours,
    "device": _cuda_device,
    "epochs": lambda _, value: f"{value}ep",
}
_VALUES: dict[str, Callable[[str, str], str]] = {
    "device": _cuda_device,
    "cache": lambda _, value: {"true": "ram", "false": "none"}.get(value.lower(), value),
    "optimizer": lambda _, value: value.lower(),
}
"""Flag of stoker → how a value of Ultralytics is written here."""
_COMMANDS = ("train", "check", "plan", "eval", "predict", "export", "data", "watch", "import", "why", "report")


@functools.cache
def _table() -> dict[str, list[_Meaning]]:
    return msgspec.convert(read_toml("flags.toml"), dict[str, list[_Meaning]])


@functools.cache
def _meanings(command: str) -> dict[str, _Meaning]:
    """Flag as people type it, without `--`, with `-` → what it means in this command."""
    rows = _table()["train"] if command in ("train", "check", "plan") else _table().get(command, [])
    if command == "plan":
        rows = [*rows, *_table()["plan"]]
    meanings = {name: row for row in rows for name in row.names}
    if command == "plan":
        meanings.pop("gpus")  # it is a flag of this command
    return meanings


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the arguments with the flags of stoker, a note for each that was changed).

    `name=value` behind `stoker train` becomes `--name value`, underscores in flags become dashes. Raises UsageError
    for a flag of another tool that has no counterpart; it says what to do instead.
    """
    has_flags = any(argument.startswith("-") or "=" in argument for argument in arguments[1:])
    if not has_flags or arguments[0] not in _COMMANDS:
        return list(arguments), []
    command, table, rest = arguments[0], _meanings(arguments[0]), list(arguments[1:])
    is_training = command in ("train", "plan", "check")
    out, notes = [command], []
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            out += [argument, *rest]
            break
        match = re.fullmatch(r"([a-z][a-z0-9_]*)=(.*)", argument)
        if match and (is_training or command in ("predict", "export", "eval")):
            if match[1] == "data" and is_training:
                out.append(match[2])
                notes.append(f"{argument}: the data set is the argument `{match[2]}`")
                continue
            argument = f"--{match[1]}={match[2]}"
        name, equals, value = argument.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not argument.startswith("--") and not (re.fullmatch(r"-[a-z]", argument) and name in table):
            out.append(argument)
            continue
        meaning = table.get(name)
        if is_training and name == "val" and not re.fullmatch(r"(?i)(true|false|-.*)?", value or "".join(rest[:1])):
            meaning = None  # an annotation file; Ultralytics' `val` is a switch
        if meaning is None:
            change = _VALUES.get(name) if is_training else None
            if change is not None and not equals and rest:
                equals, value = "=", rest.pop(0)
            out += [f"--{name}", change(name, value) if change else value] if equals else [f"--{name}"]
        elif meaning.answer:
            raise UsageError(f"`stoker {command}` has no {argument.partition('=')[0]}.", fix=meaning.answer)
        elif meaning.arguments:
            arguments = meaning.off if value.lower() in ("false", "0", "no") else meaning.arguments
            out += arguments
            notes.append(
                f"{argument} is `{' '.join(arguments)}` here" if arguments else f"{argument} is left out: it is off"
            )
        else:
            values = [value] if equals else ([rest.pop(0)] if rest and not rest[0].startswith("--") else [])
            if name == "pretrained" and not values:
                values = ["true"]
            out += [f"--{meaning.flag}", *(meaning.new_value(name, value) for value in values)]
            notes.append(f"--{name} is `--{meaning.flag}` here" + (f": {meaning.note}" if meaning.note else ""))
    return _square(out), notes


def _square(arguments: list[str]) -> list[str]:
    """`--image-size 640` is 640 × 640."""
    out: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        is_size = out[-1:] == ["--image-size"] and argument.isdecimal()
        out += [argument, argument] if is_size and not following.isdecimal() else [argument]
    return out
