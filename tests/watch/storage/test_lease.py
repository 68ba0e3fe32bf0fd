"""The lease of a run in a bucket: one holder at a time, on both kinds of store."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker_watch.errors import Conflict, StorageError, UsageError
from stoker_watch.report.explain import explain_run
from stoker_watch.storage import lease as lease_module
from stoker_watch.storage.lease import Lease, LeaseHolder, LeaseLost, acquire
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import StorageUri, parse_uri
from tests.bounded import bounded
from tests.fixtures.special_files import replace_by
from tests.watch.report.runs import write_run
from tests.watch.storage.proxy import Conditions
from tests.watch.storage.servers import ServedBucket, Server, apply


@pytest.fixture(params=["s3", "google"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ServedBucket:
    server: Server = request.getfixturevalue(request.param)
    served = server.bucket()
    apply(monkeypatch, served.environment)
    return served


@pytest.fixture
def uri(served: ServedBucket) -> StorageUri:
    return parse_uri(f"{served.uri}/runs/x/lease.json")


def take(uri: StorageUri, messages: list[str] | None = None) -> Lease:
    lease = acquire(uri, on_message=(messages if messages is not None else []).append, check_interrupted=lambda: None)
    assert lease is not None
    return lease


def holder(uri: StorageUri) -> LeaseHolder:
    return msgspec.json.decode(open_store(uri).read(uri.key), type=LeaseHolder)


def put(uri: StorageUri, found: LeaseHolder) -> None:
    open_store(uri).write(uri.key, msgspec.json.encode(found))


def test_second_process_is_refused_until_release(uri: StorageUri):
    first = take(uri)
    with pytest.raises(UsageError, match="Another process is training") as caught:
        take(uri)
    assert str(holder(uri)) in str(caught.value)
    assert caught.value.location == str(uri.parent)
    first.renew()
    first.release()
    second = take(uri)
    with pytest.raises(LeaseLost, match="taken over"):
        first.renew()
    with pytest.raises(LeaseLost):
        first.ensure_held()
    second.ensure_held()


HOLD = """
import sys
from stoker_watch.storage.uri import parse_uri
from stoker_watch.storage.lease import acquire
acquire(parse_uri(sys.argv[1]), on_message=print, check_interrupted=lambda: None)
print("held", flush=True)
sys.stdin.read()
"""


def test_lease_of_a_dead_local_process_is_taken_at_once(uri: StorageUri):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(uri)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(UsageError, match="Another process") as caught:
        take(uri)
    assert f"process {process.pid}" in str(caught.value)
    process.kill()
    process.wait()
    messages: list[str] = []
    take(uri, messages)
    assert messages == []


def test_reused_process_id_is_another_process(uri: StorageUri):
    take(uri)
    put(uri, msgspec.structs.replace(holder(uri), process_start=1.0))
    take(uri)


def test_lease_of_another_machine_must_expire(uri: StorageUri):
    take(uri)
    put(uri, msgspec.structs.replace(holder(uri), machine="other", host="far", renew_time=time.time() - 59.5))
    messages: list[str] = []
    take(uri, messages)
    assert len(messages) == 1
    assert "far" in messages[0]


def test_renewal_by_another_machine_is_noticed(uri: StorageUri):
    """The other machine renews between the first and the second read."""
    take(uri)
    far = msgspec.structs.replace(holder(uri), machine="other", host="far")
    put(uri, far)

    def renew() -> None:
        put(uri, msgspec.structs.replace(far, renew_time=time.time()))

    with pytest.raises(UsageError, match="Another process") as caught:
        acquire(uri, on_message=lambda _: None, check_interrupted=renew)
    assert "far" in str(caught.value)


def test_waiting_can_be_interrupted(uri: StorageUri):
    take(uri)
    put(uri, msgspec.structs.replace(holder(uri), machine="other"))

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        acquire(uri, on_message=lambda _: None, check_interrupted=stop)


def test_lost_response_does_not_lose_the_lease(served: ServedBucket, uri: StorageUri, monkeypatch: pytest.MonkeyPatch):
    """Every second write succeeds, but its response is lost."""
    puts = 0

    def plan(_number: int, method: str, _path: str):
        nonlocal puts
        puts += method == "PUT"
        return "lose" if method == "PUT" and puts % 2 else None

    with served.through(Conditions(plan=plan)) as (proxied, _):
        apply(monkeypatch, proxied.environment)
        lease = take(uri)
        for _ in range(3):
            lease.renew()
        lease.ensure_held()
    assert puts > 4


def test_removed_lease_is_lost(uri: StorageUri):
    lease = take(uri)
    open_store(uri).delete(uri.key)
    with pytest.raises(LeaseLost) as caught:
        lease.renew()
    assert "removed" in str(caught.value)


def test_own_renewal_is_recognized_after_lost_responses(
    served: ServedBucket, uri: StorageUri, monkeypatch: pytest.MonkeyPatch
):
    """The write failed for us but not in the store: the object is an unknown version with our token."""
    with served.through() as (proxied, proxy):
        apply(monkeypatch, {**proxied.environment, "STOKER_STORAGE_TIMEOUT_S": "1"})
        lease = take(uri)
        proxy.conditions = Conditions(plan=lambda _n, method, _path: "lose" if method == "PUT" else None)
        with pytest.raises(StorageError) as caught:
            lease.renew()
        assert not isinstance(caught.value, Conflict)
        proxy.conditions = Conditions()
        lease.renew()
        lease.renew()


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "[" * 100_000, '{"token":1}', "fifo", "folder", "zero",
     json.dumps({"token": "x", "user": "u", "host": "h", "machine": "m", "pid": 10**30, "process_start": 1.0,
                 "renew_time": 1e300})],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_a_copy_that_is_no_lease_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run", end=None)
    path = run / "lease.json"
    replace_by(content, path, size_bytes=0) if content in ("fifo", "folder", "zero") else path.write_text(content)
    with bounded(seconds=20, megabytes=256), pytest.raises(UsageError, match="copy of the run's lease") as caught:
        explain_run(run)
    assert caught.value.location == str(path)


@pytest.mark.parametrize("renews", [False, True])
def test_a_store_that_is_cut_off_does_not_hold_the_end(
    uri: StorageUri, renews: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "RELEASE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(lease_module, "RENEW_INTERVAL_S", 0.0)
    lease, asked, answered = take(uri), threading.Event(), threading.Event()
    write = lease._store.write

    def write_late(*arguments: Any, **options: Any) -> Any:
        asked.set()
        answered.wait()
        return write(*arguments, **options)

    monkeypatch.setattr(lease._store, "write", write_late)
    if renews:
        lease.start_renewing(lambda _: None)
        asked.wait()
    lease.release()
    assert asked.is_set()
    answered.set()
    while not holder(uri).released:
        time.sleep(0.01)
