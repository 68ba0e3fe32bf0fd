"""`stoker check` as a whole: probes that hang or raise, what is asked when, and a real data set on this machine."""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

import stoker
from stoker.config.settings import from_fields
from stoker.planning import CheckRequest
from stoker.planning import check as checking
from stoker.planning.check import (
    CheckReport,
    MemoryFit,
    MemoryFitResult,
    Prober,
    ask_memory_fit,
    run_checks,
)
from stoker.preflight.catalog import Ended, make_finding, run_program
from stoker_watch.errors import ConfigError
from stoker_watch.findings.finding import Finding
from tests.drawn import draw

Probe = Callable[..., list[Finding]]
FINE = make_finding(id="fine", severity="ok", title="fine", evidence="")
KERNEL = make_finding(id="kernel", severity="ok", title="a GPU computes", evidence="")
FIT = MemoryFit(
    text="retinanet_resnet50_fpn on NVIDIA L4 takes", is_cpu=False, image_side=800, images_per_s=410.0,
    checkpoint_bytes=4 * 10**8, decode_core_s=0.02,
)  # fmt: skip
FITS = MemoryFitResult(fit=FIT, finding=make_finding("memory_fit", "ok", "a batch of 16 fits", "410 img/s"))


def test_a_probe_that_hangs_or_raises_is_unknown_and_the_others_are_asked():
    never, prober = threading.Event(), Prober(60.0)

    def hang() -> list[Finding]:
        never.wait()
        return []

    def fail() -> list[Finding]:
        raise ZeroDivisionError("of a driver")

    prober.ask("driver", 0.05, hang)
    prober.ask("clock", 5.0, fail)
    prober.ask("disk", 5.0, lambda: [FINE])
    never.set()
    assert [(finding.id, finding.severity) for finding in prober.findings] == [
        ("driver", "unknown"), ("clock", "unknown"), ("fine", "ok"),
    ]  # fmt: skip
    assert "within" in prober.findings[0].title
    assert prober.findings[1].evidence_text == "ZeroDivisionError: of a driver"
    assert [time.complete for time in prober.times] == [False, True, True]


