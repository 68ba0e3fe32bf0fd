"""What a row of the catalog is: `Cause`, its thresholds and reasons. The rows are in the other files of this folder."""

from typing import Any, Literal, get_args

import msgspec

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

Reason = Literal[
    "GPU under-utilized (host- or launch-bound)",
    "data loading",
    "architecture and hyper-parameters",
    "memory",
    "communication",
    "allocation and scheduling",
    "observability gaps",
    "failure: GPU memory",
    "failure: host memory",
    "failure: shared memory",
    "failure: driver or library mismatch",
    "failure: storage",
    "failure: paths or environment",
    "failure: bad records",
    "failure: divergence",
    "failure: hang",
    "failure: preemption",
    "unknown",
]
"""The seven reasons for an idle GPU, and the ways in which a job fails."""

REASONS: tuple[str, ...] = get_args(Reason)

HEURISTIC = "heuristic"
"""The source of a number that was chosen by judgment, not taken from a publication or a measurement."""


class Threshold(msgspec.Struct, frozen=True):
    """A number that a rule compares with. description: what it bounds, and where the number comes from."""

    value: float
    description: str


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the catalog."""

    id: str
    title: str
    reason: Reason
    symptom: str
    """What the user sees."""
    required_records: tuple[str, ...]
    """Records without which the rule abstains, as `file: field`."""
    metric: str
    """The measured value that is compared with the three thresholds."""
    info_threshold: float | None = None
    warning_threshold: float | None = None
    critical_threshold: float | None = None
    """There is no finding below the lowest of them. None: the cause never has that severity."""
    lower_is_worse: bool = False
    """A value is beyond a threshold when it is below it."""
    source: str
    """Where the thresholds come from."""
    thresholds: dict[str, Threshold] = {}
    """Further thresholds of the rule, by name."""
    supersedes: tuple[str, ...] = ()
    """Less exact causes of the same lost time: they are left out when this one is found."""
    probe: str = ""
    """The experiment (one of schemas.PROBE_KINDS) that makes the run faster if the cause is present."""
    confidence: float = 0.7
    """Without a probe. 0.9: measured by a clock; 0.7: counters agree; 0.5: something else could look the same."""
    fix: str
    external_fix: str = ""
    """The fix for a job that `stoker train` did not run, without stoker's flags; empty: the same as `fix`."""
    command: str | None = None
    """A command to run, or flags to add to the command line."""
    config_patch: dict[str, Any] = {}
    """Settings of config.toml that fix it, by name."""

    def threshold(self, name: str) -> float:
        return self.thresholds[name].value

    def severity(self, measured: float) -> Severity | None:
        """The severity of a measured value; None: below all thresholds."""
        sign = -1 if self.lower_is_worse else 1
        thresholds: tuple[tuple[Severity, float | None], ...] = (
            ("critical", self.critical_threshold),
            ("warning", self.warning_threshold),
            ("info", self.info_threshold),
        )
        for severity, threshold in thresholds:
            if threshold is not None and sign * measured >= sign * threshold:
                return severity
        return None


COMMON_THRESHOLDS: dict[str, Threshold] = {
    "steady_s": Threshold(
        5.0, "seconds after the start, below which fractions of time mean nothing: a handful of windows (heuristic)"
    ),
    "first_window_s": Threshold(
        10.0,
        "length up to which the first window with steps still belongs to the start: caches, autotuning and allocators "
        "warm up in it (heuristic)",
    ),
    "max_sampling_error": Threshold(
        0.15,
        "relative standard error of a fraction of samples above which no lost time is computed from it (binomial; "
        "heuristic)",
    ),
    "min_samples": Threshold(
        4, "stack samples, or samples of the CPU time, below which their mean is not used (heuristic)"
    ),
    "max_chance": Threshold(
        0.05,
        "probability by chance below which samples that show less than half of a fraction contradict it (binomial)",
    ),
    "min_supporting_fraction": Threshold(
        0.05, "fraction of the stack samples from which they are printed as evidence for a cause (heuristic)"
    ),
    "short_s": Threshold(
        180.0, "seconds of a run up to which its start and single evaluations say nothing of a longer one (heuristic)"
    ),
    "short_steps": Threshold(100, "steps of a run, likewise (heuristic)"),
    "sigmas": Threshold(
        1.64, "standard errors by which a fraction of samples must exceed a threshold: 5 % of chance results pass"
    ),
    "confirmed": Threshold(
        1.02,
        "speed-up of a probe, at the low end of its interval, that confirms a cause (heuristic: above the noise of "
        "pairs that are measured alternately)",
    ),
    "refuted": Threshold(
        0.25,
        "fraction of the speed-up that the loss would allow, at the high end of the interval, below which a probe "
        "refutes the cause (heuristic)",
    ),
    "confirmed_confidence": Threshold(0.95, "confidence in a cause that a probe confirmed"),
    "refuted_confidence": Threshold(0.2, "confidence in a cause that a probe refuted; its severity is then info"),
}
"""Thresholds that all rules share."""


def common_threshold(name: str) -> float:
    return COMMON_THRESHOLDS[name].value


def worst(severities: "list[Severity | None]") -> Severity | None:
    """The highest of some severities; None where there is none."""
    return min((severity for severity in severities if severity is not None), key=SEVERITIES.index, default=None)
