"""stoker in Python: train, load, predict, evaluate do what the commands do."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import stoker
import stoker_watch
from stoker.config.settings import from_fields, from_toml
from stoker_watch.cli.app import app
from stoker_watch.errors import ConfigError, DataError, UsageError
from stoker_watch.runs.records import CONFIG, EVENTS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from tests.drawn import CLASSES, draw

SMALL = {"max_duration": "6", "batch_size": 4, "image_size": (64, 64), "eval_every": "0", "precision": "fp32"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.fixture(scope="module")
def result(data: Path, tmp_path_factory: pytest.TempPathFactory) -> stoker.Result:
    return stoker.train(data, run_dir=tmp_path_factory.mktemp("runs") / "one", **SMALL)


@pytest.fixture(scope="module")
def model(result: stoker.Result) -> stoker.Model:
    return stoker.load(result.run, device="cpu")


def test_a_loop_is_measured_by_stoker_watch() -> None:
    assert stoker.measure is stoker_watch.measure


def test_training_returns_its_run_and_scores(result: stoker.Result):
    assert result.steps == 6
    assert (result.run / CONFIG).exists()
    assert result.metrics.ap is not None


def test_the_function_and_the_command_settle_the_same(result: stoker.Result, data: Path, tmp_path: Path):
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}",
             *(map(str, value) if isinstance(value, tuple) else (str(value),)))]  # fmt: skip
    app(["train", str(data), "--run-dir", str(tmp_path / "two"), *flags], result_action="return_value")
    assert from_toml(tmp_path / "two" / CONFIG) == from_toml(result.run / CONFIG)


def test_callbacks_get_each_record_and_one_that_fails_stops_nothing(data: Path, tmp_path: Path):
    seen: list[object] = []

    def fails(record: object) -> None:
        raise ValueError(type(record).__name__)

    made = stoker.train(
        data, run_dir=tmp_path / "run", callbacks=[seen.append, fails], **(SMALL | {"max_duration": "2"})
    )
    events = [record for record in seen if isinstance(record, Event)]
    assert [event.kind for event in events if event.kind in ("started", "evaluated", "finished")] == [
        "started", "evaluated", "finished",
    ]  # fmt: skip
    assert sum(record.window_steps for record in seen if isinstance(record, StepWindow)) == 2
    texts = [event.text for event in read_lines(made.run, EVENTS, Event) if event.kind == "warning"]
    assert [text for text in texts if "callback 2" in text and "ValueError" in text]
    assert not [text for text in texts if "callback 1" in text]
    with pytest.raises(UsageError, match="Callbacks"):
        stoker.train(data, devices=2, callbacks=[seen.append])


def test_evaluate_and_export_are_the_commands(result: stoker.Result, model: stoker.Model, tmp_path: Path):
    assert stoker.evaluate(result.run, device="cpu") == model.evaluate()
    pytest.importorskip("onnxruntime")
    written = stoker.export_model(result.run, out=tmp_path / "model.onnx")
    assert written == tmp_path / "model.onnx"
    assert stoker.load(written).class_names == model.class_names


def test_source_is_images_and_plot_is_draw_in_bgr(model: stoker.Model, data: Path):
    image = next(data.rglob("*.jpg"), None) or next(data.rglob("*.png"))
    (by_name,), (by_place,) = model.predict(source=image, conf=0.0), model.predict(image, conf=0.0)
    assert np.array_equal(by_name.boxes, by_place.boxes)
    assert np.array_equal(by_name.plot()[..., ::-1], np.asarray(by_name.draw()))
    for given in ({}, {"images": image, "source": image}):
        with pytest.raises(UsageError, match="takes images"):
            model.predict(**given)


def test_an_unfinished_run_is_resumed_and_a_finished_one_is_not(result: stoker.Result):
    with pytest.raises(UsageError, match="finished"):
        stoker.train(resume=result.run)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lrs": 1}, "did you mean `--lr`?"),
        ({"batch_size": "eight"}, "--batch-size 'eight'"),
        ({"resize": "stretch"}, "letterbox, squash"),
        ({"image_size": (100, 100)}, "multiples of 32"),
    ],
)
def test_wrong_settings_are_named(data: Path, settings: dict[str, object], words: str):
    with pytest.raises(ConfigError) as caught:
        stoker.train(data, **settings)
    assert words in str(caught.value)


def test_training_needs_data():
    with pytest.raises(UsageError, match="trained on"):
        stoker.train()


def test_any_way_to_give_a_picture_finds_the_same(model: stoker.Model, data: Path, tmp_path: Path):
    path = tmp_path / "one.png"
    image = Image.open(next((data / "valid").glob("*.jpg")))
    image.save(path)
    pixels = np.asarray(image)
    answers = [model.predict(given, conf=0.01) for given in (path, str(path), pixels, image, [path], (pixels,))]
    assert all(len(answer) == 1 for answer in answers)
    first = answers[0][0]
    assert first.original_size == pixels.shape[:2]
    assert len(first.boxes) == len(first.scores) == len(first.labels) == len(first.names) > 0
    assert first.boxes.shape == (len(first.labels), 4)
    assert set(first.names) <= set(CLASSES) == set(model.class_names)
    assert (np.diff(first.scores) <= 0).all()
    for (other,) in answers[1:]:
        np.testing.assert_allclose(other.boxes, first.boxes, atol=0.1)
        np.testing.assert_array_equal(other.labels, first.labels)
    assert [answer[0].path for answer in answers] == [path, path, None, None, path, None]


def test_many_pictures_come_back_in_order(model: stoker.Model, data: Path):
    paths = sorted((data / "train").glob("*.jpg"))[:5]
    together = model.predict(paths, conf=0.01, batch_size=2)
    assert [one.path for one in together] == paths
    for path, one in zip(paths, together, strict=True):
        np.testing.assert_allclose(one.boxes, model.predict(path, conf=0.01)[0].boxes, atol=1e-3)
    assert model.predict([]) == []


def test_pixels_in_tiles_are_the_file_in_tiles(model: stoker.Model, tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 255, (150, 200, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.png")
    asked = {"conf": 0.0, "tile": 96, "tile_overlap": 0.3}
    (from_pixels,), (from_file,) = model.predict(pixels, **asked), model.predict(tmp_path / "large.png", **asked)
    np.testing.assert_array_equal(from_pixels.boxes, from_file.boxes)
    assert len(from_pixels.boxes) > 0


def test_a_turned_picture_is_seen_upright(model: stoker.Model, data: Path, tmp_path: Path):
    image = Image.open(next((data / "valid").glob("*.jpg"))).crop((0, 0, 64, 40))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    turned = Image.open(tmp_path / "turned.png")
    (from_file,), (from_image,) = model.predict(tmp_path / "turned.png", conf=0.0), model.predict(turned, conf=0.0)
    assert from_file.original_size == from_image.original_size == (64, 40)
    np.testing.assert_array_equal(from_file.boxes, from_image.boxes)


def test_a_prediction_draws_itself(model: stoker.Model, data: Path):
    path = next((data / "valid").glob("*.jpg"))
    (one,) = model.predict(path, conf=0.0)
    drawn, plain = one.draw(), one[:0].draw()
    assert drawn.size == plain.size
    assert np.asarray(drawn).tobytes() != np.asarray(plain).tobytes()


@pytest.mark.parametrize("size", [(20, 64), (64, 20), (1, 300), (3, 3)])
def test_boxes_have_an_area_inside_the_picture(model: stoker.Model, size: tuple[int, int]):
    """The padding is full of anchors; what is found there alone would be a line along the picture's edge."""
    pixels = np.random.default_rng(1).integers(0, 255, (*size, 3), np.uint8)
    (found,) = model.predict(pixels, conf=0.0, iou=1.0)
    assert len(found.boxes)
    assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()
    assert (found.boxes >= 0).all()
    assert (found.boxes[:, 2:] <= size[::-1]).all()


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_without_images_is_refused(model: stoker.Model, batch: int):
    with pytest.raises(UsageError, match="batch_size="):
        model.predict(np.zeros((4, 4, 3), np.uint8), batch_size=batch)


