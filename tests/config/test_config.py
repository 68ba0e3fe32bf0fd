"""Settings: one surface of names, TOML there and back, errors that name the valid choices."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.settings import (
    SECTION_OF,
    SECTIONS,
    Config,
    Duration,
    check,
    from_fields,
    from_toml,
    parse_duration,
    settings_table,
    to_toml,
)
from stoker.errors import ConfigError

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "canvas": st.tuples(st.integers(1, 40).map(lambda n: 32 * n), st.integers(1, 40).map(lambda n: 32 * n)),
    "zoom": st.tuples(st.floats(0.05, 1), st.floats(1, 20)),
    "anchor_sizes": st.lists(st.floats(1, 900), min_size=1, max_size=6).map(tuple),
    "weights": st.text(min_size=1),
    "data": st.text(min_size=1),
    "box_loss": st.sampled_from(["l1", "giou"]),
    "rate": st.floats(1e-8, 10),
    "batch": st.integers(1, 999),
    "for_": st.sampled_from(["12ep", "5000", "30min"]),
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
        source = Path(__import__("inspect").getsourcefile(kind)).read_text()
        for field in dataclasses.fields(kind):
            after = source.split(f"    {field.name}: ", 1)[1].split("\n", 2)[1]
            assert after.strip().startswith('"""'), field.name


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


@pytest.mark.parametrize("text", ["", "ep", "12s", "1.5", "-3", "ten", "12 parsecs"])
def test_bad_durations_name_the_valid_ones(text: str):
    with pytest.raises(ConfigError) as caught:
        parse_duration(text)
    assert "12ep" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"canvas": (320, 16)}, ["--canvas", "at least 32"]),
        ({"flip": 1.5}, ["--flip", "0 … 1"]),
        ({"hue": 0.6}, ["--hue", "0 … 0.5"]),
        ({"mosaic": 0.5, "batch": 6}, ["--mosaic 0.5", "multiple of 4", "--batch 4"]),
        ({"batch": 8, "accumulate": 3}, ["--accumulate 3", "1, 2, 4, 8"]),
        ({"zoom": (2.0, 1.0)}, ["--zoom"]),
        ({"foreground_iou": 0.4, "background_iou": 0.5}, ["--background-iou"]),
        ({"for_": "0"}, ["--for"]),
        ({"anchor_sizes": ()}, ["--anchor-sizes"]),
    ],
)
def test_values_that_cannot_be(fields: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as caught:
        check(from_fields(fields))
    for word in words:
        assert word in str(caught.value)


def test_unknown_names_are_answered_with_the_nearest(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean 'batch'"):
        from_fields({"bach": 3})
    path = tmp_path / "config.toml"
    for text, words in [
        ("[run]\nbach = 3\n", "no setting 'bach'"),
        ("[trian]\n", r"no section \[trian\]"),
        ("[run]\nbatch = 'x'\n", "wrong kind"),
        ("[run\n", "not valid TOML"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            from_toml(path)
        assert str(path) in str(caught.value)


def test_rows_say_who_chose():
    config = from_fields({"batch": 8, "for_": "3ep"})
    assert settings_table(config, {"batch": "fits"}) == [("for", "3ep", None), ("batch", 8, "fits")]


def test_replace_keeps_the_rest():
    config = Config().replace(batch=3).replace(rate=0.1)
    assert config.set_fields() == {"batch": 3, "rate": 0.1}
