"""Runs whose data set, checkpoints or folder were changed between a kill and the resume."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.config.settings import Config, from_fields
from stoker.hardware.device import Device
from stoker.training.checkpoint import list_checkpoints
from stoker.training.local_ranks import TrainOptions
from stoker.training.optim import OptimizerStep
from stoker.training.run import train
from stoker_watch.errors import CheckpointError, StokerError
from stoker_watch.runs.records import CONFIG, EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.bounded import bounded
from tests.drawn import draw
from tests.fixtures.training_checkpoint import newest, save
from tests.fixtures.training_stability import Killed, killing

SETTINGS: dict[str, Any] = {
    "model": "retinanet_tiny_fpn", "image_size": (64, 64), "batch_size": 4, "max_duration": "10", "precision": "fp32",
    "eval_every": "0", "checkpoint_every": "3", "workers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set and a run that was killed after the checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("killed")
    config = from_fields({"data": str(draw(folder / "set")), **SETTINGS})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerStep, "update", killing(OptimizerStep.update, 8))
        with pytest.raises(Killed):
            train(config, TrainOptions(run_dir=str(folder / "run")))
    assert [path.name for path in list_checkpoints(folder / "run")] == ["step-00000006", "step-00000003"]
    return folder


@pytest.fixture
def case(killed: Path, tmp_path: Path) -> Path:
    """A copy of it, with the path of its own data set."""
    shutil.copytree(killed, tmp_path / "case")
    config = tmp_path / "case/run/config.toml"
    config.write_text(config.read_text().replace(str(killed), str(tmp_path / "case")))
    return tmp_path / "case"


def resume(case: Path, **options: Any) -> list[Event]:
    train(Config(), TrainOptions(resume=str(case / "run"), **options))
    return list(read_lines(case / "run", EVENTS, Event))


def change_boxes(case: Path) -> None:
    path = case / "set/train/_annotations.coco.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["bbox"] = [1, 1, 30, 30]
    content["images"].append({"id": 77, "file_name": "train-0.jpg".replace("0", "new"), "width": 64, "height": 64})
    shutil.copy(case / "set/train/train-0.jpg", case / "set/train/train-new.jpg")
    path.write_text(json.dumps(content))


def test_a_copied_data_set_is_continued(case: Path) -> None:
    assert resume(case)[-1].kind == "finished"


def test_a_changed_data_set_is_refused_unless_accepted(case: Path) -> None:
    change_boxes(case)
    with pytest.raises(CheckpointError) as caught:
        resume(case)
    assert caught.value.exit_code == 3
    assert "1 image new (train/train-new.jpg (train))" in str(caught.value)
    assert "1 image with other boxes or another size (train/train-0.jpg (train))" in str(caught.value)
    assert "--accept-changed-data" in str(caught.value)
    events = resume(case, accept_changed_data=True)
    (warning,) = [event for event in events if "data_changes" in event.data]
    assert warning.kind == "warning"
    assert "train/train-new.jpg" in warning.text
    assert events[-1].kind == "finished"


def test_another_number_of_classes_is_never_accepted(case: Path) -> None:
    for name in ("train", "valid"):
        path = case / "set" / name / "_annotations.coco.json"
        content = json.loads(path.read_text())
        content["categories"].append({"id": 4, "name": "new"})
        path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not the one") as caught:
        resume(case, accept_changed_data=True)
    assert "red, green, blue, new" in str(caught.value)
    assert "--accept-changed-data" not in str(caught.value)


def rewrite_state(folder: Path, data: bytes) -> None:
    """Another state.pt, with the correct checksum in the manifest."""
    (folder / "state.pt").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"]["state.pt"] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    return path.read_bytes()


BAD_STATES: dict[str, Callable[[Path], bytes]] = {
    "no file of torch": lambda _path: b"not a pickle",
    "empty": lambda _path: b"",
    "no keys": lambda path: edited(path, lambda state: state.clear()),
    "no optimizer": lambda path: edited(path, lambda state: state.pop("optimizer_step")),
    "other shapes": lambda path: edited(
        path, lambda state: [tensor.resize_(1) for tensor in state["optimizer_step"]["model"].values()]
    ),
    "a text for a number": lambda path: edited(path, lambda state: state["loader"].update(position="x")),
    "no data": lambda path: edited(path, lambda state: state.update(data=None)),
    "a digest that is none": lambda path: edited(path, lambda state: state["data"].update(images="x")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_bad_state_with_correct_checksums_falls_back(case: Path, name: str) -> None:
    folder = case / "run/checkpoints/step-00000006"
    rewrite_state(folder, BAD_STATES[name](folder / "state.pt"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerStep, "update", killing(OptimizerStep.update, 0))
        with pytest.raises(Killed):
            resume(case)
    events = list(read_lines(case / "run", EVENTS, Event))
    assert any(event.kind == "checkpoint_corrupt" and "step-00000006" in event.text for event in events)
    assert any("continuing from step 3" in event.text for event in events)
    assert (case / "run/checkpoints/damaged-step-00000006").is_dir()


def test_all_states_bad(case: Path) -> None:
    for folder in list_checkpoints(case / "run"):
        rewrite_state(folder, BAD_STATES["no optimizer"](folder / "state.pt"))
    with pytest.raises(CheckpointError, match="Every checkpoint") as caught:
        resume(case)
    assert "KeyError" in str(caught.value)


HOSTILE_MANIFESTS: dict[str, Callable[[Path], object]] = {
    "a device": lambda path: path.write_text(
        json.dumps({"step": 2, "files": {"/dev/zero": {"size_bytes": 0, "sha256": ""}}})
    ),
    "a path": lambda path: path.write_text(
        json.dumps({"step": 2, "files": {"../../secret": {"size_bytes": 1, "sha256": ""}}})
    ),
    "no files": lambda path: path.write_text(json.dumps({"step": 2, "files": {}})),
    "another step": lambda path: path.write_text(path.read_text().replace('"step":2', '"step":3')),
    "deep": lambda path: path.write_text('{"step": 2, "files": ' + "[" * 200_000),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "zero": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "state is a fifo": lambda path: (
        path.with_name("state.pt").unlink(),
        os.mkfifo(path.with_name("state.pt")),
    ),
    "weights are a device": lambda path: (
        path.with_name("weights.safetensors").unlink(),
        path.with_name("weights.safetensors").symlink_to("/dev/zero"),
    ),
}


@pytest.mark.parametrize("name", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_damage(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1, 2)
    HOSTILE_MANIFESTS[name](tmp_path / "checkpoints/step-00000002/manifest.json")
    with bounded(seconds=30, megabytes=512):
        loaded, said = newest(tmp_path)
    assert loaded is not None
    assert loaded.step == 1
    assert said[0][0] == "checkpoint_corrupt"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user who may not write")
def test_a_run_folder_that_cannot_be_written(killed: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # that of pytest cannot be read by others
        os.chmod(folder, 0o755)
        for name in (EVENTS, CONFIG):
            shutil.copyfile(killed / "run" / name, Path(folder) / name)
        assert _resume_as_nobody(folder) == 3


def _resume_as_nobody(run: str) -> int:
    """The exit code of the error, in a process that may not write. Only root can become another user, and for good."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setuid(65534)
            train(Config(), TrainOptions(resume=run))
        except StokerError as error:
            code = error.exit_code if "The run's folder cannot be written" in error.what else 98
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_device_that_fails_during_a_restore_leaves_the_checkpoints(
    case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error stays: every later call fails too, with any checkpoint."""
    failure = RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(OptimizerStep, "load_state_dict", fail)
    monkeypatch.setattr(Device, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        resume(case)
    assert [path.name for path in list_checkpoints(case / "run")] == ["step-00000006", "step-00000003"]
