"""docs/structure.md and the READMEs name files that exist; the packages keep their rooms."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "packages/stoker-watch/stoker_watch", ROOT / "packages/stoker/stoker")
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "SECURITY.md", "packages/stoker-watch/README.md", "packages/stoker/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
CHECKED = r"stoker_watch|stoker|docs|tests|benchmarks|scripts|packages"


def resolve(path: str) -> Path:
    """A path in a document: of a module in its package, else from the root of the repository."""
    package = {"stoker_watch": "packages/stoker-watch", "stoker": "packages/stoker"}.get(path.partition("/")[0], ".")
    return ROOT / package / path


def test_the_questions_of_a_newcomer_have_answers_that_exist() -> None:
    section = (ROOT / "docs/structure.md").read_text().partition("## Where do I find")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    assert rows
    for row in rows:
        paths = re.findall(r"`((?:stoker_watch|stoker|docs)/[^`]+)`", row)
        assert paths, row
        assert [path for path in paths if not resolve(path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(rf"`((?:{CHECKED})/[\w./-]+\.\w+|(?:{CHECKED})/[\w/-]+/)`", text))
    if not page.name.startswith("add-a-"):  # these also name the files that a reader makes
        absent = sorted(path for path in named if not resolve(path).exists())
        assert [path for path in absent if not path.startswith("benchmarks/results/")] == []
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    assert sorted(link for link in links if link and not (page.parent / link).exists()) == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    found: list[str] = []
    for heading in re.findall(r"(?m)^#{1,6} (.*)$", text):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = "".join(char for char in heading if char.isalnum() or char in " -_").replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "LOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_that_a_page_links_to_exists(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    absent = []
    for link in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link and target.exists() and anchor not in anchors(target):
            absent.append(link)
    assert absent == []


def test_the_roots_of_the_packages_have_few_files() -> None:
    watch, trainer = ({path.name for path in package.glob("*.py")} for package in PACKAGES)
    assert watch == {
        "__init__.py",
        "__main__.py",
        "durations.py",
        "errors.py",
        "printable.py",
        "regular_files.py",
        "secrets.py",
    }
    assert trainer == {"__init__.py", "__main__.py", "api.py"}


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
    found = [str(path.relative_to(package.parent)) for package in PACKAGES for path in package.rglob("*.py")
             for _ in re.finditer(pattern, path.read_text(), re.MULTILINE)]  # fmt: skip
    assert found == [place]


def test_the_tests_that_ci_leaves_out_exist() -> None:
    names = [line for line in (ROOT / "tests" / "long.txt").read_text().splitlines() if line and line[0] != "#"]
    for name in names:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), name
    assert len(set(names)) == len(names)


SEVERAL_ON_PURPOSE = {"StokerCallback"}
"""Hugging Face's and Lightning's: a user has one of the two frameworks, and imports it by the framework's module."""


def test_a_name_of_a_class_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    beginnings = []
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                place = str(path.relative_to(package.parent))
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(place)
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    docstring = ast.get_docstring(node) or ""
                    beginnings += [f"{place}: {node.name}"] if docstring.startswith("Of ") else []
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in SEVERAL_ON_PURPOSE} == {}
    assert beginnings == []  # what it is or does, not what it is of
