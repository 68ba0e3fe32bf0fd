"""Whether a GPU of NVIDIA is in this machine, or was promised to it, whatever torch says. No torch, no driver library.

A training that runs on the CPU because torch does not find its GPU costs hours before anyone notices: this is how
`stoker check` and `stoker train` tell a machine without a GPU from a broken one.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
"""PCI classes of VGA and 3D controllers (pci.ids)."""
WSL_LIBRARY = "usr/lib/wsl/lib/libcuda.so.1"
"""Where Windows puts NVIDIA's driver for WSL, which has no /dev/nvidia0."""
NO_GPUS_GIVEN = {
    "SLURM_JOB_GPUS": ("",),
    "SLURM_STEP_GPUS": ("",),
    "SLURM_GPUS_ON_NODE": ("", "0"),
    "NVIDIA_VISIBLE_DEVICES": ("", "void", "none"),
}
"""Variable with which a scheduler or a container runtime gives GPUs to a job → its values that give none. NVIDIA's
images set the last one themselves: they expect a GPU."""


def pci_gpus(root: Path = Path("/")) -> list[str]:
    """PCI addresses of NVIDIA's GPUs: 0000:3b:00.0. A container sees those of its host."""
    return [
        device.name
        for device in sorted(root.glob("sys/bus/pci/devices/*"))
        if _read(device / "vendor") == NVIDIA_VENDOR and _read(device / "class").startswith(DISPLAY_CLASSES)
    ]


def device_files(root: Path = Path("/")) -> list[str]:
    """/dev/nvidia0 …, which a process needs to use a GPU."""
    return [f"/dev/{path.name}" for path in sorted(root.glob("dev/nvidia[0-9]*"))]


def kernel_driver(root: Path = Path("/")) -> str | None:
    """Version of the loaded kernel module, 580.95.05. A container sees that of its host."""
    match = re.search(
        r"Kernel Module\s+(?:for \S+\s+)?(\d+\.\d+(?:\.\d+)?)", _read(root / "proc/driver/nvidia/version")
    )
    return match[1] if match else None


def promised_by(env: Mapping[str, str] = os.environ) -> str | None:
    """NAME=VALUE of the first variable with which a scheduler or a container runtime promises GPUs."""
    for name, none_given in NO_GPUS_GIVEN.items():
        value = env.get(name, "").strip()
        if value.lower() not in none_given:
            return f"{name}={value}"
    return None


def gpu_evidence(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """What shows that this machine has a GPU, or should have one; empty if nothing does."""
    evidence = []
    if files := device_files(root):
        evidence.append(f"there is {files[0]}")
    if (root / "dev/dxg").exists() and (root / WSL_LIBRARY).exists():
        evidence.append(f"Windows gives its GPU to WSL: there is /{WSL_LIBRARY}")
    if version := kernel_driver(root):
        evidence.append(f"the driver {version} is loaded")
    if addresses := pci_gpus(root):
        evidence.append(f"PCI device {addresses[0]} is a GPU of NVIDIA")
    if promised := promised_by(env):
        evidence.append(f"{promised} is set")
    return evidence


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # absent, or hidden by a container
        return ""
