"""The guide docs/add-a-cause.md works: its row, rule and case are executed."""

import re
import types
from pathlib import Path
from typing import Any

import pytest

from stoker_watch.diagnosis import engine
from stoker_watch.diagnosis.causes import cause as cause_rows
from stoker_watch.diagnosis.engine import CATALOG, RULES
from stoker_watch.knowledge import parse_toml
from tests.watch.diagnosis import cases
from tests.watch.diagnosis.built import make_run

GUIDE = Path(__file__).parents[3] / "docs/add-a-cause.md"


def code_blocks() -> dict[str, str]:
    """File that the block is for → code."""
    blocks = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return dict(blocks)


def test_the_cause_of_the_guide_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = code_blocks()
    rows = parse_toml(blocks["stoker_watch/knowledge/causes.toml"])
    monkeypatch.setitem(cause_rows._tables(), "gpu_warm", rows["gpu_warm"])
    module = types.ModuleType("gpu_warm")
    exec(blocks["stoker_watch/diagnosis/causes/gpu_warm.py"], module.__dict__)
    rule = module.gpu_warm
    case: dict[str, Any] = eval(f"{{{blocks['tests/watch/diagnosis/cases.py']}}}", vars(cases))
    cause, ((has, lacks),) = cause_rows.find_cause(rule.__name__), case.values()
    assert [cause.id] == list(case)
    monkeypatch.setattr(engine, "RULES", (*RULES, (cause, rule)))
    monkeypatch.setitem(CATALOG, cause.id, cause)
    (finding,) = engine.diagnose(make_run(tmp_path / "has", **has))
    assert (finding.id, finding.severity) == ("gpu_warm", "info")
    assert engine.diagnose(make_run(tmp_path / "lacks", **lacks)) == []


def test_the_files_of_the_guide_exist() -> None:
    root = GUIDE.parents[1]
    named = re.findall(r"`((?:stoker_watch|tests)/[\w/]+\.(?:py|toml))`", GUIDE.read_text())
    assert named
    for path in named:
        assert (root / path).is_file() or (root / "packages/stoker-watch" / path).is_file(), path
