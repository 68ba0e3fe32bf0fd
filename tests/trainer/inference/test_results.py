"""What `Model.predict` takes and gives: inputs, choices of boxes, forms for other programs, files beside the images."""

import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.models.detection import SSDLite320_MobileNet_V3_Large_Weights

from stoker.data import remote
from stoker.evaluation.coco import match_detections
from stoker.evaluation.draw import find_label_place
from stoker.evaluation.error_analysis import best_threshold
from stoker.inference.model import Model, load
from stoker.inference.prediction import Prediction
from stoker_watch.errors import DataError, PreflightError, UsageError, WeightsError
from tests.fixtures.evaluation_evaluate import random_case
from tests.trainer.inference.pretrained import write_weights
from tests.trainer.inference.test_predict import CARD, CPU, BrightObjectDetector, lamp

PIXELS = np.zeros((60, 80, 3), np.uint8)
PIXELS[10:40, 20:60] = 255


def double(**changes: Any) -> Model:
    """A model that finds what is white."""
    fields = {"source": Path("m"), "weights": Path("m"), "class_names": CARD.class_names, "image_size": CARD.image_size,
              "conf": 0.3, "conf_origin": "", "_metadata": CARD, "_detector": BrightObjectDetector(), "_device": CPU,
              "_precision": "fp32"}  # fmt: skip
    return Model(**(fields | changes))


def prediction(n: int = 3) -> Prediction:
    boxes = np.array([[4, 5, 30, 40], [10, 10, 20, 30], [0, 0, 80, 60]], np.float32)[:n]
    labels, scores = np.array([1, 0, 1])[:n], np.array([0.9, 0.6, 0.4], np.float32)[:n]
    names = ("<b>car</b>", "bus")
    return Prediction(
        original_size=(60, 80), boxes=boxes, scores=scores, labels=labels, _source=PIXELS, _class_names=names
    )


def test_a_prediction_is_a_sequence_of_objects() -> None:
    one = prediction()
    assert len(one) == len(list(one)) == 3
    assert one.names == ["bus", "<b>car</b>", "bus"]
    assert [(found.name, found.label, round(found.score, 2)) for found in one][1] == ("<b>car</b>", 0, 0.6)
    assert one[-1].box.tolist() == [0, 0, 80, 60]
    for chosen in (one[one.scores > 0.5], one[:2], one[[0, 1]], one[np.array([True, True, False])]):
        assert (chosen.names, chosen.boxes.tolist()) == (["bus", "<b>car</b>"], one.boxes[:2].tolist())
    with pytest.raises(IndexError):
        one[3]
    assert str(one) == "bus 2, <b>car</b> 1"
    assert (len(one[:0]), str(one[:0])) == (0, "nothing")


def test_forms_for_other_programs(tmp_path: Path) -> None:
    one = prediction()
    assert one.to_coco(7)[0] == {
        "image_id": 7, "category_id": 2, "bbox": [4, 5, 26, 35], "score": pytest.approx(0.9),
    }  # fmt: skip
    assert [row["category_id"] for row in one.to_coco(0, category_ids=[90, 3])] == [3, 90, 3]
    assert json.loads(json.dumps(one.to_dict()))["detections"][1] == {
        "label": 0, "class": "<b>car</b>", "score": 0.6, "box": [10, 10, 20, 30],
    }  # fmt: skip
    assert "&lt;b&gt;car" in one._repr_html_()
    assert "<b>" not in one._repr_html_()
    one.save(tmp_path / "new" / "one.png")
    assert Image.open(tmp_path / "new" / "one.png").size == one.draw().size
    with pytest.raises(UsageError, match="suffix"):
        one.save(tmp_path / "one.mp3")


def test_packages_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, call in (("pandas", prediction().to_pandas), ("supervision", prediction().to_supervision)):
        monkeypatch.setitem(__import__("sys").modules, name, None)
        with pytest.raises(PreflightError, match=f"pip install {name}"):
            call()


