"""A run that an earlier commit of 0.2.0 wrote stays readable, with every field.

`run_of_0_2_0/` is the demo, 200 steps on a CPU, without its tensors: `model_header.json` is the header of its
best.safetensors. Paths and names of the machine are replaced; it has 6 lines of devices.jsonl and 3 images of
evaluation.json.
"""

import shutil
from pathlib import Path

import msgspec
import pytest

from stoker.config.settings import AUTO, SECTION_OF, Config, from_run, setting_rows
from stoker.models.weights.model_file import ModelMetadata
from stoker.training.checkpoint import Manifest, healthy_steps
from stoker_watch.report.html import render
from stoker_watch.report.run_report import collect
from stoker_watch.runs import records, schemas
from stoker_watch.runs.evaluation import Evaluation

RUN = Path(__file__).with_name("run_of_0_2_0")

NOT_READ = {
    f".{name}"
    for name in (
        "threads", "page_cache_bytes", "read_bytes_s", "written_bytes_s", "disk_read_bytes_s", "disk_written_bytes_s",
        "net_sent_bytes_s",
    )
}  # fmt: skip
"""Of devices.jsonl: no rule and no screen used them, so they are no longer recorded."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (records.STEPS, schemas.StepWindow),
        (records.EVENTS, schemas.Event),
        (records.DEVICES, schemas.DeviceSample),
        (records.EVALUATION, Evaluation),
        ("model_header.json", ModelMetadata),
        ("checkpoints/step-00000200/manifest.json", Manifest),
    ],
)
def test_each_field_of_its_records_is_read(name: str, kind: type[msgspec.Struct]) -> None:
    """A field that is renamed or removed would be missing from what is written again."""
    for line in (RUN / name).read_bytes().splitlines():
        again = msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(line, type=kind)))
        written = msgspec.json.decode(line)
        assert set(_lost(written, again)) <= NOT_READ


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


def test_its_settings_and_reasons_are_read() -> None:
    tables = records.read_settings(RUN)
    assert tables is not None
    reasons = tables.pop("reasons")
    config, read_reasons = from_run(RUN / records.CONFIG)
    assert {name for table in tables.values() for name in table} <= set(config.set_fields())
    assert reasons.items() <= read_reasons.items()
    assert (config.data.image_size, config.run.max_duration, config.optim.lr) == ((128, 128), "200", 0.0021)


@pytest.mark.parametrize("name", [name for name, row in setting_rows().items() if row.before is not AUTO])
def test_a_setting_that_it_lacks_has_the_value_that_it_trained_with(name: str, tmp_path: Path) -> None:
    lines = (RUN / records.CONFIG).read_text().splitlines(keepends=True)
    (tmp_path / records.CONFIG).write_text("".join(line for line in lines if not line.startswith(f"{name} =")))
    config, reasons = from_run(tmp_path / records.CONFIG)
    assert _value(config, name) == setting_rows()[name].before
    assert reasons[name] == setting_rows()[name].before_reason


def _value(config: Config, name: str) -> object:
    return getattr(getattr(config, SECTION_OF[name]), name)


def test_it_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    assert healthy_steps(run) == [200]
    report = collect(run)
    assert report.missing == []
    assert (report.explanation.state, report.explanation.steps) == ("finished", 200)
    assert sum(row.device_s for row in report.explanation.phases) == pytest.approx(report.explanation.device_s)
    assert "0.010" in render(report)
