"""Concurrent reads: correct bytes, limits, hedged requests, and a clean end."""

import _thread
import asyncio
import multiprocessing
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.errors import ObjectMissing, StorageError
from stoker_watch.storage import fetcher as fetcher_module
from stoker_watch.storage.failures import Timeouts
from stoker_watch.storage.fetcher import Fetcher
from stoker_watch.storage.store import Store
from stoker_watch.storage.uri import parse_uri
from tests.watch.storage.proxy import Fault
from tests.watch.storage.servers import Conditions, ServedBucket, Server, apply

COUNT, SIZE = 40, 3000
DATA = {f"k{number}": random.Random(number).randbytes(SIZE) for number in range(COUNT)}


@pytest.fixture
def served(google: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedBucket]:
    served = google.bucket()
    for key, data in DATA.items():
        google.objects.put(parse_uri(served.uri).bucket, key, data)
    google.objects.put(parse_uri(served.uri).bucket, "empty", b"")
    apply(monkeypatch, served.environment)
    return served


@pytest.fixture
def store(served: ServedBucket) -> Store:
    return Store(parse_uri(served.uri))


def test_whole_and_partial_reads(store: Store) -> None:
    with Fetcher() as fetcher:
        whole = {key: fetcher.submit(store, key) for key in DATA}
        sized = {key: fetcher.submit(store, key, length=SIZE) for key in DATA}
        part = {key: fetcher.submit(store, key, start=5, length=7) for key in DATA}
        rest = fetcher.submit(store, "k0", start=SIZE - 2)
        assert {key: future.result() for key, future in whole.items()} == DATA
        assert {key: future.result() for key, future in sized.items()} == DATA
        assert {key: future.result() for key, future in part.items()} == {key: d[5:12] for key, d in DATA.items()}
        assert rest.result() == DATA["k0"][-2:]
        assert fetcher.submit(store, "empty").result() == b""


