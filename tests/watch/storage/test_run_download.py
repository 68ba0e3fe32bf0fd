"""Commands that read a run in a bucket: running, killed or partly written."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest

import stoker_watch.storage.store
from stoker_watch.errors import UsageError
from stoker_watch.report.explain import explain_run
from stoker_watch.report.html import write_report
from stoker_watch.runs.records import (
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
from stoker_watch.runs.schemas import Event, StepWindow
from stoker_watch.storage.lease import acquire
from stoker_watch.storage.store import ETAGS_FILE, download, fetch_files, open_store
from stoker_watch.storage.uri import (
    LEASE_FILE,
    URI_FILE,
    StorageUri,
    display_path,
    parse_uri,
    reading_copy,
    to_run_uri,
    working_copy,
)
from tests.watch.storage.servers import Conditions, Server, apply


@pytest.fixture(params=["s3", "google"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def uri(server: Server, monkeypatch: pytest.MonkeyPatch) -> StorageUri:
    served = server.bucket()
    apply(monkeypatch, served.environment)
    return parse_uri(f"{served.uri}/runs/x")


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
def put(uri: StorageUri, tmp_path: Path) -> Callable[..., None]:
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
            open_store(uri).write(uri.child(name).key, data + (b'{"t":17,' if torn and name != CONFIG else b""))

    return put


def write(uri: StorageUri, name: str, data: bytes) -> None:
    open_store(uri).write(uri.child(name).key, data)


def test_running_killed_and_finished_run(uri: StorageUri, put: Callable[..., None]):
    put(torn=True)
    lease = acquire(uri.child(LEASE_FILE), on_message=print, check_interrupted=lambda: None)
    assert lease is not None
    live = explain_run(str(uri))
    assert (live.state, live.steps, live.run) == ("running", 10, str(uri))
    assert f"process {os.getpid()}" in live.state_text
    put()
    assert explain_run(str(uri)).steps == 20, "it grew"
    key = uri.child(LEASE_FILE).key
    gone = open_store(uri).read(key).replace(b'"lease_duration_s":60.0', b'"lease_duration_s":0.0')
    write(uri, LEASE_FILE, gone)
    assert explain_run(str(uri)).state == "killed"
    put("finished")
    finished = explain_run(str(uri))
    assert (finished.state, finished.steps) == ("finished", 30)
    assert finished.phases[0].device_s == pytest.approx(1.8)


def test_records_of_all_ranks_are_downloaded_and_deleted_ones_removed(uri: StorageUri, put: Callable[..., None]):
    put("finished")
    other = window(10, time.time())
    name = "ranks/0001/steps.jsonl"
    write(uri, name, msgspec.json.encode(other) + b"\n")
    assert (explain_run(str(uri)).devices, explain_run(str(uri)).device_s) == (2, pytest.approx(2.0))
    open_store(uri).delete(uri.child(name).key)
    assert explain_run(str(uri)).devices == 1


def test_unchanged_files_are_not_downloaded_again(server: Server, monkeypatch: pytest.MonkeyPatch):
    with server.bucket().through() as (served, proxy):
        apply(monkeypatch, served.environment)
        uri = parse_uri(f"{served.uri}/runs/x")
        write(uri, EVENTS, b"")
        write(uri, BEST, b"one")
        write(uri, CONFIG, b"")

        def gets() -> int:
            before = len(proxy.requests)
            folder = fetch_run(uri, weights=True)
            read.append((folder / BEST).read_bytes())
            return sum(
                request.method == "GET" and BEST.partition(".")[0] in request.path
                for request in proxy.requests[before:]
            )

        read: list[bytes] = []
        assert [gets(), gets()] == [1, 0]
        fetch_run(uri)
        assert gets() == 0, "the records are downloaded beside it"
        write(uri, BEST, b"two")
        assert gets() == 1
        assert read == [b"one", b"one", b"one", b"two"]


def test_weights_are_best_else_final_else_newest_checkpoint(uri: StorageUri):
    write(uri, EVENTS, b"")
    for step in (5, 10):
        write(uri, f"checkpoints/step-{step:08d}/weights.safetensors", str(step).encode())
    folder = fetch_run(uri, weights=True)
    assert (folder / "checkpoints/step-00000010/weights.safetensors").read_bytes() == b"10"
    assert not (folder / "checkpoints/step-00000005").exists()
    write(uri, FINAL, b"final")
    assert (fetch_run(uri, weights=True) / FINAL).read_bytes() == b"final"
    write(uri, BEST, b"best")
    assert (fetch_run(uri, weights=True) / BEST).read_bytes() == b"best"
    open_store(uri).delete(uri.child(BEST).key)
    assert not (fetch_run(uri, weights=True) / BEST).exists()


def test_a_named_file_needs_no_permission_to_list(google: Server, monkeypatch: pytest.MonkeyPatch):
    served = google.bucket()
    apply(monkeypatch, served.environment)
    uri = parse_uri(f"{served.uri}/runs/x")
    write(uri, EVENTS, b"")
    write(uri, CONFIG, b"")
    begin = len(google.objects.requests)
    assert (fetch_files(uri, (CONFIG,)) / CONFIG).exists()
    assert not any("prefix=" in line for line in google.objects.requests[begin:])


def test_a_file_that_the_bucket_does_not_have_is_removed(uri: StorageUri):
    write(uri, EVENTS, b"")
    (fetch_run(uri) / CONFIG).write_text("left by an older version")
    assert not (fetch_run(uri) / CONFIG).exists()


@pytest.mark.parametrize("fetched_before", [False, True])
def test_a_checkpoint_that_is_deleted_after_the_listing(
    fetched_before: bool, google: Server, monkeypatch: pytest.MonkeyPatch
):
    """The next one is downloaded instead."""
    with google.bucket().through() as (served, proxy):
        apply(monkeypatch, served.environment)
        uri = parse_uri(f"{served.uri}/runs/x")
        older, newer = (f"checkpoints/step-{step:08d}/weights.safetensors" for step in (5, 10))
        write(uri, EVENTS, b"")
        write(uri, older, b"5")
        write(uri, newer, b"10")
        if fetched_before:
            fetch_run(uri, weights=True)
            write(uri, newer, b"ten")

        def delete(_number: int, method: str, path: str) -> None:
            if method == "GET" and newer in unquote(path):
                google.objects.buckets[uri.bucket].pop(uri.child(newer).key, None)

        proxy.conditions = Conditions(plan=delete)
        folder = fetch_run(uri, weights=True)
    assert (folder / older).read_bytes() == b"5"
    assert not (folder / newer).exists()
    assert newer not in (folder / ETAGS_FILE).read_text()


def test_file_replaced_during_download_is_downloaded_again(
    google: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It is larger than a part: the second part would belong to another version."""
    monkeypatch.setattr(stoker_watch.storage.store, "DOWNLOAD_PART_BYTES", 1000)
    size = 1500
    with google.bucket().through() as (served, proxy):
        apply(monkeypatch, served.environment)
        uri = parse_uri(f"{served.uri}/big")
        write(uri.parent, "big", b"a" * size)
        asked = 0

        def replace(_number: int, method: str, _path: str) -> None:
            nonlocal asked
            asked += method == "GET"
            if asked == 2:
                google.objects.put(uri.bucket, "big", b"b" * size)

        proxy.conditions = Conditions(plan=replace)
        download(open_store(uri), "big", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == b"b" * size
    assert [path.name for path in tmp_path.iterdir()] == ["big"]


def test_working_copy_is_read_if_it_is_at_least_as_new(uri: StorageUri, put: Callable[..., None]):
    put()
    own = working_copy(uri)
    own.mkdir(parents=True)
    there = open_store(uri).read(uri.child(EVENTS).key)
    (own / EVENTS).write_bytes(there + b'{"t":1,"attempt":1,"kind":"note"}\n')
    assert open_run(str(uri)) == own
    put("failed")
    assert open_run(str(uri)) == reading_copy(uri), "another machine has continued the run"
    with locked(own) as held:
        assert held
        command = [sys.executable, "-c", f"from stoker_watch.runs.records import open_run; print(open_run('{uri}'))"]
        assert subprocess.check_output(command, text=True).strip() == str(own), "a process here trains it"


def test_the_names_of_a_run(uri: StorageUri, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLACE", str(uri.parent))
    assert to_run_uri("$PLACE/x") == uri
    assert to_run_uri(str(tmp_path)) is None
    (tmp_path / URI_FILE).write_text(str(uri))
    assert to_run_uri(str(tmp_path)) == uri
    assert (display_path(tmp_path), display_path(tmp_path / "other")) == (str(uri), str(tmp_path / "other"))
    assert working_copy(uri).name.startswith("x-")
    assert len({working_copy(uri), working_copy(uri.parent), working_copy(uri.parent.child("x-"))}) == 3


def test_uri_without_a_run(uri: StorageUri):
    open_store(uri).write(uri.parent.child("other/events.jsonl").key, b"x")
    with pytest.raises(UsageError, match="is not a run") as caught:
        open_run(str(uri))
    assert str(uri) in str(caught.value)
    assert caught.value.choices == (str(uri.parent.child("other")),)
    with pytest.raises(UsageError, match="is not a run"):
        fetch_run(uri, weights=True)


def test_report_is_written_to_the_current_folder(
    uri: StorageUri, put: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put("finished")
    monkeypatch.chdir(tmp_path)
    before = list(open_store(uri).list(uri.key))
    path = write_report(str(uri))
    assert path == Path("x-report.html")
    assert str(uri) in path.read_text()
    assert list(open_store(uri).list(uri.key)) == before


def test_why_needs_no_torch(uri: StorageUri, put: Callable[..., None]):
    put("finished")
    code = "import sys; sys.modules['torch'] = None; from stoker_watch.cli.app import main; main()"
    output = subprocess.check_output([sys.executable, "-c", code, "why", str(uri)], text=True)
    assert "finished" in output
    assert str(uri) in output


def test_events_are_read_from_the_copy(uri: StorageUri, put: Callable[..., None]):
    put("preempted", torn=True)
    kinds = [event.kind for event in read_lines(open_run(str(uri)), EVENTS, Event)]
    assert kinds == ["started", "preempted"]
