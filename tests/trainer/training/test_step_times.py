"""A run says what was predicted for it, and adds what its steps took to the user's file."""

import re
import time
from pathlib import Path

import pytest
import torch

from stoker.config.settings import Config, from_fields
from stoker.hardware.selection import select_device
from stoker.models import MODELS
from stoker.training import recorder
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker_watch.diagnosis.notes import collect_notes
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.hardware import calibration
from stoker_watch.hardware.calibration import MeasuredStep, PredictedStep
from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.drawn import draw

DEVICE = select_device("cpu").name


def settings(data: Path) -> Config:
    return from_fields(
        {"data": str(data), "model": "retinanet_tiny_fpn", "image_size": (64, 64), "batch_size": 4,
         "max_duration": "12", "precision": "fp32", "eval_every": "0"}
    )  # fmt: skip


def predicted() -> PredictedStep:
    return PredictedStep(
        t=time.time(), model="retinanet_tiny_fpn", image_size=(64, 64), batch_size=4, precision="fp32",
        accelerator="cpu", device_pattern=".*", step_s=123.0, step_error=0.25, peak_bytes=1,
    )  # fmt: skip


def test_a_run_is_compared_with_its_prediction_and_adds_its_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)  # a window for each step
    calibration.append(predicted())
    run = train(settings(draw(tmp_path / "data")), TrainOptions(run_dir=str(tmp_path / "run"))).run
    texts = [event.text for event in read_lines(run, EVENTS, Event)]
    assert "`stoker plan` predicted 123 s a step ± 25 %" in texts
    (note,) = [note for note in collect_notes(read_run(run), []) if note.id == "predicted_step"]
    assert re.fullmatch(r"`stoker plan` predicted 123 s a step ± 25 %, measured \S+ s \(-\d+ %\)", note.title)
    (measured,) = [line for line in calibration.read_steps() if isinstance(line, MeasuredStep)]
    assert (measured.model, measured.device, measured.threads) == (
        "retinanet_tiny_fpn",
        DEVICE,
        torch.get_num_threads(),
    )
    assert measured.step_s > 0
    assert measured.steps >= 6
    assert measured.settings.keys() >= MODELS["retinanet_tiny_fpn"].defaults.keys()
    assert calibration.measured_steps(lambda name: name == DEVICE, threads=measured.threads) == [measured]


def test_a_cache_folder_that_cannot_be_written_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "WINDOW_S", 0.0)
    calibration.path().mkdir(parents=True)  # a folder where the file should be
    run = train(settings(draw(tmp_path / "data")), TrainOptions(run_dir=str(tmp_path / "run"))).run
    events = list(read_lines(run, EVENTS, Event))
    assert events[-1].kind == "finished"
    assert any("was not added to" in event.text for event in events)
