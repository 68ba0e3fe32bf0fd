"""`stoker check` on the command line: exit codes, JSON, and what is printed."""

import io
import json
import sys
from pathlib import Path

import pytest

from stoker.planning import CheckRequest
from stoker.planning import check as checking
from stoker.planning.check import CheckReport, ProbeTime
from stoker.preflight.catalog import make_finding
from stoker_watch.cli.app import main
from stoker_watch.findings.finding import Finding
from stoker_watch.report.findings_terminal import print_findings

FINDINGS = [
    make_finding(
        id="no_gpu", severity="blocker", title="training would run on the CPU", evidence="torch 2.11 finds no GPU",
        fix="--device cpu",
    ),
    make_finding(
        id="shm", severity="warning", title="/dev/shm has 64 MiB", evidence="statvfs", fix="--shm-size 8g",
        place="/dev/shm",
    ),
    make_finding(id="clock", severity="unknown", title="whether the clock is right", evidence="no server"),
    make_finding(id="cpu_cores", severity="ok", title="2 cores", evidence="by affinity"),
    make_finding(id="memory", severity="ok", title="20 GiB are free", evidence="/proc/meminfo"),
]  # fmt: skip

PRINTED = """\
blocker  training would run on the CPU
         torch 2.11 finds no GPU
         fix: --device cpu
warning  /dev/shm has 64 MiB [/dev/shm]
         statvfs
         fix: --shm-size 8g
unknown  whether the clock is right
         no server
ok       cpu cores, memory
1 blocker, 1 warning, 1 unknown, 2 ok, in 4.2 s
`stoker why --explain ID` explains: no_gpu, shm, clock
"""


def printed(findings: list[Finding], *, show_all: bool = False) -> str:
    file = io.StringIO()
    print_findings(findings, seconds=4.2, show_all=show_all, file=file)
    return file.getvalue()


def test_the_worst_is_first_and_what_is_in_order_is_one_line():
    assert printed(FINDINGS) == PRINTED
    assert "ok       2 cores\n         by affinity\n" in printed(FINDINGS, show_all=True)
    hostile = make_finding(id="x", severity="warning", title="a\x1b[2Jb", evidence="c\nblocker  d", place="\x07")
    assert "\x1b" not in printed([hostile])
    assert "\nblocker" not in printed([hostile])


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[CheckRequest]:
    """What was to be checked; the report has FINDINGS, without the blocker for --device cpu."""
    seen: list[CheckRequest] = []

    def stand_in(request: CheckRequest, **_: object) -> CheckReport:
        seen.append(request)
        found = FINDINGS[1:] if request.config.run.device == "cpu" else FINDINGS
        return CheckReport(
            findings=found, probes=[ProbeTime(probe="gpu", seconds=1.0, complete=True)], seconds=4.2
        )  # fmt: skip

    monkeypatch.setattr(checking, "run_checks", stand_in)
    monkeypatch.chdir(tmp_path)
    return seen


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["stoker", "check", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_blocker_is_exit_code_3(
    requests: list[CheckRequest], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch) == 3
    assert capsys.readouterr().out == PRINTED
    assert run(monkeypatch, "--device", "cpu", "--deep") == 0
    assert requests[-1].deep
    assert run(monkeypatch, "--json") == 3
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["blocked"] is True
    assert [finding["id"] for finding in document["findings"]] == [finding.id for finding in FINDINGS]
    assert document["probes"] == [{"probe": "gpu", "seconds": 1.0, "complete": True}]


def test_settings_of_a_training_are_taken(
    requests: list[CheckRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "mine.toml").write_text('[model]\nmodel = "ember_n"\n[run]\nbatch_size = 4\n')
    assert run(monkeypatch, "demo", "--config", "mine.toml", "--batch-size", "8", "--run-dir", "out") == 3
    request = requests[-1]
    assert (request.config.model.model, request.config.run.batch_size, request.run_dir) == ("ember_n", 8, "out")
    assert request.config.data.data == "demo"
    assert run(monkeypatch, "demo", "--batch-size", "-2") == 2


def test_a_dockerfile_whose_versions_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM tensorflow/tensorflow:2.10.0-gpu\nRUN apt-get install -y cuda-toolkit-11-8\n")
    assert run(monkeypatch, "--dockerfile", str(dockerfile)) == 0, "it starts, and may be slower: a warning"
    output = capsys.readouterr().out
    assert output.startswith("warning")
    assert "Dockerfile:2" in output
    assert "TensorFlow 2.10 wants CUDA 11.2 and cuDNN 8.1" in output
