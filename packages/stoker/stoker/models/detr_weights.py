"""Names of published weights of D-FINE, DEIMv2 and RF-DETR → names of `models/dfine.py` and `models/rf_detr.py`; names
of torchvision before 0.13 → those since.

The rules are in knowledge/detr_weights.toml, of DETRs for the layout of `transformers` and that of the authors' code.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from stoker.knowledge import read_toml
from stoker.models.rf_detr import GROUPS


def convert_dfine(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Published tensors by their names in `model`, a `DFine` of the same size with any number of classes. Others come
    back unchanged. What the model does not have (constants, copies of a shared head, counts of batches) is left out."""
    rules = read_toml("detr_weights.toml")
    names = model.state_dict().keys()
    is_fused = "backbone.encoder.pan_blocks.0.conv2.0.weight" not in names
    if any(name.startswith("model.decoder.") for name in tensors):
        layout = rules["dfine_transformers"]
        after_csp = [(r"(_blocks?(?:\.\d+)?)\.conv2\.", r"\1.conv4.")] if is_fused else []
    elif any(name.startswith("decoder.dec_score_head.") for name in tensors):
        layout = rules["dfine_authors"]
        first, second = (".csp_rep1.conv2.", ".csp_rep2.conv2.") if is_fused else (".conv2.", ".conv3.")
        after_csp = [(r"\.cv2\.1\.", first), (r"\.cv3\.1\.", second)]
    else:
        return dict(tensors)
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        renamed |= _split(_rename(name, [*layout, *after_csp, *rules["dfine"]]), tensor)
    return {name: tensor for name, tensor in renamed.items() if name in names}


def convert_rf_detr(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The same for an `RFDETR`; with fewer queries, the first of each group."""
    if not any(".encoder.layer." in name for name in tensors):
        return dict(tensors)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    rules = read_toml("detr_weights.toml")["rf_detr"]
    renamed = {_rename(name, rules): tensor for name, tensor in tensors.items()}
    for name in ("reference_point_embed.weight", "query_feat.weight"):
        if name in renamed and len(renamed[name]) > shapes[name][0]:
            count = shapes[name][0] // GROUPS
            renamed[name] = renamed[name].unflatten(0, (GROUPS, -1))[:, :count].flatten(0, 1)
    return {name: tensor for name, tensor in renamed.items() if name in shapes}


def convert_torchvision(tensors: Mapping[str, Tensor], _model: nn.Module) -> dict[str, Tensor]:
    """Tensors of a detector by torchvision's names since 0.13, which FCOS's heads with norms always had."""
    tables = read_toml("detr_weights.toml")
    has_norms = any(re.match(r"head\.\w+\.conv\.1\.", name) for name in tensors)
    rules = tables["torchvision"] + ([] if has_norms else tables["torchvision_heads"])
    return {_rename(name, rules): tensor for name, tensor in tensors.items()}


def _rename(name: str, rules: Iterable[Sequence[str]]) -> str:
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
