"""The choice among predicted rows."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.planning.duration import MachinePlan, Placement, plan_machine
from stoker.planning.machines import THIS_MACHINE, Estimate, exactly
from stoker.planning.recommend import (
    Limits,
    compact_duration,
    describe_cost,
    describe_duration,
    meets,
    money,
    recommend,
)
from tests.trainer.planning.jobs import job, machine, step

BASE = plan_machine(Placement(machine=machine(), gpus=1), step(), job())


def row(name: str, hours: float, dollars: float | None, *, band: float = 0.2, **changes: object) -> MachinePlan:
    seconds = 3600 * hours
    return msgspec.structs.replace(
        BASE,
        machine=name,
        duration_s=Estimate(seconds * (1 - band), seconds, seconds * (1 + band)),
        cost=None if dollars is None else Estimate(dollars * (1 - band), dollars, dollars * (1 + band)),
        **changes,
    )


SLOW, MIDDLE, FAST = row("slow", 10, 5), row("middle", 4, 8), row("fast", 1, 20)
ROWS = [SLOW, MIDDLE, FAST]


@pytest.mark.parametrize(("limits", "choice", "words"), [
    (Limits(), "slow", "the cheapest of 3 machines that can train this"),
    (Limits(by_s=5 * 3600), "middle", "the cheapest of 2 machines that can train this within 5 h"),
    (Limits(by_s=4.5 * 3600), "fast", "fast"),
    (Limits(budget=10), "middle", "the fastest of 2 machines that can train this for at most $10.00"),
    (Limits(by_s=5 * 3600, budget=9), "middle", "within 5 h for at most $9.00"),
    (Limits(by_s=0.5 * 3600), None, "no machine trains this within 30 min"),
])  # fmt: skip
def test_choice(limits: Limits, choice: str | None, words: str) -> None:
    found = recommend(ROWS, limits)
    assert (None if found.choice is None else ROWS[found.choice].machine) == choice
    assert words in found.summary
    assert (found.changes == []) == (choice is not None)


def test_a_choice_that_only_holds_as_expected_says_so() -> None:
    found = recommend([MIDDLE], Limits(by_s=4.5 * 3600))
    assert found.choice == 0
    assert "at the slow end of its band it takes 4.8 h" in found.reasons[0]


def test_machines_whose_bands_overlap_are_not_decided_silently() -> None:
    rows = [row("a", 10, 5), row("b", 4, 5.5), row("c", 1, 20)]
    (sentence,) = (reason for reason in recommend(rows, Limits()).reasons if "Not decided" in reason)
    assert "its band overlaps with b, which may be cheaper" in sentence
    assert not any("Not decided" in reason for reason in recommend([rows[0], rows[2]], Limits()).reasons)


def test_why_not_the_others() -> None:
    rows = [
        *ROWS, row("beaten", 11, 9), row("tiny", 1, 1, problem="does not fit: 20 of 15 GiB", fits="no"),
        row("starved", 9, 4, limited_by="decoding"),
    ]  # fmt: skip
    found = recommend(rows, Limits(by_s=5 * 3600))
    reasons = {verdict.machine: verdict.reason for verdict in found.verdicts}
    assert reasons["middle"] == "recommended"
    assert reasons["slow"] == "too slow"
    assert reasons["fast"] == "faster, but dearer"
    assert "does not fit" in reasons["tiny"]
    assert "decoding delivers" in reasons["starved"]
    assert recommend(rows[:4], Limits()).verdicts[3].reason == "slower and dearer"
    unsure = recommend([row("unsure", 4.5, 3), MIDDLE], Limits(by_s=5 * 3600))
    assert unsure.choice == 1
    assert unsure.verdicts[0].reason == "cheaper, but it takes up to 5.4 h and $3.60 at the bad end of its band"


def test_what_to_change() -> None:
    late = recommend(ROWS, Limits(by_s=0.75 * 3600))
    assert any(change.startswith("--by 60min: fast") for change in late.changes)
    assert any("fewer --epochs" in change for change in late.changes)
    poor = recommend(ROWS, Limits(budget=2))
    assert any(change.startswith("--budget 5.00") for change in poor.changes)
    assert any(change.startswith("--spot") for change in poor.changes)
    assert not any(c.startswith("--by") for c in recommend(ROWS, Limits(by_s=20 * 3600, budget=2)).changes)
    both = recommend(ROWS, Limits(by_s=2 * 3600, budget=6)).changes
    assert [change.partition(",")[0] for change in (both[0], both[2])] == [
        "--by 600min: slow is then in time", "--budget 20.00: enough for fast",
    ]  # fmt: skip
    full = recommend([row("tiny", 1, 1, problem="does not fit", fits="no")], Limits())
    assert "--image-size" in full.changes[0]
    assert any("--gpus 2 4 8" in change for change in late.changes)
    several = recommend([row("eight", 1, 9, gpus=8)], Limits())
    assert any("tested on CPUs only" in reason for reason in several.reasons)


def test_the_own_machine_needs_no_rent() -> None:
    own = row(THIS_MACHINE, 4, None)
    with_rented = recommend([own, SLOW], Limits(by_s=20 * 3600))
    assert with_rented.choice == 1
    assert "This machine meets it, too" in with_rented.reasons[-1]
    alone = recommend([own, SLOW], Limits(by_s=6 * 3600))
    assert alone.choice == 0
    assert "without rent" in alone.summary


costs = st.floats(0.01, 1e4)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0.01, 1e3), costs), min_size=1, max_size=8), st.floats(0.01, 1e3), costs)
def test_no_possible_row_is_better_than_the_choice(
    pairs: list[tuple[float, float]], by_h: float, budget: float
) -> None:
    rows = [row(str(k), hours, dollars) for k, (hours, dollars) in enumerate(pairs)]
    limits = Limits(by_s=3600 * by_h, budget=budget)
    found = recommend(rows, limits)
    sure = [r for r in rows if meets(r, limits) == "sure"]
    if found.choice is None:
        assert not sure
        assert found.changes
        return
    chosen = rows[found.choice]
    assert meets(chosen, limits) in ("sure", "likely")
    assert chosen.cost is not None
    assert all(r.cost is None or r.cost.expected >= chosen.cost.expected for r in sure)


@pytest.mark.parametrize(("seconds", "text"), [
    (45, "45 s"), (99, "99 s"), (1620, "27 min"), (7000, "117 min"), (12240, "3.4 h"), (40 * 3600, "40 h"),
    (5 * 86400, "5 d"),
])  # fmt: skip
def test_durations_in_words(seconds: float, text: str) -> None:
    assert compact_duration(seconds) == text


def test_units_in_words() -> None:
    assert describe_duration(Estimate(1300, 1620, 2400)) == "27 min (22–40)"
    assert describe_cost(Estimate(0.35, 0.42, 0.61)) == "$0.42 (0.35–0.61)"
    assert describe_cost(None) == "n/a"
    assert [money(v) for v in (0.004, 0.5, 12.345, 1234.5)] == ["$0.004", "$0.50", "$12.35", "$1,234"]
    assert describe_cost(exactly(0.0)) == "$0.00 (0.00–0.00)"
