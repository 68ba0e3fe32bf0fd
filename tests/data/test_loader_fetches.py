"""Pictures of a bucket: asked for ahead, decoded when they are there, and the stream is that of local files."""

import sys
import threading
import types
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from stoker.data.loading.prefetch import iter_rank_positions
from stoker.errors import DataError, ObjectMissing, StorageError
from stoker.storage.store import open_store
from stoker.storage.uri import parse_uri
from tests.data.loading import Pictures, assert_same, ids, make, stream, take
from tests.storage.servers import Conditions, apply, google_server


class Bucket(Pictures):
    """The same pictures, behind a store. `fails`: row → what reading it raises; `holds`: row → waits for the event."""

    def __init__(self, root, count):
        super().__init__(root, count)
        self.fails, self.holds, self.blocking = {}, {}, []

    def remote(self, row):
        return self, str(row), 0, None

    def read(self, row):
        self.blocking.append(row)
        return self.get(row)

    def get(self, row):
        if row in self.holds:
            assert self.holds[row].wait(60)
        if row in self.fails:
            raise self.fails[row]
        return self.path(row).read_bytes()


class Fetcher:
    """Requests in flight on threads: the contract of `stoker.storage.fetcher.Fetcher`, without a network."""

    def __init__(self):
        self.ahead, self.submitted, self.notes, self.closed = 16, [], [], False
        self._pool = ThreadPoolExecutor(16)
        MADE.append(self)

    def submit(self, store: Bucket, key: str, *, start: int = 0, length: int | None = None) -> "Future[bytes]":
        assert (start, length) == (0, None)
        self.submitted.append(int(key))
        return self._pool.submit(store.get, int(key))

    def note(self, demand_per_s, starved):
        self.notes.append((demand_per_s, starved))

    def close(self):
        self.closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


MADE = []


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    MADE.clear()
    monkeypatch.setitem(sys.modules, "stoker.storage.fetcher", types.SimpleNamespace(Fetcher=Fetcher))
    yield Bucket(tmp_path, 13)
    assert all(fetcher.closed for fetcher in MADE)


def local(bucket):
    return Pictures(bucket.root, 13)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_stream_is_that_of_local_files(bucket, threads):
    assert_same(stream(bucket, 20, threads=threads), stream(local(bucket), 20, threads=threads))
    assert not bucket.blocking  # all came ahead


def test_an_evaluation_and_ranks(bucket):
    assert ids(stream(bucket, 99, train=False)) == ids(stream(local(bucket), 99, train=False))
    rows = np.arange(5)
    parts = [stream(bucket, 99, rows=rows, train=False, batch=2, rank=r, ranks=3) for r in range(3)]
    assert [ids(part) for part in parts] == [[0, 1], [2, 3], [4, -1]]
    assert [fetcher.submitted for fetcher in MADE[1:]] == [[0, 1], [2, 3], [4]]  # nothing is asked for beyond the end


def test_more_is_asked_for_than_the_ring_has_room_for(bucket):
    with make(bucket, depth=1) as loader:
        take(loader, 1)
        assert len(MADE[0].submitted) == 3 * 4 + 16
        assert loader.stats().max_in_flight == 16


def test_little_memory_bounds_what_is_asked_for(bucket, monkeypatch):
    from stoker.data.loading import prefetch

    monkeypatch.setattr(prefetch, "host_memory", lambda: (16 * 3 * prefetch.DEFAULT_IMAGE_BYTES, 0))
    with make(bucket, depth=1) as loader:
        take(loader, 1)
        assert len(MADE[0].submitted) <= 3 * 4 + 3 + 4 * 16


def test_a_slow_object_holds_up_no_thread(bucket):
    """All others of the ring are decoded meanwhile, by the only thread."""
    expected = ids(stream(local(bucket), 5))
    late = expected[2]
    bucket.holds[late] = threading.Event()
    done = threading.Event()
    with make(bucket, threads=1) as loader:
        found = []
        asking = threading.Thread(target=lambda: (found.extend(take(loader, 5)), done.set()))
        asking.start()
        while loader.stats().decode.num_images < 20 - expected.count(late):
            assert not done.is_set()
        stats = loader.stats()
        assert stats.fetch.in_progress >= 1
        assert (stats.decode.in_progress, stats.copy.num_images) == (0, 0)
        bucket.holds[late].set()
        asking.join(60)
    assert ids(found) == expected


def test_a_wait_for_an_object_is_fetch(bucket):
    late = ids(stream(local(bucket), 1))[0]
    bucket.holds[late] = threading.Event()
    with make(bucket) as loader:
        timer = threading.Timer(0.5, bucket.holds[late].set)
        timer.start()
        next(loader)
        timer.join()
        waits = loader.stats().wait_s_by_stage
    assert waits["fetch"] > 0.8 * sum(waits.values())


