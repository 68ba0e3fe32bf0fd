"""Devices whose programs XLA compiles: what is done in another way there."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker_watch.recording.torch_device import XLA_KINDS as XLA_KINDS


def end_step(device: torch.device) -> None:
    """Ends a step: XLA compiles what was issued since the last end, if it has no such program yet, and runs it.
    Nothing on other devices."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def device_of_constants(device: torch.device) -> torch.device:
    """Where to compute a tensor that is kept for all steps, to be moved to `device` then. For XLA on the host: it would
    compile what is made there into the first step, and the other steps as another program."""
    return torch.device("cpu") if device.type in XLA_KINDS else device


def set_scalar(scalar: Tensor, value: float) -> None:
    """Sets a scalar on the device without a host wait. XLA gets a copy: it would compile the numbers 0 and 1 as
    constants, another program for each."""
    if scalar.device.type in XLA_KINDS:
        # of one dimension: a CPU tensor without one counts as a number
        scalar.copy_(torch.tensor([value], dtype=scalar.dtype).to(scalar.device).reshape(()))
    else:
        scalar.fill_(value)


def divide_among_chips(tensors: Sequence[Tensor]) -> None:
    """Divides a batch among the chips of this process, where there are several (SPMD): one program computes what one
    chip would, and XLA exchanges what sums over images need, as gradients and the statistics of norms do."""
    from torch_xla import runtime

    if not runtime.is_spmd():
        return
    from torch_xla.distributed import spmd

    chips = runtime.global_runtime_device_count()
    mesh = spmd.Mesh(list(range(chips)), (chips,), ("images",))
    for tensor in tensors:
        if tensor.dim() and tensor.shape[0] % chips == 0:
            spmd.mark_sharding(tensor, mesh, ("images", *[None] * (tensor.dim() - 1)))


def xla_client() -> str:
    """What torch_xla computes on: `TPU`, or `CPU`."""
    from torch_xla import runtime

    return str(runtime.device_type())
