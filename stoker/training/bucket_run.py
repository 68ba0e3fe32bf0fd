"""A run whose folder is in a bucket: `stoker train DATA --run gs://bucket/runs/x`.

Training writes into a working copy on this machine, as into any run's folder, and `uploads.py` brings it into the
bucket beside that. So the same command continues on another machine: `join` takes the run's lease, brings the working
copy up to the bucket, and training goes on as from any folder. What readers do: `records.fetch_run`.
"""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

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
from stoker.storage.download import download, is_ahead, not_a_run, objects
from stoker.storage.lease import Lease, LeaseLost, acquire
from stoker.storage.local_files import write_whole
from stoker.storage.run_uri import LEASE, MARK, WRITABLE, address_of, working_copy
from stoker.storage.store import Store, open_store
from stoker.storage.uri import Address
from stoker.training.checkpoint import MANIFEST, folders_of, is_whole
from stoker.training.recovery import Stop
from stoker.training.start import Say
from stoker.training.uploads import Uploads

PREEMPTED_LIMIT_S = 120.0
"""The longest notice before a cloud takes a machine (AWS's); where it is shorter, the cloud ends the wait."""
FINISHED_LIMIT_S = 900.0
"""Nobody takes the machine: time for a gigabyte over a slow line."""
LAST_LIMIT_S = 10.0
"""For the last lines of the records, when the state is there."""
QUIET_S = 1.0
"""An upload that takes no longer is not talked about."""
NO_LEASE = "this bucket has no conditional writes: nothing keeps a second process from training the same run"
_CHECKPOINT_FILE = re.compile(rf"{CHECKPOINTS}/(step-\d{{8,}})/([^/]+)$")


@dataclasses.dataclass
class BucketRun:
    """A run in a bucket that this process trains. `join` makes it."""

    address: Address
    folder: Path
    """The working copy."""
    said: list[str]
    """Lines about it, for the run's events."""
    _store: Store
    _lease: Lease | None
    _there: dict[str, bytes]
    _say: Say | None = None
    _uploads: Uploads | None = None

    def start(self, stop: Stop, say: Say) -> None:
        """Starts uploading. Who loses the run to another process is stopped by `stop`."""
        self._say = say
        self._uploads = Uploads(
            self._store, self.address, self.folder, self._lease, self._there, report=say, on_lost=stop.fail
        )
        if self._lease is not None:
            self._lease.keep(stop.fail)
        self._uploads.start()

    def preempted(self, error: Preempted) -> StorageError | Preempted:
        """What a run that a signal has stopped ends with, when its state has had its time to reach the bucket."""
        failure = self._deliver(PREEMPTED_LIMIT_S)
        if failure is None:
            fix = f"the same command, here or on another machine, or `stoker train --resume {self.address}`, continues"
            return Preempted(error.what, place=self.address, fix=fix)
        newest = self._uploads.newest() if self._uploads is not None else None
        there = "no checkpoint" if newest is None else newest
        what = error.what.partition(";")[0]
        return StorageError(
            f"{what}; the state is saved on this machine, and did not reach the bucket.",
            place=self.address,
            cause=failure,
            fix=f"the same command on this machine continues; the bucket has {there}",
        )

    def finish(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """The end of the run, for an exit stack: waits for what is not in the bucket yet.

        Raises StorageError where the run is finished and its results did not reach the bucket.
        """
        if self._uploads is None or self._say is None:
            return
        if error is None or (isinstance(error, Exception) and not isinstance(error, LeaseLost)):
            limit_s = FINISHED_LIMIT_S if error is None else PREEMPTED_LIMIT_S
            failure = self._deliver(LAST_LIMIT_S if isinstance(error, Preempted | StorageError) else limit_s)
            if failure is not None and error is None:
                raise _unfinished(self.address, self.folder, failure)
            if failure is not None:
                self._say("warning", f"the last records did not reach {self.address}: {failure}")
        self._uploads.stop()

    def _deliver(self, limit_s: float) -> str | None:
        if self._uploads is None or self._say is None:
            return None
        failure = self._uploads.deliver(QUIET_S)
        if failure is None:
            return None
        self._say("note", f"uploading to {self.address}, at most {limit_s:.0f} s; Ctrl-C twice ends the wait")
        return self._uploads.deliver(limit_s)


@contextlib.contextmanager
def uploading(run: BucketRun | None, stop: Stop, say: Say) -> Iterator[None]:
    """A block that trains: uploads meanwhile; after a signal it ends when the state is there. None: no bucket."""
    if run is not None:
        run.start(stop, say)
    try:
        yield
    except Preempted as error:
        if run is None:
            raise
        raise run.preempted(error) from error


def join(
    name: str | None,
    resume: str | None,
    *,
    stop: Stop,
    stack: contextlib.ExitStack,
    note: Callable[[str], None],
) -> BucketRun | None:
    """The run in a bucket that --run or --resume names, with its working copy up to date; None: it is a folder here.

    The lease is held in `stack`. Raises UsageError when another process trains it, or there is nothing to resume;
    ConfigError; StorageError.
    """
    text = resume if resume is not None else name
    address = None if text is None else address_of(text)
    if address is None:
        return None
    if address.scheme not in WRITABLE:
        raise ConfigError("A run cannot be written there.", place=address, choices=[f"{s}://" for s in WRITABLE])
    store, folder = open_store(address), working_copy(address)
    if resume is not None and not (folder / EVENTS).exists() and store.stat(address.child(EVENTS).key) is None:
        raise not_a_run(address, EVENTS)
    lease = acquire(address.child(LEASE), say=note, check=stop.check)
    if lease is not None:
        stack.callback(lease.release)
    with writing("The run's working copy cannot be written.", folder, fix="make room, or set STOKER_CACHE_DIR"):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder) as held:
            if held is False:
                raise UsageError("Another process is training this run.", place=address)
            write_whole(folder / MARK, str(address).encode())
            there, said = _synchronise(store, address, folder)
            if is_finished(folder):
                _upload_rest(store, address, folder, lease, there, note)
    said = [f"{address} is written by way of {folder}", *said, *([] if lease is not None else [NO_LEASE])]
    return BucketRun(address, folder, said, store, lease, there)


