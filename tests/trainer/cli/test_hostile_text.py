"""Names of classes and files, lines of logs and records with control characters: no command lets them reach the
terminal. Everything is written by a command of its own, as for a user."""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.report.terminal import Screen
from stoker_watch.cli.app import main
from stoker_watch.errors import DataError, StokerError
from stoker_watch.printable import escape_json, printable
from stoker_watch.report.console import print_renderables, table
from stoker_watch.runs.records import RunFolder
from tests.drawn import draw, run_stoker

EVIL = "\x1b[31m\x1b]0;owned\x07\x9b2J\x85\x7f\b\u202e\u2066\u200f\u2028\r\nFORGED: all is well\x1b[0m"
"""Colors, the title of the window, C1 controls, backspace, bidirectional controls, ends of lines."""
CLASS, FILE = f"car{EVIL}", f"im{EVIL.replace('/', '')}.jpg"
SMALL = ["--image-size", "64", "64", "--batch-size", "4", "--steps", "2", "--eval-every", "0", "--precision", "fp32",
         "--weights", "none", "--model", "retinanet_tiny_fpn", "--device", "cpu"]  # fmt: skip


def command(*arguments: str | Path) -> tuple[int, str]:
    """(exit code, output) of a command in this process."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
        patch.setattr(sys, "stdout", output)
        patch.setattr(sys, "stderr", output)
        patch.setattr(sys, "excepthook", sys.excepthook)
        with pytest.raises(SystemExit) as ended:
            main()
    output.seek(0)
    return int(ended.value.code or 0), output.buffer.read().decode()


def strings(value: object) -> Iterator[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from strings(item)


def check(output: str) -> None:
    bad = {character for character in output if character != "\n" and not character.isprintable()}
    assert not bad, (bad, output)
    assert not any(line.startswith("FORGED") for line in output.splitlines()), output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set whose folder, classes and files have such names; one image is damaged, one is missing."""
    folder = draw(tmp_path_factory.mktemp("x") / f"data{EVIL.replace('/', '')}", train=20, val=4)
    for split in ("train", "valid"):
        annotations = folder / split / "_annotations.coco.json"
        document = json.loads(annotations.read_text())
        document["categories"][0]["name"] = CLASS
        for number, image in enumerate(document["images"]):
            name = f"{number}{FILE}"
            (folder / split / image["file_name"]).rename(folder / split / name)
            image["file_name"] = name
        if split == "train":
            path = folder / split / document["images"][0]["file_name"]
            path.write_bytes(path.read_bytes()[:200])
            (folder / split / document["images"][1]["file_name"]).unlink()
            document["annotations"][0]["category_id"] = 99
        annotations.write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(run folder, what the training printed)."""
    run = tmp_path_factory.mktemp("runs") / f"run{EVIL.replace('/', '')}"
    code, output = command("train", data, "--run-dir", run, "--max-bad-fraction", "0.5", *SMALL)
    assert code == 0, output
    return run, output


def test_training(trained: tuple[Path, str]) -> None:
    check(trained[1])
    assert "car" in trained[1]


@pytest.mark.parametrize("arguments", [["check"], ["check", "--json"], ["stats"], ["stats", "--json"], ["preview"],
                                       ["convert"], ["check", "--classes", f"none{EVIL}"]], ids=" ".join)  # fmt: skip
def test_data(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    name, *flags = arguments
    more = [tmp_path / f"out{EVIL.replace('/', '')}", "--to", "coco"] if name == "convert" else []
    more += ["--max-bad-fraction", "0.5"] if name == "preview" else []
    _, output = command("data", name, data, *more, *flags)
    check(output)
    assert "Traceback" not in output
    if "--json" in flags:
        assert CLASS in strings(json.loads(output))


def test_models(data: Path, trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = trained[0]
    images = data / "train"
    (tmp_path / os.fsdecode(b"no\xffutf8.jpg")).write_bytes((data / "valid" / f"0{FILE}").read_bytes())
    for arguments in (
        ["predict", run, images, tmp_path, "--conf", "0", "--out", tmp_path / f"p{EVIL.replace('/', '')}"],
        ["predict", run, tmp_path / f"none{EVIL}"],
        ["eval", run],
        ["eval", run, "--json"],
        ["eval", run, data, "--split", f"none{EVIL}"],
        ["export", run, "--out", tmp_path / f"m{EVIL.replace('/', '')}.onnx"],
        ["models", f"none{EVIL}"],
        ["eval", tmp_path / f"none{EVIL}"],
        [f"none{EVIL}"],
        ["train", data, f"--none{EVIL}"],
        ["train", data, "--lr", f"none{EVIL}"],
    ):
        _, output = command(*arguments)
        assert output
        assert "Traceback" not in output, output
        check(output)


def test_runs(trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = tmp_path / "runs" / f"one{EVIL.replace('/', '')}", tmp_path / "runs" / "two"
    shutil.copytree(trained[0], run)
    shutil.copytree(trained[0], other)
    folder = RunFolder(run, 2)
    for kind in ("started", "info", "warning", "checkpoint_failed", "failed"):
        folder.event(kind, f"{kind}{EVIL}", name=EVIL, coverage={f"source{EVIL}": EVIL})
    folder.close()
    log = tmp_path / f"job{EVIL.replace('/', '')}.log"
    log.write_text(f"step 1 loss=1\nTraceback (most recent call last):\n  File {EVIL}\nRuntimeError: odd {EVIL}\n")
    for arguments in (["why", run], ["why", run, "--json"], ["why", run, "--compare", other], ["why", log],
                      ["why", log, "--json"], ["why", "--all", tmp_path / "runs"], ["report", run],
                      ["report", run, "--json"], ["why", tmp_path / f"none{EVIL}"]):  # fmt: skip
        _, output = command(*arguments)
        assert output
        assert "Traceback (most recent call last):\n" not in output, output
        check(output)


def test_watch(tmp_path: Path) -> None:
    code, output = run_stoker("watch", "--run-dir", tmp_path / f"run{EVIL.replace('/', '')}", "--",
                              f"none{EVIL}", cwd=tmp_path)  # fmt: skip
    assert code == 127
    check(output)


def test_on_a_terminal_the_only_control_codes_are_those_of_rich() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.delenv("NO_COLOR", raising=False)
        rendered = table(f"head{EVIL}", "")
        rendered.add_row(f"cell{EVIL}", "")
        print_renderables([rendered, f"text{EVIL}"], file)
        with Screen(file) as screen:
            screen.note(EVIL)
            screen.warning(EVIL)
            screen.settings([(EVIL, EVIL, EVIL)])
    plain = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
    check(plain.replace("warning: ", ""))


def test_an_error_shows_its_lines_and_no_others() -> None:
    text = str(DataError(EVIL, location=EVIL, cause=f"first\nsecond{EVIL}", choices=[EVIL], fix=EVIL))
    assert [line.split(":")[0].strip() for line in text.splitlines() if line.strip()][1] == "where"
    assert not any(line.startswith("FORGED") for line in text.splitlines())
    assert all(character == "\n" or character.isprintable() for character in text)
    assert str(StokerError("one", cause="two\n  three")) == "one\n  why:    two\n  three"


@given(st.text())
def test_what_is_printable_stays_and_nothing_else(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert all(c.isprintable() or c in "\u200c\u200d" for c in shown)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a.isprintable())
    assert "\n" not in shown
    assert json.loads(escape_json(json.dumps(text, ensure_ascii=False))) == text
