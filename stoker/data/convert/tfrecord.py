"""Writes TFRecords for the TensorFlow Object Detection API: `<split>.record` or numbered shards, `label_map.pbtxt`.

Labels start at 1. Corners are normalized and within 0 … 1; the API stops at others. The keys are those of
object_detection/dataset_tools/create_coco_tf_record.py.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from stoker.data.convert.item import AnnotatedImage, DatasetWriter, UnsupportedImage, clip_normalized
from stoker.data.formats import label_map, tf_example
from stoker.data.formats.tf_example import Values
from stoker.data.formats.tfrecord_frames import write_record
from stoker.errors import DataError

TF_IMAGE_FORMATS = {"jpeg": b"jpeg", "png": b"png", "bmp": b"bmp", "gif": b"gif"}
"""The formats of tf.io.decode_image → image/format."""


class TfRecordWriter(DatasetWriter):
    box_orientation = "stored"  # TensorFlow ignores EXIF

    def __init__(self, folder: Path, class_names: tuple[str, ...], max_images: dict[str, int], shards: int) -> None:
        super().__init__(folder, class_names, max_images)
        if len(set(class_names)) < len(class_names) or "" in class_names:
            raise DataError(
                "A label map cannot contain two classes with the same name, or one without a name.",
                cause=f"the classes are {', '.join(map(repr, class_names))}",
                fix="rename it in the source, or convert to coco or yolo",
            )
        self._shards = shards
        self._num_written = dict.fromkeys(max_images, 0)
        self._files: dict[str, list[Path]] = {split: [] for split in max_images}
        self._open_shard: tuple[tuple[str, int], BinaryIO] | None = None

    def image_path(self, _image: AnnotatedImage) -> None:
        return None

    def add(self, image: AnnotatedImage) -> None:
        if image.image_format not in TF_IMAGE_FORMATS:
            raise UnsupportedImage(f"it is {image.image_format}, TensorFlow decodes {', '.join(TF_IMAGE_FORMATS)}")
        normalized, clipped = clip_normalized(image)
        if clipped:
            self.notes["boxes reached outside their image and are clipped: TensorFlow refuses them"] += clipped
        height, width = image.size
        xyxy = normalized.astype(np.float32).T
        values: dict[str, Values] = {
            "image/height": [height],
            "image/width": [width],
            "image/filename": [image.name.encode()],
            "image/source_id": [str(image.image_id).encode()],
            "image/key/sha256": [hashlib.sha256(image.data).hexdigest().encode()],
            "image/encoded": [image.data],
            "image/format": [TF_IMAGE_FORMATS[image.image_format]],
            "image/object/class/text": [self.class_names[label].encode() for label in image.labels.tolist()],
            "image/object/class/label": [label + 1 for label in image.labels.tolist()],
            "image/object/is_crowd": list(map(int, image.crowd.tolist())),
            "image/object/area": image.area.astype(np.float32),
        }
        for name, column in zip(("xmin", "ymin", "xmax", "ymax"), xyxy, strict=True):
            values[f"image/object/bbox/{name}"] = column
        write_record(self._shard_file(image.split), tf_example.encode(values))
        self._num_written[image.split] += 1

    def _shard_file(self, split: str) -> BinaryIO:
        """The shard of the next record of a split: images in order, in equal parts."""
        shard = self._num_written[split] * self._shards // max(1, self.max_images[split])
        if self._open_shard is None or self._open_shard[0] != (split, shard):
            self._close_shard()
            files = self._files[split]
            path = self.folder / f"{split}.record-{len(files):05d}"
            files.append(path)
            self._open_shard = (split, shard), path.open("xb")
        return self._open_shard[1]

    def _close_shard(self) -> None:
        if self._open_shard is not None:
            self._open_shard[1].close()
            self._open_shard = None

    def finish(self) -> None:
        self._close_shard()
        for split, files in self._files.items():
            for path in files:  # the number of shards is known only now, because images may have been left out
                is_single = self._shards == 1
                path.rename(self.folder / f"{split}.record" if is_single else Path(f"{path}-of-{len(files):05d}"))
        (self.folder / "label_map.pbtxt").write_text(label_map.to_text(self.class_names), encoding="utf-8")
