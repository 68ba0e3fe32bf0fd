"""The lease of a run in a bucket: one holder at a time, on both kinds of store; the dead are replaced at once."""

import subprocess
import sys
import time

import msgspec
import pytest

from stoker.errors import Conflict, StorageError, UsageError
from stoker.storage.lease import Lease, LeaseHolder, LeaseLost, acquire
from stoker.storage.store import open_store
from stoker.storage.uri import StorageUri, parse_uri
from tests.storage.proxy import Conditions
from tests.storage.servers import Place, Server, apply


@pytest.fixture(params=["s3", "google"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    server: Server = request.getfixturevalue(request.param)
    place = server.bucket()
    apply(monkeypatch, place.environment)
    return place


@pytest.fixture
def address(place: Place) -> StorageUri:
    return parse_uri(f"{place.address}/runs/x/lease.json")


def take(address: StorageUri, said: list[str] | None = None) -> Lease:
    lease = acquire(address, on_message=(said if said is not None else []).append, check_interrupted=lambda: None)
    assert lease is not None
    return lease


def holder(address: StorageUri) -> LeaseHolder:
    return msgspec.json.decode(open_store(address).read(address.key), type=LeaseHolder)


def put(address: StorageUri, found: LeaseHolder) -> None:
    open_store(address).write(address.key, msgspec.json.encode(found))


def test_a_second_process_is_refused_until_it_is_given_back(address: StorageUri):
    first = take(address)
    with pytest.raises(UsageError, match="Another process is training") as caught:
        take(address)
    assert str(holder(address)) in str(caught.value)
    assert caught.value.location == str(address.parent)
    first.renew()
    first.release()
    second = take(address)
    with pytest.raises(LeaseLost, match="taken over"):
        first.renew()
    with pytest.raises(LeaseLost):
        first.ensure_held()
    second.ensure_held()


HOLD = """
import sys
from stoker.storage.uri import parse_uri
from stoker.storage.lease import acquire
acquire(parse_uri(sys.argv[1]), on_message=print, check_interrupted=lambda: None)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_dead_process_of_this_machine_is_replaced_at_once(address: StorageUri):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(address)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(UsageError, match="Another process") as caught:
        take(address)
    assert f"process {process.pid}" in str(caught.value)
    process.kill()
    process.wait()
    said: list[str] = []
    take(address, said)
    assert said == []


def test_a_number_that_is_used_again_is_another_process(address: StorageUri):
    take(address)
    put(address, msgspec.structs.replace(holder(address), process_start=1.0))
    take(address)


def test_of_another_machine_it_has_to_expire(address: StorageUri):
    take(address)
    put(address, msgspec.structs.replace(holder(address), machine="other", host="far", renew_time=time.time() - 59.5))
    said: list[str] = []
    take(address, said)
    assert len(said) == 1
    assert "far" in said[0]


def test_of_another_machine_that_renews_it_lives(address: StorageUri):
    """The renewal comes while we look: at the second look it is there."""
    take(address)
    far = msgspec.structs.replace(holder(address), machine="other", host="far")
    put(address, far)

    def renew() -> None:
        put(address, msgspec.structs.replace(far, renew_time=time.time()))

    with pytest.raises(UsageError, match="Another process") as caught:
        acquire(address, on_message=lambda _: None, check_interrupted=renew)
    assert "far" in str(caught.value)


def test_waiting_can_be_ended(address: StorageUri):
    take(address)
    put(address, msgspec.structs.replace(holder(address), machine="other"))

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        acquire(address, on_message=lambda _: None, check_interrupted=stop)


def test_an_answer_that_is_lost_loses_no_lease(place: Place, address: StorageUri, monkeypatch: pytest.MonkeyPatch):
    """Every other write is done and its answer never comes."""
    puts = 0

    def plan(_number: int, method: str, _path: str):
        nonlocal puts
        puts += method == "PUT"
        return "lose" if method == "PUT" and puts % 2 else None

    with place.through(Conditions(plan=plan)) as (worse, _):
        apply(monkeypatch, worse.environment)
        lease = take(address)
        for _ in range(3):
            lease.renew()
        lease.ensure_held()
    assert puts > 4


def test_removed_by_hand_is_lost(address: StorageUri):
    lease = take(address)
    open_store(address).delete(address.key)
    with pytest.raises(LeaseLost) as caught:
        lease.renew()
    assert "removed" in str(caught.value)


def test_a_renewal_whose_answers_were_all_lost_is_found_again(
    place: Place, address: StorageUri, monkeypatch: pytest.MonkeyPatch
):
    """It failed for us and not for the store: the object is another version than we know, and ours."""
    with place.through() as (worse, proxy):
        apply(monkeypatch, {**worse.environment, "STOKER_STORAGE_TIMEOUT_S": "1"})
        lease = take(address)
        proxy.conditions = Conditions(plan=lambda _n, method, _path: "lose" if method == "PUT" else None)
        with pytest.raises(StorageError) as caught:
            lease.renew()
        assert not isinstance(caught.value, Conflict)
        proxy.conditions = Conditions()
        lease.renew()
        lease.renew()
