"""What a run's folder becomes in a bucket: whole checkpoints or none, newest first, in step with the folder."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stoker.hardware.device import Device
from stoker.training.bucket_run import BackgroundUploader
from stoker.training.checkpoint import MANIFEST, CheckpointWriter, snapshot
from stoker.training.stopper import StopRequest
from stoker_watch.runs.records import EVENTS, STEPS, RunFolder
from stoker_watch.storage.lease import LeaseLost, acquire
from stoker_watch.storage.store import list_keys, open_store
from stoker_watch.storage.uri import StorageUri, parse_uri
from tests.fixtures.training_uploads import LIMIT_S, name_of
from tests.watch.storage.servers import Conditions, Proxy, ServedBucket, Server, apply, google_server, s3_server

STREAM = Device(torch.device("cpu")).make_stream()


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def google() -> Iterator[Server]:
    with google_server() as server:
        yield server


@pytest.fixture(params=["s3", "google"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServedBucket, Proxy]]:
    server: Server = request.getfixturevalue(request.param)
    with server.bucket().through() as (place, proxy):
        apply(monkeypatch, place.environment)
        yield place, proxy


class Run:
    """A run's folder, what it uploads, and what it says meanwhile."""

    def __init__(self, folder: Path, address: StorageUri, *, leased: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.address = folder, address
        self.records = RunFolder(folder, 1)
        self.records.event("started")
        self.said: list[tuple[str, str]] = []
        self.counted = 0
        """Warnings that `stoker why` counts as failures of storage."""
        self.lost: list[LeaseLost] = []
        self.heard = threading.Condition()
        self.writer = CheckpointWriter(folder, self.hear)
        lease = (
            acquire(address.child("lease.json"), on_message=print, check_interrupted=lambda: None) if leased else None
        )
        self.lease = lease
        self.uploads = BackgroundUploader(
            open_store(address), address, folder, lease, {}, report=self.hear, on_lease_lost=self.lose
        )

    def hear(self, kind: str, text: str, **data: object) -> None:
        with self.heard:
            self.said.append((kind, text))
            self.counted += kind == "warning" and data == {"storage": True}
            self.heard.notify_all()

    def lose(self, error: LeaseLost) -> None:
        with self.heard:
            self.lost.append(error)
            self.heard.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self.heard:
            assert self.heard.wait_for(until, LIMIT_S), self.said

    def warnings(self) -> list[str]:
        return [text for kind, text in self.said if kind == "warning"]

    def save(self, step: int) -> None:
        state = {"moments": [torch.full((3,), float(step))], "skipped_streak": (0, -1)}
        weights = {"w": torch.full((100,), float(step))}
        self.writer.save(snapshot(STREAM, step=step, metadata={"model": "m"}, weights=weights, state=state))
        self.writer.wait()

    def there(self) -> dict[str, bytes]:
        store = open_store(self.address)
        return {name: store.read(key) for name, key in list_keys(store, self.address).items()}

    def here(self) -> dict[str, bytes]:
        files = (path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}


@pytest.fixture
def run(place: tuple[ServedBucket, Proxy], tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run", parse_uri(f"{place[0].uri}/runs/x"))
    yield run
    run.uploads.stop()


def steps_in(names: dict[str, bytes]) -> list[str]:
    return sorted({name.split("/")[1] for name in names if name.startswith("checkpoints/")})


def test_the_bucket_becomes_equal_to_the_folder(run: Run):
    for name, data in (
        ("config.toml", b"a"),
        ("best.safetensors", b"b"),
        ("steps.jsonl", b"{}\n"),
        ("report.html", b"r"),
    ):
        (run.folder / name).write_bytes(data)
    for name in ("tensorboard/events.1", "traces/attempt-1-step-00000009.json.gz"):
        (run.folder / name).parent.mkdir()
        (run.folder / name).write_bytes(b"t")
    run.save(1)
    run.uploads.start()
    assert run.uploads.flush(LIMIT_S) is None
    assert run.there() == run.here()
    run.save(20)
    run.save(300)
    (run.folder / "best.safetensors").write_bytes(b"better")
    run.records.event("info", "more")
    assert run.uploads.flush(LIMIT_S) is None
    assert run.there() == run.here()
    assert steps_in(run.there()) == ["step-00000020", "step-00000300"]
    assert run.warnings() == []


def test_unchanged_files_are_not_uploaded_again(run: Run, place: tuple[ServedBucket, Proxy]):
    run.save(1)
    run.uploads.start()
    assert run.uploads.flush(LIMIT_S) is None
    before = len(place[1].requests)
    assert run.uploads.flush(LIMIT_S) is None
    assert place[1].requests[before:] == []
    run.records.event("info")
    assert run.uploads.flush(LIMIT_S) is None
    assert [name_of(seen.path) for seen in place[1].requests[before:]] == [EVENTS]


def test_the_manifest_is_uploaded_after_the_files_and_records_of_its_checkpoint(
    run: Run, place: tuple[ServedBucket, Proxy]
):
    for name in ("best.safetensors", STEPS):
        (run.folder / name).write_bytes(b"x")
    run.save(1)
    run.uploads.start()
    assert run.uploads.flush(LIMIT_S) is None
    written = [name_of(seen.path) for seen in place[1].requests if seen.method == "PUT"]
    for name in ("state.pt", "weights.safetensors", "best.safetensors", STEPS, EVENTS):
        assert written.index(name) < written.index("manifest.json"), written


def failing(name: str) -> Conditions:
    return Conditions(plan=lambda _n, method, path: "400" if method == "PUT" and name_of(path) == name else None)


@pytest.mark.slow
def test_a_failed_upload_of_the_state_leaves_no_manifest(run: Run, place: tuple[ServedBucket, Proxy]):
    """And once it can be again, the next pass writes it: said once when it fails, once when it is well."""
    run.save(1)
    run.uploads.start()
    assert run.uploads.flush(LIMIT_S) is None
    place[1].conditions = failing("state.pt")
    run.save(2)
    run.wait(lambda: len(run.warnings()) == 1)
    assert "training continues" in run.warnings()[0]
    failure = run.uploads.flush(LIMIT_S)
    assert failure is not None
    assert "400" in failure
    there = run.there()
    assert "checkpoints/step-00000001/manifest.json" in there, "the one before stays"
    assert "checkpoints/step-00000002/manifest.json" not in there
    place[1].conditions = Conditions()
    run.save(3)
    assert run.uploads.flush(LIMIT_S) is None
    assert run.counted == len(run.warnings()) == 1
    assert run.said[-1][0] == "info"
    assert run.there() == run.here()
    assert len(run.warnings()) == 1


def test_flush_ends_at_its_timeout(run: Run, place: tuple[ServedBucket, Proxy]):
    place[1].conditions = Conditions(plan=lambda _n, method, _path: "hang" if method == "PUT" else None)
    run.save(1)
    run.uploads.start()
    failure = run.uploads.flush(0.2)
    assert failure is not None
    assert "not done within" in failure


def test_other_files_of_the_same_step_replace_those_in_the_bucket(run: Run, place: tuple[ServedBucket, Proxy]):
    """After another attempt: the manifest goes first (S3 deletes by a POST to the bucket) and comes last, so that never
    two attempts are mixed."""
    run.save(1)
    run.uploads.start()
    assert run.uploads.flush(LIMIT_S) is None
    before = len(place[1].requests)
    state = {"moments": [torch.full((3,), 7.0)], "skipped_streak": (0, -1)}
    run.writer.save(snapshot(STREAM, step=1, metadata={}, weights={"w": torch.ones(1)}, state=state))
    run.writer.wait()
    assert run.uploads.flush(LIMIT_S) is None
    assert run.there() == run.here()
    order = [(seen.method, name_of(seen.path)) for seen in place[1].requests[before:]]
    removed = [
        n for n, (method, name) in enumerate(order) if method == "POST" or (method, name) == ("DELETE", MANIFEST)
    ]
    assert removed[0] < order.index(("PUT", "state.pt")) < order.index(("PUT", "manifest.json"))


def test_an_incomplete_checkpoint_in_the_bucket_is_deleted(place: tuple[ServedBucket, Proxy], tmp_path: Path):
    address = parse_uri(f"{place[0].uri}/runs/x")
    store = open_store(address)
    store.write(address.child("checkpoints/step-00000005/state.pt").key, b"half")
    run = Run(tmp_path / "run", address)
    run.uploads._uploaded_manifests["step-00000005"] = b""
    run.save(10)
    run.uploads.start()
    assert run.uploads.flush(LIMIT_S) is None
    run.uploads.stop()
    assert run.there() == run.here()


def test_a_lost_lease_ends_the_uploads(place: tuple[ServedBucket, Proxy], tmp_path: Path):
    run = Run(tmp_path / "run", parse_uri(f"{place[0].uri}/runs/x"), leased=True)
    run.save(1)
    run.uploads.start()
    assert run.uploads.flush(LIMIT_S) is None
    store, key = open_store(run.address), run.address.child("lease.json").key
    store.write(key, store.read(key).replace(b'"token":"', b'"token":"x'))
    run.save(2)
    run.wait(lambda: len(run.lost) == 1)
    assert "taken over" in str(run.lost[0])
    assert "checkpoints/step-00000002/manifest.json" not in run.there()
    assert "taken over" in str(run.uploads.flush(LIMIT_S))


def test_an_error_in_the_thread_is_raised_by_flush(run: Run, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run.uploads, "_upload_file", broken)
    run.uploads.start()
    with pytest.raises(ZeroDivisionError):
        run.uploads.flush(LIMIT_S)


def test_flush_returns_at_once_if_the_store_refuses(run: Run, place: tuple[ServedBucket, Proxy]):
    place[1].conditions = Conditions(plan=lambda _n, method, _path: "400" if method == "PUT" else None)
    run.uploads.start()
    assert "cannot be written" in str(run.uploads.flush(LIMIT_S))


def test_an_end_is_uploaded_after_the_final_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine takes an end in the bucket's events for a complete run: the training may end during a pass."""
    delete = run.uploads._delete_dropped_checkpoints

    def end_meanwhile() -> None:
        delete()
        if not (run.folder / "final.safetensors").exists():
            (run.folder / "final.safetensors").write_bytes(b"f")
            run.records.event("finished")

    monkeypatch.setattr(run.uploads, "_delete_dropped_checkpoints", end_meanwhile)
    run.uploads._upload_changes(upload_all=True)
    there = run.there()
    assert "final.safetensors" not in there
    assert b"finished" not in there.get(EVENTS, b"")
    run.uploads._upload_changes(upload_all=True)
    there = run.there()
    assert there["final.safetensors"] == b"f"
    assert b"finished" in there[EVENTS]


class HangingStore:
    """A bucket whose connections are cut again and again: a write does not end."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def write(self, *_: object) -> None:
        self.over.wait()


@pytest.mark.parametrize(("grace_s", "most_s"), [(None, 125), (30.0, 35)])
def test_a_signal_bounds_the_wait_for_the_last_upload(grace_s: float | None, most_s: float, tmp_path: Path) -> None:
    """After 10 s of at most 900, the machine is told to go. Each look at the clock takes half a second."""
    now_s, messages, store, request = 0.0, [], HangingStore(), StopRequest()

    def clock() -> float:
        nonlocal now_s
        now_s += 0.5
        if now_s >= 10:
            request.request("SIGTERM", grace_s=grace_s)
        return now_s

    (tmp_path / "final.safetensors").write_bytes(b"weights")
    (tmp_path / EVENTS).write_text("")
    uploads = BackgroundUploader(
        store, parse_uri("gs://bucket/run"), tmp_path, None, {},
        report=lambda kind, text, **_: messages.append((kind, text)), on_lease_lost=lambda _: None, clock=clock,
    )  # type: ignore[arg-type]  # fmt: skip
    waits = uploads._condition.wait
    uploads._condition.wait = lambda _=None: waits(0.001)  # type: ignore[method-assign]
    uploads.start()
    try:
        failure = uploads.finish(900.0, request)
        assert now_s <= 10 + most_s
        assert failure is not None
        assert "not done within" in failure
        ((_, text),) = [entry for entry in messages if entry[0] == "warning"]
        for part in ("SIGTERM", "final.safetensors", EVENTS):
            assert part in text
    finally:
        uploads.stop()
        store.over.set()
