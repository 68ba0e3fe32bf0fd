"""A run whose folder is in a bucket: `stoker train DATA --run-dir gs://bucket/runs/x`.

Training writes into a local working copy, as into any run's folder, and a background thread uploads it
(`BackgroundUploader`): no step waits for it. So the same command continues on another machine: `join_bucket_run` takes
the run's lease, brings the working copy up to date, and training continues as from any folder. Commands that only read
a run use `records.fetch_run`.

The best weights and the records of a checkpoint's steps are uploaded first, then its files, then its manifest: a
checkpoint that is complete in the bucket can be resumed. Object stores cannot append, so a file that grows is written
whole each time: at most every RECORDS_INTERVAL_S, and less often in proportion to its size.

A custom job of Vertex AI wants its results in the folders of `AIP_CHECKPOINT_DIR`, `AIP_MODEL_DIR` and
`AIP_TENSORBOARD_LOG_DIR` (cloud.google.com/vertex-ai/docs/training/code-requirements), URIs or paths. The run itself is
in the folder for checkpoints, unless --run-dir names another; the rest is copied (`copying_results`).
"""

import contextlib
import dataclasses
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stoker.config.settings import Config
from stoker.report.tensorboard import FOLDER as TENSORBOARD
from stoker.training.checkpoint import MANIFEST, STATE, WEIGHTS, is_complete, list_checkpoints
from stoker.training.extension import extended_settings
from stoker.training.run_selection import refuse_finished
from stoker.training.state import EventLogger
from stoker.training.stopper import StopRequest
from stoker_watch.errors import ConfigError, ObjectMissing, Preempted, StorageError, UsageError, make_error, writing
from stoker_watch.runs import records
from stoker_watch.runs.records import CHECKPOINTS, EVENTS, fetch_run, is_finished, locked
from stoker_watch.storage.lease import Lease, LeaseLost, acquire
from stoker_watch.storage.local_files import write_atomic
from stoker_watch.storage.store import Store, download, has_all_events, list_keys, not_a_run_error, open_store
from stoker_watch.storage.uri import (
    LEASE_FILE,
    URI_FILE,
    WRITABLE_SCHEMES,
    StorageUri,
    is_uri,
    parse_uri,
    to_run_uri,
    working_copy,
)

PREEMPTED_TIMEOUT_S = 120.0
"""Longest notice before a cloud preempts a machine (AWS); a shorter notice ends the wait."""
FINISHED_TIMEOUT_S = 900.0
"""No preemption: time for a gigabyte over a slow connection."""
LAST_RECORDS_TIMEOUT_S = 10.0
"""Seconds for the last lines of the records, after the state is uploaded."""
QUIET_UPLOAD_S = 1.0
"""A shorter upload is not reported."""
NO_LEASE_NOTE = "this bucket has no conditional writes: a second process could train the same run"
_CHECKPOINT_FILE = re.compile(rf"{CHECKPOINTS}/(step-\d{{8,}})/([^/]+)$")
POLL_INTERVAL_S = 1.0
RECORDS_INTERVAL_S = 30.0
RECORDS_BYTES = 4_000_000
"""A file of this size is written every RECORDS_INTERVAL_S, one of twice the size half as often: 0.13 MB/s each."""
MIN_STREAMED_BYTES = 16_000_000
"""Records from this size on are streamed from the disk; smaller ones are read at once, so they are consistent."""
RETRY_DELAY_S = 30.0
REPLACED_FILES = (
    records.CONFIG, records.ENVIRONMENT, records.EVALUATION, records.THUMBNAILS, records.FINDINGS, records.REPORT,
    records.HANG, records.BEST, records.FINAL,
)  # fmt: skip
"""Files that are replaced, not appended to; and the stacks of a hang."""
MODEL_FILES = (records.BEST, records.FINAL, records.CONFIG, records.EVALUATION)
"""What is copied to the folder for models of Vertex AI."""
CHECKPOINT_RECORDS = (EVENTS, records.STEPS, records.QUARANTINE)
"""Records of the steps that a checkpoint contains: uploaded with it, unless they are large and not due."""


