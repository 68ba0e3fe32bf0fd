"""Predictions: what fits, in how many parts, how measured runs change them, and that a training finds them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from stoker.config.settings import from_fields
from stoker.data.index import Index, open_index
from stoker.planning import trace as traces
from stoker.planning.machines import GPUS, measure_cpu
from stoker.planning.predict import (
    ASSUMED,
    COVERAGE,
    ERRORS,
    MIB,
    _make_job,
    describe_error,
    learn_error,
    loader_demand,
    predict_steps,
)
from stoker.training.defaults.dry_run import MEMORY_FRACTION
from stoker_watch.errors import DataError
from stoker_watch.hardware import calibration
from stoker_watch.hardware.calibration import MeasuredStep
from tests.drawn import draw

SETTINGS = from_fields(
    {"model": "retinanet_tiny_fpn", "image_size": (128, 128), "weights": "none", "mosaic": 0.0, "max_duration": "10"}
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes", train=64)


@pytest.fixture(scope="module")
def index(data: Path) -> Index:
    return open_index(data)


def test_loading_is_measured(index: Index) -> None:
    demand = loader_demand(SETTINGS, index)
    assert demand.images == 64
    assert 0 < demand.seconds < 0.1
    sizes = [path.stat().st_size for path in Path(index.root).rglob("train-*.jpg")]
    assert min(sizes) < demand.encoded_bytes < max(sizes)


def test_images_that_cannot_be_decoded_are_an_error(tmp_path: Path) -> None:
    folder = draw(tmp_path / "broken", train=2, val=1)
    index = open_index(folder)
    for path in folder.rglob("*.jpg"):
        path.write_bytes(b"\xff\xd8 not a JPEG")
    with pytest.raises(DataError, match="could be decoded"):
        loader_demand(SETTINGS, index)


@pytest.mark.slow
def test_a_prediction_per_accelerator(index: Index) -> None:
    accelerators = [GPUS["t4"], GPUS["h100"], measure_cpu()]
    t4, h100, cpu = predictions = predict_steps(SETTINGS, index, accelerators, batch_size=16)
    assert [t4.accelerator, h100.accelerator, cpu.accelerator] == ["t4", "h100", "cpu"]
    assert [t4.precision, h100.precision] == ["fp16", "bf16"]
    for prediction in predictions:
        assert prediction.fits
        assert prediction.batch_size == 16
        assert prediction.gradient_bytes == 4 * prediction.parameters > 10**6
        assert prediction.source
    assert t4.peak_bytes > cpu.peak_bytes > 0
    assert t4.peak_bytes > MIB * ASSUMED["context_mib"]
    assert t4.step_s / t4.batch_size >= h100.step_s / h100.batch_size


@pytest.mark.slow
def test_what_was_traced_once_is_not_traced_again(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SETTINGS.replace(mosaic=None)
    found = predict_steps(config, index, [GPUS["l4"]], batch_size=16)
    monkeypatch.setattr(traces, "trace_steps", lambda steps: [] if not steps else pytest.fail("it is traced again"))
    assert predict_steps(config, index, [GPUS["l4"]], batch_size=16) == found


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_split(index: Index) -> None:
    room = 75 * 2**20  # the whole batch takes 86 MiB
    tiny = msgspec.structs.replace(GPUS["t4"], key="tiny", memory_bytes=MIB * ASSUMED["context_mib"] + room)
    whole, split, none = predict_steps(
        SETTINGS, index, [GPUS["t4"], tiny, msgspec.structs.replace(tiny, memory_bytes=2**20)], batch_size=48
    )
    assert (whole.batch_size, whole.micro_batches) == (48, 1)
    assert split.batch_size == 48
    assert split.micro_batches > 1
    assert split.fits
    tensor_bytes = (split.peak_bytes - MIB * ASSUMED["context_mib"] - MIB * ASSUMED["workspace_mib"]) / (
        1 + ASSUMED["fragmentation"]
    )
    assert tensor_bytes <= MEMORY_FRACTION * room + 1
    assert split.step_s >= whole.step_s
    assert not none.fits


@pytest.mark.slow
def test_measured_runs_move_predictions_and_a_training_finds_them(index: Index) -> None:
    l4 = GPUS["l4"]
    (before,) = predict_steps(SETTINGS, index, [l4], batch_size=16)
    assert (before.step_error, before.error_of) == (learn_error("gpu"), "gpu")
    found = calibration.find_prediction(
        model="retinanet_tiny_fpn", image_size=(128, 128), batch_size=16, precision="bf16", device="NVIDIA L4"
    )
    assert found is not None
    assert found.step_s == before.step_s
    settings = calibration.step_settings({**SETTINGS.set_fields(), "model": "a model of a newer version"})
    run = MeasuredStep(
        t=time.time(), model="retinanet_tiny_fpn", image_size=(128, 128), batch_size=16, micro_batches=1,
        precision="bf16", device="NVIDIA L4", step_s=1.6 * before.step_s, steps=100, settings=settings, num_classes=3,
        max_boxes=3,
    )  # fmt: skip
    calibration.append(run)
    assert predict_steps(SETTINGS, index, [l4], batch_size=16)[0].step_s == before.step_s  # it cannot be traced
    for measured_at, model, error in (
        (8, "ember_n", learn_error("other_model")),
        (16, "retinanet_tiny_fpn", learn_error("same_model")),
    ):
        other = SETTINGS.replace(model=model)
        (own,) = predict_steps(other, index, [l4], batch_size=measured_at)
        spec = _make_job(other, index, l4, 16).spec
        calibration.append(
            msgspec.structs.replace(
                run, model=model, batch_size=measured_at, step_s=1.6 * own.step_s, settings=spec.settings,
                max_boxes=spec.max_boxes,
            )
        )  # fmt: skip
        (after,) = predict_steps(SETTINGS, index, [l4], batch_size=16)
        assert after.step_error == error
        assert "measured" in after.source
        assert after.step_s > 1.2 * before.step_s
    assert after.step_s == pytest.approx(1.6 * own.step_s, rel=0.15)


@pytest.mark.parametrize("kind", ERRORS)
def test_bands_contain_the_rows_that_they_were_not_computed_of(kind: str) -> None:
    """Leave-one-out: of the measured and published steps, nine of ten are inside the band of the others."""
    rows = ERRORS[kind].rows
    inside = [
        1 / (1 + learn_error(kind, without=k)) <= predicted / actual <= 1 + learn_error(kind, without=k)
        for k, (_, predicted, actual) in enumerate(rows)
    ]
    assert len(rows) >= 11
    assert sum(inside) >= COVERAGE * len(rows) - 1
    assert f"× or ÷ {1 + learn_error(kind):.2g}, the error of {len(rows)} " in describe_error(kind)


@pytest.mark.slow
def test_measured_steps_make_a_plan_of_a_guess(tmp_path: Path) -> None:
    """In the output, too: what it rests on, and how wide its band is."""
    data = draw(tmp_path / "shapes")
    settings = ("--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "4", "--steps", "100")

    def plan(*flags: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "stoker", "plan", str(data), "--on", "this", "--device", "cpu", *settings, *flags],
            env={**os.environ, "STOKER_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "200"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    guess, measured = plan(), plan("--measure")
    assert "a guess: no step was measured on any of these devices" in guess
    assert f"guessed ×÷ {1 + learn_error('cpu'):.2g}" in guess
    assert f"× or ÷ {1 + learn_error('cpu'):.2g}, the error of 32 steps on CPUs" in guess
    assert "a plan from measured steps on cpu" in measured
    assert f"measured ×÷ {1 + learn_error('same_model'):.2g}" in measured
    assert plan().splitlines()[4:6] != guess.splitlines()[4:6], "the measurement is kept"
