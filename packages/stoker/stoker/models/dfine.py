"""D-FINE (Peng et al. 2024, arXiv 2410.13842) and DEIMv2 with HGNetv2 (Huang et al. 2025, arXiv 2509.20787).

The best points of the encoder's maps become queries with boxes. Every layer of the decoder lets the queries look at
each other and at the maps around their boxes, and refines distributions of the boxes' sides
(`layers/box_distribution.py`); a logit that depends on how sharp they are is added to the class logits (LQE). No NMS
follows. All layers, the first guess and the encoder's points are matched with the boxes; box losses use the union of
all matchings if `union`. In training the decoder runs in `loss`, since denoising queries need the boxes.

DEIMv2 has other norms, feed-forward layers and activations, takes the points of the maps as they are, and gives all
layers the positions of the first boxes. Both equal their authors' code (tests/trainer/models/test_published_names.py).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config.settings import ModelSettings
from stoker.data.batch import Batch
from stoker.hardware.xla import device_of_constants
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.hgnet import HGNetBackbone
from stoker.models.layers.box_distribution import (
    NUM_BINS,
    REG_SCALE,
    bin_distances,
    ddf_loss,
    decode_sides,
    fgl_terms,
    side_targets,
)
from stoker.models.layers.boxes import GridSize, batched_gather, cxcywh_to_xyxy
from stoker.models.layers.convolutions import conv_norm
from stoker.models.layers.deformable_attention import DeformableAttention
from stoker.models.layers.denoising import DenoisingQueries, denoising_mask, make_denoising_queries
from stoker.models.layers.losses import at_least_fp32
from stoker.models.layers.norms import NORMS, DerivedBuffers, trainable_norm
from stoker.models.layers.postprocess import Candidates, best_of_queries
from stoker.models.layers.rank_mean import loss_divisor
from stoker.models.layers.set_criterion import (
    Truth,
    box_terms,
    make_truth,
    match,
    matched,
    quality_class_terms,
    union_of_matchings,
)
from stoker.models.layers.transformer import MLP, FiniteLayerNorm, FiniteRMSNorm, SelfAttention, SwiGLU
from stoker.models.retinanet import PRIOR_LOGIT

ANCHOR_SIZE = 0.05
"""Size of the box of a point on the finest map, as a fraction of the image; twice as large on each further map."""
ANCHOR_MARGIN = 0.01
"""Points whose box has a center or size nearer to 0 or 1 are no candidates (RT-DETR)."""
LARGE = 1e4
"""Logit of the sides of such a box."""
TOP_PROBABILITIES = 4
"""Largest probabilities of each side that LQE sees; D-FINE, section 4.1."""
LOSS_WEIGHTS = {"class": 1.0, "bbox": 5.0, "giou": 2.0, "fgl": 0.15, "ddf": 1.5}
"""D-FINE, appendix A.1; DEIMv2 the same."""
VFL_ALPHA = 0.75


class Encoded(NamedTuple):
    """Features of B images with maps of S points in total, and what Q queries start with."""

    memory: Tensor
    """[B, S, C]"""
    grids: tuple[GridSize, ...]
    content: Tensor
    """[B, Q, C]"""
    logits: Tensor
    """[B, Q, classes]: those of the encoder's points that became queries."""
    box_logits: Tensor
    """At least fp32 [B, Q, 4]: those of their boxes."""


class Decoded(NamedTuple):
    """Predictions of L layers (in evaluation of the last one only), at least fp32."""

    logits: Tensor
    """[L, B, Q, classes]"""
    boxes: Tensor
    """[L, B, Q, 4], center and size as fractions of the image; not limited."""
    side_logits: Tensor
    """[L, B, Q, 4 · NUM_BINS]"""
    first_logits: Tensor
    """[B, Q, classes]: those of the first layer, before LQE."""
    first_boxes: Tensor
    """[B, Q, 4], to which the distributions refer."""


class DFineOutputs(NamedTuple):
    encoded: Encoded
    image_size: tuple[int, int]
    decoded: Decoded | None
    """None in training."""


