"""Reads protobuf's text format into a tree, without the schema of the messages.

protobuf's own parser needs the schema, which is part of the Object Detection API, and it forgets in which line a field
was. Its tokenizer needs neither, so only the tree is made here: names, values and lines, of a file of at most
MAX_BYTES, nested at most MAX_DEPTH deep. Whether a name exists and what a value means is decided by the readers.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker_watch import regular_files
from stoker_watch.errors import ConfigError

MAX_BYTES = 1 << 20
"""The largest file of the API's model zoo has 8 KB."""
MAX_DEPTH = 64
"""The files of the zoo are nested 8 deep."""
Scalar = str | int | float | bool
"""Strings and the names of enumerations are both str."""


@dataclasses.dataclass
class Message:
    """A message: its fields in the order of the file. One that is not in the file has no line and no fields."""

    location: Path
    path: str
    """`train_config.data_augmentation_options[1]` is the second of this name; the file itself is an empty path."""
    line: int | None = None
    scalars: dict[str, list[Scalar]] = dataclasses.field(default_factory=dict)
    """All values of a field; a list and repeated lines are the same."""
    lines: dict[str, int] = dataclasses.field(default_factory=dict)
    """Field of `scalars` → line of its first value."""
    messages: dict[str, list["Message"]] = dataclasses.field(default_factory=dict)

    def child(self, name: str) -> "Message":
        """The message `name` (the last one, if there are several), or an absent one."""
        found = self.messages.get(name)
        return found[-1] if found else Message(self.location, self.join(name))

    def children(self, name: str) -> list["Message"]:
        return self.messages.get(name, [])

    def kind(self) -> str | None:
        """The name of the first message inside: which alternative a `oneof` has."""
        return next(iter(self.messages), None)

    def has(self, name: str) -> bool:
        return name in self.scalars

    def number(self, name: str, default: float) -> float:
        """The last value. Raises ConfigError unless it is a number."""
        return self._number(name, self.scalars.get(name, [default])[-1])

    def numbers(self, name: str) -> tuple[float, ...]:
        """All values. Raises ConfigError unless they are numbers."""
        return tuple(float(self._number(name, value)) for value in self.scalars.get(name, []))

    def _number(self, name: str, value: Scalar) -> float:
        if isinstance(value, bool | str):
            raise self._wrong_kind(name, value, "a number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Raises ConfigError unless it is true or false, or 1 or 0."""
        value = self.scalars.get(name, [default])[-1]
        if value not in (True, False):
            raise self._wrong_kind(name, value, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        return str(self.scalars.get(name, [""])[-1])

    def texts(self, name: str) -> list[str]:
        return [str(value) for value in self.scalars.get(name, [])]

    def join(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def leaves(self) -> Iterator[tuple["Message", str]]:
        """Every field with a value, as (its message, its name). An empty message is one too, with an empty name."""
        for message in self.walk():
            if not message.scalars and not message.messages and message.path:
                yield message, ""
            for name in message.scalars:
                yield message, name

    def walk(self) -> Iterator["Message"]:
        """The message and all inside."""
        yield self
        for messages in self.messages.values():
            for message in messages:
                yield from message.walk()

    def _wrong_kind(self, name: str, value: Scalar, wanted: str) -> ConfigError:
        location = f"{self.location}:{self.lines.get(name, self.line)}"
        return ConfigError(f"{self.join(name)} is {value!r}.", location=location, cause=f"it must be {wanted}")


def read_message(path: Path) -> Message:
    """The tree of a file. Raises ConfigError with file and line."""
    from google.protobuf import text_format  # takes 0.1 s

    what = "The file is not protobuf text."
    try:
        lines = regular_files.read_text(path, encoding="utf-8-sig", max_bytes=MAX_BYTES).splitlines()
    except OSError as error:
        raise ConfigError("The file cannot be read.", location=path, cause=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(what, location=path, cause=f"it is not UTF-8: {error}") from error
    try:
        tokens = text_format.Tokenizer(lines)
        message = Message(path, "", line=1)
        _read_fields(tokens, message, closing=None, depth=0)
    except text_format.ParseError as error:
        number = error.GetLine()
        line, cause, fix = _find_reason(lines, number or len(lines)) or (number, str(error), None)
        location = path if line is None else f"{path}:{line}"
        raise ConfigError(what, location=location, cause=cause, fix=fix) from error
    return message


def _find_reason(lines: list[str], number: int) -> tuple[int, str, str] | None:
    """(line, cause, fix) of an error at line `number`, from 1, which the parser meets as something else; None: it is
    what the parser says."""
    if html := next((n for n, line in enumerate(lines, 1) if re.match(r"\s*<(!doctype|html)\b", line, re.I)), None):
        return html, "it is a web page around the file", "download the file itself: on GitHub the button Raw"
    if quotes := re.search("[“”‘’«»]", lines[number - 1]):
        cause = f"a typographic quote {quotes[0]}, as web pages and word processors make of straight ones"
        straight = re.sub("[“”«»]", '"', lines[number - 1]).strip()
        return number, cause, f"straight quotes in the whole file: {straight}"
    before = next((n for n in range(number - 1, 0, -1) if lines[n - 1].partition("#")[0].strip()), None)
    named = re.fullmatch(r"\s*(\w+)\s*:\s*", lines[before - 1].partition("#")[0]) if before is not None else None
    if named is not None and before is not None:
        return before, f"{named[1]} has no value", "give it one, or remove the line"
    return None


def _read_fields(tokens: Any, message: Message, *, closing: str | None, depth: int) -> None:
    """Reads fields into `message`, up to and with `closing`; None: to the end of the file."""
    if depth > MAX_DEPTH:
        raise tokens.ParseError(f"messages are nested more than {MAX_DEPTH} deep")
    while not (tokens.AtEnd() if closing is None else tokens.TryConsume(closing)):
        if tokens.AtEnd():
            raise tokens.ParseError(f"the {closing!r} of {message.path} is missing")
        name = _read_name(tokens)
        line: int = tokens.ParseErrorPreviousToken("").GetLine()  # of the name's last token
        has_colon = tokens.TryConsume(":")
        if has_colon and tokens.TryConsume("["):
            while not tokens.TryConsume("]"):
                _read_value(tokens, message, name, line, depth)
                if not tokens.TryConsume(",") and not tokens.LookingAt("]"):
                    raise tokens.ParseError("expected ',' or ']'")
        elif has_colon or tokens.token in ("{", "<"):
            _read_value(tokens, message, name, line, depth)
        else:
            raise tokens.ParseError(f"expected ':' or '{{' after {name}")
        if not tokens.TryConsume(","):
            tokens.TryConsume(";")


def _read_name(tokens: Any) -> str:
    """A field's name; an extension's full name with its brackets."""
    if not tokens.TryConsume("["):
        return str(tokens.ConsumeIdentifier())
    parts = [tokens.ConsumeIdentifier()]
    while tokens.token in (".", "/"):
        parts += [tokens.token]
        tokens.NextToken()
        parts += [tokens.ConsumeIdentifier()]
    tokens.Consume("]")
    return f"[{''.join(parts)}]"


def _read_value(tokens: Any, message: Message, name: str, line: int, depth: int) -> None:
    """A message or a scalar, added to `message`."""
    for opening, closing in (("{", "}"), ("<", ">")):
        if tokens.TryConsume(opening):
            siblings = message.messages.setdefault(name, [])
            child = Message(message.location, message.join(name), line)
            siblings.append(child)
            if len(siblings) > 1:
                child.path += f"[{len(siblings) - 1}]"
            _read_fields(tokens, child, closing=closing, depth=depth + 1)
            return
    message.lines.setdefault(name, line)
    message.scalars.setdefault(name, []).append(_read_scalar(tokens))


MAX_INTEGER = 1 << 64
"""Larger ones are no fields of protobuf, and inf and nan no settings."""


def _read_scalar(tokens: Any) -> Scalar:
    token = tokens.token
    if token[:1] in ("'", '"'):
        return str(tokens.ConsumeString())
    if token[:1].isalpha() or token[:1] == "_":
        name = str(tokens.ConsumeIdentifier())
        return {"true": True, "True": True, "false": False, "False": False}.get(name, name)
    try:
        number: int | float = int(token, 0)
        tokens.NextToken()
    except ValueError:
        number = float(tokens.ConsumeFloat())
    if not math.isfinite(number) if isinstance(number, float) else abs(number) > MAX_INTEGER:
        raise tokens.ParseErrorPreviousToken(f"{token[:40]} is no number that a training can have")
    return number
