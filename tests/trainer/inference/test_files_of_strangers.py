"""Exported files that stoker did not write: none runs code without --trust-file, and damaged metadata is named."""

import contextlib
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stoker.export import write
from stoker.inference.model import load
from stoker_watch.cli import app
from stoker_watch.errors import WeightsError
from tests.bounded import bounded
from tests.drawn import draw
from tests.fixtures import exported_files

Writer = Callable[[Path, dict[str, Any]], Path]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_files.write_program(tmp_path_factory.mktemp("program") / "best.pt2")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """What only code in a file can make."""
    return tmp_path / "code-ran"


@pytest.fixture
def hostile(tmp_path: Path, program: Path, canary: Path) -> Path:
    return exported_files.write_hostile_program(tmp_path / "best.pt2", program, canary)


@pytest.fixture(autouse=True)
def litert(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the package, which needs another version of torch: it never gets to run a model here."""
    details = {"images": {"shape": [1, 3, exported_files.SIDE, exported_files.SIDE]}}
    runner = types.SimpleNamespace(get_input_details=lambda: details)
    interpreter = types.SimpleNamespace(get_signature_runner=lambda: runner)
    module = types.SimpleNamespace(Interpreter=lambda *_args, **_kwargs: interpreter)
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", module)


def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        app.main()
    out, err = capfd.readouterr()
    return int(ended.value.code or 0), out + err


def test_a_program_that_would_run_code_is_refused(
    tmp_path: Path,
    hostile: Path,
    canary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data = draw(tmp_path / "data")
    with pytest.raises(WeightsError) as refused:
        load(hostile)
    for part in (str(hostile), "run any code", "unpickles", "safetensors", "ONNX", "--trust-file", "trust_file=True"):
        assert part in str(refused.value)
    for arguments in (("predict", hostile, data / "valid"), ("eval", hostile, data)):
        code, output = command(monkeypatch, capfd, *arguments)
        assert code == 3, output
        assert "--trust-file" in output
    code, output = command(monkeypatch, capfd, "export", hostile)
    assert code == 2, output
    write._require_own_export(hostile, ".pt2")  # `stoker export --out` over it: its metadata is that of an export
    assert not canary.exists()


def test_the_refused_program_is_one_that_runs_code(hostile: Path, canary: Path) -> None:
    """Else the test above would show nothing."""
    with contextlib.suppress(WeightsError):  # torch goes on with what the code returned
        load(hostile, trust_file=True)
    assert canary.is_dir()


def test_a_trusted_program_finds_its_box(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (found,) = load(program, trust_file=True).predict(np.zeros((128, 128, 3), np.uint8))
    assert found.boxes.tolist() == [[16, 16, 80, 80]]  # the image has twice the side of the input
    assert found.labels.tolist() == [1]
    monkeypatch.chdir(tmp_path)
    data = draw(tmp_path / "data")
    code, output = command(
        monkeypatch, capfd, "predict", program, data / "valid", "--trust-file", "--out", tmp_path / "out"
    )
    assert code == 0, output
    images = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert all([one["class"] for one in image["detections"]] == ["b"] for image in images)
    code, output = command(monkeypatch, capfd, "eval", program, data, "--trust-file")
    assert "other classes" in output, output  # it was loaded: what is wrong is the data set


@pytest.mark.parametrize("suffix", [".pt2", ".tflite"])
def test_metadata_that_expands_is_not_read(tmp_path: Path, suffix: str) -> None:
    path = exported_files.write_expanding_archive(tmp_path / f"best{suffix}", gigabytes=3.9)
    assert path.stat().st_size < 5_000_000
    with bounded(seconds=30, megabytes=200), pytest.raises(WeightsError, match="cannot be read") as refused:
        load(path, trust_file=True)
    assert str(path) in str(refused.value)
    assert "compressed" in str(refused.value)


@pytest.mark.parametrize("megabytes", [900, 3900])
@pytest.mark.parametrize("suffix", [".pt2", ".tflite"])
def test_metadata_in_a_sparse_file_is_not_read(tmp_path: Path, suffix: str, megabytes: int) -> None:
    path = exported_files.write_sparse_archive(tmp_path / f"best{suffix}", megabytes=megabytes)
    with bounded(seconds=30, megabytes=200), pytest.raises(WeightsError, match="cannot be read") as refused:
        load(path, trust_file=True)
    assert "at most" in str(refused.value) or "more than" in str(refused.value)  # not: what could not be allocated


@pytest.mark.parametrize("place", ["../secret", "absolute", "link"])
def test_a_network_does_not_read_the_files_of_others(tmp_path: Path, place: str) -> None:
    """Its weights may be in another file, which it names: of its own folder only."""
    secret, folder = tmp_path / "secret", tmp_path / "model"
    folder.mkdir()
    secret.write_bytes(bytes(4))
    (folder / "link").symlink_to(secret)
    (folder / "own").write_bytes(bytes(4))
    name = str(secret) if place == "absolute" else place
    texts = {"stoker": exported_files.metadata_text()}
    assert load(exported_files.write_onnx(folder / "own.onnx", texts, weights="own")).class_names == ("a", "b")
    with pytest.raises(WeightsError, match="cannot be read"):
        load(exported_files.write_onnx(folder / "best.onnx", texts, weights=name))


def as_archive(path: Path, texts: dict[str, Any]) -> Path:
    return exported_files.write_archive(path, json.dumps(texts))


def as_safetensors(path: Path, texts: dict[str, Any]) -> Path:
    save_file({"w": torch.zeros(1)}, path, {"stoker": texts["stoker"]})
    return path


GOOD = {"stoker": exported_files.metadata_text(), "iou_threshold": "0.5", "batch_size": "1"}
CARD = json.loads(GOOD["stoker"])
WRONG_TEXTS = [
    *({"iou_threshold": number} for number in ("abc", "nan", "inf", "-1", "2", "", "9" * 5000)),
    *({"stoker": text} for text in ("", "5", "null", "[]", "{}", '"x"', "[" * 5000, "\0", "9" * 5000)),
    *(
        {"stoker": json.dumps(CARD | {name: value})}
        for name, values in {
            "class_names": (None, 5, "ab", [1, 2], {"a": 1}, []),
            "image_size": (None, 64, "64", [64], [64, 64, 64], [0, 64], [64.5, 64], ["64", "64"], [1 << 70, 1]),
            "settings": (None, [], "x", {"model": 5}, {"anchor_sizes": "x"}),
            "threshold": ("0.5", [], 7, -1, 10**400),
            "resize": (None, 5, "x", ["squash"]),
            "step": ("x", 1.5, []),
        }.items()
        for value in values
    ),
]
WRONG_VALUES: list[dict[str, Any]] = [
    *({"iou_threshold": value} for value in (None, 0.5, [1], {"a": 1}, True)),
    *({"stoker": value} for value in (None, 5, [], CARD, True)),
    *({"batch_size": value} for value in (None, 1, [])),
]


@pytest.mark.parametrize(
    ("suffix", "write_file", "wrong"),
    [
        (".onnx", exported_files.write_onnx, WRONG_TEXTS),
        (".tflite", as_archive, [*WRONG_TEXTS, *WRONG_VALUES]),
        (".pt2", as_archive, [*WRONG_TEXTS, *WRONG_VALUES]),
        (".safetensors", as_safetensors, [texts for texts in WRONG_TEXTS if "stoker" in texts]),
    ],
)
def test_metadata_of_a_wrong_type_is_named(
    tmp_path: Path,
    suffix: str,
    write_file: Writer,
    wrong: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the program of such a file is not what is wrong with it
    monkeypatch.setattr(torch.export, "load", lambda _path: types.SimpleNamespace(module=lambda: torch.nn.Identity()))
    for number, texts in enumerate(wrong):
        path = write_file(tmp_path / f"{number}{suffix}", GOOD | texts)
        with pytest.raises(WeightsError) as refused:
            load(path, trust_file=True)
        assert refused.value.location == str(path), texts
        assert refused.value.cause, texts


@pytest.mark.parametrize(
    "text", ["", "5", "[]", '["stoker"]', "null", '"stoker"', "{", "[" * 5000, b"\xff\xfe", "9" * 5000]
)
@pytest.mark.parametrize("suffix", [".pt2", ".tflite"])
def test_metadata_that_is_no_table_of_texts_is_named(tmp_path: Path, suffix: str, text: str | bytes) -> None:
    path = exported_files.write_archive(tmp_path / f"best{suffix}", text)
    with pytest.raises(WeightsError, match="cannot be read") as refused:
        load(path, trust_file=True)
    assert refused.value.location == str(path)


FOUND = exported_files.DETECTED
WRONG_OUTPUTS: dict[str, dict[str, Any]] = {
    "boxes that are not finite": {"boxes": FOUND["boxes"] * np.nan},
    "boxes that are not finite, either": {"boxes": FOUND["boxes"] * np.inf},
    "boxes is": {"boxes": FOUND["boxes"][..., :3]},
    "boxes is, too": {"boxes": FOUND["boxes"][0]},
    "scores outside": {"scores": FOUND["scores"] * np.nan},
    "scores outside, too": {"scores": FOUND["scores"] * 7},
    "boxes is float32[1, 1, 4]": {"scores": np.ones((1, 2), np.float32)},
    "labels outside": {"labels": FOUND["labels"] * 99},
    "labels outside, too": {"labels": FOUND["labels"] * -5},
    "count outside": {"count": FOUND["count"] * -1},
    "count outside, too": {"count": FOUND["count"] * 10**12},
    "count outside, either": {"count": np.array([np.nan], np.float32)},
    "count is": {"count": np.array(1)},
    "boxes is float32[2": {name: np.concatenate([value, value]) for name, value in FOUND.items()},
    "30,000 boxes": {
        **{name: np.repeat(FOUND[name], 30_000, axis=1) for name in ("boxes", "scores", "labels")},
        "count": np.array([30_000]),
    },
    "labels": {"labels": None},
    "count": {"count": None},
}


def as_openvino(path: Path) -> Path:
    """The ONNX file as one of OpenVINO."""
    openvino = pytest.importorskip("openvino", reason="needs the extra openvino")
    model = openvino.Core().read_model(path)
    model.set_rt_info(json.dumps(GOOD), ["stoker"])
    openvino.save_model(model, path.with_suffix(".xml"), compress_to_fp16=False)
    return path.with_suffix(".xml")


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
@pytest.mark.parametrize("text", WRONG_OUTPUTS)
def test_outputs_that_do_not_fit_the_metadata_are_named(tmp_path: Path, text: str, suffix: str) -> None:
    outputs = {name: value for name, value in (FOUND | WRONG_OUTPUTS[text]).items() if value is not None}
    path = exported_files.write_detector(tmp_path / "best.onnx", outputs)
    path = path if suffix == ".onnx" else as_openvino(path)
    model = load(path)
    with pytest.raises(WeightsError, match=r"do not fit its metadata|cannot be run") as refused:
        model.predict([np.zeros((128, 128, 3), np.uint8)] * 2)
    assert refused.value.location == str(path)
    assert text.partition(",")[0] in str(refused.value.cause) or "boxes is" in text
    good = load(exported_files.write_detector(tmp_path / "good.onnx", FOUND))
    found = good.predict([np.zeros((128, 128, 3), np.uint8)] * 2)
    assert [(one.boxes.tolist(), one.labels.tolist()) for one in found] == [([[16, 16, 80, 80]], [1])] * 2


@pytest.mark.parametrize("batch", [10**9, 0])
def test_a_batch_that_fills_the_memory_is_refused(tmp_path: Path, batch: int) -> None:
    texts = {**GOOD, "batch_size": str(batch)}
    files = [
        exported_files.write_detector(tmp_path / "best.onnx", FOUND, batch=batch),
        exported_files.write_archive(tmp_path / "best.pt2", json.dumps(texts)),
    ]
    program = types.SimpleNamespace(module=lambda: torch.nn.Identity())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.export, "load", lambda _path: program)
        for path in files:
            with bounded(megabytes=500), pytest.raises(WeightsError, match=r"batch of the .* file is out of range"):
                load(path, trust_file=True).predict(np.zeros((128, 128, 3), np.uint8))


def test_a_file_of_another_format_is_not_read_as_openvino(tmp_path: Path) -> None:
    """OpenVINO would take it: an ONNX file names other files with weights, which onnxruntime keeps to its folder."""
    path = as_openvino(exported_files.write_detector(tmp_path / "best.onnx", FOUND))
    exported_files.write_detector(tmp_path / "best.onnx", FOUND).rename(path)
    with pytest.raises(WeightsError, match="it is no XML"):
        load(path)


@pytest.mark.parametrize("kind", ["missing", "FIFO", "short"])
def test_weights_of_openvino_that_are_no_file(tmp_path: Path, kind: str) -> None:
    path = as_openvino(exported_files.write_detector(tmp_path / "best.onnx", FOUND))
    data = path.with_suffix(".bin").read_bytes()
    path.with_suffix(".bin").unlink()
    if kind == "FIFO":
        os.mkfifo(path.with_suffix(".bin"))
    elif kind == "short":
        path.with_suffix(".bin").write_bytes(data[: len(data) // 2])
    with bounded(seconds=20), pytest.raises(WeightsError, match="cannot be read") as refused:
        load(path)
    assert refused.value.location == str(path)
