"""Muon: the updates of convolution kernels, made nearly orthogonal, so that all directions of a kernel learn alike.

A kernel [O, I, h, w] is a matrix [O, I · h · w]. Its update is the momentum of its gradient with all singular values
near 1 (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), times 0.2 √max(O, I · h · w), so that learning
rate and weight decay are those of AdamW (Liu et al. 2025, arXiv 2502.16982, section 2.2). LOG.md, "Muon", has what it
gains for ember.

The iteration, X ← (a + b XXᵀ + c (XXᵀ)²) X, multiplies a matrix from the left by polynomials of G = XXᵀ. So it runs on
G alone, which is at most as large as the smaller side of the kernel, for all kernels with the same smaller side in one
batch; the product of the polynomials is applied to X once. All of it is computed on the device, without a host wait.

Not `torch.optim.Muon`: it takes matrices only, one at a time, in bf16, and cannot skip a step without a host wait.
"""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Item = TypeVar("Item")

MOMENTUM = 0.95
NUM_ITERATIONS = 3
A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the iteration, of Jordan et al.: the steepest polynomial at 0 that stays near 1."""
RMS = 0.2
"""RMS of an update at a learning rate of 1: about AdamW's (Liu et al.)."""
MIN_SQUARED_NORM = 1e-14
"""Squared norm of a momentum below which its update vanishes with it, as Jordan et al. have it."""
MIN_CHANNELS = 4
"""Input channels of a kernel: that of an image's three is not a matrix between features."""


def is_matrix(module: nn.Module, name: str) -> bool:
    """Whether a parameter of a module is a kernel for Muon: of a convolution without groups that a norm follows (it has
    no bias); not that of images, nor those of predictions."""
    return (
        isinstance(module, nn.Conv2d) and name == "weight" and module.bias is None and module.groups == 1
        and module.in_channels >= MIN_CHANNELS
    )  # fmt: skip


class Muon:
    """Updates the parameters of groups of an optimizer that have `is_matrix`, whose momentum is in its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [
            _KernelGroup(group) for group in optimizer.param_groups if group.get("is_matrix") and group["params"]
        ]
        for group in self._groups:
            for parameter, part in zip(group.parameters, group.split(group.momentum), strict=True):
                buffer = part.view(_ordered(parameter, parameter).shape)
                if not parameter.is_contiguous():  # channels-last
                    buffer = buffer.permute(0, 3, 1, 2)
                optimizer.state[parameter]["momentum_buffer"] = buffer

    @torch.no_grad()
    def step(self, divisor: Tensor | None, found_inf: Tensor) -> None:
        """As `OptimizerStep.update`; frees the gradients. divisor: of the gradients; found_inf: 1 if weights and
        momentum must stay. A kernel without a gradient counts as one with zeros."""
        for group in self._groups:
            group.step(divisor, found_inf)

    def changes(self) -> dict[Tensor, Tensor]:
        """What each parameter's momentum changes in a step, as a matrix."""
        return {
            parameter: change
            for group in self._groups
            for parameter, change in zip(
                group.parameters, group.orthogonalize(group.momentum, group.options["lr"]), strict=True
            )
        }


