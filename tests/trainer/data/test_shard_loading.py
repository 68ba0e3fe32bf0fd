"""Loading from shards in a bucket: parts of a shard in one request, each byte once, the same batches as from files."""

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from stoker.data.loading.samples import LoaderSpec, SampleStream
from stoker.data.loading.worker_pool import Prefetcher, iter_rank_positions
from stoker_watch.errors import CheckpointError
from stoker_watch.storage import fetcher as fetcher_module
from stoker_watch.storage.store import Store, open_store
from stoker_watch.storage.uri import parse_uri
from tests.trainer.data.loading import CPU, IMAGE_SIZE, assert_same, image_indices_of, make, stream, take
from tests.trainer.data.memory_shards import ShardIndex
from tests.watch.storage.servers import Conditions, ServedBucket, apply, google_server

COUNT, BATCH, BUFFER = 120, 6, 96
MIXED = {"batch_size": BATCH, "shuffle_buffer": BUFFER}


class Request(NamedTuple):
    key: str
    start: int
    length: int


class RecordingFetcher:
    """The contract of `Fetcher`, answered at once from the shards of an index."""

    target_in_flight = 8

    def __init__(self, index: ShardIndex) -> None:
        self.index, self.requests = index, list[Request]()

    def submit(self, store: Store, key: str, *, start: int = 0, length: int | None = None) -> "Future[bytes]":
        assert store is self.index.store
        assert length is not None
        self.requests.append(Request(key, start, length))
        future: Future[bytes] = Future()
        future.set_result(self.index.shards[key][start : start + length])
        return future


@pytest.fixture
def index(tmp_path: Path) -> ShardIndex:
    return ShardIndex(tmp_path, COUNT)


@pytest.fixture
def served(index: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedBucket]:
    with google_server() as server:
        served = server.bucket()
        apply(monkeypatch, served.environment)
        index.store = open_store(parse_uri(served.uri))
        for name, content in index.shards.items():
            index.store.write(name, content)
        yield served


