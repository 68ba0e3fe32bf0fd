"""The causes that stoker knows, put together: what each looks like, what proves it, from where it counts, what to do.

The rows are data, in `causes/`, a file for each reason; every threshold of the diagnosis stands there, with its source,
and those that all rules share stand here. `rules/` has the code that looks. What ended a job is in
`failure_signatures.py`.
"""

import hashlib

import msgspec

from stoker.diagnosis.causes import (
    allocation,
    communication,
    data_loading,
    imminent_failure,
    learning,
    memory,
    observability,
    parallel_work,
)
from stoker.diagnosis.causes.cause import REASONS, Cause, Reason, Threshold

__all__ = [
    "CATALOG",
    "COMMON_THRESHOLDS",
    "REASONS",
    "Cause",
    "Reason",
    "Threshold",
    "catalog_hash",
    "common_threshold",
]

_MODULES = (data_loading, parallel_work, learning, memory, communication, allocation, observability, imminent_failure)

CATALOG: dict[str, Cause] = {cause.id: cause for module in _MODULES for cause in module.CAUSES}

COMMON_THRESHOLDS: dict[str, Threshold] = {
    "steady_s": Threshold(
        5.0,
        "seconds after the start, below which shares of time say nothing: a handful of windows (our judgment)",
    ),
    "first_window_s": Threshold(
        10.0,
        "length up to which the first window with steps still belongs to the start: caches, "
        "autotuning and allocators warm up in it (our judgment)",
    ),
    "sampled_error": Threshold(
        0.15,
        "relative standard error of a share of samples beyond which no loss is named by it (binomial; our judgment)",
    ),
    "samples": Threshold(
        4, "samples of stacks, or of the processor time, below which their mean says nothing (our judgment)"
    ),
    "sigmas": Threshold(
        1.64, "standard errors by which a share of samples must be above a threshold: one in twenty is chance"
    ),
    "confirmed": Threshold(
        1.02,
        "speed-up of a probe, at the low end of its interval, that confirms a cause (our judgment: "
        "above the noise of pairs measured in turn)",
    ),
    "refuted": Threshold(
        0.25,
        "share of the speed-up that the loss would allow, at the high end of the interval, below which "
        "a probe refutes the cause (our judgment)",
    ),
    "confirmed_to": Threshold(0.95, "confidence in a cause that a probe confirmed"),
    "refuted_to": Threshold(0.2, "confidence in one that a probe refuted; it is never above info then"),
}
"""Limits that all rules share."""


def common_threshold(name: str) -> float:
    return COMMON_THRESHOLDS[name].value


def catalog_hash() -> str:
    """12 hex digits of the SHA-256 of all causes and limits: equal hashes, equal thresholds."""
    data = {"causes": sorted(CATALOG.values(), key=lambda cause: cause.id), "common": COMMON_THRESHOLDS}
    return hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()[:12]