class _KernelGroup:
    """Kernels with a learning rate and weight decay of their own."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        # those of the same shape, and of the same smaller side, one after the other: each operation is one call for all
        self.parameters: list[Tensor] = sorted(options["params"], key=lambda p: (min(_shape(p)), _shape(p)))
        device, dtype = self.parameters[0].device, self.parameters[0].dtype
        self.momentum = torch.zeros(sum(map(Tensor.numel, self.parameters)), device=device, dtype=dtype)
        self._shapes = [(shape, len(list(equal))) for shape, equal in itertools.groupby(self.parameters, _shape)]
        """(shape, number of kernels)"""
        longest = [
            [max(shape) for shape, count in shapes for _ in range(count)] for shapes in self._by_side(self._shapes)
        ]
        self._factors = [
            RMS * torch.tensor(sides, device=device, dtype=dtype).sqrt()[:, None, None] for sides in longest
        ]

    def _by_side(self, of_shapes: list[Item]) -> list[list[Item]]:
        """Groups one item per shape into lists of shapes with the same smaller side."""
        paired = zip(self._shapes, of_shapes, strict=True)
        return [[item for _, item in pairs] for _, pairs in itertools.groupby(paired, lambda pair: min(pair[0][0]))]

    def _stacks(self, flat: Tensor) -> list[Tensor]:
        """Splits values of all kernels into matrices [N, O, I · h · w] of each shape."""
        parts = torch.split(flat, [count * shape[0] * shape[1] for shape, count in self._shapes])
        return [part.view(count, *shape) for part, (shape, count) in zip(parts, self._shapes, strict=True)]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Splits values of all kernels into the matrix of each."""
        return [matrix for stack in self._stacks(flat) for matrix in stack.unbind()]

    def step(self, divisor: Tensor | None, found_inf: Tensor) -> None:
        gradient = torch.cat([
            _ordered(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, parameter).flatten()
            for parameter in self.parameters
        ])  # fmt: skip
        for parameter in self.parameters:
            parameter.grad = None
        if divisor is not None:
            gradient /= divisor
        gradient = torch.where(found_inf > 0, 0.0, gradient)
        self.momentum.lerp_(gradient, (1 - MOMENTUM) * (1 - found_inf))
        gradient.lerp_(self.momentum, MOMENTUM)  # Nesterov's
        lr = self.options["lr"] * (1 - found_inf)
        changes = self.orthogonalize(gradient, lr)
        torch._foreach_mul_(self.parameters, 1 - lr * self.options["weight_decay"])
        torch._foreach_sub_([_ordered(p, p).view(len(p), -1) for p in self.parameters], changes)

    def orthogonalize(self, flat: Tensor, lr: Tensor | float) -> list[Tensor]:
        """The change of each kernel for a momentum of all."""
        batches = zip(self._by_side(self._stacks(flat)), self._factors, strict=True)
        return [
            change
            for stacks, factors in batches
            for stack in orthogonalize(stacks, factors * lr)
            for change in stack.unbind()
        ]


def orthogonalize(stacks: Sequence[Tensor], factors: Tensor | float = 1.0) -> list[Tensor]:
    """Matrices, float32 [N, m, n] with the same min(m, n) in all stacks, with their singular values near 1, times the
    factors [sum of N, 1, 1]. Zeros stay zeros."""
    is_wide = [x.shape[1] <= x.shape[2] for x in stacks]
    grams = torch.cat(
        [torch.bmm(x, x.mT) if wide else torch.bmm(x.mT, x) for x, wide in zip(stacks, is_wide, strict=True)]
    )
    squared_norms = grams.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp(min=MIN_SQUARED_NORM)
    grams = grams / squared_norms
    products: Tensor | None = None
    for iteration in range(NUM_ITERATIONS):
        polynomials = torch.baddbmm(grams, grams, grams, beta=B, alpha=C)
        polynomials.diagonal(dim1=1, dim2=2).add_(A)
        products = polynomials if products is None else torch.bmm(polynomials, products)
        if iteration < NUM_ITERATIONS - 1:
            grams = torch.bmm(torch.bmm(polynomials, grams), polynomials)
    assert products is not None
    parts = torch.split(products * (squared_norms.rsqrt() * factors), [len(x) for x in stacks])
    return [torch.bmm(p, x) if wide else torch.bmm(x, p) for p, x, wide in zip(parts, stacks, is_wide, strict=True)]


def _shape(parameter: Tensor) -> tuple[int, int]:
    return len(parameter), parameter.numel() // len(parameter)


def _ordered(tensor: Tensor, parameter: Tensor) -> Tensor:
    """With its dimensions in the order of the parameter's memory: another order of columns of a matrix [O, I · h · w],
    which makes no difference to the update."""
    return tensor if parameter.is_contiguous() else tensor.permute(0, 2, 3, 1)
