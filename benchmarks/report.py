"""Shared by all benchmarks: options, description of the machine, table, bars, JSON file. Measuring is in each script.

A bar is a goal for a ratio or a time, computed from medians of the same run. A missed bar is shown and written, and
does not change the exit code.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stoker_watch.errors import StokerError


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    goal: float
    """Maximum of `value`; minimum for `at_least`."""
    ok: bool

    @classmethod
    def at_most(cls, name: str, value: float, goal: float) -> "Bar":
        return cls(name, value, goal, value <= goal)

    @classmethod
    def at_least(cls, name: str, value: float, goal: float) -> "Bar":
        return cls(name, value, goal, value >= goal)


@dataclass
class Report:
    """The result of one benchmark, for the terminal and its file."""

    what: str
    n: int
    """Runs per median."""
    packages: Sequence[str] = ()
    """Distributions whose versions are recorded, besides Python."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def show(self) -> None:
        print(f"{self.what}\n{describe(machine())}; {describe(versions(self.packages))}; n = {self.n}\n")
        print(table(self.rows))
        print()
        print(
            table(
                [{"bar": b.name, "value": b.value, "goal": b.goal, "": "ok" if b.ok else "MISSED"} for b in self.bars]
            )
        )

    def write(self, path: Path | None) -> None:
        """Writes the JSON file, if there is a path."""
        if path is None:
            return
        script = Path(sys.argv[0])
        content = {
            "what": self.what,
            "command": shlex.join(["python", "-m", "benchmarks", script.stem, *sys.argv[1:]]),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(self.packages),
            "n": self.n,
            "rows": self.rows,
            "bars": [asdict(bar) for bar in self.bars],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the common options. description: docstring of the script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs; not for published numbers")
    return parser


def publish(run: Callable[[argparse.Namespace], Report], parser: argparse.ArgumentParser) -> None:
    """Runs a benchmark with the arguments of the command line; shows and writes its report. Exit code 1 on failure."""
    arguments = parser.parse_args()
    try:
        report = run(arguments)
    except (OSError, RuntimeError, subprocess.CalledProcessError, StokerError) as error:
        sys.exit(f"the benchmark failed: {error}")
    report.show()
    report.write(arguments.json)


def commit() -> str | None:
    """The commit that is measured, with `-dirty` where files of the package differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, Any]:
    """Hardware and system, without the host name."""
    return {"system": platform.system(), "processor": _processor(), "cores": _cores(), "memory_gib": _memory_gib()}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of distributions; n/a if one is not installed (e.g. used from a checkout)."""
    installed = {"python": platform.python_version()}
    for name in packages:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "n/a"
    return installed


def describe(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum over runs."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as aligned text; numbers with three significant digits, n/a for missing columns."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [heads, *([_cell(row.get(head)) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