def _synchronise(store: Store, address: Address, folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Makes the working copy at least as new as the bucket. Returns the manifests of the bucket's checkpoints, empty
    for a part of one, and lines to say."""
    found = objects(store, address)
    checkpoints: dict[str, dict[str, str]] = {}
    for name, key in found.items():
        if match := _CHECKPOINT_FILE.match(name):
            checkpoints.setdefault(match[1], {})[match[2]] = key
    there = {name: _content(store, files.get(MANIFEST)) for name, files in checkpoints.items()}
    recorded = _content(store, found.get(EVENTS))
    if not recorded:
        return there, []
    said = []
    if is_ahead(folder, EVENTS, recorded):
        newest = next((path.name for path in folders_of(folder) if is_whole(path)), "")
        wanted = [name for name in there if int(name[5:]) > int(newest[5:] or -1)]
    else:
        if is_finished(fetch_run(address)):
            fix = "another --run, or none: a new folder is made then"
            raise UsageError("The run is finished.", place=address, fix=fix)
        if (folder / EVENTS).exists():
            said.append("another machine has gone on with this run: what was here of it is replaced")
        _clear(folder)
        others = {name: key for name, key in found.items()
                  if not name.startswith(f"{CHECKPOINTS}/") and name not in (EVENTS, LEASE, REPORT)}  # fmt: skip
        for name, key in others.items():
            with contextlib.suppress(ObjectMissing):  # removed since it was listed
                download(store, key, folder / name)
        wanted = list(there)
    for name in sorted(wanted, reverse=True):
        if not there[name]:  # half a checkpoint, or one that is being removed
            continue
        if _fetch_checkpoint(store, checkpoints[name], folder / CHECKPOINTS / name):
            said.append(f"fetched {name} from the bucket")
    if not (folder / EVENTS).exists():  # last: what has no events is no run
        write_whole(folder / EVENTS, recorded)
    return there, said


def _upload_rest(
    store: Store,
    address: Address,
    folder: Path,
    lease: Lease | None,
    there: dict[str, bytes],
    note: Callable[[str], None],
) -> None:
    """What a finished run could not upload at its end. Raises StorageError."""
    if _content(store, address.child(EVENTS).key) == (folder / EVENTS).read_bytes():
        return
    note(f"uploading to {address} what did not reach it at the end of the run, at most {FINISHED_LIMIT_S:.0f} s")
    uploads = Uploads(store, address, folder, lease, there, report=_ignore, on_lost=_ignore)
    uploads.start()
    failure = uploads.deliver(FINISHED_LIMIT_S)
    uploads.stop()
    if failure is not None:
        raise _unfinished(address, folder, failure)


def _ignore(*_: object) -> None:
    """Nobody listens: `deliver` says the same."""


def _unfinished(address: Address, folder: Path, failure: str) -> StorageError:
    return StorageError(
        "The run is finished, and not all of it reached the bucket.",
        place=address,
        cause=failure,
        fix=f"it is whole in {folder}; the same command on this machine uploads the rest",
    )


def _content(store: Store, key: str | None) -> bytes:
    """What an object holds; nothing when it is not there."""
    try:
        return b"" if key is None else store.read(key)
    except ObjectMissing:
        return b""


def _fetch_checkpoint(store: Store, files: dict[str, str], target: Path) -> bool:
    """Whether it was fetched: one that is removed meanwhile is left out. Its checksums are looked at when it is
    loaded, as those of any checkpoint."""
    beside = target.with_name(f".{target.name}.fetched")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for name, key in files.items():
            download(store, key, beside / name)
    except ObjectMissing:
        shutil.rmtree(beside)
        return False
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    return True


def _clear(folder: Path) -> None:
    """Empties a working copy, its events first: without them it is no run, should this be interrupted."""
    (folder / EVENTS).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name in (".lock", MARK):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