@pytest.mark.parametrize("n", [0, 3])
def test_supervision_and_pandas_read_it(n: int) -> None:
    supervision = pytest.importorskip("supervision", reason="the package supervision is not installed")
    one = prediction(n)
    detections = one.to_supervision()
    assert detections.xyxy.tolist() == one.boxes.tolist()
    assert detections.class_id.tolist() == one.labels.tolist()
    assert detections["class_name"].tolist() == one.names
    assert len(detections.with_nms(0.5, class_agnostic=True)) <= n
    drawn = supervision.LabelAnnotator().annotate(PIXELS.copy(), detections)
    assert (drawn != PIXELS).any() == (n > 0)
    pytest.importorskip("pandas", reason="the package pandas is not installed")
    table = one.to_pandas()
    assert list(table.columns) == ["xmin", "ymin", "xmax", "ymax", "score", "label", "name"]
    assert table["name"].tolist() == one.names


def test_every_kind_of_input_finds_the_same(tmp_path: Path) -> None:
    model = double()
    gray, tensor = PIXELS[..., 0], torch.from_numpy(PIXELS).movedim(-1, 0)
    (tmp_path / "in").mkdir()
    Image.fromarray(PIXELS).save(tmp_path / "in" / "one.png")
    deep = Image.fromarray(gray.astype(np.uint16) * 257)
    assert deep.mode.startswith("I;16")
    given = [PIXELS, gray, gray[..., None], np.dstack([PIXELS, gray]), tensor, tensor[None], tensor / 255, tensor[:1],
             (tensor / 255).to(torch.bfloat16), Image.fromarray(PIXELS), deep, Image.fromarray(gray).convert("P"),
             tmp_path / "in" / "one.png", str(tmp_path / "in"), str(tmp_path / "in" / "*.png"), (PIXELS,),
             iter([PIXELS])]  # fmt: skip
    for image in given:
        (one,) = model(image)
        assert one.boxes.round().tolist() == [[20, 10, 60, 40]], type(image)
        assert one.original_size == (60, 80)
    assert len(model([PIXELS, np.stack([PIXELS] * 3), str(tmp_path / "in"), tensor[None].repeat(2, 1, 1, 1)])) == 7
    for wrong in (
        tensor.float(),
        np.zeros((3, 60, 80), np.uint8),
        PIXELS.astype(np.uint16),
        PIXELS[:0],
        torch.zeros(0),
    ):
        with pytest.raises(UsageError, match="is not an image"):
            model.predict(wrong)


def test_opencv_images_are_bgr() -> None:
    seen: list[np.ndarray[Any, Any]] = []

    class Recorder(BrightObjectDetector):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images[0, :, 0, 0].numpy().copy())
            return super().forward(images)

    red = np.full((60, 80, 3), (250, 20, 10), np.uint8)
    model = double(_detector=Recorder())
    for image, bgr in (
        (red, False),
        (red[..., ::-1], True),
        (torch.from_numpy(red[..., ::-1].copy()).movedim(-1, 0), True),
    ):
        model.predict(image, bgr=bgr)
    assert [pixel.tolist() for pixel in seen] == [[250, 20, 10]] * 3


def test_a_stream_is_read_as_it_is_needed() -> None:
    taken = itertools.count()
    endless = (PIXELS for _ in taken)
    found = double().predict(endless, stream=True, batch_size=2)
    assert [len(next(found)) for _ in range(5)] == [1] * 5
    assert next(taken) < 30


