"""The meaning of phases, stages, experiments and error types, from `knowledge/report_words.toml`."""

import msgspec

from stoker.knowledge import read_toml


class _Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    phases: dict[str, tuple[str, str]]
    stages: dict[str, str]
    probes: dict[str, str]
    error_types: dict[str, tuple[str, str]]


_WORDS = msgspec.convert(read_toml("report_words.toml"), _Words)
PHASE_MEANINGS = {name: meaning for name, (meaning, _) in _WORDS.phases.items()}
PHASE_COLORS = {name: f"var({color})" for name, (_, color) in _WORDS.phases.items()}
STAGE_MEANINGS = _WORDS.stages
"""Stage of `input_wait` → its meaning."""
PROBE_LABELS = _WORDS.probes
"""Kind of experiment → what it changes."""
ERROR_TYPE_ADVICE = _WORDS.error_types
"""TIDE error type → its meaning, and what to check."""
