"""Uploads a run's folder to a bucket on a background thread: no step waits for it.

The thread looks at the folder about once a second and uploads what has changed. The best weights and the records of a
checkpoint's steps are uploaded first, then its files, then its manifest: a checkpoint that is complete in the bucket
can be resumed. Object stores cannot append, so a file that grows is written whole each time: at most every
RECORDS_INTERVAL_S, and less often in proportion to its size.

A custom job of Vertex AI wants its results in the folders of `AIP_CHECKPOINT_DIR`, `AIP_MODEL_DIR` and
`AIP_TENSORBOARD_LOG_DIR` (cloud.google.com/vertex-ai/docs/training/code-requirements), which are URIs or paths. The run
itself is in the folder for checkpoints, unless --run-dir names another: a restarted job continues it. The files of
TensorBoard are copied while it trains, the trained model when it is finished (`copying_results`).
"""

import contextlib
import dataclasses
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stoker.errors import ObjectMissing, StorageError
from stoker.report.tensorboard import FOLDER as TENSORBOARD
from stoker.runs.records import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    EVALUATION,
    EVENTS,
    FINAL,
    FINDINGS,
    HANG,
    QUARANTINE,
    REPORT,
    STEPS,
    TRACE_FILES,
    is_finished,
)
from stoker.storage.lease import Lease, LeaseLost
from stoker.storage.store import Store, open_store
from stoker.storage.uri import StorageUri, is_uri, parse_uri
from stoker.training.checkpoint import MANIFEST, STATE, WEIGHTS, list_checkpoints

POLL_INTERVAL_S = 1.0
RECORDS_INTERVAL_S = 30.0
RECORDS_BYTES = 4_000_000
"""A file of this size is written every RECORDS_INTERVAL_S, one of twice the size half as often: 0.13 MB/s each."""
MIN_STREAMED_BYTES = 16_000_000
"""Records from this size on are streamed from the disk; smaller ones are read at once, so they are consistent."""
RETRY_DELAY_S = 30.0
"""Delay after a failure; a new checkpoint is tried at once."""
REPLACED_FILES = (CONFIG, ENVIRONMENT, EVALUATION, FINDINGS, REPORT, HANG, BEST, FINAL)
"""Files that are replaced, not appended to; and the stacks of a hang."""
CHECKPOINT_RECORDS = (EVENTS, STEPS, QUARANTINE)
"""Records of the steps that a checkpoint contains: uploaded with it, unless they are large and not due."""
MODEL_FILES = (BEST, FINAL, CONFIG, EVALUATION)
"""What is copied to the folder for models of Vertex AI."""


