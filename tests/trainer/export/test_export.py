"""write.py, graph.py, programs.py, parity.py, runtime.py: the file finds what the model finds, or there is no file.

The model has random weights, large enough that it finds hundreds of overlapping boxes: NMS has much to do.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from stoker import models
from stoker.config.settings import Config, to_toml
from stoker.export import graph, parity, programs, write
from stoker.inference.runtime import OnnxModel
from stoker.models.layers.postprocess import BatchDetections
from stoker.models.table import MODELS
from stoker.models.weights import model_file
from stoker_watch.cli import app
from stoker_watch.errors import ParityError
from tests.drawn import CLASSES, draw

IMAGE_SIZE = (96, 128)
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "export.md"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stoker(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """A command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            app.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def lively(seed: int = 0) -> tuple[models.Detector, model_file.ModelMetadata]:
    """A tiny model that finds much in every image, and nothing of sense."""
    chosen = MODELS["retinanet_tiny_fpn"].defaults
    config = Config().replace(model="retinanet_tiny_fpn", weights="none", **chosen)
    torch.manual_seed(seed)
    model = models.build(config.model, len(CLASSES))
    for name, last, std in (("classification_head", "cls_logits", 0.15), ("regression_head", "bbox_reg", 0.03)):
        torch.nn.init.normal_(model.head[name].get_submodule(last).weight, std=std)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.from_numpy(random_images(2, seed)))  # the norms learn what the images are like
    model.eval()
    return model, model_file.ModelMetadata(
        settings=config.model, class_names=CLASSES, image_size=IMAGE_SIZE, resize="letterbox", step=7, threshold=0.4251
    )


def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the weights: only in a text `$` and `~` are replaced."""
    monkeypatch.setenv("BUCKET", "gs://bucket/run")
    monkeypatch.chdir(tmp_path)
    for run in (Path("$UNSET-by-anyone"), Path("$BUCKET")):
        run.mkdir()
        assert write._default_out(run, run / "best.safetensors", run, ".onnx") == run / "best.onnx"
    assert write._default_out("$BUCKET", tmp_path / "best.safetensors", tmp_path, ".onnx") == Path("run.onnx")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "data", train=2, val=10, side=80)


@pytest.fixture(scope="module", autouse=True)
def networks_once() -> Iterator[None]:
    """torch's exporter takes seconds: the same network is asked of it once. All that is done with it is done anew."""
    made: dict[tuple[Any, ...], bytes] = {}
    real = graph.export_network

    def once(model: models.Detector, image_size: tuple[int, int], opset: int) -> Any:
        weights = b"".join(tensor.contiguous().numpy().tobytes() for tensor in model.state_dict().values())
        key = (hashlib.sha256(weights).digest(), image_size, opset)
        if key not in made:
            made[key] = real(model, image_size, opset).SerializeToString()
        return onnx.load_from_string(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "export_network", once)
        yield


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Path:
    """The folder of a run: its settings and its best weights."""
    folder = tmp_path / "run"
    folder.mkdir()
    model, metadata = lively()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "best.safetensors", metadata.header())
    (folder / "config.toml").write_text(to_toml(Config().replace(data=str(data)), {}))
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "best.onnx"
    path.write_bytes(graph.build_onnx(graph.Spec(*lively(), score_threshold=0.05, iou_threshold=0.5)))
    return path


@pytest.fixture(scope="module")
def model() -> models.Detector:
    return lively()[0]


def of_file(file: OnnxModel, images: Any, resized_size: Any, **thresholds: float) -> list[parity.ImageDetections]:
    found = file.run(images, resized_size, **thresholds)
    return [parity.of_image(found, n) for n in range(len(found.boxes))]


def random_images(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, *IMAGE_SIZE), np.uint8)