def missing(row):
    return ObjectMissing("There is no such object.", location=f"s3://bucket/{row}")


def test_a_missing_object_is_quarantined_as_a_missing_file_is(bucket):
    files = local(bucket)
    files.path(4).unlink()
    expected = stream(files, 12)
    bucket.fails[4] = missing(4)
    told = []
    with make(bucket, on_quarantine=told.append) as loader:
        found = take(loader, 12)
        state = loader.state_dict()
    assert_same(found, expected)
    assert [(one.row, one.error) for one in told] == [(4, "There is no such object.")]
    with make(bucket) as loader:
        loader.load_state_dict(state)
        again = take(loader, 3)
    with make(files) as loader:
        loader.load_state_dict(state)
        assert_same(take(loader, 3), again)


def test_a_wrong_guess_is_fetched_anew(bucket):
    """A row is quarantined after later places of it were asked for."""
    bucket.fails[4] = missing(4)
    with make(bucket, batch=1, depth=1) as loader:
        found = ids(take(loader, 60))
        assert found == loader.image_indices_at(0, 60)
    assert MADE[0].submitted.count(4) > 1
    assert 4 not in found
    assert len(bucket.blocking) == 1  # what stands in for it where it failed; later places were put right ahead


@pytest.mark.parametrize("threads", [1, 3])
def test_a_bucket_that_cannot_be_read_stops_the_run_with_its_own_message(bucket, threads):
    order = ids(stream(local(bucket), 3))
    error = StorageError("s3.GetObject is not allowed.", location="s3://bucket/x", cause="403", fix="allow it")
    bucket.fails[order[6]] = error
    told = []
    with make(bucket, threads=threads, on_quarantine=told.append) as loader:
        assert ids(take(loader, 1)) == order[:4]
        for _ in range(2):
            with pytest.raises(StorageError) as caught:
                next(loader)
            assert caught.value is error
        assert loader.position == 4
    assert not told


def test_a_bucket_in_which_most_is_missing_is_a_data_error(bucket):
    for row in range(13):
        bucket.fails[row] = missing(row)
    with make(bucket) as loader, pytest.raises(DataError, match="None of the"):
        next(loader)


def test_the_fetcher_is_told_of_the_demand(bucket, monkeypatch):
    from stoker.data.loading import loader as loader_module

    monkeypatch.setattr(loader_module, "LOOK_S", 0.0)
    with make(bucket) as loader:
        take(loader, 4)
    assert len(MADE[0].notes) == 3
    assert all(demand > 0 for demand, _ in MADE[0].notes)


def test_a_loader_set_back_fetches_from_there_on(bucket):
    with make(bucket) as loader:
        start = loader.state_dict()
        expected = take(loader, 5)
        loader.load_state_dict(start)
        assert_same(take(loader, 5), expected)
    assert len(MADE) == 1


def test_positions_of_a_rank():
    stream = iter_rank_positions(12, 2, 6)
    assert [next(stream) for _ in range(6)] == [12, 13, 18, 19, 24, 25]


class Stored(Pictures):
    """Pictures that lie in a bucket of a real server."""

    store = None

    def remote(self, row):
        return self.store, self.path(row).name, 0, None

    def read(self, row):
        return self.store.read(self.path(row).name)


def test_a_real_bucket_behind_a_bad_network(tmp_path, monkeypatch):
    """One in ten requests fails in some way; one object is not there at all; then the permission is lost."""
    index = Stored(tmp_path, 13)
    files = Pictures(tmp_path, 13)
    files.path(4).unlink()
    with google_server() as server:
        place = server.bucket()
        apply(monkeypatch, place.environment)
        good = open_store(parse_uri(place.address))
        for path in tmp_path.iterdir():
            good.write(path.name, path.read_bytes())
        faults = {"503": 0.04, "429": 0.02, "reset": 0.02, "truncate": 0.02}
        with place.through(Conditions(latency_s=0.01, faults=faults)) as (worse, proxy):
            apply(monkeypatch, worse.environment)
            index.store = open_store(parse_uri(worse.address))
            told = []
            with make(index, on_quarantine=told.append) as loader:
                found = take(loader, 20)
                stats = loader.stats()
            assert_same(found, stream(files, 20))
            assert [one.row for one in told] == [4]
            assert stats.fetch.num_images >= 80
            assert stats.fetch.bytes >= 80 * 0.8 * min(path.stat().st_size for path in tmp_path.iterdir())
            assert stats.fetch.seconds > 80 * 0.01
            assert stats.read_s < stats.fetch.seconds / 2  # almost all came by itself
            assert len(proxy.observe) > 80
        server.objects.denied.add("GET")
        index.store = good
        told.clear()
        with make(index, on_quarantine=told.append) as loader, pytest.raises(StorageError) as caught:
            next(loader)
        assert "storage.objects.get" in str(caught.value)
        assert not told
