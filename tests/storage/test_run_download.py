"""Reading a run that is in a bucket: live, dead or half-written, by the commands that only look."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import stoker.storage.download
from stoker.errors import UsageError
from stoker.report.explain import explain_run
from stoker.report.html import write_report
from stoker.runs.records import (
    BEST,
    CONFIG,
    EVENTS,
    FINAL,
    STEPS,
    RunFolder,
    fetch_run,
    locked,
    open_run,
    read_lines,
)
from stoker.runs.schemas import Event, StepWindow
from stoker.storage.download import download
from stoker.storage.lease import acquire
from stoker.storage.run_uri import (
    LEASE_FILE,
    URI_FILE,
    display_path,
    reading_copy,
    to_run_uri,
    working_copy,
)
from stoker.storage.store import open_store
from stoker.storage.uri import StorageUri, parse_uri
from tests.storage.servers import Conditions, Server, apply


@pytest.fixture(params=["s3", "google"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def address(server: Server, monkeypatch: pytest.MonkeyPatch) -> StorageUri:
    place = server.bucket()
    apply(monkeypatch, place.environment)
    return parse_uri(f"{place.address}/runs/x")


def window(step: int, t: float) -> StepWindow:
    return StepWindow(
        t=t,
        attempt=1,
        step=step,
        window_steps=10,
        num_images=40,
        wall_s=1.0,
        devices=1,
        phases={"compute": 0.6, "host": 0.4},
    )


@pytest.fixture
def put(address: StorageUri, tmp_path: Path) -> Callable[..., None]:
    """Writes a run's records into the bucket, its last event `ended`; torn: with half a line at the end of each."""
    folder = tmp_path / "written"
    folder.mkdir()
    records = RunFolder(folder, 1)
    records.event("started")
    (folder / CONFIG).write_text("")
    steps = 0

    def put(ended: str | None = None, *, torn: bool = False) -> None:
        nonlocal steps
        steps += 10
        records.append(STEPS, window(steps, time.time()))
        if ended is not None:
            records.event(ended)
        for name in (STEPS, EVENTS, CONFIG):
            data = (folder / name).read_bytes()
            open_store(address).write(address.child(name).key, data + (b'{"t":17,' if torn and name != CONFIG else b""))

    return put


def write(address: StorageUri, name: str, data: bytes) -> None:
    open_store(address).write(address.child(name).key, data)


def test_a_live_a_dead_and_a_finished_run(address: StorageUri, put: Callable[..., None]):
    put(torn=True)
    lease = acquire(address.child(LEASE_FILE), on_message=print, check_interrupted=lambda: None)
    assert lease is not None
    live = explain_run(str(address))
    assert (live.state, live.steps, live.run) == ("running", 10, str(address))
    assert f"process {os.getpid()}" in live.state_text
    put()
    assert explain_run(str(address)).steps == 20, "it grew"
    key = address.child(LEASE_FILE).key
    gone = open_store(address).read(key).replace(b'"lease_duration_s":60.0', b'"lease_duration_s":0.0')
    write(address, LEASE_FILE, gone)
    assert explain_run(str(address)).state == "killed"
    put("finished")
    finished = explain_run(str(address))
    assert (finished.state, finished.steps) == ("finished", 30)
    assert finished.phases[0].device_s == pytest.approx(1.8)


def test_the_records_of_all_ranks_are_fetched_and_those_that_are_gone_are_forgotten(
    address: StorageUri, put: Callable[..., None]
):
    put("finished")
    other = window(10, time.time())
    name = "ranks/0001/steps.jsonl"
    write(address, name, msgspec.json.encode(other) + b"\n")
    assert (explain_run(str(address)).devices, explain_run(str(address)).device_s) == (2, pytest.approx(2.0))
    open_store(address).delete(address.child(name).key)
    assert explain_run(str(address)).devices == 1


def test_what_has_not_changed_is_not_fetched_again(server: Server, monkeypatch: pytest.MonkeyPatch):
    with server.bucket().through() as (place, proxy):
        apply(monkeypatch, place.environment)
        address = parse_uri(f"{place.address}/runs/x")
        write(address, EVENTS, b"")
        write(address, BEST, b"one")
        write(address, CONFIG, b"")

        def gets() -> int:
            before = len(proxy.seen)
            folder = fetch_run(address, weights=True)
            read.append((folder / BEST).read_bytes())
            return sum(seen.method == "GET" and BEST.partition(".")[0] in seen.path for seen in proxy.seen[before:])

        read: list[bytes] = []
        assert [gets(), gets()] == [1, 0]
        write(address, BEST, b"two")
        assert gets() == 1
        assert read == [b"one", b"one", b"two"]


