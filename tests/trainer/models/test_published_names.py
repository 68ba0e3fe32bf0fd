"""The authors' files of D-FINE and DEIMv2: all tensors find their place, and the model predicts what the authors' code
predicts with the same weights. `published/make.py` wrote what is expected: by Intellindust-AI-Lab/DEIMv2 at 0fff8d4
(March 2026) and Peterande/D-FINE, with their configurations; it imports nothing of stoker. Published files themselves
were not at hand."""

from pathlib import Path

import pytest
import torch

from stoker.models import build
from stoker.models.detr_weights import convert_dfine
from stoker.models.dfine import DFine
from tests.trainer.models.published.make import QUERIES, fill, images
from tests.trainer.models.samples import settings_of

FILES = sorted((Path(__file__).parent / "published").glob("*.txt"))
NO_WEIGHTS = ("decoder.up", "decoder.reg_scale", "num_points_scale", "num_batches_tracked")


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_authors_files_fit_and_predict_what_their_code_predicts(path: Path) -> None:
    names, numbers = (part.splitlines() for part in path.read_text().strip().split("\n\n"))
    rows = [(name, tuple(map(int, sizes))) for name, *sizes in map(str.split, names)]
    weights = {name: fill(name, shape) for name, shape in rows if not name.endswith(NO_WEIGHTS)}
    shared = {name for name in weights if name.startswith(("decoder.dec_bbox_head.1", "decoder.dec_bbox_head.2"))}
    model = build(settings_of(path.stem, queries=QUERIES), 80).double().eval()
    assert isinstance(model, DFine)
    converted = convert_dfine(weights, model)
    own = {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}
    assert own == converted.keys()
    is_shared = len(model.decoder.bbox_embed) == 1
    lost = sum(x.numel() for x in weights.values()) - sum(x.numel() for x in converted.values())
    padding = weights["decoder.denoising_class_embed.weight"][-1].numel()
    assert lost == padding + sum(weights[name].numel() for name in shared if is_shared)
    if is_shared:  # one tensor in the authors' model, which its file has three times
        head = {name: weights[name.replace("head.0", "head.2")] for name in weights if "dec_bbox_head.0." in name}
        converted = convert_dfine({**weights, **head}, model)
    model.load_state_dict(converted, strict=False)
    with torch.no_grad():
        decoded = model(images()).decoded
    scores, labels = decoded.logits[-1][0].max(1)
    expected = torch.tensor([[float(x) for x in row.split()] for row in numbers], dtype=torch.float64)
    torch.testing.assert_close(scores, expected[:, 0], rtol=0, atol=2e-6)
    assert labels.tolist() == expected[:, 1].tolist()
    torch.testing.assert_close(decoded.boxes[-1][0], expected[:, 2:], rtol=0, atol=1e-6)
