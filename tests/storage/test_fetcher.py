"""Many reads at once: right bytes, within the limits, second requests where the first is late, and a clean end."""

import _thread
import asyncio
import gc
import multiprocessing
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from stoker.errors import ObjectMissing, StorageError
from stoker.storage import concurrency
from stoker.storage.fetcher import Fetcher
from stoker.storage.retry import Timeouts
from stoker.storage.store import Store
from stoker.storage.uri import parse_uri
from tests.storage.proxy import Fault
from tests.storage.servers import Conditions, Place, Server, apply

COUNT, SIZE = 40, 3000
DATA = {f"k{number}": random.Random(number).randbytes(SIZE) for number in range(COUNT)}


@pytest.fixture
def place(google: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    place = google.bucket()
    for key, data in DATA.items():
        google.objects.put(parse_uri(place.address).bucket, key, data)
    google.objects.put(parse_uri(place.address).bucket, "empty", b"")
    apply(monkeypatch, place.environment)
    return place


@pytest.fixture
def store(place: Place) -> Store:
    return Store(parse_uri(place.address))


def test_reads_come_whole_and_in_part(store: Store) -> None:
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
        stats = fetcher.stats()
        assert (stats.finished, stats.failed) == (3 * COUNT + 2, 0)
        assert stats.read_bytes == COUNT * (2 * SIZE + 7) + 2


def test_a_web_server_without_ranges_is_read_whole(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place = web.bucket()
    web.objects.put("", "k", b"whole")
    monkeypatch.setattr("tests.storage.object_server._RANGE", __import__("re").compile("no range"))
    store = Store(parse_uri(place.address))
    with Fetcher() as fetcher:
        assert [fetcher.submit(store, "k").result() for _ in range(2)] == [b"whole", b"whole"]


def test_errors_arrive_in_the_future(store: Store) -> None:
    with Fetcher() as fetcher:
        with pytest.raises(ObjectMissing):
            fetcher.submit(store, "absent").result()
        with pytest.raises(StorageError, match="does not have the requested bytes"):
            fetcher.submit(store, "k0", start=0, length=SIZE + 1).result()
        assert fetcher.stats().failed == 2


def test_every_fault_is_mended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: dict[Fault, float] = {"503": 0.05, "429": 0.05, "reset": 0.05, "truncate": 0.05}
    with place.through(Conditions(faults=faults, seed=3)) as (worse, proxy), Fetcher() as fetcher:
        apply(monkeypatch, worse.environment)
        store = Store(parse_uri(place.address))
        futures = {(key, n): fetcher.submit(store, key) for n in range(3) for key in DATA}
        assert {key: future.result() for key, future in futures.items()} == {
            (key, n): data for n in range(3) for key, data in DATA.items()
        }
        assert {seen.fault for seen in proxy.seen} == {None, *faults}
        assert store.counters.retries > 0


def test_no_more_are_under_way_than_may_be(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.through(Conditions(latency_s=0.01)) as (worse, proxy):
        apply(monkeypatch, worse.environment)
        store = Store(parse_uri(place.address))
        with Fetcher(max_in_flight=5, hedge=False) as fetcher:
            for future in [fetcher.submit(store, key) for key in DATA]:
                future.result()
            assert fetcher.stats().peak_in_flight == 5
        assert proxy.most_under_way <= 5
        with Fetcher(max_in_flight=50, budget_bytes=3 * SIZE, hedge=False) as fetcher:
            for future in [fetcher.submit(store, key, length=SIZE) for key in DATA]:
                future.result()
            assert fetcher.stats().peak_in_flight == 3
            assert fetcher.target_in_flight == 3
        with Fetcher(budget_bytes=1) as fetcher:  # larger than all of it, and read all the same
            assert fetcher.submit(store, "k0", length=SIZE).result() == DATA["k0"]


def test_a_late_answer_is_overtaken(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request hangs for good; without a second one nothing would come before the timeout, a minute on."""
    hang_after = concurrency.HEDGE_MIN_SAMPLES + 8
    plan = Conditions(plan=lambda number, *_: "hang" if number == hang_after else None)
    with place.through(plan) as (worse, proxy), Fetcher(max_in_flight=4) as fetcher:
        apply(monkeypatch, worse.environment)
        store = Store(parse_uri(place.address), timeouts=Timeouts(total_s=480.0))
        for key in DATA:
            fetcher.submit(store, key).result()
        assert len(proxy.seen) == hang_after
        assert fetcher.submit(store, "k0").result() == DATA["k0"]
        assert [seen.fault for seen in proxy.seen[hang_after:]] == ["hang", None]
        assert (fetcher.stats().hedged, fetcher.stats().hedges_won) == (1, 1)

        async def others() -> int:
            for _ in range(5):
                await asyncio.sleep(0)
            return len(asyncio.all_tasks()) - 1

        # The one that hangs was cancelled.
        assert asyncio.run_coroutine_threadsafe(others(), fetcher._engine._loop).result() == 0


def test_without_hedging_nothing_is_asked_twice(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    slow: dict[Fault, float] = {"slow": 0.1}
    with place.through(Conditions(faults=slow, slow_s=0.1)) as (worse, proxy), Fetcher(hedge=False) as fetcher:
        apply(monkeypatch, worse.environment)
        store = Store(parse_uri(place.address))
        for future in [fetcher.submit(store, key) for _ in range(2) for key in DATA]:
            future.result()
        assert len(proxy.seen) == 2 * COUNT


def test_closing_in_the_middle_fails_what_is_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with place.through(Conditions(plan=lambda *_: "hang")) as (worse, _):
        apply(monkeypatch, worse.environment)
        store = Store(parse_uri(place.address))
        fetcher = Fetcher(max_in_flight=4)
        futures = [fetcher.submit(store, key) for key in DATA]
        assert futures[-1].cancel()
        fetcher.close()
        for future in futures[:-1]:
            with pytest.raises(StorageError, match="its fetcher is closed"):
                future.result()
        with pytest.raises(StorageError, match="its fetcher is closed"):
            fetcher.submit(store, "k0")
        fetcher.report_demand(1.0, True)
        fetcher.close()


def test_closing_waits_for_threads_that_are_in_python_unknown_to_it(store: Store) -> None:
    """As obstore's, which hand over answers: the interpreter's end would abort the process."""
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


def test_a_forgotten_fetcher_ends_its_thread(store: Store) -> None:
    fetcher = Fetcher()
    fetcher.submit(store, "k0").result()
    thread, gone = fetcher._engine._thread, weakref.ref(fetcher)
    del fetcher
    gc.collect()
    assert gone() is None
    thread.join(10.0)
    assert not thread.is_alive()


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
        assert fetcher.stats().finished == 16 * COUNT
    assert wrong == []


def test_it_grows_while_it_is_waited_for(store: Store) -> None:
    with Fetcher(max_in_flight=64) as fetcher:
        before = fetcher.target_in_flight
        for _ in range(3):
            for future in [fetcher.submit(store, key) for key in DATA]:
                future.result()
            fetcher.report_demand(1e9, True)  # a demand that no depth meets
        fetcher.submit(store, "k0").result()  # the notes before it have been taken
        assert before < fetcher.target_in_flight <= 64


def _submit_in_a_fork(fetcher: Fetcher, store: Store, said: "multiprocessing.SimpleQueue[str]") -> None:
    try:
        fetcher.submit(store, "k0")
    except StorageError as error:
        said.put(error.what)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_is_told_instead_of_waiting(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    with Fetcher() as fetcher:
        said = context.SimpleQueue()
        child = context.Process(target=_submit_in_a_fork, args=(fetcher, store, said))
        child.start()
        assert said.get() == "This fetcher belongs to the parent process."
        child.join()
        assert child.exitcode == 0


def test_the_interpreter_ends_in_the_middle_of_reads(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys; from stoker.storage.store import open_store; from stoker.storage.uri import parse_uri\n"
        "from stoker.storage.fetcher import Fetcher\n"
        "store, fetcher = open_store(parse_uri(sys.argv[1])), Fetcher()\n"
        "futures = [fetcher.submit(store, f'k{n}') for n in range(40)]\n"
        "futures[0].result(); print('one came')\n"
    )
    plan = Conditions(plan=lambda _number, _method, path: None if path.endswith("/k0") else "hang")
    with place.through(plan) as (worse, proxy):
        apply(monkeypatch, worse.environment)
        done = subprocess.run([sys.executable, "-c", script, place.address], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one came\n", "")
    assert any(seen.fault == "hang" for seen in proxy.seen)
