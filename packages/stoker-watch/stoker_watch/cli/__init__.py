"""The command line: the app and the commands that need no trainer (`runs.py`). Each command imports its code when it
runs; what its parameters mean is a table of knowledge/commands.toml, which `described` adds to its docstring, where
cyclopts reads it. The trainer adds its commands (`trainer.py`)."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from cyclopts import Parameter, Token, convert

from stoker_watch.knowledge import read_toml
from stoker_watch.printable import print_json

Command = TypeVar("Command", bound=Callable[..., None])


@functools.cache
def _meanings(package: str) -> dict[str, dict[str, Any]]:
    folder = Path(str(sys.modules[package].__file__)).parent / "knowledge"
    return read_toml("commands.toml") | read_toml("commands.toml", folder)


def described(command: Command) -> Command:
    """Adds the section of the parameters to the docstring of a command."""
    package, _, module = command.__module__.partition(".cli.")
    tables = _meanings(package)
    texts = tables["common"] | tables[module][command.__name__]
    names = [name for name in inspect.signature(command).parameters if name in texts]
    section = [f"{name}\n    {' '.join(texts[name].split())}" for name in names]
    command.__doc__ = "\n".join([inspect.getdoc(command) or "", "", "Parameters", "----------", *section])
    return command


def show(value: Any, print_value: Callable[[Any], None], *, json: bool) -> None:
    """Prints the result of a command: as JSON, or by `print_value` for people."""
    (print_json if json else print_value)(value)


def _convert_whole(kind: Any, tokens: Sequence[Token]) -> Any:
    """The value of a flag; cyclopts alone would round 3.7 to 4 where a whole number is wanted. Raises ValueError."""
    for token in tokens if _is_whole(kind) else ():
        if re.fullmatch(r"[-+]?\d*\.\d*[1-9].*", token.value):
            flag = f"{token.keyword}: " if len(tokens) > 1 else ""  # of a single value, cyclopts names it
            raise ValueError(f"{flag}{token.value} is not a whole number")
    return convert(kind, tokens)


def _is_whole(kind: Any) -> bool:
    parts = get_args(kind)
    return kind is int or (float not in parts and any(map(_is_whole, parts)))


PARAMETER = Parameter(negative=(), consume_multiple=True, converter=_convert_whole)
"""The default of all commands."""
