"""Waits and budgets of retries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.storage import failures
from stoker.storage.failures import Failure, RetryBudget, RetryState, Timeouts

BUSY = Failure("retryable", "503 SlowDown", "", status=503)
DENIED = Failure("denied", "403", "", status=403)


def test_permanent_failures_are_not_retried() -> None:
    assert RetryState(Timeouts(), RetryBudget()).next_wait_s(DENIED) is None


@given(st.floats(0.5, 1000))
def test_waits_stay_within_the_total_time(total_s: float) -> None:
    budget = RetryBudget()
    tries = RetryState(Timeouts(total_s=total_s), budget)
    for number in range(8):
        wait = tries.next_wait_s(BUSY)
        if wait is None:
            break
        assert 0 <= wait <= min(failures.BACKOFF_MAX_S, failures.BACKOFF_BASE_S * 2**number)
        assert wait < total_s
    assert budget.retries == budget.requests - 1


def test_waits_are_jittered_over_the_whole_range() -> None:
    waits = [RetryState(Timeouts(), RetryBudget()).next_wait_s(BUSY) or 0.0 for _ in range(400)]
    assert min(waits) < 0.1 * failures.BACKOFF_BASE_S
    assert max(waits) > 0.9 * failures.BACKOFF_BASE_S


@given(st.integers(0, 3000), st.integers(1, 500))
def test_retries_are_limited_by_the_budget(requested: int, retried: int) -> None:
    """All at one moment: only the burst, and the fraction of earlier requests, are available at once."""
    budget = RetryBudget()
    now = budget._refilled_s
    for _ in range(requested):
        budget.count_request()
    at_once = sum(budget.take_retry(now) == 0.0 for _ in range(retried))
    assert at_once == min(retried, int(failures.BUDGET_BURST))


def test_store_that_is_down_gets_retries_at_the_minimum_rate() -> None:
    """1,000 requests that all fail, at once: retries come at the floor's rate, however many want one."""
    budget = RetryBudget()
    now = budget._refilled_s
    waits = sorted(budget.take_retry(now) for _ in range(1000))
    in_ten_seconds = sum(wait <= 10.0 for wait in waits)
    assert in_ten_seconds == pytest.approx(failures.BUDGET_BURST + 10 * failures.BUDGET_PER_S, abs=1)


def test_connection_failures_of_an_unknown_endpoint_end_early() -> None:
    lost = Failure("retryable", "no connection", "", connection_failed=True)
    new, proved = RetryBudget(), RetryBudget()
    proved.has_responded = True
    patience = {}
    for name, budget in (("new", new), ("proved", proved)):
        tries = RetryState(Timeouts(total_s=60.0), budget)
        tries._start_s -= 60.0 / failures.CONNECT_TIMEOUT_DIVISOR + 1.0
        patience[name] = tries.next_wait_s(lost)
    assert patience["new"] is None
    assert patience["proved"] is not None


def test_timeout_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Timeouts.from_environment() == Timeouts(120.0)
    monkeypatch.setenv("STOKER_STORAGE_TIMEOUT_S", "30")
    assert Timeouts.from_environment() == Timeouts(30.0)
    for wrong in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("STOKER_STORAGE_TIMEOUT_S", wrong)
        with pytest.raises(ConfigError, match="STOKER_STORAGE_TIMEOUT_S"):
            Timeouts.from_environment()
