"""The command line: one module per group of commands. Each command imports its code when it runs; what its parameters
mean is a table of knowledge/commands.toml, which `described` adds to its docstring, where cyclopts reads it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from stoker.knowledge import read_toml
from stoker.printable import print_json

Command = TypeVar("Command", bound=Callable[..., None])


@functools.cache
def _meanings() -> dict[str, dict[str, Any]]:
    return read_toml("commands.toml")


def described(command: Command) -> Command:
    """Adds the section of the parameters to the docstring of a command."""
    tables, module = _meanings(), command.__module__.rpartition(".")[2]
    texts = tables["common"] | tables[module][command.__name__]
    names = [name for name in inspect.signature(command).parameters if name in texts]
    section = [f"{name}\n    {' '.join(texts[name].split())}" for name in names]
    command.__doc__ = "\n".join([inspect.getdoc(command) or "", "", "Parameters", "----------", *section])
    return command


def show(value: Any, print_value: Callable[[Any], None], *, json: bool) -> None:
    """Prints the result of a command: as JSON, or by `print_value` for people."""
    (print_json if json else print_value)(value)
