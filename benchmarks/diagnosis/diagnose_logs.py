"""Whether `stoker why LOG` finds the right reason in logs of jobs of others that its patterns have not seen.

    python -m benchmarks diagnose_logs --logs FILE [FILE …] [--json FILE]

FILE has a JSON object per line: "lines", the end of a log as it was printed; "source", the public thread; "truth", the
cause in a sentence, as the thread or the message establishes it; "healthy", whether nothing was wrong; "accepted", the
ids of endings (`stoker why --explain ID`) that name this cause and whose fix helps, empty if there is none. One author
collects the logs and writes the truth without having seen the patterns; another one writes the accepted ids without
having seen what is found. A log with a failure is right if its first finding above "info" is accepted; a healthy one,
if it has no such finding. Logs are quoted from threads whose license is not ours, so they are not in this repository:
the result names each thread, with the truth, what is accepted and what was found.

Files that were read once are no longer unseen: what they showed has changed the patterns.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.diagnosis.diagnose_score import NONE, wilson
from benchmarks.report import Bar, Report, options, publish
from stoker_watch.report.explain import explain_log

GOAL, HEALTHY_GOAL = 0.8, 0.95


def first_finding(lines: str, folder: Path) -> str:
    path = folder / "train.log"
    path.write_text(lines + "\n", encoding="utf-8")
    return next((found.id for found in explain_log(path).findings if found.severity != "info"), NONE)


def read_logs(path: Path, folder: Path) -> list[dict[str, Any]]:
    logs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = []
    for log in logs:
        found, accepted = first_finding(log["lines"], folder), [NONE] if log["healthy"] else log["accepted"]
        rows.append({
            "what": log["source"], "file": path.stem, "healthy": log["healthy"], "truth": log["truth"],
            "accepted": ", ".join(accepted), "found": found, "right": found in accepted,
        })  # fmt: skip
    return rows


def diagnose_logs(asked: argparse.Namespace) -> Report:
    if not asked.logs:
        print("n/a: --logs FILE names the logs, which are not in this repository", file=sys.stderr)
    report = Report("the first finding of `stoker why LOG` in logs of others", 1, ("stoker",))
    for path in asked.logs:
        with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
            rows = read_logs(path, Path(folder))
        report.rows += rows
        for healthy, goal in ((False, GOAL), (True, HEALTHY_GOAL)):
            right = [row["right"] for row in rows if row["healthy"] is healthy]
            low, high = wilson(sum(right), len(right))
            name = f"{path.stem}: {'healthy logs without a finding' if healthy else 'failures named first'}, "
            name += f"{sum(right)} of {len(right)} ({low:.0%} to {high:.0%})"
            report.bars.append(Bar.at_least(name, sum(right) / max(1, len(right)), goal))
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--logs", nargs="+", type=Path, default=[], metavar="FILE")
    return made


if __name__ == "__main__":
    publish(diagnose_logs, parser())
