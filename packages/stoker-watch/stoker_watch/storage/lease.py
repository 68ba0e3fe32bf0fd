"""The lease of a run in a bucket: one object that its holder renews, since object stores have no locks.

Every write of the object is conditional on the previous version, so only one of several processes can take the lease.
The lease of a dead process is taken at once on the same machine, where the process can be checked; on another machine
when it has not been renewed for LEASE_DURATION_S. That compares the clocks of two machines: if one is wrong by more
than half a minute, it may take a lease that is still held. The previous holder notices at its next renewal and stops
writing (`Lease.ensure_held`).
"""

import contextlib
import getpass
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from stoker_watch import regular_files
from stoker_watch.errors import Conflict, ObjectMissing, StorageError, UsageError, make_error
from stoker_watch.storage.failures import caused_by
from stoker_watch.storage.store import ObjectInfo, Store, open_store
from stoker_watch.storage.uri import StorageUri

LEASE_DURATION_S = 60.0
RELEASE_TIMEOUT_S = 5.0
RENEW_INTERVAL_S = 20.0
"""Two successive renewals may fail before the lease expires."""
POLL_INTERVAL_S = 1.0
MESSAGE_INTERVAL_S = 10.0
MAX_LEASE_BYTES = 1 << 16


class LeaseHolder(msgspec.Struct, kw_only=True, frozen=True):
    """The content of lease.json."""

    token: str
    """Random; new each time that a process takes the lease."""
    user: str
    host: str
    machine: str
    """Boot id of the machine and PID namespace: within it, process ids can be compared."""
    pid: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    process_start: Annotated[float, msgspec.Meta(ge=0, le=1e18)]
    """Start time of the process in the units of `_process_start`: distinguishes processes that reuse a process id."""
    renew_time: Annotated[float, msgspec.Meta(ge=0, le=1e10)]
    """Unix time."""
    lease_duration_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = LEASE_DURATION_S
    released: bool = False

    def __str__(self) -> str:
        return f"{self.user} on {self.host}, process {self.pid}"

    def age_s(self) -> float:
        """Seconds since it was renewed, by this machine's clock."""
        return max(0.0, time.time() - self.renew_time)

    def remaining_s(self) -> float:
        """Seconds until it expires by this machine's clock; 0 when it has expired or was released."""
        return 0.0 if self.released else max(0.0, self.renew_time + self.lease_duration_s - time.time())


class LeaseLost(UsageError):
    """Another process has taken the lease of this one."""


