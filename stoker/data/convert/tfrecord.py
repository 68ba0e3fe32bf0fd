"""TFRecord for the TensorFlow Object Detection API: `<split>.record`, in numbered shards where asked, and
`label_map.pbtxt`, labels from 1. Corners are shares of the picture within 0 … 1; the API stops at others. Keys as in
object_detection/dataset_tools/create_coco_tf_record.py."""

import hashlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from stoker.data.convert.item import CannotHold, Item, Writer, clipped_shares
from stoker.data.formats import label_map, tf_example
from stoker.data.formats.tf_example import Values
from stoker.data.formats.tfrecord_frames import write_record
from stoker.errors import DataError

DECODABLE = {"jpeg": b"jpeg", "png": b"png", "bmp": b"bmp", "gif": b"gif"}
"""What tf.io.decode_image reads, and image/format for it."""


class TfRecordWriter(Writer):
    frame = "stored"  # TensorFlow does not look at EXIF

    def __init__(self, folder: Path, class_names: tuple[str, ...], counts: dict[str, int], shards: int) -> None:
        super().__init__(folder, class_names, counts)
        if len(set(class_names)) < len(class_names) or "" in class_names:
            raise DataError(
                "A label map cannot hold two classes of one name, or one without.",
                cause=f"the classes are {', '.join(map(repr, class_names))}",
                fix="rename it in the source, or convert to coco or yolo",
            )
        self._shards = shards
        self._written = dict.fromkeys(counts, 0)
        self._files: dict[str, list[Path]] = {split: [] for split in counts}
        self._open: tuple[tuple[str, int], BinaryIO] | None = None

    def picture_path(self, _item: Item) -> None:
        return None

    def add(self, item: Item) -> None:
        if item.kind not in DECODABLE:
            raise CannotHold(f"it is {item.kind}, TensorFlow decodes {', '.join(DECODABLE)}")
        shares, clipped = clipped_shares(item)
        if clipped:
            self.notes["boxes reached outside their picture and are clipped: TensorFlow stops at others"] += clipped
        height, width = item.size
        corners = shares.astype(np.float32).T
        values: dict[str, Values] = {
            "image/height": [height],
            "image/width": [width],
            "image/filename": [item.name.encode()],
            "image/source_id": [str(item.image_id).encode()],
            "image/key/sha256": [hashlib.sha256(item.data).hexdigest().encode()],
            "image/encoded": [item.data],
            "image/format": [DECODABLE[item.kind]],
            "image/object/class/text": [self.class_names[label].encode() for label in item.labels.tolist()],
            "image/object/class/label": [label + 1 for label in item.labels.tolist()],
            "image/object/is_crowd": list(map(int, item.crowd.tolist())),
            "image/object/area": item.area.astype(np.float32),
        }
        for name, column in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True):
            values[f"image/object/bbox/{name}"] = column
        write_record(self._file(item.split), tf_example.encode(values))
        self._written[item.split] += 1

    def _file(self, split: str) -> BinaryIO:
        """The shard that the next record of a split belongs into: the pictures in order, in equal parts."""
        number = self._written[split] * self._shards // max(1, self.counts[split])
        if self._open is None or self._open[0] != (split, number):
            self._close()
            files = self._files[split]
            path = self.folder / f"{split}.record-{len(files):05d}"
            files.append(path)
            self._open = (split, number), path.open("xb")
        return self._open[1]

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def finish(self) -> None:
        self._close()
        for split, files in self._files.items():
            for path in files:  # how many there are is known now: pictures may have been left out
                whole = self._shards == 1
                path.rename(self.folder / f"{split}.record" if whole else Path(f"{path}-of-{len(files):05d}"))
        (self.folder / "label_map.pbtxt").write_text(label_map.write(self.class_names), encoding="utf-8")
