"""transformers' D-FINE and DEIMv2, in float64, with random weights far from their timid start, and their losses.

The losses are computed by transformers' criteria, from outputs that are paired as in the authors' code: transformers
5.23 pairs the class logits of a layer with the distributions of the next one, leaves out the last but one layer's
logits, and computes no loss of the last layer's distributions.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Deimv2Config, Deimv2ForObjectDetection, DFineConfig, DFineForObjectDetection, HGNetV2Config
from transformers.loss.loss_d_fine import DFineLoss
from transformers.loss.loss_deimv2 import Deimv2Loss
from transformers.models.d_fine import modeling_d_fine
from transformers.models.deimv2 import modeling_deimv2

from stoker.data.batch import Batch
from stoker.models.layers.denoising import DenoisingQueries

LIGHT = [False, False, True, True]
B0 = {
    "stem_channels": [3, 16, 16], "stage_in_channels": [16, 64, 256, 512], "stage_mid_channels": [16, 32, 64, 128],
    "stage_out_channels": [64, 256, 512, 1024], "stage_num_blocks": [1, 1, 2, 1], "stage_numb_of_layers": [3, 3, 3, 3],
    "use_learnable_affine_block": True,
}  # fmt: skip
B2 = {
    "stem_channels": [3, 24, 32], "stage_in_channels": [32, 96, 384, 768], "stage_mid_channels": [32, 64, 128, 256],
    "stage_out_channels": [96, 384, 768, 1536], "stage_num_blocks": [1, 1, 3, 1], "stage_numb_of_layers": [4, 4, 4, 4],
    "use_learnable_affine_block": True,
}  # fmt: skip
B4 = {
    "stem_channels": [3, 32, 48], "stage_in_channels": [48, 128, 512, 1024], "stage_mid_channels": [48, 96, 192, 384],
    "stage_out_channels": [128, 512, 1024, 2048], "stage_num_blocks": [1, 1, 3, 1],
    "stage_numb_of_layers": [6, 6, 6, 6],
}  # fmt: skip
B5 = {
    **B4, "stem_channels": [3, 32, 64], "stage_in_channels": [64, 128, 512, 1024],
    "stage_mid_channels": [64, 128, 256, 512], "stage_num_blocks": [1, 2, 5, 2],
}  # fmt: skip


def _lite_backbone(out: int, blocks: int, kernel_size: int) -> dict[str, Any]:
    return {
        "stem_channels": [3, 16, 16], "stage_in_channels": [16, 64, 256], "stage_mid_channels": [16, 32, 64],
        "stage_out_channels": [64, 256, out], "stage_num_blocks": [1, 1, blocks], "stage_numb_of_layers": [3, 3, 3],
        "stage_kernel_size": [3, 3, kernel_size], "stage_light_block": LIGHT[:3],
        "stage_downsample": [False, True, True], "use_learnable_affine_block": True,
    }  # fmt: skip


_N: dict[str, Any] = {
    "num_feature_levels": 2, "encoder_ffn_dim": 512, "encode_proj_layers": [1], "d_model": 128,
    "encoder_hidden_dim": 128, "decoder_ffn_dim": 512, "encoder_in_channels": [512, 1024], "decoder_n_points": [6, 6],
    "decoder_in_channels": [128, 128], "feat_strides": [16, 32], "depth_mult": 0.5, "decoder_layers": 3,
    "hidden_expansion": 0.34,
}  # fmt: skip


def _lite(width: int, feedforward: int, out: int) -> dict[str, Any]:
    return {
        "num_feature_levels": 2, "d_model": width, "encoder_hidden_dim": width, "decoder_ffn_dim": feedforward,
        "encoder_in_channels": [out], "decoder_n_points": [4, 2], "decoder_in_channels": [width, width],
        "feat_strides": [16], "depth_mult": 0.5, "decoder_layers": 3, "hidden_expansion": 0.34, "encoder_type": "lite",
        "encoder_layers": 0, "share_bbox_head": True, "use_gateway": False,
    }  # fmt: skip


_THREE: dict[str, Any] = {"decoder_n_points": [3, 6, 3]}
CONFIGS: dict[str, tuple[dict[str, Any], list[int], dict[str, Any]]] = {
    "dfine_n": (B0, [3, 4], _N),
    "dfine_s": (B0, [2, 3, 4], {**_THREE, "encoder_in_channels": [256, 512, 1024], "decoder_layers": 3,
                                "depth_mult": 0.34, "hidden_expansion": 0.5}),
    "dfine_m": (B2, [2, 3, 4], {**_THREE, "encoder_in_channels": [384, 768, 1536], "decoder_layers": 4,
                                "depth_mult": 0.67}),
    "dfine_l": (B4, [2, 3, 4], _THREE),
    "dfine_x": (B5, [2, 3, 4], {**_THREE, "encoder_hidden_dim": 384, "encoder_ffn_dim": 2048,
                                "decoder_in_channels": [384, 384, 384], "reg_scale": 8.0}),
    "deimv2_atto": (_lite_backbone(256, 1, 3), [3], _lite(64, 160, 256)),
    "deimv2_femto": (_lite_backbone(512, 1, 5), [3], _lite(96, 256, 512)),
    "deimv2_pico": (_lite_backbone(512, 2, 5), [3], _lite(112, 320, 512)),
    "deimv2_n": (B0, [3, 4], _N),
}  # fmt: skip
"""Of each size: the backbone, its stages that are used, and the rest. From transformers' conversion scripts and the
authors' configurations."""


