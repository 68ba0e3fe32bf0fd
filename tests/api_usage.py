"""What a type checker sees of stoker in Python: `make check` runs mypy on this file, nothing runs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import assert_type

import numpy as np
from PIL import Image

import stoker

result = stoker.train(
    "images", epochs=12, weights="imagenet", image_size=(320, 320), batch_size=8, run_dir=Path("runs/one")
)
assert_type(result, stoker.Result)
assert_type(result.metrics.ap50, float | None)

model = stoker.load(result.run, device="cpu")
assert_type(model, stoker.Model)
predictions = model.predict(["a.jpg", Path("b.png"), np.zeros((8, 8, 3), np.uint8), Image.new("RGB", (8, 8))], conf=0.5)
assert_type(predictions, list[stoker.Prediction])
assert_type(predictions[0].names, list[str])
assert_type(predictions[0][0].name, str)
assert_type(predictions[0][:2], stoker.Prediction)
assert_type(model.names, dict[int, str])
assert_type(model("a.jpg", classes=["dog"], max_det=5), list[stoker.Prediction])
assert_type(model.predict("clip.mp4", stream=True), Iterator[stoker.Prediction])
assert_type(model.evaluate(split="test"), stoker.Metrics)

stoker.train("images", batch_size="8")  # type: ignore[arg-type]
stoker.train("images", batchsize=8)  # type: ignore[call-arg]
stoker.train("images", resize="stretch")  # type: ignore[arg-type]
model.predict("a.jpg", max_dets=5)  # type: ignore[call-overload]