@pytest.mark.slow
def test_the_command_writes_a_file_that_finds_what_the_model_finds(run: Path, stoker: Run) -> None:
    before = {path.name for path in run.iterdir()}
    code, out, err = stoker("export", run)
    assert (code, err) == (0, ""), err
    lines = out.splitlines()
    assert len(lines) == 2, "and nothing that torch's exporter says to its developers"
    assert lines[0].startswith(f"{run / 'best.onnx'} (")
    message = re.fullmatch(r"parity on 10 images, ([\d,]+) boxes: boxes within (\S+) px, scores within (\S+?)"
                        r"(, \d+ boxes of one only, at a threshold or tie)?; \S+ ms/image in onnxruntime \(\d+ "
                        r"threads\)", lines[1])  # fmt: skip
    assert message, lines[1]
    assert int(message[1].replace(",", "")) > 500
    assert float(message[2]) < 0.01
    assert float(message[3]) < 1e-5
    assert {path.name for path in run.iterdir()} == before | {"best.onnx"}


@pytest.mark.slow
def test_the_file_says_what_it_is_and_nothing_of_the_machine(run: Path, stoker: Run) -> None:
    assert stoker("export", run)[0] == 0
    resized_size = (run / "best.onnx").read_bytes()
    for told in (b"site-packages", b".py", str(Path.home()).encode(), str(run).encode(), b"stack_trace"):
        assert told not in resized_size
    file = onnx.load_from_string(resized_size)
    assert (file.producer_name, file.opset_import[0].version) == ("stoker", 18)
    assert file.ir_version <= 10, "what onnxruntime 1.20 reads"
    session = onnxruntime.InferenceSession(resized_size)
    about = session.get_modelmeta().custom_metadata_map
    assert set(about) == {"class_names", "image_size", "resize", "padding", "weights_sha256", "iou_threshold",
                          "threshold", "stoker"}  # fmt: skip
    section = DOCUMENT.read_text().partition("### Metadata")[2].partition("\n### ")[0]
    assert set(about) == set(re.findall(r"`(\w+)` \(", " ".join(section.split())))
    assert json.loads(about["class_names"]) == list(CLASSES)
    assert json.loads(about["image_size"]) == list(IMAGE_SIZE)
    assert json.loads(about["padding"]) == [124, 116, 104]
    assert about["weights_sha256"] == hashlib.sha256((run / "best.safetensors").read_bytes()).hexdigest()
    assert [given.name for given in session.get_inputs()] == ["images"], "all that must be given"
    assert {given.name for given in session.get_overridable_initializers()} == {
        "content", "score_threshold", "iou_threshold",
    }  # fmt: skip
    assert OnnxModel(run / "best.onnx", num_threads=1).metadata == lively()[1]


@pytest.mark.slow
def test_no_division_of_places_goes_through_float32(exported: Path) -> None:
    """Floats cannot tell places apart from 2^24 on, which 80 classes have on a model input of 1,400 × 1,400."""
    assert "Floor" not in {node.op_type for node in onnx.load(exported).graph.node}


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(1, 4), seed=st.integers(0, 1000), score_threshold=st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
    iou_threshold=st.floats(0.05, 0.95),
    resized_size=st.tuples(st.integers(1, IMAGE_SIZE[0]), st.integers(1, IMAGE_SIZE[1])),
)  # fmt: skip
def test_any_batch_any_thresholds_any_content(
    exported: Path, model: models.Detector, count: int, seed: int, score_threshold: float, iou_threshold: float,
    resized_size: tuple[int, int],
) -> None:  # fmt: skip
    images, inside = random_images(count, seed), np.array([IMAGE_SIZE, resized_size] * 2, np.int32)[:count]
    thresholds = {"score_threshold": score_threshold, "iou_threshold": iou_threshold}
    file = OnnxModel(exported, num_threads=1)
    for n, found in enumerate(of_file(file, images, inside, **thresholds)):
        expected = parity._run_model(model, images[n], inside[n], max_detections=100, **thresholds)
        compared = parity.compare_detections("it", expected, found, max_detections=100, **thresholds)
        parity.require_parity(compared, "it")
        assert compared.max_box_diff_px < 0.01
        assert compared.max_score_diff < 1e-5
        assert compared.num_ties <= 0.1 * max(compared.num_boxes, 20)
        assert (np.diff(found.scores) <= 0).all()


