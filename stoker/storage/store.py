"""A bucket, or a web server: read, list, write, delete, from any thread, with retries, with errors that say what to do.

What is verified of a read: its length, against what the headers promise, always. Whole objects read by `read` also by
MD5 where the store gives one as ETag (objects of one part without KMS keys). Other checksums the stores keep
(x-goog-hash, x-amz-checksum-…) do not come through obstore. Pictures come through `read_async` and are not hashed, as
MD5 alone costs what the whole request does; TLS guards the way, and decoding is strict. Many reads at once are the
matter of `fetcher.py`; who we are, of `credentials.py`; which failures pass, of `retry.py`.
"""

import asyncio
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import BaseError

from stoker.errors import Conflict, ObjectMissing, StorageError, Unsupported
from stoker.storage import clients
from stoker.storage.credentials import Credentials, find_credentials
from stoker.storage.failures import Action, CorruptResponse, ObjectTooShort, classify_failure, to_storage_error
from stoker.storage.retry import RequestCounters, RetryBudget, RetryState, Timeouts
from stoker.storage.uri import StorageUri

if TYPE_CHECKING:
    from obstore import Bytes, GetOptions, GetResult, ObjectMeta, PutMode, PutResult

__all__ = ["Conflict", "ObjectInfo", "ObjectMissing", "Store", "Unsupported", "open_store"]

STORE_EXCEPTIONS = (BaseError, FileNotFoundError, OSError, NotImplementedError, CorruptResponse, ObjectTooShort)
"""What obstore raises for what a store does. Its ValueErrors and the like are ours to avoid."""
LIST_CHUNK_SIZE = 250
"""A list that breaks goes on after the last of these; a page of the stores' own has 1,000."""
UNBOUNDED = 2**40
"""Length of a range that ends where the object does."""
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_T = TypeVar("_T")


@dataclass(frozen=True)
class ObjectInfo:
    """etag: opaque; changes when the object does; what `write(if_match=)` takes. gs: the generation, but in a
    list, which says none, the ETag of the content, which `write` does not take. None: not said.
    modified_s: seconds since 1970, by the store's clock; of what `write` returns, by ours."""

    key: str
    size_bytes: int
    etag: str | None
    modified_s: float


