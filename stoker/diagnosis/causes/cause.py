"""What a row of the catalogue is. The rows are in the files beside this one."""

from typing import Any, Literal, get_args

import msgspec

Reason = Literal[
    "too little parallel work",
    "data loading",
    "architecture and hyper-parameters",
    "memory",
    "communication",
    "allocation and scheduling",
    "blindness",
    "dies: GPU memory",
    "dies: host memory",
    "dies: shared memory",
    "dies: driver or library mismatch",
    "dies: storage",
    "dies: paths or environment",
    "dies: bad records",
    "dies: divergence",
    "dies: hang",
    "dies: preemption",
    "unknown",
]
"""The seven reasons for which a GPU stands idle, and the ways in which a job dies."""

REASONS: tuple[str, ...] = get_args(Reason)


class Threshold(msgspec.Struct, frozen=True):
    """A condition of a rule beside its threshold. said: what it bounds, and where the number comes from."""

    value: float
    description: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the catalogue."""

    id: str
    title: str
    reason: Reason
    symptom: str
    """What a person sees."""
    required_records: tuple[str, ...]
    """Records without which the rule abstains, as `file: field`."""
    metric: str
    """What is compared with the thresholds."""
    info_threshold: float | None = None
    warning_threshold: float | None = None
    critical_threshold: float | None = None
    """The rule is silent below the least of them. None: the cause is never that grave."""
    lower_is_worse: bool = False
    """The thresholds are reached from above: less is worse."""
    source: str
    """Where the thresholds come from."""
    thresholds: dict[str, Threshold] = {}
    supersedes: tuple[str, ...] = ()
    """Causes that say the same less exactly: where this one is found, they are left out."""
    probe: str = ""
    """The one of schemas.PROBE_KINDS that makes the run faster when the cause is there."""
    confidence: float = 0.7
    """Without a probe. 0.9: a clock measured it; 0.7: counters agree; 0.5: something else could look the same."""
    fix: str
    external_fix: str = ""
    """The same for a run that `stoker train` did not make, in the words of such jobs; empty: as `fix`."""
    command: str | None = None
    """What to run or to add to the command line."""
    config_patch: dict[str, Any] = {}
    """Settings of config.toml that mend it, by their names there."""

    def threshold(self, name: str) -> float:
        return self.thresholds[name].value

    def severity(self, measured: float) -> str | None:
        """How grave it is; None: not there."""
        for name, threshold in (
            ("critical", self.critical_threshold),
            ("warning", self.warning_threshold),
            ("info", self.info_threshold),
        ):
            if threshold is not None and (measured <= threshold if self.lower_is_worse else measured >= threshold):
                return name
        return None


HEURISTIC = "our judgment"
