"""What the catalog says of `stoker train` and `stoker check`: flags and settings exist, ids are explained; and the
page of all of them."""

import ast
import functools
import re
from pathlib import Path

import pytest

import stoker
import stoker_watch
from scripts.write_causes import render_page
from stoker.config.settings import SECTION_OF
from stoker.preflight.catalog import rows as check_rows
from stoker_watch.cli.app import app
from stoker_watch.diagnosis import causes
from stoker_watch.diagnosis.causes.cause import Cause
from stoker_watch.diagnosis.endings import Ending, endings
from stoker_watch.diagnosis.engine import CATALOG
from stoker_watch.diagnosis.reference import all_entries, explain_id
from tests.watch.diagnosis.test_catalog import NATIVE_ONLY
from tests.watch.report.test_sizing import APPLIES

PACKAGES = [Path(package.__file__).parent for package in (stoker_watch, stoker)]
CAUSES_FOLDER = Path(causes.__file__).parent
MAKERS = {"make_finding", "ok", "unknown", "change", "_advice", "_note", "_make_finding", "_refused"}
"""Functions whose first argument is the id of a finding."""
OF_OTHER_PROGRAMS = {"--cpus", "--ipc", "--shm-size", "--gpus", "--nproc-per-node", "--pid"}
"""Flags of docker, torchrun and py-spy."""
PLACEHOLDERS = {
    "--anchor-sizes": ["32", "64", "128"], "--lr": ["0.01"], "--eval-every": ["2ep"], "--workers": ["4"],
    "--run-dir": ["runs/x"],
}  # fmt: skip
"""What the user writes behind a flag whose value the rule does not know."""


def test_the_page_has_all_of_them() -> None:
    page = render_page()
    for entry in all_entries():
        assert f"### `{entry.id}`: {entry.title}" in page
    assert len({(entry.id, entry.section) for entry in all_entries()}) == len(all_entries())


def test_every_id_of_every_command_is_explained() -> None:
    """Ids that are written in calls which make findings."""
    known = {entry.id for entry in all_entries()}
    ids = set(APPLIES)
    ids |= {name.partition("/")[0] for name in check_rows()}
    for file in (file for package in PACKAGES for file in package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            ids |= {str(keyword.value.value) for keyword in node.keywords if keyword.arg == "id"
                    and name in ("Finding", "make_finding") and isinstance(keyword.value, ast.Constant)}  # fmt: skip
            if name in MAKERS and node.args and isinstance(node.args[0], ast.Constant) and len(node.args) > 1:
                ids.add(str(node.args[0].value))
    ids -= {id for id in ids if not re.fullmatch(r"[a-z][a-z_0-9]+", id)}
    assert ids - known == set()
    assert len(ids) >= 120


@functools.cache
def _flags_of_train() -> set[str]:
    """All flags of `stoker train`, as its parser has them."""
    arguments = app["train"].assemble_argument_collection(default_parameter=app.default_parameter)
    return {name for argument in arguments for name in argument.names if name.startswith("--")}


def test_settings_exist() -> None:
    assert {name for cause in CATALOG.values() for name in cause.config_patch} <= set(SECTION_OF)


@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_flags_exist(cause: Cause) -> None:
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", f"{cause.fix} {cause.command}"))
    assert flags <= _flags_of_train() | OF_OTHER_PROGRAMS


@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_a_command_of_flags_is_parsed(cause: Cause) -> None:
    if cause.command is None or not cause.command.startswith("--"):
        return
    words = cause.command.split()
    app.parse_args(["train", "demo", *words, *PLACEHOLDERS.get(words[-1], [])], print_error=False, exit_on_error=False)


def test_commands_that_rules_choose_are_flags_that_exist() -> None:
    """A rule may have another command than its row."""
    chosen = set()
    for file in CAUSES_FOLDER.glob("*.py"):
        chosen |= set(re.findall(r'command"?(?:=|: )"(--[a-z-]+)', file.read_text()))
    assert chosen <= _flags_of_train()
    assert "--run-dir" in chosen


@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_external_jobs_get_no_flags(cause: Cause) -> None:
    if cause.required_records[0].startswith("config.toml") or cause.id in NATIVE_ONLY:
        assert not cause.external_fix
        return
    text = cause.external_fix or cause.fix
    assert not set(re.findall(r"--[a-z][a-z-]*", text)) & _flags_of_train()
    assert "STOKER_" not in text


@pytest.mark.parametrize("ending", endings().values(), ids=lambda ending: ending.id)
def test_endings_name_no_flag_of_stoker_and_promise_no_checkpoint(ending: Ending) -> None:
    """They are those of any job: `--nproc-per-node` and others are of torchrun, docker and Slurm."""
    assert not set(re.findall(r"--[a-z][a-z-]*", ending.fix)) & _flags_of_train() - {"--help"}
    assert set(re.findall(r"`stoker ([a-z]+)", ending.fix)) <= {"watch", "why", "report", "check", "data"}
    assert "continues from" not in ending.fix


def test_the_severity_that_an_id_is_explained_with_is_that_of_its_findings() -> None:
    """Of `stoker check`: those of its rows, and others only where a probe chooses the severity."""
    of_rows: dict[str, set[str]] = {}
    for name, row in check_rows().items():
        of_rows.setdefault(name.partition("/")[0], set()).add(row.severity)
    chosen = {
        "driver_old",
        "no_gpu",
        "gpu_in_use",
        "bundled_cuda_not_found",
        "framework_replaced",
        "numpy_too_new",
        "cuda_mismatch",
        "source_unreadable",
        "tensorflow_no_gpu",
        "variable_credentials",
        "variable_output",
        "disk",
        "run_access",
        "data_rate",
        "rank_interface",
    }
    for id, severities in of_rows.items():
        texts = {dict(entry.rows)["severity"] for entry in explain_id(id) if "`stoker check`" in entry.section}
        assert texts, id
        for text in texts:
            told = set(re.findall("blocker|critical|warning|info|unknown|ok", text))
            assert severities - {"ok", "unknown"} <= told, id
            assert told <= severities or id in chosen, id
