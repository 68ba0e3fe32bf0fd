"""Writes what the authors' code of D-FINE and DEIMv2 computes, for tests/trainer/models/test_published_names.py.

    python tests/trainer/models/published/make.py CHECKOUT NAME

CHECKOUT is one of `Intellindust-AI-Lab/DEIMv2` or `Peterande/D-FINE`. The file NAME.txt gets the names and shapes of
all tensors of the model that its configuration describes, and what it predicts for `images()` with `fill`ed weights in
float64: a line for each query, logit and number of its best class, and its box. It runs only to make these files; the
tests need no checkout.
"""

import importlib
import inspect
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

QUERIES, SIDE = 24, 128


def fill(name: str, shape: tuple[int, ...]) -> Tensor:
    """Weights that depend on the name only (RandomState's numbers are the same in all versions of NumPy), of a size at
    which signals neither vanish nor grow."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith(("running_var", "weight", "scale")) and len(shape) == 1:
        return torch.from_numpy(1 + 0.1 * np.tanh(noise))
    return torch.from_numpy(noise * (0.7 * np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1))


def images() -> Tensor:
    """uint8 [1, 3, SIDE, SIDE]; square, since the authors' positions of other maps are in another order."""
    return torch.from_numpy(np.random.RandomState(0).randint(0, 256, (1, 3, SIDE, SIDE)).astype(np.uint8))


def read_config(path: Path) -> dict[str, Any]:
    own, config = yaml.safe_load(path.read_text()) or {}, {}
    for name in own.pop("__include__", []):
        config = merge(config, read_config(path.parent / name))
    return merge(config, own)


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = {k: merge(first[k], second[k]) for k in first.keys() & second if isinstance(second[k], dict)}
    return {**first, **second, **both}


def build(checkout: Path, name: str) -> nn.Module:
    """Without their packages' `__init__`, which import data loaders and trackers."""
    family, size = name.split("_")
    is_deim = family == "deimv2"
    root, models = ("engine", "deim") if is_deim else ("src", "zoo.dfine")
    backbones = "backbone" if is_deim else "nn.backbone"
    for package in (root, *(f"{root}.{x}" for x in ("core", "nn", "zoo", models, backbones))):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(checkout / package.replace(".", "/"))]
    sys.modules[f"{root}.core"].register = lambda: lambda thing: thing  # type: ignore[attr-defined]
    config = read_config(checkout / "configs" / family / f"{family}_hgnetv2_{size}_coco.yml")

    def make(module: str, kind: str, **changes: Any) -> nn.Module:
        thing = getattr(importlib.import_module(f"{root}.{module}"), kind)
        known = inspect.signature(thing).parameters
        options = {"eval_spatial_size": None, "pretrained": False, "freeze_norm": False, **changes}
        return thing(**{k: v for k, v in {**config[kind], **options}.items() if k in known})

    encoder = config["DEIM" if is_deim else "DFINE"]["encoder"] if is_deim else "HybridEncoder"
    encoder_module = {"LiteEncoder": "lite_encoder", "HybridEncoder": "hybrid_encoder"}[encoder]
    decoder = ("deim_decoder", "DEIMTransformer") if is_deim else ("dfine_decoder", "DFINETransformer")
    return nn.ModuleDict({
        "backbone": make(f"{backbones}.hgnetv2", "HGNetv2", freeze_at=-1),
        "encoder": make(f"{models}.{encoder_module}", encoder),
        "decoder": make(f"{models}.{decoder[0]}", decoder[1], num_queries=QUERIES, num_classes=80),
    })  # fmt: skip


def main(checkout: Path, name: str) -> None:
    torch.set_default_dtype(torch.float64)
    model: Any = build(checkout, name).double().eval()
    state = model.state_dict()
    constants = ("num_batches_tracked", "num_points_scale", "decoder.up", "decoder.reg_scale")
    weights = {key: fill(key, tuple(x.shape)) for key, x in state.items() if not key.endswith(constants)}
    model.load_state_dict({**state, **weights})
    with torch.no_grad():
        found = model["decoder"](model["encoder"](model["backbone"](images().double() / 255)))
    rows = [" ".join((key, *map(str, x.shape))) for key, x in state.items()]
    best = found["pred_logits"][0].max(1)
    numbers = torch.cat((best.values[:, None], best.indices[:, None].double(), found["pred_boxes"][0]), 1)
    rows += ["", *(" ".join(f"{value:.7g}" for value in row) for row in numbers.tolist())]
    Path(__file__).with_name(f"{name}.txt").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
