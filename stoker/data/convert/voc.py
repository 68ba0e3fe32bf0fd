"""Writes Pascal VOC: an XML file per image in `Annotations/`, images in `JPEGImages/`, splits in `ImageSets/Main/`.

It has no order of classes, no class without a box and no crowd boxes. Corners are not shifted by one.
Format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html#SECTION00091000000000000000."""

import os
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import numpy as np

from stoker.data.convert.item import AnnotatedImage, DatasetWriter, shortest_decimal
from stoker.errors import DataError


class VocWriter(DatasetWriter):
    single_image_dir = True
    supports_crowd = False

    def __init__(self, folder: Path, class_names: tuple[str, ...], max_images: dict[str, int]) -> None:
        super().__init__(folder, class_names, max_images)
        for name in class_names:
            if not name or name.strip() != name or not name.isprintable() or class_names.count(name) > 1:
                raise DataError(
                    f"Pascal VOC cannot store the class {name!r}.",
                    cause="it stores class names in XML, without ids: equal names and surrounding spaces are lost",
                    fix="rename the class in the source, or convert to coco or yolo",
                )
        for directory in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (folder / directory).mkdir(parents=True)
        self._stems: dict[str, list[str]] = {split: [] for split in max_images}
        self._used_labels: set[int] = set()

    def image_path(self, image: AnnotatedImage) -> Path:
        return self.folder / "JPEGImages" / image.name

    def add(self, image: AnnotatedImage) -> None:
        stem = os.path.splitext(image.name)[0]
        root = Element("annotation")
        SubElement(root, "folder").text = "JPEGImages"
        SubElement(root, "filename").text = image.name
        height, width = image.size
        size = SubElement(root, "size")
        for tag, value in (("width", width), ("height", height), ("depth", 3)):
            SubElement(size, tag).text = str(value)
        SubElement(root, "segmented").text = "0"
        for box, label, crowd in zip(image.boxes, image.labels.tolist(), image.crowd.tolist(), strict=True):
            if crowd:
                self.notes["crowd boxes are left out: Pascal VOC has none"] += 1
                continue
            object_element = SubElement(root, "object")
            SubElement(object_element, "name").text = self.class_names[label]
            for tag, text in (("pose", "Unspecified"), ("truncated", "0"), ("difficult", "0")):
                SubElement(object_element, tag).text = text
            bndbox = SubElement(object_element, "bndbox")
            for tag, coordinate in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True):
                SubElement(bndbox, tag).text = str(shortest_decimal(coordinate))
            self._used_labels.add(label)
            if (box != np.rint(box)).any():
                self.notes["boxes are not in whole pixels; some readers of Pascal VOC need whole numbers"] += 1
        ElementTree.indent(root)
        (self.folder / "Annotations" / f"{stem}.xml").write_bytes(ElementTree.tostring(root, "utf-8") + b"\n")
        self._stems[image.split].append(stem)

    def finish(self) -> None:
        for split in self.written_splits:
            text = "".join(f"{stem}\n" for stem in self._stems[split])
            (self.folder / "ImageSets" / "Main" / f"{split}.txt").write_text(text, encoding="utf-8")
        if num_unused := len(self.class_names) - len(self._used_labels):
            self.notes["classes without a box are left out: Pascal VOC has no list of classes"] += num_unused
        if list(self.class_names) != sorted(self.class_names):
            self.notes["classes have no order in Pascal VOC: readers sort them by name"] += len(self._used_labels)