def make_oracle(name: str, classes: int, queries: int, *, seed: int = 0) -> nn.Module:
    """The model in float64, with random weights, biases and statistics."""
    backbone, stages, rest = CONFIGS[name]
    is_deim = name.startswith("deimv2")
    hidden = backbone["stage_out_channels"]
    backbone_config = HGNetV2Config(
        **{"stage_light_block": LIGHT, **backbone}, hidden_sizes=hidden, depths=backbone["stage_numb_of_layers"],
        out_indices=stages,
    )  # fmt: skip
    common = {"num_labels": classes, "num_queries": queries, "freeze_backbone_batch_norms": False}
    torch.manual_seed(seed)
    if is_deim:
        gamma = {"focal_loss_gamma": 1.5, "decoder_activation_function": "silu"}
        model: Any = Deimv2ForObjectDetection(Deimv2Config(backbone_config=backbone_config, **common, **gamma, **rest))
    else:
        model = DFineForObjectDetection(DFineConfig(backbone_config=backbone_config, **common, **rest))
    decoder = model.model.decoder
    # transformers ties the class layers of a file that has none; those of the published files differ.
    decoder.class_embed = nn.ModuleList(copy.deepcopy(decoder.class_embed[0]) for _ in decoder.class_embed)
    if not rest.get("share_bbox_head"):
        decoder.bbox_embed = nn.ModuleList(copy.deepcopy(decoder.bbox_embed[0]) for _ in decoder.class_embed)
    model.class_embed, model.bbox_embed = decoder.class_embed, decoder.bbox_embed
    if is_deim:
        _correct_deimv2(model.model)
    model = model.double()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith(("reg_scale", "up")):
                continue
            if tensor.dim() > 1:
                tensor.normal_(std=0.7 * tensor[0].numel() ** -0.5)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.1)
        for key, buffer in model.named_buffers():
            if key.endswith("running_var"):
                buffer.uniform_(0.8, 1.2)
    return model


def _correct_deimv2(model: Any) -> None:
    """As the authors' code (engine/deim/deim_decoder.py at 0fff8d4, with `activation` and `mlp_act: silu` of
    configs/base/deimv2.yml): SiLU in all heads and LQE, no projection and norm of the encoder's points, and one
    embedding of the boxes that the queries start with for all layers. transformers 5.23 has D-FINE's."""
    decoder = model.decoder
    quality = (layer.reg_conf for layer in decoder.lqe_layers)
    for mlp in (model.enc_bbox_head, decoder.pre_bbox_head, *decoder.bbox_embed, *quality):
        mlp.act = nn.SiLU()
    model.enc_output = nn.Identity()
    embed, first = decoder.query_pos_head.forward, []
    decoder.register_forward_pre_hook(lambda *_: first.clear())

    def embed_once(boxes: Tensor) -> Tensor:
        if not first:
            first.append(embed(boxes))
        return first[0]

    decoder.query_pos_head.forward = embed_once


