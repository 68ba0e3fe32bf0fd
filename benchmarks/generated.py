"""Generated images that more than one benchmark uses."""

import json
from pathlib import Path

IMAGE_SIZE = (480, 640)


def generate_jpegs(folder: Path, images: int) -> None:
    """Writes images/, 640 × 480 and about 95 KB each (COCO's usual size), and all.json: coarse colors with fine noise,
    which compress like photographs."""
    import cv2
    import numpy as np

    (folder / "images").mkdir()
    height, width = IMAGE_SIZE
    for i in range(images):
        rng = np.random.default_rng(i)
        coarse = cv2.resize(rng.integers(0, 256, (12, 16, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
        fine = rng.normal(0, 9, (height, width, 1))
        image = np.clip(coarse + fine, 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / "images" / f"{i:06d}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 88])
    entries = [{"id": i, "file_name": f"{i:06d}.jpg", "height": height, "width": width} for i in range(images)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [9, 9, 90, 90]} for i in range(images)]
    content = {"images": entries, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "all.json").write_text(json.dumps(content))