class ManyBoxes(BrightObjectDetector):
    """A grid of 400 small boxes of two classes; each has its twin in the other class."""

    def decode(self, raw: torch.Tensor, *_: Any, max_detections: int = 100, **__: Any) -> Any:
        n = torch.arange(400)
        corners = torch.stack([n // 2 % 20, n // 40], 1) * 4.0
        boxes = torch.cat([corners, corners + 4], 1).expand(len(raw), -1, -1)[:, :max_detections]
        scores = (1 - n / 800).expand(len(raw), -1)[:, :max_detections]
        return type(super().decode(raw, *_, score_threshold=0, iou_threshold=0))(
            boxes, scores, (n % 2).expand(len(raw), -1)[:, :max_detections], scores > 0
        )


def test_choosing_boxes() -> None:
    model = double(_detector=ManyBoxes())

    def labels(**options: Any) -> list[int]:
        (one,) = model.predict(PIXELS, **options)
        assert (np.diff(one.scores) <= 0).all()
        return one.labels.tolist()

    assert len(labels()) == 100, "COCO's maximum, as before"
    assert len(labels(max_det=300)) == 300
    assert labels(max_det=3) == [0, 1, 0]
    assert labels(classes=["spare"]) == [1] * 200, "all of the class, not those among the first hundred"
    assert labels(classes=[0, "spare"], max_det=7) == labels(max_det=7)
    assert labels(agnostic_nms=True) == [0] * 200
    for options, words in ({"classes": ["lmap"]}, "lamp"), ({"classes": [2]}, "spare"), ({"max_det": 0}, "1 … 1,000"):
        with pytest.raises(UsageError, match=words):
            labels(**options)  # type: ignore[arg-type]


def test_files_beside_the_images_stay_in_the_folder(tmp_path: Path) -> None:
    for name in ("a/shot.png", "b/shot.png", "c/shot.jpg", "c/dark.png"):
        lamp(tmp_path / "in" / name, (60, 80), None if "dark" in name else (20, 10, 60, 40))
    for n, evil in enumerate(("..", "../../up", "/root/x", "é" * 300, "a\nb")):
        model, out = double(class_names=(evil, "spare")), tmp_path / "deep" / f"out{n}"
        lines = list(model.predict_to_dir([str(tmp_path / "in")], out, save_txt=True, save_crop=True))
        assert len(lines) == 5
        written = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
        assert len(written) == 4 + 4 + 3 + 1, written
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {f"out{n}" for n in range(5)}
    labels = sorted(path.name for path in (out / "labels").iterdir())
    assert labels == ["a_shot.txt", "b_shot.txt", "dark.txt", "shot.txt"]
    assert (out / "labels/dark.txt").read_text() == ""
    label, *box = (out / "labels/a_shot.txt").read_text().split()
    assert label == "0"
    assert [float(x) for x in box] == pytest.approx([0.5, 25 / 60, 0.5, 0.5], abs=0.01)
    (crop,) = (out / "crops").rglob("a_shot-1.jpg")
    assert np.asarray(Image.open(crop)).mean() > 230
    assert abs(Image.open(crop).width - 40) <= 2


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_labels_do_not_overlap_and_are_inside(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = (int(rng.integers(20, 800)), int(rng.integers(20, 800)))
    taken = np.zeros((0, 4))
    for n in range(40):
        corner = rng.uniform(-20, size)
        box = (*corner, *(corner + rng.uniform(1, 300, 2)))
        label = (float(rng.integers(5, 90)), float(rng.integers(5, 20)))
        place = find_label_place(box, label, size, taken)  # type: ignore[arg-type]
        assert n > 0 or place is not None or label[0] > size[0], "the first has room"
        if place is None:
            continue
        assert (place >= 0).all()
        assert (place[2:] <= size).all()
        assert (place[2:] - place[:2]).tolist() == list(label)
        over = (np.minimum(place[2:], taken[:, 2:]) - np.maximum(place[:2], taken[:, :2])).clip(0)
        assert over.prod(1).sum() == 0
        taken = np.concatenate([taken, place[None]])


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), images=st.integers(1, 6), class_count=st.integers(1, 3))
def test_the_threshold_has_the_best_f1(seed: int, images: int, class_count: int) -> None:
    gt, found = random_case(seed, images, class_count)
    matches = match_detections(gt, found)
    score, gt_index = found.score[matches.order], matches.gt_index
    boxes = int((~gt.crowd).sum())

    def f1(threshold: float) -> float:
        tp, fp = (int(((score >= threshold) & kind).sum()) for kind in (gt_index >= 0, gt_index == -1))
        return 2 * tp / (tp + fp + boxes)

    best = best_threshold(gt, found, matches)
    if best is None:
        assert not (gt_index >= 0).any()
    else:
        assert f1(best) == pytest.approx(max(f1(float(s)) for s in score), abs=1e-12)


# Images at URLs


class WebServer(BaseHTTPRequestHandler):
    image, is_over = b"", threading.Event()

    def do_GET(self) -> None:
        if "missing" in self.path:
            self.send_error(404)
            return
        self.send_response(302 if "moved" in self.path else 200)
        if "moved" in self.path:
            self.send_header("Location", "/a.png")
        self.end_headers()  # without a length
        if "slow" in self.path:
            while not self.is_over.is_set():
                self.wfile.write(b"\0")
                self.is_over.wait(0.01)
        self.wfile.write(self.image if "dark" not in self.path else b"no image")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    encoded = cv2.imencode(".png", PIXELS)[1].tobytes()
    WebServer.image = encoded
    WebServer.is_over.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), WebServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        WebServer.is_over.set()
        server.shutdown()
        thread.join()


