"""A run whose folder is in a bucket, killed or stopped, continues on another machine, bit for bit."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.config.settings import Config, from_fields
from stoker.inference.model import load
from stoker.training import bucket_run
from stoker.training.bucket_run import BucketRun, join_bucket_run
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker.training.stopper import StopRequest
from stoker_watch.errors import Preempted, RunFinished, StorageError, UsageError
from stoker_watch.report.explain import explain_run
from stoker_watch.runs.records import (
    BEST,
    CONFIG,
    EVENTS,
    FINAL,
    STEPS,
    RunFolder,
    read_lines,
)
from stoker_watch.runs.schemas import Event, StepWindow
from stoker_watch.storage.lease import LeaseHolder
from stoker_watch.storage.store import list_keys, open_store
from stoker_watch.storage.uri import LEASE_FILE, StorageUri, parse_uri, reading_copy, working_copy
from tests.drawn import draw, run_stoker, stoker
from tests.fixtures.training_uploads import LIMIT_S, name_of
from tests.watch.storage.servers import Conditions, Proxy, ServedBucket, Server, apply, google_server, s3_server

FLAGS = {
    "model": "retinanet_tiny_fpn", "image_size": (64, 64), "batch_size": 4, "max_duration": "24", "eval_every": "9",
    "checkpoint_every": "4", "ema_decay": 0.9, "precision": "fp32", "hflip": 0.5, "brightness": 0.2, "workers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def google() -> Iterator[Server]:
    with google_server() as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def place(google: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServedBucket, Proxy]]:
    with google.bucket().through() as (place, proxy):
        apply(monkeypatch, place.environment)
        yield place, proxy


@pytest.fixture
def address(place: tuple[ServedBucket, Proxy]) -> StorageUri:
    return parse_uri(f"{place[0].uri}/runs/x")


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Goes to another machine, as far as a run can tell: another cache, another folder."""

    def move(name: str) -> None:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("STOKER_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
        monkeypatch.chdir(folder)

    return move


def there(address: StorageUri) -> dict[str, str]:
    return list_keys(open_store(address), address)


def content(address: StorageUri, name: str) -> bytes:
    return open_store(address).read(address.child(name).key)


def checkpoints(address: StorageUri) -> list[str]:
    return sorted(name.split("/")[1] for name in there(address) if name.endswith("/manifest.json"))


@contextlib.contextmanager
def signalled(ready: Callable[[], bool]) -> Iterator[None]:
    """Sends this process SIGTERM as soon as it is ready."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            if ready():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


LONG = FLAGS | {"max_duration": "4000"}
"""Goes on until it is stopped."""


@pytest.mark.slow
def test_a_stopped_run_continues_on_another_machine(
    data: Path, address: StorageUri, move: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    """The signal comes after the first save, whether that is in the bucket or not: when the run has ended, it is."""
    move("alone")
    whole = train(from_fields({"data": str(data), **FLAGS}), TrainOptions(run_dir="whole")).run.absolute()
    asked = from_fields({"data": str(data), **FLAGS})
    move("first")
    here = working_copy(address)
    with signalled(lambda: any(here.glob("checkpoints/step-*"))), pytest.raises(Preempted) as caught:
        train(asked, TrainOptions(run_dir=str(address)))
    assert str(address) in str(caught.value)
    newest = checkpoints(address)[-1]
    stopped_at = int(newest[5:])
    assert f"at step {stopped_at}" in caught.value.what
    for name in ("state.pt", "weights.safetensors", "manifest.json"):
        assert content(address, f"checkpoints/{newest}/{name}") == (here / "checkpoints" / newest / name).read_bytes()
    assert [event.kind for event in read_lines(here, EVENTS, Event)][-1] == "preempted"
    assert content(address, EVENTS) == (here / EVENTS).read_bytes()
    assert msgspec.json.decode(content(address, LEASE_FILE), type=LeaseHolder).released
    assert explain_run(str(address)).state == "preempted"

    move("second")
    monkeypatch.setenv("RUNS_FOLDER", str(address.parent))
    result = train(asked, TrainOptions(run_dir="${RUNS_FOLDER}/x"))
    assert result.run == working_copy(address)
    kinds = [event.text for event in read_lines(result.run, EVENTS, Event)]
    assert any(f"continuing from step {stopped_at}" in text for text in kinds)
    for name in (FINAL, BEST):
        assert content(address, name) == (whole / name).read_bytes(), name
    assert {w.attempt for w in read_lines(result.run, STEPS, StepWindow)} == {1, 2}
    move("third")
    for name, weights in ((str(address), BEST), (f"{address}/{FINAL}", FINAL)):
        model = load(name, device="cpu")
        assert model.weights.read_bytes() == content(address, weights)
        assert len(model.predict(str(data / "valid" / "valid-0.jpg"))) == 1
    move("first")
    with pytest.raises(RunFinished):
        train(asked, TrainOptions(run_dir=str(address)))
    with pytest.raises(UsageError, match="The run is finished, with other settings") as caught:
        train(asked.replace(seed=7), TrainOptions(run_dir=str(address)))
    assert caught.value.exit_code == 2
    assert explain_run(str(address)).state == "finished"
    assert explain_run(str(address)).attempts == 2


@pytest.mark.slow
def test_a_state_that_does_not_reach_the_bucket_is_not_exit_75(
    data: Path, place: tuple[ServedBucket, Proxy], address: StorageUri, move: Callable[[str], None]
):
    move("first")

    def broken() -> bool:
        if not checkpoints(address):
            return False
        place[1].conditions = Conditions(plan=lambda _n, _m, path: "400" if name_of(path) == "state.pt" else None)
        return True

    with signalled(broken), pytest.raises(StorageError) as caught:
        train(from_fields({"data": str(data), **LONG}), TrainOptions(run_dir=str(address)))
    assert "did not reach the bucket" in caught.value.what
    assert caught.value.exit_code == 3
    assert "from an earlier checkpoint" in str(caught.value)
    assert explain_run(str(address)).state == "failed"


def write_run(folder: Path, *lines: str) -> None:
    """A run's records, and a checkpoint at each number that a line begins with."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text("")
    records = RunFolder(folder, 1)
    for line in lines:
        records.event("info", line)
    records.close()


def write_checkpoint(folder: Path, step: int, mark: str) -> Path:
    """A whole one, of files that say who wrote them."""
    import hashlib

    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    files = {}
    for name in ("state.pt", "weights.safetensors"):
        data = f"{mark} {name}".encode()
        (path / name).write_bytes(data)
        files[name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_bytes(msgspec.json.encode({"step": step, "files": files}))
    return path


def upload(folder: Path, address: StorageUri, leave_out: str = "") -> None:
    store = open_store(address)
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and not path.name.startswith(".") and not (leave_out and name.endswith(leave_out)):
            store.write(address.child(name).key, path.read_bytes())


def joined(address: StorageUri, *, resume: bool = False) -> BucketRun:
    with contextlib.ExitStack() as stack:
        name, again = (None, str(address)) if resume else (str(address), None)
        run = join_bucket_run(name, again, Config(), stop_request=StopRequest(), stack=stack, note=print)
        assert run is not None
        return run


def marks(run: BucketRun) -> dict[str, str]:
    """Who wrote the checkpoints of the working copy."""
    return {path.parent.name: path.read_text().split()[0] for path in run.local_dir.glob("checkpoints/step-*/state.pt")}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another machine's folder of the run."""
    folder = tmp_path / "other"
    write_run(folder, "a")
    write_checkpoint(folder, 10, "other")
    write_checkpoint(folder, 20, "other")
    (folder / "best.safetensors").write_bytes(b"best")
    return folder


def test_checkpoints_in_the_bucket_are_fetched(address: StorageUri, other: Path):
    upload(other, address)
    open_store(address).write(address.child("checkpoints/step-00000030/state.pt").key, b"half")
    run = joined(address, resume=True)
    assert marks(run) == {"step-00000010": "other", "step-00000020": "other"}
    assert (run.local_dir / EVENTS).read_bytes() == (other / EVENTS).read_bytes()
    assert (run.local_dir / "best.safetensors").read_bytes() == b"best"
    assert run._manifests["step-00000030"] == b""


def test_a_local_checkpoint_newer_than_the_bucket_is_kept(address: StorageUri, other: Path):
    """The machine died after a save and before its upload."""
    upload(other, address)
    mine = joined(address).local_dir
    write_checkpoint(mine, 40, "mine")
    shutil.rmtree(mine / "checkpoints" / "step-00000020")
    with (mine / EVENTS).open("ab") as file:
        file.write(b'{"t":1,"attempt":1,"kind":"no')
    run = joined(address)
    assert marks(run) == {"step-00000010": "other", "step-00000040": "mine"}
    assert not (run.local_dir / EVENTS).read_bytes().endswith(b"\n")


def test_a_damaged_local_checkpoint_is_replaced_by_that_of_the_bucket(address: StorageUri, other: Path):
    upload(other, address)
    mine = joined(address).local_dir
    (mine / "checkpoints/step-00000020/state.pt").write_bytes(b"mine and damaged")
    assert marks(joined(address)) == {"step-00000010": "other", "step-00000020": "other"}


def test_the_working_copy_is_replaced_if_another_machine_continued(address: StorageUri, other: Path):
    upload(other, address)
    mine = joined(address).local_dir
    write_run(mine, "mine")
    write_checkpoint(mine, 40, "mine")
    (mine / STEPS).write_bytes(b"mine")
    write_run(other, "b")
    upload(other, address)
    run = joined(address)
    assert marks(run) == {"step-00000010": "other", "step-00000020": "other"}
    assert (run.local_dir / EVENTS).read_bytes() == (other / EVENTS).read_bytes()
    assert not (run.local_dir / STEPS).exists()
    assert any("another machine has continued" in line for line in run.messages)


def test_an_interrupted_fetch_is_repeated(address: StorageUri, other: Path, place: tuple[ServedBucket, Proxy]):
    """Without events the copy is no run yet."""
    upload(other, address)
    place[1].conditions = Conditions(plan=lambda _n, _m, path: "400" if name_of(path) == "state.pt" else None)
    with pytest.raises(StorageError):
        joined(address)
    assert not (working_copy(address) / EVENTS).exists()
    place[1].conditions = Conditions()
    assert marks(joined(address)) == {"step-00000010": "other", "step-00000020": "other"}


def test_a_checkpoint_deleted_during_the_fetch_is_skipped(
    address: StorageUri, other: Path, place: tuple[ServedBucket, Proxy], google: Server
):
    upload(other, address)
    store = open_store(address)

    def remove(_number: int, _method: str, path: str) -> None:
        if path.endswith("step%2D00000020%2Fstate%2Ept"):
            google.objects.buckets[address.bucket].pop(address.child("checkpoints/step-00000020/state.pt").key, None)

    place[1].conditions = Conditions(plan=remove)
    assert marks(joined(address)) == {"step-00000010": "other"}
    assert store.stat(address.child(EVENTS).key) is not None


def test_the_same_command_uploads_the_rest_of_a_finished_run(address: StorageUri, other: Path):
    upload(other, address)
    mine = joined(address).local_dir
    (mine / FINAL).write_bytes(b"final")
    records = RunFolder(mine, 1)
    records.event("finished")
    records.close()
    joined(address)
    assert content(address, FINAL) == b"final"
    assert content(address, EVENTS) == (mine / EVENTS).read_bytes()


def test_resume_of_a_missing_run_is_an_error(address: StorageUri):
    with pytest.raises(UsageError, match="is not a run") as caught:
        joined(address, resume=True)
    assert str(address) in str(caught.value)
    assert there(address) == {}, "what is no run is left as it is"


def test_a_run_is_not_written_over_https():
    with contextlib.ExitStack() as stack, pytest.raises(UsageError) as caught:
        join_bucket_run(
            "https://example.org/runs/x", None, Config(), stop_request=StopRequest(), stack=stack, note=print
        )
    assert caught.value.choices == ("gs://", "s3://")


def test_resuming_the_working_copy_resumes_the_run_in_the_bucket(address: StorageUri, other: Path):
    upload(other, address)
    folder = joined(address).local_dir
    with contextlib.ExitStack() as stack:
        run = join_bucket_run(None, str(folder), Config(), stop_request=StopRequest(), stack=stack, note=print)
        assert run is not None
        assert run.uri == address
        assert not msgspec.json.decode(content(address, LEASE_FILE), type=LeaseHolder).released


def test_a_bucket_without_conditional_writes_is_reported(address: StorageUri, monkeypatch: pytest.MonkeyPatch):
    """The lease is tried, found to be no use, and leaves nothing behind."""
    from stoker_watch.storage.store import Store

    plain = Store.write
    monkeypatch.setattr(Store, "write", lambda self, key, data, **_: plain(self, key, data))
    assert bucket_run.NO_LEASE_NOTE in joined(address).messages
    assert LEASE_FILE not in there(address)


COMMAND = [
    "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "4", "--steps", "80",
    "--eval-every", "30", "--checkpoint-every", "6", "--scale-jitter-prob", "0.5", "--ema-decay", "0.9",
    "--precision", "fp32", "--workers", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = run_stoker("train", data, *COMMAND, "--run-dir", "whole", cwd=folder)
    assert code == 0, output
    return folder / "whole"


LASTS = [*COMMAND[:7], "--steps", "4000", *COMMAND[9:]]
"""Until it is stopped."""


def started(data: Path, address: StorageUri, command: list[str]) -> subprocess.Popen[str]:
    """The command, when its first checkpoint is in the bucket."""
    process = stoker("train", data, *command, "--run-dir", str(address), cwd=Path.cwd())
    while not checkpoints(address):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("store", ["s3", "google"])
@pytest.mark.parametrize("seed", range(2))
def test_sigkill(
    undisturbed: Path, data: Path, store: str, seed: int, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch, move: Callable[[str], None],
):  # fmt: skip
    """At a random moment after the first checkpoint; then on, from another folder and without the working copy."""
    server: Server = request.getfixturevalue(store)
    place = server.bucket()
    apply(monkeypatch, place.environment)
    address = parse_uri(f"{place.uri}/runs/x")
    move("first")
    rng = random.Random(seed)
    process = started(data, address, COMMAND)
    here, saved = working_copy(address), rng.randrange(6, 60)
    while max((int(path.name[5:]) for path in here.glob("checkpoints/step-*")), default=0) < saved:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.1))  # in the middle of whatever is written or uploaded then
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    move("second")
    code, output = run_stoker("train", data, *COMMAND, "--run-dir", str(address), cwd=Path.cwd())
    assert code == 0, output
    assert "continuing from step" in output
    for name in (FINAL, BEST):
        assert content(address, name) == (undisturbed / name).read_bytes(), name
    assert explain_run(str(address)).state == "finished"


@pytest.mark.slow
def test_a_second_machine_is_refused_and_a_lost_lease_ends_the_first(
    data: Path, address: StorageUri, move: Callable[[str], None], google: Server
):
    """The second is refused by name and sees a live run; who steals the lease ends the first, which writes no more."""
    move("first")
    process = started(data, address, LASTS)
    move("second")
    code, output = run_stoker("train", data, *LASTS, "--run-dir", str(address), cwd=Path.cwd())
    assert code == 2, output
    assert "Another process is training this run" in output
    assert f"process {process.pid}" in output
    assert explain_run(str(address)).state == "running"
    assert reading_copy(address).is_dir()
    key = address.child(LEASE_FILE).key
    holder = msgspec.json.decode(google.objects.get(address.bucket, key).data, type=LeaseHolder)
    open_store(address).write(key, msgspec.json.encode(msgspec.structs.replace(holder, token="mine", host="thief")))
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, output
    assert "taken over" in output
    assert "thief" in output
    assert FINAL not in there(address)
