"""The source of both packages, by the paths inside them."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "packages/stoker-watch/stoker_watch", ROOT / "packages/stoker/stoker")


def python_files() -> Iterator[tuple[str, Path]]:
    """(`training/loop.py`, its path) of each file."""
    for package in PACKAGES:
        yield from ((path.relative_to(package).as_posix(), path) for path in sorted(package.rglob("*.py")))


def find(file: str) -> list[Path]:
    """The files at that path, in either package."""
    return [package / file for package in PACKAGES if (package / file).exists()]
