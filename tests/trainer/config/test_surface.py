"""One surface: a setting is a field of settings.py, a flag, a TOML key, a parameter of `stoker.train`, and a row of
docs/settings.md. `python -m tests.trainer.config.test_surface` writes that page anew."""

import ast
import dataclasses
import inspect
import typing
from pathlib import Path

import pytest

import stoker
from stoker.config import settings
from stoker.config.keywords import Settings
from stoker.config.settings import SECTION_OF, SECTIONS, from_toml, valid_values
from stoker.training.defaults.derive import SETTINGS, Row
from stoker_watch.cli.app import app
from stoker_watch.monitor.options import MonitoringOptions

KEYWORDS = Path(stoker.__file__).parent / "config" / "keywords.pyi"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "settings.md"
EXAMPLE = """\
[data]
data = "/data/bccd"
image_size = [320, 320]

[model]
model = "retinanet_tiny_fpn"

[optim]
lr = 0.002

[run]
max_duration = "12ep"
batch_size = 16
"""
POSITIONAL = "data"
"""The argument of the command and of the function, and no flag."""


def described() -> dict[str, tuple[str, str, str]]:
    """Field → (section, type as written, what it says of itself), read from the source."""
    found = {}
    for section, kind in SECTIONS.items():
        (body,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                assert isinstance(text, ast.Expr), f"{field.target.id} has no docstring"
                assert isinstance(text.value, ast.Constant)
                found[field.target.id] = (
                    section,
                    ast.unparse(field.annotation),
                    " ".join(str(text.value.value).split()),
                )
    return found


def keywords() -> str:
    """The text of keywords.pyi."""
    lines = [
        '"""The settings as keyword arguments, for type checkers and editors. Generated from `settings.py` by',
        "`python -m tests.trainer.config.test_surface`; do not edit. `epochs`, `steps`, `max_time` set `max_duration`.",
        '"""',
        "",
        "# fmt: off",
        "# ruff: noqa: E501",
        "",
        "from typing import Literal, TypedDict",
        "",
        "class Settings(TypedDict, total=False):",
        '    """What `stoker.train` takes, by the names of its flags; a setting that is not given is derived."""',
        "",
    ]
    for name, (_, written, _) in described().items():
        if name == POSITIONAL:
            continue
        kind = ast.parse(written, mode="eval").body
        if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
            assert isinstance(kind.slice, ast.Tuple)
            kind = kind.slice.elts[0]
        written = "int | tuple[int, int]" if name == "image_size" else ast.unparse(kind)
        lines.append(f"    {name}: {written}".replace("'", '"'))
        if name == "max_duration":
            lines += ["    epochs: float", "    steps: int", "    max_time: str"]
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Every setting has one name: a flag of `stoker train` (`--lr 0.01`), a key of a run's `config.toml`",
        "(`lr = 0.01`), and a keyword of `stoker.train` in Python (`lr=0.01`). `--epochs 12`, `--steps 5000` and",
        "`--max-time 30min` set `max_duration`, in Python too (`epochs=12`). A setting that is not set is derived from",
        "the data, the device and the recipe; the run prints the important ones with the reason, with `--verbose` all.",
        "",
        "`stoker train --config FILE` reads settings from a file; flags override them. A key stands in its section,",
        "and several values in brackets:",
        "",
        "```toml",
        *EXAMPLE.splitlines(),
        "```",
    ]
    for section, kind in SECTIONS.items():
        lines += ["", f"## {section}", "", str(inspect.getdoc(kind)), "", "| setting | what it is | values | default |"]
        lines.append("|---|---|---|---|")
        for name, (of, _, text) in described().items():
            if of == section and name != POSITIONAL:
                default = _default(SETTINGS[name]) if name in SETTINGS else "none"
                lines.append(f"| `{name}` | {text} | {', '.join(valid_values(name))} | {default} |")
    return "\n".join(lines) + "\n"


