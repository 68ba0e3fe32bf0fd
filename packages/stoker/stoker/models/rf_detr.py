"""RF-DETR (Robinson et al. 2025, arXiv 2511.09554): LW-DETR's decoder (arXiv 2406.03459) on a windowed DINOv2 backbone.

The backbone is a ViT whose layers attend within windows, but for every third one. A projector makes one map of four of
its layers. The points of the map with the best class scores become queries with a box each; every layer of the decoder
lets them look at each other and at the map around their boxes, which are refined once. Training has `GROUPS` groups of
queries, which do not see each other (Group DETR, arXiv 2207.13085); evaluation uses the first. Each layer of each
group, and the points that became its queries, are matched with the boxes. No NMS follows.

With the same weights, predictions and losses are those of transformers' RfDetrForObjectDetection for square images
without dropout. For other images its windows are those of a transposed grid; here they are windows of the image.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.hardware.xla import device_of_constants
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.dfine import ANCHOR_SIZE, make_class_layer, point_boxes
from stoker.models.layers.boxes import GridSize, batched_gather
from stoker.models.layers.deformable_attention import DeformableAttention
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.norms import DerivedBuffers
from stoker.models.layers.postprocess import Candidates, best_of_queries
from stoker.models.layers.rank_mean import loss_divisor
from stoker.models.layers.set_criterion import Truth, box_terms, make_truth, match, matched
from stoker.models.layers.transformer import MLP, FiniteLayerNorm, SelfAttention
from stoker.models.layers.weight_casts import IN_FP32

PATCH = 16
WIDTH, HEADS, DEPTH = 384, 6, 12
"""The size of DINOv2's small ViT."""
WINDOWS = 2
"""Windows along each side of the image."""
LAYERS_PER_STAGE = 3
"""The first layer of each stage but the first attends to the whole image; the output of each stage is used."""
CHANNELS = 256
GROUPS = 13
"""Groups of queries in training; about 11 are best (Group DETR, table 8)."""
MAX_SHIFT, MAX_LOG_SCALE = 100.0, 8.0
"""Limits of what is predicted of a box, in its sizes and as a logarithm. Three factors exp(8) keep areas finite."""
LOSS_WEIGHTS = {"class": 1.0, "bbox": 5.0, "giou": 2.0}
"""LW-DETR, section 3.2."""
ALPHA, GAMMA = 0.25, 2.0
"""Exponents of the class loss (LW-DETR, equation 3): of the score in the target, and of a negative's score."""
MIN_TARGET = 0.01


class Scale(nn.Module):
    """A learned factor per channel (LayerScale, arXiv 2103.17239)."""

    def __init__(self) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.lambda1


