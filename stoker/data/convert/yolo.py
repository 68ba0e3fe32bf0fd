"""Writes YOLO: `images/<split>/`, a text file per image in `labels/<split>/`, `data.yaml` with the class names.

A line is `class x y width height`, normalized and within 0 … 1: Ultralytics drops an image with other values. It has no
crowd boxes. Format: https://docs.ultralytics.com/datasets/detect/.
"""

import json
import os
from pathlib import Path

from stoker.data.convert.item import AnnotatedImage, DatasetWriter, clip_normalized


class YoloWriter(DatasetWriter):
    box_orientation = "upright"
    supports_crowd = False

    def image_path(self, image: AnnotatedImage) -> Path:
        return self.folder / "images" / image.split / image.name

    def add(self, image: AnnotatedImage) -> None:
        normalized, clipped = clip_normalized(image)
        if clipped:
            self.notes["boxes reached outside their image and are clipped: YOLO boxes must be inside"] += clipped
        if num_crowd := int(image.crowd.sum()):
            self.notes["crowd boxes are left out: YOLO has none"] += num_crowd
        lines = []
        for (x1, y1, x2, y2), label, is_crowd in zip(
            normalized.tolist(), image.labels.tolist(), image.crowd.tolist(), strict=True
        ):
            if not is_crowd:
                cxcywh = ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)
                lines.append(" ".join((str(label), *(f"{value:.9g}" for value in cxcywh))) + "\n")
        labels_dir = self.folder / "labels" / image.split
        labels_dir.mkdir(parents=True, exist_ok=True)
        # also without boxes, because an image without a label file looks forgotten
        (labels_dir / f"{os.path.splitext(image.name)[0]}.txt").write_text("".join(lines))

    def finish(self) -> None:
        # no `path`, so that the folders stay relative to this file when it is moved
        splits = [f"{split}: images/{split}\n" for split in self.written_splits]
        names = [f"  {label}: {json.dumps(name, ensure_ascii=False)}\n" for label, name in enumerate(self.class_names)]
        text = "".join([*splits, f"nc: {len(self.class_names)}\n", "names:\n", *names])
        (self.folder / "data.yaml").write_text(text, encoding="utf-8")