def require_same(outputs: Any, found: BatchDetections) -> None:
    boxes, scores, labels, count = (torch.from_numpy(column) for column in outputs)
    assert torch.equal(found.valid.sum(1), count)
    columns = boxes, scores, labels.clamp(min=0)
    assert all(torch.equal(one, other) for one, other in zip(found[:3], columns, strict=True))


@pytest.mark.slow
def test_what_is_not_given_is_what_was_asked_for_at_the_export(exported: Path) -> None:
    file, images = OnnxModel(exported, num_threads=1), random_images(3, 1)
    session = onnxruntime.InferenceSession(exported)
    boxes, scores, labels, count = session.run(None, {"images": images})
    full = file.run(images, np.array([IMAGE_SIZE] * 3), score_threshold=0.05, iou_threshold=0.5)
    require_same((boxes, scores, labels, count), full)
    one_for_all = session.run(None, {"images": images, "content": np.array([[50, 60]], np.int32)})
    full = file.run(images, np.array([(50, 60)] * 3), score_threshold=0.05)
    require_same(one_for_all, full)
    assert boxes.shape == (3, 100, 4)
    assert (boxes.dtype, scores.dtype, labels.dtype, count.dtype) == (np.float32, np.float32, np.int64, np.int64)
    empty = session.run(None, {"images": images, "score_threshold": np.array(1, np.float32)})
    assert (empty[3] == 0).all()
    assert (empty[2] == -1).all()
    assert not empty[0].any()
    assert not empty[1].any()


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 21])
def test_a_fixed_batch_other_keys_and_opset(tmp_path: Path, model: models.Detector, opset: int) -> None:
    path, metadata = tmp_path / "four.onnx", lively()[1]
    path.write_bytes(
        graph.build_onnx(
            graph.Spec(
                model, metadata, score_threshold=0.2, iou_threshold=0.3, max_detections=7, opset=opset, batch_size=4
            )
        )
    )
    assert onnx.load(path).opset_import[0].version == opset
    file = OnnxModel(path, num_threads=1)
    assert file.batch_size == 4
    images, inside = random_images(6, 2), np.array([IMAGE_SIZE] * 6, np.int32)
    thresholds = {"score_threshold": 0.2, "iou_threshold": 0.3}
    found = of_file(file, images, inside, score_threshold=0.2)
    assert [len(one.scores) for one in found] == [7] * 6
    for n, one in enumerate(found):
        expected = parity._run_model(model, images[n], inside[n], max_detections=7, **thresholds)
        parity.require_parity(parity.compare_detections("it", expected, one, max_detections=7, **thresholds), "it")
    with pytest.raises(Exception, match="Got: 3 Expected: 4"):
        onnxruntime.InferenceSession(path).run(None, {"images": images[:3]})


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--batch-size", "many"], 2, ["'many'", "dynamic"]),
        (["--batch-size", "0"], 2, ["--batch-size 0", "1 or more"]),
        (["--conf", "1.5"], 2, ["--conf 1.5", "0 … 1"]),
        (["--max-detections", "0"], 2, ["--max-detections 0"]),
        (["--opset", "17"], 2, ["--opset 17", "18 … 21"]),
        (["--out", "model.pt"], 2, ["model.pt", "model.onnx"]),
        (["--out", "nowhere/model.onnx"], 3, ["nowhere"]),
        (["--images", "nowhere"], 2, ["nowhere"]),
    ],
)
def test_errors_say_what_to_do(run: Path, stoker: Run, flags: list[str], code: int, words: list[str]) -> None:
    got, _, err = stoker("export", run, *flags)
    assert got == code, err
    for word in words:
        assert word in err
    assert not list(run.glob("*.onnx"))


