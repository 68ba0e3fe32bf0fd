"""The user's file of measured and predicted steps: nothing that others write, damage or delete stops a training."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.models import MODELS
from stoker_watch.hardware import calibration
from stoker_watch.hardware.calibration import MAX_FILE_BYTES, MeasuredStep, PredictedStep


def measured(**changes: Any) -> MeasuredStep:
    usual: dict[str, Any] = {
        "t": 1e9, "model": "ember_n", "image_size": (320, 320), "batch_size": 16, "micro_batches": 1,
        "precision": "fp32", "device": "NVIDIA L4", "step_s": 0.2, "steps": 100,
        "settings": {"model": "ember_n", "image_size": [320, 320]}, "num_classes": 3, "max_boxes": 20,
    }  # fmt: skip
    return MeasuredStep(**(usual | changes))


def predicted(**changes: Any) -> PredictedStep:
    usual: dict[str, Any] = {
        "t": 1e9, "model": "ember_n", "image_size": (320, 320), "batch_size": 16, "precision": "bf16",
        "accelerator": "l4", "device_pattern": r".*\bL4\b.*", "step_s": 0.21, "step_error": 0.25, "peak_bytes": 10**9,
    }  # fmt: skip
    return PredictedStep(**(usual | changes))


def is_l4(name: str) -> bool:
    return name == "NVIDIA L4"


WANTED: dict[str, Any] = {
    "model": "ember_n", "image_size": (320, 320), "batch_size": 16, "precision": "bf16", "device": "NVIDIA L4",
}  # fmt: skip


def test_what_was_added_is_found() -> None:
    assert calibration.read_steps() == []
    assert calibration.find_prediction(**WANTED) is None
    calibration.append(measured(step_s=0.3), predicted(step_s=0.5))
    calibration.append(
        measured(step_s=0.4), measured(device="NVIDIA T4"), measured(compiled=True), measured(threads=2), predicted()
    )
    assert [line.step_s for line in calibration.measured_steps(is_l4)] == [0.4, 0.3]  # the newest first
    assert calibration.find_prediction(**WANTED) == predicted()


@pytest.mark.parametrize(
    "other",
    [{"model": "ember_s"}, {"image_size": (320, 352)}, {"batch_size": 8}, {"precision": "fp16"}, {"device": "L40S"}],
)
def test_a_prediction_for_another_training_is_not_found(other: dict[str, Any]) -> None:
    calibration.append(predicted())
    assert calibration.find_prediction(**(WANTED | other)) is None


@settings(max_examples=60)
@given(damage=st.lists(st.binary(max_size=40), min_size=1, max_size=4), cut=st.integers(0, 60))
def test_lines_survive_damage_around_them(damage: list[bytes], cut: int) -> None:
    calibration.path().unlink(missing_ok=True)
    lines = [measured(step_s=float(n + 1)) for n in range(len(damage))]
    for line, garbage in zip(lines, damage, strict=True):
        calibration.append(line)
        with calibration.path().open("ab") as file:
            file.write(garbage)
    calibration.append(last := predicted())
    found = calibration.read_steps()
    assert found[-1] == last
    assert [line for line in found if isinstance(line, MeasuredStep)] == lines
    content = calibration.path().read_bytes()
    calibration.path().write_bytes(content[: max(0, len(content) - cut)])  # a kill in the middle of a write
    calibration.append(measured(step_s=9.0))
    assert calibration.read_steps()[-1] == measured(step_s=9.0)


@pytest.mark.parametrize(
    "damaged",
    [
        b"null\n", b"[]\n", b'{"kind": "measured"}\n', b'{"kind": "of a newer version"}\n', b"[" * 100_000 + b"\n",
        b"\xff\xfe\n", json.dumps({**WANTED, "kind": "predicted"}).encode() + b"\n",
    ],
)  # fmt: skip
def test_lines_that_are_not_ours_are_skipped(damaged: bytes) -> None:
    calibration.append(predicted())
    with calibration.path().open("ab") as file:
        file.write(damaged)
    assert calibration.find_prediction(**WANTED) == predicted()


def test_a_pattern_that_is_damaged_matches_nothing() -> None:
    calibration.append(predicted(), predicted(device_pattern="("))
    assert calibration.find_prediction(**WANTED) == predicted()


def add_many(cache: str, writer: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_CACHE_DIR", cache)
        for number in range(25):
            calibration.append(measured(steps=1000 * writer + number))


def test_writers_at_the_same_time_lose_no_line(own_cache: Path) -> None:
    padding = measured(settings={"x": "y" * 3000})
    while not calibration.path().exists() or calibration.path().stat().st_size < MAX_FILE_BYTES - 9000:
        calibration.append(padding)  # so that the file is shortened while they write
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_many, args=(str(own_cache), writer)) for writer in range(1, 4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    steps = [line.steps for line in calibration.read_steps() if isinstance(line, MeasuredStep)]
    for writer in range(1, 4):
        assert [number for number in steps if number // 1000 == writer] == [1000 * writer + n for n in range(25)]
    assert calibration.path().stat().st_size < MAX_FILE_BYTES


def test_the_file_stays_small_and_keeps_the_newest() -> None:
    line = measured(settings={"x": "y" * 4000})
    for number in range(300):
        calibration.append(measured(steps=number, settings=line.settings))
    assert calibration.path().stat().st_size < MAX_FILE_BYTES + 10_000
    steps = [line.steps for line in calibration.read_steps() if isinstance(line, MeasuredStep)]
    assert steps == list(range(steps[0], 300))
    assert len(steps) > 50


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_described_by_all_settings_of_its_model(name: str):
    assert set(MODELS[name].defaults) <= calibration.STEP_FIELDS
