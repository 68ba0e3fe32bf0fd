"""A data set in a bucket, for tests: generated, uploaded, and compared with the local one."""

import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pytest

from stoker.data.index import Index
from stoker_watch.storage.store import Store
from tests.fixtures.data_same_index import Drawn, content
from tests.watch.storage.servers import Proxy, ServedBucket

DRAWN = [
    Drawn("train-0.jpg", "train", 90, 60, [(0, 1, 2, 30, 40), (1, 5, 5, 50, 20), (2, 0, 0, 9, 9)]),
    Drawn("train-1.jpg", "train", 64, 48, []),
    Drawn("train-2.jpg", "train", 33, 44, [(2, 4, 4, 20, 30)]),
    Drawn("val-0.jpg", "val", 50, 50, [(0, 1, 1, 20, 20), (1, 2, 8, 20, 20), (2, 9, 9, 30, 30)]),
]


def count_read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a store from now on."""
    sizes: list[int] = []
    read, read_async = Store.read, Store.read_async

    def counted(self: Store, key: str, **part: Any) -> bytes:
        data = read(self, key, **part)
        sizes.append(len(data))
        return data

    async def counted_async(self: Store, key: str, **part: Any) -> bytes:
        data = await read_async(self, key, **part)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(Store, "read", counted)
    monkeypatch.setattr(Store, "read_async", counted_async)
    return sizes


class Bucket(NamedTuple):
    """A bucket behind a proxy that counts, with the data set below `set`."""

    served: ServedBucket
    proxy: Proxy
    store: Store

    @property
    def data(self) -> str:
        return f"{self.served.uri}/some/set"

    def put(self, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.store.write(f"some/set/{path.relative_to(folder)}", path.read_bytes())

    def got(self) -> list[str]:
        """Sorted keys, below the data set, of the objects that were read since the last call."""
        paths = [
            request.path
            for request in self.proxy.requests
            if request.method == "GET" and "list-type" not in request.path
        ]
        self.proxy.requests.clear()
        return sorted(unquote(path).partition("some/set/")[2] for path in paths if "prefix=" not in path)


def filled(bucket: Bucket, folder: Path, write: Callable[[Path, list[Drawn]], None]) -> Path:
    write(folder, DRAWN)
    bucket.put(folder)
    return folder


def same(remote: Index, local: Index) -> None:
    for name in ("original_size", "image_id", "offsets", "boxes", "labels", "crowd", "area"):
        assert np.array_equal(getattr(remote, name), getattr(local, name)), name
    for name in ("format", "class_names", "category_ids", "splits", "problems"):
        assert getattr(remote, name) == getattr(local, name), name
    assert content(remote) == content(local)


def put_folder(served: ServedBucket, key: str) -> None:
    """Writes an object whose key ends in a slash, which `Store` cannot."""
    url = f"{served.url}/{served.uri.removeprefix('s3://')}/{key}"
    headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"}
    urllib.request.urlopen(urllib.request.Request(url, b"", headers, method="PUT")).close()
