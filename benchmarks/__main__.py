"""Runs a benchmark by its name: `python -m benchmarks NAME [--quick] [--json FILE] …`; `all` is `make bench`.

Without a name it lists them. A benchmark is a file of a folder here that ends in `publish`; its docstring says what it
measures, `python -m benchmarks NAME --help` its options.
"""

import ast
import difflib
import re
import runpy
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ALL: dict[str, tuple[str, ...]] = {
    **{name: () for name in ("index", "ledger", "evaluate", "step", "startup")},
    "plan": ("--second",),
    **{name: () for name in ("loader", "end_to_end", "storage", "cache", "gil", "ranks")},
    "shard_loading": (),
}
"""What `all` measures, about 45 minutes: name → options. Each result is written to results/NAME-cpu.json."""


def scripts() -> dict[str, Path]:
    """Name of each benchmark → its file, by folders."""
    return {
        path.stem: path
        for path in sorted(FOLDER.glob("*/*.py"))
        if re.search(r"^ +publish\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def summary(path: Path) -> str:
    """The first line of its docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def main() -> None:
    known = scripts()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        for name, path in known.items():
            print(f"{path.parent.name + '/' + name:28} {summary(path)}")
        return
    name, *arguments = sys.argv[1:]
    if name == "all":
        for each, options in ALL.items():
            result = FOLDER / "results" / f"{each.replace('_', '-')}-cpu.json"
            subprocess.run([sys.executable, "-m", "benchmarks", each, *options, "--json", str(result)], check=True)
        return
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`python -m benchmarks` lists them"
        sys.exit(f"There is no benchmark {name!r}; {hint}")
    sys.argv = [str(known[name]), *arguments]
    runpy.run_path(str(known[name]), run_name="__main__")


if __name__ == "__main__":
    main()
