"""Who may write a run in a bucket: one object that its holder renews, since object stores have no locks.

Every write of it is conditional on the one before, so of two that want it one gets it. A holder that died is replaced
at once on its own machine, where its process can be asked for; from another one, when it has not renewed for VALID_S.
That compares the clocks of two machines: one that is wrong by more than half a minute may take what is still held. The
holder that has lost it learns so at its next renewal, and writes no more (`Lease.require`).
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

import msgspec
import psutil

from stoker.errors import Conflict, ObjectMissing, StorageError, UsageError
from stoker.storage.failures import read_failure
from stoker.storage.store import ObjectInfo, Store, open_store
from stoker.storage.uri import Address

VALID_S = 60.0
RENEW_S = 20.0
"""Two renewals in a row may fail."""
LOOK_S = 1.0
SAY_S = 10.0


class Holder(msgspec.Struct, kw_only=True, frozen=True):
    """lease.json: who holds it."""

    token: str
    """Of this holding: the same process has another one when it takes the lease again."""
    who: str
    """The user."""
    host: str
    machine: str
    """Tells apart where process numbers mean something: the boot of a machine, the container."""
    pid: int
    started: float
    """When the process began, by the machine's own count: a number that is used again is another process."""
    renewed_s: float
    """Unix time."""
    valid_s: float = VALID_S
    released: bool = False

    def __str__(self) -> str:
        return f"{self.who} on {self.host}, process {self.pid}"

    def age_s(self) -> float:
        """Seconds since it was renewed, by this machine's clock."""
        return max(0.0, time.time() - self.renewed_s)

    def left_s(self) -> float:
        """Seconds until it expires by this machine's clock; 0 when it has, or was released."""
        return 0.0 if self.released else max(0.0, self.renewed_s + self.valid_s - time.time())


class LeaseLost(UsageError):
    """Another process has taken what this one held."""


