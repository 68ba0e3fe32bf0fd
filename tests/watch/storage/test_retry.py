"""Waits of retries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.errors import ConfigError
from stoker_watch.storage import failures
from stoker_watch.storage.failures import Failure, RequestCounters, RetryState, Timeouts

BUSY = Failure("retryable", "503 SlowDown", "", status=503)
DENIED = Failure("denied", "403", "", status=403)


def test_permanent_failures_are_not_retried() -> None:
    assert RetryState(Timeouts(), RequestCounters()).next_wait_s(DENIED) is None


@given(st.floats(0.5, 1000))
def test_waits_stay_within_the_total_time(total_s: float) -> None:
    counters = RequestCounters()
    tries = RetryState(Timeouts(total_s=total_s), counters)
    for number in range(8):
        wait = tries.next_wait_s(BUSY)
        if wait is None:
            break
        assert 0 <= wait <= min(failures.BACKOFF_MAX_S, failures.BACKOFF_BASE_S * 2**number)
        assert wait < total_s
    assert counters.retries == counters.requests - 1


def test_waits_are_jittered_over_the_whole_range() -> None:
    waits = [RetryState(Timeouts(), RequestCounters()).next_wait_s(BUSY) or 0.0 for _ in range(400)]
    assert min(waits) < 0.1 * failures.BACKOFF_BASE_S
    assert max(waits) > 0.9 * failures.BACKOFF_BASE_S


def test_connection_failures_of_an_unknown_endpoint_end_early() -> None:
    lost = Failure("retryable", "no connection", "", connection_failed=True)
    new, proved = RequestCounters(), RequestCounters()
    proved.has_responded = True
    patience = {}
    for name, counters in (("new", new), ("proved", proved)):
        tries = RetryState(Timeouts(total_s=60.0), counters)
        tries._spent_s += 60.0 / failures.CONNECT_TIMEOUT_DIVISOR + 1.0
        patience[name] = tries.next_wait_s(lost)
    assert patience["new"] is None
    assert patience["proved"] is not None


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(failures.time, "monotonic", lambda: now)
    tries, stall_s = RetryState(Timeouts(), RequestCounters()), Timeouts().stall_s
    now += 3600.0  # stopped, then the stalled connection is closed
    wait_s = tries.next_wait_s(BUSY)
    assert wait_s is not None
    attempts = 1
    while wait_s is not None:
        now += wait_s + stall_s
        wait_s = tries.next_wait_s(BUSY)
        attempts += 1
    assert 5 <= attempts <= 8, "120 s, of which the first attempt counts for 30 and the others for 15 and their wait"
    assert "times in 3" in tries.describe(), "what a clock saw: an hour more"


def test_timeout_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Timeouts.from_environment() == Timeouts(120.0)
    monkeypatch.setenv("STOKER_STORAGE_TIMEOUT_S", "30")
    assert Timeouts.from_environment() == Timeouts(30.0)
    for wrong in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("STOKER_STORAGE_TIMEOUT_S", wrong)
        with pytest.raises(ConfigError, match="STOKER_STORAGE_TIMEOUT_S"):
            Timeouts.from_environment()
