"""Rules such as `idle > 30% for 5min`: what they mean, and when they hold. Pure: lines and times in, alerts out.

A rule with a duration is about the mean over it, weighted by time: training is bursty, and a condition that has to hold
in each second would never. A rule is silent until its duration has been seen, and while nobody measured its quantity.
It is said once when it begins to hold, and again only after it ceased to. Who is told: `delivery.py`.
"""

import dataclasses
import math
import operator
import re
from collections import deque
from collections.abc import Callable, Iterable

from stoker.errors import ConfigError
from stoker.monitor.follow import Seen, sentence
from stoker.runs.records import EVENT_KINDS, PHASES
from stoker.runs.schemas import DeviceSample, Event, GpuSample, StepWindow

COVERED = 0.9
"""Share of a rule's duration that must have been measured before it can hold: a line may be late."""
OF_ALERT = "of_alert"
"""In the data of an event that is about telling of alerts: `on warning` would tell of it for ever."""
LONGEST_S = 24 * 3600.0
"""Longest duration of a rule: what is kept for it is a number a second."""

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_UNITS = {"": 1.0, "%": 0.01, "s": 1.0, "min": 60.0, "h": 3600.0, "GB": 1e9, "GiB": 2.0**30, "W": 1.0, "C": 1.0}
_DURATIONS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RULE = re.compile(
    r"\s*(?P<name>[a-z][a-z0-9_]*)\s*(?P<compare>>=|<=|>|<)\s*(?P<number>\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*"
    r"(?P<unit>%|GiB|GB|min|h|s|W|C)?(?:\s+for\s+(?P<for>\d+(?:\.\d+)?)\s*(?P<for_unit>s|min|h))?\s*"
)
_ON = re.compile(r"\s*on\s+(?P<kind>[a-z_]+)\s*")


def _share(used: float | None, of: float | None) -> float | None:
    return used / of if used is not None and of else None


