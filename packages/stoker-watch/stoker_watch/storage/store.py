"""A bucket or a web server: read, list, write, delete, from any thread, with retries and errors that say what to do.

Every read is checked against the length in the headers. Whole objects that `read` returns are also checked by MD5 where
the ETag is one (objects of one part without KMS keys). obstore does not give access to other checksums (x-goog-hash,
x-amz-checksum-…). Images are read by `read_async` without MD5, which costs as much as the whole request; TLS protects
the transfer, and decoding is strict. Not here: many concurrent reads (`fetcher.py`), credentials (`clients.py`), kinds
of failures and the time between retries (`failures.py`).

Downloads are objects as files, and the files of a run that a command needs: a command reads the working copy of a run
(`uri.py`) if that is at least as new as the bucket, else it downloads into the reading copy. Objects that are removed
or replaced meanwhile are not an error: the run may be live.
"""

import asyncio
import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stoker_watch.errors import ObjectMissing, StorageError, UsageError, make_error, needs_package
from stoker_watch.storage import clients
from stoker_watch.storage.clients import Credentials, find_credentials
from stoker_watch.storage.failures import (
    Action,
    CorruptResponse,
    ObjectTooShort,
    RequestCounters,
    RetryState,
    Timeouts,
    caused_by,
    classify_failure,
    to_storage_error,
)
from stoker_watch.storage.local_files import atomic_path, write_atomic
from stoker_watch.storage.uri import EVENT_LOG, URI_FILE, StorageUri, reading_copy, working_copy

if TYPE_CHECKING:
    from obstore import Bytes, GetOptions, GetResult, ObjectMeta, PutMode, PutResult

LIST_CHUNK_SIZE = 250
"""A listing that fails is resumed after the last chunk; a page of the stores has 1,000 objects."""
UNBOUNDED = 2**40
"""Length of a range up to the end of the object."""
ETAGS_FILE = ".fetched.json"
"""In a reading copy: name → ETag of the downloaded object."""
DOWNLOAD_PART_BYTES = 64 * 2**20
MAX_ATTEMPTS = 5
MAX_RUNS_SHOWN = 8
"""Runs that an error message lists."""
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_T = TypeVar("_T")


@functools.cache
def _request_exceptions() -> tuple[type[Exception], ...]:
    """Exceptions of a request. Others of obstore, such as ValueError, are errors in this code."""
    from obstore.exceptions import BaseError

    return BaseError, FileNotFoundError, OSError, NotImplementedError, CorruptResponse, ObjectTooShort


@dataclass(frozen=True)
class ObjectInfo:
    """etag: opaque, changes when the object does; the argument of `write(if_match=)`. For gs it is the generation, but
    in a listing, which has none, the ETag of the content, which `write` does not accept. None: unknown.
    modified_s: seconds since 1970 by the store's clock; in the result of `write`, by this machine's clock."""

    key: str
    size_bytes: int
    etag: str | None
    modified_s: float


