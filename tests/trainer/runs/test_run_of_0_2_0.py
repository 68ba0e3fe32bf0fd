"""What only the trainer reads of a run that an earlier commit of 0.2.0 wrote."""

from pathlib import Path

import msgspec
import pytest

from stoker.config.settings import AUTO, SECTION_OF, Config, from_run, setting_rows
from stoker.models.weights.model_file import ModelMetadata
from stoker.training.checkpoint import Manifest, healthy_steps
from stoker_watch.runs import records
from tests.watch.runs.test_run_of_0_2_0 import RUN, lost_fields


@pytest.mark.parametrize(
    ("name", "kind"), [("model_header.json", ModelMetadata), ("checkpoints/step-00000200/manifest.json", Manifest)]
)
def test_each_field_of_its_checkpoint_is_read(name: str, kind: type[msgspec.Struct]) -> None:
    for line in (RUN / name).read_bytes().splitlines():
        assert lost_fields(line, kind) == []


def test_its_checkpoint_is_found() -> None:
    assert healthy_steps(RUN) == [200]


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