class Gate(nn.Module):
    """A learned mixture of two tensors, normalized."""

    def __init__(self, channels: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(2 * channels, 2 * channels), norm(channels)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        of_first, of_second = self.gate(torch.cat((first, second), -1)).sigmoid().chunk(2, -1)
        return self.norm(of_first * first + of_second * second)


class DFineDecoderLayer(nn.Module):
    def __init__(self, channels: int, feedforward: int, num_points: Sequence[int], *, modern: bool, lite: bool) -> None:
        super().__init__()
        norm: type[nn.Module] = FiniteRMSNorm if modern else FiniteLayerNorm
        self.self_attn, self.encoder_attn = SelfAttention(channels), DeformableAttention(channels, 8, num_points)
        self.self_attn_layer_norm, self.final_layer_norm = norm(channels), norm(channels)
        if lite:
            self.encoder_attn_layer_norm = norm(channels)
        else:
            self.gateway = Gate(channels, norm)
        self.mlp = SwiGLU(channels, feedforward // 2) if modern else MLP((channels, feedforward, channels))
        self.lite = lite

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        reference: Tensor,
        memory: Tensor,
        grids: Sequence[GridSize],
        mask: Tensor | None,
    ) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, positions, mask))
        seen = self.encoder_attn(x + positions, reference, memory, grids)
        x = self.encoder_attn_layer_norm(x + seen) if self.lite else self.gateway(x, seen)
        return self.final_layer_norm(x + self.mlp(x))


class DFineDecoder(DerivedBuffers):
    """Queries and maps → predictions of each layer. modern: DEIMv2's layers, and positions of the queries from the
    boxes that they start with; lite: no gates, and one box head for all layers."""

    distances: Tensor

    def __init__(
        self, channels: int, num_classes: int, *, feedforward: int, num_points: Sequence[int], num_layers: int,
        modern: bool, lite: bool, reg_scale: float,
    ) -> None:  # fmt: skip
        super().__init__()
        activation = functional.silu if modern else functional.relu
        self.layers = nn.ModuleList(
            DFineDecoderLayer(channels, feedforward, num_points, modern=modern, lite=lite) for _ in range(num_layers)
        )
        widths = (4, channels, channels, channels) if modern else (4, 2 * channels, channels)
        self.query_pos_head = MLP(widths, activation)
        self.pre_bbox_head = MLP((channels, channels, channels, 4), activation, zero_last=True)
        self.bbox_embed = nn.ModuleList(
            MLP((channels, channels, channels, 4 * NUM_BINS), activation, zero_last=True)
            for _ in range(1 if lite else num_layers)
        )
        self.class_embed = nn.ModuleList(make_class_layer(channels, num_classes) for _ in range(num_layers))
        self.lqe_layers = nn.ModuleList(
            MLP((4 * (TOP_PROBABILITIES + 1), 64, 1), activation, zero_last=True) for _ in range(num_layers)
        )
        self.modern, self.reg_scale = modern, reg_scale
        self.register_buffer("distances", bin_distances(reg_scale).float(), persistent=False)

    def update_buffers(self) -> None:
        if not self.distances.is_meta:
            self.distances.copy_(bin_distances(self.reg_scale))

    def forward(
        self, content: Tensor, box_logits: Tensor, memory: Tensor, grids: Sequence[GridSize], mask: Tensor | None
    ) -> Decoded:
        """content: [B, Q, C]; box_logits: [B, Q, 4], at least fp32, of the boxes that the queries start with."""
        reference = box_logits.detach().sigmoid()
        x, previous = content, torch.zeros_like(content)
        side_logits: Tensor | None = None
        logits, boxes, sides = [], [], []
        for number, layer in enumerate(self.layers):
            if number == 0 or not self.modern:
                positions = at_least_fp32(self.query_pos_head(reference)).clamp(-10, 10)
            x = layer(x, positions, reference, memory, grids, mask)
            if number == 0:
                first = at_least_fp32(self.pre_bbox_head(x))
                first_boxes = (first + inverse_sigmoid(reference)).sigmoid()
                anchor = first_boxes.detach()
            change = at_least_fp32(self.bbox_embed[number % len(self.bbox_embed)](x + previous))
            side_logits = change if side_logits is None else side_logits + change
            with torch.autocast(x.device.type, enabled=False):
                refined = decode_sides(side_logits, anchor, self.distances, self.reg_scale)
            reference, previous = refined.detach(), x.detach()
            is_last = number == len(self.layers) - 1
            if self.training or is_last or number == 0:
                class_logits = at_least_fp32(self.class_embed[number](x))
                if number == 0:
                    first_logits = class_logits
            if self.training or is_last:
                top = side_logits.unflatten(-1, (4, NUM_BINS)).softmax(-1).topk(TOP_PROBABILITIES, dim=-1).values
                statistics = torch.cat((top, top.mean(-1, keepdim=True)), -1).flatten(-2)
                logits.append(class_logits + at_least_fp32(self.lqe_layers[number](statistics)))
                boxes.append(refined)
                sides.append(side_logits)
        return Decoded(torch.stack(logits), torch.stack(boxes), torch.stack(sides), first_logits, first_boxes)


