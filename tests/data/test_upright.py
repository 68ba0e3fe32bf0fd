"""Images and boxes meet, whichever way an image is stored and annotated: in batches, augmented, and when drawn."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from stoker.data.index import Index, open_index
from stoker.data.loading.loader import Loader, LoaderSpec
from stoker.data.loading.spec import compute_max_boxes
from stoker.evaluation.evaluate import sample_images
from stoker.evaluation.metrics import empty_detections
from stoker.hardware.device import Device

SHOWN = (96, 160)
"""Height and width, upright."""
BOX = (20, 16, 60, 48)
"""x0, y0, x1, y1 of the red object, upright; the rest is blue."""
STORED_AS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}
"""To be shown upright with an orientation, the upright image is stored turned as this orientation turns."""


def turn(image: Image.Image, orientation: int) -> Image.Image:
    exif = image.getexif()
    exif[0x0112] = orientation
    image.info["exif"] = exif.tobytes()
    return ImageOps.exif_transpose(image)


def write(folder: Path, *, annotated: str, kind: str) -> Index:
    """An image of each orientation. annotated: "upright", "stored" (boxes and size in stored pixels) or "no size"."""
    (folder / "train").mkdir(parents=True)
    images, annotations = [], []
    upright = np.zeros((*SHOWN, 3), np.uint8)
    upright[..., 2] = 200
    upright[BOX[1] : BOX[3], BOX[0] : BOX[2]] = (200, 0, 0)
    for orientation in range(1, 9):
        stored = turn(Image.fromarray(upright), STORED_AS[orientation])
        pixels = np.asarray(stored)
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
        Image.fromarray(pixels).save(folder / "train" / f"{orientation}", kind, exif=exif, **options)
        red = np.argwhere(pixels[..., 0] > 100)
        y0, x0, y1, x1 = *red.min(0).tolist(), *(red.max(0) + 1).tolist()
        size, box = (pixels.shape[:2], (x0, y0, x1, y1)) if annotated == "stored" else (SHOWN, BOX)
        entry = {"id": orientation, "file_name": f"{orientation}"}
        images.append(entry if annotated == "no size" else entry | {"height": size[0], "width": size[1]})
        sides = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
        annotations.append({"id": orientation, "image_id": orientation, "category_id": 1, "bbox": sides})
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "red"}]}
    (folder / "train" / "_annotations.coco.json").write_text(json.dumps(document))
    return open_index(folder)


def red_where(pixels: np.ndarray) -> tuple[float, ...]:
    """x0, y0, x1, y1 of what is red."""
    red = np.argwhere(pixels[..., 0].astype(int) > pixels[..., 2].astype(int) + 40)
    return (*red.min(0)[::-1].tolist(), *(red.max(0)[::-1] + 1).tolist())


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
