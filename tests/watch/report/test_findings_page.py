"""Findings and experiments on the page, and the page of an external job."""

import re
from pathlib import Path

import msgspec
import pytest

from stoker_watch.findings.finding import Evidence, Finding
from stoker_watch.report.html import render
from stoker_watch.report.run_report import RunReport, advise, collect
from stoker_watch.runs.records import PROBES, RunFolder
from stoker_watch.runs.schemas import Probe
from tests.watch.report.runs import write_run


def finding(severity: str, command: str) -> Finding:
    return Finding(id="x", severity=severity, title=f"An {severity} finding", fix="put --cache disk behind it",
                   evidence=[Evidence(text="a number", source="steps.jsonl: phases")], command=command,
                   confidence=0.8, lost_device_s=9.0, probe_result="refuted by x")  # fmt: skip


def with_findings(run: Path, *findings: Finding) -> RunReport:
    report = collect(run)
    report.explanation = msgspec.structs.replace(report.explanation, findings=list(findings))
    report.advice = advise(report.explanation, None, [])
    return report


def test_a_finding_has_source_confidence_and_probe_result(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", settings="[run]\n")
    page = render(with_findings(run, finding("info", "--cache disk"), finding("critical", "stoker data check")))
    first, second = re.findall(r"<article.*?</article>", page, re.DOTALL)
    for text in ("a number", "steps.jsonl: phases", "9 s lost", "Confidence: 80 %; refuted by x"):
        assert text in first
    assert "<code" not in first, "the fix contains the command"
    assert re.search("<code.*stoker data check</code>", second)


def test_advice_has_the_severity_of_its_finding(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", settings="[run]\n")
    advice = with_findings(run, *(finding(name, "a") for name in ("info", "warning", "critical"))).advice
    assert [item.severity for item in advice[:3]] == ["info", "warning", "critical"]


def test_experiments_are_on_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", settings="[run]\n")
    assert "Experiments" not in render(collect(run))
    folder = RunFolder(run, 1)
    folder.append(PROBES, Probe(t=1.0, attempt=1, probe="cached_batch", steps=40, before_img_per_s=10.0,
                                after_img_per_s=18.0, ratio=1.8, ratio_low=1.7, ratio_high=1.9))  # fmt: skip
    folder.close()
    page = render(collect(run))
    assert "1.70 … 1.90, 40 steps each" in page
    assert ">1.80<" in page


@pytest.mark.parametrize(
    ("data", "source"),
    [({"coverage": {"output": "recorded"}}, "stoker watch"), ({"measured": True}, "stoker_watch.measure")],
)
def test_the_page_of_an_external_job_has_no_sections_without_records(
    tmp_path: Path, data: dict[str, object], source: str
) -> None:
    run = write_run(tmp_path / "run")
    folder = RunFolder(run, 1)
    folder.event("started", **data)
    folder.close()
    page = render(collect(run))
    linked = re.findall(r'href="#(\w+)"', page.partition("</nav>")[0].partition("<nav")[2])
    assert linked == re.findall(r'<section id="(\w+)"', page)
    assert linked == ["summary", "training", "time", "machine", "data", "environment", "events"]
    assert f"recorded by {source}" in page
    for absent in ("evaluation.json", "config.toml", "<dt>AP</dt>", "scored"):
        assert absent not in page.partition("<script")[0]
