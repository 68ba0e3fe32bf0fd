"""Muon: the updates of convolution kernels, made nearly orthogonal, so that all directions of a kernel learn alike.

A kernel [O, I, h, w] is a matrix [O, I · h · w]. Its update is the momentum of its gradient with all singular values
near 1 (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), times 0.2 √max(O, I · h · w), so that learning
rate and weight decay are those of AdamW (Liu et al. 2025, arXiv 2502.16982, section 2.2). LOG.md, "Muon", has what it
gains for ember.

The iteration, X ← (a + b XXᵀ + c (XXᵀ)²) X, multiplies a matrix from the left by polynomials of G = XXᵀ. So it runs on
G alone, which is at most as large as the smaller side of the kernel, for all kernels with the same smaller side in one
batch; the product of the polynomials is applied to X once. All of it is computed on the device, without a host wait.

Why not `torch.optim.Muon`: it takes matrices only, one at a time, in bf16, and cannot skip a step whose gradients are
not finite without a host wait.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NUM_ITERATIONS = 3
A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the iteration, of Jordan et al.: the steepest polynomial at 0 that stays near 1."""
RMS = 0.2
"""Of an update at a learning rate of 1: about AdamW's (Liu et al.)."""
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
        self._groups = [_Group(group) for group in optimizer.param_groups if group.get("is_matrix") and group["params"]]
        for group in self._groups:
            for parameter, part in zip(group.parameters, group.split(group.momentum), strict=True):
                shape = parameter.shape
                is_view = parameter.is_contiguous()
                buffer = part.view(shape) if is_view else part.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
                optimizer.state[parameter]["momentum_buffer"] = buffer

    @torch.no_grad()
    def step(self, divisor: Tensor | None, found_inf: Tensor) -> None:
        """As `OptimizerStep.update`; frees the gradients. divisor: of the gradients; found_inf: 1 if weights and
        momentum must stay."""
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


class _Group:
    """Kernels with a learning rate and weight decay of their own."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.parameters: list[Tensor] = options["params"]
        device, dtype = self.parameters[0].device, self.parameters[0].dtype
        # one tensor for all, so that an operation is one call
        self.momentum = torch.zeros(sum(map(Tensor.numel, self.parameters)), device=device, dtype=dtype)
        by_size: dict[int, list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            by_size.setdefault(min(_matrix_shape(parameter)), []).append(number)
        longest = [[max(_matrix_shape(self.parameters[number])) for number in numbers] for numbers in by_size.values()]
        self._batches = [
            (numbers, RMS * torch.tensor(sizes, device=device, dtype=dtype).sqrt()[:, None, None])
            for numbers, sizes in zip(by_size.values(), longest, strict=True)
        ]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Of all kernels, to a matrix [O, h · w · I or I · h · w] of each."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [part.view(len(parameter), -1) for part, parameter in zip(parts, self.parameters, strict=True)]

    def step(self, divisor: Tensor | None, found_inf: Tensor) -> None:
        gradient = torch.cat([
            _matrix(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, parameter).flatten()
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
        torch._foreach_sub_([_matrix(parameter, parameter) for parameter in self.parameters], changes)

    def orthogonalize(self, flat: Tensor, lr: Tensor | float) -> list[Tensor]:
        """The change of each kernel for a momentum of all."""
        matrices = self.split(flat)
        changes: list[Tensor] = list(matrices)
        for numbers, scales in self._batches:
            batch = orthogonalize([matrices[number] for number in numbers], scales * lr)
            for number, change in zip(numbers, batch, strict=True):
                changes[number] = change
        return changes


def orthogonalize(matrices: Sequence[Tensor], factors: Tensor | float = 1.0) -> list[Tensor]:
    """Each matrix, float32 [m, n] with the same min(m, n) in all, with its singular values near 1, times its factor
    [N, 1, 1]. Zeros stay zeros."""
    grams = torch.stack([x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x for x in matrices])
    squared_norms = grams.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp(min=torch.finfo(grams.dtype).tiny)
    grams = grams / squared_norms
    products: Tensor | None = None
    for iteration in range(NUM_ITERATIONS):
        polynomials = torch.baddbmm(grams, grams, grams, beta=B, alpha=C)
        polynomials.diagonal(dim1=1, dim2=2).add_(A)
        products = polynomials if products is None else polynomials @ products
        if iteration < NUM_ITERATIONS - 1:
            grams = polynomials @ grams @ polynomials
    assert products is not None
    products = products * (squared_norms.rsqrt() * factors)
    return [p @ x if x.shape[0] <= x.shape[1] else x @ p for p, x in zip(products, matrices, strict=True)]


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    return len(parameter), parameter.numel() // len(parameter)


def _matrix(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A kernel [O, I, h, w] as a matrix with the columns in the order of the parameter's memory: a view of the
    parameter. Their order makes no difference to the update."""
    ordered = tensor if parameter.is_contiguous() else tensor.permute(0, 2, 3, 1)
    return ordered.reshape(len(tensor), -1)
