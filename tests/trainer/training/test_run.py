"""A whole training in one process: its run folder, and how it ends on errors."""

import contextlib
import errno
import json
import os
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from stoker import models
from stoker.config.settings import SECTION_OF, Config, from_fields, from_toml, to_toml
from stoker.hardware.device import Device, ReadyEvent, SideStream
from stoker.models import unset_fields
from stoker.models.weights import model_file
from stoker.models.weights.load import detect_architecture
from stoker.preflight.host import estimate_checkpoint_bytes
from stoker.training import checkpoint, evaluator, loop, make_step, recorder, run_selection, start
from stoker.training.evaluator import Evaluator
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker.training.run_selection import choose_run, with_absolute_paths
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    Preempted,
    PreflightError,
    StorageError,
    UsageError,
)
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.report import format as fmt
from stoker_watch.runs.records import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    FINAL,
    FINDINGS,
    QUARANTINE,
    STEPS,
    read_lines,
)
from stoker_watch.runs.schemas import Event, Quarantined, StepWindow
from tests.drawn import CLASSES, draw
from tests.fixtures.training_run import patch_ap, settings


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(settings(data, eval_every="6"), TrainOptions(run_dir=str(tmp_path_factory.mktemp("runs") / "one"))).run


def test_the_run_folder_is_complete(run: Path):
    for name in (CONFIG, ENVIRONMENT, EVENTS, STEPS, FINDINGS, "best.safetensors", "final.safetensors", "tensorboard"):
        assert (run / name).exists(), name
    assert json.loads((run / ENVIRONMENT).read_text())
    kinds = [event.kind for event in read_lines(run, EVENTS, Event)]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert kinds.count("evaluated") == 2
    assert sum(window.window_steps for window in read_lines(run, STEPS, StepWindow)) == 12


def test_every_setting_has_a_value_and_derived_ones_a_reason(run: Path, data: Path):
    config, reasons = from_toml(run / CONFIG)
    assert unset_fields(config) == []
    of_other_models = {"reduced_tail", "nms_free", "depthwise", "queries", "class_loss"}
    of_the_user = {"train", "val", "splits"}
    assert set(SECTION_OF) - set(config.set_fields()) == of_other_models | of_the_user
    asked = set(settings(data, eval_every="6").set_fields())
    assert set(reasons) == set(config.set_fields()) - asked
    assert all(reason.strip() for reason in reasons.values())
    assert tomllib.loads((run / CONFIG).read_text())["run"]["max_duration"] == "12"


@pytest.mark.slow
def test_the_saved_model_can_be_loaded_alone(run: Path):
    assert detect_architecture(run / "final.safetensors") == "retinanet_tiny_fpn"
    model, card = model_file.load_model(model_file.find_weights(run))
    assert card.class_names == tuple(sorted(CLASSES)) or card.class_names == CLASSES
    assert (card.image_size, card.resize) == ((64, 64), "letterbox")
    raw = model(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    assert torch.isfinite(raw.logits).all()


@pytest.mark.slow
def test_accumulation_equals_one_big_batch(data: Path, tmp_path: Path):
    """RetinaNet's loss is normalized per image; with frozen norms nothing else depends on the micro-batch."""
    model = {"model": "retinanet_mobilenet_v2_fpn", "weights": "none", "backbone_norm": "frozen_bn", "optimizer": "sgd",
             "lr": 0.001, "ema_decay": 0.0, "max_duration": "3", "image_size": (64, 64)}  # fmt: skip
    ends = [
        load_file(
            train(settings(data, grad_accum_steps=parts, **model), TrainOptions(run_dir=str(tmp_path / str(parts)))).run
            / "final.safetensors"
        )
        for parts in (1, 4)
    ]
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_learning_rate_that_diverges_ends_with_the_names_of_images(data: Path, tmp_path: Path, monkeypatch):
    """The decay multiplies the weights by -899 a step, at a third of the rate by -299, at a ninth by -99."""
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    changes = {
        "optimizer": "sgd",
        "lr": 90.0,
        "weight_decay": 10.0,
        "clip_grad_norm": 0.0,
        "warmup_steps": 0,
        "max_skipped_steps": 5,
    }
    config = settings(data, max_duration="400", **changes)
    with pytest.raises(DivergedError) as caught:
        train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    assert caught.value.exit_code == 6
    text = str(caught.value)
    assert "5 steps in a row" in text
    assert "also at a ninth of the learning rate" in text
    assert text.count("train-") == 4
    assert "--lr 3.3" in text
    assert "--weights" not in text  # there is no checkpoint yet
    events = list(read_lines(tmp_path / "run", EVENTS, Event))
    rollbacks = [event.data for event in events if event.kind == "rolled_back"]
    assert [(one["count"], one["rollback_step"], one["lr"]) for one in rollbacks] == [(1, 0, 30.0), (2, 0, 10.0)]
    assert (events[-1].kind, events[-1].data["exit_code"]) == ("failed", 6)


@pytest.mark.slow
def test_one_broken_image_is_excluded_and_named_and_more_end_the_run(tmp_path: Path):
    data = draw(tmp_path / "data")
    victim = data / "train" / "train-3.jpg"
    victim.write_bytes(victim.read_bytes()[:300])
    result = train(settings(data), TrainOptions(run_dir=str(tmp_path / "one")))
    lines = list(read_lines(result.run, QUARANTINE, Quarantined))
    assert {Path(line.path).name for line in lines} == {"train-3.jpg"}
    (data / "train" / "train-4.jpg").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "two")))
    assert caught.value.exit_code == 4
    for name in ("train-3.jpg", "train-4.jpg"):
        assert name in str(caught.value)