def test_images_at_urls(address: str, tmp_path: Path) -> None:
    urls = [f"{address}/{name}" for name in ("a.png", "a.png?w=640&sig=$secret", "a%20b%2Fc.png", "moved", "é?x=1#top")]
    for one in double().predict(urls):
        assert one.boxes.round().tolist() == [[20, 10, 60, 40]]
        assert one.draw().size == (320, 240)
        assert one.to_dict()["path"].startswith(f"{address}/")
        assert "secret" not in str(one.to_dict())
    lines = list(double().predict_to_dir(urls[:2], tmp_path / "out"))
    assert lines[:2] == [f"{address}/a.png: lamp 1"] * 2
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {"a.png", "a-2.png"} or len(lines) == 3


@pytest.mark.parametrize(
    ("name", "limits", "words"),
    [
        ("missing.png", {}, "404"),
        ("", {}, "lists no folders"),
        ("dark.png", {}, "dark.png"),
        ("a.png", {"MAX_DOWNLOAD_BYTES": 50}, "more than 50 bytes"),
        ("slow.png", {"DOWNLOAD_TIMEOUT_S": 0.2}, "0.2 s"),
        ("slow.png", {"MAX_DOWNLOAD_BYTES": 20}, "more than 20 bytes"),
    ],
)
def test_a_download_has_limits(
    name: str, limits: dict[str, float], words: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, value in limits.items():
        monkeypatch.setattr(remote, limit, value)
    with pytest.raises(DataError, match=words):
        double().predict(f"{address}/{name}")


# Models by name


def test_a_model_by_its_name_is_torchvisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_WEIGHTS_DIR", str(tmp_path))
    reference = write_weights(tmp_path, "ssdlite320_mobilenet_v3_large").state_dict()
    model = load("ssdlite320_mobilenet_v3_large", device="cpu")
    assert (model.names[0], model.names[79], len(model.names)) == ("person", "toothbrush", 80)
    categories = SSDLite320_MobileNet_V3_Large_Weights.COCO_V1.meta["categories"]
    own = model._detector.state_dict()  # type: ignore[attr-defined]
    heads = [name for name in own if reference[name].shape != own[name].shape]
    assert heads
    for name in heads:
        theirs, ours = (head.unflatten(0, (-1, size)) for head, size in ((reference[name], 91), (own[name], 81)))
        channels = [0, *(categories.index(model.names[label]) for label in range(80))]
        assert torch.equal(ours, theirs[:, channels])
    assert all(torch.equal(own[name], reference[name]) for name in own if name not in heads)
    (found,) = model.predict(PIXELS, conf=0.0, max_det=20)
    assert len(found) == 20


def test_an_option_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'max_det'"):
        double().predict(PIXELS, max_dets=2)  # type: ignore[call-overload]


def test_names_that_are_no_model() -> None:
    with pytest.raises(WeightsError, match="no COCO weights for ember_n") as caught:
        load("ember_n")
    assert "ssd300_vgg16" in str(caught.value)
    with pytest.raises(WeightsError, match="retinanet_resnet50_fpn"):
        load("retinanet_resnet_50")


def test_a_folder_with_the_name_of_a_model_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ssd300_vgg16").mkdir()
    with pytest.raises(WeightsError, match="neither best"):
        load("ssd300_vgg16")
