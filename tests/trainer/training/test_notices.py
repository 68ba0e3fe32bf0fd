"""Notices of preemption, from a server that speaks the protocols of the clouds."""

import math
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.training import loop, stopper
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker.training.stopper import Notice, NoticeWatcher, StopRequest, grace_period_s, stop_on_signals, time_limit_s
from stoker_watch.errors import ConfigError, Preempted
from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.drawn import draw
from tests.fixtures.training_out_of_memory import settings
from tests.trainer.training.metadata_server import MetadataServer, metadata_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    monkeypatch.setattr(stopper, "POLL_S", 0.01)
    with metadata_server() as server:
        yield server


class Listener:
    """A started watcher, and what it has reported."""

    def __init__(self, env: dict[str, str], cloud: str = "") -> None:
        self.notices: queue.Queue[Notice] = queue.Queue()
        self.events: queue.Queue[tuple[str, str]] = queue.Queue()
        self.watcher = NoticeWatcher(
            self.notices.put, lambda kind, text: self.events.put((kind, text)), env=env, cloud=cloud
        )
        self.watcher.start()


@pytest.mark.parametrize(
    ("key", "value", "text", "grace_s"),
    [("preempted", "TRUE", "spot VM", 30), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "maintenance", 60)],
)
@pytest.mark.parametrize("is_early", [True, False])
def test_google_tells_before_or_while_it_is_asked(
    key: str, value: str, text: str, grace_s: float, is_early: bool, server: MetadataServer
) -> None:
    if is_early:
        server.set(key, value)
    listener = Listener({"GCE_METADATA_HOST": server.address})
    if not is_early:
        server.wait_for_requests(4)  # both keys are asked for again and again
        server.set(key, value)
    notice = listener.notices.get(timeout=30)
    listener.watcher.stop()
    assert text in notice.reason
    assert notice.grace_s == grace_s


def test_a_live_migration_is_no_reason_to_stop(server: MetadataServer) -> None:
    listener = Listener({"GCE_METADATA_HOST": server.address})
    server.wait_for_requests(4)
    server.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
    server.wait_for_requests(8)  # it has read that
    server.set("preempted", "TRUE")
    assert "spot VM" in listener.notices.get(timeout=30).reason


def test_a_server_without_these_keys_is_asked_once(server: MetadataServer) -> None:
    """As that of Kubernetes engines with workload identity."""
    server.values.clear()
    listener = Listener({"GCE_METADATA_HOST": server.address})
    assert [listener.events.get(timeout=30)[0] for _ in range(2)] == ["info", "info"]
    assert len(server.requests) == 2


def test_a_server_that_fails_for_a_while(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopper, "RETRY_S", 0.01)
    server.failures = 4
    listener = Listener({"GCE_METADATA_HOST": server.address})
    server.set("preempted", "TRUE")
    assert "spot VM" in listener.notices.get(timeout=30).reason
    assert listener.events.empty()


def test_a_server_that_stays_away_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopper, "RETRY_S", 0.01)
    listener = Listener({"GCE_METADATA_HOST": "127.0.0.1:9"})
    kind, text = listener.events.get(timeout=30)
    assert kind == "warning"
    assert "does not answer" in text


def test_aws(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopper, "RETRY_S", 0.01)
    server.expired_tokens = 1
    listener = Listener({"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{server.address}"})
    server.wait_for_requests(6)
    server.spot_action = '{"action": "terminate", "time": "2026-11-22T08:22:00Z"}'
    assert "terminate" in listener.notices.get(timeout=30).reason


@pytest.mark.parametrize(
    "env", [{}, {"AWS_EC2_METADATA_DISABLED": "true", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_elsewhere_nothing_is_asked(env: dict[str, str]) -> None:
    watcher = Listener(env).watcher
    assert not watcher._sources


def test_the_time_limit_of_a_job() -> None:
    assert time_limit_s({}) is None
    assert time_limit_s({"SLURM_JOB_END_TIME": "0"}) is None
    assert time_limit_s({"SLURM_JOB_END_TIME": "1700000100"}, now=lambda: 1_700_000_000.0) == 100


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


def test_a_notice_saves_and_the_same_command_continues(
    data: Path, tmp_path: Path, server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(settings(data, max_duration="9"), TrainOptions(run_dir=str(tmp_path / "whole"))).run
    monkeypatch.setenv("GCE_METADATA_HOST", server.address)
    step = loop.Training.step

    def step_and_tell(self: loop.Training) -> None:
        step(self)
        if self.state.step == 4:
            server.set("preempted", "TRUE")
            while self.stopper.request.requested_by is None:
                pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Training, "step", step_and_tell)
        with pytest.raises(Preempted, match="spot VM is preempted at step 4; everything is saved") as caught:
            train(settings(data, max_duration="9"), TrainOptions(run_dir=str(tmp_path / "run")))
    assert caught.value.exit_code == 75
    saving = [e for e in read_lines(tmp_path / "run", EVENTS, Event) if "saving" in e.text and "spot VM" in e.text]
    assert "in 30 s" in saving[0].text
    server.set("preempted", "FALSE")
    run = train(settings(data, max_duration="9"), TrainOptions(run_dir=str(tmp_path / "run"))).run
    assert (run / "final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()


def test_a_time_limit_that_is_near_saves(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopper, "time_limit_s", lambda: 30.0)
    with pytest.raises(Preempted, match="the time limit of the Slurm job at step 1"):
        train(settings(data), TrainOptions(run_dir=str(tmp_path / "run")))


def test_the_margin_before_a_time_limit_covers_a_long_save() -> None:
    made: Any = object.__new__(stopper.Stopper)
    requests: list[float] = []
    made.request = SimpleNamespace(
        request=lambda _, grace_s: requests.append(grace_s), trace_requested=False, requested_by=None
    )
    made._hang_detector, made._memory_guard = SimpleNamespace(report=lambda: None), SimpleNamespace(poll=lambda: None)
    made._time_limit_at_s = -1.0
    for longest_s in (1.0, 41.0):
        made._writer = SimpleNamespace(longest_write_s=longest_s)
        made._look_at_requests()
    assert requests == [60.0, 123.0]


def test_sigterm_begins_the_grace_period_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GRACE_S", "30")
    with stop_on_signals() as request:
        assert request.rest_s() == math.inf
        os.kill(os.getpid(), signal.SIGTERM)
        assert (request.requested_by, request.grace_s) == ("SIGTERM", 30)
        assert request.rest_s() <= 27, "the rest is for the end of the process"
        request.request("a later notice", grace_s=500)
        assert request.rest_s() <= 27


def test_the_grace_period_counts_from_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(stopper.time, "monotonic", lambda: now_s)
    request = StopRequest()
    request.request("SIGTERM", grace_s=30)
    now_s = 120.0
    assert request.rest_s() == pytest.approx(7)
    now_s = 200.0
    assert request.rest_s() == 0


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_grace_period_that_is_no_time_is_refused(text: str) -> None:
    assert grace_period_s({}) is None
    with pytest.raises(ConfigError, match="STOKER_GRACE_S"):
        grace_period_s({"STOKER_GRACE_S": text})
