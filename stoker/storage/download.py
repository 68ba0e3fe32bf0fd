"""From a bucket onto the local disk: objects as files, and of a run what a command needs of it.

A reader takes the working copy of a run where that is at least as new as the bucket, else fetches into the reading
copy; both are of `runs.py`. Objects that are removed or replaced meanwhile are no error: a run may be live.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from stoker.errors import ObjectMissing, StorageError, UsageError
from stoker.storage.local_files import write_atomic
from stoker.storage.run_uri import URI_FILE, reading_copy, working_copy
from stoker.storage.store import ObjectInfo, Store, open_store
from stoker.storage.uri import StorageUri

ETAGS_FILE = ".fetched.json"
"""In a reading copy: name → ETag of what was fetched."""
PART_BYTES = 64 * 2**20
MAX_ATTEMPTS = 5
MAX_RUNS_SHOWN = 8
"""Runs that an error lists."""


def list_keys(store: Store, uri: StorageUri) -> dict[str, str]:
    """The keys of what is below an address, by their names relative to that."""
    prefix = f"{uri.key}/" if uri.key else ""
    return {info.key.removeprefix(prefix): info.key for info in store.list(uri.key)}


def has_all_events(folder: Path, events_file: str, remote_events: bytes) -> bool:
    """Whether a copy has everything that the bucket has, and maybe more. Its events only ever grow, and the bucket has
    them as they were once: then they begin with those, unless another machine has gone on with the run meanwhile."""
    path = folder / events_file
    return path.is_file() and path.read_bytes().startswith(remote_events)


def fetch_files(
    uri: StorageUri,
    names: Iterable[str],
    *,
    events_file: str,
    subfolder: str = "",
    first_existing_of: Iterable[str] = (),
    fallback_checkpoints: str = "",
) -> Path:
    """A folder with these files of the run, as far as it has them, with all that is in its folder `below`, and with the
    first of `one_of` that it has, else the weights of its newest checkpoint. Those that are here unchanged are not
    fetched again.

    events: name of the file that every run has; else_newest_in: of the folder of checkpoints. Raises UsageError when
    there is no run, StorageError.
    """
    store = open_store(uri)
    try:
        remote_events = store.read(uri.child(events_file).key)
    except ObjectMissing as error:
        raise not_a_run_error(uri, events_file) from error
    working_dir = working_copy(uri)
    if has_all_events(working_dir, events_file, remote_events):
        return working_dir
    folder = reading_copy(uri)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / URI_FILE, str(uri).encode())
    etags_path = folder / ETAGS_FILE
    etags: dict[str, str | None] = json.loads(etags_path.read_bytes()) if etags_path.exists() else {}
    subfolder_names = [f"{subfolder}/{name}" for name in list_keys(store, uri.child(subfolder))] if subfolder else []
    fetched_before = [name for name in etags if subfolder and name.startswith(f"{subfolder}/")]
    for name in dict.fromkeys([*names, *subfolder_names, *fetched_before]):
        _update_file(store, uri, folder, name, etags)
    keys_by_name = list_keys(store, uri) if fallback_checkpoints else {}
    weight_files = (
        name
        for name in keys_by_name
        if name.startswith(f"{fallback_checkpoints}/step-") and name.endswith(".safetensors")
    )
    for name in (*first_existing_of, *sorted(weight_files, reverse=True)):
        if _update_file(store, uri, folder, name, etags):
            break
    write_atomic(etags_path, json.dumps(etags).encode())
    return folder


def not_a_run_error(uri: StorageUri, events_file: str) -> UsageError:
    """The error of an address at which there is no run."""
    parent = uri.parent
    try:
        siblings = [str(parent.child(name)) for name in open_store(uri).list_folders(parent.key)]
    except StorageError:  # who may read may not be allowed to list
        siblings = []
    cause, fix = f"there is no {events_file} below it", "name the address that training was given as --run"
    return UsageError(f"{str(uri)!r} is not a run.", cause=cause, choices=siblings[-MAX_RUNS_SHOWN:], fix=fix)


def _update_file(store: Store, uri: StorageUri, folder: Path, name: str, etags: dict[str, str | None]) -> bool:
    """Makes folder/name what the bucket has now; whether it has it."""
    target, key = folder / name, uri.child(name).key
    info = store.stat(key)
    if info is not None and target.is_file() and info.etag is not None and etags.get(name) == info.etag:
        return True
    try:
        if info is None:
            raise ObjectMissing("There is no such object.", location=uri.child(name))
        etags[name] = download(store, key, target).etag
    except ObjectMissing:  # also one that was removed just now
        target.unlink(missing_ok=True)
        etags.pop(name, None)
        return False
    return True


def download(store: Store, key: str, target: Path) -> ObjectInfo:
    """Fetches an object, and puts it in its place as a whole, with its time. Raises ObjectMissing when it is gone,
    StorageError when it is replaced again and again meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        for _ in range(MAX_ATTEMPTS):
            info = _stat_existing(store, key)
            with temporary.open("wb") as file:
                if info.size_bytes <= PART_BYTES:
                    file.write(store.read(key))  # checked against its ETag, where that is a checksum
                else:
                    for start in range(0, info.size_bytes, PART_BYTES):
                        file.write(store.read(key, start=start, length=min(PART_BYTES, info.size_bytes - start)))
                file.flush()
                os.fsync(file.fileno())
            if _stat_existing(store, key) == info:
                os.utime(temporary, (info.modified_s, info.modified_s))
                temporary.replace(target)
                return info
    finally:
        temporary.unlink(missing_ok=True)
    raise StorageError("The object is replaced faster than it can be read.", location=key)


def _stat_existing(store: Store, key: str) -> ObjectInfo:
    if (info := store.stat(key)) is None:
        raise ObjectMissing("There is no such object.", location=store.uri.child(key))
    return info
