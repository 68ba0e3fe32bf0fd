"""Writes COCO JSON in COCO's own layout: `annotations/instances_<split>.json`, and a folder of images per split.

It can store everything that an index has. Format: https://cocodataset.org/#format-data.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stoker.data.convert.item import AnnotatedImage, DatasetWriter, exact_extent, shortest_decimal


class CocoWriter(DatasetWriter):
    """Category ids are the source's if all are 1 or more, as in COCO; else 1 … C, because many tools use 0 for the
    background."""

    def __init__(
        self, folder: Path, class_names: tuple[str, ...], max_images: dict[str, int], category_ids: tuple[int, ...]
    ) -> None:
        super().__init__(folder, class_names, max_images)
        self._category_ids = coco_category_ids(class_names, category_ids)
        self._images: dict[str, list[dict[str, object]]] = {split: [] for split in max_images}
        self._annotations: dict[str, list[dict[str, object]]] = {split: [] for split in max_images}

    def image_path(self, image: AnnotatedImage) -> Path:
        return self.folder / image.split / image.name

    def add(self, image: AnnotatedImage) -> None:
        height, width = image.size
        self._images[image.split].append(
            {"id": image.image_id, "file_name": image.name, "width": width, "height": height}
        )
        annotations = self._annotations[image.split]
        for row in coco_annotations(image, self._category_ids):
            annotations.append({"id": len(annotations) + 1, "image_id": image.image_id, **row})

    def finish(self) -> None:
        categories = [
            {"id": category_id, "name": name}
            for category_id, name in zip(self._category_ids, self.class_names, strict=True)
        ]
        (self.folder / "annotations").mkdir()
        for split in self.written_splits:
            document = {
                "images": self._images[split],
                "annotations": self._annotations[split],
                "categories": categories,
            }
            (self.folder / "annotations" / f"instances_{split}.json").write_bytes(msgspec.json.encode(document))


def coco_category_ids(class_names: Sequence[str], category_ids: Sequence[int]) -> tuple[int, ...]:
    """The source's ids if all are 1 or more, else 1 … C."""
    keep_ids = len(set(category_ids)) == len(class_names) and min(category_ids, default=0) >= 1
    return tuple(category_ids) if keep_ids else tuple(range(1, len(class_names) + 1))


def coco_annotations(image: AnnotatedImage, category_ids: Sequence[int]) -> Iterator[dict[str, object]]:
    """The annotations of an image as COCO writes them, without ids."""
    for (x1, y1, x2, y2), label, crowd, area in zip(
        image.boxes, image.labels.tolist(), image.crowd.tolist(), image.area.tolist(), strict=True
    ):
        left, top = shortest_decimal(x1), shortest_decimal(y1)
        yield {
            "category_id": category_ids[label],
            "bbox": [left, top, exact_extent(left, x2), exact_extent(top, y2)],
            "area": area,
            "iscrowd": int(crowd),
        }
