"""Writes what Datumaro reads as COCO and counts it. `convert_via_datumaro` runs this file in an environment that has
Datumaro and not stoker (`uv tool run`): its versions of Pillow, OpenCV and pyarrow exclude those of stoker.

Datumaro's own COCO writer is not used: it rounds corners and drops rotated boxes without a word. Every annotation with
a box becomes one, those of one group together; the others are counted by their type.
"""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def main(source: str, target: str, format: str) -> dict[str, Any]:
    """Converts a data set. format: its name in Datumaro; empty: Datumaro detects it."""
    from datumaro.components.annotation import AnnotationType  # type: ignore[import-not-found]
    from datumaro.components.dataset import Dataset  # type: ignore[import-not-found]

    dataset = Dataset.import_from(source, format or None)
    labels = dataset.categories().get(AnnotationType.label)
    names = [label.name for label in labels.items] if labels is not None else []
    subsets: dict[str, dict[str, list[dict[str, Any]]]] = {}
    read, left_out = Counter[str](), Counter[str]()
    used: set[int] = set()
    by_name = {path.name: path for path in Path(source).rglob("*")}
    for item in dataset:
        coco = subsets.setdefault(item.subset, {"images": [], "annotations": []})
        written = (getattr(item.media, "path", None) or "").replace("\\", "/")
        suffix = Path(written).suffix or ".png"
        image = Path("images", item.subset, f"{item.id}{suffix}")
        objects = _objects_of(item, read, left_out)
        name = written.rpartition("/")[2].removeprefix("file:")  # VoTT's paths are those of another machine
        file = Path(written) if Path(written).is_file() else by_name.get(name)
        if not _save(item.media, file, Path(target) / image):
            left_out["image without a file"] += 1
            left_out["box of an image without a file"] += len(objects)
            continue
        read["images"] += 1
        read["boxes"] += len(objects)
        used |= {label for _, label in objects.values()}
        coco["images"].append({"id": len(coco["images"]) + 1, "file_name": f"{item.id}{suffix}"})
        for box, label in objects.values():
            entry = {"id": len(coco["annotations"]) + 1, "image_id": len(coco["images"]), "category_id": label}
            coco["annotations"].append({**entry, "bbox": [float(value) for value in box], "iscrowd": 0})
    Path(target, "annotations").mkdir(parents=True, exist_ok=True)
    for subset, coco in subsets.items():
        categories = [{"id": label, "name": names[label]} for label in sorted(used)]
        Path(target, "annotations", f"instances_{subset}.json").write_text(
            json.dumps({**coco, "categories": categories})
        )
    return {"format": dataset.format, "read": read, "left_out": left_out}


def _objects_of(item: Any, read: Counter[str], left_out: Counter[str]) -> dict[object, tuple[Any, int]]:
    """Returns box and class of each object of an image; counts what is read and what is left out, by type."""
    objects: dict[object, tuple[Any, int]] = {}
    for number, annotation in enumerate(item.annotations):
        kind = annotation.type.name
        if kind in ("points", "label") or not hasattr(annotation, "get_bbox"):
            left_out[kind] += 1
        elif annotation.label is None:
            left_out[f"{kind} without a class"] += 1
        else:
            read[kind] += 1
            key = ("group", annotation.group) if annotation.group else number
            if key not in objects or kind == "bbox":
                objects[key] = (annotation.get_bbox(), annotation.label)
    return objects


def _save(media: Any, file: Path | None, path: Path) -> bool:
    """Copies an image file as it is, else writes the pixels; False if there are none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if file is not None:
        shutil.copyfile(file, path)
    elif media is None or media.data is None:
        return False
    else:
        media.save(str(path))
    return True


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
