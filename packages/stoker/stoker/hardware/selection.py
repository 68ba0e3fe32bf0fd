"""Which device a run uses, and that it exists and computes."""

import importlib.util
from collections.abc import Sequence

import torch

from stoker.hardware.cuda_trial import CudaGpu, build_with, present_device, runs_on
from stoker.hardware.device import Device
from stoker_watch.errors import PreflightError, make_error

TESTED_DEVICES = frozenset({"cuda"})
"""Kinds of accelerator that are used by default; docs/gpu-status.md."""


def untested_accelerator() -> str | None:
    """The kind of an accelerator that exists but `select_device` does not use by default; None: there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None or accelerator.type in TESTED_DEVICES else accelerator.type


def select_device(name: str | None = None) -> Device:
    """The device called `name` (`cpu`, `cuda`, `cuda:1`, `mps` …); by default a tested accelerator, else the CPU. An
    accelerator that is not in TESTED_DEVICES is used only by name (`untested_accelerator`). Raises PreflightError when
    the device does not exist or does not compute: a run must never fall back to the CPU silently."""
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = None if accelerator is None else accelerator.type
        device = torch.device(kind, 0) if kind in TESTED_DEVICES else torch.device("cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            what = f"There is no device called {name!r}."
            fix = "on a TPU VM: pip install 'stoker[tpu]'" if name.partition(":")[0] == "tpu" else None
            raise PreflightError(what, cause=cause, choices=available_devices(), fix=fix) from error
    if device.type not in {kind.partition(":")[0] for kind in available_devices()}:
        raise make_error(PreflightError, "device-not-usable", choices=available_devices(), device=str(device))
    if device.type == "xla":
        import torch_xla
        from torch_xla import runtime

        if name == "xla" and runtime.global_runtime_device_count() > 1:  # all chips, not one by its number
            runtime.use_spmd()
        device = torch_xla.device(device.index)
    elif device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    refusal = None
    try:
        if device.type == "cuda" and torch.version.hip is None:
            refusal = missing_kernels(present_device(device), torch.cuda.get_arch_list())
        works = refusal is not None or float(torch.ones(8, device=device).square().sum().item()) == 8.0
    except Exception as error:
        raise PreflightError(f"The device {str(device)!r} exists but does not compute.", cause=str(error)) from error
    if refusal is not None:
        raise refusal
    if not works:
        raise PreflightError(f"The device {str(device)!r} computes wrong results: the sum of 8 ones is not 8.")
    return Device(device)


def missing_kernels(gpu: CudaGpu, arch_list: Sequence[str]) -> PreflightError | None:
    """The error if a torch that was built for `arch_list` has no kernels for this GPU."""
    if runs_on(arch_list, gpu.capability):
        return None
    return make_error(
        PreflightError, "gpu-without-kernels",
        name=gpu.name, arch=gpu.arch, torch=torch.__version__, arches=" ".join(arch_list),
        build=build_with(gpu.capability),
    )  # fmt: skip


def available_devices() -> list[str]:
    """Kinds of device that torch can use on this machine, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    names = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [*names, "xla"] if importlib.util.find_spec("torch_xla") is not None else names
