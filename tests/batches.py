"""Batches for tests: of given pixels and boxes, and of random ones."""

import numpy as np
import torch
from hypothesis import strategies as st

from stoker.data.batch import NUM_RAND, Batch


def batch_of(pixels, boxes, resized_size, labels=None, valid=None, rand=None):
    """pixels [B, H, W, 3] → Batch, channels last."""
    count, max_boxes = boxes.shape[:2]
    return Batch(
        images=torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2),
        boxes=torch.from_numpy(boxes),
        labels=torch.zeros(count, max_boxes, dtype=torch.int64) if labels is None else torch.from_numpy(labels),
        valid=torch.from_numpy(valid if valid is not None else boxes.sum(-1) > 0),
        resized_size=torch.tensor(resized_size, dtype=torch.int32),
        scale=torch.ones(count, 2),
        original_size=torch.tensor(resized_size, dtype=torch.int32),
        image_index=torch.arange(count),
        rand=torch.zeros(count, NUM_RAND) if rand is None else rand,
    )


@st.composite
def batches(draw):
    count, height, width = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    resized_size = np.stack([rng.integers(1, height + 1, count), rng.integers(1, width + 1, count)], 1)
    valid = rng.random((count, 5)) < 0.6
    corners = np.sort(rng.random((count, 5, 2, 2)), axis=2) * resized_size[:, None, None, ::-1]
    boxes = (corners.reshape(count, 5, 4) * valid[..., None]).astype(np.float32)
    pixels = rng.integers(0, 255, (count, height, width, 3), np.uint8)
    uniform = torch.from_numpy(rng.random((count, NUM_RAND)).astype(np.float32))
    return batch_of(pixels, boxes, resized_size, rng.integers(0, 9, (count, 5)), valid, uniform)