class Store:
    """One bucket. `open_store` keeps one per process; a program of its own may make others, with other limits."""

    def __init__(self, uri: StorageUri, *, timeouts: Timeouts | None = None) -> None:
        self.uri = replace(uri, key="")
        self.timeouts = timeouts or Timeouts.from_environment()
        self.credentials: Credentials = find_credentials(uri.scheme)
        self.budget = RetryBudget()
        self._clients = clients.make_clients(self.uri, self.credentials, self.timeouts)
        self._bucket_exists = False
        self._supports_ranges = True

    @property
    def counters(self) -> RequestCounters:
        return self.budget.counters

    def read(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """The object, or `length` bytes of it from `start`. Raises ObjectMissing, StorageError."""
        if length == 0:
            return b""
        options = _range_options(start, length)

        def attempt() -> bytes:
            result = obstore.get(self._clients.reads, key, options=options)
            data = _checked_bytes(result, result.bytes(), start, length)
            if options is None and _hash_differs(data, result.meta["e_tag"]):
                second_data = obstore.get(self._clients.reads, key).bytes().to_bytes()
                if second_data != data:  # two that agree are the object: its ETag is no MD5
                    raise CorruptResponse("two reads of the object differ, and the first is not what its ETag says")
            return data

        data = self._with_retries("read", key, attempt)
        self.budget.count_bytes(read=len(data))
        return data

    async def read_async(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """`read` on an event loop, without the MD5."""
        if length == 0:
            return b""
        retry_state = RetryState(self.timeouts, self.budget)
        while True:
            try:
                data = await self._attempt_async(key, start, length)
            except STORE_EXCEPTIONS as error:
                await asyncio.sleep(self._retry_wait_s(retry_state, error, "read", key))
            else:
                self.budget.count_bytes(read=len(data))
                return data

    async def _attempt_async(self, key: str, start: int, length: int | None) -> bytes:
        """As a range: obstore then hands over between its threads and Python's once, not twice."""
        reads = self._clients.reads
        if self._supports_ranges:
            try:
                body = await obstore.get_range_async(reads, key, start=start, length=length or UNBOUNDED)
                if length is None or len(body) == length:
                    return body.to_bytes()
            except (BaseError, NotImplementedError) as error:
                # An empty object has no range at all, and a plain web server may not know ranges.
                if start or length is not None or classify_failure(error).kind not in ("range", "unsupported"):
                    raise
                self._supports_ranges = classify_failure(error).status is not None
        result = await obstore.get_async(reads, key, options=_range_options(start, length))
        return _checked_bytes(result, await result.bytes_async(), start, length)

    def stat(self, key: str) -> ObjectInfo | None:
        """None: there is no such object. A bucket that does not exist is an error."""

        def attempt() -> "ObjectMeta | None":
            try:
                return obstore.head(self._clients.reads, key)
            except FileNotFoundError:
                return None

        meta = self._with_retries("read", key, attempt)
        if meta is not None:
            self._bucket_exists = True
            return self._object_info(meta)
        if not self._bucket_exists and self.uri.scheme in ("gs", "s3"):
            # The answer to HEAD has no body that would say whether the object or the bucket is missing.
            try:
                next(self.list(key), None)
            except StorageError as error:
                if "There is no bucket" in error.what:
                    raise
            self._bucket_exists = True
        return None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below `prefix`, a folder: `a/b` has `a/b/c`, and not `a/bc`. In the order of their keys."""
        pending: ObjectInfo | None = None
        for info in self._list_all(prefix):
            # Consoles mark a folder by an empty object `folder/`, whose slash obstore drops. What is in it comes next.
            if pending is not None and not info.key.startswith(f"{pending.key}/"):
                yield pending
            pending = info if info.size_bytes == 0 else None
            if pending is None:
                yield info
        if pending is not None:
            yield pending

    def _list_all(self, prefix: str) -> Iterator[ObjectInfo]:
        last_key: str | None = None
        retry_state = RetryState(self.timeouts, self.budget)
        while True:
            try:
                stream = obstore.list(self._clients.reads, prefix or None, offset=last_key, chunk_size=LIST_CHUNK_SIZE)
                for metas in stream:
                    for meta in metas:
                        yield self._object_info(meta)
                        last_key = meta["path"]
                    retry_state = RetryState(self.timeouts, self.budget)
                self.budget.count_bytes()
                return
            except STORE_EXCEPTIONS as error:
                time.sleep(self._retry_wait_s(retry_state, error, "list", prefix))

    def list_folders(self, prefix: str = "") -> tuple[str, ...]:
        """The names of the folders directly below `prefix`, in order."""
        listing = self._with_retries(
            "list", prefix, lambda: obstore.list_with_delimiter(self._clients.reads, prefix or None)
        )
        self.budget.count_bytes()
        return tuple(sorted(path.rpartition("/")[2] for path in listing["common_prefixes"]))

    def write(
        self, key: str, data: bytes | Path, *, if_absent: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        """Replaces the object as a whole: nobody sees half of it.

        if_absent: only where there is none; if_match: only the one with this `etag`; else Conflict. Such a write is one
        request (5 GB at most, and in memory), others go in parts. Parts of an upload that broke stay, unseen and
        billed, until a life-cycle rule of the bucket removes them.
        """
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
                if isinstance(data, bytes):
                    return obstore.put(
                        client, key, data, mode=mode, use_multipart=multipart, chunk_size=clients.PART_BYTES
                    )
                with data.open("rb") as file:
                    return obstore.put(
                        client, key, file, mode=mode, use_multipart=multipart, chunk_size=clients.PART_BYTES
                    )
            except BaseError as error:
                failure = classify_failure(error)
                if failure.kind == "conflict" and may_be_written and (own_result := self._own_write_result(key, data)):
                    return own_result
                may_be_written = may_be_written or failure.is_retryable
                raise

        result = self._with_retries("write", key, attempt)
        self.budget.count_bytes(written=size)
        etag = result["version"] if self.uri.scheme == "gs" else result["e_tag"]
        return ObjectInfo(key, size, etag, time.time())

    def delete(self, key: str) -> None:
        """Also where there is no such object."""

        def attempt() -> None:
            try:
                obstore.delete(self._clients.writes, key)
            except FileNotFoundError:
                return

        self._with_retries("delete", key, attempt)
        self.budget.count_bytes()

    def _own_write_result(self, key: str, data: bytes | Path) -> "PutResult | None":
        """After a try whose answer was lost: a conflict may be with ourselves. Then the object has our bytes."""
        result = obstore.get(self._clients.reads, key)
        own_bytes = data if isinstance(data, bytes) else data.read_bytes()
        if result.bytes().to_bytes() != own_bytes:
            return None
        return {"e_tag": result.meta["e_tag"], "version": result.meta["version"]}

    def _with_retries(self, action: Action, key: str, attempt: Callable[[], _T]) -> _T:
        retry_state = RetryState(self.timeouts, self.budget)
        while True:
            try:
                return attempt()
            except STORE_EXCEPTIONS as error:
                time.sleep(self._retry_wait_s(retry_state, error, action, key))

    def _retry_wait_s(self, retry_state: RetryState, error: Exception, action: Action, key: str) -> float:
        """Seconds until the next try; raises the error for the user where there is to be none."""
        failure = classify_failure(error)
        wait_s = retry_state.next_wait_s(failure)
        if wait_s is not None:
            return wait_s
        if failure.kind == "region" and failure.region is None and self.uri.scheme == "s3":
            failure = replace(failure, region=clients.bucket_region(self.uri.bucket))
        uri = self.uri.child(key) if key else self.uri
        endpoint_text = clients.describe_endpoint(self.uri.scheme)
        attempts_text = retry_state.describe() + (f"; asked was {endpoint_text}" if endpoint_text else "")
        raise to_storage_error(
            failure, uri=uri, credentials=self.credentials, action=action, attempts_text=attempts_text
        ) from error

    def _object_info(self, meta: "ObjectMeta") -> ObjectInfo:
        etag = (meta["version"] or meta["e_tag"]) if self.uri.scheme == "gs" else meta["e_tag"]
        return ObjectInfo(meta["path"], meta["size"], etag, meta["last_modified"].timestamp())


def _range_options(start: int, length: int | None) -> "GetOptions | None":
    if length is not None:
        return {"range": (start, start + length)}
    return {"range": {"offset": start}} if start else None


def _checked_bytes(result: "GetResult", body: "Bytes", start: int, length: int | None) -> bytes:
    """The body as bytes, when it is as long as its headers and the request say."""
    begin, end = result.range
    if begin != start or len(body) != end - begin or (length is not None and end - begin > length):
        raise CorruptResponse(f"{len(body):,} bytes came as those from {begin:,} to {end:,}")
    size = result.meta["size"]
    if length is not None and size < start + length:
        raise ObjectTooShort(f"it has {size:,} bytes, those from {start:,} to {start + length:,} were asked for")
    return body.to_bytes()


def _hash_differs(data: bytes, etag: str | None) -> bool:
    match = _MD5.fullmatch(etag or "")
    return match is not None and hashlib.md5(data, usedforsecurity=False).hexdigest() != match[1]


_STORES: dict[tuple[object, ...], Store] = {}
_LOCK = threading.Lock()


def open_store(uri: StorageUri) -> Store:
    """The store of the address's bucket; the same one every time, while the environment names the same credentials."""
    key = (os.getpid(), uri.scheme, uri.bucket, clients.store_environment())
    with _LOCK:
        if key not in _STORES:
            _STORES[key] = Store(uri)
        return _STORES[key]
