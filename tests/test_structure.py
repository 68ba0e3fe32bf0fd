"""docs/structure.md and the README name files that exist; the package keeps its rooms."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_questions_of_a_newcomer_have_answers_that_exist() -> None:
    section = (ROOT / "docs/structure.md").read_text().partition("## Where do I find")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    assert rows
    for row in rows:
        paths = re.findall(r"`((?:stoker|docs)/[^`]+)`", row)
        assert paths, row
        assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = set(
        re.findall(r"`((?:stoker|docs|tests|benchmarks|scripts)/[\w./-]+\.\w+|(?:stoker|tests)/[\w/]+/)`", text)
    )
    if not page.name.startswith("add-a-"):  # these also name the files that a reader makes
        absent = sorted(path for path in named if not (ROOT / path).exists())
        assert [path for path in absent if not path.startswith("benchmarks/results/")] == []
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    assert sorted(link for link in links if link and not (page.parent / link).exists()) == []


def test_the_root_of_the_package_has_few_files() -> None:
    assert {path.name for path in (ROOT / "stoker").glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "api.py",
        "errors.py",
        "printable.py",
        "regular_files.py",
        "secrets.py",
    }


@pytest.mark.parametrize(
    ("pattern", "place"),
    [
        (r"^(?:class )?\w*Finding\b *(?:\(|:|=)", "stoker_watch/findings/finding.py"),
        (r"^(?:class )?\w*Severity\b *(?:\(|:|=)", "stoker_watch/findings/finding.py"),
        (r"^def finding_lines\b", "stoker_watch/report/findings_terminal.py"),
        (r"^ *(?:from rich\.table import|import rich\.table)", "stoker_watch/report/console.py"),
        (r"^def read_run\b", "stoker_watch/diagnosis/reader.py"),
        (r"^class \w*RunRecords\b", "stoker_watch/diagnosis/run_data.py"),
    ],
)
def test_there_is_one_of(pattern: str, place: str) -> None:
    """One type for what a command finds, one way to print it, one that makes tables, one reader of run folders."""
    found = [path.relative_to(ROOT) for path in (ROOT / "stoker").rglob("*.py")
             for _ in re.finditer(pattern, path.read_text(), re.MULTILINE)]  # fmt: skip
    assert [str(path) for path in found] == [place]


def test_the_tests_that_ci_leaves_out_exist() -> None:
    names = [line for line in (ROOT / "tests" / "long.txt").read_text().splitlines() if line and line[0] != "#"]
    for name in names:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name
    assert len(set(names)) == len(names)
