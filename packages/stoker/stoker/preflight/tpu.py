"""Whether the TPU of this machine can be used: its driver, the library, and whether another process has it.

Notices of a preemption come from the metadata service (`cloud.py`). It never ran on a TPU: docs/gpu-status.md.
"""

from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from stoker.preflight.catalog import describe
from stoker_watch.findings.finding import Finding
from stoker_watch.hardware import tpu

PACKAGES = ("torch_tpu", "libtpu")


def concerns_tpu(device: str | None, root: Path = Path("/")) -> bool:
    """Whether to look at TPUs: one is asked for, or there."""
    return (device or "").partition(":")[0] == "tpu" or (device is None and bool(tpu.pci_chips(root)))


def check_tpu(
    *, device: str | None = None, root: Path = Path("/"), is_installed: Callable[[str], object] = find_spec
) -> list[Finding]:
    """device: as `--device`; root: with /sys, /proc, /dev, /tmp."""
    chips = tpu.pci_chips(root)
    if not chips:
        return [describe("tpu_missing")]
    name = ", ".join(f"{count} × TPU {kind}" for kind, count in Counter(chips).items())
    findings = []
    files = tpu.device_files(root)
    if not files:
        findings.append(describe("tpu_driver_missing", chips=name))
    missing = [package for package in PACKAGES if not is_installed(package)]
    if missing:
        findings.append(describe("tpu_library_missing", missing=" and ".join(missing), chips=name))
    held = tpu.holders(root)
    if held:
        processes = "; ".join(f"process {pid} ({command[:80]})" for pid, command in sorted(held.items()))
        findings.append(describe("tpu_held", processes=processes, pids=" ".join(map(str, sorted(held)))))
    elif (root / tpu.LOCK_FILE).exists():
        findings.append(describe("tpu_lock_left", path=f"/{tpu.LOCK_FILE}"))
    if device is None and not findings:
        findings.append(describe("accelerator_untested", name="tpu", evidence=f"on the PCI bus: {name}"))
    if findings:
        return findings
    return [describe("tpu", chips=name, files=", ".join(files))]
