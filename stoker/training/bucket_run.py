"""A run whose folder is in a bucket: `stoker train DATA --run-dir gs://bucket/runs/x`.

Training writes into a local working copy, as into any run's folder, and `uploads.py` uploads it in the background. So
the same command continues on another machine: `join_bucket_run` takes the run's lease, brings the working copy up to
date, and training continues as from any folder. Commands that only read a run use `records.fetch_run`.
"""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from stoker.config.settings import Config
from stoker.errors import (
    ConfigError,
    ObjectMissing,
    Preempted,
    StorageError,
    UsageError,
    writing,
)
from stoker.runs.records import (
    CHECKPOINTS,
    EVENTS,
    REPORT,
    fetch_run,
    is_finished,
    locked,
)
from stoker.storage.lease import Lease, LeaseLost, acquire
from stoker.storage.local_files import write_atomic
from stoker.storage.store import Store, download, has_all_events, list_keys, not_a_run_error, open_store
from stoker.storage.uri import LEASE_FILE, URI_FILE, WRITABLE_SCHEMES, StorageUri, to_run_uri, working_copy
from stoker.training.checkpoint import MANIFEST, is_complete, list_checkpoints
from stoker.training.run_selection import refuse_finished
from stoker.training.state import EventLogger
from stoker.training.stopper import StopRequest
from stoker.training.uploads import BackgroundUploader

PREEMPTED_TIMEOUT_S = 120.0
"""Longest notice before a cloud preempts a machine (AWS); a shorter notice ends the wait."""
FINISHED_TIMEOUT_S = 900.0
"""No preemption: time for a gigabyte over a slow connection."""
LAST_RECORDS_TIMEOUT_S = 10.0
"""For the last lines of the records, after the state is uploaded."""
QUIET_UPLOAD_S = 1.0
"""A shorter upload is not reported."""
NO_LEASE_NOTE = "this bucket has no conditional writes: a second process could train the same run"
_CHECKPOINT_FILE = re.compile(rf"{CHECKPOINTS}/(step-\d{{8,}})/([^/]+)$")


