"""docs/predict.md: every example runs, with a model that was trained, and the threshold of its evaluation is used."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import stoker
from stoker.models.weights.model_file import load_model
from stoker_watch.cli.app import app
from stoker_watch.runs.evaluation import read_evaluation
from tests.drawn import draw
from tests.trainer.inference.pretrained import write_weights

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).resolve().parents[3] / "docs/predict.md").read_text()
COMMANDS = [line.partition(" #")[0] for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
            for line in block.splitlines()]  # fmt: skip
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OPTIONAL = {"clip.mp4": "av", "to_pandas": "pandas", "supervision": "supervision"}
"""Word of an example → the package that it needs."""


def missing_package(example: str) -> str | None:
    return next((p for word, p in OPTIONAL.items() if word in example and not importlib.util.find_spec(p)), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page names."""
    folder = tmp_path_factory.mktemp("page")
    data = draw(folder / "data")
    settings = {"batch_size": 8, "image_size": (64, 64), "eval_every": "0", "precision": "fp32", "device": "cpu"}
    stoker.train(data, run_dir=folder / "runs/mine", max_duration="80", **settings)
    (folder / "shots").mkdir()
    for path in (data / "valid").glob("*.jpg"):
        path.rename(folder / "shots" / path.name)
    Image.open(folder / "shots/valid-0.jpg").save(folder / "street.jpg")
    if importlib.util.find_spec("av"):
        from stoker.inference.video import video_writer

        with video_writer(folder / "clip.mp4") as write:
            for n in range(6):
                write(Image.open(folder / f"shots/valid-{n}.jpg"), n / 10)
    write_weights(folder / "weights", "retinanet_resnet50_fpn")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if missing := missing_package(command):
        pytest.skip(f"the package {missing} is not installed")
    monkeypatch.setenv("STOKER_WEIGHTS_DIR", str(folder / "weights"))
    monkeypatch.chdir(folder)
    words = shlex.split(command)[1:]
    app(words, result_action="return_value")
    printed = capsys.readouterr().out
    assert ("the best F1 in the evaluation" in printed) == ("--conf" not in command and "runs/mine" in command)
    out = folder / (words[words.index("--out") + 1] if "--out" in words else "predictions")
    entries = json.loads((out / "predictions.json").read_text())
    assert entries
    assert not [entry for entry in entries if "error" in entry]
    if "--save-txt" in command:
        assert {path.stem for path in (out / "labels").iterdir()} == {
            path.stem for path in (folder / "shots").iterdir()
        }
    if "clip.mp4" in command:
        assert [entry["frames"] for entry in entries] == [6]
        assert len((out / "clip.mp4.jsonl").read_text().splitlines()) == 6


def test_examples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    space: dict[str, object] = {}
    for block in BLOCKS:
        if missing_package(block) is None:
            exec(compile(block, "docs/predict.md", "exec"), space)
    from_file, from_opencv = space["model"].predict("street.jpg", conf=0.01)[0], space["from_opencv"]  # type: ignore[attr-defined]
    np.testing.assert_allclose(from_opencv.boxes, from_file.boxes, atol=0.5)  # type: ignore[attr-defined]
    assert (folder / "boxes.jpg").exists()
    assert cv2.imread("boxes.jpg") is not None


def test_the_threshold_of_the_evaluation_is_the_default(folder: Path) -> None:
    run = folder / "runs/mine"
    evaluation = read_evaluation(run)
    assert evaluation is not None
    assert evaluation.threshold is not None
    assert load_model(run / "best.safetensors")[1].threshold == evaluation.threshold
    model = stoker.load(run)
    assert model.conf == pytest.approx(evaluation.threshold, abs=1.1e-4)
    assert model.conf < evaluation.threshold, "the detection whose score is the threshold is kept"
    shots = str(folder / "shots")
    by_default, explicit = model.predict(shots), model.predict(shots, conf=model.conf)
    assert [one.scores.tolist() for one in by_default] == [one.scores.tolist() for one in explicit]
