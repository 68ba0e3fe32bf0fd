"""Proves that a step has no host sync: an operator that makes the host wait for the device.

In the context `ForbidHostSync` every operator that needs a value on the host raises `HostSyncError`. CPU tensors are
treated as if they were on a device, so a test without an accelerator proves that the same step has no host sync on one.
A sync that is needed is allowed by name: `with allow_host_sync("nms"):` (`stoker/hardware/host_sync.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.hardware.host_sync import allowed_host_syncs


class HostSyncError(RuntimeError):
    """An operator with a host sync ran where that is forbidden."""

    def __init__(self, operator: str, fix: str) -> None:
        super().__init__(
            f"{operator} makes the host wait for the device.\n  fix:    {fix}, "
            'or `with stoker.hardware.host_sync.allow_host_sync("a name"):` if the sync is needed'
        )
        self.operator = operator
        self.fix = fix


_READ = "keep the value in a tensor (torch.where, clamp, arithmetic) and read it later, outside the step"
_SIZE = "the size of its result depends on values: use a fixed size with a mask (torch.where, topk, masked_fill)"
_LIST = "a tensor made from Python values is copied to the device: make it once, as a buffer, or use torch.full/arange"
_MASK = "a boolean mask as index is turned into positions on the host: use torch.where or masked_fill"
_COPY = "copy with non_blocking=True from or to pinned memory, or outside the step"
_CHECK = "it reads an error code back from the device: use the variant without the check (…_ex)"

# Operators by name, without their overload. Those of torchvision have their namespace.
_FORBIDDEN_OPS: dict[str, str] = {
    "aten::_local_scalar_dense": _READ,
    "aten::item": _READ,
    "aten::is_nonzero": _READ,
    "aten::equal": "compare with (a == b).all() and keep the result in a tensor",
    "aten::allclose": _READ,
    "aten::nonzero": _SIZE,
    "aten::nonzero_numpy": _SIZE,
    "aten::masked_select": _SIZE,
    "aten::_unique": _SIZE,
    "aten::_unique2": _SIZE,
    "aten::unique_dim": _SIZE,
    "aten::unique_consecutive": _SIZE,
    "aten::unique_dim_consecutive": _SIZE,
    "aten::bincount": _SIZE,
    "aten::to_sparse": _SIZE,
    "aten::_to_sparse": _SIZE,
    "aten::_coalesce": _SIZE,
    "aten::multinomial": "draw with torch.rand and compare, argsort or topk",
    "aten::_linalg_check_errors": _CHECK,
    "aten::lift_fresh": _LIST,
    "aten::lift_fresh_copy": _LIST,
    "torchvision::nms": "run NMS outside the training step",
}
_INDEX_OPS = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
_COPY_OPS = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
# Reads of CPU tensors that no operator is dispatched for.
_READ_FUNCTIONS = {
    Tensor.tolist: _READ,
    Tensor.numpy: _READ,
    Tensor.cpu: _COPY,
    Tensor.__array__: _READ,
    Tensor.__repr__: "print outside the step",
    torch.as_tensor: _LIST,
    torch.from_numpy: _LIST,
}


class ForbidHostSync(TorchDispatchMode):
    """A context in which a host sync raises `HostSyncError`, with tensors of any device.

    It detects operators in forward and backward, and reads of a tensor from Python. It does not detect a sync inside
    the implementation of a kernel, nor `synchronize()`; on CUDA, `torch.cuda.set_sync_debug_mode("error")` does.
    """

    def __enter__(self) -> "ForbidHostSync":
        self._reads = _ForbidTensorReads()
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call_kwargs = kwargs or {}
        if not allowed_host_syncs():
            fix = _host_sync_fix(func, args, call_kwargs)
            if fix is not None:
                raise HostSyncError(str(func), fix)
        return func(*args, **call_kwargs)


class RecordOperators(TorchDispatchMode):
    """Records the operators called in its context: their names, their Python arguments, and the shapes of tensors.

    A CUDA graph replays the calls of one step. So steps can only be replayed if their records are equal, whatever the
    learning rate or the number of the step: what changes must be in tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "profiler":  # ranges of a profiler; nothing of the step
            self.operators.append((func.name(), _pytree.tree_map(_describe_argument, (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _describe_argument(value: Any) -> Any:
    return (tuple(value.shape), value.dtype, value.device) if isinstance(value, Tensor) else value


class _ForbidTensorReads(TorchFunctionMode):
    """The part of `ForbidHostSync` for reads that no operator is dispatched for."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (
            func in _READ_FUNCTIONS
            and not allowed_host_syncs()
            and not (func is torch.as_tensor and isinstance(args[0], Tensor))
        ):
            raise HostSyncError(getattr(func, "__qualname__", str(func)), _READ_FUNCTIONS[func])
        return func(*args, **(kwargs or {}))


def _host_sync_fix(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The fix for an operator with a host sync; None for one without."""
    name = func.name().partition(".")[0]
    if name in _FORBIDDEN_OPS:
        return _FORBIDDEN_OPS[name]
    if name in _INDEX_OPS:
        return _indexing_sync_fix(args[0], args[1])
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[-1], Tensor):
        return "pass output_size"
    if name in _COPY_OPS:
        return _copy_sync_fix(name, args, kwargs)
    return None


def _indexing_sync_fix(tensor: Tensor, indices: Any) -> str | None:
    for index in _pytree.tree_leaves(indices):
        if not isinstance(index, Tensor):
            continue
        if index.dtype in (torch.bool, torch.uint8):
            return _MASK
        if index.device != tensor.device:
            return "the index is on the host: make it on the device"
    return None


def _copy_sync_fix(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    if name == "aten::_to_copy":
        source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
        non_blocking = kwargs.get("non_blocking", False)
    else:
        destination, origin = (args[1], args[0]) if name == "aten::_copy_from" else (args[0], args[1])
        source, target = origin.device, destination.device
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    crosses_devices = (source.type == "cpu") != (target.type == "cpu")
    return _COPY if crosses_devices and not non_blocking else None
