"""What the rules about GPUs look at (`gpu.py`, `gpu_versions.py`, `gpu_condition.py`), and their short forms of
findings."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.diagnosis.endings import line_patterns
from stoker.hardware.cuda_trial import TorchFacts
from stoker.hardware.gpu_evidence import kernel_driver
from stoker.profiling.telemetry.gpu import DriverState, GpuState
from stoker.profiling.telemetry.machine import KernelLine

DRIVER_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """How the trial process ended. facts: None if it did not; stage: the last one that it entered."""

    facts: TorchFacts | None
    stage: str = ""
    error: str = ""
    timed_out: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """Everything that the rules look at. driver None: it did not answer in time. kernel_lines None: may not be read."""

    device: str | None
    env: Mapping[str, str]
    root: Path
    driver: DriverState | None
    trial: Trial
    kernel_lines: Sequence[KernelLine] | None

    @property
    def driver_version(self) -> str | None:
        return (None if self.driver is None else self.driver.version) or kernel_driver(self.root)

    @property
    def gpus(self) -> list[GpuState]:
        return [] if self.driver is None else self.driver.gpus


def fix_for(error: str) -> str | None:
    """What the diagnosis of dead jobs advises for such a message."""
    lowered = error.lower()
    for pattern in line_patterns():
        is_decisive = not pattern.harmless and pattern.traceback_end is None
        if is_decisive and pattern.literal in lowered and pattern.regex.search(error):
            return pattern.ending.fix
    return None
