"""Names of published weights of D-FINE, DEIMv2 and RF-DETR → names of `models/dfine.py` and `models/rf_detr.py`.

Layouts: that of `transformers` (files of ustc-community/dfine-*, also as written before its version 5, and of
Roboflow/rf-detr-*), and that of the authors' code (files of Intellindust/DEIMv2_HGNetv2_*).
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stoker.models.rf_detr import GROUPS

Rules = tuple[tuple[str, str], ...]

TRANSFORMERS: Rules = (
    (r"^model\.", ""),
    (r"^(conv_encoder|backbone)\.model\.embedder\.", "backbone.body.stem."),
    (r"^(conv_encoder|backbone)\.model\.encoder\.", "backbone.body."),
    (r"^(conv_encoder\.)?encoder_input_proj\.", "backbone.encoder.input_proj."),
    (r"^encoder\.(aifi|encoder)\.0\.layers\.0\.", "backbone.encoder.layer."),
    (r"^encoder\.", "backbone.encoder."),
    (r"^(class|bbox)_embed\.", r"decoder.\1_embed."),
    (r"\.fc1\.", ".mlp.layers.0."),
    (r"\.fc2\.", ".mlp.layers.1."),
    (r"(downsample_convs\.\d+)\.conv1\.", r"\1.0."),
    (r"(downsample_convs\.\d+)\.conv2\.", r"\1.1."),
)
ORIGINAL: Rules = (
    (r"^backbone\.", "backbone.body."),
    (r"^encoder\.encoder\.0\.layers\.0\.norm1\.", "backbone.encoder.layer.self_attn_layer_norm."),
    (r"^encoder\.encoder\.0\.layers\.0\.norm2\.", "backbone.encoder.layer.final_layer_norm."),
    (r"^encoder\.encoder\.0\.layers\.0\.", "backbone.encoder.layer."),
    (r"^encoder\.", "backbone.encoder."),
    (r"^decoder\.(enc_|denoising)", r"\1"),
    (r"^decoder\.input_proj\.", "decoder_input_proj."),
    (r"^enc_output\.proj\.", "enc_output.0."),
    (r"^enc_output\.norm\.", "enc_output.1."),
    (r"^decoder\.decoder\.", "decoder."),
    (r"^decoder\.dec_score_head\.", "decoder.class_embed."),
    (r"^decoder\.dec_bbox_head\.", "decoder.bbox_embed."),
    (r"^(decoder\.layers\.\d+)\.norm1\.", r"\1.self_attn_layer_norm."),
    (r"^(decoder\.layers\.\d+)\.norm2\.", r"\1.encoder_attn_layer_norm."),
    (r"^(decoder\.layers\.\d+)\.norm3\.", r"\1.final_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"norm\.scale$", "norm.weight"),
    (r"\.linear1\.", ".mlp.layers.0."),
    (r"\.linear2\.", ".mlp.layers.1."),
    (r"\.swish_ffn\.w3\.", ".mlp.down_proj."),
    (r"(downsample_convs\.\d+\.)0\.cv1\.", r"\g<1>0."),
    (r"(downsample_convs\.\d+\.)0\.cv2\.", r"\g<1>1."),
    (r"\.cv([14])\.", r".conv\1."),
    (r"\.cv2\.0\.", ".csp_rep1."),
    (r"\.cv3\.0\.", ".csp_rep2."),
    (r"down_sample(\d)\.1\.", r"down_conv\1.0."),
    (r"down_sample(\d)\.2\.", r"down_conv\1.1."),
    (r"\.bi_fusion\.cv\.", ".bi_fusion_conv."),
)
BOTH: Rules = (
    (r"\.out_proj\.", ".o_proj."),
    (r"\.reg_conf\.", "."),
    # A convolution, its norm, and the two learned numbers after the activation are members 0, 1 and 3 of one module.
    (r"^(backbone\..*|decoder_input_proj\.\d+)\.(conv|convolution)\.", r"\1.0."),
    (r"^(backbone\..*|decoder_input_proj\.\d+)\.(bn|norm|normalization)\.", r"\1.1."),
    (r"^(backbone\..*)\.lab\.", r"\1.3."),
)
RF_DETR: Rules = (
    (r"^model\.", ""),
    (r"^backbone\.backbone\.embeddings\.", "backbone."),
    (r"^backbone\.patch_embeddings\.projection\.", "backbone.patch_embeddings."),
    (r"^backbone\.backbone\.encoder\.layer\.", "backbone.layers."),
    (r"^backbone\.backbone\.layernorm\.", "backbone.layernorm."),
    (r"^backbone\.projector\.projector_layer\.", "projector."),
    (r"^backbone\.projector\.", "projector."),
    (r"(bottlenecks\.\d+)\.conv1\.", r"\1.0."),
    (r"(bottlenecks\.\d+)\.conv2\.", r"\1.1."),
    (r"\.fc1\.", ".layers.0."),
    (r"\.fc2\.", ".layers.1."),
)


def convert_dfine(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Published tensors by their names in `model`, a `DFine` of the same size with any number of classes. Others come
    back unchanged. What the model does not have (constants, copies of a shared head, counts of batches) is left out."""
    if any(name.startswith("model.decoder.") for name in tensors):
        rules = TRANSFORMERS
    elif any(name.startswith("decoder.dec_score_head.") for name in tensors):
        rules = ORIGINAL
    else:
        return dict(tensors)
    names = model.state_dict().keys()
    is_fused = "backbone.encoder.pan_blocks.0.conv2.0.weight" not in names
    if rules is ORIGINAL:
        first, second = (".csp_rep1.conv2.", ".csp_rep2.conv2.") if is_fused else (".conv2.", ".conv3.")
        after_csp: Rules = ((r"\.cv2\.1\.", first), (r"\.cv3\.1\.", second))
    else:
        after_csp = ((r"(_blocks?(?:\.\d+)?)\.conv2\.", r"\1.conv4."),) if is_fused else ()
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        renamed |= _split(_rename(name, (*rules, *after_csp, *BOTH)), tensor)
    return {name: tensor for name, tensor in renamed.items() if name in names}


def convert_rf_detr(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The same for an `RFDETR`; with fewer queries, the first of each group."""
    if not any(".encoder.layer." in name for name in tensors):
        return dict(tensors)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    renamed = {_rename(name, RF_DETR): tensor for name, tensor in tensors.items()}
    for name in ("reference_point_embed.weight", "query_feat.weight"):
        if name in renamed and len(renamed[name]) > shapes[name][0]:
            count = shapes[name][0] // GROUPS
            renamed[name] = renamed[name].unflatten(0, (GROUPS, -1))[:, :count].flatten(0, 1)
    return {name: tensor for name, tensor in renamed.items() if name in shapes}


def _rename(name: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _split(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The parts of a tensor that are parameters of their own here."""
    prefix, _, kind = name.rpartition(".")
    parts: tuple[str, ...]
    if kind in ("in_proj_weight", "in_proj_bias"):
        parts, suffix = ("q_proj", "k_proj", "v_proj"), kind.removeprefix("in_proj_")
    elif prefix.endswith(".swish_ffn.w12"):
        prefix, parts, suffix = f"{prefix.removesuffix('.swish_ffn.w12')}.mlp", ("gate_proj", "up_proj"), kind
    elif name == "denoising_class_embed.weight":
        return {name: tensor[:-1]}  # the last row is that of padding: zeros
    else:
        return {name: tensor}
    pieces = zip(parts, torch.chunk(tensor, len(parts)), strict=True)
    return {f"{prefix}.{part}.{suffix}": piece for part, piece in pieces}
