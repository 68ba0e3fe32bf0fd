"""The commands `why` and `report` in all their forms."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker_watch.cli.app import main
from tests.watch.report.runs import write_run

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def stoker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(str(ended.value.code)), captured.out + captured.err

    return run


def test_the_forms_of_why(stoker: Command) -> None:
    write_run(Path("runs/a"))
    write_run(Path("runs/b"), phases={"compute": 1.0}, end=None)
    Path("job.log").write_text("Traceback (most recent call last):\n  x\nValueError: odd\n")
    forms = {
        ("runs/a",): ("Optimizer steps took", "phases"),
        ("runs/b",): ("state  killed", "phases"),
        ("runs/a", "--compare", "runs/b"): ("second  runs/b", "statement"),
        ("--all", "runs"): ("2: 1 finished, 1 killed", "worst_runs"),
        ("job.log",): ("ValueError: odd", "not_known"),
    }
    for form, (words, key) in forms.items():
        code, text = stoker("why", *form)
        assert (code, words in text) == (0, True), text
        code, text = stoker("why", *form, "--json")
        assert code == 0
        assert key in json.loads(text)


@pytest.mark.parametrize("arguments", [
    ("why",), ("why", "a", "--all", "b"), ("why", "--all", "b", "--compare", "a"), ("why", "--compare", "a"),
    ("report",), ("report", "a", "--all", "b"), ("why", "nothing"), ("why", "--all", "nothing"),
    ("report", "--all", "nothing"), ("report", "--all", "runs", "--json", "--out", "x"),
    ("why", "a", "--compare", "b", "--probe"), ("why", "--all", "runs", "--probe"),
])  # fmt: skip
def test_invalid_arguments_are_a_usage_error(stoker: Command, arguments: tuple[str, ...]) -> None:
    code, text = stoker(*arguments)
    assert code == 2
    assert text.startswith("stoker: ")
    assert "valid:" in text or "fix:" in text


def test_one_page_of_many_runs(stoker: Command) -> None:
    write_run(Path("runs/a"))
    assert stoker("report", "--all", "runs") == (0, "runs/runs-report.html\n")
    assert stoker("report", "--all", "runs", "--out", "x.html") == (0, "x.html\n")
    assert Path("x.html").read_text().startswith("<!doctype html>")
    code, text = stoker("report", "--all", "runs", "--json", "--price-per-device-hour", "3.6")
    assert code == 0
    assert json.loads(text)["cost"] == {"low": 2.0, "high": 2.0, "runs": 1}


def test_a_price_of_zero_shows_no_cost(stoker: Command) -> None:
    environment = {"machine_type": "p3.2xlarge", "gpu": {"gpus": [{"name": "Tesla V100-SXM2-16GB"}]}}
    write_run(Path("a"), environment=environment)
    assert "cost" in stoker("why", "a")[1]
    assert "cost" not in stoker("why", "a", "--price-per-device-hour", "0")[1]


def test_the_page_of_a_run_has_its_list_price_and_the_advice(stoker: Command) -> None:
    environment = {"machine_type": "p3.2xlarge", "gpu": {"gpus": [{"name": "Tesla V100-SXM2-16GB"}]}}
    write_run(Path("a"), environment=environment, phases={"compute": 60.0, "input_wait": 40.0}, stages={"fetch": 40.0})
    code, _ = stoker("report", "a", "--out", "x.html")
    assert code == 0
    page = Path("x.html").read_text()
    assert "list price of p3.2xlarge" in page
    assert "a machine with a local NVMe SSD" in page
