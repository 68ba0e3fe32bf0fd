"""What training writes goes on into a bucket, on a thread of its own: no step waits for it.

The thread looks at the run's folder about once a second and writes what has changed. A checkpoint's files come before
its manifest, and before that the best weights and the records that its state speaks of: whatever is whole in the bucket
can be continued from. Object stores cannot append, so a file that grows is written anew each time: at most every
RECORDS_S, and less often in proportion where it is large.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from stoker.errors import ObjectMissing, StorageError
from stoker.runs.records import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    EVALUATION,
    EVENTS,
    FINAL,
    FINDINGS,
    QUARANTINE,
    REPORT,
    STEPS,
    TRACE_FILES,
)
from stoker.storage.lease import Lease, LeaseLost
from stoker.storage.store import Store
from stoker.storage.uri import Address
from stoker.training.checkpoint import MANIFEST, STATE, WEIGHTS, folders_of

LOOK_S = 1.0
RECORDS_S = 30.0
RECORDS_BYTES = 4_000_000
"""A file of this size is written every RECORDS_S, one of twice the size half as often: 0.13 MB/s for each at most."""
STREAMED_BYTES = 16_000_000
"""From which size on records go from the disk; smaller ones are read first, and are what they were at one moment."""
AGAIN_S = 30.0
"""After a failure; a new checkpoint does not wait for it."""
WHOLE = (CONFIG, ENVIRONMENT, EVALUATION, FINDINGS, REPORT, BEST, FINAL)
"""Files that are replaced as a whole."""
WITH_CHECKPOINT = (EVENTS, STEPS, QUARANTINE)
"""Records of the steps that a checkpoint contains: written with it, unless they are large and not due."""


class Uploads:
    """Keeps a bucket like a run's folder, from `start` to `stop`.

    report(kind, text) writes an event, on_lost(error) hears that the lease is gone; both are called from the thread.
    """

    def __init__(
        self,
        store: Store,
        address: Address,
        folder: Path,
        lease: Lease | None,
        there: dict[str, bytes],
        *,
        report: Callable[[str, str], None],
        on_lost: Callable[[LeaseLost], None],
    ) -> None:
        """there: the manifest of each checkpoint folder that the bucket has; empty where it has only a part."""
        self._store, self._address, self._folder, self._lease = store, address, folder, lease
        self._there = dict(there)
        self._report, self._on_lost = report, on_lost
        self._sent: dict[str, tuple[int, ...]] = {}
        """Name → which state of the file is in the bucket."""
        self._due_s: dict[str, float] = {}
        self._tried: list[Path] = []
        """The newest checkpoint when the last pass began."""
        self._again_s = 0.0
        self._failure: str | None = None
        self._error: BaseException | None = None
        self._asked = self._done = 0
        self._ending = self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stoker-uploads", daemon=True)
        """A daemon: a store that hangs must not keep a process that has waited as long as it said."""

    def start(self) -> None:
        self._thread.start()

    def deliver(self, limit_s: float) -> str | None:
        """Waits until everything that is in the folder now is in the bucket, limit_s at most; None, or why it is not.
        Raises what went wrong in the thread and is no failure of the store."""
        with self._changed:
            self._asked += 1
            wanted = self._asked
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: self._done >= wanted or self._ended, limit_s)
        if self._error is not None:
            raise self._error
        if not done:
            return f"the upload was not done within {limit_s:.0f} s" + (f": {self._failure}" if self._failure else "")
        return self._failure

    def stop(self) -> None:
        """Ends the thread when it has nothing under way; what is left is not uploaded."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def newest(self) -> str | None:
        """The newest whole checkpoint that the bucket has, by the name of its folder."""
        return max((name for name, manifest in self._there.items() if manifest), key=_step, default=None)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    asked = self._asked
                    if self._ending:
                        return
                if asked > self._done or time.monotonic() >= self._again_s or self._has_news():
                    self._try(everything=asked > self._done)
                with self._changed:
                    self._done = asked
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._ending or self._asked > self._done, LOOK_S)
        except LeaseLost as error:
            self._failure = str(error)
            self._on_lost(error)
        except BaseException as error:  # noqa: BLE001  # carried to the training thread by `deliver`
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _has_news(self) -> bool:
        """Whether there is a checkpoint that was not there when the last pass began."""
        return folders_of(self._folder)[:1] != self._tried

    def _try(self, *, everything: bool) -> None:
        """A pass, whose failure is said once, and its end once."""
        self._tried = folders_of(self._folder)[:1]
        try:
            self._pass(everything=everything)
        except LeaseLost:
            raise
        except (StorageError, OSError) as error:
            self._again_s = time.monotonic() + AGAIN_S
            failed_before, self._failure = self._failure is not None, _brief(error)
            if not failed_before:
                text = f"{self._address} cannot be written: {self._failure}; training goes on, and it is tried again"
                self._report("warning", text)
        else:
            if self._failure is not None:
                self._failure, self._again_s = None, 0.0
                self._report("note", f"{self._address} can be written again, and has everything")

    def _pass(self, *, everything: bool) -> None:
        """Writes what has changed; everything: also what has just been written."""
        local = folders_of(self._folder)
        for name in WHOLE:
            self._put(name)
        for folder in local:
            if self._put_checkpoint(folder):
                self._remove_dropped()
                if folders_of(self._folder)[:1] != local[:1]:
                    self._again_s = 0.0
                    break  # a newer one goes first
        self._remove_dropped()
        patterns = ("*.jsonl", "tensorboard/**/*", f"{TRACE_FILES}/*.json.gz")
        files = [path for pattern in patterns for path in self._folder.glob(pattern)]
        names = {str(path.relative_to(self._folder)) for path in files if path.is_file()}
        for name in [*sorted(names - {EVENTS}), EVENTS]:  # an end that is written there means that all is there
            if everything or self._is_due(name):
                self._put(name)

    def _is_due(self, name: str) -> bool:
        return time.monotonic() >= self._due_s.get(name, 0.0)

    def _put(self, name: str) -> None:
        """Writes a file unless the bucket has it as it is now."""
        path = self._folder / name
        try:
            seen = path.stat()
            state = (seen.st_ino, seen.st_size, seen.st_mtime_ns)
            if self._sent.get(name) == state:
                return
            whole = path.suffix == ".safetensors" or (seen.st_size > STREAMED_BYTES and name != EVENTS)
            self._write(name, path if whole else path.read_bytes())
        except FileNotFoundError:
            return
        self._sent[name] = state
        self._due_s[name] = time.monotonic() + RECORDS_S * max(1.0, seen.st_size / RECORDS_BYTES)

    def _put_checkpoint(self, folder: Path) -> bool:
        """Writes a checkpoint unless the bucket has it, its manifest last; whether there was something to write. One
        that is dropped here meanwhile stays without a manifest there."""
        name = f"{CHECKPOINTS}/{folder.name}"
        try:
            manifest = (folder / MANIFEST).read_bytes()
            if self._there.get(folder.name) == manifest:
                return False
            if self._there.get(folder.name):  # other files under the same name: no longer whole
                self._delete(f"{name}/{MANIFEST}")
            self._there[folder.name] = b""
            for file in (STATE, WEIGHTS):
                self._write(f"{name}/{file}", folder / file)
            for record in WITH_CHECKPOINT:
                if self._is_due(record) or (self._folder / record).stat().st_size <= RECORDS_BYTES:
                    self._put(record)
            if self._lease is not None:
                self._lease.renew()  # another may have taken it while this was written
            self._write(f"{name}/{MANIFEST}", manifest)
        except FileNotFoundError:
            return True
        self._there[folder.name] = manifest
        return True

    def _remove_dropped(self) -> None:
        """Removes the checkpoints that are no longer here, once the bucket has the newest."""
        local = [folder.name for folder in folders_of(self._folder)]
        if not local or not self._there.get(local[0]):
            return
        for name in sorted(set(self._there) - set(local), key=_step):
            for file in (MANIFEST, STATE, WEIGHTS):
                self._delete(f"{CHECKPOINTS}/{name}/{file}")
            del self._there[name]

    def _write(self, name: str, data: bytes | Path) -> None:
        if self._lease is not None:
            self._lease.require()
        try:
            self._store.write(self._address.child(name).key, data)
        except ObjectMissing:
            if isinstance(data, Path) and not data.exists():  # what is missing is our own file
                raise FileNotFoundError(data) from None
            raise

    def _delete(self, name: str) -> None:
        if self._lease is not None:
            self._lease.require()
        self._store.delete(self._address.child(name).key)


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _brief(error: StorageError | OSError) -> str:
    """An error in a line."""
    return f"{error.what} {error.cause or ''}".strip() if isinstance(error, StorageError) else str(error)
