"""A run of version 0.2.0 stays readable, with every field; tests/trainer/runs has what only the trainer reads.

`run_of_0_2_0/` is the demo, 200 steps on a CPU, without its tensors: `model_header.json` is the header of its
best.safetensors. Paths and names of the machine are replaced; it has 6 lines of devices.jsonl and 3 images of
evaluation.json, whose confusion matrix was made from its other counts.
"""

import shutil
from pathlib import Path

import msgspec
import pytest

from stoker_watch.report.html import render
from stoker_watch.report.run_report import collect
from stoker_watch.runs import records, schemas
from stoker_watch.runs.evaluation import Evaluation

RUN = Path(__file__).with_name("run_of_0_2_0")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (records.STEPS, schemas.StepWindow),
        (records.EVENTS, schemas.Event),
        (records.DEVICES, schemas.DeviceSample),
        (records.EVALUATION, Evaluation),
    ],
)
def test_each_field_of_its_records_is_read(name: str, kind: type[msgspec.Struct]) -> None:
    """A field that is renamed or removed would be missing from what is written again."""
    for line in (RUN / name).read_bytes().splitlines():
        assert lost_fields(line, kind) == []


def lost_fields(line: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """Places of a line of JSON that are not as they were once it was read as `kind` and written again."""
    again = msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(line, type=kind)))
    return _lost(msgspec.json.decode(line), again)


def _lost(written: object, again: object, place: str = "") -> list[str]:
    """Places of values that are not as they were; fields that were added since are none."""
    if isinstance(written, dict) and isinstance(again, dict):
        return [
            lost
            for key, value in written.items()
            for lost in (_lost(value, again[key], f"{place}.{key}") if key in again else [f"{place}.{key}"])
        ]
    if isinstance(written, list) and isinstance(again, list) and len(written) == len(again):
        return [lost for n, value in enumerate(written) for lost in _lost(value, again[n], f"{place}[{n}]")]
    return [] if written == again else [place]


def test_it_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    report = collect(run)
    assert report.missing == []
    assert (report.explanation.state, report.explanation.steps) == ("finished", 200)
    assert sum(row.device_s for row in report.explanation.phases) == pytest.approx(report.explanation.device_s)
    assert "0.010" in render(report)
