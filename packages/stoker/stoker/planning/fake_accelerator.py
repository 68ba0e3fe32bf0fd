"""A fake accelerator: whole training steps, mixed precision included, on a machine that has none.

Tensors on the device "fakegpu" have shapes, types and strides but no memory, so a step at full size takes seconds, and
one that reads a value of the device cannot run. `trace.py` counts with it what a step needs; the tests prove with it
that a step makes no host sync. What is not modelled: a driver's context, cuDNN's workspace, fragmentation of the
allocator, and the time anything takes.

It stands on private API of torch (a back-end written in Python for PrivateUse1, fake tensors) and changes the whole
process, so it runs in one of its own. A torch version that breaks it makes `install` raise FakeAcceleratorBroken.
"""

# mypy: disable-error-code="no-untyped-call"
# (what registers operators and modes in torch is untyped)

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from stoker.data.batch import NUM_RAND, Batch
from stoker.hardware import block_size
from stoker.hardware.device import DTYPES
from stoker_watch.errors import StokerError

DEVICE = "fakegpu"

# Types that CUDA's autocast gives to the inputs of operators (ATen/autocast_mode.h), as far as detectors use them.
LOWER = ("conv2d", "linear", "matmul", "bmm", "addmm")
FULL = ("upsample_nearest2d", "softplus", "rsqrt", "log", "exp", "binary_cross_entropy_with_logits", "group_norm")
PROMOTE = ("addcmul", "cat", "stack")

MEMORY_BYTES = 141 * 10**9
"""What the fake device says it has by default, as an H200. The blocks of losses and matchers depend on it."""

GRANULE = 512
"""Bytes that CUDA's caching allocator rounds every block up to."""

FUSED_OPTIMIZERS = ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr")


class FakeAcceleratorBroken(StokerError):
    """This version of torch no longer has the private API that the fake accelerator stands on."""


_autocast_cache: dict[int, Tensor] = {}
_in_forward: list[bool] = []  # not empty inside `Autocast`
_libraries: list[torch.library.Library] = []  # what they register lives as long as they do


def install() -> None:
    """Registers the device with this process: back-end, its autocast, a fall-through for everything else."""
    try:
        from torch.utils import backend_registration

        class Backend(backend_registration._DummyBackendModule):
            def get_amp_supported_dtype(self) -> list[torch.dtype]:
                return [torch.bfloat16, torch.float16]

        backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=Backend())
        operators = torch.library.Library("aten", "IMPL")
        for names, cast in ((LOWER, _to_lower), (FULL, _to_full), (PROMOTE, _to_widest)):
            for name in names:
                _autocast(operators, name, cast)
        others = torch.library.Library("_", "IMPL")
        others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        shapes = torch.library.Library("aten", "IMPL", "Meta")
        for name in FUSED_OPTIMIZERS:  # where torch has no shapes for them: they return nothing and change none
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
                shapes.impl(name, lambda *_args, **_kwargs: None)
        _libraries.extend((operators, others, shapes))
        set_memory(MEMORY_BYTES)
    except Exception as error:
        what = f"torch {torch.__version__} cannot trace a training step without an accelerator."
        fix = "a torch version that this version of stoker was tested with"
        raise FakeAcceleratorBroken(what, cause=repr(error), fix=fix) from error


def set_memory(total_bytes: int) -> None:
    """What the fake device says it has from now on."""
    torch.accelerator.get_memory_info = lambda _device=None, /: (total_bytes, total_bytes)
    block_size._block_sizes.clear()


