"""COCO JSON as COCO itself has it: `annotations/instances_<split>.json` beside a folder of pictures for each split. It
holds everything that an index has. Format: https://cocodataset.org/#format-data."""

from pathlib import Path

import msgspec

from stoker.data.convert.item import Item, Writer, extent, short


class CocoWriter(Writer):
    """Category ids are the source's where they are 1 or more, as COCO's are; else 1 … C: many tools take 0 for the
    background."""

    def __init__(
        self, folder: Path, class_names: tuple[str, ...], counts: dict[str, int], category_ids: tuple[int, ...]
    ) -> None:
        super().__init__(folder, class_names, counts)
        own = len(set(category_ids)) == len(class_names) and min(category_ids, default=0) >= 1
        self._ids = category_ids if own else tuple(range(1, len(class_names) + 1))
        self._images: dict[str, list[dict[str, object]]] = {split: [] for split in counts}
        self._annotations: dict[str, list[dict[str, object]]] = {split: [] for split in counts}

    def picture_path(self, item: Item) -> Path:
        return self.folder / item.split / item.name

    def add(self, item: Item) -> None:
        height, width = item.size
        self._images[item.split].append({"id": item.image_id, "file_name": item.name, "width": width, "height": height})
        annotations = self._annotations[item.split]
        for (x1, y1, x2, y2), label, crowd, area in zip(
            item.boxes, item.labels.tolist(), item.crowd.tolist(), item.area.tolist(), strict=True
        ):
            left, top = short(x1), short(y1)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": item.image_id,
                    "category_id": self._ids[label],
                    "bbox": [left, top, extent(left, x2), extent(top, y2)],
                    "area": area,
                    "iscrowd": int(crowd),
                }
            )

    def finish(self) -> None:
        categories = [{"id": number, "name": name} for number, name in zip(self._ids, self.class_names, strict=True)]
        (self.folder / "annotations").mkdir()
        for split in self.written_splits:
            content = {"images": self._images[split], "annotations": self._annotations[split], "categories": categories}
            (self.folder / "annotations" / f"instances_{split}.json").write_bytes(msgspec.json.encode(content))
