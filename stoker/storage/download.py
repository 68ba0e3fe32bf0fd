"""Downloads from a bucket to the local disk: objects as files, and the files of a run that a command needs.

A command reads the working copy of a run if that is at least as new as the bucket, else it downloads into the reading
copy (`uri.py`). Objects that are removed or replaced meanwhile are not an error: the run may be live.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from stoker.errors import ObjectMissing, StorageError, UsageError
from stoker.storage.local_files import atomic_path, write_atomic
from stoker.storage.store import ObjectInfo, Store, open_store
from stoker.storage.uri import URI_FILE, StorageUri, reading_copy, working_copy

ETAGS_FILE = ".fetched.json"
"""In a reading copy: name → ETag of the downloaded object."""
PART_BYTES = 64 * 2**20
MAX_ATTEMPTS = 5
MAX_RUNS_SHOWN = 8
"""Runs that an error message lists."""


def list_keys(store: Store, uri: StorageUri) -> dict[str, str]:
    """The keys of all objects below a URI, by their names relative to it."""
    prefix = f"{uri.key}/" if uri.key else ""
    return {info.key.removeprefix(prefix): info.key for info in store.list(uri.key)}


def has_all_events(folder: Path, events_file: str, remote_events: bytes) -> bool:
    """Whether a local copy is at least as new as the bucket. Events are only appended, so a newer copy begins with the
    events of the bucket, unless another machine has continued the run."""
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
    """A local folder with these files of the run, if it has them; with all files of its folder `subfolder`; and with
    the first of `first_existing_of` that it has, else the newest weights in its folder `fallback_checkpoints`. Files
    that have not changed since the last download are not downloaded again.

    events_file: the file that every run has. Raises UsageError when there is no run, StorageError.
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
    """The error for a URI without a run."""
    parent = uri.parent
    try:
        siblings = [str(parent.child(name)) for name in open_store(uri).list_folders(parent.key)]
    except StorageError:  # permission to read does not include permission to list
        siblings = []
    cause, fix = f"it has no {events_file}", "name the URI that was given to training as --run-dir"
    return UsageError(f"{str(uri)!r} is not a run.", cause=cause, choices=siblings[-MAX_RUNS_SHOWN:], fix=fix)


def _update_file(store: Store, uri: StorageUri, folder: Path, name: str, etags: dict[str, str | None]) -> bool:
    """Updates folder/name from the bucket; removes it if the bucket does not have it. Returns whether it does."""
    target, key = folder / name, uri.child(name).key
    info = store.stat(key)
    if info is not None and target.is_file() and info.etag is not None and etags.get(name) == info.etag:
        return True
    try:
        if info is None:
            raise ObjectMissing("There is no such object.", location=uri.child(name))
        etags[name] = download(store, key, target).etag
    except ObjectMissing:  # also when it was removed after `stat`
        target.unlink(missing_ok=True)
        etags.pop(name, None)
        return False
    return True


def download(store: Store, key: str, target: Path) -> ObjectInfo:
    """Downloads an object to a file, which appears as a whole and gets the object's time. Raises ObjectMissing when it
    does not exist, StorageError when it is replaced again and again during the download."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary:
        for _ in range(MAX_ATTEMPTS):
            info = _stat_existing(store, key)
            with temporary.open("wb") as file:
                if info.size_bytes <= PART_BYTES:
                    file.write(store.read(key))  # compared with its ETag, where that is an MD5
                else:
                    for start in range(0, info.size_bytes, PART_BYTES):
                        file.write(store.read(key, start=start, length=min(PART_BYTES, info.size_bytes - start)))
                file.flush()
                os.fsync(file.fileno())
            if _stat_existing(store, key) == info:
                os.utime(temporary, (info.modified_s, info.modified_s))
                return info
        raise StorageError("The object is replaced faster than it can be downloaded.", location=key)


def _stat_existing(store: Store, key: str) -> ObjectInfo:
    if (info := store.stat(key)) is None:
        raise ObjectMissing("There is no such object.", location=store.uri.child(key))
    return info