class BackgroundUploader:
    """Keeps a bucket in sync with a run's folder, from `start` to `stop`.

    From the thread, report(kind, text) writes an event, and on_lease_lost(error) says that another process took the
    lease. uploaded_manifests: the manifest of each checkpoint folder in the bucket; empty for an incomplete one.
    """

    def __init__(
        self,
        store: Store,
        uri: StorageUri,
        run_dir: Path,
        lease: Lease | None,
        uploaded_manifests: dict[str, bytes],
        *,
        report: EventLogger,
        on_lease_lost: Callable[[LeaseLost], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._uri, self._run_dir, self._lease = store, uri, run_dir, lease
        self._uploaded_manifests = dict(uploaded_manifests)
        self.report, self._on_lease_lost, self._clock = report, on_lease_lost, clock
        self._uploaded_states: dict[str, tuple[int, ...]] = {}
        """Name → state of the file that is in the bucket."""
        self._next_upload_s: dict[str, float] = {}
        self._had_ended = False
        """Whether the run had ended when the present pass began."""
        self._retry_at_s = 0.0
        self._failure: str | None = None
        self._error: BaseException | None = None
        self._requested_passes = self._completed_passes = 0
        self._is_stopping = self._has_stopped = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stoker-uploads", daemon=True)
        """A daemon: a store that hangs must not keep the process alive after the timeout."""

    def start(self) -> None:
        self._thread.start()

    def flush(self, timeout_s: float, stop_request: StopRequest | None = None) -> str | None:
        """Waits until the bucket has all that is in the folder now, at most `timeout_s`; None, or why it has not. A
        stop that is requested bounds the rest of the wait. Raises errors of the thread other than failures of the
        store."""
        start_s = self._clock()
        end_s = start_s + timeout_s
        with self._condition:
            self._requested_passes += 1
            target_pass = self._requested_passes
            self._condition.notify_all()
            while not (is_complete := self._completed_passes >= target_pass or self._has_stopped):
                if (rest_s := end_s - self._clock()) <= 0:
                    break
                if stop_request is not None and stop_request.requested_by is not None:
                    rest_s = min(rest_s, PREEMPTED_TIMEOUT_S, stop_request.rest_s())
                    end_s = self._clock() + rest_s
                    text = f"{self._uri} has not yet {', '.join(self._lacking())}; uploading, at most {rest_s:.0f} s"
                    self.report("warning", f"{stop_request.requested_by}: {text}")  # the machine may go before that
                    stop_request = None
                self._condition.wait(min(rest_s, POLL_INTERVAL_S))
        if self._error is not None:
            raise self._error
        if not is_complete:
            waited_s = self._clock() - start_s
            return f"the upload was not done within {waited_s:.0f} s" + (f": {self._failure}" if self._failure else "")
        return self._failure

    def _lacking(self) -> list[str]:
        """Names of the files and checkpoints that the bucket does not have yet."""
        names = [name for name in (*REPLACED_FILES, *CHECKPOINT_RECORDS) if (self._run_dir / name).is_file()]
        lacking = [name for name in names if self._uploaded_states.get(name) != _state_of(self._run_dir / name)]
        checkpoints = [path.name for path in list_checkpoints(self._run_dir)]
        return lacking + [name for name in checkpoints if not self._uploaded_manifests.get(name)]

    def finish(self, timeout_s: float, stop_request: StopRequest) -> str | None:
        """`flush`, reported if it takes long."""
        if self.flush(QUIET_UPLOAD_S) is None:
            return None
        self.report("info", f"uploading to {self._uri}, at most {timeout_s:.0f} s; Ctrl-C twice ends the wait")
        return self.flush(timeout_s, stop_request)

    def stop(self) -> None:
        """Ends the thread after the current upload; the rest is not uploaded."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._condition:
                    requested = self._requested_passes
                    if self._is_stopping:
                        return
                is_requested = requested > self._completed_passes
                if is_requested or time.monotonic() >= self._retry_at_s:
                    self._try_pass(upload_all=is_requested)
                with self._condition:
                    self._completed_passes = requested
                    self._condition.notify_all()
                    self._condition.wait_for(
                        lambda: self._is_stopping or self._requested_passes > self._completed_passes, POLL_INTERVAL_S
                    )
        except LeaseLost as error:
            self._failure = str(error)
            self._on_lease_lost(error)
        except BaseException as error:  # noqa: BLE001  # carried to the training thread by `flush`
            self._error = error
        finally:
            with self._condition:
                self._has_stopped = True
                self._condition.notify_all()

    def _try_pass(self, *, upload_all: bool) -> None:
        """One pass; the first failure in a row and the recovery from it are reported once."""
        try:
            self._upload_changes(upload_all=upload_all)
        except LeaseLost:
            raise
        except (StorageError, OSError) as error:
            self._retry_at_s = time.monotonic() + RETRY_DELAY_S
            failed_before = self._failure is not None
            self._failure = f"{error.what} {error.cause or ''}" if isinstance(error, StorageError) else str(error)
            if not failed_before:
                text = f"{self._uri} cannot be written: {self._failure}; training continues, and stoker tries again"
                self.report("warning", text, storage=True)
        else:
            if self._failure is not None:
                self._failure, self._retry_at_s = None, 0.0
                self.report("info", f"{self._uri} can be written again, and is up to date")

    def _upload_changes(self, *, upload_all: bool) -> None:
        """Uploads what has changed. upload_all: also records whose interval is not over."""
        self._had_ended = is_finished(self._run_dir)
        for name in REPLACED_FILES:
            self._upload_file(name)
        for checkpoint_dir in list_checkpoints(self._run_dir):
            self._upload_checkpoint(checkpoint_dir)
        self._delete_dropped_checkpoints()
        patterns = ("*.jsonl", "tensorboard/**/*", f"{records.TRACE_FILES}/*.json.gz")
        files = [path for pattern in patterns for path in self._run_dir.glob(pattern)]
        names = {str(path.relative_to(self._run_dir)) for path in files if path.is_file()}
        # The events come last, and not if the run has ended meanwhile: an end in the bucket's events means that the
        # rest is complete.
        for name in [*sorted(names - {EVENTS}), EVENTS]:
            if upload_all or self._is_due(name):
                self._upload_file(name)

    def _is_due(self, name: str) -> bool:
        return time.monotonic() >= self._next_upload_s.get(name, 0.0)

    def _upload_file(self, name: str) -> None:
        """Uploads a file unless the bucket has this state of it."""
        path = self._run_dir / name
        try:
            state = _state_of(path)
            if self._uploaded_states.get(name) == state:
                return
            is_streamed = path.suffix == ".safetensors" or (state[1] > MIN_STREAMED_BYTES and name != EVENTS)
            data = path if is_streamed else path.read_bytes()
            if name == EVENTS and not self._had_ended and is_finished(self._run_dir):
                return  # the next pass
            self._write(name, data)
        except FileNotFoundError:
            return
        self._uploaded_states[name] = state
        self._next_upload_s[name] = time.monotonic() + RECORDS_INTERVAL_S * max(1.0, state[1] / RECORDS_BYTES)

    def _upload_checkpoint(self, checkpoint_dir: Path) -> None:
        """Uploads a checkpoint unless the bucket has it, its manifest last: never, if it is deleted here meanwhile."""
        name = f"{CHECKPOINTS}/{checkpoint_dir.name}"
        try:
            manifest = (checkpoint_dir / MANIFEST).read_bytes()
            uploaded = self._uploaded_manifests.get(checkpoint_dir.name)
            if uploaded == manifest:
                return
            if uploaded:  # other files under the same name: incomplete from now on
                self._delete(f"{name}/{MANIFEST}")
            self._uploaded_manifests[checkpoint_dir.name] = b""
            for file in (STATE, WEIGHTS):
                self._write(f"{name}/{file}", checkpoint_dir / file)
            for record in CHECKPOINT_RECORDS:
                if self._is_due(record) or (self._run_dir / record).stat().st_size <= RECORDS_BYTES:
                    self._upload_file(record)
            if self._lease is not None:
                self._lease.renew()  # another process may have taken it during the upload
            self._write(f"{name}/{MANIFEST}", manifest)
        except FileNotFoundError:
            return
        self._uploaded_manifests[checkpoint_dir.name] = manifest

    def _delete_dropped_checkpoints(self) -> None:
        local_checkpoints = [checkpoint_dir.name for checkpoint_dir in list_checkpoints(self._run_dir)]
        if not local_checkpoints or not self._uploaded_manifests.get(local_checkpoints[0]):
            return
        for name in sorted(set(self._uploaded_manifests) - set(local_checkpoints)):
            for file in (MANIFEST, STATE, WEIGHTS):
                self._delete(f"{CHECKPOINTS}/{name}/{file}")
            del self._uploaded_manifests[name]

    def _write(self, name: str, data: bytes | Path) -> None:
        if self._lease is not None:
            self._lease.ensure_held()
        try:
            self._store.write(self._uri.child(name).key, data)
        except ObjectMissing:
            if isinstance(data, Path) and not data.exists():  # the local file is missing, not the object
                raise FileNotFoundError(data) from None
            raise

    def _delete(self, name: str) -> None:
        if self._lease is not None:
            self._lease.ensure_held()
        self._store.delete(self._uri.child(name).key)


def _state_of(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclasses.dataclass
class BucketRun:
    """A run in a bucket that this process trains, made by `join_bucket_run`."""

    uri: StorageUri
    local_dir: Path
    messages: list[str]
    """Messages for the run's events."""
    _store: Store
    _lease: Lease | None
    _manifests: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """Manifests of the bucket's checkpoints by name; one of an incomplete checkpoint is empty."""
    _uploader: BackgroundUploader | None = None
    _stop_request: StopRequest = dataclasses.field(default_factory=StopRequest)

    @contextlib.contextmanager
    def uploading(self, stop_request: StopRequest, log_event: EventLogger) -> Iterator[None]:
        """Uploads while the block trains; after a signal until the state is there. If another process takes the run,
        `stop_request` ends the training."""
        self._stop_request = stop_request
        uploader = self._make_uploader(log_event, stop_request.fail)
        uploader.start()
        self._uploader = uploader  # now: nothing waits for a thread that could not be started
        try:
            yield
        except Preempted as error:
            failure = uploader.finish(PREEMPTED_TIMEOUT_S, stop_request)
            if failure is None:
                fix = f"the same command, here or on another machine, or `stoker train --resume {self.uri}`, continues"
                raise type(error)(error.what, location=self.uri, fix=fix) from error
            what = error.what.partition(";")[0]
            raise make_error(StorageError, "state-not-in-bucket", self.uri, cause=failure, what=what) from error

    def finish(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Exit callback for an ExitStack: waits until the bucket is up to date. Raises StorageError if the run is
        finished and its results did not reach it."""
        uploader = self._uploader
        if uploader is None:
            return
        if error is None or (isinstance(error, Exception) and not isinstance(error, LeaseLost)):
            timeout_s = FINISHED_TIMEOUT_S if error is None else PREEMPTED_TIMEOUT_S
            is_saved = isinstance(error, Preempted | StorageError)
            failure = uploader.finish(LAST_RECORDS_TIMEOUT_S if is_saved else timeout_s, self._stop_request)
            if failure is not None and error is None:
                raise self._make_error(failure)
            if failure is not None:
                uploader.report("warning", f"the last records did not reach {self.uri}: {failure}", storage=True)
        uploader.stop()

    def synchronize(self, refuse: Callable[[Path], object]) -> None:
        """Makes the working copy at least as new as the bucket. refuse: raises an error if the run was finished
        elsewhere, and is not to be extended."""
        store, local_dir = self._store, self.local_dir
        remote_files = list_keys(store, self.uri)
        checkpoints: dict[str, dict[str, str]] = {}
        for name, key in remote_files.items():
            if match := _CHECKPOINT_FILE.match(name):
                checkpoints.setdefault(match[1], {})[match[2]] = key
        manifests = {name: _read_object(store, files.get(MANIFEST)) for name, files in checkpoints.items()}
        self._manifests = manifests
        remote_events = _read_object(store, remote_files.get(EVENTS))
        if not remote_events:
            return
        if has_all_events(local_dir, remote_events):
            newest = next((path.name for path in list_checkpoints(local_dir) if is_complete(path)), "")
            to_fetch = [name for name in manifests if int(name[5:]) > int(newest[5:] or -1)]
        else:
            refuse(fetch_run(self.uri))
            if (local_dir / EVENTS).exists():
                self.messages.append("another machine has continued this run: the working copy is replaced")
            _clear_working_copy(local_dir)
            for name, key in remote_files.items():
                if not name.startswith(f"{CHECKPOINTS}/") and name not in (EVENTS, LEASE_FILE, records.REPORT):
                    with contextlib.suppress(ObjectMissing):  # removed since it was listed
                        download(store, key, local_dir / name)
            to_fetch = list(manifests)
        for name in sorted(to_fetch, reverse=True):
            if not manifests[name]:  # an incomplete checkpoint, or one that is being deleted
                continue
            if _fetch_checkpoint(store, checkpoints[name], local_dir / CHECKPOINTS / name):
                self.messages.append(f"fetched {name} from the bucket")
        if not (local_dir / EVENTS).exists():  # last: a folder without events is not a run
            write_atomic(local_dir / EVENTS, remote_events, private=True)

    def upload_remaining(self, note: Callable[[str], None]) -> None:
        """Uploads what a finished run could not upload at its end. Raises StorageError."""
        if _read_object(self._store, self.uri.child(EVENTS).key) == (self.local_dir / EVENTS).read_bytes():
            return
        note(f"uploading the rest of the finished run to {self.uri}, at most {FINISHED_TIMEOUT_S:.0f} s")
        uploader = self._make_uploader(lambda *_, **__: None, lambda _: None)  # `flush` returns the same failure
        uploader.start()
        failure = uploader.flush(FINISHED_TIMEOUT_S)
        uploader.stop()
        if failure is not None:
            raise self._make_error(failure)

    def _make_uploader(self, report: EventLogger, on_lease_lost: Callable[[LeaseLost], None]) -> BackgroundUploader:
        place = self._store, self.uri, self.local_dir, self._lease
        return BackgroundUploader(*place, self._manifests, report=report, on_lease_lost=on_lease_lost)

    def _make_error(self, failure: str) -> StorageError:
        return make_error(StorageError, "upload-incomplete", self.uri, cause=failure, local_dir=self.local_dir)


def join_bucket_run(
    name: str | None,
    resume: str | None,
    user_config: Config,
    *,
    stop_request: StopRequest,
    stack: contextlib.ExitStack,
    note: Callable[[str], None],
) -> BucketRun | None:
    """The run in a bucket that --run-dir (`name`) or --resume names, with its working copy up to date; None for others.

    user_config: what the user set, with absolute paths. The lease is held in `stack`. Raises UsageError if another
    process trains it or there is nothing to resume; RunFinished; ConfigError; StorageError.
    """
    location = resume if resume is not None else name
    uri = None if location is None else to_run_uri(location)
    if uri is None:
        return None
    if uri.scheme not in WRITABLE_SCHEMES:
        raise ConfigError("A run cannot be written there.", location=uri, choices=[f"{s}://" for s in WRITABLE_SCHEMES])
    store, local_dir = open_store(uri), working_copy(uri)
    if resume is not None and not (local_dir / EVENTS).exists() and store.stat(uri.child(EVENTS).key) is None:
        raise not_a_run_error(uri)
    lease = acquire(uri.child(LEASE_FILE), on_message=note, check_interrupted=stop_request.check)
    if lease is not None:
        stack.callback(lease.release)
        lease.start_renewing(stop_request.fail)  # now: downloads, the index and a trial of batches take longer than it
    run = BucketRun(uri, local_dir, [f"{uri} is uploaded from the working copy {local_dir}"], store, lease)
    with writing("The run's working copy cannot be written.", local_dir, fix="make room, or set STOKER_CACHE_DIR"):
        local_dir.mkdir(parents=True, exist_ok=True)
        with locked(local_dir) as acquired:
            if acquired is False:
                raise UsageError("Another process is training this run.", location=uri)
            write_atomic(local_dir / URI_FILE, str(uri).encode())
            refuse = refuse_finished if resume is None else extended_settings
            run.synchronize(lambda fetched: refuse(fetched, user_config, uri))
            if is_finished(local_dir):
                run.upload_remaining(note)
    if lease is None:
        run.messages.append(NO_LEASE_NOTE)
    return run


def _read_object(store: Store, key: str | None) -> bytes:
    try:
        return b"" if key is None else store.read(key)
    except ObjectMissing:
        return b""


def _fetch_checkpoint(store: Store, files: dict[str, str], target: Path) -> bool:
    """Downloads a checkpoint; False if it was deleted meanwhile. Its checksums are verified when it is loaded."""
    temp_dir = target.with_name(f".{target.name}.fetched")
    shutil.rmtree(temp_dir, ignore_errors=True)
    try:
        for name, key in files.items():
            download(store, key, temp_dir / name)
    except ObjectMissing:
        shutil.rmtree(temp_dir)
        return False
    shutil.rmtree(target, ignore_errors=True)
    temp_dir.rename(target)
    return True


def _clear_working_copy(local_dir: Path) -> None:
    """Empties a working copy, its events first: if interrupted, a folder without events is not a run."""
    (local_dir / EVENTS).unlink(missing_ok=True)
    for path in local_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (".lock", URI_FILE):
            path.unlink()


@dataclasses.dataclass(frozen=True)
class VertexFolders:
    """Vertex AI's folders for results, without a slash at the end; None: not set."""

    checkpoints: str | None = None
    model: str | None = None
    tensorboard: str | None = None


def vertex_folders(env: Mapping[str, str] = os.environ) -> VertexFolders:
    names = ("AIP_CHECKPOINT_DIR", "AIP_MODEL_DIR", "AIP_TENSORBOARD_LOG_DIR")
    return VertexFolders(*(env.get(name, "").rstrip("/") or None for name in names))


@contextlib.contextmanager
def copying_results(run: Path, folders: VertexFolders, report: EventLogger) -> Iterator[None]:
    """Copies what the block writes into the run's folder: TensorBoard's files about every RECORDS_INTERVAL_S and at the
    end, the trained model when it is finished. Warns once of a folder that cannot be written."""
    if folders.tensorboard is None and folders.model is None:
        yield
        return
    copied: dict[Path, tuple[int, int]] = {}
    stopped, failed = threading.Event(), threading.Event()

    def copy_changed_files() -> None:
        copies: list[tuple[Path, str, Path]] = []
        if folders.tensorboard is not None:
            files = sorted((run / TENSORBOARD).rglob("*"))
            copies += [(file, folders.tensorboard, file.relative_to(run / TENSORBOARD)) for file in files]
        if folders.model is not None and is_finished(run):
            copies += [(run / name, folders.model, Path(name)) for name in MODEL_FILES]
        try:
            for file, folder, name in copies:
                if not file.is_file():
                    continue
                status = file.stat()
                if copied.get(file) != (state := (status.st_size, status.st_mtime_ns)):
                    _copy_file(file, folder, name)
                    copied[file] = state
        except (StorageError, OSError) as error:
            if not failed.is_set():
                failed.set()
                report("warning", f"results are not copied to Vertex AI's folders: {error}", storage=True)

    def copy_until_stopped() -> None:
        while not stopped.wait(RECORDS_INTERVAL_S):
            copy_changed_files()

    thread = threading.Thread(target=copy_until_stopped, name="stoker-vertex", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        copy_changed_files()


def _copy_file(file: Path, folder: str, name: Path) -> None:
    """folder: a URI or a path."""
    if is_uri(folder):
        uri = parse_uri(folder)
        open_store(uri).write(uri.child(name.as_posix()).key, file)
        return
    target = Path(folder) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