def _default(row: Row) -> str:
    """The value and its reason, or the first sentence about the function that derives it."""
    if callable(row):
        return "derived: " + (inspect.getdoc(row) or "").partition("\n\n")[0].replace("\n", " ").removesuffix(".")
    return "the recipe's or the model's" if row is None else f"{_shown(row[0])}: {row[1]}".removeprefix(": ")


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def plain_types(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


def test_python_has_the_settings_of_the_config():
    fields = {name: t for kind in SECTIONS.values() for name, t in plain_types(kind).items() if name in SECTION_OF}
    assert fields.pop(POSITIONAL) is str
    lengths = {"epochs": float, "steps": int, "max_time": str}
    assert plain_types(Settings) == fields | lengths | {"image_size": int | tuple[int, int]}
    assert KEYWORDS.read_text() == keywords(), "python -m tests.trainer.config.test_surface regenerates it"


def test_the_command_has_a_flag_for_every_setting():
    arguments = [
        a for a in app["train"].assemble_argument_collection(default_parameter=app.default_parameter) if a.parse
    ]
    flags = {name for argument in arguments for name in argument.names}
    own = {
        "--run-dir",
        "--resume",
        "--accept-changed-data",
        "--trace",
        "--dry-run",
        "--verbose",
        "--log-format",
        "--help",
        "-h",
        "--version",
        "--no-compile",
        "--no-reduced-tail",
    }
    own |= {"--epochs", "--steps", "--max-time", "--config", "--devices", "--restarts"}
    own |= {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(MonitoringOptions)}
    wanted = {"--" + name.replace("_", "-") for name in SECTION_OF if name != POSITIONAL}
    assert {flag for flag in flags if flag.startswith("--")} - own == wanted


SEVERAL = {"tuple[int, int]": (2, int), "tuple[float, float]": (2, float), "tuple[float, ...]": (3, float),
           "tuple[str, ...]": (3, str)}  # fmt: skip
"""Type of a setting that has several values → how many are tried, and of which type."""


@pytest.mark.parametrize("name", [n for n, (_, written, _) in described().items() if "tuple[" in written])
def test_a_setting_of_several_values_takes_them_all_on_the_command_line(name: str):
    count, kind = next(several for written, several in SEVERAL.items() if written in described()[name][1])
    values = tuple(map(kind, range(1, count + 1)))
    flag = "--" + name.replace("_", "-")
    _, bound, _ = app.parse_args(["train", "images", flag, *map(str, values), "--batch-size", "2"])
    given = bound.arguments["config"]
    assert dict(given.items())[name] == values
    assert (given.run.batch_size, bound.arguments["data"]) == (2, "images")


@pytest.mark.parametrize(
    "name", [name for name, row in SETTINGS.items() if isinstance(row, tuple) and isinstance(row[0], bool)]
)
def test_a_choice_of_two_can_be_made_against_its_default(name: str):
    """Also on the command line, where what is usual needs no flag."""
    row = SETTINGS[name]
    assert isinstance(row, tuple)
    usual = row[0]
    flag = ("--no-" if usual else "--") + name.replace("_", "-")
    _, bound, _ = app.parse_args(["train", "images", flag])
    assert dict(bound.arguments["config"].items())[name] is not usual


def test_the_function_takes_what_the_command_takes():
    command, function = (inspect.signature(f).parameters for f in (app["train"].default_command, stoker.train))
    lengths = {"epochs", "steps", "max_time"}  # settings of the function, of their own in the command
    of_the_command = {"config", "config_file", "dry_run", "restarts"}
    in_python = {"settings", "callbacks"}
    assert set(command) - of_the_command - lengths == set(function) - in_python
    assert function["settings"].kind is inspect.Parameter.VAR_KEYWORD
    for name in set(function) - in_python:
        assert command[name].default == function[name].default


def test_no_default_is_written_into_the_config():
    assert all(field.default is settings.AUTO for kind in SECTIONS.values() for field in dataclasses.fields(kind))


def test_the_page_of_settings_is_current():
    assert PAGE.read_text() == page(), "python -m tests.trainer.config.test_surface writes it anew"


def test_the_file_on_the_page_is_a_file_of_settings(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(PAGE.read_text().partition("```toml\n")[2].partition("```")[0])
    config, reasons = from_toml(path)
    settings.check_config(config)
    assert (config.data.image_size, config.run.max_duration, reasons) == ((320, 320), "12ep", {})


@pytest.mark.parametrize("name", stoker.__all__)
def test_every_public_name_is_there_and_described(name: str):
    thing = getattr(stoker, name)
    assert name in dir(stoker)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        assert inspect.getdoc(thing)


if __name__ == "__main__":
    PAGE.write_text(page())
    KEYWORDS.write_text(keywords())