@pytest.mark.slow
def test_data_that_changed_since_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = draw(tmp_path / "data")

    def stop(*_: object, **__: object) -> None:
        raise RuntimeError("killed here")

    monkeypatch.setattr(Evaluator, "evaluate", stop)
    config = settings(data)
    with pytest.raises(RuntimeError, match="killed here"):
        train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    document = json.loads((data / "train" / "_annotations.coco.json").read_text())
    document["images"] = document["images"][:-2]
    kept = {image["id"] for image in document["images"]}
    document["annotations"] = [a for a in document["annotations"] if a["image_id"] in kept]
    (data / "train" / "_annotations.coco.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="not the one that the run was started with") as caught:
        train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    assert "2 images gone (train/train-22.jpg" in str(caught.value)


@pytest.mark.slow
def test_peak_memory_is_reset_after_the_batch_trials(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`--auto-batch` tries larger batches than the one it takes."""
    called: list[str] = []
    monkeypatch.setattr(Device, "reset_peak_memory", lambda _: called.append("reset"))
    monkeypatch.setattr(start, "derive", record_call(called, "trials", start.derive))
    monkeypatch.setattr(loop.Training, "step", record_call(called, "step", loop.Training.step))
    train(settings(data, max_duration="1"), TrainOptions(run_dir=str(tmp_path / "run")))
    assert called[called.index("trials") :] == ["trials", "reset", "step"]


def record_call(called: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        called.append(name)
        return function(*arguments)

    return wrapper


def test_another_command_does_not_continue_a_named_run(run: Path, data: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="finished"):
        train(settings(data, eval_every="6"), TrainOptions(run_dir=str(run)))
    (tmp_path / EVENTS).write_bytes((run / EVENTS).read_bytes().rsplit(b"\n", 2)[0] + b"\n")
    (tmp_path / CONFIG).write_bytes((run / CONFIG).read_bytes())
    with pytest.raises(UsageError, match="other settings"):
        train(settings(data, batch_size=2), TrainOptions(run_dir=str(tmp_path)))


def test_a_folder_that_holds_runs_is_no_run(run: Path, data: Path):
    with pytest.raises(UsageError, match="holds runs") as caught:
        train(settings(data), TrainOptions(run_dir=str(run.parent)))
    assert str(run) in str(caught.value.cause)


def test_the_run_of_another_program_is_not_continued(run: Path, data: Path, tmp_path: Path):
    (tmp_path / EVENTS).write_bytes((run / EVENTS).read_bytes())
    with pytest.raises(UsageError, match="another program"):
        train(Config(), TrainOptions(resume=str(tmp_path)))
    with pytest.raises(UsageError, match="another program"):
        train(settings(data), TrainOptions(run_dir=str(tmp_path)))


def test_a_start_that_fails_is_recorded(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="--track wandb"):
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run"), monitor=MonitoringOptions(track=("wandb",))))
    last = list(read_lines(tmp_path / "run", EVENTS, Event))[-1]
    assert (last.kind, last.data["exit_code"]) == ("failed", 2)


def test_the_room_that_is_asked_for_is_that_of_the_models_checkpoints(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("stoker_watch.recording.telemetry.machine.free_bytes", lambda _: 2**20)
    with pytest.raises(PreflightError, match="are free for the run") as caught:
        train(settings(data, max_duration="1"), TrainOptions(run_dir=str(tmp_path / "run")))
    config = from_toml(tmp_path / "run" / CONFIG)[0]
    num_weights = sum(parameter.numel() for parameter in models.build(config.model, 3).parameters())
    size = estimate_checkpoint_bytes(num_weights, config.optim.optimizer)
    assert f"checkpoints of {fmt.size(size)}," in str(caught.value.cause)


def test_settings_that_differ_are_shown_as_they_are_typed(tmp_path: Path):
    started = from_fields({"data": "a b", "image_size": 128, "shard": True, "seed": 3, "lr": 0.1, "workers": 2})
    now = from_fields(
        {"data": "c", "image_size": (64, 96), "shard": False, "seed": 3, "classes": ("cat", "fire truck")}
    )
    (tmp_path / EVENTS).write_bytes(b"")
    (tmp_path / CONFIG).write_text(to_toml(started, {}))
    with pytest.raises(UsageError, match="other settings") as caught, contextlib.ExitStack() as stack:
        choose_run(now, str(tmp_path), None, stack)
    assert caught.value.cause == (
        "it was started with 'a b' --image-size 128 128 --lr 0.1 --shard without --classes; "
        "now it is c --image-size 64 96 --no-shard --classes cat 'fire truck' without --lr"
    )


def test_an_unfinished_run_with_other_settings_is_named(run: Path, data: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unfinished = tmp_path / "runs" / f"{data.name}-ember_n-1"
    unfinished.mkdir(parents=True)
    (unfinished / EVENTS).write_bytes((run / EVENTS).read_bytes().rsplit(b"\n", 2)[0] + b"\n")
    (unfinished / CONFIG).write_bytes((run / CONFIG).read_bytes())
    config, reasons = from_toml(run / CONFIG)
    changed = config.replace(**dict.fromkeys(reasons)).replace(lr=0.5)
    with contextlib.ExitStack() as stack:
        path, _, messages = choose_run(changed, None, None, stack)
    assert path is None
    assert messages == [f"runs/{unfinished.name} is unfinished and has other --lr: starting a new run; "
                        f"--resume runs/{unfinished.name} continues it"]  # fmt: skip
    monkeypatch.setattr(run_selection, "locked", lambda _: contextlib.nullcontext(None))  # a file system without locks
    with contextlib.ExitStack() as stack:
        assert choose_run(changed, None, None, stack)[2] == messages
    monkeypatch.setattr(run_selection, "locked", mock.Mock(side_effect=PermissionError))
    with contextlib.ExitStack() as stack:
        assert choose_run(changed, None, None, stack)[2] == []


def test_a_run_is_continued_with_other_workers_and_the_same_result(data: Path, tmp_path: Path):
    whole = train(settings(data), TrainOptions(run_dir=str(tmp_path / "whole")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_step, "train_step", stopping(make_step.train_step, 5))
        with pytest.raises(Preempted):
            train(settings(data, workers=1), TrainOptions(run_dir=str(tmp_path / "run")))
    with pytest.raises(UsageError, match="takes its settings from the run"):
        train(from_fields({"batch_size": 2}), TrainOptions(resume=str(tmp_path / "run")))
    with pytest.raises(UsageError, match="--workers 0 is out of range"):
        train(from_fields({"workers": 0}), TrainOptions(resume=str(tmp_path / "run")))
    result = train(from_fields({"workers": 2, "checkpoint_every": "3"}), TrainOptions(resume=str(tmp_path / "run")))
    assert (result.run / FINAL).read_bytes() == (whole.run / FINAL).read_bytes()
    (resumed,) = [event for event in read_lines(result.run, EVENTS, Event) if event.kind == "resumed"]
    assert resumed.text == "attempt 2, with --checkpoint-every 3 --workers 2"
    assert read_run(result.run).settings["workers"] == 2
    assert from_toml(result.run / CONFIG)[0].run.workers == 1


@pytest.mark.slow
def test_length_in_minutes_and_epochs(data: Path, tmp_path: Path):
    result = train(settings(data, max_duration="0.05min"), TrainOptions(run_dir=str(tmp_path / "minutes")))
    seconds = sum(w.phases.get("compute", 0) + w.phases.get("input_wait", 0)
                  for w in read_lines(result.run, STEPS, StepWindow))  # fmt: skip
    assert result.steps > 1
    assert seconds >= 0.9 * 3.0
    assert train(settings(data, max_duration="2ep"), TrainOptions(run_dir=str(tmp_path / "epochs"))).steps == 12


class LateCopy(ReadyEvent):
    """A copy that is asked four times before it is there, as on a device that is behind."""

    def __init__(self) -> None:
        super().__init__(None)
        self._asked = 0

    def done(self) -> bool:
        self._asked += 1
        return self._asked > 4

    def wait(self) -> None:
        self._asked = 4


@pytest.mark.slow
def test_no_step_is_lost_while_copies_are_late(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def late(copy: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (copy(*args)[0], LateCopy())

    monkeypatch.setattr(SideStream, "to_host", late(SideStream.to_host))
    monkeypatch.setattr(SideStream, "to_device", late(SideStream.to_device))
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    result = train(settings(data, max_duration="23", eval_every="10"), TrainOptions(run_dir=str(tmp_path / "run")))
    windows = list(read_lines(result.run, STEPS, StepWindow))
    assert sum(window.window_steps for window in windows) == 23
    assert windows[-1].step == 23
    assert all(window.losses["total"] > 0 for window in windows if window.window_steps)
    assert sum(1 for window in windows if window.window_steps) > 3
    assert sum(window.phases.get("h2d", 0.0) for window in windows) > 0, "it waited for the copies of the images"


def full_disk(name: str, write: Callable[[Path, Any], None]) -> Callable[[Path, Any], None]:
    def wrapper(path: Path, content: Any) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    return wrapper


def test_an_interruption_has_its_exit_code(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker why` takes it for the end of a hang, where there was one."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("a second time")

    monkeypatch.setattr(start, "build", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    last = list(read_lines(tmp_path / "run", EVENTS, Event))[-1]
    assert (last.kind, last.data["exit_code"]) == ("failed", 130)


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_does_not_end_the_run(data: Path, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_atomic", full_disk("final.safetensors", checkpoint.write_atomic))
        with pytest.raises(StorageError, match="final weights") as caught:
            train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert "No space left" in str(caught.value)
    last = list(read_lines(tmp_path / "run", EVENTS, Event))[-1]
    assert (last.kind, last.data["exit_code"]) == ("failed", caught.value.exit_code)
    result = train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert result.steps == 12
    assert (result.run / "final.safetensors").exists()


def stopping(call: Callable[..., Any], at: int) -> Callable[..., Any]:
    """`call`, which at its n-th use gets a SIGTERM first."""
    calls = iter(range(at + 1))

    def wrapper(*arguments: Any, **named: Any) -> Any:
        if next(calls, None) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return call(*arguments, **named)

    return wrapper


def test_a_signal_whose_save_fails_raises_a_storage_error(data: Path, tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "write_atomic", full_disk("state.pt", checkpoint.write_atomic))
        patch.setattr(make_step, "train_step", stopping(make_step.train_step, 5))
        with pytest.raises(StorageError, match="could not be saved"):
            train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))


def test_a_signal_before_the_first_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start, "resolve_run", stopping(start.resolve_run, 0))
    with pytest.raises(Preempted, match="before the first step"):
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_evaluation_interrupted_by_a_signal_is_repeated(data: Path, tmp_path: Path):
    config = settings(data, eval_every="6")
    whole = train(config, TrainOptions(run_dir=str(tmp_path / "whole")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "detect", stopping(evaluator.detect, 0))
        with pytest.raises(Preempted, match="at step 6"):
            train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    result = train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    steps = [event.step for event in read_lines(result.run, EVENTS, Event) if event.kind == "evaluated"]
    assert steps == [6, 12]
    for name in ("best.safetensors", "final.safetensors"):
        assert (result.run / name).read_bytes() == (whole.run / name).read_bytes()


def test_a_validation_split_without_boxes_is_refused_before_training(tmp_path: Path):
    data = draw(tmp_path / "data")
    path = data / "valid" / "_annotations.coco.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"annotations": []}))
    with pytest.raises(DataError, match="validation split has no boxes"):
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written(data: Path, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError) as caught:
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "file")))
    assert caught.value.exit_code == 3
    assert "--run-dir DIR" in str(caught.value)


def test_names_of_weights_are_not_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coco").mkdir()
    (tmp_path / "w.pth").write_bytes(b"")
    asked = from_fields({"data": "coco", "weights": "coco"})
    assert with_absolute_paths(asked).set_fields() == {"data": str(tmp_path / "coco"), "weights": "coco"}
    assert with_absolute_paths(from_fields({"weights": "w.pth"})).model.weights == str(tmp_path / "w.pth")
    assert with_absolute_paths(from_fields({"data": "demo"})).data.data == "demo"


@pytest.mark.slow
def test_a_run_that_no_longer_improves_ends_early(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    patch_ap(monkeypatch, 0.2)
    asked = settings(data, max_duration="40", eval_every="2", lr=1e-9, warmup_steps=0, ema_decay=0.0, patience=3)
    result = train(asked, TrainOptions(run_dir=str(tmp_path / "one")))
    assert result.steps == 8, "the first evaluation is the best so far, and three more bring nothing"
    events = list(read_lines(result.run, EVENTS, Event))
    assert any(event.text.startswith("stopped at step 8: 3 evaluations without an AP above") for event in events)
    assert events[-1].kind == "finished"
    steps = [event.step for event in events if event.kind == "evaluated"]
    assert steps == [2, 4, 6, 8], "the last evaluation is that of the final weights, too"
    assert (result.run / "final.safetensors").exists()


@pytest.mark.slow
def test_patience_counts_from_the_first_ap_above_zero(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    patch_ap(monkeypatch, 0.0, None, 0.0, 0.1, 0.0, 0.2, 0.1, 0.1, 0.3)
    asked = settings(data, max_duration="40", eval_every="1", lr=1e-9, warmup_steps=0, ema_decay=0.0, patience=2)
    result = train(asked, TrainOptions(run_dir=str(tmp_path / "one")))
    assert result.steps == 8
    assert json.loads((result.run / "evaluation.json").read_text())["step"] == 6


@pytest.mark.slow
def test_patience_is_restored_from_a_checkpoint(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    patch_ap(monkeypatch, 0.2)
    asked = settings(
        data,
        max_duration="40",
        eval_every="2",
        checkpoint_every="2",
        lr=1e-9,
        warmup_steps=0,
        ema_decay=0.0,
        patience=3,
    )
    taken = loop.Training.step

    def step_and_stop(self: loop.Training) -> None:
        taken(self)
        if self.state.step == 5:
            self.stopper.request.requested_by = "SIGTERM"

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "step", step_and_stop)
        with pytest.raises(Preempted):
            train(asked, TrainOptions(run_dir=str(tmp_path / "one")))
    assert train(asked, TrainOptions(run_dir=str(tmp_path / "one"))).steps == 8


def test_a_run_without_a_value_for_a_setting_is_not_continued(data: Path, tmp_path: Path, monkeypatch):
    def stop_at_once(self: loop.Training) -> None:
        self.stopper.request.requested_by = "SIGTERM"

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "step", stop_at_once)
        with pytest.raises(Preempted):
            train(settings(data), TrainOptions(run_dir=str(tmp_path / "old")))
    file = tmp_path / "old" / CONFIG
    file.write_text("".join(line for line in file.open() if not line.startswith("patience")))
    with pytest.raises(CheckpointError, match="earlier version") as caught:
        train(Config(), TrainOptions(resume=str(tmp_path / "old")))
    assert "has no value for patience" in str(caught.value)
