"""From a bucket onto the local disk: objects as files, and of a run what a command needs of it.

A reader takes the working copy of a run where that is at least as new as the bucket, else fetches into the reading
copy; both are of `runs.py`. Objects that are removed or replaced meanwhile are no error: a run may be live.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from stoker.errors import ObjectMissing, StorageError, UsageError
from stoker.storage.local_files import write_whole
from stoker.storage.run_uri import MARK, reading_copy, working_copy
from stoker.storage.store import ObjectInfo, Store, open_store
from stoker.storage.uri import Address

FETCHED = ".fetched.json"
"""In a reading copy: name → ETag of what was fetched."""
PART_BYTES = 64 * 2**20
TRIES = 5
SHOWN = 8
"""Runs that an error lists."""


def objects(store: Store, address: Address) -> dict[str, str]:
    """The keys of what is below an address, by their names relative to that."""
    prefix = f"{address.key}/" if address.key else ""
    return {info.key.removeprefix(prefix): info.key for info in store.list(address.key)}


def is_ahead(folder: Path, events: str, remote: bytes) -> bool:
    """Whether a copy has everything that the bucket has, and maybe more. Its events only ever grow, and the bucket has
    them as they were once: then they begin with those, unless another machine has gone on with the run meanwhile."""
    path = folder / events
    return path.is_file() and path.read_bytes().startswith(remote)


def fetch(
    address: Address,
    names: Iterable[str],
    *,
    events: str,
    below: str = "",
    one_of: Iterable[str] = (),
    else_newest_in: str = "",
) -> Path:
    """A folder with these files of the run, as far as it has them, with all that is in its folder `below`, and with the
    first of `one_of` that it has, else the weights of its newest checkpoint. Those that are here unchanged are not
    fetched again.

    events: name of the file that every run has; else_newest_in: of the folder of checkpoints. Raises UsageError when
    there is no run, StorageError.
    """
    store = open_store(address)
    try:
        recorded = store.read(address.child(events).key)
    except ObjectMissing as error:
        raise not_a_run(address, events) from error
    own = working_copy(address)
    if is_ahead(own, events, recorded):
        return own
    folder = reading_copy(address)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / MARK, str(address).encode())
    noted = folder / FETCHED
    known: dict[str, str | None] = json.loads(noted.read_bytes()) if noted.exists() else {}
    inner = [f"{below}/{name}" for name in objects(store, address.child(below))] if below else []
    gone = [name for name in known if below and name.startswith(f"{below}/")]
    for name in dict.fromkeys([*names, *inner, *gone]):
        _refresh(store, address, folder, name, known)
    found = objects(store, address) if else_newest_in else {}
    weights = (name for name in found if name.startswith(f"{else_newest_in}/step-") and name.endswith(".safetensors"))
    for name in (*one_of, *sorted(weights, reverse=True)):
        if _refresh(store, address, folder, name, known):
            break
    write_whole(noted, json.dumps(known).encode())
    return folder


def not_a_run(address: Address, events: str) -> UsageError:
    """The error of an address at which there is no run."""
    above = address.parent
    try:
        beside = [str(above.child(name)) for name in open_store(address).folders(above.key)]
    except StorageError:  # who may read may not be allowed to list
        beside = []
    cause, fix = f"there is no {events} below it", "name the address that training was given as --run"
    return UsageError(f"{str(address)!r} is not a run.", cause=cause, choices=beside[-SHOWN:], fix=fix)


def _refresh(store: Store, address: Address, folder: Path, name: str, known: dict[str, str | None]) -> bool:
    """Makes folder/name what the bucket has now; whether it has it."""
    target, key = folder / name, address.child(name).key
    info = store.stat(key)
    if info is not None and target.is_file() and info.etag is not None and known.get(name) == info.etag:
        return True
    try:
        if info is None:
            raise ObjectMissing("There is no such object.", place=address.child(name))
        known[name] = download(store, key, target).etag
    except ObjectMissing:  # also one that was removed just now
        target.unlink(missing_ok=True)
        known.pop(name, None)
        return False
    return True


def download(store: Store, key: str, target: Path) -> ObjectInfo:
    """Fetches an object, and puts it in its place as a whole, with its time. Raises ObjectMissing when it is gone,
    StorageError when it is replaced again and again meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        for _ in range(TRIES):
            info = _existing(store, key)
            with temporary.open("wb") as file:
                if info.size_bytes <= PART_BYTES:
                    file.write(store.read(key))  # checked against its ETag, where that is a checksum
                else:
                    for start in range(0, info.size_bytes, PART_BYTES):
                        file.write(store.read(key, start=start, length=min(PART_BYTES, info.size_bytes - start)))
                file.flush()
                os.fsync(file.fileno())
            if _existing(store, key) == info:
                os.utime(temporary, (info.modified_s, info.modified_s))
                temporary.replace(target)
                return info
    finally:
        temporary.unlink(missing_ok=True)
    raise StorageError("The object is replaced faster than it can be read.", place=key)


def _existing(store: Store, key: str) -> ObjectInfo:
    if (info := store.stat(key)) is None:
        raise ObjectMissing("There is no such object.", place=store.address.child(key))
    return info