class Lease:
    """A lease that this process holds, made by `acquire`. A thread renews it."""

    def __init__(self, store: Store, uri: StorageUri, holder: LeaseHolder, info: ObjectInfo, acquired_s: float) -> None:
        self._store, self._uri = store, uri
        self._holder, self._info = holder, info
        self._last_renewal_s = acquired_s
        self._lost: LeaseLost | None = None
        self._stopped = threading.Event()
        self._renew_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start_renewing(self, on_lost: Callable[[LeaseLost], None]) -> None:
        """Starts the thread, which calls `on_lost` at most once."""

        def renew_loop() -> None:
            while not self._stopped.wait(RENEW_INTERVAL_S):
                try:
                    self.renew()
                except LeaseLost as error:
                    on_lost(error)
                    return
                except StorageError:  # the next write fails in the same way and reports it
                    continue

        thread = threading.Thread(target=renew_loop, name="stoker-lease", daemon=True)
        thread.start()
        self._thread = thread

    def renew(self) -> None:
        """Raises LeaseLost; StorageError when the store does not respond (the lease is not lost yet)."""
        with self._renew_lock:
            if self._lost is not None:
                raise self._lost
            start_s = time.monotonic()
            holder = msgspec.structs.replace(self._holder, renew_time=time.time())
            try:
                self._info = self._store.write(self._uri.key, msgspec.json.encode(holder), if_match=self._info.etag)
            except (Conflict, ObjectMissing):
                current = _read_lease(self._store, self._uri)
                if current is not None and current[0].token == self._holder.token:  # our write, whose response was lost
                    self._info, self._last_renewal_s = current[1], start_s
                    return
                cause = "its lease was removed" if current is None else f"it is held by {current[0]}"
                self._lost = make_error(LeaseLost, "lease-lost", self._uri.parent, cause=cause)
                raise self._lost from None
            self._holder, self._last_renewal_s = holder, start_s

    def ensure_held(self) -> None:
        """Call before each write to the run. Raises LeaseLost; StorageError when it expired and cannot be renewed."""
        if self._lost is not None:
            raise self._lost
        if time.monotonic() - self._last_renewal_s > LEASE_DURATION_S:
            self.renew()

    def release(self) -> None:
        """Releases the lease. If that fails, it expires."""
        self._stopped.set()
        # A store that is cut off is asked for two minutes, and the machine may go before.
        thread = threading.Thread(target=self._write_release, name="stoker-lease-release", daemon=True)
        thread.start()
        thread.join(RELEASE_TIMEOUT_S)

    def _write_release(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._lost is None:
            released = msgspec.structs.replace(self._holder, renew_time=time.time(), released=True)
            with contextlib.suppress(StorageError):
                self._store.write(self._uri.key, msgspec.json.encode(released), if_match=self._info.etag)


def acquire(
    uri: StorageUri, *, on_message: Callable[[str], None], check_interrupted: Callable[[], None]
) -> Lease | None:
    """Takes the lease at `uri`; None where the store has no conditional writes. Waits until a lease of another machine
    expires. While it waits, `on_message` gets a line every MESSAGE_INTERVAL_S, and `check_interrupted` may raise to end
    the waiting. Raises UsageError with the holder if that is alive; StorageError."""
    store = open_store(uri)
    new_holder = _this_process()
    last_seen: LeaseHolder | None = None
    last_message_s = 0.0
    while True:
        current = _read_lease(store, uri)
        if current is not None and (remaining_s := current[0].remaining_s()) > 0:
            holder = current[0]
            renewed = last_seen is not None and last_seen != holder
            same_machine = holder.machine == new_holder.machine
            if renewed or (same_machine and _process_start(holder.pid) == holder.process_start):
                expiry_text = time.strftime("%H:%M:%S", time.localtime(time.time() + remaining_s))
                raise make_error(UsageError, "run-is-leased", uri.parent, holder=holder, expiry_text=expiry_text)
            if not same_machine:
                last_seen = holder
                if time.monotonic() - last_message_s >= MESSAGE_INTERVAL_S:
                    last_message_s = time.monotonic()
                    seen = f"{holder} renewed the lease of this run {holder.age_s():.0f} s ago"
                    on_message(f"{seen}: waiting {remaining_s:.0f} s for its next renewal")
                check_interrupted()
                time.sleep(min(POLL_INTERVAL_S, remaining_s))
                continue
        acquired_s = time.monotonic()
        new_holder = msgspec.structs.replace(new_holder, renew_time=time.time())
        data, etag = msgspec.json.encode(new_holder), None if current is None else current[1].etag
        try:
            info = store.write(uri.key, data, if_absent=current is None, if_match=etag)
        except (Conflict, ObjectMissing):  # another process was faster
            continue
        except StorageError as error:
            if caused_by(error) not in ("other", "unsupported"):
                raise
            store.write(uri.key, data)  # raises the real failure, unless the condition was the problem
            store.delete(uri.key)
            return None
        return Lease(store, uri, new_holder, info, acquired_s) if _supports_conditional_writes(store, uri) else None


def _supports_conditional_writes(store: Store, uri: StorageUri) -> bool:
    """Whether the store refuses a conditional write of an object that exists: some stores ignore conditions."""
    try:
        store.write(uri.key, b"", if_absent=True)
    except Conflict:
        return True
    store.delete(uri.key)  # a lease that is not renewed would be wrong
    return False


def read_lease_file(path: Path) -> LeaseHolder | None:
    """A local copy of lease.json; None when there is none. Raises UsageError when it is damaged."""
    try:
        return msgspec.json.decode(regular_files.read_bytes(path, max_bytes=MAX_LEASE_BYTES), type=LeaseHolder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise make_error(UsageError, "copy-of-lease-damaged", path, cause=str(error)) from error


def _read_lease(store: Store, uri: StorageUri) -> tuple[LeaseHolder, ObjectInfo] | None:
    """The holder, and the version of the object; None when there is no lease."""
    while (info := store.stat(uri.key)) is not None:
        try:
            data = store.read(uri.key)
        except ObjectMissing:
            continue
        if store.stat(uri.key) == info:
            try:
                return msgspec.json.decode(data, type=LeaseHolder), info
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise make_error(StorageError, "lease-damaged", uri, cause=str(error)) from error
    return None


def _this_process() -> LeaseHolder:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, in a container
        user = f"user {os.getuid()}"
    pid = os.getpid()
    return LeaseHolder(
        token=uuid.uuid4().hex,
        user=user,
        host=socket.gethostname(),
        machine=_machine_id(),
        pid=pid,
        process_start=_process_start(pid) or 0.0,
        renew_time=time.time(),
    )


def _machine_id() -> str:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode()}"


def _process_start(pid: int) -> float | None:
    """Start time of a process, on Linux in clock ticks since boot, whatever the clock; None when it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else float(fields[19])
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None