class Store:
    """One bucket. `open_store` keeps one per process; others can be made, with other timeouts. obstore is imported here
    and in the methods, as trainings on local files do not need it."""

    def __init__(self, uri: StorageUri, *, timeouts: Timeouts | None = None) -> None:
        with needs_package("obstore", f"Access to {uri.scheme}://{uri.bucket}"):
            import obstore  # noqa: F401
        self.uri = replace(uri, key="")
        self.timeouts = timeouts or Timeouts.from_environment()
        self.credentials: Credentials = find_credentials(uri.scheme)
        self.counters = RequestCounters()
        self._clients = clients.make_clients(self.uri, self.credentials, stall_s=self.timeouts.stall_s)
        self._bucket_exists = False
        self._supports_ranges = True

    def read(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """The object, or `length` bytes of it from `start`. Raises ObjectMissing, StorageError."""
        if length == 0:
            return b""
        import obstore

        options = _range_options(start, length)

        def attempt() -> bytes:
            result = obstore.get(self._clients.reads, key, options=options)
            data = _checked_bytes(result, result.bytes(), start, length)
            if options is None and _hash_differs(data, result.meta["e_tag"]):
                second_data = obstore.get(self._clients.reads, key).bytes().to_bytes()
                if second_data != data:  # if two reads agree, the ETag is not an MD5
                    raise CorruptResponse("two reads of the object differ, and the first does not match its ETag")
            return data

        return self._with_retries("read", key, attempt)

    async def read_async(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """`read` on an event loop, without the MD5."""
        if length == 0:
            return b""
        retry_state = RetryState(self.timeouts, self.counters)
        while True:
            try:
                data = await self._attempt_async(key, start, length)
            except _request_exceptions() as error:
                await asyncio.sleep(self._retry_wait_s(retry_state, error, "read", key))
            else:
                self.counters.has_responded = True
                return data

    async def _attempt_async(self, key: str, start: int, length: int | None) -> bytes:
        """Reads a range where possible: obstore then switches between its threads and Python's once, not twice."""
        import obstore
        from obstore.exceptions import BaseError

        reads = self._clients.reads
        if self._supports_ranges:
            try:
                body = await obstore.get_range_async(reads, key, start=start, length=length or UNBOUNDED)
                if length is None or len(body) == length:
                    return body.to_bytes()
            except (BaseError, NotImplementedError) as error:
                # An empty object has no valid range, and a simple web server may not support ranges.
                if start or length is not None or classify_failure(error).kind not in ("range", "unsupported"):
                    raise
                self._supports_ranges = classify_failure(error).status is not None
        result = await obstore.get_async(reads, key, options=_range_options(start, length))
        return _checked_bytes(result, await result.bytes_async(), start, length)

    def stat(self, key: str) -> ObjectInfo | None:
        """None: there is no such object. Raises StorageError for a bucket that does not exist."""
        import obstore

        def attempt() -> "ObjectMeta | None":
            with contextlib.suppress(FileNotFoundError):
                return obstore.head(self._clients.reads, key)
            return None

        meta = self._with_retries("read", key, attempt)
        if meta is not None:
            self._bucket_exists = True
            return self._object_info(meta)
        if not self._bucket_exists and self.uri.scheme in ("gs", "s3"):
            # The response to HEAD has no body, so it does not tell whether the object or the bucket is missing.
            try:
                next(self.list(key), None)
            except StorageError as error:
                if caused_by(error) == "bucket":
                    raise
            self._bucket_exists = True
        return None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects in the folder `prefix`, in the order of their keys: `a/b` has `a/b/c`, and not `a/bc`."""
        pending: ObjectInfo | None = None
        for info in self._list_all(prefix):
            # Web consoles mark a folder by an empty object `folder/`. obstore drops the slash; its content comes next.
            if pending is not None and not info.key.startswith(f"{pending.key}/"):
                yield pending
            pending = info if info.size_bytes == 0 else None
            if pending is None:
                yield info
        if pending is not None:
            yield pending

    def _list_all(self, prefix: str) -> Iterator[ObjectInfo]:
        import obstore

        last_key: str | None = None
        retry_state = RetryState(self.timeouts, self.counters)
        while True:
            try:
                stream = obstore.list(self._clients.reads, prefix or None, offset=last_key, chunk_size=LIST_CHUNK_SIZE)
                for metas in stream:
                    for meta in metas:
                        yield self._object_info(meta)
                        last_key = meta["path"]
                    retry_state = RetryState(self.timeouts, self.counters)
                self.counters.has_responded = True
                return
            except _request_exceptions() as error:
                time.sleep(self._retry_wait_s(retry_state, error, "list", prefix))

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        import obstore

        reads = self._clients.reads
        listing = self._with_retries("list", prefix, lambda: obstore.list_with_delimiter(reads, prefix or None))
        return tuple(sorted(path.rpartition("/")[2] for path in listing["common_prefixes"]))

    def write(
        self, key: str, data: bytes | Path, *, if_absent: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        """Replaces the object as a whole: a reader never sees a part of it.

        if_absent: only if there is no object; if_match: only if the object has this `etag`; else raises Conflict. Such
        a conditional write is one request (at most 5 GB, in memory). Other large writes are multipart uploads; the
        parts of a failed one are billed until a lifecycle rule of the bucket removes them.
        """
        import obstore
        from obstore.exceptions import BaseError

        mode: PutMode | None = None
        if if_absent:
            mode = "create"
        elif if_match is not None:
            mode = {"version": if_match} if self.uri.scheme == "gs" else {"e_tag": if_match}
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        multipart = mode is None and size > clients.PART_BYTES
        client = self._clients.uploads if multipart else self._clients.writes
        may_be_written = False

        def attempt() -> "PutResult":
            nonlocal may_be_written
            try:
                return obstore.put(client, key, data, mode=mode, use_multipart=multipart, chunk_size=clients.PART_BYTES)
            except BaseError as error:
                failure = classify_failure(error)
                if failure.kind == "conflict" and may_be_written and (own_result := self._own_write_result(key, data)):
                    return own_result
                may_be_written = may_be_written or failure.is_retryable
                raise

        result = self._with_retries("write", key, attempt)
        etag = result["version"] if self.uri.scheme == "gs" else result["e_tag"]
        return ObjectInfo(key, size, etag, time.time())

    def delete(self, key: str) -> None:
        """Deletes an object; no error if it does not exist."""
        import obstore

        def attempt() -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._clients.writes, key)

        self._with_retries("delete", key, attempt)

    def _own_write_result(self, key: str, data: bytes | Path) -> "PutResult | None":
        """After an attempt without a response, a conflict may be with our own write: then the object has our bytes."""
        import obstore

        result = obstore.get(self._clients.reads, key)
        own_bytes = data if isinstance(data, bytes) else data.read_bytes()
        if result.bytes().to_bytes() != own_bytes:
            return None
        return {"e_tag": result.meta["e_tag"], "version": result.meta["version"]}

    def _with_retries(self, action: Action, key: str, attempt: Callable[[], _T]) -> _T:
        retry_state = RetryState(self.timeouts, self.counters)
        while True:
            try:
                result = attempt()
            except _request_exceptions() as error:
                time.sleep(self._retry_wait_s(retry_state, error, action, key))
            else:
                self.counters.has_responded = True
                return result

    def _retry_wait_s(self, retry_state: RetryState, error: Exception, action: Action, key: str) -> float:
        """Seconds until the next attempt; raises the error for the user if there is none."""
        failure = classify_failure(error)
        wait_s = retry_state.next_wait_s(failure)
        if wait_s is not None:
            return wait_s
        if failure.kind == "region" and failure.region is None and self.uri.scheme == "s3":
            failure = replace(failure, region=clients.bucket_region(self.uri.bucket))
        uri = self.uri.child(key) if key else self.uri
        endpoint = clients.find_endpoint(self.uri.scheme)
        tried = retry_state.describe() + (f"; endpoint: {endpoint[0]} ({endpoint[1]})" if endpoint else "")
        raise to_storage_error(failure, uri, self.credentials, action, attempts_text=tried) from error

    def _object_info(self, meta: "ObjectMeta") -> ObjectInfo:
        etag = (meta["version"] or meta["e_tag"]) if self.uri.scheme == "gs" else meta["e_tag"]
        return ObjectInfo(meta["path"], meta["size"], etag, meta["last_modified"].timestamp())


def _range_options(start: int, length: int | None) -> "GetOptions | None":
    if length is not None:
        return {"range": (start, start + length)}
    return {"range": {"offset": start}} if start else None


def _checked_bytes(result: "GetResult", body: "Bytes", start: int, length: int | None) -> bytes:
    """The body as bytes. Raises CorruptResponse or ObjectTooShort when its length does not match headers or request."""
    begin, end = result.range
    if begin != start or len(body) != end - begin or (length is not None and end - begin > length):
        raise CorruptResponse(f"received {len(body):,} bytes as those from {begin:,} to {end:,}")
    size = result.meta["size"]
    if length is not None and size < start + length:
        raise ObjectTooShort(f"it has {size:,} bytes; requested were those from {start:,} to {start + length:,}")
    return body.to_bytes()


def _hash_differs(data: bytes, etag: str | None) -> bool:
    match = _MD5.fullmatch(etag or "")
    return match is not None and hashlib.md5(data, usedforsecurity=False).hexdigest() != match[1]


_STORES: dict[tuple[object, ...], Store] = {}
_LOCK = threading.Lock()


def open_store(uri: StorageUri) -> Store:
    """The store of a bucket; the same one each time while the environment variables of storage are the same."""
    key = (os.getpid(), uri.scheme, uri.bucket, clients.store_environment())
    with _LOCK:
        if key not in _STORES:
            _STORES[key] = Store(uri)
        return _STORES[key]


def list_keys(store: Store, uri: StorageUri) -> dict[str, str]:
    """The keys of all objects below a URI, by their names relative to it."""
    prefix = f"{uri.key}/" if uri.key else ""
    return {info.key.removeprefix(prefix): info.key for info in store.list(uri.key)}


def has_all_events(folder: Path, remote_events: bytes) -> bool:
    """Whether a local copy is at least as new as the bucket. Events are only appended, so a newer copy begins with the
    events of the bucket, unless another machine has continued the run."""
    path = folder / EVENT_LOG
    return path.is_file() and path.read_bytes().startswith(remote_events)


def fetch_files(uri: StorageUri, names: Iterable[str], *, first_of: Iterable[str] = ()) -> Path:
    """A local folder with the files of the run that fit one of the patterns `names`, and the last file of the first
    pattern of `first_of` that has any; without those that the bucket does not have. Files that have not changed since
    the last download are not downloaded again. Raises UsageError when there is no run, StorageError."""
    store = open_store(uri)
    try:
        remote_events = store.read(uri.child(EVENT_LOG).key)
    except ObjectMissing as error:
        raise not_a_run_error(uri) from error
    working_dir = working_copy(uri)
    if has_all_events(working_dir, remote_events):
        return working_dir
    folder = reading_copy(uri)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / URI_FILE, str(uri).encode())
    etags_path = folder / ETAGS_FILE
    fetched: dict[str, str | None] = json.loads(etags_path.read_bytes()) if etags_path.exists() else {}
    for pattern in names:
        for name in _matching_names(store, uri, pattern, fetched):
            _update_file(store, uri, folder, name, fetched)
    candidates = (name for pattern in first_of for name in _matching_names(store, uri, pattern, fetched))
    for name in candidates:
        if _update_file(store, uri, folder, name, fetched):
            break
    write_atomic(etags_path, json.dumps(fetched).encode())
    return folder


def _matching_names(store: Store, uri: StorageUri, pattern: str, fetched: Iterable[str]) -> list[str]:
    """A name itself: permission to read does not include permission to list. Of a pattern (with * after its folder) the
    names in the bucket and those downloaded before, the last one first."""
    if "*" not in pattern:
        return [pattern]
    folder = os.path.dirname(pattern)
    listed = {f"{folder}/{name}" for name in list_keys(store, uri.child(folder))}
    return sorted(fnmatch.filter(listed.union(fetched), pattern), reverse=True)


def _update_file(store: Store, uri: StorageUri, folder: Path, name: str, etags: dict[str, str | None]) -> bool:
    """Updates folder/name from the bucket; removes it if the bucket does not have it. Returns whether it does."""
    target, key = folder / name, uri.child(name).key
    if (info := store.stat(key)) is not None:
        if target.is_file() and info.etag is not None and etags.get(name) == info.etag:
            return True
        with contextlib.suppress(ObjectMissing):  # removed after `stat`
            etags[name] = download(store, key, target).etag
            return True
    target.unlink(missing_ok=True)
    etags.pop(name, None)
    return False


def not_a_run_error(uri: StorageUri) -> UsageError:
    parent = uri.parent
    try:
        siblings = [str(parent.child(name)) for name in open_store(uri).list_folders(parent.key)]
    except StorageError:  # permission to read does not include permission to list
        siblings = []
    return make_error(UsageError, "uri-of-no-run", choices=siblings[-MAX_RUNS_SHOWN:], uri=str(uri), file=EVENT_LOG)


def download(store: Store, key: str, target: Path) -> ObjectInfo:
    """Downloads an object to a file, which appears as a whole and gets the object's time. Raises ObjectMissing when it
    does not exist, StorageError when it is replaced again and again during the download."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary:
        for _ in range(MAX_ATTEMPTS):
            info = _stat_existing(store, key)
            with temporary.open("wb") as file:
                if info.size_bytes <= DOWNLOAD_PART_BYTES:
                    file.write(store.read(key))  # compared with its ETag, where that is an MD5
                else:
                    for start in range(0, info.size_bytes, DOWNLOAD_PART_BYTES):
                        length = min(DOWNLOAD_PART_BYTES, info.size_bytes - start)
                        file.write(store.read(key, start=start, length=length))
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
