"""A whole training in one process: what it leaves behind, and how it ends when it cannot go on."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stoker.config import SECTION_OF, Config, from_fields, from_toml
from stoker.errors import DataError, DivergedError, UsageError
from stoker.models import saved
from stoker.models.weights import architecture_of
from stoker.records import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    FINDINGS,
    QUARANTINE,
    STEPS,
    Event,
    Quarantined,
    StepWindow,
    read_lines,
)
from stoker.train.loop import train
from tests.drawn import CLASSES, draw


def settings(data: Path, **changes: object) -> Config:
    usual: dict[str, object] = {
        "data": str(data), "model": "retinanet_tiny_fpn", "canvas": (64, 64), "batch": 4, "for_": "12",
        "precision": "fp32", "eval_every": "0",
    }  # fmt: skip
    return from_fields(usual | changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(settings(data, eval_every="6"), run=str(tmp_path_factory.mktemp("runs") / "one")).run


def test_the_run_folder_is_complete(run: Path):
    for name in (CONFIG, ENVIRONMENT, EVENTS, STEPS, FINDINGS, "best.safetensors", "final.safetensors", "tensorboard"):
        assert (run / name).exists(), name
    assert json.loads((run / ENVIRONMENT).read_text())
    kinds = [event.kind for event in read_lines(run, EVENTS, Event)]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert kinds.count("evaluated") == 2
    assert sum(window.steps for window in read_lines(run, STEPS, StepWindow)) == 12


def test_every_setting_has_a_value_and_those_not_asked_for_a_reason(run: Path, data: Path):
    config, reasons = from_toml(run / CONFIG)
    assert set(config.set_fields()) == set(SECTION_OF)
    asked = set(settings(data, eval_every="6").set_fields())
    assert set(reasons) == set(SECTION_OF) - asked
    assert all(reason.strip() for reason in reasons.values())
    assert tomllib.loads((run / CONFIG).read_text())["run"]["for"] == "12"


def test_the_saved_model_stands_alone(run: Path):
    assert architecture_of(run / "final.safetensors") == "retinanet_tiny_fpn"
    model, card = saved.load(saved.find(run))
    assert card.class_names == tuple(sorted(CLASSES)) or card.class_names == CLASSES
    assert (card.canvas, card.resize) == ((64, 64), "letterbox")
    raw = model(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    assert torch.isfinite(raw.logits).all()


def test_accumulation_equals_one_big_batch(data: Path, tmp_path: Path):
    """RetinaNet's normaliser is per picture; with frozen norms nothing else depends on the micro-batch."""
    model = {"model": "retinanet_mobilenet_v2_fpn", "weights": "none", "norm": "frozen", "optimizer": "sgd",
             "rate": 0.001, "ema": 0.0, "for_": "3", "canvas": (64, 64)}  # fmt: skip
    ends = [
        load_file(
            train(settings(data, accumulate=parts, **model), run=str(tmp_path / str(parts))).run / "final.safetensors"
        )
        for parts in (1, 4)
    ]
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_rate_that_explodes_ends_with_the_names_of_pictures(data: Path, tmp_path: Path):
    config = settings(data, optimizer="sgd", rate=90.0, clip=0.0, warmup=0, max_skipped=5, for_="400", momentum=0.99)
    with pytest.raises(DivergedError) as caught:
        train(config, run=str(tmp_path / "run"))
    assert caught.value.exit_code == 6
    text = str(caught.value)
    assert "5 steps in a row" in text
    assert text.count("train-") == 4
    assert "--rate 30" in text
    last = list(read_lines(tmp_path / "run", EVENTS, Event))[-1]
    assert (last.kind, last.data["exit_code"]) == ("failed", 6)


def test_one_broken_picture_is_left_out_and_named_and_more_end_the_run(tmp_path: Path):
    data = draw(tmp_path / "data")
    victim = data / "train" / "train-3.jpg"
    victim.write_bytes(victim.read_bytes()[:300])
    result = train(settings(data), run=str(tmp_path / "one"))
    lines = list(read_lines(result.run, QUARANTINE, Quarantined))
    assert {Path(line.path).name for line in lines} == {"train-3.jpg"}
    (data / "train" / "train-4.jpg").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        train(settings(data), run=str(tmp_path / "two"))
    assert caught.value.exit_code == 4
    for name in ("train-3.jpg", "train-4.jpg"):
        assert name in str(caught.value)


def test_data_that_changed_since_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from stoker.train import loop

    data = draw(tmp_path / "data")

    def stop(*_: object, **__: object) -> None:
        raise RuntimeError("killed here")

    monkeypatch.setattr(loop.Training, "score", stop)
    config = settings(data)
    with pytest.raises(RuntimeError, match="killed here"):
        train(config, run=str(tmp_path / "run"))
    document = json.loads((data / "train" / "_annotations.coco.json").read_text())
    document["images"] = document["images"][:-2]
    kept = {image["id"] for image in document["images"]}
    document["annotations"] = [a for a in document["annotations"] if a["image_id"] in kept]
    (data / "train" / "_annotations.coco.json").write_text(json.dumps(document))
    with pytest.raises(Exception, match="not the one that the run was started with") as caught:
        train(config, run=str(tmp_path / "run"))
    assert "24 pictures" in str(caught.value)
    assert "22 pictures" in str(caught.value)


def test_another_command_does_not_continue_a_named_run(run: Path, data: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="finished"):
        train(settings(data, eval_every="6"), run=str(run))
    (tmp_path / EVENTS).write_bytes((run / EVENTS).read_bytes().rsplit(b"\n", 2)[0] + b"\n")
    (tmp_path / CONFIG).write_bytes((run / CONFIG).read_bytes())
    with pytest.raises(UsageError, match="other settings"):
        train(settings(data, batch=2), run=str(tmp_path))


def test_length_in_minutes_and_epochs(data: Path, tmp_path: Path):
    result = train(settings(data, for_="0.05min"), run=str(tmp_path / "minutes"))
    seconds = sum(w.phases.get("compute", 0) + w.phases.get("input_wait", 0)
                  for w in read_lines(result.run, STEPS, StepWindow))  # fmt: skip
    assert result.steps > 1
    assert seconds >= 0.9 * 3.0
    assert train(settings(data, for_="2ep"), run=str(tmp_path / "epochs")).steps == 12
