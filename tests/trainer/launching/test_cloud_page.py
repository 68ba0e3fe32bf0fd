"""docs/launch.md: a document on the page is what its command prints.

`python -m tests.trainer.launching.test_cloud_page` writes the page anew."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from stoker.cli.launch import launch_app
from stoker.launching.google_cloud import PROJECT_VARIABLES, REGION_VARIABLES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "launch.md"
BLOCK = re.compile(r"(?ms)^(```\n(stoker launch [^`]*?--dry-run)\n```\n\n```yaml\n).*?(?=^```\n)")


def printed(command: str) -> str:
    tokens = shlex.split(command.replace("\\\n", " "))[2:]
    called, bound, _ = launch_app.parse_args(tokens, exit_on_error=False, print_error=False)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        called(*bound.args, **bound.kwargs)
    return output.getvalue()


def render(page: str) -> str:
    return BLOCK.sub(lambda block: block[1] + printed(block[2]), page)


def test_files_on_the_page_are_what_the_commands_print(monkeypatch: pytest.MonkeyPatch):
    for name in (*PROJECT_VARIABLES, *REGION_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    page = PAGE.read_text()
    assert BLOCK.search(page)
    assert render(page) == page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