def _most(gpus: Iterable[GpuSample], value: Callable[[GpuSample], float | None]) -> float | None:
    return max((found for gpu in gpus if (found := value(gpu)) is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _gpu_utilisation(sample: DeviceSample) -> float | None:
    return _mean(gpu.utilisation for gpu in sample.gpus)


_OF_SAMPLE: dict[str, tuple[str, Callable[[DeviceSample], float | None]]] = {
    "gpu_utilisation": ("share of time in which a kernel ran, mean of the GPUs", _gpu_utilisation),
    "gpu_memory": (
        "used share of the fullest GPU's memory",
        lambda s: _most(s.gpus, lambda gpu: _share(gpu.memory_used_bytes, gpu.memory_total_bytes)),
    ),
    "gpu_temperature": ("°C of the hottest GPU", lambda s: _most(s.gpus, lambda gpu: gpu.temperature_c)),
    "gpu_power": ("W of the GPU that draws most", lambda s: _most(s.gpus, lambda gpu: gpu.power_w)),
    "host_memory": ("used share of the memory limit", lambda s: _share(s.memory_used_bytes, s.memory_limit_bytes)),
    "cpu": ("busy share of the cores", lambda s: _mean(s.cpu)),
    "cpu_withheld": ("processors' worth of time that the CPU quota withheld", lambda s: s.throttled_s),
    "cpu_pressure": ("share of time in which something waited for a core", lambda s: s.psi_cpu),
    "io_pressure": ("share of time in which something waited for storage", lambda s: s.psi_io),
    "memory_pressure": ("share of time in which something waited for memory", lambda s: s.psi_memory),
    "disk_free": ("bytes left where the run's folder is", lambda s: s.disk_free_bytes),
    "shm": ("used share of /dev/shm", lambda s: _share(s.shm_used_bytes, s.shm_total_bytes)),
    "handles": ("open files, share of their limit", lambda s: _share(s.handles, s.handles_limit)),
    "swap": ("bytes in swap", lambda s: s.swap_used_bytes),
}  # fmt: skip

_OF_WINDOW: dict[str, tuple[str, Callable[[StepWindow], float | None]]] = {
    "img_per_s": ("pictures per second", lambda w: w.pictures / w.wall_s if w.steps and w.pictures else None),
    "steps_per_s": ("optimizer steps per second", lambda w: w.steps / w.wall_s),
    "loss": ("the total loss", lambda w: w.losses.get("total", w.losses.get("loss"))),
    "grad_norm": ("norm of the gradient", lambda w: w.grad_norm),
    "rate": ("learning rate", lambda w: w.rate),
    "skipped": ("share of the steps that moved nothing", lambda w: w.skipped / w.steps if w.steps else None),
}

QUANTITIES: dict[str, str] = {
    "idle": "share of time without work: by the driver where there are GPUs, else by the ledger",
    "silence": "seconds since the last step",
    **{name: meaning for name, (meaning, _) in _OF_WINDOW.items()},
    **{name: meaning for name, (meaning, _) in _OF_SAMPLE.items()},
    **{phase: f"share of device time in the phase {phase}" for phase in PHASES if phase != "idle"},
}
"""What a rule can be about, in words; shares are 0 … 1, so 30% is 0.3."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """`name compare threshold for for_s`, or `on kind`: then name is "on" and kind the kind of an event."""

    text: str
    name: str
    compare: str = ">"
    threshold: float = 0.0
    for_s: float = 0.0
    kind: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alert:
    """A rule that began to hold. value: the mean over its duration; None for an event."""

    rule: str
    text: str
    t: float
    value: float | None = None


def parse_rule(text: str) -> Rule:
    """Raises ConfigError that names what is valid."""
    if (found := _ON.fullmatch(text)) is not None:
        kinds = [kind for kind in EVENT_KINDS if kind != "alert"]
        if found["kind"] not in kinds:
            raise ConfigError(f"--alert {text!r}: no event of that kind.", choices=kinds, fix="--alert 'on failed'")
        return Rule(text=" ".join(text.split()), name="on", kind=found["kind"])
    found = _RULE.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--alert {text!r} cannot be understood.",
            cause="a rule is QUANTITY > NUMBER[%|GB|min|C] [for DURATION], or: on EVENT",
            fix="--alert 'idle > 30% for 5min'",
        )
    if found["name"] not in QUANTITIES:
        raise ConfigError(f"--alert {text!r}: nobody measures {found['name']!r}.", choices=list(QUANTITIES))
    for_s = float(found["for"]) * _DURATIONS[found["for_unit"]] if found["for"] else 0.0
    if for_s > LONGEST_S:
        raise ConfigError(f"--alert {text!r}: the duration is longer than a day.", fix="24h at most")
    return Rule(
        text=" ".join(text.split()), name=found["name"], compare=found["compare"],
        threshold=float(found["number"]) * _UNITS[found["unit"] or ""], for_s=for_s,
    )  # fmt: skip


class Alerts:
    """Rules, and what they have seen. started_s: Unix time from which `silence` counts before the first step."""

    def __init__(self, rules: Iterable[Rule], started_s: float) -> None:
        self._rules = [_Watched(rule) for rule in rules]
        self._stepped_s = started_s
        self._knows_compute = False
        self._driver_speaks = False

    def see(self, line: Seen) -> list[Alert]:
        """A new line of the records, in the order of time; the rules that begin to hold with it."""
        if isinstance(line, Event):
            if OF_ALERT in line.data:
                return []
            return [Alert(rule=rule.rule.text, text=sentence(line), t=line.t) for rule in self._rules
                    if rule.rule.kind == line.kind]  # fmt: skip
        if isinstance(line, StepWindow):
            if line.wall_s <= 0:
                return []
            self._stepped_s = line.t if line.steps else self._stepped_s
            self._knows_compute |= "compute" in line.phases
            length_s, values = line.wall_s, self._of_window(line)
        else:
            length_s = 1.0
            values = {name: value(line) for name, (_, value) in _OF_SAMPLE.items()}
            busy = values["gpu_utilisation"]
            self._driver_speaks |= busy is not None
            values["idle"] = None if busy is None else 1 - busy
            values["silence"] = max(0.0, line.t - self._stepped_s)
        return [alert for rule in self._rules if (value := values.get(rule.rule.name)) is not None
                and (alert := rule.add(line.t, length_s, value)) is not None]  # fmt: skip

    def firing(self) -> dict[str, bool]:
        """Rule → whether it holds now; of `on` rules, nothing."""
        return {rule.rule.text: rule.holds for rule in self._rules if rule.rule.name != "on"}

    def _of_window(self, window: StepWindow) -> dict[str, float | None]:
        device_s = window.wall_s * window.devices
        values = {name: value(window) for name, (_, value) in _OF_WINDOW.items()}
        values |= {phase: window.phases.get(phase, 0.0) / device_s for phase in PHASES if phase != "idle"}
        if self._knows_compute and not self._driver_speaks:
            values["idle"] = 1 - window.phases.get("compute", 0.0) / device_s
        return values


class _Watched:
    """A rule, and the values over its duration: (t, seconds that it speaks of, value)."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.holds = False
        self._values: deque[tuple[float, float, float]] = deque()

    def add(self, t: float, length_s: float, value: float) -> Alert | None:
        self._values.append((t, length_s, value))
        while len(self._values) > 1 and self._values[0][0] <= t - self.rule.for_s:
            self._values.popleft()
        if t - (self._values[0][0] - self._values[0][1]) < COVERED * self.rule.for_s:
            return None
        mean = sum(length * one for _, length, one in self._values) / sum(length for _, length, _ in self._values)
        held, self.holds = self.holds, math.isnan(mean) or _COMPARE[self.rule.compare](mean, self.rule.threshold)
        if held or not self.holds:
            return None
        text = f"{self.rule.text}: {_shown(self.rule, mean)}"
        return Alert(rule=self.rule.text, text=text, t=t, value=mean)


def _shown(rule: Rule, value: float) -> str:
    if "%" in rule.text:
        return f"{100 * value:.1f} %"
    if "GB" in rule.text or "GiB" in rule.text:
        return f"{value / 1e9:,.2f} GB"
    return f"{value:,.4g}"
