"""Alert rules such as `idle > 30% for 5min`: parsing and evaluation. Pure: lines of records in, alerts out.

A rule with a duration uses the time-weighted mean over it, because training is bursty and few conditions hold in every
single second. Such a rule is evaluated only after most of its duration was measured. A rule whose quantity is not
measured never fires. An alert fires when its condition becomes true, and again only after the condition was false. The
quantities are in `knowledge/quantities.toml`. Delivery of alerts is in `delivery.py`.
"""

import dataclasses
import math
import operator
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from stoker_watch.errors import ConfigError, make_error
from stoker_watch.findings.finding import Evidence, Finding
from stoker_watch.knowledge import read_toml
from stoker_watch.printable import printable
from stoker_watch.runs.records import EVENT_KINDS, PHASES
from stoker_watch.runs.schemas import DeviceSample, Event, StepWindow

RecordLine = StepWindow | DeviceSample | Event

MIN_COVERAGE = 0.9
"""Fraction of a rule's duration that must be measured before the rule is evaluated: a line may be late."""
ALERT_DELIVERY = "alert_delivery"
"""Key in the data of events about alert delivery. Rules ignore these events, else `on warning` would trigger itself."""
MAX_DURATION_S = 24 * 3600.0
"""Longest duration of a rule: it needs memory for one number per second."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_UNITS = {"": 1.0, "%": 0.01, "s": 1.0, "min": 60.0, "h": 3600.0, "GB": 1e9, "GiB": 2.0**30, "W": 1.0, "C": 1.0}
_DURATIONS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY_RULE = re.compile(
    r"\s*(?P<name>[a-z][a-z0-9_]*)\s*(?P<compare>>=|<=|>|<)\s*(?P<number>\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*"
    r"(?P<unit>%|GiB|GB|min|h|s|W|C)?(?:\s+for\s+(?P<for>\d+(?:\.\d+)?)\s*(?P<for_unit>s|min|h))?\s*"
)
_EVENT_RULE = re.compile(r"\s*on\s+(?P<kind>[a-z_]+)\s*")


class Quantity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is read from a line of records."""

    meaning: str
    field: str
    per: str = ""
    """The field to divide by."""
    gpus: Literal["", "mean", "max"] = ""
    """How the readings of several GPUs are joined; empty: the field is one of the line itself."""
    is_unknown_at_zero: bool = False
    """0 means that it is not measured, as of a job that does not count its images."""

    def read(self, line: Any) -> float | None:
        """None: not measured."""
        if self.gpus:
            readings = [reading for gpu in line.gpus if (reading := self._read(gpu)) is not None]
            join = max if self.gpus == "max" else statistics.fmean
            return join(readings) if readings else None
        return self._read(line)

    def _read(self, record: Any) -> float | None:
        value = getattr(record, self.field)
        if value == 0 and self.is_unknown_at_zero:
            return None
        if isinstance(value, list):
            return statistics.fmean(value) if value else None
        total = getattr(record, self.per) if self.per else 1.0
        return value / total if value is not None and total else None