class ViTLayer(nn.Module):
    """Attention and feed-forward layer, normalized before each. is_global: attends to all windows of an image."""

    def __init__(self, *, is_global: bool) -> None:
        super().__init__()
        self.is_global = is_global
        self.norm1, self.norm2 = (FiniteLayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attention, self.mlp = SelfAttention(WIDTH, HEADS), MLP((WIDTH, 4 * WIDTH, WIDTH), functional.gelu)
        self.layer_scale1, self.layer_scale2 = Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        """x: [B · WINDOWS², T, WIDTH]."""
        tokens = self.norm1(x)
        if self.is_global:
            tokens = tokens.unflatten(0, (-1, WINDOWS**2)).flatten(1, 2)
        mixed = self.attention(tokens)
        x = x + self.layer_scale1(mixed.reshape(x.shape))
        return x + self.layer_scale2(self.mlp(self.norm2(x)))


class WindowedViT(nn.Module):
    """Images [B, 3, H, W] → the outputs of its four stages, each [B, WIDTH, H / PATCH, W / PATCH].

    Each window has a class token of its own. positions: side of the grid of learned positions; they are resized for
    other sizes. trainable_stages: of the embeddings and the stages, from the last of five.
    """

    def __init__(self, positions: int, trainable_stages: int) -> None:
        super().__init__()
        self.patch_embeddings = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.position_embeddings = nn.Parameter(torch.empty(1, positions**2 + 1, WIDTH))
        self.layers = nn.ModuleList(
            ViTLayer(is_global=number > 0 and number % LAYERS_PER_STAGE == 0) for number in range(DEPTH)
        )
        self.layernorm = FiniteLayerNorm(WIDTH, eps=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for token in (self.cls_token, self.position_embeddings):
            nn.init.trunc_normal_(token, std=0.02)
        embeddings = ("patch_embeddings.", "cls_token", "position_embeddings")
        num_frozen_layers = (4 - trainable_stages) * LAYERS_PER_STAGE
        frozen = (*embeddings, *(f"layers.{number}." for number in range(num_frozen_layers)))
        for name, parameter in self.named_parameters():
            is_frozen = trainable_stages == 0 or (trainable_stages < 5 and name.startswith(frozen))
            parameter.requires_grad_(not is_frozen)

    def forward(self, images: Tensor) -> list[Tensor]:
        class_tokens, patches = self._embed(images)
        size = patches.shape[2:]
        tokens = torch.cat((class_tokens.flatten(2), patches.flatten(2)), 2).transpose(1, 2)
        maps = []
        for number, layer in enumerate(self.layers, 1):
            tokens = layer(tokens)
            if number % LAYERS_PER_STAGE == 0:
                windows = tokens[:, 1:].unflatten(0, (-1, WINDOWS, WINDOWS)).unflatten(3, size)
                whole = windows.permute(0, 5, 1, 3, 2, 4)  # [B, WIDTH, windows, h, windows, w]
                maps.append(whole.flatten(4, 5).flatten(2, 3))
        return [self.layernorm(some.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for some in maps]

    def _embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        patches = self.patch_embeddings(images)
        of_class, of_patches = self.position_embeddings[:, :1], self.position_embeddings[:, 1:]
        side = math.isqrt(of_patches.shape[1])
        grid = of_patches.transpose(1, 2).unflatten(2, (side, side))
        if patches.shape[2:] != grid.shape[2:]:
            height, width = (_resizing(side, int(size), grid) for size in patches.shape[2:])
            with torch.autocast(images.device.type, enabled=False):
                grid = height @ grid @ width.T
        windows = (patches + grid).unflatten(2, (WINDOWS, -1)).unflatten(4, (WINDOWS, -1)).permute(0, 2, 4, 1, 3, 5)
        windows = windows.flatten(0, 2)
        class_tokens = (self.cls_token + of_class).transpose(1, 2)[..., None].expand(windows.shape[0], -1, -1, -1)
        return class_tokens.to(windows.dtype), windows


def _resizing(old: int, new: int, like: Tensor) -> Tensor:
    """[new, old]: an antialiased bicubic `interpolate` along an axis as a product, deterministic and for XLA, too."""
    device = device_of_constants(like.device)
    basis = torch.eye(old, device=device)[None, None]
    matrix = functional.interpolate(basis, (old, new), mode="bicubic", align_corners=False, antialias=True)
    return matrix[0, 0].T.to(like.device, like.dtype)


class ConvNorm(nn.Module):
    """Convolution, LayerNorm over the channels, SiLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = FiniteLayerNorm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class Projector(nn.Module):
    """The maps of the backbone → one map [B, CHANNELS, h, w] by a C2f block (of YOLOv8) of three bottlenecks."""

    def __init__(self) -> None:
        super().__init__()
        half = CHANNELS // 2
        self.conv1 = ConvNorm(DEPTH // LAYERS_PER_STAGE * WIDTH, CHANNELS, 1)
        self.conv2 = ConvNorm(5 * half, CHANNELS, 1)
        self.bottlenecks = nn.ModuleList(
            nn.Sequential(ConvNorm(half, half, 3), ConvNorm(half, half, 3)) for _ in range(3)
        )
        self.layer_norm = FiniteLayerNorm(CHANNELS, eps=1e-6)

    def forward(self, maps: list[Tensor]) -> Tensor:
        parts = list(self.conv1(torch.cat(maps, 1)).chunk(2, 1))
        for block in self.bottlenecks:
            parts.append(block(parts[-1]))
        out: Tensor = self.layer_norm(self.conv2(torch.cat(parts, 1)).permute(0, 2, 3, 1))
        return out.permute(0, 3, 1, 2)


class CrossAttention(DeformableAttention):
    """Deformable attention to one map, with projected values and outputs."""

    def __init__(self) -> None:
        super().__init__(CHANNELS, 16, [2])
        self.value_proj, self.output_proj = (nn.Linear(CHANNELS, CHANNELS) for _ in range(2))

    def forward(self, queries: Tensor, reference: Tensor, value: Tensor, grids: Any) -> Tensor:
        return self.output_proj(super().forward(queries, reference, self.value_proj(value), grids))


class RFDETRDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = SelfAttention(CHANNELS), CrossAttention()
        self.mlp = MLP((CHANNELS, 2048, CHANNELS))
        self.self_attn_layer_norm, self.cross_attn_layer_norm, self.layer_norm = (
            FiniteLayerNorm(CHANNELS) for _ in range(3)
        )

    def forward(
        self, x: Tensor, positions: Tensor, boxes: Tensor, memory: Tensor, grid: GridSize, groups: int
    ) -> Tensor:
        """x, positions: [B, groups · Q, CHANNELS]; queries of a group attend to each other."""
        by_group, by_group_positions = (y.unflatten(1, (groups, -1)).flatten(0, 1) for y in (x, positions))
        mixed = self.self_attn(by_group, by_group_positions)
        x = self.self_attn_layer_norm(x + mixed.unflatten(0, (-1, groups)).flatten(1, 2))
        x = self.cross_attn_layer_norm(x + self.cross_attn(x + positions, boxes, memory, [grid]))
        return self.layer_norm(x + self.mlp(x))


class RFDETRDecoder(DerivedBuffers):
    frequencies: Tensor

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RFDETRDecoderLayer() for _ in range(num_layers))
        self.layernorm = FiniteLayerNorm(CHANNELS)
        self.ref_point_head = MLP((2 * CHANNELS, CHANNELS, CHANNELS))
        self.register_buffer("frequencies", torch.empty(CHANNELS // 4), persistent=False)
        self.update_buffers()

    def update_buffers(self) -> None:
        if not self.frequencies.is_meta:
            places = torch.arange(CHANNELS // 4, dtype=torch.float32, device=self.frequencies.device)
            self.frequencies.copy_(2 * math.pi / 10000.0 ** (places / (CHANNELS // 4)))

    def forward(self, x: Tensor, boxes: Tensor, memory: Tensor, grid: GridSize, groups: int) -> list[Tensor]:
        """x: [B, groups · Q, CHANNELS]; boxes: [B, groups · Q, 4], at least fp32. The normalized output of each layer,
        in evaluation of the last one."""
        with torch.autocast(x.device.type, enabled=False):
            angles = boxes[..., None] * self.frequencies
            waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)
            horizontal, vertical, *sizes = waves.unbind(-2)
            sines = torch.cat((vertical, horizontal, *sizes), -1)
        positions = at_least_fp32(self.ref_point_head(sines))
        outputs = []
        for layer in self.layers:
            x = layer(x, positions, boxes, memory, grid, groups)
            outputs.append(self.layernorm(x) if self.training or layer is self.layers[-1] else x)
        return outputs if self.training else outputs[-1:]


class RFDETROutputs(NamedTuple):
    """Predictions for B images with groups · Q queries (one group in evaluation), at least fp32. K: the layers of the
    decoder (in evaluation the last one), and last the points that became queries."""

    logits: Tensor
    """[K, B, groups · Q, classes]"""
    boxes: Tensor
    """[K, B, groups · Q, 4], center and size as fractions of the image; not limited."""
    groups: int
    image_size: tuple[int, int]


class RFDETR(Detector):
    iou_threshold = 1.0  # no NMS
    backbone_prefixes = ("backbone.",)

    def __init__(self, settings: ModelSettings, num_classes: int, *, num_layers: int, positions: int) -> None:
        super().__init__(settings, num_classes)
        self.backbone = WindowedViT(positions, settings.trainable_backbone_layers)
        self.projector, self.decoder = Projector(), RFDETRDecoder(num_layers)
        total = GROUPS * settings.queries
        self.reference_point_embed, self.query_feat = nn.Embedding(total, 4), nn.Embedding(total, CHANNELS)
        nn.init.zeros_(self.reference_point_embed.weight)
        self.enc_output = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(GROUPS))
        self.enc_output_norm = nn.ModuleList(FiniteLayerNorm(CHANNELS) for _ in range(GROUPS))
        self.enc_out_class_embed = nn.ModuleList(make_class_layer(CHANNELS, num_classes) for _ in range(GROUPS))
        self.enc_out_bbox_embed = nn.ModuleList(_box_head() for _ in range(GROUPS))
        self.class_embed, self.bbox_embed = make_class_layer(CHANNELS, num_classes), _box_head()
        for head in (self.enc_out_class_embed, self.enc_out_bbox_embed, self.class_embed, self.bbox_embed):
            setattr(head, IN_FP32, True)  # of `in_fp32`

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> RFDETROutputs:
        features = self.projector(levels)
        grid: GridSize = (features.shape[2], features.shape[3])
        memory = features.flatten(2).transpose(1, 2)
        groups = GROUPS if self.training else 1
        logits, boxes = (torch.cat(parts, 1) for parts in zip(*self._proposals(memory, grid, groups), strict=True))
        count = boxes.shape[1] // groups  # fewer than `queries` on maps with fewer points
        offsets, content = (
            table.weight.unflatten(0, (GROUPS, -1))[:groups, :count].flatten(0, 1).expand(memory.shape[0], -1, -1)
            for table in (self.reference_point_embed, self.query_feat)
        )
        start = refine(boxes.detach(), at_least_fp32(offsets))
        hidden = torch.stack(self.decoder(content, start, memory, grid, groups))
        found = refine(start, in_fp32(self.bbox_embed, hidden))
        return RFDETROutputs(
            torch.cat((in_fp32(self.class_embed, hidden), logits[None])),
            torch.cat((found, boxes[None])),
            groups,
            image_size,
        )

    def _proposals(self, memory: Tensor, grid: GridSize, groups: int) -> list[tuple[Tensor, Tensor]]:
        """Class logits and boxes of the points that become queries, of each group: [B, Q, classes], [B, Q, 4]."""
        dtype = torch.float64 if memory.dtype == torch.float64 else torch.float32
        anchors, inside = point_boxes(grid, ANCHOR_SIZE, dtype, memory.device)
        candidates, anchors = torch.where(inside, memory, 0.0), torch.where(inside, anchors, 0.0)
        count = min(self.settings.queries, memory.shape[1])
        found = []
        for group in range(groups):
            features = self.enc_output_norm[group](self.enc_output[group](candidates))
            score = in_fp32(self.enc_out_class_embed[group], features).detach().amax(-1)
            index = torch.where(inside[:, 0], score, torch.finfo(torch.float32).min).topk(count, dim=1).indices
            chosen = batched_gather(features, index)
            delta = in_fp32(self.enc_out_bbox_embed[group], chosen)
            box = anchors.index_select(0, index.flatten()).view_as(delta)
            found.append((in_fp32(self.enc_out_class_embed[group], chosen), refine(box, delta)))
        return found

    def loss(self, outputs: RFDETROutputs, batch: Batch) -> dict[str, Tensor]:
        """`class` (IA-BCE), `bbox` (L1) and `giou`, each summed over the layers, with LOSS_WEIGHTS."""
        terms = self.loss_terms(outputs, batch)
        return {name: LOSS_WEIGHTS[name] * term.sum() for name, term in terms.items()}

    def loss_terms(self, outputs: RFDETROutputs, batch: Batch) -> dict[str, Tensor]:
        """The terms without their weights, [K] each, divided by the number of boxes of all groups."""
        logits, boxes, groups, image_size = outputs
        with torch.autocast(logits.device.type, enabled=False):
            truth = make_truth(batch.boxes, batch.labels, batch.valid, image_size, boxes.dtype)
            divisor = loss_divisor(truth.valid.sum() * groups).to(boxes.dtype)
            stacks = []
            # One after the other, as the costs of a stack are [groups, B, Q, M].
            for stack_logits, stack_boxes in zip(logits, boxes, strict=True):
                by_group_logits, by_group_boxes = (
                    x.unflatten(1, (groups, -1)).transpose(0, 1) for x in (stack_logits, stack_boxes)
                )
                index = match(by_group_logits, by_group_boxes, truth)
                measured = box_terms(by_group_boxes, index, truth, image_size)
                classes = iou_aware_class_terms(by_group_logits, index, truth, measured.iou)
                stacks.append(torch.stack([term.sum() for term in (classes, measured.l1, measured.giou)]))
            return dict(zip(LOSS_WEIGHTS, torch.stack(stacks, 1) / divisor, strict=True))

    def candidates(
        self, outputs: RFDETROutputs, resized_size: Tensor, *, score_threshold: float | Tensor
    ) -> Candidates:
        """`best_of_queries` of the last layer, of the first group."""
        layer = outputs.logits.shape[0] - 2
        first = outputs.logits.shape[2] // outputs.groups
        logits, boxes = outputs.logits[layer, :, :first], outputs.boxes[layer, :, :first]
        return best_of_queries(logits, boxes, outputs.image_size, resized_size, score_threshold)

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        return (
            ClassHeadSpec("class_embed"),
            *(ClassHeadSpec(f"enc_out_class_embed.{group}") for group in range(GROUPS)),
        )


def in_fp32(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of a head without autocast: a score or a shift of a box beyond fp16 would be infinite."""
    with torch.autocast(x.device.type, enabled=False):
        return layer(at_least_fp32(x))


def refine(boxes: Tensor, delta: Tensor) -> Tensor:
    """Boxes [..., 4] moved by `delta` [..., 4]: shifts in their sizes, and logarithms of the growth of their sizes."""
    center, size = boxes.split(2, -1)
    shift, growth = delta.split(2, -1)
    moved = shift.clamp(-MAX_SHIFT, MAX_SHIFT) * size + center
    return torch.cat((moved, growth.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE).exp() * size), -1)


def iou_aware_class_terms(logits: Tensor, index: Tensor, truth: Truth, iou: Tensor) -> Tensor:
    """Class loss of each query, summed over the classes: [K, B, Q] (IA-BCE; LW-DETR, equation 3).

    logits: [K, B, Q, C]; iou: [K, B, Q], with the box `index`. The target of its class is score^ALPHA ·
    IoU^(1 - ALPHA), without a gradient; other classes have the target 0 and the weight score^GAMMA, with one.
    """
    at_label = logits.gather(3, matched(truth.labels, index)[..., None])[..., 0]
    target = (at_label.detach().sigmoid() ** ALPHA * iou ** (1 - ALPHA)).clamp(min=MIN_TARGET)
    as_positive = functional.softplus(at_label) - target * at_label
    as_negative, others = (x.sigmoid() ** GAMMA * functional.softplus(x) for x in (at_label, logits))
    return others.sum(-1) + torch.where(index >= 0, as_positive - as_negative, 0.0)


def _box_head() -> MLP:
    return MLP((CHANNELS, CHANNELS, CHANNELS, 4), zero_last=True)