def test_numbers_of_numpy_are_numbers():
    asked = from_fields({"batch_size": np.int64(4), "lr": np.float32(0.5), "scale_jitter_prob": np.float64(0.25)})
    assert asked == from_fields({"batch_size": 4, "lr": 0.5, "scale_jitter_prob": 0.25})


@pytest.mark.parametrize(
    ("image", "kind", "words"),
    [
        (b"bytes", UsageError, "type bytes is not an image"),
        ("docs/decisions", UsageError, "There are no images at"),
        (np.zeros((3, 5, 5), np.uint8), UsageError, "uint8 [h, w, 3], RGB"),
        (np.zeros((4, 4, 3), np.float32), UsageError, "float32"),
        (7, UsageError, "type int is not an image"),
        ("nowhere.jpg", DataError, "nowhere.jpg"),
    ],
)
def test_what_is_no_picture_is_refused(model: stoker.Model, image: object, kind: type[Exception], words: str):
    with pytest.raises(kind) as caught:
        model.predict([image])
    assert words in str(caught.value)


def test_scores_of_a_loaded_model_are_those_of_its_run(model: stoker.Model, result: stoker.Result, data: Path):
    assert model.evaluate().ap == pytest.approx(result.metrics.ap, abs=1e-6)
    assert model.evaluate(data, split="train", batch_size=3).ap is not None


def test_importing_stoker_is_light_and_works_where_torch_is_absent():
    code = "import sys, stoker; from stoker import StokerError, Metrics; print([m for m in sys.modules if m in "
    code += "('torch', 'torchvision', 'cv2', 'pyarrow')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_an_unknown_name_says_which_there_are():
    with pytest.raises(AttributeError, match="train"):
        stoker.trian  # noqa: B018


def test_the_result_of_predict_is_what_the_command_writes(model: stoker.Model, data: Path, tmp_path: Path):
    path = next((data / "valid").glob("*.jpg"))
    list(model.predict_to_dir([str(path)], tmp_path / "out", conf=0.01))
    (entry,) = json.loads((tmp_path / "out" / "predictions.json").read_text())
    (one,) = model.predict(path, conf=0.01)
    assert [found["class"] for found in entry["detections"]] == one.names


def test_the_version_is_that_of_the_package() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", stoker.__version__)
