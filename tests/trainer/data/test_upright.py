"""Images and boxes meet, whichever way an image is stored and annotated: in batches, augmented, and when drawn."""

import numpy as np
import pytest
import torch

from stoker.data.loading.loader import Loader, LoaderSpec
from stoker.data.loading.samples import compute_max_boxes
from stoker.evaluation.detections import empty_detections
from stoker.evaluation.evaluate import sample_images
from stoker.hardware.device import Device
from tests.fixtures.data_upright import SHOWN, red_where, write


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("annotated", ["upright", "stored", "no size"])
@pytest.mark.parametrize("image_size", [(160, 160), (64, 64)])
@pytest.mark.parametrize("scale_jitter_prob", [0.0, 1.0])
def test_the_loaders_boxes_are_around_their_objects(tmp_path, kind, annotated, image_size, scale_jitter_prob):
    index = write(tmp_path, annotated=annotated, kind=kind)
    image_indices = np.arange(len(index))
    seen, quarter_turns = set(), set()
    spec = LoaderSpec(
        device=Device(torch.device("cpu")),
        batch_size=8,
        image_size=image_size,
        resize="letterbox",
        scale_jitter_prob=scale_jitter_prob,
        scale_range=(0.8, 1.2),
        max_boxes=compute_max_boxes(index, image_indices),
        seed=1,
        workers=2,
    )
    with Loader(index, image_indices, spec) as loader:
        for _ in range(3):
            batch = next(loader)
            for k in range(8):
                orientation = int(index.path(int(batch.image_index[k])).name)
                if annotated == "stored" and orientation in (2, 3, 4):
                    continue  # nothing tells: shown upright, and ambiguous
                seen.add(orientation)
                size = tuple(batch.original_size[k].tolist())
                quarter_turns.add((orientation >= 5, size))
                if not bool(batch.valid[k].any()):
                    continue  # cropped away
                height, width = batch.resized_size[k].tolist()
                pixels = batch.images[k].permute(1, 2, 0).numpy()[:height, :width]
                actual = batch.boxes[k][batch.valid[k]][0].tolist()
                assert red_where(pixels) == pytest.approx(actual, abs=2.1), orientation
        assert not loader.state_dict()["quarantined"]
    turned = SHOWN[::-1] if annotated == "stored" else SHOWN
    assert quarter_turns == {(False, SHOWN), (True, turned)}
    assert seen == {1, 5, 6, 7, 8} if annotated == "stored" else seen == set(range(1, 9))


@pytest.mark.parametrize("annotated", ["upright", "stored"])
def test_images_to_look_at_are_turned_as_their_boxes_are(tmp_path, annotated):
    index = write(tmp_path, annotated=annotated, kind="JPEG")
    shown = sample_images(index, np.arange(8), empty_detections(range(8)), count=8)
    for one in shown:
        if annotated == "stored" and one.path.name in "234":
            continue
        pixels, size = one.load_image(1000)
        assert pixels.shape[:2] == size
        assert red_where(pixels) == pytest.approx(one.gt.boxes[0].tolist(), abs=1.1)