@pytest.mark.slow
def test_a_file_that_finds_something_else_is_not_kept(run: Path, stoker: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    good = graph.export_network

    def wrong(*given: Any) -> Any:
        """A network that is out by a little: one channel of one convolution."""
        network = good(*given)
        (bias,) = (one for one in network.graph.initializer if one.name.endswith("cls_logits.bias"))
        values = onnx.numpy_helper.to_array(bias).copy()
        values[1] += 0.05
        bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
        return network

    assert stoker("export", run)[0] == 0
    before = (run / "best.onnx").read_bytes()
    monkeypatch.setattr(graph, "export_network", wrong)
    for out in ("best.onnx", "new.onnx"):
        code, message, err = stoker("export", run, "--out", run / out)
        assert (code, message) == (3, "")
        assert "detections of the exported file differ" in err
        assert "largest differences on 10 images" in err
    assert sorted(path.name for path in run.iterdir()) == ["best.onnx", "best.safetensors", "config.toml"]
    assert (run / "best.onnx").read_bytes() == before


def another_model(path: Path) -> Path:
    text = '<ir_version: 10, opset_import: ["" : 18]> theirs (float[1] x) => (float[1] y) { y = Identity(x) }'
    onnx.save(onnx.parser.parse_model(text), path)
    return path


@pytest.mark.slow
def test_a_file_of_the_users_is_not_replaced(run: Path, stoker: Run) -> None:
    another_model(run / "best.onnx")
    before = (run / "best.onnx").read_bytes()
    code, _, err = stoker("export", run)
    assert code == 2
    assert "did not export" in err
    assert (run / "best.onnx").read_bytes() == before
    assert stoker("export", run, "--out", run / "mine.onnx")[0] == 0
    assert stoker("export", run, "--out", run / "mine.onnx")[0] == 0, "one's own is"


@pytest.mark.slow
def test_without_the_data_images_have_to_be_named(run: Path, data: Path, stoker: Run) -> None:
    (run / "config.toml").write_text(to_toml(Config().replace(data="gone"), {}))
    alone = run.parent / "alone.safetensors"
    (run / "best.safetensors").rename(alone)
    for what in (alone, run):
        if what == run:
            alone.rename(run / "best.safetensors")
        code, _, err = stoker("export", what)
        assert code == 2, err
        assert "no images to compare" in err
        assert "--images" in err
    code, out, err = stoker("export", run, "--images", data / "valid")
    assert code == 0, err
    assert "parity on 10 images" in out


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_what_to_install(
    run: Path, stoker: Run, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = stoker("export", run)
    assert code == 3
    assert re.search(rf"why: .*\b{package}\b", err)
    assert "pip install 'stoker[onnx]'" in err


def test_a_file_that_is_no_model(tmp_path: Path, data: Path, stoker: Run) -> None:
    torn = tmp_path / "torn.onnx"
    torn.write_bytes(b"\x08\x0a nothing")
    theirs = another_model(tmp_path / "theirs.onnx")
    for path, words in ((torn, "cannot be read"), (theirs, "not exported by stoker")):
        code, _, err = stoker("predict", path, data / "valid", "--out", tmp_path / "out")
        assert code == 3
        assert words in err
        assert path.name in err
        assert "[E:" not in err, "onnxruntime's own words are in the message"


@pytest.mark.slow
def test_predict_and_eval_take_the_file_as_they_take_the_run(
    run: Path, data: Path, tmp_path: Path, stoker: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.hardware.device.Device.best_precision", lambda _: ("fp32", "as the file"))
    assert stoker("export", run)[0] == 0
    answers, scores = [], []
    for n, what in enumerate((run, run / "best.onnx")):
        out = tmp_path / f"out{n}"
        code, _, err = stoker("predict", what, data / "valid", "--conf", "0.3", "--iou", "0.4", "--out", out)
        assert code == 0, err
        answers.append(json.loads((out / "predictions.json").read_text()))
        code, message, err = stoker("eval", what, data, "--json")
        assert code == 0, err
        scores.append(json.loads(message))
    for one, other in zip(*answers, strict=True):
        assert one["path"] == other["path"]
        assert len(one["detections"]) == len(other["detections"]) > 3
        for mine, its in zip(one["detections"], other["detections"], strict=True):
            assert mine["class"] == its["class"]
            assert mine["score"] == pytest.approx(its["score"], abs=2e-4)
            assert mine["box"] == pytest.approx(its["box"], abs=0.02)
    assert scores[0]["detections"] == scores[1]["detections"]
    for name in ("ap", "ap50", "ar100"):
        assert scores[0][name] == pytest.approx(scores[1][name], abs=1e-4)
    code, _, err = stoker("predict", run / "best.onnx", data / "valid", "--device", "cuda", "--out", tmp_path / "x")
    assert code == 2
    assert "cpu" in err


PACKAGES = {"openvino": "openvino", "litert": "litert_torch", "torch": "torch"}


def make_run(folder: Path, data: Path, name: str) -> Path:
    """A run of an architecture whose random class layers find much."""
    config = Config().replace(model=name, weights="none", **MODELS[name].defaults)
    torch.manual_seed(0)
    model = models.build(config.model, len(CLASSES))
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.from_numpy(random_images(2, 0)))  # the norms learn what the images are like
    for head in model.class_heads():
        torch.nn.init.normal_(model.get_submodule(head.name).weight, std=0.1)
        torch.nn.init.zeros_(model.get_submodule(head.name).bias)
    metadata = model_file.ModelMetadata(
        settings=config.model, class_names=CLASSES, image_size=IMAGE_SIZE, resize="letterbox"
    )
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "best.safetensors", metadata.header())
    (folder / "config.toml").write_text(to_toml(Config().replace(data=str(data)), {}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ember_n", "ssdlite320_mobilenet_v3_large"])
@pytest.mark.parametrize("format", PACKAGES)
def test_other_formats_find_what_the_model_finds(
    tmp_path: Path, data: Path, stoker: Run, monkeypatch: pytest.MonkeyPatch, format: str, model: str
) -> None:
    pytest.importorskip(PACKAGES[format], reason=f"pip install 'stoker[{format}]'")
    monkeypatch.setattr("stoker.hardware.device.Device.best_precision", lambda _: ("fp32", "as the file"))
    run = make_run(tmp_path / "run", data, model)
    code, out, err = stoker("export", run, "--format", format, "--conf", "0.3")
    assert code == 0, err
    suffix = write.FORMATS[format].suffix
    files = {".xml": {"best.xml", "best.bin"}}.get(suffix, {f"best{suffix}"})
    assert {path.name for path in run.iterdir()} == {"best.safetensors", "config.toml"} | files
    assert "parity on 10 images" in out.splitlines()[-1]
    answers = []
    for n, what in enumerate((run, run / f"best{suffix}")):
        flags = "--conf", "0.6", "--device", "cpu", "--trust-file"
        code, _, err = stoker("predict", what, data / "valid", *flags, "--out", tmp_path / f"{n}")
        assert code == 0, err
        answers.append(json.loads((tmp_path / f"{n}" / "predictions.json").read_text()))
    assert sum(len(image["detections"]) for image in answers[0]) > 10
    for one, other in zip(*answers, strict=True):
        assert len(one["detections"]) == pytest.approx(len(other["detections"]), abs=1), (
            "but for a box at the threshold"
        )
        for mine, its in zip(one["detections"][:5], other["detections"], strict=False):
            assert mine["score"] == pytest.approx(its["score"], abs=2e-3)
    code, _, err = stoker(
        "predict", run / f"best{suffix}", data / "valid", "--iou", "0.9", "--trust-file", "--out", tmp_path / "x"
    )
    assert code == 2
    assert "exported with --iou" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "package"), [("onnx", "onnx"), ("openvino", "openvino"), ("litert", "litert_torch")], ids=str
)
def test_a_two_stage_detector_is_exported_or_refused_by_name(
    format: str, package: str, tmp_path: Path, data: Path, stoker: Run
) -> None:
    pytest.importorskip(package)
    run = make_run(tmp_path / "run", data, "faster_rcnn_mobilenet_v3_large_fpn")
    code, out, err = stoker("export", run, "--format", format)
    if format == "litert":
        assert code == 2
        assert "faster_rcnn_mobilenet_v3_large_fpn cannot be exported as litert" in err
        assert "roi_align" in err
        assert not (run / "best.tflite").exists()
    else:
        assert code == 0, err
        assert "parity on 10 images" in out


@pytest.mark.slow
def test_another_format_that_finds_something_else_is_not_kept(
    run: Path, stoker: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One box less is a difference, in a format that is always there."""
    good = programs.DetectionModel.forward

    def wrong(
        self: programs.DetectionModel, images: torch.Tensor, content: torch.Tensor, score_threshold: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        outputs = good(self, images, content, score_threshold)
        return outputs | {"scores": outputs["scores"] * 0.98}

    monkeypatch.setattr(programs.DetectionModel, "forward", wrong)
    code, message, err = stoker("export", run, "--format", "torch", "--conf", "0.5")
    assert (code, message) == (3, "")
    assert "detections of the exported file differ" in err
    assert sorted(path.name for path in run.iterdir()) == ["best.safetensors", "config.toml"]


@pytest.mark.parametrize(
    ("format", "code", "words"),
    [
        ("tensorrt", 2, ["trtexec --onnx=RUN/best.onnx", "untested here", "--fp16"]),
        ("engine", 2, ["trtexec"]),
        ("coreml", 2, ["coremltools", "CoreMLExecutionProvider", "untested here"]),
        ("tflite", 2, ["--format litert"]),
        ("torchscript", 2, ["--format torch"]),
        ("paddle", 2, ["'paddle'", "onnx, openvino, litert, torch"]),
    ],
)
def test_formats_that_are_made_elsewhere(run: Path, stoker: Run, format: str, code: int, words: list[str]) -> None:
    got, _, err = stoker("export", run, "--format", format)
    assert got == code
    for word in words:
        assert word in err


@pytest.mark.parametrize(("format", "package"), [("openvino", "openvino"), ("litert", "litert_torch")])
def test_a_missing_extra_is_named(
    run: Path, stoker: Run, monkeypatch: pytest.MonkeyPatch, format: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = stoker("export", run, "--format", format)
    assert code == 3
    assert re.search(rf"why: .*\b{package}\b", err)
    assert f"pip install 'stoker[{format}]'" in err


def test_an_openvino_file_of_the_users_is_not_replaced(run: Path, stoker: Run) -> None:
    pytest.importorskip("openvino", reason="pip install 'stoker[openvino]'")
    (run / "best.bin").write_bytes(b"mine")
    code, _, err = stoker("export", run, "--format", "openvino")
    assert code == 2
    assert "did not export" in err
    assert (run / "best.bin").read_bytes() == b"mine"


@pytest.mark.slow
def test_the_script_of_the_document_runs_without_torch_and_stoker(run: Path, tmp_path: Path, stoker: Run) -> None:
    image = tmp_path / "shot.png"
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (70, 50, 3), np.uint8)).save(image)
    assert stoker("export", run, "--images", image)[0] == 0
    (script,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    absent = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'stoker', 'onnx', 'msgspec'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", absent + script, run / "best.onnx", image], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    code, _, err = stoker("predict", run / "best.onnx", image, "--conf", "0.425", "--out", tmp_path / "out")
    assert code == 0, err
    ((answer),) = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert len(lines) == len(answer["detections"]) > 3
    for line, found in zip(lines, answer["detections"], strict=True):
        name, score, box = line.split(" ", 2)
        assert name == found["class"]
        assert float(score) == pytest.approx(found["score"], abs=1e-3)
        assert json.loads(box) == pytest.approx(found["box"], abs=0.1)


# compare, on boxes made by hand.

BOXES = np.array([(0, 0, 20, 20), (0, 0, 20, 10.001), (40, 40, 60, 60), (70, 10, 90, 30)], np.float32)
HAND = parity.ImageDetections(BOXES, np.array([0.9, 0.8, 0.6, 0.3], np.float32), np.array([0, 1, 0, 2]))


def compared(model: parity.ImageDetections, file: parity.ImageDetections, **changes: Any) -> parity.Parity:
    return parity.compare_detections(
        "it", model, file, **{"score_threshold": 0.3, "iou_threshold": 0.5, "max_detections": 100} | changes
    )


def without(found: parity.ImageDetections, n: int) -> parity.ImageDetections:
    return parity.ImageDetections(*(np.delete(column, n, axis=0) for column in found))


def test_equal_boxes_in_any_order_are_equal() -> None:
    turned = parity.ImageDetections(*(column[::-1] for column in HAND))
    assert compared(HAND, turned) == parity.Parity(1, 4, 0.0, 0.0, 0, ())


@pytest.mark.parametrize("n", range(3))
def test_a_box_that_only_one_has_is_a_difference(n: int) -> None:
    for one, other, who in ((HAND, without(HAND, n), "the model"), (without(HAND, n), HAND, "the file")):
        found = compared(one, other)
        assert not found.passed
        assert f"only {who} found class" in found.unexplained[0]
        with pytest.raises(ParityError, match="exported file differ"):
            parity.require_parity(found, "it")


def test_a_box_at_the_threshold_or_cut_off_is_told_apart() -> None:
    at_threshold = compared(HAND, without(HAND, 3))
    assert (at_threshold.num_ties, at_threshold.unexplained) == (1, ())
    assert not compared(HAND, without(HAND, 3), score_threshold=0.2).passed
    tied = HAND._replace(scores=np.array([0.9, 0.8, 0.6, 0.59999], np.float32))
    assert compared(tied, without(tied, 3), score_threshold=0.1, max_detections=3).passed
    assert not compared(tied, without(tied, 3), score_threshold=0.1, max_detections=4).passed


def test_a_box_at_the_limit_of_nms_or_tied_is_told_apart() -> None:
    one_class = HAND._replace(labels=np.zeros(4, np.int64))  # the second overlaps the first by 0.50005
    assert compared(one_class, without(one_class, 1)).passed
    assert not compared(one_class, without(one_class, 1), iou_threshold=0.45).passed, "the file should have it no less"
    higher = HAND._replace(boxes=BOXES + np.array([0, 0, 0, 5], np.float32), labels=np.zeros(4, np.int64))
    scores = np.array([0.9, 0.89995, 0.6, 0.3], np.float32)
    first, second = without(higher._replace(scores=scores), 1), without(higher._replace(scores=scores), 0)
    assert compared(first, second).num_ties == 2, "of two equals that overlap either may stay"
    scores = np.array([0.9, 0.8, 0.6, 0.3], np.float32)
    first, second = without(higher._replace(scores=scores), 1), without(higher._replace(scores=scores), 0)
    assert not compared(first, second).passed


@pytest.mark.parametrize(("corner", "score", "holds"), [(0.09, 0.0, True), (0.11, 0.0, False), (0.0, 9e-4, True),
                                                        (0.0, 1.1e-3, False), (float("nan"), 0.0, False)])  # fmt: skip
def test_differences_are_measured(corner: float, score: float, holds: bool) -> None:
    other = HAND._replace(boxes=BOXES.copy(), scores=HAND.scores.copy())
    other.boxes[2, 3] += corner
    other.scores[1] -= score
    assert compared(HAND, other).passed is holds