def make_stream(index: ShardIndex, *, rank: int = 0, ranks: int = 1, **changes: object) -> SampleStream:
    fields = {"train": True, "shuffle_buffer": BUFFER, "batch_size": BATCH // ranks} | changes
    spec = LoaderSpec(
        device=CPU,
        image_size=IMAGE_SIZE,
        resize="letterbox",
        max_boxes=8,
        seed=5,
        rank=rank,
        world_size=ranks,
        **fields,
    )  # type: ignore[arg-type]
    return SampleStream(index, np.arange(COUNT), spec)  # type: ignore[arg-type]


def read_all(
    samples: SampleStream, fetcher: RecordingFetcher, *, rank: int = 0, ranks: int = 1, positions: range = range(COUNT)
) -> list[int]:
    """The images of these positions that are those of a rank, each requested when it is used and not ahead."""
    share = BATCH // ranks
    own = [p for p in positions if p // share % ranks == rank]
    prefetcher = Prefetcher(
        samples,
        fetcher,
        itertools.chain(own, itertools.count(10**6)),  # type: ignore[arg-type]
    )
    images = []
    for position in own:
        pending = prefetcher.take(position)
        assert pending is not None
        name, start, length = samples.index.location(pending.image_index)  # type: ignore[attr-defined]
        assert pending.future.result() == samples.index.shards[name][start : start + length]  # type: ignore[attr-defined]
        images.append(pending.image_index)
    return images


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_ranks_request_each_byte_once(index: ShardIndex, ranks: int) -> None:
    index.store = object()  # type: ignore[assignment]
    fetcher, images = RecordingFetcher(index), list[int]()
    for rank in range(ranks):
        images += read_all(make_stream(index, rank=rank, ranks=ranks), fetcher, rank=rank, ranks=ranks)
    assert sorted(images) == list(range(COUNT))
    assert len(fetcher.requests) < COUNT / 2
    for (key, start, length), after in itertools.pairwise(sorted(fetcher.requests)):
        assert key != after.key or start + length <= after.start, "a byte is requested twice"


def test_an_epoch_begun_by_two_ranks_and_ended_by_three(index: ShardIndex) -> None:
    """Each image once; what the first two had requested and not used is requested again."""
    index.store = object()  # type: ignore[assignment]
    stop = 4 * BATCH
    images = []
    for ranks, positions in ((2, range(stop)), (3, range(stop, COUNT))):
        for rank in range(ranks):
            samples, fetcher = make_stream(index, rank=rank, ranks=ranks), RecordingFetcher(index)
            images += read_all(samples, fetcher, rank=rank, ranks=ranks, positions=positions)
    assert sorted(images) == list(range(COUNT))


def test_images_that_are_not_needed_are_not_requested(index: ShardIndex) -> None:
    index.store = object()  # type: ignore[assignment]
    samples, fetcher = make_stream(index), RecordingFetcher(index)
    cached = {int(k) for k in np.random.default_rng(0).permutation(COUNT)[: COUNT // 2]}
    samples.is_cached = cached.__contains__  # type: ignore[method-assign]
    prefetcher = Prefetcher(samples, fetcher, iter_rank_positions(0, BATCH, BATCH))  # type: ignore[arg-type]
    requested = {p: prefetcher.take(p) for p in range(COUNT)}
    assert {p for p, request in requested.items() if request is None} == {
        p for p in range(COUNT) if samples.image_index_at(p) in cached
    }
    cached.update(range(COUNT))
    before = len(fetcher.requests)
    assert all(prefetcher.take(p) is None for p in range(3 * COUNT, 4 * COUNT))
    assert len(fetcher.requests) - before < COUNT, "only what was requested before all were in the cache"


def test_a_bounded_number_of_images_is_held(index: ShardIndex) -> None:
    index.store = object()  # type: ignore[assignment]
    samples, fetcher = make_stream(index), RecordingFetcher(index)
    prefetcher = Prefetcher(samples, fetcher, iter_rank_positions(0, BATCH, BATCH))  # type: ignore[arg-type]
    held = []
    for position in range(10 * COUNT):
        prefetcher.take(position)
        prefetcher.top_up()
        held.append(len(prefetcher._requests))
    largest_block = 4
    assert max(held) <= BUFFER + largest_block
    assert np.mean(held) > BUFFER / 2, "it reads ahead as far as it may"


@pytest.mark.usefixtures("served")
def test_bytes_are_freed_when_they_are_used(index: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not only when the garbage collector runs."""
    read: list[weakref.ref[Future[Any]]] = []
    take_request = Prefetcher.take

    def recorded(self: Prefetcher, position: int) -> Any:
        request = take_request(self, position)
        assert request is not None
        read.append(weakref.ref(request.future))
        return request

    monkeypatch.setattr(Prefetcher, "take", recorded)
    gc.collect()
    gc.disable()
    try:
        with make(index, **MIXED) as loader:
            take(loader, 3 * COUNT // BATCH)
            alive = sum(future() is not None for future in read)
    finally:
        gc.enable()
    assert len(read) > 3 * COUNT
    assert alive < 10 * BATCH, "those of the batches that are being loaded"


@pytest.mark.usefixtures("served")
def test_batches_are_those_of_local_shards(index: ShardIndex) -> None:
    steps = 2 * COUNT // BATCH
    remote = stream(index, steps, **MIXED)
    index.store = None
    assert_same(remote, stream(index, steps, **MIXED))
    assert set(Counter(image_indices_of(remote)).values()) == {2}


@pytest.mark.usefixtures("served")
def test_a_loader_resumes_in_the_middle_of_an_epoch_with_another_number_of_ranks(index: ShardIndex) -> None:
    uninterrupted = image_indices_of(stream(index, COUNT // BATCH, **MIXED))
    seen: list[int] = []
    state: dict[str, Any] = {}
    for ranks, steps in ((2, 7), (3, COUNT // BATCH - 7)):
        parts = []
        for rank in range(ranks):
            with make(index, rank=rank, world_size=ranks, **MIXED | {"batch_size": BATCH // ranks}) as loader:
                if seen:
                    loader.load_state_dict(state)
                parts.append([batch.image_index.tolist() for batch in take(loader, steps)])
                last = loader.state_dict()
        state = last
        seen += [image for step in range(steps) for part in parts for image in part[step]]
    assert seen == uninterrupted
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.usefixtures("served")
def test_an_evaluation_reads_neighbors_together(index: ShardIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Request] = []
    submit = fetcher_module.Fetcher.submit

    def recorded(self, store, key, *, start=0, length=None):  # type: ignore[no-untyped-def]
        requests.append(Request(key, start, length))
        return submit(self, store, key, start=start, length=length)

    monkeypatch.setattr(fetcher_module.Fetcher, "submit", recorded)
    assert image_indices_of(stream(index, 99, train=False, batch_size=6))[:COUNT] == list(range(COUNT))
    assert len(requests) == COUNT // 10 + 1  # shards have 10 images, and 64 are read at once
    requests.clear()
    parts = [stream(index, 99, train=False, batch_size=6, rank=rank, world_size=2) for rank in range(2)]
    images = [image for part in parts for image in image_indices_of(part) if image >= 0]
    assert sorted(images) == list(range(COUNT))
    assert len(requests) <= 2 * COUNT // 6
    assert sum(request.length for request in requests) < sum(map(len, index.shards.values()))


@pytest.mark.usefixtures("served")
def test_a_missing_shard_is_missing_images(index: ShardIndex) -> None:
    assert index.store is not None
    index.store.delete("shard-3.tar")
    reported = []
    with make(index, on_quarantine=reported.append, max_bad_fraction=0.2, **MIXED) as loader:
        images = image_indices_of(take(loader, COUNT // BATCH))
    assert {bad.image_index for bad in reported} == set(range(30, 40))
    assert not set(images) & set(range(30, 40))


def test_faults_change_nothing(index: ShardIndex, served: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stream(index, 20, **MIXED)
    faults = {"503": 0.05, "reset": 0.05, "truncate": 0.05, "429": 0.05}
    with served.through(Conditions(faults=faults)) as (worse, proxy):  # type: ignore[arg-type]
        apply(monkeypatch, worse.environment)
        index.store = open_store(parse_uri(worse.uri))
        assert_same(stream(index, 20, **MIXED), expected)
        assert sum(request.fault is not None for request in proxy.requests) > 2


def test_a_state_of_another_order_is_refused(index: ShardIndex) -> None:
    with make(index, **MIXED) as loader:
        take(loader, 1)
        state = loader.state_dict()
    for changes in ({"shuffle_buffer": 0}, {"shuffle_buffer": 40}, {"batch_size": 3}):
        with make(index, **MIXED | changes) as loader, pytest.raises(CheckpointError, match="--shuffle-buffer"):
            loader.load_state_dict(state)
    with make(index, batch_size=BATCH) as loader:  # a state of an older version
        loader.load_state_dict({k: v for k, v in loader.state_dict().items() if k != "shards"})