def test_when_the_time_is_over_the_rest_is_unknown():
    prober = Prober(0.0)
    prober.ask("disk", 5.0, lambda: [FINE])
    assert [(finding.id, finding.severity) for finding in prober.findings] == [("disk", "unknown")]
    assert prober.times == []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, object]]:
    """Which probes were asked, with their arguments: none of them looks at this machine."""
    calls: dict[str, dict[str, object]] = {}

    def stand_in(name: str, *findings: Finding) -> Probe:
        def probe(*positional: object, **named: object) -> list[Finding]:
            calls[name] = {"positional": positional, **named}
            return list(findings)

        return probe

    for name in ("check_cloud", "check_data_path", "check_host", "check_network", "check_sources", "check_variables"):
        monkeypatch.setattr(checking, name, stand_in(name, FINE))
    monkeypatch.setattr(checking, "check_writable", lambda *place: stand_in("check_writable", FINE)(*place)[0])
    monkeypatch.setattr(checking, "check_gpu", stand_in("check_gpu", KERNEL))
    monkeypatch.setattr(checking.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(checking, "ask_memory_fit", lambda *_, **__: FITS)
    return calls


def test_only_files(asked: dict[str, dict[str, object]]):
    report = run_checks(CheckRequest(dockerfile=Path("Dockerfile")))
    assert set(asked) == {"check_sources"}
    assert asked["check_sources"]["dockerfile"] == Path("Dockerfile")
    assert not report.blocked


def test_without_data_the_machine_is_checked(asked: dict[str, dict[str, object]]):
    run_checks(CheckRequest())
    assert set(asked) == {
        "check_network",
        "check_gpu",
        "check_variables",
        "check_cloud",
        "check_writable",
        "check_host",
    }
    (host,) = asked["check_host"]["positional"]  # type: ignore[misc]
    assert host.num_gpus == 1
    assert host.demand_cores is None


def test_the_speed_that_was_measured_is_what_loader_and_cores_are_compared_with(
    asked: dict[str, dict[str, object]], tmp_path: Path
):
    config = from_fields({"data": draw(tmp_path / "drawn", train=4, val=2)})
    report = run_checks(CheckRequest(config=config, run_dir="gs://bucket/run"))
    assert asked["check_data_path"]["demand_images_per_s"] == 410.0
    assert asked["check_data_path"]["demand_text"] == "retinanet_resnet50_fpn on NVIDIA L4 takes"
    (host,) = asked["check_host"]["positional"]  # type: ignore[misc]
    assert host.demand_cores == pytest.approx(8.2)
    assert host.run_dir is None
    assert host.checkpoint_bytes == FIT.checkpoint_bytes
    found = {finding.id: finding for finding in report.findings}
    assert "410 img/s" in found["memory_fit"].evidence_text


REFUSED = make_finding("settings", "blocker", "--lr -1 is out of range", "training would end with this error")


@pytest.mark.parametrize(("answer", "id", "severity"), [
    (MemoryFitResult(finding=REFUSED), "settings", "blocker"),
    (FITS, "memory_fit", "ok"),
    (Ended(code=-9, output="", errors="Killed"), "memory_fit", "unknown"),
    (subprocess.TimeoutExpired("python", 24), "memory_fit", "unknown"),
])  # fmt: skip
def test_a_batch_that_does_not_fit(
    asked: dict[str, dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    answer: object,
    id: str,
    severity: str,
):
    def stand_in(command: list[str], _limit_s: float) -> object:
        assert (command[-3], command[-1]) == ("stoker.planning.check", "1")
        if isinstance(answer, Exception):
            raise answer
        is_answer = isinstance(answer, MemoryFitResult)
        return Ended(code=0, output=msgspec.json.encode(answer).decode(), errors="") if is_answer else answer

    monkeypatch.setattr(checking, "ask_memory_fit", ask_memory_fit)
    monkeypatch.setattr(checking, "run_program", stand_in)
    report = run_checks(CheckRequest(config=from_fields({"data": draw(tmp_path / "drawn", train=4, val=2)})))
    found = {finding.id: finding for finding in report.findings}
    assert found[id].severity == severity
    assert report.blocked is (severity == "blocker")
    assert "check_data_path" in asked, "the other probes are asked"
    has_speed = isinstance(answer, MemoryFitResult) and answer.fit is not None
    assert asked["check_data_path"]["demand_images_per_s"] == (410.0 if has_speed else None)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process that is not its child")
def test_a_program_that_hangs_ends_with_what_it_started(tmp_path: Path):
    told = tmp_path / "pid"
    os.mkfifo(told)
    program = (
        "import pathlib, signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import signal; signal.pause()'])\n"
        f"pathlib.Path({str(told)!r}).write_text(str(child.pid)); signal.pause()\n"
    )
    grandchild = -1

    def watch(_: str) -> bool:
        nonlocal grandchild
        grandchild = os.pidfd_open(int(told.read_text()))
        return False

    with pytest.raises(subprocess.TimeoutExpired):
        run_program([sys.executable, "-c", program], 60.0, watch=watch)
    assert select.select([grandchild], [], [], 60)[0], "it ends, too"
    os.close(grandchild)


def test_a_program_that_ends_and_one_that_does_not():
    ended = run_program([sys.executable, "-S", "-c", "print(1); print(2)"], 60.0)
    assert (ended.code, ended.last_line) == (0, "2")
    assert (
        run_program([sys.executable, "-S", "-c", "raise ValueError('x')"], 60.0).reason == "exit code 1: ValueError: x"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        run_program([sys.executable, "-S", "-c", "import signal; signal.pause()"], 0.1)


def test_data_that_a_training_would_refuse(asked: dict[str, dict[str, object]], tmp_path: Path):
    report = run_checks(CheckRequest(config=from_fields({"data": str(tmp_path / "absent")})))
    finding = report.findings[0]
    assert (finding.id, finding.severity) == ("data", "blocker")
    assert "absent" in finding.place
    assert "check_data_path" not in asked


def test_data_without_images_to_train_on(asked: dict[str, dict[str, object]], tmp_path: Path):
    folder = draw(tmp_path / "drawn", train=4, val=2)
    (folder / "train").rename(folder / "test")
    report = run_checks(CheckRequest(config=from_fields({"data": folder})))
    assert [finding.id for finding in report.findings if finding.severity == "blocker"] == ["data"]
    assert "check_data_path" not in asked


def test_data_that_cannot_be_read_is_one_blocker(asked: dict[str, dict[str, object]], tmp_path: Path):
    report = run_checks(CheckRequest(config=from_fields({"data": str(tmp_path / "absent")})))
    assert [finding.id for finding in report.findings if finding.severity == "blocker"] == ["data"]
    assert "check_host" in asked


SMALL = {"model": "retinanet_tiny_fpn", "weights": "none", "device": "cpu", "batch_size": 4, "image_size": 64}


@pytest.mark.slow
def test_the_memory_of_a_real_batch(tmp_path: Path):
    small = {**SMALL, "data": draw(tmp_path / "drawn", train=8, val=2)}
    fit = ask_memory_fit(from_fields(small), 240.0).fit
    assert fit is not None
    assert fit.text.startswith("retinanet_tiny_fpn on ")
    assert (fit.image_side, fit.is_cpu) == (64, True)
    assert fit.checkpoint_bytes > 0
    assert fit.decode_core_s is not None
    refused = ask_memory_fit(from_fields({**small, "device": "cuda:7"}), 240.0)
    assert (refused.fit, refused.finding.severity, refused.finding.id) == (None, "blocker", "settings")


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_this_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checking, "DEEP_FACTOR", 10)
    report = stoker.check(deep=True)
    assert isinstance(report, CheckReport)
    assert not report.blocked
    assert report.findings[0].severity == "warning"
    assert "CPU" in report.findings[0].title
    with_device = stoker.check(deep=True, device="cuda")
    assert with_device.blocked
    assert "--device cuda does not exist" in with_device.findings[0].title
    asked_for = stoker.check(draw(tmp_path / "drawn", train=8, val=2), deep=True, **SMALL)  # type: ignore[arg-type]
    assert not asked_for.blocked, asked_for.findings
    in_order = {finding.id for finding in asked_for.findings if finding.severity == "ok"}
    assert {"memory_fit", "data", "device"} <= in_order
    # Whether decoding keeps up with the steps depends on what else the machine does.
    assert "data_rate" in {finding.id for finding in asked_for.findings}


def test_settings_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError):
        stoker.check("demo", batch_size=-2)
