"""Small data sets as annotation tools export them, written by hand: CVAT, LabelMe, Label Studio, Open Images.

The structure, with its oddities, is that of true exports: CVAT's and Datumaro's test data, LabelMe's examples, the test
data of label-studio-converter, and tables of Open Images V6.
"""

import json
from pathlib import Path
from typing import Any

from tests.trainer.data.tfrecords import jpeg

WIDTH, HEIGHT = 200, 100


def save_images(*paths: Path) -> None:
    """Images of WIDTH × HEIGHT pixels, with different contents."""
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(WIDTH, HEIGHT, number))


def cvat_image(name: str, shapes: str = "", *, subset: str = "", size: tuple[int, int] = (WIDTH, HEIGHT)) -> str:
    extra = f' subset="{subset}" task_id="7"' if subset else ""
    return f'  <image id="0" name="{name}"{extra} width="{size[0]}" height="{size[1]}">\n{shapes}\n  </image>\n'


def cvat_box(label: str, *xyxy: float, rotation: float = 0) -> str:
    corners = " ".join(f'{k}="{v}"' for k, v in zip(("xtl", "ytl", "xbr", "ybr"), xyxy, strict=True))
    turned = f' rotation="{rotation}"' if rotation else ""
    return f'    <box label="{label}" source="manual" occluded="0" {corners}{turned} z_order="0">\n    </box>\n'


def cvat_file(content: str, *, original_size: bool = False) -> str:
    size = f"<original_size><width>{WIDTH}</width><height>{HEIGHT}</height></original_size>" if original_size else ""
    return f"""<?xml version="1.0" encoding="utf-8"?>
<annotations>
  <version>1.1</version>
  <meta>
    <task>
      <id>7</id>
      <name>boats &amp; cars</name>
      <mode>annotation</mode>
      <labels>
        <label>
          <name>boat</name>
          <color>#7d0a4d</color>
          <type>any</type>
          <attributes>
            <attribute><name>model</name><values>a
b</values></attribute>
          </attributes>
        </label>
      </labels>
      {size}
    </task>
    <dumped>2025-07-31 09:54:02.094247+00:00</dumped>
  </meta>
{content}</annotations>
"""


def labelme_shape(label: str, points: list[list[float]], kind: str | None = "rectangle") -> dict[str, Any]:
    shape = {"label": label, "points": points, "group_id": None, "description": "", "shape_type": kind, "flags": {}}
    return {key: value for key, value in shape.items() if key != "shape_type" or value is not None}


def labelme_file(path: Path, image_path: str | None, *shapes: dict[str, Any], **fields: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": image_path, "imageData": None,
        "imageHeight": HEIGHT, "imageWidth": WIDTH, **fields,
    }  # fmt: skip
    path.write_text(json.dumps(content, indent=2))


def region(label: str | None, x: float, y: float, width: float, height: float, **fields: Any) -> dict[str, Any]:
    """A rectangle of Label Studio; x, y, width, height in percent."""
    value = {"x": x, "y": y, "width": width, "height": height, "rotation": fields.pop("rotation", 0)}
    return {
        "original_width": WIDTH, "original_height": HEIGHT, "image_rotation": 0,
        "value": value | ({} if label is None else {"rectanglelabels": [label]}), "id": fields.pop("id", "C7oHaRDVVC"),
        "from_name": "label", "to_name": "image", "type": "rectanglelabels", "origin": "manual", **fields,
    }  # fmt: skip


def task(number: int, image: str, *results: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A task of Label Studio with an annotation per result."""
    annotations = [
        {"id": k, "completed_by": 1, "result": result, "was_cancelled": False, "ground_truth": False}
        for k, result in enumerate(results)
    ]
    return {
        "id": number, "annotations": annotations, "file_upload": image.rpartition("/")[2], "drafts": [],
        "predictions": [], "data": {"image": image}, "meta": {}, "inner_id": number, "project": 1, **fields,
    }  # fmt: skip


OPEN_IMAGES_HEADER = (
    "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside"
)


def open_images_row(image_id: str, label: str, x1: float, y1: float, x2: float, y2: float, *, is_group: int = 0) -> str:
    return f"{image_id},xclick,{label},1,{x1:.9g},{x2:.9g},{y1:.9g},{y2:.9g},0,1,{is_group},0,0"


def open_images_table(path: Path, *rows: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([OPEN_IMAGES_HEADER, *rows]) + "\n")
