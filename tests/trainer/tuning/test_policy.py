"""The policy of `stoker tune`: tables of records in, the next trial out."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.config.settings import SECTION_OF
from stoker.tuning import policy
from stoker.tuning.levers import RULES, Facts, all_levers, choose_levers
from stoker.tuning.policy import BOUNDS, CONFIRM, DONE, Action, Context
from stoker_watch.diagnosis.engine import CATALOG
from stoker_watch.errors import UsageError
from stoker_watch.runs.records import PHASES
from stoker_watch.runs.schemas import Probe

FACTS = Facts(
    machine="here", data="d", device_kind="cpu", cores=2, best_precision="fp32", num_images=1000, epochs=10.0,
    cache_kinds=["disk", "ram"], recipe_batch_size=16, recipe_optimizer_is_sgd=True, size_divisor=32,
)  # fmt: skip
SETTINGS: dict[str, Any] = {
    "batch_size": 2, "grad_accum_steps": 1, "lr": 0.01, "workers": 1, "worker_processes": 0, "cache": "none",
    "jpeg_decoder": "cpu", "precision": "fp32", "compile": False, "cuda_graph": False,
    "activation_checkpointing": False,
    "sync": "plain", "eval_every": "50", "checkpoint_every": "2min", "max_duration": "10ep", "mosaic": 0.0,
    "warmup_steps": 10, "image_size": (320, 320), "model": "m",
}  # fmt: skip


def context(budget_s: float = 600.0, facts: Facts = FACTS) -> Context:
    return Context(choose_levers((), allow_accuracy=False), facts, SETTINGS, budget_s)


def line(action: Action, state: str = "passed", pairs: Any = (), **values: Any) -> Probe:
    """The last line of a trial."""
    pairs = list(pairs)
    ratio = policy.measure_ratio(pairs) if pairs else (0.0, 0.0, 0.0)
    return Probe(
        t=0.0, attempt=1, probe=action.kind, steps=10, before_img_per_s=1.0, after_img_per_s=1.0, ratio=ratio[0],
        ratio_low=ratio[1], ratio_high=ratio[2], trial=action.trial, state=state, changes=action.changes,
        fraction=action.fraction, pairs=pairs,
        kept=bool(pairs) and ratio[1] > policy.MIN_RATIO and action.kind in all_levers(),
        machine="here", data="d", **{"seconds": 20.0, **values},
    )  # fmt: skip


def bounds(wait_s: float = 0.08, compute_s: float = 0.02, eval_s: float = 0.0) -> Probe:
    return line(
        Action(BOUNDS, 1), phases={"input_wait": wait_s, "compute": compute_s},
        pairs=[(0.1, 0.02), (0.1, 0.021), (0.1, 0.02), (0.1, 0.02)],
        bounds={"train": 0.1, "step": 0.02, "load": 0.1, "eval": eval_s, "checkpoint": 0.01},
    )  # fmt: skip


def skip_unavailable(lines: list[Probe], situation: Context) -> Action:
    while (action := policy.next_action(lines, situation)).reason and action.kind != DONE:
        lines.append(line(action, "unavailable", reason=action.reason, seconds=0.0))
    return action


def test_the_first_trial_is_the_bounds_and_the_next_addresses_the_largest_loss() -> None:
    assert policy.next_action([], context()).kind == BOUNDS
    action = skip_unavailable(lines := [bounds()], context())
    assert (action.kind, action.changes, action.fraction) == ("cache", {"cache": "disk"}, pytest.approx(0.8, abs=0.01))
    assert {probe.probe for probe in lines[1:]} == {"jpeg_decoder", "compile", "cuda_graph", "sync"}
    assert skip_unavailable([bounds(wait_s=0.001, compute_s=0.1)], context()).kind == "batch_size"
    assert skip_unavailable([bounds(eval_s=30.0)], context()).kind == "eval_every"


def test_a_batch_takes_its_learning_rate_and_its_lengths_with_it() -> None:
    changes = skip_unavailable([bounds(wait_s=0.001, compute_s=0.1)], context()).changes
    assert changes["batch_size"] == 16
    assert changes["lr"] == pytest.approx(0.08)
    assert changes["eval_every"] == "6"  # 50 steps of 2 images
    assert "max_duration" not in changes or changes["max_duration"] == "10ep"


def test_a_trial_that_a_kill_interrupted_is_done_again() -> None:
    action = skip_unavailable(lines := [bounds()], context())
    for state in ("planned", "run"):
        again = policy.next_action([*lines, line(action, state)], context())
        assert (again.kind, again.trial, again.changes) == (action.kind, action.trial, action.changes)


def test_nothing_of_another_machine_or_data_counts() -> None:
    other = msgspec.structs.replace(FACTS, machine="there")
    assert policy.next_action([bounds()], context(facts=other)).kind == BOUNDS


def test_what_was_kept_is_measured_again_at_the_end_and_counts_only_then() -> None:
    action = skip_unavailable(lines := [bounds()], context(budget_s=75.0))
    lines.append(line(action, pairs=[(0.1, 0.05), (0.1, 0.051), (0.1, 0.05), (0.1, 0.05)], phases={"compute": 0.05}))
    assert policy.final_changes(lines, context())[0] == {}
    end = policy.next_action(lines, context(budget_s=75.0))
    assert (end.kind, end.changes) == (CONFIRM, {"cache": "disk"})
    slower = line(end, pairs=[(0.1, 0.1), (0.1, 0.11), (0.1, 0.09), (0.1, 0.1)])
    assert policy.final_changes([*lines, slower], context())[0] == {}
    faster = line(end, pairs=[(0.1, 0.05)] * 3 + [(0.1, 0.051)])
    assert policy.final_changes([*lines, faster], context())[0] == {"cache": "disk"}
    assert policy.next_action([*lines, faster], context()).kind == DONE


seconds = st.floats(0.001, 1.0)
windows = st.lists(st.tuples(seconds, seconds), min_size=4, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_tuning_ends_keeps_no_interval_with_1_and_continues_from_a_cut_file(data: st.DataObject) -> None:
    lines, situation = [bounds(eval_s=data.draw(st.floats(0, 60)))], context()
    for _ in range(200):
        action = policy.next_action(lines, situation)
        if action.kind == DONE:
            break
        cut = [*lines, line(action, data.draw(st.sampled_from(["planned", "run"])))]
        assert policy.next_action(cut, situation)[:3] == action[:3]
        if action.reason:
            lines.append(line(action, "unavailable", reason=action.reason, seconds=0.0))
        elif data.draw(st.booleans()):
            lines.append(line(action, "failed", reason="out of memory"))
        else:
            phases = {"input_wait": data.draw(seconds), "compute": data.draw(seconds)}
            lines.append(line(action, pairs=data.draw(windows), phases=phases))
    else:
        pytest.fail("the tuning does not end")
    now = policy.assess(policy.newest_lines(lines, FACTS), situation)
    assert now is not None
    assert all(trial.ratio_low > 1 for trial in now.kept)
    spent_s = sum(probe.seconds for probe in lines)
    assert spent_s <= situation.budget_s + policy.FIRST_TRIAL_S


@given(windows)
def test_the_ratio_lies_in_its_interval_and_swaps_with_the_sides(pairs: list[tuple[float, float]]) -> None:
    found, swapped = policy.measure_ratio(pairs), policy.measure_ratio([(b, a) for a, b in pairs])
    assert found.low <= found.ratio <= found.high
    assert swapped.ratio == pytest.approx(1 / found.ratio)
    assert swapped.low == pytest.approx(1 / found.high)


def test_more_pairs_are_measured_until_it_is_decided() -> None:
    assert policy.judge([(1.0, 0.5)] * 3) == "more"
    assert policy.judge([(1.0, 0.5), (1.0, 0.51)] * 2) == "better"
    assert policy.judge([(1.0, 1.0), (1.0, 1.001)] * 2) == "not better"
    noisy = [(1.0, 0.7), (1.0, 1.3)]
    assert policy.judge(noisy * 2) == "more"
    assert policy.judge(noisy * 8) == "not better"


def test_two_equal_configurations_are_rarely_found_different() -> None:
    """5 % at the most over all looks, by the quantiles; 2,000 tunings of equal sides with noise of 5 %."""
    import random

    random.seed(1)
    found = 0
    for _ in range(2000):
        pairs: list[tuple[float, float]] = []
        while (verdict := policy.judge(pairs)) == "more":
            pairs.append((math.exp(random.gauss(0, 0.05)), math.exp(random.gauss(0, 0.05))))
        found += verdict == "better"
    assert found / 2000 < 0.025  # one side of the interval


def test_the_same_training_has_the_same_losses() -> None:
    assert policy.same_training([1.0, 2.0], [1.0, 2.001], 1e-3)
    assert not policy.same_training([1.0, 2.0], [1.0, 2.01], 1e-3)
    assert not policy.same_training([1.0], [math.nan], 1e-3)
    assert not policy.same_training([1.0, 2.0], [1.0], 1e-3)


@pytest.mark.parametrize(
    ("lever", "noise", "bias", "reason"),
    [
        ("precision", 0.1, 0.0, ""),  # single images
        ("precision", 0.1, 0.2, "on average"),
        ("precision", 0.6, 0.0, "too much from each other"),  # a lever that makes losses random is not let through
        ("workers", 0.0, 0.0, ""),
        ("workers", 0.001, 0.0, "another training"),
    ],
)
@pytest.mark.parametrize("half", ["before updates", "after updates"])
def test_rounding_may_change_the_loss_of_single_images(
    lever: str, noise: float, bias: float, reason: str, half: str
) -> None:
    random = np.random.default_rng(0)
    before, after = np.full(64, 3.0), np.full(64, 3.0)
    part = slice(32) if half == "before updates" else slice(32, None)
    after[part] *= 1 + bias + random.choice([-noise, noise], 32)
    found = policy.why_another_training(all_levers()[lever], before.tolist(), after.tolist())
    assert reason in found if reason else not found


@pytest.mark.parametrize("lever", ["precision", "workers"])
def test_losses_that_are_not_finite_are_another_training(lever: str) -> None:
    """A process leaves them out."""
    assert "not finite" in policy.why_another_training(all_levers()[lever], [1.0] * 16, [1.0] * 15)


def test_as_many_images_are_compared_as_the_noise_of_means_needs_and_the_time_allows() -> None:
    precision, workers = all_levers()["precision"], all_levers()["workers"]
    assert policy.num_compared(workers, 8, 1e-3) == policy.num_compared(precision, 8, 10.0) == 16
    assert policy.num_compared(precision, 8, 0.25) == 40
    assert policy.num_compared(precision, 8, 1e-3) == 64


def test_the_table_names_settings_phases_rules_and_causes_that_exist() -> None:
    for lever in all_levers().values():
        assert lever.setting in SECTION_OF
        assert lever.loss in (*PHASES, "ap")
        assert bool(lever.values) + bool(lever.rule) == (lever.loss != "ap")
        assert not lever.rule or lever.rule in RULES
        assert lever.cause in {*CATALOG, "tuned"}
        assert lever.needs in ("", "cuda", "epochs", "ranks")


def test_unknown_levers_and_those_that_cost_accuracy_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'workers'"):
        choose_levers(["worker"], allow_accuracy=False)
    with pytest.raises(UsageError, match="may cost accuracy"):
        choose_levers(["model"], allow_accuracy=False)
    assert "image_size" in {lever.name for lever in choose_levers((), allow_accuracy=True)}


def test_suggestions_come_after_the_speed_and_count_only_with_their_interval() -> None:
    """Three AP pairs by hand: gains 0.02, 0.03, 0.04 have the mean 0.03 and the interval ± 4.303 · 0.01 / sqrt(3)."""
    gain = policy.measure_gain([(0.30, 0.32), (0.31, 0.34), (0.29, 0.33)])
    assert gain == pytest.approx((0.03, 0.0052, 0.0548), abs=1e-4)
    facts = msgspec.structs.replace(FACTS, suggestions={"repeat_thresh": {"repeat_thresh": 0.1}})
    levers = choose_levers(["repeat_thresh", "workers"], allow_accuracy=True)
    situation = Context(levers, facts, SETTINGS | {"workers": "auto", "repeat_thresh": 0.0}, 600.0)
    lines = [bounds(wait_s=0.0001)]
    action = policy.next_action(lines, situation)
    assert (action.kind, action.changes) == ("repeat_thresh", {"repeat_thresh": 0.1})
    measured: dict[str, Any] = {"ap_pairs": [(0.3, 0.32)] * 3, "ap_gain": (0.02, 0.02, 0.02)}
    refuted, proven = (msgspec.structs.replace(line(action, **measured), kept=kept) for kept in (False, True))
    assert policy.final_changes([*lines, refuted], situation)[0] == {}
    assert policy.final_changes([*lines, proven], situation)[0] == {"repeat_thresh": 0.1}
    assert policy.next_action([*lines, proven], situation).kind == DONE, "no confirmation of a speed"
    short = Context(levers, facts, situation.settings, 25.0)
    assert policy.next_action(lines, short).reason == "the budget is spent"
