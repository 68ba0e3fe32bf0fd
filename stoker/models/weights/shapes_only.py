"""Models without values, of which only the shapes are of interest."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _NoValues(TorchFunctionMode):
    """Leaves out what fills or changes tensors in place: `normal_`, `zero_`, `copy_`. On meta tensors it would change
    nothing, and torch imports its compiler for it, which takes more than a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        if is_in_place and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **kwargs)


@contextmanager
def shapes_only() -> Iterator[None]:
    """In the block, tensors are made on the meta device. A model must not compute with them when it is built."""
    with torch.device("meta"), _NoValues():
        yield