def _autocast(library: torch.library.Library, name: str, cast: Callable[[Any], Any]) -> None:
    packet = getattr(torch.ops.aten, name)
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    for overload in packet.overloads():
        if overload == "out" or overload.endswith("_out"):
            continue
        operator = getattr(packet, overload)

        def casting(*args: Any, operator: Any = operator, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(key):
                args, kwargs = cast((args, kwargs))
                return operator(*args, **kwargs)

        library.impl(operator.name().removeprefix("aten::"), casting, "AutocastPrivateUse1")


def _to_lower(inputs: Any) -> Any:
    wanted = torch.get_autocast_dtype(DEVICE)

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        # What is computed again in the backward pass has a context of its own.
        if not (_in_forward and value.is_leaf and value.requires_grad):
            return value.to(wanted)
        if id(value) not in _autocast_cache:  # a parameter's copy serves the whole forward pass
            _autocast_cache[id(value)] = value.to(wanted)
        return _autocast_cache[id(value)]

    return _pytree.tree_map(cast, inputs)


def _to_full(inputs: Any) -> Any:
    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value

    return _pytree.tree_map(cast, inputs)


def _to_widest(inputs: Any) -> Any:
    tensors = [leaf for leaf in _pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return _to_full(inputs) if any(tensor.dtype == torch.float32 for tensor in tensors) else inputs


class Autocast(torch.autocast):
    """Mixed precision on the fake device, with a cache of cast parameters as real devices have; can be re-entered."""

    def __init__(self, precision: str) -> None:
        is_mixed = precision != "fp32"
        super().__init__(DEVICE, DTYPES[precision if is_mixed else "bf16"], enabled=is_mixed)

    def __enter__(self) -> None:
        super().__enter__()
        _in_forward.append(True)

    def __exit__(self, *error: Any) -> None:
        _in_forward.pop()
        _autocast_cache.clear()
        super().__exit__(*error)


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside it have no memory, on whatever device."""
    from torch._subclasses import FakeTensor, FakeTensorMode
    from torch.utils import _foreach_utils

    class Mode(FakeTensorMode):
        avoid_device_init = property(lambda _: True)

    # As for plain tensors: the norm of all gradients is one operator.
    _foreach_utils._foreach_supported_types.append(FakeTensor)
    try:
        with Mode():
            yield
    finally:
        _foreach_utils._foreach_supported_types.remove(FakeTensor)


def empty_batch(count: int, max_boxes: int, image_size: tuple[int, int], device: torch.device | str = DEVICE) -> Batch:
    """A batch of `count` images of this height and width without values, in the memory format of the loader's."""
    b, m, (h, w) = count, max_boxes, image_size

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Batch(
        images=empty(b, h, w, 3, dtype=torch.uint8).permute(0, 3, 1, 2),
        boxes=empty(b, m, 4),
        labels=empty(b, m, dtype=torch.int64),
        valid=empty(b, m, dtype=torch.bool),
        resized_size=empty(b, 2, dtype=torch.int32),
        scale=empty(b, 2),
        original_size=empty(b, 2, dtype=torch.int32),
        image_index=empty(b, dtype=torch.int64),
        rand=empty(b, NUM_RAND),
    )


class WithoutRandomValues(TorchFunctionMode):
    """A module built inside it keeps what memory it got as its random weights: those that `to_fake` replaces."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.uniform_, Tensor.normal_) or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def to_fake(module: nn.Module, device_type: str = DEVICE) -> nn.Module:
    """Replaces all parameters and buffers of a module built for real by empty ones without memory, in place; to be
    called inside `fake_tensors`. A copy.deepcopy of the module has others.

    (`Module.to` swaps tensors, and a tensor's own copy takes its storage; fake ones allow neither.)
    """
    made: dict[int, Tensor] = {}
    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _make_fake(tensor, device_type)()
                    tensors[name] = made[id(tensor)]  # type: ignore[assignment]
    return module


def _make_fake(tensor: Tensor, device_type: str) -> Callable[[], Tensor]:
    """Makes tensors like this one, without keeping it."""
    layout, dtype = (tuple(tensor.shape), tensor.stride()), tensor.dtype
    is_parameter, requires_grad = isinstance(tensor, nn.Parameter), tensor.requires_grad

    def make() -> Tensor:
        empty = torch.empty_strided(*layout, dtype=dtype, device=device_type)
        fake: Tensor = nn.Parameter(empty, requires_grad=requires_grad) if is_parameter else empty
        fake.__deepcopy__ = lambda _memo: make()  # type: ignore[method-assign]
        return fake

    return make