def test_weights_are_the_best_else_the_final_else_of_the_newest_checkpoint(address: StorageUri):
    write(address, EVENTS, b"")
    for step in (5, 10):
        write(address, f"checkpoints/step-{step:08d}/weights.safetensors", str(step).encode())
    folder = fetch_run(address, weights=True)
    assert (folder / "checkpoints/step-00000010/weights.safetensors").read_bytes() == b"10"
    assert not (folder / "checkpoints/step-00000005").exists()
    write(address, FINAL, b"final")
    assert (fetch_run(address, weights=True) / FINAL).read_bytes() == b"final"
    write(address, BEST, b"best")
    assert (fetch_run(address, weights=True) / BEST).read_bytes() == b"best"
    open_store(address).delete(address.child(BEST).key)
    assert not (fetch_run(address, weights=True) / BEST).exists()


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    google: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It is larger than a part: the second part would be another file's."""
    monkeypatch.setattr(stoker.storage.download, "PART_BYTES", 1000)
    size = 1500
    with google.bucket().through() as (place, proxy):
        apply(monkeypatch, place.environment)
        address = parse_uri(f"{place.address}/big")
        write(address.parent, "big", b"a" * size)
        asked = 0

        def replace(_number: int, method: str, _path: str) -> None:
            nonlocal asked
            asked += method == "GET"
            if asked == 2:
                google.objects.put(address.bucket, "big", b"b" * size)

        proxy.conditions = Conditions(plan=replace)
        download(open_store(address), "big", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == b"b" * size
    assert [path.name for path in tmp_path.iterdir()] == ["big"]


def test_the_working_copy_is_read_where_it_is_at_least_as_new(address: StorageUri, put: Callable[..., None]):
    put()
    own = working_copy(address)
    own.mkdir(parents=True)
    there = open_store(address).read(address.child(EVENTS).key)
    (own / EVENTS).write_bytes(there + b'{"t":1,"attempt":1,"kind":"note"}\n')
    assert open_run(str(address)) == own
    put("failed")
    assert open_run(str(address)) == reading_copy(address), "another machine has gone on"
    with locked(own) as held:
        assert held
        command = [sys.executable, "-c", f"from stoker.runs.records import open_run; print(open_run('{address}'))"]
        assert subprocess.check_output(command, text=True).strip() == str(own), "a process here trains it"


def test_the_names_of_a_run(address: StorageUri, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLACE", str(address.parent))
    assert to_run_uri("$PLACE/x") == address
    assert to_run_uri(str(tmp_path)) is None
    (tmp_path / URI_FILE).write_text(str(address))
    assert to_run_uri(str(tmp_path)) == address
    assert (display_path(tmp_path), display_path(tmp_path / "other")) == (str(address), str(tmp_path / "other"))
    assert working_copy(address).name.startswith("x-")
    assert len({working_copy(address), working_copy(address.parent), working_copy(address.parent.child("x-"))}) == 3


def test_no_run_is_said(address: StorageUri):
    open_store(address).write(address.parent.child("other/events.jsonl").key, b"x")
    with pytest.raises(UsageError, match="is not a run") as caught:
        open_run(str(address))
    assert str(address) in str(caught.value)
    assert caught.value.choices == (str(address.parent.child("other")),)
    with pytest.raises(UsageError, match="is not a run"):
        fetch_run(address, weights=True)


def test_a_report_lies_in_the_current_folder(
    address: StorageUri, put: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put("finished")
    monkeypatch.chdir(tmp_path)
    before = list(open_store(address).list(address.key))
    path = write_report(str(address))
    assert path == Path("x-report.html")
    assert str(address) in path.read_text()
    assert list(open_store(address).list(address.key)) == before


def test_why_needs_no_torch(address: StorageUri, put: Callable[..., None]):
    put("finished")
    code = "import sys; sys.modules['torch'] = None; from stoker.cli.app import main; main()"
    output = subprocess.check_output([sys.executable, "-c", code, "why", str(address)], text=True)
    assert "finished" in output
    assert str(address) in output


def test_events_are_read_from_the_copy(address: StorageUri, put: Callable[..., None]):
    put("preempted", torn=True)
    kinds = [event.kind for event in read_lines(open_run(str(address)), EVENTS, Event)]
    assert kinds == ["started", "preempted"]
