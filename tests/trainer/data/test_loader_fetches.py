"""Images of a bucket: asked for ahead, decoded when they are there, and the stream is that of local files."""

import sys
import threading
import time
import types
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from stoker.data.loading.worker_pool import iter_rank_positions
from stoker_watch.errors import DataError, ObjectMissing, StorageError
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.trainer.data.loading import InMemoryIndex, assert_same, image_indices_of, make, stream, take
from tests.watch.storage.servers import Conditions, apply, google_server


class Bucket(InMemoryIndex):
    """The same images, behind a store. `fails`: row → what reading it raises; `holds`: row → waits for the event."""

    def __init__(self, root, count):
        super().__init__(root, count)
        self.fails, self.holds, self.blocking = {}, {}, []

    def remote_object(self, image_index):
        return self, str(image_index), 0, None

    def read(self, image_index):
        self.blocking.append(image_index)
        return self.get(image_index)

    def get(self, image_index):
        if image_index in self.holds:
            assert self.holds[image_index].wait(60)
        if image_index in self.fails:
            raise self.fails[image_index]
        return self.path(image_index).read_bytes()


class Fetcher:
    """Requests in flight on threads: the contract of `stoker_watch.storage.fetcher.Fetcher`, without a network."""

    def __init__(self):
        self.target_in_flight, self.submitted, self.closed = 16, [], False
        self._pool = ThreadPoolExecutor(16)
        MADE.append(self)

    def submit(self, store: Bucket, key: str, *, start: int = 0, length: int | None = None) -> "Future[bytes]":
        assert (start, length) == (0, None)
        self.submitted.append(int(key))
        return self._pool.submit(store.get, int(key))

    def close(self):
        self.closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


MADE = []


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    MADE.clear()
    monkeypatch.setitem(sys.modules, "stoker_watch.storage.fetcher", types.SimpleNamespace(Fetcher=Fetcher))
    yield Bucket(tmp_path, 13)
    assert all(fetcher.closed for fetcher in MADE)


def local(bucket):
    return InMemoryIndex(bucket.root, 13)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_stream_is_that_of_local_files(bucket, workers):
    assert_same(stream(bucket, 20, workers=workers), stream(local(bucket), 20, workers=workers))
    assert not bucket.blocking  # all came ahead


def test_an_evaluation_and_ranks(bucket):
    assert image_indices_of(stream(bucket, 99, train=False)) == image_indices_of(stream(local(bucket), 99, train=False))
    image_indices = np.arange(5)
    parts = [
        stream(bucket, 99, image_indices=image_indices, train=False, batch_size=2, rank=r, world_size=3)
        for r in range(3)
    ]
    assert [image_indices_of(part) for part in parts] == [[0, 1], [2, 3], [4, -1]]
    assert [fetcher.submitted for fetcher in MADE[1:]] == [[0, 1], [2, 3], [4]]  # nothing is asked for beyond the end


def test_more_is_requested_than_there_are_free_buffers(bucket):
    with make(bucket, prefetch_depth=1) as loader:
        take(loader, 1)
        assert len(MADE[0].submitted) == 3 * 4 + 16


def test_low_memory_limits_the_requests(bucket, monkeypatch):
    from stoker.data.loading import worker_pool

    monkeypatch.setattr(worker_pool, "host_memory", lambda: (16 * 3 * worker_pool.DEFAULT_IMAGE_BYTES, 0))
    with make(bucket, prefetch_depth=1) as loader:
        take(loader, 1)
        assert len(MADE[0].submitted) <= 3 * 4 + 3 + 4 * 16


def test_a_slow_object_blocks_no_worker(bucket):
    """All others of the buffers are decoded meanwhile, by the only thread."""
    expected = image_indices_of(stream(local(bucket), 5))
    late = expected[2]
    bucket.holds[late] = threading.Event()
    done = threading.Event()
    with make(bucket, workers=1) as loader:
        actual = []
        asking = threading.Thread(target=lambda: (actual.extend(take(loader, 5)), done.set()))
        asking.start()
        while loader.stats().total.num_images < 20 - expected.count(late):
            assert not done.is_set()
        stats = loader.stats()
        assert stats.loading >= 1
        assert loader.position == 0
        bucket.holds[late].set()
        asking.join(60)
    assert image_indices_of(actual) == expected


@pytest.mark.slow
def test_waiting_for_an_object_counts_as_fetch(bucket):
    late = image_indices_of(stream(local(bucket), 1))[0]
    bucket.holds[late] = threading.Event()
    with make(bucket) as loader:
        timer = threading.Timer(0.5, bucket.holds[late].set)
        timer.start()
        begin_s = time.perf_counter()
        next(loader)
        timer.join()
    ends = [begin_s, *(end_s for end_s, _ in loader.last_wait)]
    fetch_s = sum(end_s - ends[n] for n, (end_s, stage) in enumerate(loader.last_wait) if stage == "fetch")
    assert fetch_s > 0.8 * (ends[-1] - begin_s)


