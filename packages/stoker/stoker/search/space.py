"""The space of a search: settings with ranges or choices, from a TOML file or the table of defaults.

The names, types and bounds are those of the settings themselves (`config/settings.py`). Everything wrong with a space
is a ConfigError before a trial runs.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from stoker.config.architectures import read_architectures
from stoker.config.settings import SECTION_OF, SECTIONS, Config, check_config, from_fields, read_user_toml, setting_rows
from stoker.knowledge import read_toml
from stoker_watch.errors import ConfigError, did_you_mean

NOT_SEARCHED = frozenset(read_toml("search.toml")["not_searched"])
"""They decide what AP is measured on, how long, or where: trials that differ in them cannot be compared."""
Metric = Literal["ap", "latency_ms", "step_s", "memory_gib"]
LIMITS: tuple[Metric, ...] = ("latency_ms", "step_s", "memory_gib")
Scalar = bool | int | float | str


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Numbers from low to high, both included."""

    low: int | float
    high: int | float
    log: bool = False
    """Sampled on a logarithmic scale."""
    step: int | float | None = None
    """Distance of the values, from low."""


class Space(msgspec.Struct, frozen=True):
    """What is searched."""

    settings: dict[str, Range | list[Scalar]]
    limits: dict[str, float] = {}
    """Metric of LIMITS → the highest value of a trial that counts."""

    def distributions(self) -> dict[str, BaseDistribution]:
        """Setting → its distribution, in the order of the names."""
        return {name: _distribution(name, self.settings[name]) for name in sorted(self.settings)}

    def size(self) -> float:
        """Number of points; infinite with a continuous range."""
        return math.prod(_count(entry) for entry in self.distributions().values())

    def lines(self) -> list[str]:
        """One line for each setting and limit, for people."""
        lines = []
        for name, entry in sorted(self.settings.items()):
            if isinstance(entry, list):
                lines.append(f"{name}: {', '.join(map(str, entry))}")
            else:
                step = "" if entry.step is None else f" in steps of {entry.step:g}"
                lines.append(f"{name}: {entry.low:g} … {entry.high:g}{' (logarithmic)' if entry.log else step}")
        return [*lines, *(f"limit: {name} ≤ {value:g}" for name, value in self.limits.items())]


def read_space(path: Path) -> Space:
    """A space.toml. Raises ConfigError."""
    _, table = read_user_toml(path, "The space")
    limits = table.pop("limits", {})
    if not isinstance(limits, dict):
        raise ConfigError("limits is not a table.", location=path, fix="[limits] in a line of its own")
    for name, value in limits.items():
        if name not in LIMITS:
            raise ConfigError(f"There is no limit {name!r}.", location=path, choices=LIMITS)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"The limit {name} = {value!r} is not a number above 0.", location=path)
    numbers = {name: float(value) for name, value in limits.items()}
    return make_space(table, numbers, path)


def make_space(table: Mapping[str, Any], limits: dict[str, float], location: Path | None = None) -> Space:
    """A checked space. Raises ConfigError."""
    if not table:
        raise ConfigError("The space is empty.", location=location, fix="lr = { low = 1e-4, high = 1e-2, log = true }")
    settings = {name: _read_entry(name, value, location) for name, value in table.items()}
    return Space(settings, limits)


def default_space(config: Config) -> Space:
    """The small space of the model's recipe around the derived settings. config: complete."""
    rows = read_toml("search.toml")
    table: dict[str, Any] = {}
    architecture = read_architectures().get(config.model.model)
    own = {} if architecture is None else rows.get(architecture.recipe, {})
    for name, row in (rows["default"] | own).items():
        derived = config.set_fields().get(name)
        if derived is None or (name == "mosaic" and config.run.batch_size % 4):
            continue  # the model does not have it; a mosaic needs a batch that is a multiple of four
        if name == "backbone_lr_mult" and config.model.weights == "none":
            continue  # it is for a pretrained backbone
        if "times" in row:
            if not derived:
                continue  # a multiple of 0 is 0
            low, high = (derived * factor for factor in row["times"])
            bounds = setting_rows()[name].bounds if name in setting_rows() else None
            if bounds is not None:
                low, high = max(low, bounds[0]), min(high, bounds[1])
            whole = isinstance(derived, int)
            low, high = (round(low), round(high)) if whole else (float(f"{low:.3g}"), float(f"{high:.3g}"))
            row = {"low": low, "high": high, "log": row.get("log", False)}
        table[name] = row
    return make_space(table, {})


