"""Fails when a folder of a package has more lines of Python than `[tool.stoker.lines]` in pyproject.toml allows it.

usage: python scripts/check_size.py     Prints the table; exit 1 if a folder is above its number or has none.

A commit that raises a number says in its message what users get for it.
"""

import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def count_lines(package: Path) -> Counter[str]:
    """Lines of Python by folder of the package; those of the files beside the folders count under "."."""
    lines: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        folder, *rest = path.relative_to(package).parts
        lines[folder if rest else "."] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def main() -> int:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["stoker"]["lines"]
    failures = []
    for name, allowed in limits.items():
        (package,) = ROOT.glob(f"packages/*/{name}")
        lines = count_lines(package)
        for folder in sorted(lines | allowed):
            limit = allowed.get(folder)
            print(f"{name + '/' + folder:28}{lines[folder]:>8,}{'' if limit is None else f' of {limit:,}'}")
            if limit is None:
                failures.append(f"{name}/{folder} is not in the table")
            elif lines[folder] > limit:
                failures.append(f"{name}/{folder} has {lines[folder] - limit:,} lines too many")
            elif not lines[folder]:
                failures.append(f"{name}/{folder} is in the table and has no Python")
        print(f"{name:28}{lines.total():>8,} of {sum(allowed.values()):,}\n")
    for failure in failures:
        print(f"{failure}: [tool.stoker.lines] in pyproject.toml", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
