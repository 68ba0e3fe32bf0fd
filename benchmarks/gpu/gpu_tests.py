"""A plugin of pytest that records the outcome of each test as soon as it is known: `-p benchmarks.gpu.gpu_tests`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.processes import record

TRACEBACK_LINES = 12


class Outcomes:
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return  # what was made for a test, or taken down after it
        found = {"test": report.nodeid, "outcome": report.outcome, "s": round(report.duration, 1)}
        if report.skipped and isinstance(report.longrepr, tuple):
            found["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.strip()]
            errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
            found |= {"error": (errors or lines or ["unknown"])[0][:400], "traceback": lines[-TRACEBACK_LINES:]}
        record(**found)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that hears of the tests of all workers
        config.pluginmanager.register(Outcomes())
