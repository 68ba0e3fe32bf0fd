"""Names of published weights of RF-DETR (files of Roboflow/rf-detr-*, in the layout of transformers) → names of
`models/rf_detr.py`."""

# mypy: disable-error-code="no-untyped-call"
# (`unflatten` of tensors is untyped)

import re
from collections.abc import Mapping

from torch import Tensor, nn

from stoker.models.rf_detr import GROUPS

RULES = (
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


def convert_rf_detr(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Published tensors by their names in `model`, an `RFDETR` of the same size with any number of classes; with fewer
    queries, the first of each group. Others come back unchanged. What the model does not have is left out."""
    if not any(".encoder.layer." in name for name in tensors):
        return dict(tensors)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in RULES:
            name = re.sub(pattern, replacement, name)
        if name in ("reference_point_embed.weight", "query_feat.weight"):
            tensor = _first_queries(tensor, shapes[name][0])
        if name in shapes:
            renamed[name] = tensor
    return renamed


def _first_queries(table: Tensor, count: int) -> Tensor:
    """The first `count` rows of the groups of `table`, the same number of each group, where it has so many."""
    return table if len(table) <= count else table.unflatten(0, (GROUPS, -1))[:, : count // GROUPS].flatten(0, 1)
