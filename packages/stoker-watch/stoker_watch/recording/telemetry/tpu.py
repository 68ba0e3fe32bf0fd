"""Telemetry of TPUs: what Google's program `tpu-info` prints, as samples of devices.jsonl. Without torch."""

import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from stoker_watch.hardware.tpu import pci_chips
from stoker_watch.runs.schemas import GpuSample

GIB = 2**30
INTERVAL_S, TIMEOUT_S = 10.0, 20.0
"""Interval and limit of `tpu-info`, which is a program in Python: each run costs about a second of a core."""


_CELL = r"\s*[|│┃]\s*"
_RUNTIME = re.compile(rf"^{_CELL}(\d+){_CELL}([\d.]+) GiB / ([\d.]+) GiB{_CELL}(?:([\d.]+)%)?", re.MULTILINE)
_CORE = re.compile(rf"^{_CELL}(\d+){_CELL}([\d.]+)%{_CELL}$", re.MULTILINE)
"""Rows of the tables "TPU Runtime Utilization" and "TensorCore Utilization"."""


def parse_tpu_info(output: str) -> list[GpuSample]:
    """The chips in the tables of `tpu-info`: memory, duty cycle, use of the TensorCore; absent: it is not printed."""
    samples: dict[int, GpuSample] = {}
    for chip, used, total, duty in _RUNTIME.findall(output):
        used_bytes, total_bytes = (round(float(value) * GIB) for value in (used, total))
        samples[int(chip)] = GpuSample(
            index=int(chip), memory_used_bytes=used_bytes, memory_total_bytes=total_bytes,
            utilization=float(duty) / 100 if duty else None,
        )  # fmt: skip
    for core, percent in _CORE.findall(output):
        if int(core) in samples:
            samples[int(core)].tensor_active = float(percent) / 100
    return list(samples.values())


class TpuSampler:
    """Runs `tpu-info` every INTERVAL_S beside the caller, which never waits for it.

    reason: why there are no values; None if there are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        has_chips = bool(pci_chips(root))
        self._program = shutil.which("tpu-info") if has_chips else None
        self.reason: str | None = None
        if has_chips and self._program is None:
            self.reason = "no telemetry of the TPU: pip install tpu-info"
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the sampler)
        self._started_s = float("-inf")
        self._samples: list[GpuSample] = []

    def sample(self) -> list[GpuSample]:
        """What the newest run that has ended said; each run is returned once."""
        if self._program is None:
            return []
        if self._process is not None and self._process.poll() is not None:
            self._read(self._process.returncode)
            self._process = None
        elif self._process is not None and time.monotonic() - self._started_s > TIMEOUT_S:
            self.close()
            self.reason = f"tpu-info did not end in {TIMEOUT_S:.0f} s"
        if self._process is None and time.monotonic() - self._started_s >= INTERVAL_S:
            self._started_s = time.monotonic()
            self._output.seek(0)
            self._output.truncate()
            self._process = subprocess.Popen(
                [self._program], stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
            )
        samples, self._samples = self._samples, []
        return samples

    def _read(self, code: int) -> None:
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self._samples = parse_tpu_info(text) if code == 0 else []
        last_line = next(iter(text.strip().splitlines()[-1:]), "no output")
        self.reason = None if self._samples else f"tpu-info has no values (exit code {code}): {last_line[:200]}"

    def close(self) -> None:
        """Ends a run that has not ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
