"""What the CPU and its C library are told and asked."""

import ctypes
import os
import platform
from pathlib import Path

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def configure_malloc() -> None:
    """Makes glibc keep the large blocks that a training step frees, for the next step. Nothing with other C libraries.
    By default glibc returns them to the kernel, which has to clear every page again: 2 to 7 % of the time of a step."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


_ISA_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
"""Values of ONEDNN_MAX_CPU_ISA (oneDNN's "CPU Dispatcher Control") that leave no instructions for bf16 products."""


def instruction_set_limit() -> str | None:
    """What keeps torch from the bf16 instructions that the CPU has, or None. /proc/cpuinfo shows the CPU, not this."""
    limits = {name: os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")}
    for name, value in limits.items():
        if value.upper() in _ISA_WITHOUT_BF16:
            return f"{name}={value}"
    capability = torch.backends.cpu.get_cpu_capability()
    return None if capability.startswith(("AVX512", "AVX10")) else f"torch uses {capability} instructions"


def cpuinfo(key: str) -> str | None:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