class Lease:
    """A lease that is held; a thread renews it. `acquire` makes it."""

    def __init__(self, store: Store, address: Address, holder: Holder, info: ObjectInfo, taken_s: float) -> None:
        self._store, self._address = store, address
        self._holder, self._info = holder, info
        self._renewed_s = taken_s
        self._lost: LeaseLost | None = None
        self._ended = threading.Event()
        self._renewing = threading.Lock()
        self._thread: threading.Thread | None = None

    def keep(self, on_lost: Callable[[LeaseLost], None]) -> None:
        """Starts the thread. on_lost is called from it, at most once."""

        def renew() -> None:
            while not self._ended.wait(RENEW_S):
                try:
                    self.renew()
                except LeaseLost as error:
                    on_lost(error)
                    return
                except StorageError:  # whoever wants to write meets the same, and says it
                    continue

        self._thread = threading.Thread(target=renew, name="stoker-lease", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Raises LeaseLost; StorageError when the store does not answer, which loses nothing yet."""
        with self._renewing:
            if self._lost is not None:
                raise self._lost
            began_s = time.monotonic()
            holder = msgspec.structs.replace(self._holder, renewed_s=time.time())
            try:
                self._info = self._store.write(self._address.key, _packed(holder), if_match=self._info.etag)
            except (Conflict, ObjectMissing):
                found = _read(self._store, self._address)
                if found is not None and found[0].token == self._holder.token:  # written, and no answer came through
                    self._info, self._renewed_s = found[1], began_s
                    return
                taken = "its lease was removed" if found is None else f"it is held by {found[0]}"
                fix = "let it go on, or end it and give the same command again"
                self._lost = LeaseLost(
                    "Another process has taken over this run.", place=self._address.parent, cause=taken, fix=fix
                )
                raise self._lost from None
            self._holder, self._renewed_s = holder, began_s

    def require(self) -> None:
        """Before each write of what the lease protects. Raises LeaseLost, or StorageError when it has expired."""
        if self._lost is not None:
            raise self._lost
        if time.monotonic() - self._renewed_s > VALID_S:
            self.renew()

    def release(self) -> None:
        """Gives it back. Where that fails, it expires by itself."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(VALID_S)
        if self._lost is None:
            gone = msgspec.structs.replace(self._holder, renewed_s=time.time(), released=True)
            with contextlib.suppress(StorageError):
                self._store.write(self._address.key, _packed(gone), if_match=self._info.etag)


def acquire(address: Address, *, say: Callable[[str], None], check: Callable[[], None]) -> Lease | None:
    """Takes the lease at `address`; None where the store has no conditional writes.

    Waits for one of another machine until it expires; `say` gets a line now and then, `check` may raise to end it.

    Raises UsageError that names the holder when it lives; StorageError.
    """
    store = open_store(address)
    own = _ourselves()
    seen: Holder | None = None
    said_s = 0.0
    while True:
        found = _read(store, address)
        if found is not None and (left_s := found[0].left_s()) > 0:
            holder = found[0]
            renewed = seen is not None and (seen.token, seen.renewed_s) != (holder.token, holder.renewed_s)
            here = holder.machine == own.machine
            if renewed or (here and _started(holder.pid) == holder.started):
                when = time.strftime("%H:%M:%S", time.localtime(time.time() + left_s))
                raise UsageError(
                    "Another process is training this run.",
                    place=address.parent,
                    cause=f"{holder} holds it, until {when} unless it renews",
                    fix="let it go on, or end it and give the same command again",
                )
            if not here:
                seen = holder
                if time.monotonic() - said_s >= SAY_S:
                    said_s = time.monotonic()
                    say(f"{holder} held this run {holder.age_s():.0f} s ago: waiting {left_s:.0f} s to see if it lives")
                check()
                time.sleep(min(LOOK_S, left_s))
                continue
        taken_s = time.monotonic()
        own = msgspec.structs.replace(own, renewed_s=time.time())
        try:
            if found is None:
                info = store.write(address.key, _packed(own), if_absent=True)
            else:
                info = store.write(address.key, _packed(own), if_match=found[1].etag)
        except (Conflict, ObjectMissing):  # another was faster
            continue
        except StorageError as error:
            if not isinstance(error.__cause__, Exception) or read_failure(error.__cause__).kind != "other":
                raise
            store.write(address.key, _packed(own))  # raises what it is, unless it is the condition
            _remove(store, address)
            return None
        return Lease(store, address, own, info, taken_s) if _keeps_conditions(store, address) else None


def _keeps_conditions(store: Store, address: Address) -> bool:
    """Whether a write that must not replace anything is refused: some stores do not know conditions, and write."""
    try:
        store.write(address.key, b"", if_absent=True)
    except Conflict:
        return True
    _remove(store, address)
    return False


def _remove(store: Store, address: Address) -> None:
    """No lease rather than one that nobody renews."""
    store.delete(address.key)


def read_file(path: Path) -> Holder | None:
    """A copy of lease.json on the disk; None when there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except FileNotFoundError:
        return None


def _packed(holder: Holder) -> bytes:
    return msgspec.json.encode(holder)


def _read(store: Store, address: Address) -> tuple[Holder, ObjectInfo] | None:
    """The holder, and the version of the object that says so; None when there is no lease."""
    while (info := store.stat(address.key)) is not None:
        try:
            data = store.read(address.key)
        except ObjectMissing:
            continue
        if store.stat(address.key) == info:
            try:
                return msgspec.json.decode(data, type=Holder), info
            except msgspec.DecodeError as error:
                raise StorageError("The lease of the run is damaged.", place=address, cause=str(error),
                                   fix="remove it when no process trains the run") from error  # fmt: skip
    return None


def _ourselves() -> Holder:
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        who = f"user {os.getuid()}"
    pid = os.getpid()
    return Holder(
        token=uuid.uuid4().hex,
        who=who,
        host=socket.gethostname(),
        machine=_machine(),
        pid=pid,
        started=_started(pid) or 0.0,
        renewed_s=time.time(),
    )


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode()}"


def _started(pid: int) -> float | None:
    """When a process began; None when it does not run. In clock ticks since boot on Linux, whatever the clock does."""
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
