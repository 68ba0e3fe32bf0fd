"""Settings: one surface of names, TOML there and back, errors that name the valid choices."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.settings import (
    SECTION_OF,
    SECTIONS,
    Config,
    check_config,
    from_fields,
    from_toml,
    settings_table,
    to_toml,
)
from stoker_watch.durations import Duration, parse_duration
from stoker_watch.errors import ConfigError

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "image_size": st.tuples(st.integers(1, 40).map(lambda n: 32 * n), st.integers(1, 40).map(lambda n: 32 * n)),
    "scale_range": st.tuples(st.floats(0.05, 1), st.floats(1, 20)),
    "anchor_sizes": st.lists(st.floats(1, 900), min_size=1, max_size=6).map(tuple),
    "weights": st.text(min_size=1),
    "data": st.text(min_size=1),
    "box_loss": st.sampled_from(["l1", "giou"]),
    "lr": st.floats(1e-8, 10),
    "batch_size": st.integers(1, 999),
    "max_duration": st.sampled_from(["12ep", "5000", "30min"]),
}


@given(st.fixed_dictionaries({}, optional=VALUES), st.dictionaries(st.sampled_from(sorted(SECTION_OF)), st.text()))
def test_toml_round_trip(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], reasons: dict[str, str]):
    config = from_fields(fields)
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_text(to_toml(config, reasons))
    assert from_toml(path) == (config, reasons)


def test_field_names_are_unique_over_the_sections():
    names = [field.name for kind in SECTIONS.values() for field in dataclasses.fields(kind)]
    assert len(names) == len(set(names)) == len(SECTION_OF)


def test_every_field_is_documented():
    for kind in SECTIONS.values():
        (section,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(section, ast.ClassDef)
        documented = {
            field.target.id
            for field, after in itertools.pairwise(section.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr)
        }
        assert documented == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("12ep", Duration(12, "epochs")),
        ("1.5 epochs", Duration(1.5, "epochs")),
        ("5000", Duration(5000, "steps")),
        ("30min", Duration(30, "minutes")),
        ("2h", Duration(120, "minutes")),
    ],
)
def test_durations(text: str, duration: Duration):
    assert parse_duration(text) == duration
    assert parse_duration(str(duration)) == duration


@pytest.mark.parametrize("text", ["", "ep", "12x", "1.5", "-3", "ten", "12 parsecs"])
def test_bad_durations_name_the_valid_ones(text: str):
    with pytest.raises(ConfigError) as caught:
        parse_duration(text)
    assert "12ep" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image_size": (320, 16)}, ["--image-size", "at least 32"]),
        ({"hflip": 1.5}, ["--hflip", "0 … 1"]),
        ({"hue": 0.6}, ["--hue", "0 … 0.5"]),
        ({"mosaic": 0.5, "batch_size": 6}, ["--mosaic 0.5", "multiple of 4", "--batch-size 4"]),
        ({"batch_size": 8, "grad_accum_steps": 3}, ["--grad-accum-steps 3", "1, 2, 4, 8"]),
        ({"scale_range": (2.0, 1.0)}, ["--scale-range"]),
        ({"fg_iou_thresh": 0.4, "bg_iou_thresh": 0.5}, ["--bg-iou-thresh"]),
        ({"max_duration": "0"}, ["--max-duration"]),
        ({"anchor_sizes": ()}, ["--anchor-sizes"]),
    ],
)
def test_values_that_cannot_be(fields: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as caught:
        check_config(from_fields(fields))
    for word in words:
        assert word in str(caught.value)


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        from_fields({"bath_size": 3})
    path = tmp_path / "config.toml"
    for text, words in [
        ("[run]\nbach_size = 3\n", "no setting 'bach_size'"),
        ("[trian]\n", r"no section \[trian\]"),
        ("[run]\nbatch_size = 'x'\n", "wrong kind"),
        ("[run\n", "not valid TOML"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            from_toml(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('mdoel = "x"\n', ["1", "'mdoel' is outside", "did you mean `model` of [model]?", "[model]", 'model = "x"']),
        ('model = "y"\n', ["1", "`model` belongs to [model]", "[model]", 'model = "y"']),
        ("batch-size = 8\n", ["1", "it is `batch_size` in [run]", "[run]", "batch_size = 8"]),
        ("[run]\nlr = 0.1\n", ["2", "[run] has no setting 'lr': `lr` belongs to [optim]", "[optim]", "lr = 0.1"]),
        ("[optim]\nlearning_rate = 0.1\n", ["2", "it is `lr` in [optim]", "[optim]", "lr = 0.1"]),
        ("[run]\n\nepochs = 12\n", ["3", "it is `max_duration` in [run]", "[run]", 'max_duration = "12ep"']),
        ("[run]\nlr = 1\n[optim]\nlr = 2\n", ["2", "`lr` belongs to [optim]"]),
        ("run.lr = 1\n", ["1", "`lr` belongs to [optim]"]),
        ("[run]\ndevices = 2\n", ["2", "'devices' is a flag", "--config"]),
        ("[data]\n# a note\nimage_size = 'big'\n", ["3", "two whole numbers", "image_size = [320, 320]"]),
        ("[optim]\nlr = 'x'\n", ["2", "valid:  number"]),
        ("[run]\nprecision = 'fp8'\n", ["2", "fp32, bf16, fp16"]),
        ("optim = 3\n", ["1", "'optim' is a section", "write [optim]"]),
        ("[[model]]\nx = 1\n", ["", "'model' is a section", "write [model]"]),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_shown_with_its_line_and_how_it_is_written(tmp_path: Path, text: str, says: list[str]):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        from_toml(path)
    line, *words = says
    assert caught.value.location == (f"{path}:{line}" if line else str(path))
    printed = str(caught.value)
    for word in words:
        assert word in printed
        printed = printed.partition(word)[2]


def test_one_number_is_a_square_in_a_file_too(tmp_path: Path):
    path = tmp_path / "square.toml"
    path.write_text("[data]\nimage_size = 128\n")
    assert from_toml(path)[0].data.image_size == (128, 128)


def test_rows_say_who_chose():
    config = from_fields({"batch_size": 8, "max_duration": "3ep"})
    assert settings_table(config, {"batch_size": "fits"}) == [("max-duration", "3ep", None), ("batch-size", 8, "fits")]


def test_replace_keeps_the_rest():
    config = Config().replace(batch_size=3).replace(lr=0.1)
    assert config.set_fields() == {"batch_size": 3, "lr": 0.1}


@pytest.mark.parametrize(
    ("epochs", "length"), [(12, "12ep"), (0.5, "0.5ep"), ("12", "12ep"), ("x", None), ([1], None), (True, None)]
)
def test_epochs_are_a_number_or_its_text(epochs: object, length: str | None) -> None:
    if length is None:
        with pytest.raises(ConfigError):
            from_fields({"epochs": epochs})
    else:
        assert from_fields({"epochs": epochs}).run.max_duration == length


@pytest.mark.parametrize("queries", [0, -5])
def test_a_number_of_queries_is_positive(queries: int) -> None:
    with pytest.raises(ConfigError, match="queries"):
        check_config(from_fields({"queries": queries, "model": "dfine_n"}))


def test_a_setting_that_every_run_of_earlier_commits_has_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[run]\nbatch_size = 4\nstages = 1\n[reasons]\nstages = "one device"\n')
    config, reasons = from_toml(file)
    assert (config.run.batch_size, reasons) == (4, {})
    file.write_text("[run]\nstages = 2\n")
    with pytest.raises(ConfigError, match="stages"):
        from_toml(file)


def test_the_line_is_that_of_the_section(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[reasons]\nbatch_size = "small"\n[optim]\nlr = 0.1\n[data]\nlr = 0.2\n')
    with pytest.raises(ConfigError) as caught:
        from_toml(file)
    assert str(caught.value.location) == f"{file}:6"