class BackgroundUploader:
    """Keeps a bucket in sync with a run's folder, from `start` to `stop`.

    report(kind, text) writes an event, on_lease_lost(error) is called if another process took the lease; both are
    called from the thread.
    """

    def __init__(
        self,
        store: Store,
        uri: StorageUri,
        run_dir: Path,
        lease: Lease | None,
        uploaded_manifests: dict[str, bytes],
        *,
        report: Callable[[str, str], None],
        on_lease_lost: Callable[[LeaseLost], None],
    ) -> None:
        """uploaded_manifests: the manifest of each checkpoint folder in the bucket; empty for an incomplete one."""
        self._store, self._uri, self._run_dir, self._lease = store, uri, run_dir, lease
        self._uploaded_manifests = dict(uploaded_manifests)
        self._report, self._on_lease_lost = report, on_lease_lost
        self._uploaded_states: dict[str, tuple[int, ...]] = {}
        """Name → state of the file that is in the bucket."""
        self._next_upload_s: dict[str, float] = {}
        self._newest_at_last_pass: list[Path] = []
        """The newest checkpoint when the last pass began."""
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

    def flush(self, timeout_s: float) -> str | None:
        """Waits until the bucket has everything that is in the folder now, at most `timeout_s`; None, or why it has
        not.

        Raises errors of the thread other than failures of the store."""
        with self._condition:
            self._requested_passes += 1
            target_pass = self._requested_passes
            self._condition.notify_all()
            is_complete = self._condition.wait_for(
                lambda: self._completed_passes >= target_pass or self._has_stopped, timeout_s
            )
        if self._error is not None:
            raise self._error
        if not is_complete:
            return f"the upload was not done within {timeout_s:.0f} s" + (f": {self._failure}" if self._failure else "")
        return self._failure

    def stop(self) -> None:
        """Ends the thread after the current upload; the rest is not uploaded."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()

    def newest_checkpoint(self) -> str | None:
        """Folder name of the newest complete checkpoint in the bucket."""
        return max(
            (name for name, manifest in self._uploaded_manifests.items() if manifest), key=_parse_step, default=None
        )

    def _run(self) -> None:
        try:
            while True:
                with self._condition:
                    requested = self._requested_passes
                    if self._is_stopping:
                        return
                if (
                    requested > self._completed_passes
                    or time.monotonic() >= self._retry_at_s
                    or self._has_new_checkpoint()
                ):
                    self._try_pass(upload_all=requested > self._completed_passes)
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

    def _has_new_checkpoint(self) -> bool:
        """Whether there is a checkpoint that was not there when the last pass began."""
        return list_checkpoints(self._run_dir)[:1] != self._newest_at_last_pass

    def _try_pass(self, *, upload_all: bool) -> None:
        """One pass; the first failure in a row and the recovery from it are reported once."""
        self._newest_at_last_pass = list_checkpoints(self._run_dir)[:1]
        try:
            self._upload_changes(upload_all=upload_all)
        except LeaseLost:
            raise
        except (StorageError, OSError) as error:
            self._retry_at_s = time.monotonic() + RETRY_DELAY_S
            failed_before, self._failure = self._failure is not None, _format_error(error)
            if not failed_before:
                text = f"{self._uri} cannot be written: {self._failure}; training continues, and stoker tries again"
                self._report("warning", text)
        else:
            if self._failure is not None:
                self._failure, self._retry_at_s = None, 0.0
                self._report("info", f"{self._uri} can be written again, and is up to date")

    def _upload_changes(self, *, upload_all: bool) -> None:
        """Uploads what has changed. upload_all: also records whose interval is not over."""
        local_checkpoints = list_checkpoints(self._run_dir)
        for name in REPLACED_FILES:
            self._upload_file(name)
        for checkpoint_dir in local_checkpoints:
            if self._upload_checkpoint(checkpoint_dir):
                self._delete_dropped_checkpoints()
                if list_checkpoints(self._run_dir)[:1] != local_checkpoints[:1]:
                    self._retry_at_s = 0.0
                    break  # a newer one goes first
        self._delete_dropped_checkpoints()
        patterns = ("*.jsonl", "tensorboard/**/*", f"{TRACE_FILES}/*.json.gz")
        files = [path for pattern in patterns for path in self._run_dir.glob(pattern)]
        names = {str(path.relative_to(self._run_dir)) for path in files if path.is_file()}
        for name in [
            *sorted(names - {EVENTS}),
            EVENTS,
        ]:  # last: an end in the bucket's events means that the rest is complete
            if upload_all or self._is_due(name):
                self._upload_file(name)

    def _is_due(self, name: str) -> bool:
        return time.monotonic() >= self._next_upload_s.get(name, 0.0)

    def _upload_file(self, name: str) -> None:
        """Uploads a file unless the bucket has this state of it."""
        path = self._run_dir / name
        try:
            stat = path.stat()
            state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if self._uploaded_states.get(name) == state:
                return
            is_streamed = path.suffix == ".safetensors" or (stat.st_size > MIN_STREAMED_BYTES and name != EVENTS)
            self._write(name, path if is_streamed else path.read_bytes())
        except FileNotFoundError:
            return
        self._uploaded_states[name] = state
        self._next_upload_s[name] = time.monotonic() + RECORDS_INTERVAL_S * max(1.0, stat.st_size / RECORDS_BYTES)

    def _upload_checkpoint(self, checkpoint_dir: Path) -> bool:
        """Uploads a checkpoint unless the bucket has it, its manifest last; returns whether there was something to
        upload.

        One that is deleted here meanwhile stays without a manifest in the bucket."""
        name = f"{CHECKPOINTS}/{checkpoint_dir.name}"
        try:
            manifest = (checkpoint_dir / MANIFEST).read_bytes()
            if self._uploaded_manifests.get(checkpoint_dir.name) == manifest:
                return False
            if self._uploaded_manifests.get(
                checkpoint_dir.name
            ):  # other files under the same name: incomplete from now on
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
            return True
        self._uploaded_manifests[checkpoint_dir.name] = manifest
        return True

    def _delete_dropped_checkpoints(self) -> None:
        """Deletes the checkpoints that are no longer in the folder, once the bucket has the newest."""
        local_checkpoints = [checkpoint_dir.name for checkpoint_dir in list_checkpoints(self._run_dir)]
        if not local_checkpoints or not self._uploaded_manifests.get(local_checkpoints[0]):
            return
        for name in sorted(set(self._uploaded_manifests) - set(local_checkpoints), key=_parse_step):
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


def _parse_step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _format_error(error: StorageError | OSError) -> str:
    """An error on one line."""
    return f"{error.what} {error.cause or ''}".strip() if isinstance(error, StorageError) else str(error)


@dataclasses.dataclass(frozen=True)
class VertexFolders:
    """The folders that are set, without a slash at the end."""

    checkpoints: str | None = None
    model: str | None = None
    tensorboard: str | None = None


def vertex_folders(env: Mapping[str, str] = os.environ) -> VertexFolders:
    names = ("AIP_CHECKPOINT_DIR", "AIP_MODEL_DIR", "AIP_TENSORBOARD_LOG_DIR")
    return VertexFolders(*(env.get(name, "").rstrip("/") or None for name in names))


@contextlib.contextmanager
def copying_results(run: Path, folders: VertexFolders, report: Callable[[str, str], None]) -> Iterator[None]:
    """Copies what the block writes into the run's folder, about every RECORDS_INTERVAL_S and at the end.

    A folder that cannot be written is reported as a warning, once: training goes on, and the run has everything.
    """
    if folders.tensorboard is None and folders.model is None:
        yield
        return
    copier = _Copier(run, folders, report)
    thread = threading.Thread(target=copier.run_until_stopped, name="stoker-vertex", daemon=True)
    thread.start()
    try:
        yield
    finally:
        copier.stopped.set()
        thread.join()
        copier.copy(with_model=is_finished(run))


class _Copier:
    def __init__(self, run: Path, folders: VertexFolders, report: Callable[[str, str], None]) -> None:
        self._run, self._folders, self._report = run, folders, report
        self._copied: dict[Path, tuple[int, int]] = {}
        self._failed = False
        self.stopped = threading.Event()

    def run_until_stopped(self) -> None:
        while not self.stopped.wait(RECORDS_INTERVAL_S):
            self.copy(with_model=False)

    def copy(self, *, with_model: bool) -> None:
        """Copies the files that changed."""
        try:
            if self._folders.tensorboard is not None:
                for path in sorted((self._run / TENSORBOARD).rglob("*")):
                    self._copy_file(path, self._folders.tensorboard, path.relative_to(self._run / TENSORBOARD))
            if self._folders.model is not None and with_model:
                for name in MODEL_FILES:
                    self._copy_file(self._run / name, self._folders.model, Path(name))
        except (StorageError, OSError) as error:
            if not self._failed:
                self._failed = True
                self._report("warning", f"results are not copied to Vertex AI's folders: {error}")

    def _copy_file(self, path: Path, folder: str, name: Path) -> None:
        if not path.is_file():
            return
        status = path.stat()
        state = (status.st_size, status.st_mtime_ns)
        if self._copied.get(path) == state:
            return
        if is_uri(folder):
            uri = parse_uri(folder)
            open_store(uri).write(uri.child(name.as_posix()).key, path)
        else:
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        self._copied[path] = state