@dataclasses.dataclass
class BucketRun:
    """A run in a bucket that this process trains, made by `join_bucket_run`."""

    uri: StorageUri
    local_dir: Path
    """The working copy."""
    messages: list[str]
    """Messages for the run's events."""
    _store: Store
    _lease: Lease | None
    _manifests: dict[str, bytes]
    _log_event: EventLogger | None = None
    _uploader: BackgroundUploader | None = None

    def start(self, stop_request: StopRequest, log_event: EventLogger) -> None:
        """Starts uploading. If another process takes the run, `stop_request` ends the training."""
        self._log_event = log_event
        self._uploader = BackgroundUploader(
            self._store,
            self.uri,
            self.local_dir,
            self._lease,
            self._manifests,
            report=log_event,
            on_lease_lost=stop_request.fail,
        )
        if self._lease is not None:
            self._lease.start_renewing(stop_request.fail)
        self._uploader.start()

    def make_preempted_error(self, error: Preempted) -> StorageError | Preempted:
        """The error of a run that a signal stopped, after waiting for its state to reach the bucket."""
        failure = self._flush(PREEMPTED_TIMEOUT_S)
        if failure is None:
            fix = f"the same command, here or on another machine, or `stoker train --resume {self.uri}`, continues"
            return Preempted(error.what, location=self.uri, fix=fix)
        newest = self._uploader.newest_checkpoint() if self._uploader is not None else None
        in_bucket = "no checkpoint" if newest is None else newest
        what = error.what.partition(";")[0]
        return StorageError(
            f"{what}; the state is saved on this machine but did not reach the bucket.",
            location=self.uri,
            cause=failure,
            fix=f"the same command on this machine continues; the bucket has {in_bucket}",
        )

    def finish(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Exit callback for an ExitStack: waits until the bucket is up to date.

        Raises StorageError if the run is finished and its results did not reach the bucket.
        """
        if self._uploader is None or self._log_event is None:
            return
        if error is None or (isinstance(error, Exception) and not isinstance(error, LeaseLost)):
            timeout_s = FINISHED_TIMEOUT_S if error is None else PREEMPTED_TIMEOUT_S
            failure = self._flush(LAST_RECORDS_TIMEOUT_S if isinstance(error, Preempted | StorageError) else timeout_s)
            if failure is not None and error is None:
                raise _make_incomplete_upload_error(self.uri, self.local_dir, failure)
            if failure is not None:
                self._log_event("warning", f"the last records did not reach {self.uri}: {failure}")
        self._uploader.stop()

    def _flush(self, timeout_s: float) -> str | None:
        if self._uploader is None or self._log_event is None:
            return None
        failure = self._uploader.flush(QUIET_UPLOAD_S)
        if failure is None:
            return None
        self._log_event("info", f"uploading to {self.uri}, at most {timeout_s:.0f} s; Ctrl-C twice ends the wait")
        return self._uploader.flush(timeout_s)


@contextlib.contextmanager
def uploading(run: BucketRun | None, stop_request: StopRequest, log_event: EventLogger) -> Iterator[None]:
    """Uploads while the block trains; after a signal waits for the state to be uploaded. None: no bucket."""
    if run is not None:
        run.start(stop_request, log_event)
    try:
        yield
    except Preempted as error:
        if run is None:
            raise
        raise run.make_preempted_error(error) from error


def join_bucket_run(
    name: str | None,
    resume: str | None,
    user_config: Config,
    *,
    stop_request: StopRequest,
    stack: contextlib.ExitStack,
    note: Callable[[str], None],
) -> BucketRun | None:
    """The run in a bucket that --run-dir (`name`) or --resume names, with its working copy up to date; None: a local
    run.

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
        raise not_a_run_error(uri, EVENTS)
    lease = acquire(uri.child(LEASE_FILE), on_message=note, check_interrupted=stop_request.check)
    if lease is not None:
        stack.callback(lease.release)
    with writing("The run's working copy cannot be written.", local_dir, fix="make room, or set STOKER_CACHE_DIR"):
        local_dir.mkdir(parents=True, exist_ok=True)
        with locked(local_dir) as acquired:
            if acquired is False:
                raise UsageError("Another process is training this run.", location=uri)
            write_atomic(local_dir / URI_FILE, str(uri).encode())
            manifests, messages = _synchronize(store, uri, local_dir, None if resume is not None else user_config)
            if is_finished(local_dir):
                _upload_remaining(store, uri, local_dir, lease, manifests, note)
    messages = [
        f"{uri} is uploaded from the working copy {local_dir}",
        *messages,
        *([] if lease is not None else [NO_LEASE_NOTE]),
    ]
    return BucketRun(uri, local_dir, messages, store, lease, manifests)


def _synchronize(
    store: Store, uri: StorageUri, local_dir: Path, user_config: Config | None
) -> tuple[dict[str, bytes], list[str]]:
    """Makes the working copy at least as new as the bucket. Returns the manifests of the bucket's checkpoints (empty
    for an incomplete one) and messages. Raises as `refuse_finished` if the run was finished elsewhere."""
    remote_files = list_keys(store, uri)
    checkpoints: dict[str, dict[str, str]] = {}
    for name, key in remote_files.items():
        if match := _CHECKPOINT_FILE.match(name):
            checkpoints.setdefault(match[1], {})[match[2]] = key
    manifests = {name: _read_object(store, files.get(MANIFEST)) for name, files in checkpoints.items()}
    remote_events = _read_object(store, remote_files.get(EVENTS))
    if not remote_events:
        return manifests, []
    messages = []
    if has_all_events(local_dir, EVENTS, remote_events):
        newest = next((path.name for path in list_checkpoints(local_dir) if is_complete(path)), "")
        to_fetch = [name for name in manifests if int(name[5:]) > int(newest[5:] or -1)]
    else:
        refuse_finished(fetch_run(uri), user_config, uri)
        if (local_dir / EVENTS).exists():
            messages.append("another machine has continued this run: the working copy is replaced")
        _clear_working_copy(local_dir)
        other_files = {
            name: key
            for name, key in remote_files.items()
            if not name.startswith(f"{CHECKPOINTS}/") and name not in (EVENTS, LEASE_FILE, REPORT)
        }
        for name, key in other_files.items():
            with contextlib.suppress(ObjectMissing):  # removed since it was listed
                download(store, key, local_dir / name)
        to_fetch = list(manifests)
    for name in sorted(to_fetch, reverse=True):
        if not manifests[name]:  # an incomplete checkpoint, or one that is being deleted
            continue
        if _fetch_checkpoint(store, checkpoints[name], local_dir / CHECKPOINTS / name):
            messages.append(f"fetched {name} from the bucket")
    if not (local_dir / EVENTS).exists():  # last: a folder without events is not a run
        write_atomic(local_dir / EVENTS, remote_events, private=True)
    return manifests, messages


def _upload_remaining(
    store: Store,
    uri: StorageUri,
    local_dir: Path,
    lease: Lease | None,
    manifests: dict[str, bytes],
    note: Callable[[str], None],
) -> None:
    """Uploads what a finished run could not upload at its end. Raises StorageError."""
    if _read_object(store, uri.child(EVENTS).key) == (local_dir / EVENTS).read_bytes():
        return
    note(f"uploading the rest of the finished run to {uri}, at most {FINISHED_TIMEOUT_S:.0f} s")
    uploader = BackgroundUploader(store, uri, local_dir, lease, manifests, report=_ignore, on_lease_lost=_ignore)
    uploader.start()
    failure = uploader.flush(FINISHED_TIMEOUT_S)
    uploader.stop()
    if failure is not None:
        raise _make_incomplete_upload_error(uri, local_dir, failure)


def _ignore(*_: object) -> None:
    """Not needed here: `flush` returns the same failure."""


def _make_incomplete_upload_error(uri: StorageUri, local_dir: Path, failure: str) -> StorageError:
    return StorageError(
        "The run is finished, but not all of it reached the bucket.",
        location=uri,
        cause=failure,
        fix=f"it is complete in {local_dir}; the same command on this machine uploads the rest",
    )


def _read_object(store: Store, key: str | None) -> bytes:
    """The bytes of an object; empty if there is none."""
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
        if path.name in (".lock", URI_FILE):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
