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
from stoker.knowledge import read_toml

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
    google: str = ""
    """Its name in Vertex AI; empty where it has none."""
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


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    pattern: str
    memory_gib: int | float
    gb_per_s: int | float
    teraflops: dict[str, int | float]
    source: str
    google: str = ""


def _read_gpu(key: str, row: _Row) -> Accelerator:
    return Accelerator(
        key=key,
        name=row.name,
        flops={precision: value * TERA for precision, value in row.teraflops.items()},
        bandwidth=row.gb_per_s * GB,
        memory_bytes=int(row.memory_gib * 2**30),
        pattern=row.pattern,
        source=row.source,
        google=row.google,
    )


GPUS = {key: _read_gpu(key, row) for key, row in msgspec.convert(read_toml("gpus.toml"), dict[str, _Row]).items()}
"""Key → GPU, those of `knowledge/gpus.toml`."""


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
