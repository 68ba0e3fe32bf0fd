"""Whether there is a GPU of NVIDIA, whatever torch says, and whether torch can use it.

What shows a GPU, or promises one, needs neither torch nor the driver's library: a training that runs on the CPU
because torch does not find its GPU costs hours before anyone notices. The trial uses each GPU for real, in a process of
its own: a matrix product and a convolution, compared with the CPU's.

    python -m stoker.hardware.cuda_trial 0.3 cuda:0

It prints `TorchFacts` as JSON, and on stderr the stage that it is in, because a broken driver may hang in any of them:
the caller (`preflight/gpu.py`) waits for a limited time. torch is imported here only when the program runs.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

STAGE = "stage: "
"""Begins a line on stderr that names the stage."""
MAX_RELATIVE_ERROR = 0.02
"""Error in fp32 or TF32, relative to the largest value: TF32 keeps 10 bits, a convolution adds 576 products."""
SIDE = 4096
"""Side of the matrices whose product is timed: 137 GFLOP, large enough to be at full speed."""

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


class CudaGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that torch has used. error: what it raised, or which result was wrong."""

    index: int
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    error: str = ""
    wrong: bool = False
    tflops: float | None = None
    """TFLOPS of matrix products in bf16, or fp16 where there is none."""

    @property
    def arch(self) -> str:
        """sm_90: as torch names what it was built for."""
        return "sm_{}{}".format(*self.capability)


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What torch says of itself and its GPUs."""

    torch: str
    cuda: str | None = None
    """CUDA version that torch was built for: 13.0."""
    rocm: str | None = None
    accelerator: str | None = None
    """Kind of accelerator that torch finds."""
    num_gpus: int = 0
    error: str = ""
    """Why torch finds none, in the words of CUDA."""
    arch_list: list[str] = []
    """Architectures that torch has kernels for: sm_90, compute_90 (PTX, compiled by the driver)."""
    devices: list[CudaGpu] = []
    cudnn: int | None = None
    """Version as cuDNN has it: 91002 is 9.10.2."""
    cudnn_error: str = ""
    cudnn_required: str | None = None
    """Version of the package that torch requires: 9.10.2.21."""
    libraries: list[str] = []
    """Loaded libcuda and libcudnn files."""


def runs_on(arch_list: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code for these architectures runs on a GPU: code for the same major and at most its minor version, or PTX
    of at most its version. sm_90a runs on exactly one (CUDA C++ programming guide, "Compute capability")."""
    for arch in arch_list:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch):
            kind, built = match[1], (int(match[2]), int(match[3]))
            runs = built <= capability and (kind == "compute" or built[0] == capability[0])
            if built == capability if match[4] == "a" else runs:
                return True
    return not arch_list  # not known


TURING = (7, 5)
"""The oldest GPUs of CUDA 13, and of torch's builds with CUDA 12.8 and later."""


def build_with(capability: tuple[int, int]) -> str:
    """Which build of torch has kernels for a GPU that another one lacks (pytorch's RELEASE.md, "PyTorch CUDA Support
    Matrix" for 2.11; issue 190385: no build for CUDA 12.6 after 2.14)."""
    return "2.11 to 2.14 for CUDA 12.6 (cu126)" if capability < TURING else "a newer one, for the newest CUDA"


def describe_torch() -> dict[str, Any]:
    """The fields of `TorchFacts` that need no GPU."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "accelerator": None if accelerator is None else accelerator.type,
        "num_gpus": torch.cuda.device_count(),
        "arch_list": torch.cuda.get_arch_list(),
        "cudnn_required": _required_cudnn(),
    }


def present_device(device: Any) -> CudaGpu:
    """The GPU of this process, a `torch.device`, without a trial."""
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    return CudaGpu(index=index, name=properties.name, capability=(properties.major, properties.minor))


def cuda_error() -> str:
    """Why torch cannot use CUDA, in its words; empty if it can, or was not built for it."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _first_lines(error)
    return ""


def _required_cudnn() -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires("torch") or []:
            if match := re.match(r"nvidia-cudnn-cu\d+\s*\(?==\s*([\d.]+)", requirement):
                return match[1].rstrip(".")
    return None


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Paths of the libcuda and libcudnn files in this process."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:  # not Linux
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if re.match(r"lib(?:cuda|cudnn\w*)\.so", path.rpartition("/")[2]))


def run_trial(seconds: float, only: int | None) -> TorchFacts:
    """seconds: of timed matrix products on each GPU; only: index of the one GPU to use."""
    _enter("importing torch")
    import torch

    _enter("starting CUDA")
    facts: dict[str, Any] = describe_torch() | {"error": cuda_error()}
    if facts["error"] or not facts["num_gpus"]:
        return msgspec.convert(facts, TorchFacts)
    try:
        facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        facts["cudnn_error"] = _first_lines(error)
    facts["devices"] = [
        _try_device(index, seconds) for index in range(facts["num_gpus"]) if only is None or index == only
    ]
    return msgspec.convert(facts | {"libraries": loaded_libraries()}, TorchFacts)


def _try_device(index: int, seconds: float) -> CudaGpu:
    import torch

    device, present = torch.device("cuda", index), CudaGpu(index=index)
    try:
        _enter(f"opening cuda:{index}")
        present = present_device(device)
        generator = torch.Generator().manual_seed(0)
        _enter(f"matrix product on cuda:{index}")
        a, b = torch.randn(2, 256, 256, generator=generator)
        product_error = _relative_error((torch.relu(a.to(device)) @ b.to(device)).cpu(), torch.relu(a) @ b)
        _enter(f"convolution on cuda:{index}")
        images = torch.randn(2, 64, 32, 32, generator=generator)
        convolution = torch.nn.Conv2d(64, 64, 3, padding=1)
        expected = convolution(images)
        conv_error = _relative_error(convolution.to(device)(images.to(device)).cpu(), expected)
        if max(product_error, conv_error) > MAX_RELATIVE_ERROR:
            text = f"relative errors of {product_error:.2g} (matrix product) and {conv_error:.2g} (convolution)"
            return msgspec.structs.replace(present, error=text, wrong=True)
        _enter(f"timing cuda:{index}")
        return msgspec.structs.replace(present, tflops=_measure_tflops(device, seconds))
    except Exception as error:  # noqa: BLE001 (whatever a driver makes torch raise is the result)
        return msgspec.structs.replace(present, error=_first_lines(error))


def _relative_error(result: Any, expected: Any) -> float:
    error = float((result - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def _measure_tflops(device: Any, seconds: float) -> float | None:
    """TFLOPS of matrix products; None without room for the matrices."""
    import torch

    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    try:
        a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
        a @ b
    except torch.OutOfMemoryError:
        return None
    torch.cuda.synchronize(device)
    start_s, count = time.perf_counter(), 0
    while time.perf_counter() - start_s < seconds:
        for _ in range(10):
            a @ b
        torch.cuda.synchronize(device)
        count += 10
    return 2 * SIDE**3 * count / (time.perf_counter() - start_s) / 1e12


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split("\n")[:2])[:500] or type(error).__name__


def _enter(stage: str) -> None:
    print(STAGE + stage, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    seconds, device = float(arguments[0]), arguments[1] if len(arguments) > 1 else ""
    kind, _, index = device.partition(":")
    only = int(index) if kind == "cuda" and index.isdecimal() else None
    print(msgspec.json.encode(run_trial(seconds, only)).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
