"""Uses each GPU for real, in a process of its own: a matrix product and a convolution, compared with the CPU's.

    python -m stoker.hardware.cuda_trial 0.3 cuda:0

It prints `TorchFacts` as JSON, and on stderr the stage that it is in, because a broken driver may hang in any of them:
the caller (`preflight/gpu.py`) waits for a limited time. torch is imported here only when the program runs.
"""

import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

STAGE = "stage: "
"""Begins a line on stderr that names the stage."""
MAX_RELATIVE_ERROR = 0.02
"""Of a result in fp32 or TF32, relative to the largest value: TF32 keeps 10 bits, a convolution adds 576 products."""
SIDE = 4096
"""Of the matrices whose product is timed: 137 GFLOP, large enough to be at full speed."""


class TorchDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that torch has used. error: what it raised, or which result was wrong."""

    index: int
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    free_bytes: int = 0
    total_bytes: int = 0
    error: str = ""
    wrong: bool = False
    tflops: float | None = None
    """Of bf16 (fp16 where there is none) matrix products."""


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
    devices: list[TorchDevice] = []
    cudnn: int | None = None
    """91002 is 9.10.2."""
    cudnn_error: str = ""
    cudnn_required: str | None = None
    """Version of the package that torch requires: 9.10.2.21."""
    libraries: list[str] = []
    """Loaded libcuda and libcudnn files."""


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


def present_device(device: Any) -> TorchDevice:
    """The GPU of this process, a `torch.device`, without a trial."""
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    return TorchDevice(index=index, name=properties.name, capability=(properties.major, properties.minor))


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
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
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


def _try_device(index: int, seconds: float) -> TorchDevice:
    import torch

    device, values = torch.device("cuda", index), dict[str, Any](index=index)
    try:
        _enter(f"opening cuda:{index}")
        properties = torch.cuda.get_device_properties(device)
        values |= {"name": properties.name, "capability": (properties.major, properties.minor)}
        values["free_bytes"], values["total_bytes"] = torch.cuda.mem_get_info(device)
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
            return TorchDevice(**values, error=text, wrong=True)
        _enter(f"timing cuda:{index}")
        return TorchDevice(**values, tflops=_measure_tflops(device, seconds))
    except Exception as error:  # noqa: BLE001 (whatever a driver makes torch raise is the result)
        return TorchDevice(**values, error=_first_lines(error))


def _relative_error(result: Any, expected: Any) -> float:
    error = float((result - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def _measure_tflops(device: Any, seconds: float) -> float | None:
    """None without room for the matrices."""
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
