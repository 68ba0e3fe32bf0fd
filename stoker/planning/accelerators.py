"""The accelerators that a step can be predicted for: GPUs from a table of data sheets, and the present CPU, measured.

Not here: what a step needs of them (`trace.py`), how much of their peak a step reaches (`roofline.py`), and the
machines that have them and their prices.
"""

import functools
import re
import statistics
import time
from collections.abc import Callable

import msgspec

from stoker.errors import UsageError

GB, TERA = 10**9, 10**12


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of device. Peaks are those of dense arithmetic, without structured sparsity."""

    key: str
    """a100-40; stable, for scripts."""
    name: str
    """NVIDIA A100 40 GB."""
    flops: dict[str, float]
    """Peak operations per second by type of arithmetic, fp32, tf32, bf16, fp16: those that the device has."""
    bandwidth: float
    """Peak bytes per second of its memory."""
    memory_bytes: int
    """Of the device. A CPU: of the host, within its cgroup."""
    is_cpu: bool = False
    threads: int = 1
    """Threads that a step computes with, of a CPU."""
    pattern: str = ""
    """Regular expression, all of which the name that the driver reports has to match. Empty for a CPU."""
    source: str
    """Where the figures come from."""

    def precision(self) -> str:
        """The precision that training takes by default (`Device.best_precision`)."""
        return next((name for name in ("bf16", "fp16") if name in self.flops), "fp32")

    def peak_flops(self, precision: str, *, is_convolution: bool) -> float:
        """Peak operations per second of convolutions or matrix products under autocast to a precision.

        cuDNN computes fp32 convolutions in TF32 where the GPU has it, matrix products stay in fp32: torch's defaults
        of `torch.backends.cudnn.allow_tf32` and `torch.backends.cuda.matmul.allow_tf32`.
        """
        if precision != "fp32" and precision in self.flops:
            return self.flops[precision]
        return self.flops.get("tf32", self.flops["fp32"]) if is_convolution else self.flops["fp32"]

    def matches(self, device_name: str) -> bool:
        """Whether this is the device of that name, as the driver reports it (of a CPU: as the kernel does)."""
        if self.is_cpu:
            return device_name == self.name
        return re.fullmatch(self.pattern, device_name, re.IGNORECASE) is not None


def _gpu(
    key: str, name: str, pattern: str, memory_gb: float, gb_per_s: float, source: str, **teraflops: float
) -> Accelerator:
    return Accelerator(
        key=key,
        name=f"NVIDIA {name}",
        flops={precision: value * TERA for precision, value in teraflops.items()},
        bandwidth=gb_per_s * GB,
        memory_bytes=int(memory_gb * 2**30),
        pattern=pattern,
        source=source,
    )


_VOLTA = "NVIDIA V100 data sheet (2020), SXM2"
_AMPERE = "NVIDIA A100 data sheet (2022), SXM"
_HOPPER = "NVIDIA H100 data sheet (2023), without sparsity"
_ADA = "NVIDIA Ada GPU architecture white paper (2023); fp16 and bf16 with fp32 accumulation"

GPUS: dict[str, Accelerator] = {
    gpu.key: gpu
    for gpu in (
        _gpu("t4", "T4", r".*\bT4\b.*", 15, 320, "NVIDIA T4 data sheet (2019)", fp32=8.1, fp16=65),
        _gpu("p100", "P100 16 GB", r".*\bP100\b.*", 16, 732, "NVIDIA P100 data sheet (2016), PCIe", fp32=9.3),
        _gpu("v100-16", "V100 16 GB", r".*\bV100\b.*-16GB", 16, 900, _VOLTA, fp32=15.7, fp16=125),
        _gpu("v100-32", "V100 32 GB", r".*\bV100\b.*-32GB.*", 32, 900, _VOLTA, fp32=15.7, fp16=125),
        _gpu("a10g", "A10G", r".*\bA10G\b.*", 22.5, 600, "NVIDIA A10G data sheet (2021), AWS's variant of the A10",
             fp32=35, tf32=35, bf16=70, fp16=70),
        _gpu("l4", "L4", r".*\bL4\b.*", 22.5, 300, "NVIDIA L4 data sheet (2023), without sparsity",
             fp32=30.3, tf32=60, bf16=121, fp16=121),
        _gpu("l40s", "L40S", r".*\bL40S\b.*", 44.5, 864, "NVIDIA L40S data sheet (2023), without sparsity",
             fp32=91.6, tf32=183, bf16=362, fp16=362),
        _gpu("a100-40", "A100 40 GB", r".*\bA100\b.*-40GB.*", 39.5, 1555, _AMPERE,
             fp32=19.5, tf32=156, bf16=312, fp16=312),
        _gpu("a100-80", "A100 80 GB", r".*\bA100\b.*80GB.*", 79, 2039, _AMPERE,
             fp32=19.5, tf32=156, bf16=312, fp16=312),
        _gpu("h100-pcie", "H100 PCIe", r".*\bH100\b.*PCIe.*", 79.5, 2000, _HOPPER,
             fp32=51, tf32=378, bf16=756, fp16=756),
        _gpu("h100", "H100 SXM", r".*\bH100\b(?!.*PCIe).*", 79, 3350, _HOPPER, fp32=67, tf32=494, bf16=989, fp16=989),
        _gpu("h200", "H200", r".*\bH200\b.*", 139.5, 4800, "NVIDIA H200 data sheet (2024), SXM, without sparsity",
             fp32=67, tf32=494, bf16=989, fp16=989),
        _gpu("b200", "B200", r".*\bB200\b.*", 178, 8000, "NVIDIA Blackwell data sheet (2024), HGX, without sparsity",
             fp32=75, tf32=1125, bf16=2250, fp16=2250),
        _gpu("rtx3090", "GeForce RTX 3090", r".*RTX 3090", 24, 936,
             "NVIDIA Ampere GA102 white paper (2021); fp16 and bf16 with fp32 accumulation",
             fp32=35.6, tf32=35.6, bf16=71, fp16=71),
        _gpu("rtx4090", "GeForce RTX 4090", r".*RTX 4090", 24, 1008, _ADA, fp32=82.6, tf32=82.6, bf16=165, fp16=165),
        _gpu("rtx5090", "GeForce RTX 5090", r".*RTX 5090", 31.8, 1792,
             "NVIDIA RTX Blackwell white paper (2025); fp16 and bf16 with fp32 accumulation",
             fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5),
    )
}  # fmt: skip
"""Key → GPU. Memory is in GiB and what torch reports as total, which is less than the nominal size where ECC or the
driver takes a part."""


def find_accelerator(key: str) -> Accelerator:
    """The accelerator with this key; `cpu` is the present one, which is measured. Raises UsageError."""
    if key == "cpu":
        return measure_cpu()
    if key.lower() not in GPUS:
        raise UsageError(f"There is no accelerator {key!r} in the table.", choices=("cpu", *GPUS))
    return GPUS[key.lower()]


def identify(device_name: str) -> Accelerator | None:
    """The GPU of a name as the driver reports it; None: it is not in the table."""
    return next((gpu for gpu in GPUS.values() if gpu.matches(device_name)), None)


MATRIX_SIDE, COPY_BYTES = 1024, 64 * 2**20
"""Of the micro-benchmark. The copy is larger than what a core has of a server's caches."""
ROUNDS = 5