def missing(image_index):
    return ObjectMissing("There is no such object.", location=f"s3://bucket/{image_index}")


def test_a_missing_object_is_quarantined_as_a_missing_file_is(bucket):
    files = local(bucket)
    files.path(4).unlink()
    expected = stream(files, 12)
    bucket.fails[4] = missing(4)
    reported = []
    with make(bucket, on_quarantine=reported.append) as loader:
        actual = take(loader, 12)
        state = loader.state_dict()
    assert_same(actual, expected)
    assert [(one.image_index, one.error) for one in reported] == [(4, "There is no such object.")]
    with make(bucket) as loader:
        loader.load_state_dict(state)
        again = take(loader, 3)
    with make(files) as loader:
        loader.load_state_dict(state)
        assert_same(take(loader, 3), again)


def test_a_wrong_prediction_is_fetched_again(bucket):
    """A row is quarantined after later places of it were asked for."""
    bucket.fails[4] = missing(4)
    with make(bucket, batch_size=1, prefetch_depth=1) as loader:
        actual = image_indices_of(take(loader, 60))
        assert actual == loader.image_indices_at(0, 60)
    assert MADE[0].submitted.count(4) > 1
    assert 4 not in actual
    assert len(bucket.blocking) == 1  # what stands in for it where it failed; later places were put right ahead


@pytest.mark.parametrize("workers", [1, 3])
def test_a_bucket_that_cannot_be_read_stops_the_run_with_its_own_message(bucket, workers):
    order = image_indices_of(stream(local(bucket), 3))
    error = StorageError("s3.GetObject is not allowed.", location="s3://bucket/x", cause="403", fix="allow it")
    bucket.fails[order[6]] = error
    reported = []
    with make(bucket, workers=workers, on_quarantine=reported.append) as loader:
        assert image_indices_of(take(loader, 1)) == order[:4]
        for _ in range(2):
            with pytest.raises(StorageError) as caught:
                next(loader)
            assert caught.value is error
        assert loader.position == 4
    assert not reported


def test_a_bucket_in_which_most_is_missing_is_a_data_error(bucket):
    for image_index in range(13):
        bucket.fails[image_index] = missing(image_index)
    with make(bucket) as loader, pytest.raises(DataError, match="None of the"):
        next(loader)


def test_prefetching_restarts_at_the_loaded_position(bucket):
    with make(bucket) as loader:
        start = loader.state_dict()
        expected = take(loader, 5)
        loader.load_state_dict(start)
        assert_same(take(loader, 5), expected)
    assert len(MADE) == 1


def test_positions_of_a_rank():
    stream = iter_rank_positions(12, 2, 6)
    assert [next(stream) for _ in range(6)] == [12, 13, 18, 19, 24, 25]


class Stored(InMemoryIndex):
    """Images that lie in a bucket of a real server."""

    store = None

    def remote_object(self, image_index):
        return self.store, self.path(image_index).name, 0, None

    def read(self, image_index):
        return self.store.read(self.path(image_index).name)


@pytest.mark.slow
def test_a_real_bucket_behind_a_bad_network(tmp_path, monkeypatch):
    """One in ten requests fails in some way; one object is not there at all; then the permission is lost."""
    index = Stored(tmp_path, 13)
    files = InMemoryIndex(tmp_path, 13)
    files.path(4).unlink()
    with google_server() as server:
        place = server.bucket()
        apply(monkeypatch, place.environment)
        good = open_store(parse_uri(place.uri))
        for path in tmp_path.iterdir():
            good.write(path.name, path.read_bytes())
        faults = {"503": 0.04, "429": 0.02, "reset": 0.02, "truncate": 0.02}
        with place.through(Conditions(latency_s=0.01, faults=faults)) as (worse, proxy):
            apply(monkeypatch, worse.environment)
            index.store = open_store(parse_uri(worse.uri))
            reported = []
            with make(index, on_quarantine=reported.append) as loader:
                actual = take(loader, 20)
            assert_same(actual, stream(files, 20))
            assert [one.image_index for one in reported] == [4]
            assert len(proxy.requests) > 80
        server.objects.denied.add("GET")
        index.store = good
        reported.clear()
        with make(index, on_quarantine=reported.append) as loader, pytest.raises(StorageError) as caught:
            next(loader)
        assert "storage.objects.get" in str(caught.value)
        assert not reported
