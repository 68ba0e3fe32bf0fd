"""The noise of denoising queries."""

import torch

from stoker.models.layers.boxes import cxcywh_to_xyxy
from stoker.models.layers.denoising import make_denoising_queries
from stoker.models.layers.set_criterion import make_truth
from tests.trainer.models.samples import make_batch

CANVAS = (96, 128)


def test_noise_is_near_boxes_to_find_and_far_from_others() -> None:
    """Sides of the first move by less than half the size, of the second by half to all of it; no box has a negative
    size, also where its sides have crossed."""
    batch = make_batch((3, 5), CANVAS, 5)
    centered = torch.tensor([40.0, 30.0, 80.0, 60.0])  # far enough from the edges
    truth = make_truth(centered.expand_as(batch.boxes), batch.labels, batch.valid, CANVAS, torch.float64)
    noisy = make_denoising_queries(truth, batch.rand, 5)
    used = noisy.group >= 0
    wanted = cxcywh_to_xyxy(truth.boxes[:, :1])
    x1, y1, x2, y2 = cxcywh_to_xyxy(noisy.boxes).unbind(-1)
    assert (noisy.boxes[used][:, 2:] > 0).all()
    size = (wanted[..., 2:] - wanted[..., :2]).repeat(1, 1, 2)
    moved = ((torch.stack((x1, y1, x2, y2), -1) - wanted) / size).abs()
    near, far = used & (noisy.box >= 0), used & (noisy.box < 0)
    assert near.sum() == far.sum() > 100
    assert moved[near].max() < 0.5
    crossed = torch.stack((x2, y2, x1, y1), -1)
    either = torch.minimum((moved - 0.75).abs(), ((crossed - wanted) / size).abs().sub(0.75).abs())
    assert either[far].max() <= 0.25 + 1e-9