def measure_cpu(*, clock: Callable[[], float] = time.perf_counter) -> Accelerator:
    """The present CPU with the threads that torch uses now: a matrix product and a copy, in half a second.

    clock: seconds; `time.process_time` for one thread on a busy machine.
    """
    import torch  # the table is read where torch is absent

    from stoker.hardware.device import Device

    device = Device(torch.device("cpu"))
    threads = torch.get_num_threads()
    precisions = {"fp32": torch.float32}
    if (best := device.best_precision()[0]) == "bf16":
        precisions[best] = torch.bfloat16
    flops = {}
    for name, dtype in precisions.items():
        a, b = (torch.full((MATRIX_SIDE, MATRIX_SIDE), 0.5, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        flops[name] = 2 * MATRIX_SIDE**3 / _seconds(functools.partial(torch.mm, a, b, out=out), clock)
    source, target = (torch.zeros(COPY_BYTES // 4) for _ in range(2))
    return Accelerator(
        key="cpu",
        name=device.name,
        flops=flops,
        bandwidth=2 * COPY_BYTES / _seconds(lambda: target.copy_(source), clock),
        memory_bytes=device.memory().total,
        is_cpu=True,
        threads=threads,
        source=f"measured here: a product of two {MATRIX_SIDE} × {MATRIX_SIDE} matrices, a copy of "
        f"{COPY_BYTES // 2**20} MiB, {threads} threads",
    )


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Median of some runs, after one that warms up."""
    work()
    taken = []
    for _ in range(ROUNDS):
        start_s = clock()
        work()
        taken.append(clock() - start_s)
    return statistics.median(taken)