def test_a_web_server_without_ranges_is_read_whole(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    served = web.bucket()
    web.objects.put("", "k", b"whole")
    monkeypatch.setattr("tests.watch.storage.object_server._RANGE", __import__("re").compile("no range"))
    store = Store(parse_uri(served.uri))
    with Fetcher() as fetcher:
        assert [fetcher.submit(store, "k").result() for _ in range(2)] == [b"whole", b"whole"]


def test_errors_arrive_in_the_future(store: Store) -> None:
    with Fetcher() as fetcher:
        with pytest.raises(ObjectMissing):
            fetcher.submit(store, "absent").result()
        with pytest.raises(StorageError, match="does not have the requested bytes"):
            fetcher.submit(store, "k0", start=0, length=SIZE + 1).result()


def test_every_fault_is_retried(served: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: dict[Fault, float] = {"503": 0.05, "429": 0.05, "reset": 0.05, "truncate": 0.05}
    with served.through(Conditions(faults=faults, seed=3)) as (proxied, proxy), Fetcher() as fetcher:
        apply(monkeypatch, proxied.environment)
        store = Store(parse_uri(served.uri))
        futures = {(key, n): fetcher.submit(store, key) for n in range(3) for key in DATA}
        assert {key: future.result() for key, future in futures.items()} == {
            (key, n): data for n in range(3) for key, data in DATA.items()
        }
        assert {request.fault for request in proxy.requests} == {None, *faults}
        assert store.counters.retries > 0


@pytest.mark.slow
def test_limits_of_reads_in_flight(served: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with served.through(Conditions(latency_s=0.01)) as (proxied, proxy):
        apply(monkeypatch, proxied.environment)
        store = Store(parse_uri(served.uri))
        with Fetcher(max_in_flight=5, hedge=False) as fetcher:
            for future in [fetcher.submit(store, key) for key in DATA]:
                future.result()
        assert proxy.peak_in_flight == 5
        proxy.peak_in_flight = 0
        with Fetcher(max_in_flight=50, budget_bytes=3 * SIZE, hedge=False) as fetcher:
            for future in [fetcher.submit(store, key, length=SIZE) for key in DATA]:
                future.result()
            assert proxy.peak_in_flight == 3
            assert fetcher.target_in_flight == 3
        with Fetcher(budget_bytes=1) as fetcher:  # larger than the budget, but read
            assert fetcher.submit(store, "k0", length=SIZE).result() == DATA["k0"]


def test_late_response_is_hedged(served: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request hangs forever; without a hedge the read would wait for the timeout, a minute."""
    hang_after = fetcher_module.HEDGE_MIN_SAMPLES + 8
    plan = Conditions(plan=lambda number, *_: "hang" if number == hang_after else None)
    with served.through(plan) as (proxied, proxy), Fetcher(max_in_flight=4) as fetcher:
        apply(monkeypatch, proxied.environment)
        store = Store(parse_uri(served.uri), timeouts=Timeouts(total_s=480.0))
        for key in DATA:
            fetcher.submit(store, key).result()
        assert len(proxy.requests) == hang_after
        assert fetcher.submit(store, "k0").result() == DATA["k0"]
        assert [request.fault for request in proxy.requests[hang_after:]] == ["hang", None]

        async def others() -> int:
            for _ in range(5):
                await asyncio.sleep(0)
            return len(asyncio.all_tasks()) - 1

        # The task that hangs was cancelled.
        assert asyncio.run_coroutine_threadsafe(others(), fetcher._loop).result() == 0


def test_without_hedging_there_are_no_second_requests(served: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    slow: dict[Fault, float] = {"slow": 0.1}
    with served.through(Conditions(faults=slow, slow_s=0.1)) as (proxied, proxy), Fetcher(hedge=False) as fetcher:
        apply(monkeypatch, proxied.environment)
        store = Store(parse_uri(served.uri))
        for future in [fetcher.submit(store, key) for _ in range(2) for key in DATA]:
            future.result()
        assert len(proxy.requests) == 2 * COUNT


def test_close_fails_pending_reads(served: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with served.through(Conditions(plan=lambda *_: "hang")) as (proxied, _):
        apply(monkeypatch, proxied.environment)
        store = Store(parse_uri(served.uri))
        fetcher = Fetcher(max_in_flight=4)
        futures = [fetcher.submit(store, key) for key in DATA]
        assert futures[-1].cancel()
        fetcher.close()
        for future in futures[:-1]:
            with pytest.raises(StorageError, match="its fetcher is closed"):
                future.result()
        with pytest.raises(StorageError, match="its fetcher is closed"):
            fetcher.submit(store, "k0")
        fetcher.close()


def test_close_waits_for_foreign_threads_in_python(store: Store) -> None:
    """Such as obstore's threads: the end of the interpreter would abort the process."""
    gate, begun, left = _thread.allocate_lock(), threading.Event(), []
    gate.acquire()

    def foreign() -> None:
        begun.set()
        gate.acquire()
        left.append(True)

    with Fetcher() as fetcher:
        assert fetcher.submit(store, "k0").result()
        _thread.start_new_thread(foreign, ())
        begun.wait()
        threading.Timer(0.05, gate.release).start()
    assert left


def _use_in_a_fork(fetcher: Fetcher, store: Store, queue: "multiprocessing.SimpleQueue[str]") -> None:
    try:
        fetcher.submit(store, "k0")
    except StorageError as error:
        fetcher.close()
        queue.put(error.what)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_use_after_fork_is_an_error(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    with Fetcher() as fetcher:
        queue = context.SimpleQueue()
        with fetcher._lock:  # held by a thread that the child does not have
            child = context.Process(target=_use_in_a_fork, args=(fetcher, store, queue))
            child.start()
            child.join(30)
        try:
            assert child.exitcode == 0
        finally:
            child.kill()
        assert queue.get() == "This fetcher belongs to the parent process."
        assert fetcher.submit(store, "k0").result() == DATA["k0"]


def test_sixteen_threads_submit_at_once(store: Store) -> None:
    wrong: list[str] = []
    with Fetcher(max_in_flight=8) as fetcher:

        def read() -> None:
            futures = {key: fetcher.submit(store, key) for key in DATA}
            wrong.extend(key for key, future in futures.items() if future.result() != DATA[key])

        threads = [threading.Thread(target=read) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@given(st.integers(1, 4000))
def test_hedges_are_a_small_fraction(requests: int) -> None:
    hedging, second = fetcher_module._Hedging(), 0
    for _ in range(requests):
        hedging.record_request()
        second += hedging.try_spend()
    assert second <= 1 + fetcher_module.HEDGE_FRACTION * requests


def test_interpreter_exits_during_reads(served: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys\nfrom stoker_watch.storage.store import open_store\n"
        "from stoker_watch.storage.uri import parse_uri\nfrom stoker_watch.storage.fetcher import Fetcher\n"
        "store, fetcher = open_store(parse_uri(sys.argv[1])), Fetcher()\n"
        "futures = [fetcher.submit(store, f'k{n}') for n in range(40)]\n"
        "futures[0].result(); print('one came')\n"
    )
    plan = Conditions(plan=lambda _number, _method, path: None if path.endswith("/k0") else "hang")
    with served.through(plan) as (proxied, proxy):
        apply(monkeypatch, proxied.environment)
        done = subprocess.run([sys.executable, "-c", script, served.uri], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one came\n", "")
    assert any(request.fault == "hang" for request in proxy.requests)
