"""YOLO: `images/<split>/`, a text file per picture in `labels/<split>/`, `data.yaml` with the names of the classes.

A line is `class x y width height` in shares of the picture, within 0 … 1: Ultralytics drops a picture that has others.
It has no crowd. Format: https://docs.ultralytics.com/datasets/detect/."""

import json
import os
from pathlib import Path

from stoker.data.convert.item import Item, Writer, clipped_shares


class YoloWriter(Writer):
    frame = "upright"
    has_crowd = False

    def picture_path(self, item: Item) -> Path:
        return self.folder / "images" / item.split / item.name

    def add(self, item: Item) -> None:
        shares, clipped = clipped_shares(item)
        if clipped:
            self.notes["boxes reached outside their picture and are clipped: YOLO's are within it"] += clipped
        if crowd := int(item.crowd.sum()):
            self.notes["crowd boxes are left out: YOLO has none"] += crowd
        lines = []
        for (x1, y1, x2, y2), label, is_crowd in zip(
            shares.tolist(), item.labels.tolist(), item.crowd.tolist(), strict=True
        ):
            if not is_crowd:
                numbers = ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)
                lines.append(" ".join((str(label), *(f"{number:.9g}" for number in numbers))) + "\n")
        labels = self.folder / "labels" / item.split
        labels.mkdir(parents=True, exist_ok=True)
        # also where there are no boxes: a picture without a file may have been forgotten
        (labels / f"{os.path.splitext(item.name)[0]}.txt").write_text("".join(lines))

    def finish(self) -> None:
        # no `path`: the folders are relative to this file, wherever it is moved
        splits = [f"{split}: images/{split}\n" for split in self.written_splits]
        names = [
            f"  {number}: {json.dumps(name, ensure_ascii=False)}\n" for number, name in enumerate(self.class_names)
        ]
        text = "".join([*splits, f"nc: {len(self.class_names)}\n", "names:\n", *names])
        (self.folder / "data.yaml").write_text(text, encoding="utf-8")
