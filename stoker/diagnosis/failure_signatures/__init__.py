"""The ways in which a job fails, as data: what it prints then, what to do, and where those lines were seen.

`postmortem.py` has the code that uses them. A pattern is a regular expression for one line of output. The rows are in
one order, from the more to the less specific: a line counts for the first row with a pattern that matches. How to add
one: a row in the file of its area, and a line that a job really printed in tests/diagnosis/log_samples/.
"""

import re

from stoker.diagnosis.failure_signatures import data, distributed, endings, gpu, memory, platform, program, storage
from stoker.diagnosis.failure_signatures.signature import FailureSignature, LogPattern

__all__ = ["FAILURE_SIGNATURES", "SECONDARY_ERRORS", "STOPS", "UNEXPLAINED", "FailureSignature", "LogPattern"]

_FAILURE_SIGNATURES = (
    *endings.REMARKS,
    *memory.MEMORY,
    *storage.DISKS,
    *gpu.GPU,
    *data.DIVERGENCE,
    *distributed.DISTRIBUTED,
    *platform.PLATFORM,
    *program.PACKAGES,
    *storage.BUCKETS,
    *platform.PERMISSIONS,
    *storage.CHECKPOINTS,
    *data.DATA,
    *program.CONFIGURATION,
    *program.MODEL,
    *storage.FILES,
    *program.SYSTEM,
    *endings.ENDINGS,
)

FAILURE_SIGNATURES: dict[str, FailureSignature] = {failure.id: failure for failure in _FAILURE_SIGNATURES}

UNEXPLAINED = frozenset({"killed", "crashed", "ended_by_error", "ended_without_record", "exit_code_unknown"})
"""Failures that describe how a job ended without its reason."""

STOPS = frozenset(failure.id for failure in _FAILURE_SIGNATURES if failure.role == "stop")
"""Failures that are a request to end: a fault before it explains more."""

SECONDARY_ERRORS = re.compile(
    r"ChildFailedError|CalledProcessError|Connection (reset|closed) by peer|ConnectionResetError|BrokenPipeError|"
    r"DistBackendError|NCCL (error|communicator)|exited unexpectedly|EOFError|^SystemExit|^KeyboardInterrupt|"
    r"Process(Raised|Exited)Exception|SignalException"
)
"""Errors of a process about the end of another one or of itself: the messages before them decide (heuristic)."""