def labels_of(batch: Batch) -> list[dict[str, Tensor]]:
    """The boxes of a batch as transformers has them."""
    height, width = batch.images.shape[2:]
    labels = []
    for boxes, classes, valid in zip(batch.boxes.double(), batch.labels, batch.valid, strict=True):
        x1, y1, x2, y2 = (boxes[valid] / torch.tensor([width, height] * 2)).unbind(1)
        centers = torch.stack(((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1), 1)
        labels.append({"boxes": centers, "class_labels": classes[valid]})
    return labels


def give_noise(monkeypatch: pytest.MonkeyPatch, noisy: DenoisingQueries, batch: Batch) -> None:
    """Makes transformers take these denoising queries, none of which is padding. All images have the same number of
    boxes."""
    per_image = int(batch.valid[0].sum())
    groups = int(noisy.group.max()) + 1

    def group(*, num_queries: int, class_embed: Callable[[Tensor], Tensor], **_: Any) -> tuple[Any, ...]:
        total = noisy.labels.shape[1]
        mask = torch.zeros(total + num_queries, total + num_queries, dtype=torch.float64)
        mask[total:, :total] = -torch.inf
        start = 2 * per_image
        for n in range(groups):
            mask[n * start : (n + 1) * start, : n * start] = -torch.inf
            mask[n * start : (n + 1) * start, (n + 1) * start : total] = -torch.inf
        positive = [torch.nonzero(index >= 0)[:, 0] for index in noisy.box]
        boxes = noisy.boxes.clamp(0, 1)
        logits = (boxes.clamp(min=1e-5) / (1 - boxes).clamp(min=1e-5)).log()
        meta = {"dn_positive_idx": positive, "dn_num_group": groups, "dn_num_split": [total, num_queries]}
        return class_embed(noisy.labels), logits, mask, meta

    for module in (modeling_d_fine, modeling_deimv2):
        monkeypatch.setattr(module, "get_contrastive_denoising_training_group", group)


def oracle_terms(model: Any, out: Any, labels: list[dict[str, Tensor]], kind: str, *, union: bool) -> dict[str, Tensor]:
    """Each term by stack of predictions, as `DFine.loss_terms` orders them, with its weight. out: of `model.model`."""
    config = copy.copy(model.config)
    for attribute, value in {"weight_loss_mal": 1.0, "mal_alpha": None, "use_dense_one_to_one": True}.items():
        if not hasattr(config, attribute):
            setattr(config, attribute, value)
    criterion: Any = Deimv2Loss(config) if union or kind == "mal" else DFineLoss(config)
    criterion.use_dense_one_to_one = union
    criterion.gamma = 1.5 if kind == "mal" else 2.0
    criterion.weight_dict[f"loss_{kind}"] = 1.0
    criterion.losses = [kind, "boxes", "local"]
    criterion.double()
    split = out.denoising_meta_values["dn_num_split"]
    stacks = (out.intermediate_logits, out.intermediate_reference_points.clamp(0, 1),
              out.intermediate_predicted_corners, out.initial_reference_points)  # fmt: skip
    noisy, normal = zip(*(tensor.split(split, dim=2) for tensor in stacks), strict=True)

    def layers_of(tensors: tuple[Tensor, ...]) -> list[dict[str, Tensor]]:
        logits, boxes, corners, points = tensors
        teacher = {"teacher_corners": corners[:, -1], "teacher_logits": logits[:, -1]}
        return [
            {"logits": logits[:, n + 1], "pred_boxes": boxes[:, n + 1], "pred_corners": corners[:, n],
             "ref_points": points[:, n], **teacher}
            for n in range(corners.shape[1])
        ]  # fmt: skip

    def first_of(tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"logits": tensors[0][:, 0], "pred_boxes": tensors[1][:, 0]}

    *others, last = layers_of(normal)
    encoder = {"logits": out.enc_topk_logits, "pred_boxes": out.enc_topk_bboxes.clamp(0, 1)}
    losses = criterion(
        {**last, "auxiliary_outputs": [*others, first_of(normal), encoder],
         "dn_auxiliary_outputs": [*layers_of(noisy), first_of(noisy)],
         "denoising_meta_values": out.denoising_meta_values},
        labels,
    )  # fmt: skip
    count = len(others)
    order = [*(f"_aux_{n}" for n in range(count)), "", f"_aux_{count}", f"_aux_{count + 1}"]
    order_dn = [f"_dn_{n}" for n in range(count + 2)]
    names = {"class": kind, "bbox": "bbox", "giou": "giou", "fgl": "fgl", "ddf": "ddf"}
    terms = {}
    for ours, theirs in names.items():
        for suffix, keys in (("", order), ("_dn", order_dn)):
            found = [losses[f"loss_{theirs}{key}"] for key in keys if f"loss_{theirs}{key}" in losses]
            terms[ours + suffix] = torch.stack(found)
    return terms
