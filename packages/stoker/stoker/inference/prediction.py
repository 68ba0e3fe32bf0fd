"""The detections in an image, as `Model.predict` gives them, and as other programs read them.

`predict.py` makes them; `evaluation/draw.py` draws them. Packages of others are imported by the method that needs them.
"""

import base64
import dataclasses
import html
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.images.source import display_path
from stoker.evaluation.detections import Detections, boxes_in_image
from stoker.evaluation.draw import IMAGE_SUFFIXES, draw_boxes, save_image
from stoker.inference.image_batches import ImageSource, load_pixels
from stoker_watch.errors import DataError, UsageError, needs_package


class Detection(NamedTuple):
    """An object in an image; box: [4], xyxy in pixels of the upright image; score: 0 … 1; name: of the class."""

    box: NDArray[np.float32]
    score: float
    label: int
    name: str


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Prediction:
    """The n detections in an image or a frame of a video, best score first.

    `len(prediction)` is n, `prediction[0]` and iteration give a `Detection`; a slice, a mask or indices, such as
    `prediction[prediction.scores > 0.5]`, give a `Prediction` of these.
    """

    original_size: tuple[int, int]
    """Height and width of the image, upright by EXIF; zeros if it could not be read."""
    boxes: NDArray[np.float32]
    """[n, 4], xyxy in pixels of the upright image."""
    scores: NDArray[np.float32]
    """[n], 0 … 1."""
    labels: NDArray[np.int64]
    """[n], indices into the model's `class_names`."""
    error: DataError | None = None
    """The error of reading the image, which `Model.predict` raises."""
    _source: ImageSource = dataclasses.field(repr=False)
    _class_names: Sequence[str] = dataclasses.field(repr=False)

    @property
    def path(self) -> Path | None:
        """The file of the image or video, or its stub file for an image in a bucket; None for pixels."""
        return self._source if isinstance(self._source, Path) else getattr(self._source, "path", None)

    @property
    def frame(self) -> int | None:
        """The number of the frame in its video, from 0; None for an image."""
        return getattr(self._source, "number", None)

    @property
    def time_s(self) -> float | None:
        """Seconds from the start of the video."""
        return getattr(self._source, "time_s", None)

    @property
    def names(self) -> list[str]:
        """[n], class names."""
        return [self._class_names[label] for label in self.labels.tolist()]

    @property
    def detections(self) -> Detections:
        """The same as columns, as in an evaluation."""
        return boxes_in_image(self.boxes, self.labels, self.scores)

    def __len__(self) -> int:
        return len(self.labels)

    @overload
    def __getitem__(self, item: int) -> Detection: ...
    @overload
    def __getitem__(self, item: slice | Sequence[int] | NDArray[Any]) -> "Prediction": ...
    def __getitem__(self, item: int | slice | Sequence[int] | NDArray[Any]) -> "Detection | Prediction":
        if isinstance(item, int | np.integer):
            return Detection(self.boxes[item], float(self.scores[item]), int(self.labels[item]), self.names[item])
        rows = np.arange(len(self))[item]
        return dataclasses.replace(self, boxes=self.boxes[rows], scores=self.scores[rows], labels=self.labels[rows])

    def __iter__(self) -> Iterator[Detection]:
        return (self[n] for n in range(len(self)))

    def __str__(self) -> str:
        """For example "car 3, bus 1", or "nothing"."""
        return ", ".join(f"{name} {count}" for name, count in Counter(self.names).most_common()) or "nothing"

    def to_dict(self) -> dict[str, Any]:
        """As in predictions.json: path, width, height, detections; of a frame also its number and time; `error` if the
        image could not be read."""
        columns = zip(self.labels.tolist(), self.names, self.scores.tolist(), self.boxes.tolist(), strict=True)
        entry: dict[str, Any] = {
            "path": None if self.path is None else display_path(self.path),
            "width": self.original_size[1],
            "height": self.original_size[0],
            "detections": [
                {"label": label, "class": name, "score": round(score, 4), "box": [round(x, 2) for x in box]}
                for label, name, score, box in columns
            ],
        }
        if self.time_s is not None:
            entry |= {"frame": self.frame, "time_s": round(self.time_s, 3)}
        return entry if self.error is None else entry | {"error": str(self.error)}

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with a row for each object: xmin, ymin, xmax, ymax, score, label, name."""
        with needs_package("pandas", "Prediction.to_pandas()"):
            import pandas
        boxes = dict(zip(("xmin", "ymin", "xmax", "ymax"), self.boxes.T, strict=True))
        return pandas.DataFrame({**boxes, "score": self.scores, "label": self.labels, "name": self.names})

    def to_coco(self, image_id: int = 0, category_ids: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """COCO's results format: image_id, category_id, bbox (x, y, width, height) and score of each object.

        category_ids: [C], the category id of each label; default: 1 … C, as `stoker data convert` writes them.
        """
        ids = range(1, len(self._class_names) + 1) if category_ids is None else category_ids
        corners = np.concatenate([self.boxes[:, :2], self.boxes[:, 2:] - self.boxes[:, :2]], axis=1).tolist()
        return [
            {"image_id": image_id, "category_id": ids[found.label], "bbox": box, "score": found.score}
            for found, box in zip(self, corners, strict=True)
        ]

    def to_supervision(self) -> Any:
        """`supervision.Detections`, for the annotators of that package, trackers, and what else reads them."""
        with needs_package("supervision", "Prediction.to_supervision()"):
            import supervision
        data = {"class_name": np.array(self.names, dtype=str)}
        return supervision.Detections(xyxy=self.boxes, confidence=self.scores, class_id=self.labels, data=data)

    def load_image(self) -> Image.Image:
        """The image, RGB, upright. Raises DataError if its file does not exist anymore."""
        return Image.fromarray(load_pixels(self._source))

    def draw(self) -> Image.Image:
        """The image with boxes, RGB; small images are enlarged. Raises as `load_image`."""
        return draw_boxes(self.load_image(), self.detections, self._class_names)

    def plot(self) -> NDArray[np.uint8]:
        """The same as pixels, uint8 [h, w, 3], BGR as OpenCV takes them and `plot` of Ultralytics gives them."""
        return np.ascontiguousarray(np.asarray(self.draw())[..., ::-1])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the image with boxes, in the format of the file's suffix. Raises UsageError for another suffix,
        StorageError."""
        target = Path(path)
        if target.suffix.lower() not in IMAGE_SUFFIXES:
            raise UsageError("The file's suffix is not that of an image.", location=target, choices=IMAGE_SUFFIXES)
        save_image(self.draw(), target, fix="name another file")

    def _repr_html_(self) -> str:
        """The image with boxes, for a notebook."""
        image, encoded = self.draw(), io.BytesIO()
        image.thumbnail((1024, 1024))
        image.save(encoded, "JPEG", quality=85)
        data = base64.b64encode(encoded.getvalue()).decode()
        return f'<img src="data:image/jpeg;base64,{data}"><br>{html.escape(str(self))}'
