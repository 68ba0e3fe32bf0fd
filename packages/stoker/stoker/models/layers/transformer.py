"""Parts of transformers that detectors share: attention, feed-forward layers, perceptrons, sine positions.

Sums and norms are fp32 under autocast and limited to the range of fp16, so that an overflow in a matrix product of fp16
does not become NaN in the norm after it. Tokens are [B, T, C].
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.hardware.xla import device_of_constants
from stoker.models.layers.losses import at_least_fp32

FP16_MAX = 65504.0


class FiniteLayerNorm(nn.LayerNorm):
    """LayerNorm in fp32 of numbers that are first limited to the range of fp16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(at_least_fp32(x).clamp(-FP16_MAX, FP16_MAX))


class FiniteRMSNorm(nn.Module):
    """Division by the root mean square, likewise."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(channels)), eps

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            limited = at_least_fp32(x).clamp(-FP16_MAX, FP16_MAX)
            return limited * (limited.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class MLP(nn.Module):
    """Linear layers of these widths with activations between them. zero_last: the last layer starts with zeros."""

    def __init__(
        self,
        widths: Sequence[int],
        activation: Callable[[Tensor], Tensor] = functional.relu,
        *,
        zero_last: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        if zero_last:
            for parameter in self.layers[-1].parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


class SwiGLU(nn.Module):
    """Gated feed-forward layer (Shazeer 2020, arXiv 2002.05202) with `hidden` gates."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(channels, hidden) for _ in range(2))
        self.down_proj = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class SelfAttention(nn.Module):
    """Attention of tokens among each other, with positions added to queries and keys."""

    def __init__(self, channels: int, num_heads: int = 8) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(channels, channels) for _ in range(4))
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight)

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """mask: bool, broadcastable to [B, heads, T, T], true where the row's token attends to the column's."""
        with_positions = x if positions is None else x + positions
        query, key, value = (
            projection(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for projection, tokens in (
                (self.q_proj, with_positions), (self.k_proj, with_positions), (self.v_proj, x)
            )
        )  # fmt: skip
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward layer with GELU, each added and normalized."""

    def __init__(self, channels: int, feedforward: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(channels)
        self.self_attn_layer_norm, self.final_layer_norm = FiniteLayerNorm(channels), FiniteLayerNorm(channels)
        self.mlp = MLP((channels, feedforward, channels), functional.gelu)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, positions))
        return self.final_layer_norm(x + self.mlp(x))


class SinePositions:
    """Sines and cosines of the rows and columns of a map, [1, h · w, channels]: cached, as they take many kernels."""

    def __init__(self, channels: int) -> None:
        self.num_frequencies = channels // 4
        self._cache: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}

    def __call__(self, like: Tensor) -> Tensor:
        """like: a map [B, C, h, w]."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (like.shape[2], like.shape[3], like.device, dtype)
        if key not in self._cache:
            with torch.inference_mode(False):  # a tensor made in inference mode cannot be saved for backward later
                made_on = device_of_constants(like.device)
                frequency = 10000.0 ** -(
                    torch.arange(self.num_frequencies, dtype=dtype, device=made_on) / self.num_frequencies
                )
                rows, columns = (
                    torch.arange(size, dtype=dtype, device=made_on)[:, None] * frequency for size in key[:2]
                )
                shape = (*key[:2], self.num_frequencies)
                by_axis = [x for angle in (rows[:, None], columns[None]) for x in (angle.sin(), angle.cos())]
                made = torch.cat([x.expand(shape) for x in by_axis], -1).flatten(0, 1)[None]
                self._cache[key] = made.to(like.device)
        return self._cache[key]