class DFine(Detector):
    """The detector.

    depth: 3 · depth RepBlocks in a layer of the encoder; num_maps: of the backbone; one becomes two; channels,
    feedforward: of the decoder; reg_scale: of `bin_distances`; family: dfine, deimv2, or deimv2_lite (no gates, one box
    head, no losses of distributions, no union).
    """

    iou_threshold = 1.0  # no NMS
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def __init__(
        self, settings: ModelSettings, num_classes: int, *, backbone: str, encoder_channels: int,
        num_points: Sequence[int], num_layers: int, depth: float = 1.0, expansion: float = 1.0,
        encoder_feedforward: int = 1024, num_maps: int = 3, channels: int = 256, feedforward: int = 1024,
        reg_scale: float = REG_SCALE, family: str = "dfine",
    ) -> None:  # fmt: skip
        super().__init__(settings, num_classes)
        modern, lite = family != "dfine", family == "deimv2_lite"
        self.backbone = HGNetBackbone(
            backbone, num_maps, encoder_channels,
            norm=settings.backbone_norm, trainable_stages=settings.trainable_backbone_layers,
            feedforward=encoder_feedforward, expansion=expansion, num_blocks=round(3 * depth), fused=modern,
        )  # fmt: skip
        self.decoder = DFineDecoder(
            channels, num_classes, feedforward=feedforward, num_points=num_points, num_layers=num_layers,
            modern=modern, lite=lite, reg_scale=reg_scale,
        )  # fmt: skip
        self.local = self.union = not lite
        """Whether distributions have losses of their own; whether box losses use the union of all matchings."""
        norm = NORMS[trainable_norm(settings.backbone_norm)]
        self.decoder_input_proj = nn.ModuleList(
            nn.Identity()
            if encoder_channels == channels
            else conv_norm(encoder_channels, channels, norm, kernel_size=1, activation=None)
            for _ in num_points
        )
        self.enc_output = (
            nn.Identity() if modern else nn.Sequential(nn.Linear(channels, channels), FiniteLayerNorm(channels))
        )
        self.enc_score_head = make_class_layer(channels, num_classes)
        activation = functional.silu if modern else functional.relu
        self.enc_bbox_head = MLP((channels, channels, channels, 4), activation, zero_last=True)
        self.denoising_class_embed = nn.Embedding(num_classes, channels)
        self._anchors: dict[tuple[tuple[GridSize, ...], torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def predict(self, levels: list[Tensor], image_size: tuple[int, int]) -> DFineOutputs:
        maps = [project(level) for project, level in zip(self.decoder_input_proj, levels, strict=True)]
        grids = tuple((level.shape[2], level.shape[3]) for level in maps)
        memory = torch.cat([level.flatten(2).transpose(1, 2) for level in maps], 1)
        anchors, is_candidate = self._anchors_of(grids, memory)
        features = self.enc_output(torch.where(is_candidate, memory, 0.0))
        logits = self.enc_score_head(features)
        index = logits.detach().amax(-1).topk(min(self.settings.queries, logits.shape[1]), dim=1).indices
        content = batched_gather(features, index)
        offsets = at_least_fp32(self.enc_bbox_head(content))
        box_logits = offsets + anchors.index_select(0, index.flatten()).view_as(offsets)
        query_logits = at_least_fp32(batched_gather(logits, index))
        encoded = Encoded(memory, grids, content.detach(), query_logits, box_logits)
        return DFineOutputs(encoded, image_size, None if self.training else self.decode_queries(encoded, None))

    def _anchors_of(self, grids: tuple[GridSize, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [S, 4] of the boxes of all points, and bool [S, 1], whether they are candidates; cached."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (grids, like.device, dtype)
        if key not in self._anchors:
            with torch.inference_mode(False):  # tensors made in inference mode cannot be saved for backward later
                made_on = device_of_constants(like.device)
                levels = [point_boxes(grid, ANCHOR_SIZE * 2**n, dtype, made_on) for n, grid in enumerate(grids)]
                boxes, inside = (torch.cat(columns) for columns in zip(*levels, strict=True))
                logits = torch.where(inside, (boxes / (1 - boxes)).log(), LARGE)
                self._anchors[key] = logits.to(like.device), inside.to(like.device)
        return self._anchors[key]

    def decode_queries(self, encoded: Encoded, noisy: DenoisingQueries | None) -> Decoded:
        """The decoder's predictions, those for the denoising queries first."""
        content, box_logits, mask = encoded.content, encoded.box_logits, None
        if noisy is not None:
            embedded = self.denoising_class_embed(noisy.labels).masked_fill((noisy.group < 0)[..., None], 0.0)
            content = torch.cat((embedded.to(content.dtype), content), 1)
            box_logits = torch.cat((inverse_sigmoid(noisy.boxes), box_logits), 1)
            mask = denoising_mask(noisy.group, encoded.content.shape[1])
        return self.decoder(content, box_logits, encoded.memory, encoded.grids, mask)

    def loss(self, outputs: DFineOutputs, batch: Batch) -> dict[str, Tensor]:
        """`class` (`class_loss`), `bbox` (L1), `giou`, with `local` also `fgl` and `ddf`, and the same of the denoising
        queries (`…_dn`), each summed over the layers, with LOSS_WEIGHTS."""
        terms = self.loss_terms(outputs, batch)
        return {name: LOSS_WEIGHTS[name.removesuffix("_dn")] * term.sum() for name, term in terms.items()}

    def loss_terms(self, outputs: DFineOutputs, batch: Batch) -> dict[str, Tensor]:
        """The terms without their weights, by stack of predictions: those of the layers, of the first guess and of the
        encoder. Sums over queries are divided by the number of boxes (with `union`, of matched queries)."""
        encoded = outputs.encoded
        device_type, dtype = encoded.box_logits.device.type, encoded.box_logits.dtype
        with torch.autocast(device_type, enabled=False):
            truth = make_truth(batch.boxes, batch.labels, batch.valid, outputs.image_size, dtype)
            noisy = make_denoising_queries(truth, batch.rand, self.num_classes) if self.training else None
        decoded = self.decode_queries(encoded, noisy) if outputs.decoded is None else outputs.decoded
        with torch.autocast(device_type, enabled=False):
            # A wrong query must not make a sum infinite; at the limit its gradient is 0.
            encoded = encoded._replace(logits=encoded.logits.clamp(-LARGE, LARGE))
            decoded = Decoded(*(tensor.clamp(-LARGE, LARGE) for tensor in decoded))
            num_boxes = loss_divisor(truth.valid.sum()).to(dtype)
            start = 0 if noisy is None else noisy.labels.shape[1]
            found = _slice(decoded, start, None)
            logits = torch.cat((found.logits, torch.stack((found.first_logits, encoded.logits))))
            boxes = torch.cat((found.boxes, torch.stack((found.first_boxes, encoded.box_logits.sigmoid())))).clamp(0, 1)
            index = match(logits, boxes, truth)
            box_index, num_pairs = index, num_boxes
            if self.union:
                box_index = union_of_matchings(index, truth.labels.shape[1]).expand_as(index)
                num_pairs = loss_divisor((box_index[0] >= 0).sum()).to(dtype)
            measure = partial(self._terms, truth=truth, image_size=outputs.image_size)
            terms = measure(found, logits, boxes, index, box_index, divisors=(num_boxes, num_pairs))
            if noisy is not None:
                dn = _slice(decoded, 0, start)
                logits = torch.cat((dn.logits, dn.first_logits[None]))
                boxes = torch.cat((dn.boxes, dn.first_boxes[None]))
                index = noisy.box.expand(logits.shape[0], -1, -1)
                divisors = num_boxes, num_boxes
                of_noisy = measure(dn, logits, boxes.clamp(0, 1), index, index, divisors=divisors, weight=noisy.weight)
                terms |= {f"{name}_dn": term for name, term in of_noisy.items()}
            return terms

    def _terms(
        self,
        decoded: Decoded,
        logits: Tensor,
        boxes: Tensor,
        index: Tensor,
        box_index: Tensor,
        *,
        truth: Truth,
        image_size: tuple[int, int],
        divisors: tuple[Tensor, Tensor],
        weight: Tensor | float = 1.0,
    ) -> dict[str, Tensor]:
        """index, box_index: boxes of the queries, int64 [K, B, Q], for class and other losses; weight: [B, Q]."""
        measured = box_terms(boxes, box_index, truth, image_size)
        quality = measured.iou if box_index is index else box_terms(boxes.detach(), index, truth, image_size).iou
        settings = self.settings
        gamma = 2.0 if settings.class_loss == "vfl" else 1.5  # D-FINE; DEIM, section 4.1
        classes = quality_class_terms(
            logits, index, truth, quality, kind=settings.class_loss, alpha=VFL_ALPHA, gamma=gamma
        )
        sums = {
            "class": (classes, divisors[0]),
            "bbox": (measured.l1, divisors[1]),
            "giou": (measured.giou, divisors[1]),
        }
        num_layers = decoded.logits.shape[0]
        in_layers = box_index[:num_layers] >= 0
        if self.local:
            reference = decoded.first_boxes.detach()
            wanted = cxcywh_to_xyxy(matched(truth.boxes, box_index[:1])[0])
            target = side_targets(reference, wanted, self.decoder.distances, self.decoder.reg_scale)
            by_side = fgl_terms(decoded.side_logits, tuple(part.expand(num_layers, *part.shape) for part in target))  # type: ignore[arg-type]
            sums["fgl"] = (by_side * measured.iou[:num_layers], divisors[1])  # 0 without a box
        terms = {name: (term * weight).sum((1, 2)) / divisor for name, (term, divisor) in sums.items()}
        if self.local and num_layers > 1:
            score = decoded.logits[-1].detach().sigmoid().amax(-1)
            quality = torch.where(in_layers, measured.iou[:num_layers], score)[:-1]
            terms["ddf"] = ddf_loss(decoded.side_logits[:-1], decoded.side_logits[-1], quality, in_layers[:-1])
        return terms

    def candidates(self, outputs: DFineOutputs, resized_size: Tensor, *, score_threshold: float | Tensor) -> Candidates:
        decoded = self.decode_queries(outputs.encoded, None) if outputs.decoded is None else outputs.decoded
        return best_of_queries(decoded.logits[-1], decoded.boxes[-1], outputs.image_size, resized_size, score_threshold)

    def class_heads(self) -> tuple[ClassHeadSpec, ...]:
        layers = [f"decoder.class_embed.{number}" for number in range(len(self.decoder.layers))]
        heads = [ClassHeadSpec(name) for name in (*layers, "enc_score_head")]
        return (*heads, ClassHeadSpec("denoising_class_embed", has_bias=False))


def _slice(decoded: Decoded, start: int, stop: int | None) -> Decoded:
    return Decoded(*(tensor[..., start:stop, :] for tensor in decoded))


def inverse_sigmoid(x: Tensor) -> Tensor:
    """The logit of x, limited to ±11.5."""
    limited = x.clamp(0, 1)
    return (limited.clamp(min=1e-5) / (1 - limited).clamp(min=1e-5)).log()


def point_boxes(grid: GridSize, size: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Boxes at the P points of a map, as fractions of the image, [P, 4]; whether they are candidates, bool [P, 1]."""
    y, x = ((torch.arange(n, dtype=dtype, device=device) + 0.5) / n for n in grid)
    sizes = torch.full(grid, size, dtype=dtype, device=device)
    boxes = torch.stack((x.expand(grid), y[:, None].expand(grid), sizes, sizes), -1).flatten(0, 1)
    return boxes, ((boxes > ANCHOR_MARGIN) & (boxes < 1 - ANCHOR_MARGIN)).all(-1, keepdim=True)


def make_class_layer(channels: int, num_classes: int) -> nn.Linear:
    layer = nn.Linear(channels, num_classes)
    nn.init.constant_(layer.bias, PRIOR_LOGIT)
    return layer