def defaults_in(space: Space, config: Config) -> dict[str, Any]:
    """The values of a complete config for the settings of a space, as far as the space contains them."""
    values = config.set_fields()
    found = {}
    for name, entry in space.distributions().items():
        value = values.get(name)
        if name == "image_size" and value is not None:
            value = value[0] if value[0] == value[1] else None
        if isinstance(entry, CategoricalDistribution):
            inside = value in entry.choices
        else:
            inside = isinstance(value, int | float) and entry._contains(value)
        if inside and value is not None:
            found[name] = value
    return found


def _read_entry(name: str, value: Any, location: Path | None) -> Range | list[Scalar]:
    known = sorted(set(SECTION_OF) - NOT_SEARCHED)
    if name not in known:
        what = f"{name!r} cannot be searched" if name in NOT_SEARCHED else f"There is no setting called {name!r}"
        raise ConfigError(did_you_mean(what, name, known), location=location, choices=known)
    if isinstance(value, Mapping) and set(value) == {"choices"}:
        value = value["choices"]
    return _read_choices(name, value, location) if isinstance(value, list) else _read_range(name, value, location)


def _read_choices(name: str, choices: list[Any], location: Path | None) -> list[Scalar]:
    if not choices:
        raise ConfigError(f"{name} has no choices.", location=location, fix=f'{name} = ["first", "second"]')
    if any(not isinstance(choice, Scalar) for choice in choices) or len(set(map(repr, choices))) < len(choices):
        raise ConfigError(f"{name}: the choices must be different numbers, texts or booleans.", location=location)
    for choice in choices:
        _check_value(name, choice, location)
    return choices


def _read_range(name: str, value: Any, location: Path | None) -> Range:
    try:
        entry = msgspec.convert(value, Range)
    except msgspec.ValidationError as error:
        fix = f"{name} = {{ low = 0.1, high = 1.0 }} with log or step, or a list of choices"
        raise ConfigError(f"{name} is not a range.", location=location, cause=str(error), fix=fix) from error
    kind, low, high, step = get_type_hints(SECTIONS[SECTION_OF[name]])[name], entry.low, entry.high, entry.step
    numbers = [number for number in (low, high, step) if number is not None]
    is_number = kind in (float, int) or name in ("workers", "worker_processes", "image_size")
    finite = all(not isinstance(number, bool) and math.isfinite(number) for number in numbers)
    whole = kind is float or all(isinstance(number, int) for number in numbers)
    rules: tuple[tuple[bool, str, str | None], ...] = (
        (is_number, f"{name} is not a number.", f"{name} = [a list of its values]"),
        (finite, f"{name}: low, high and step must be finite numbers.", None),
        (whole, f"{name} takes whole numbers.", f"{name} = {{ low = 1, high = 8 }}"),
        (low < high, f"The range of {name} is empty: low {low:g} is not below high {high:g}.", None),
        (not entry.log or low > 0, f"{name}: a logarithmic range begins above 0.", None),
        (not entry.log or step is None, f"{name}: a logarithmic range has no step.", None),
        (
            step is None or 0 < step <= high - low,
            f"{name}: step {step or 0:g} does not fit between low and high.",
            None,
        ),
    )
    for holds, what, advice in rules:
        if not holds:
            raise ConfigError(what, location=location, fix=advice)
    for number in (low, high):
        _check_value(name, number, location)
    return entry


def _check_value(name: str, value: Any, location: Path | None) -> None:
    try:
        check_config(from_fields({name: value}))
    except ConfigError as error:
        what = f"The space of {name} contains {value!r}. {error.what}"
        raise ConfigError(what, location=location, cause=error.cause, choices=error.choices) from error


def _distribution(name: str, entry: Range | list[Scalar]) -> BaseDistribution:
    if isinstance(entry, list):
        return CategoricalDistribution(entry)
    if get_type_hints(SECTIONS[SECTION_OF[name]])[name] is not float:
        step = int(entry.step or 1)
        high = int(entry.low) + (int(entry.high) - int(entry.low)) // step * step
        return IntDistribution(int(entry.low), high, log=entry.log, step=step)
    if entry.step is None:
        return FloatDistribution(float(entry.low), float(entry.high), log=entry.log)
    count = math.floor((entry.high - entry.low) / entry.step + 1e-9)
    return FloatDistribution(float(entry.low), float(entry.low + count * entry.step), step=float(entry.step))


def _count(entry: BaseDistribution) -> float:
    if isinstance(entry, CategoricalDistribution):
        return len(entry.choices)
    assert isinstance(entry, IntDistribution | FloatDistribution)
    return math.inf if entry.step is None else round((entry.high - entry.low) / entry.step) + 1
