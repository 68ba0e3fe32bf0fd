"""Masks secrets in commands and variables before they are recorded.

Names decide (`--token X`, `DB_PASSWORD=X`, `"apiKey": "X"`, `?sig=X`), then forms that show by themselves that they are
secret: users and passwords in URLs, `Bearer X`, keys with the prefix of their provider (`knowledge/secrets.toml`). What
is doubtful is masked. The time is proportional to the length of the text.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from stoker_watch.knowledge import read_toml

MASK = "***"


class _SecretForms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """secrets.toml, which explains its fields."""

    words: frozenset[str]
    flags: frozenset[str]
    no_key_after: str
    parts: tuple[str, ...]
    ends: tuple[str, ...]
    forms: tuple[str, ...]


_TABLE = msgspec.convert(read_toml("secrets.toml"), _SecretForms)
_FORMS = [re.compile(form) for form in _TABLE.forms]
_NO_KEY_AFTER = re.compile(_TABLE.no_key_after)
_NUMBER = re.compile(r"[-+]?[\d.,]+(?![^\s\0])")
_NOT_SECRET = re.compile(
    r"(?:OLD)?PWD|(?:\w+[-_.])?(?:num|n|max|min|by|first|second|forward|backward|single|multi)[-_]?pass"
)
_MESSAGE_NAMES = {"error", "exception", "warning"}
"""Last words of names that a message follows: `NoCredentialsError: …`."""
_NAME_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_EXPLANATION = re.compile(r"credentials: [a-z]+ [^\s\0]")
"""What errors of stoker say of credentials. Neither is `…/api/token: refused` a secret."""

_ASSIGNMENT = re.compile(
    r"(?P<dashes>(?<![\w-])-{1,2}(?=\w))?(?<!\w)(?P<name>[A-Za-z_][\w.-]{0,60})"
    r"(?:\\{0,4}[\"']?\]?\s{0,8}(?P<sign>:=|=>|[:=])\s{0,8}|(?(dashes)(?P<gap>[\s\0]\s{0,8})|(?!)))"
)
"""`name=`, `name: `, `"name": `; a flag also before a space or before the next argument (NUL)."""
_QUOTED = re.compile(r"\\{0,4}\"(?:[^\"\\\0]|\\[^\0])*\"?|'[^'\0]*'?")
_WORD, _QUERY_VALUE = re.compile(r"[^\s\0]*"), re.compile(r"[^\s\0&#\"']*")
_ARGUMENT, _HEADER_VALUE = re.compile(r"[^\0]*"), re.compile(r"[^\0\n\"']*")


def is_secret_name(name: str) -> bool:
    """Whether a variable, flag or field of this name holds a secret: `HF_TOKEN`, `dbPassword`, `sig`."""
    if _NOT_SECRET.fullmatch(name):
        return False
    words = [word.lower() for word in _NAME_WORD.findall(name)]
    if not _MESSAGE_NAMES.isdisjoint(words[-1:]):
        return False
    joined = "".join(words)
    return (
        not _TABLE.words.isdisjoint(words)
        or words[-1:] == ["key"]
        or words[-2:] == ["key", "id"]
        or name.endswith("_PAT")
        or joined.endswith(_TABLE.ends)
        or any(part in joined for part in _TABLE.parts)
    )


def mask_secrets(text: str) -> str:
    """The text without secrets: `s3://***@host/…`, `…?sig=***`, `password=***`."""
    masked = _mask_named_values(text)
    for form in _FORMS:
        masked = form.sub(rf"\1{MASK}" if form.groups else MASK, masked)
    return masked


def without_secrets(value: Any) -> Any:
    """The same value with masked texts, at any depth of lists and of the values of dicts."""
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, dict):
        return {key: without_secrets(item) for key, item in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def mask_argv(argv: Iterable[str]) -> list[str]:
    """A command without secrets, also those in an argument of its own: `--token X`, `-p X`."""
    args = list(argv)
    return mask_secrets("\0".join(args)).split("\0") if args else []


def _mask_named_values(text: str) -> str:
    pieces: list[str] = []
    done = position = 0
    while (match := _ASSIGNMENT.search(text, position)) is not None:
        position = match.end("name")
        if match["sign"] == ":" and (
            text[match.start() - 1 : match.start()] == "/" or _EXPLANATION.match(text, match.start())
        ):
            continue
        if not (_is_secret_flag(text, match) or is_secret_name(match["name"])):
            continue
        start, end = match.end(), _value_end(text, match)
        if end > start:
            pieces += [text[done:start], MASK]
            done = position = end
    return "".join([*pieces, text[done:]])


def _is_secret_flag(text: str, match: re.Match[str]) -> bool:
    """Whether the name is secret as a flag or a field of a query only: `docker login -p X`, `--pin X`, `?session=X`,
    and `-k X`, unless X is a number or `-k` means something else to the program before it."""
    name, is_short = match["name"].lower(), match["dashes"] == "-"
    if len(name) > 1:
        is_flag = match["dashes"] is not None or text[match.start() - 1 : match.start()] in ("?", "&")
        return is_flag and name in _TABLE.flags
    if not is_short or name not in _TABLE.flags or match["name"] != name:
        return False
    before = text[max(0, match.start() - 300) : match.start()]
    return name == "p" or not (_NUMBER.match(text, match.end()) or _NO_KEY_AFTER.search(before))


def _value_end(text: str, match: re.Match[str]) -> int:
    """Where the value ends that begins at the end of `match`; its start for a flag without a value."""
    start, first = match.end(), match.start()
    before = text[first - 1] if first else "\0"
    if match["gap"] is not None:
        if text.startswith("--", start):
            return start
        pattern = _ARGUMENT if "\0" in match["gap"] else _QUOTED if _QUOTED.match(text, start) else _WORD
    elif before == "\0" and match["sign"] == "=":
        pattern = _ARGUMENT
    elif _QUOTED.match(text, start):
        pattern = _QUOTED
    elif before in "?&#":
        pattern = _QUERY_VALUE
    else:
        pattern = _HEADER_VALUE if ":" in match["sign"] else _WORD
    found = pattern.match(text, start)
    return start if found is None else found.end()
