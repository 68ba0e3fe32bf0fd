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
    """Its row and its rule are enough, and the rule is short."""
    blocks = code_blocks()
    rows = parse_toml(blocks["stoker_watch/knowledge/causes.toml"])
    monkeypatch.setitem(cause_rows._tables(), "parsed_again", rows["parsed_again"])
    module = types.ModuleType("parsed_again")
    exec(blocks["stoker_watch/diagnosis/causes/parsed_again.py"], module.__dict__)
    rule = module.parsed_again
    case: dict[str, Any] = eval(f"{{{blocks['tests/watch/diagnosis/cases.py']}}}", vars(cases))
    cause, ((has, lacks),) = cause_rows.find_cause(rule.__name__), case.values()
    assert [cause.id] == list(case)
    monkeypatch.setattr(engine, "RULES", (*RULES, (cause, rule)))
    monkeypatch.setitem(CATALOG, cause.id, cause)
    engine._exactness.cache_clear()
    (finding,) = (one for one in engine.diagnose(make_run(tmp_path / "has", **has)) if one.severity != "info")
    assert (finding.id, finding.place) == ("parsed_again", "data.py:9")
    assert "parsed_again" not in {one.id for one in engine.diagnose(make_run(tmp_path / "lacks", **lacks))}
    engine._exactness.cache_clear()
    source = blocks["stoker_watch/diagnosis/causes/parsed_again.py"]
    assert len(source[source.index("def ") :].splitlines()) <= 15


def test_a_row_without_its_rule_is_a_sentence() -> None:
    with pytest.raises(LookupError, match=r"\[parsed_again\], and no file of causes/ .* write it, and add a new file"):
        engine._rule_of("parsed_again")


def test_the_files_of_the_guide_exist() -> None:
    root = GUIDE.parents[1]
    named = re.findall(r"`((?:stoker_watch|tests)/[\w/]+\.(?:py|toml))`", GUIDE.read_text())
    assert named
    for path in named:
        assert (root / path).is_file() or (root / "packages/stoker-watch" / path).is_file(), path
