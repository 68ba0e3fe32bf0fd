"""knowledge/endings.toml: each row is complete, its samples are explained by it among all others, and a new ending
needs nothing but a row."""

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker_watch.diagnosis import endings as module
from stoker_watch.diagnosis.endings import UNEXPLAINED, endings, line_patterns, required_literal
from stoker_watch.diagnosis.engine import CATALOG
from stoker_watch.diagnosis.postmortem import explain
from stoker_watch.diagnosis.run_data import Termination
from stoker_watch.diagnosis.termination import split_log_lines
from stoker_watch.findings.finding import Finding
from stoker_watch.knowledge import parse_toml, read_toml
from stoker_watch.secrets import mask_secrets

if sys.version_info >= (3, 11):
    from re import _constants, _parser  # type: ignore[attr-defined]
else:
    import sre_constants as _constants
    import sre_parse as _parser

SAMPLES = [(id, sample.text) for id, ending in endings().items() for sample in ending.samples]
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'


def died(text: str, exit_code: int | None) -> list[Finding]:
    return explain(Termination(exit_code=exit_code, output=split_log_lines(text.encode(), "job.log")))


@pytest.mark.parametrize("before", ["", "step 1 of 90\n", "step 1 of 90\n" + TRACEBACK])
def test_each_sample_is_explained_by_its_ending(before: str) -> None:
    wrong = []
    for (id, line), exit_code in itertools.product(SAMPLES, (None, 1)):
        role = endings()[id].role
        if TRACEBACK in before and role in ("stop", "consequence"):
            continue  # the error of the traceback comes first
        first = died(before + line + "\n", 0 if role == "remark" else exit_code)[0]
        quoted = (first.evidence[0].text, first.evidence[0].source)
        expected = (mask_secrets(line[:500].strip()), f"job.log:{before.count(chr(10)) + 1}")
        if (first.id, first.severity, quoted) != (id, endings()[id].severity, expected):
            wrong.append(f"{id}, exit code {exit_code}: {first.id}, {first.severity}, {quoted}")
    assert not wrong, "\n".join(wrong)


def test_a_job_that_ended_well_has_no_failure() -> None:
    found = {id for id, line in SAMPLES if died(f"{line}\nstep 90 of 90\n", exit_code=0)}
    assert found == {id for id, ending in endings().items() if ending.role == "remark"}


def test_each_ending_is_complete() -> None:
    assert not endings().keys() & CATALOG.keys()
    assert endings().keys() >= UNEXPLAINED
    assert all(ending.title and ending.fix and ending.seen for ending in endings().values())
    by_line = {pattern.ending.id for pattern in line_patterns() if pattern.traceback_end is None}
    assert {id for id, ending in endings().items() if ending.samples} == by_line, "tracebacks: test_postmortem.py"
    assert len({text for _, text in SAMPLES}) == len(SAMPLES)


@pytest.mark.parametrize(("pattern", "literal"), [
    (r"out of memory \(\d+ of \d+\)", "out of memory ("),
    (r"(?i)Killed (by|with) signal", "killed "),
    (r"[ab]cde(Bus error|Segfault\S+)xyz?", "cde"),
    (r"No space(?! left)", "no space"),
    (r"lines?: ", "line"),
    (r"a[(|]bcd{2}e+f\.g", "f.g"),
])  # fmt: skip
def test_the_text_that_every_match_contains(pattern: str, literal: str) -> None:
    assert required_literal(pattern) == literal


@pytest.mark.parametrize("pattern", [r"\d+", r"(abcd)?x", r"abcd|efgh"])
def test_a_pattern_without_such_a_text_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"outside its groups|of their own"):
        required_literal(pattern)


def literal_runs(pattern: str) -> Iterator[str]:
    """The texts outside groups, as Python's own parser of regular expressions has them, in lower case."""
    run = ""
    for kind, argument in _parser.parse(pattern):
        if kind is _constants.LITERAL:
            run += chr(argument).lower()
            continue
        if kind is _constants.MAX_REPEAT and argument[0] >= 1 and argument[2][0][0] is _constants.LITERAL:
            run += chr(argument[2][0][1]).lower()
        yield run
        run = ""
    yield run


def test_the_texts_that_are_searched_first_are_those_of_pythons_parser() -> None:
    wrong = [pattern.text for pattern in line_patterns() if pattern.literal != max(literal_runs(pattern.text), key=len)]
    assert not wrong


GUIDE = Path(__file__).parents[3] / "docs/add-a-cause.md"
(EXAMPLE,) = re.findall(r"```toml\n# stoker_watch/knowledge/endings.toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The table that endings() reads, which a test may change."""
    table = read_toml("endings.toml")
    for cache in (endings, line_patterns):
        cache.cache_clear()
    monkeypatch.setattr(module, "read_toml", lambda _: table)
    yield table
    for cache in (endings, line_patterns):
        cache.cache_clear()


def test_a_new_ending_is_a_row_without_code(rows: dict[str, Any]) -> None:
    """That of the guide docs/add-a-cause.md."""
    rows |= parse_toml(EXAMPLE)
    (found,) = died(rows["lmdb_full"]["samples"][0]["text"], 1)
    assert (found.id, found.title, found.fix) == ("lmdb_full", rows["lmdb_full"]["title"], rows["lmdb_full"]["fix"])


@pytest.mark.parametrize("change", [{"role": "boss"}, {"reason": "bad luck"}, {"pattern": ["abc"]}, {"fix": None}])
def test_a_row_of_another_form_is_refused(rows: dict[str, Any], change: dict[str, Any]) -> None:
    rows["lmdb_full"] = parse_toml(EXAMPLE)["lmdb_full"] | change
    with pytest.raises(msgspec.ValidationError):
        endings()
