"""Lengths of training: `12ep`, `5000` steps, `30min`; and times on the clock."""

import dataclasses
import re
from typing import Any, Literal

from stoker_watch.errors import ConfigError

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ep|epochs?|min|minutes?|h|hours?|s|sec|seconds?|steps?)?\s*$")
_VALID = ("12ep (epochs)", "5000 (steps)", "90s", "30min", "2h")
Unit = Literal["steps", "epochs", "minutes"]
_UNITS: dict[str, tuple[Unit, float]] = {
    "st": ("steps", 1), "s": ("minutes", 1 / 60), "e": ("epochs", 1), "m": ("minutes", 1), "h": ("minutes", 60)
}  # fmt: skip
"""The first letters of a unit → what it is, and how many of those."""


@dataclasses.dataclass(frozen=True)
class Duration:
    """A length of training in one of three units."""

    value: float
    unit: Unit

    def __str__(self) -> str:
        return f"{self.value:g}" + {"steps": "", "epochs": "ep", "minutes": "min"}[self.unit]


def parse_duration(text: str, flag: str = "max-duration") -> Duration:
    """`12ep` → epochs, `5000` or `5000steps` → steps, `90s`, `30min`, `2h` → minutes. Raises ConfigError."""
    match = _DURATION.match(text)
    if match is None:
        raise ConfigError(f"--{flag} {text!r} is not a length of training.", choices=_VALID)
    value, written = float(match[1]), match[2] or "steps"
    unit, factor = next(found for letters, found in _UNITS.items() if written.startswith(letters))
    if unit == "steps" and value != int(value):
        raise ConfigError(f"--{flag} {text!r}: the number of steps must be whole.", choices=_VALID)
    return Duration(value * factor, unit)


def join_length(fields: dict[str, Any]) -> dict[str, Any]:
    """Settings by name in which `epochs`, `steps` (numbers) or `max_time` (text such as `90s` or `30min`, or minutes),
    of which at most one may be set, became `max_duration`. Raises ConfigError."""
    rest = {name: value for name, value in fields.items() if name not in ("epochs", "steps", "max_time")}
    given = [name for name in ("epochs", "steps", "max_time") if fields.get(name) is not None]
    if not given:
        return rest
    if len(given) > 1 or rest.get("max_duration") is not None:
        names = given if len(given) > 1 else [*given, "max_duration"]
        flags = " and ".join("--" + name.replace("_", "-") for name in names)
        raise ConfigError(f"{flags} both set the length of training.", fix="give one of them")
    name, value = given[0], fields[given[0]]
    if name == "max_time":
        text = f"{value}min" if isinstance(value, int | float) else str(value)
        if text.strip().replace(".", "", 1).isdigit() or parse_duration(text, "max-time").unit != "minutes":
            raise ConfigError(f"--max-time {value!r} is not a time.", choices=("90s", "30min", "2h"))
        text = str(parse_duration(text)) if "s" in text else text
    else:
        number = f"{value:g}" if type(value) in (int, float) else str(value)
        text = f"{number}ep" if name == "epochs" else str(value)
        parse_duration(text, name)
    return rest | {"max_duration": text}


def parse_time_s(text: str, flag: str) -> int:
    """Seconds of `90s`, `30min`, `6h`, `2d`: a time on the clock. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{flag} {text!r} is not a time.", choices=["90s", "30min", "6h", "2d"])
    return max(1, round(float(match[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[match[2]]))