class _Quantities(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sample: dict[str, Quantity]
    window: dict[str, Quantity]
    prometheus: dict[str, dict[str, Quantity]]


MEASURED = msgspec.convert(read_toml("quantities.toml"), _Quantities)
QUANTITIES: dict[str, str] = {
    "idle": "fraction of time without work: from GPU utilization if there are GPUs, else from the ledger",
    "seconds_since_step": "seconds since the last step",
    "loss": "total loss",
    **{name: row.meaning for name, row in (MEASURED.window | MEASURED.sample).items()},
    **{phase: f"fraction of device time in the phase {phase}" for phase in PHASES if phase != "idle"},
}
"""Quantity → its meaning. Fractions are 0 … 1, so 30% is 0.3."""


def describe_event(event: Event) -> str:
    scores = event.data.get("metrics") if event.kind == "evaluated" else None
    if isinstance(scores, dict):
        found = [f"{name.upper()} {scores[name]:.3f}" for name in ("ap", "ap50") if isinstance(scores.get(name), float)]
        return f"evaluated at step {event.step:,}: {', '.join(found)}"
    first_line = printable(event.text.partition("\n")[0])
    return f"{event.kind}: {first_line}" if first_line else event.kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """`name compare threshold for duration_s`; or `on kind`: then `name` is "on" and `kind` is the kind of an event."""

    text: str
    name: str
    compare: str = ">"
    threshold: float = 0.0
    duration_s: float = 0.0
    kind: str = ""


def parse_rule(text: str) -> Rule:
    """Parses the text of `--alert`. Raises ConfigError that lists the valid choices."""
    if (match := _EVENT_RULE.fullmatch(text)) is not None:
        kinds = [kind for kind in EVENT_KINDS if kind != "alert"]
        if match["kind"] not in kinds:
            raise make_error(ConfigError, "no-kind-of-event", choices=kinds, text=text)
        return Rule(text=" ".join(text.split()), name="on", kind=match["kind"])
    match = _QUANTITY_RULE.fullmatch(text)
    if match is None:
        raise make_error(ConfigError, "no-rule-of-an-alert", text=text)
    name = match["name"]
    if name not in QUANTITIES:
        raise ConfigError(f"--alert {text!r}: {name!r} is not a known quantity.", choices=list(QUANTITIES))
    duration_s = float(match["for"]) * _DURATIONS[match["for_unit"]] if match["for"] else 0.0
    if duration_s > MAX_DURATION_S:
        raise ConfigError(f"--alert {text!r}: the duration is longer than a day.", fix="24h at most")
    return Rule(
        text=" ".join(text.split()),
        name=name,
        compare=match["compare"],
        threshold=float(match["number"]) * _UNITS[match["unit"] or ""],
        duration_s=duration_s,
    )


class Alerts:
    """Evaluates rules on lines of records. start_t: Unix time from which `seconds_since_step` counts at first."""

    def __init__(self, rules: Iterable[Rule], start_t: float) -> None:
        self._rules = [_RuleState(rule) for rule in rules]
        self._last_step_t = start_t
        self._has_compute_time = False
        self._has_gpu_utilization = False

    def observe(self, line: RecordLine) -> list[Finding]:
        """Takes the next line, in order of time; returns the rules that it fires: as id their text, as evidence the
        mean over their duration, and none for an event."""
        if isinstance(line, Event):
            if ALERT_DELIVERY in line.data:
                return []
            return [
                Finding(id=state.rule.text, severity="warning", title=describe_event(line))
                for state in self._rules
                if state.rule.kind == line.kind
            ]
        if isinstance(line, StepWindow):
            if line.wall_s <= 0:
                return []
            self._last_step_t = line.t if line.window_steps else self._last_step_t
            self._has_compute_time |= "compute" in line.phases
            duration_s, values = line.wall_s, self._window_values(line)
        else:
            duration_s = 1.0
            values = {name: row.read(line) for name, row in MEASURED.sample.items()}
            gpu_utilization = values["gpu_utilization"]
            self._has_gpu_utilization |= gpu_utilization is not None
            values["idle"] = None if gpu_utilization is None else 1 - gpu_utilization
            values["seconds_since_step"] = max(0.0, line.t - self._last_step_t)
        return [
            alert
            for state in self._rules
            if (value := values.get(state.rule.name)) is not None
            and (alert := state.add(line.t, duration_s, value)) is not None
        ]

    def firing(self) -> dict[str, bool]:
        """Rule → whether its condition is true now; without `on` rules."""
        return {state.rule.text: state.is_firing for state in self._rules if state.rule.name != "on"}

    def _window_values(self, window: StepWindow) -> dict[str, float | None]:
        device_s = window.wall_s * window.devices
        values = {name: row.read(window) for name, row in MEASURED.window.items()}
        values["loss"] = window.losses.get("total", window.losses.get("loss"))
        values |= {phase: window.phases.get(phase, 0.0) / device_s for phase in PHASES if phase != "idle"}
        if self._has_compute_time and not self._has_gpu_utilization:
            values["idle"] = 1 - window.phases.get("compute", 0.0) / device_s
        return values


class _RuleState:
    """A rule with the values over its duration: (t, seconds that the value covers, value)."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.is_firing = False
        self._values: deque[tuple[float, float, float]] = deque()

    def add(self, t: float, duration_s: float, value: float) -> Finding | None:
        self._values.append((t, duration_s, value))
        while len(self._values) > 1 and self._values[0][0] <= t - self.rule.duration_s:
            self._values.popleft()
        if t - (self._values[0][0] - self._values[0][1]) < MIN_COVERAGE * self.rule.duration_s:
            return None
        mean = sum(seconds * v for _, seconds, v in self._values) / sum(seconds for _, seconds, _ in self._values)
        was_firing = self.is_firing
        self.is_firing = math.isnan(mean) or _OPERATORS[self.rule.compare](mean, self.rule.threshold)
        if was_firing or not self.is_firing:
            return None
        text = f"{self.rule.text}: {_format_value(self.rule, mean)}"
        return Finding(id=self.rule.text, severity="warning", title=text, evidence=[Evidence(text=text, value=mean)])


def _format_value(rule: Rule, value: float) -> str:
    if "%" in rule.text:
        return f"{100 * value:.1f} %"
    if "GB" in rule.text or "GiB" in rule.text:
        return f"{value / 1e9:,.2f} GB"
    return f"{value:,.4g}"
