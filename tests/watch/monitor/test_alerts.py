"""When alert rules fire, and how often."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.errors import ConfigError
from stoker_watch.findings.finding import Finding
from stoker_watch.monitor.alerts import MEASURED, QUANTITIES, Alerts, parse_rule
from stoker_watch.runs.records import PHASES
from stoker_watch.runs.schemas import DeviceSample, Event, GpuSample, StepWindow


def window(t: float, *, compute: float = 1.0, wall_s: float = 1.0, **more: object) -> StepWindow:
    phases = {"compute": compute * wall_s, "input_wait": (1 - compute) * wall_s}
    fields = {"attempt": 1, "step": int(t), "window_steps": 1, "num_images": 8, "devices": 1} | more
    return StepWindow(t=t, wall_s=wall_s, phases=phases, **fields)


def sample(t: float, **more: object) -> DeviceSample:
    return DeviceSample(t=t, attempt=1, **more)


def alerts_of(rule: str, *lines: object) -> list[Finding]:
    alerts = Alerts([parse_rule(rule)], start_t=0.0)
    return [alert for line in lines for alert in alerts.observe(line)]


def times_of(rule: str, *lines: Any) -> list[float]:
    """When the rule fires."""
    alerts = Alerts([parse_rule(rule)], start_t=0.0)
    return [line.t for line in lines if alerts.observe(line)]


def test_a_rule_uses_the_mean_over_its_duration() -> None:
    bursty = [window(float(t), compute=1.0 if t % 2 else 0.2) for t in range(1, 400)]
    (alert,) = alerts_of("idle > 30% for 5min", *bursty)
    assert times_of("idle > 30% for 5min", *bursty) == [pytest.approx(270, abs=2)]  # 90 % of five minutes
    assert alert.evidence[0].value == pytest.approx(0.4, abs=0.01)
    assert "40.0 %" in alert.title
    assert not alerts_of("idle > 45% for 5min", *bursty)


def test_windows_are_weighted_by_their_length() -> None:
    lines = [window(10.0, compute=0.0, wall_s=10.0), window(11.0, compute=1.0)]
    assert alerts_of("input_wait > 80% for 12s", *lines)
    assert not alerts_of("input_wait > 95% for 12s", *lines)


def test_an_alert_fires_again_only_after_its_condition_was_false() -> None:
    full = [sample(float(t), memory_used_bytes=98 if t in (3, 4, 7) else 50, memory_limit_bytes=100) for t in range(9)]
    assert times_of("host_memory > 95%", *full) == [3.0, 7.0]


def test_a_quantity_that_is_not_measured_never_fires() -> None:
    assert not alerts_of("gpu_utilization < 99%", *(sample(float(t)) for t in range(5)))
    external = [window(float(t)) for t in range(5)]
    for line in external:
        line.phases = {"unattributed": 1.0}
    assert not alerts_of("idle > 1%", *external)


def test_idle_uses_gpu_utilization_before_the_ledger() -> None:
    busy = [sample(float(t), gpus=[GpuSample(index=0, utilization=0.9)]) for t in range(1, 20)]
    waits = [window(t + 0.5, compute=0.1) for t in range(1, 20)]
    both = [line for pair in zip(busy, waits, strict=True) for line in pair]
    assert not alerts_of("idle > 50% for 10s", *both)
    assert alerts_of("idle > 50% for 10s", *waits)


def test_seconds_since_step_counts_from_the_last_step() -> None:
    lines = [window(5.0), *(sample(float(t)) for t in range(6, 100))]
    assert times_of("seconds_since_step > 1min", *lines) == [66.0]


def test_event_rules_fire_each_time() -> None:
    fault = Event(t=1.0, attempt=1, kind="gpu_fault", text="GPU 0: Xid 79")
    assert [alert.title for alert in alerts_of("on gpu_fault", fault, fault)] == ["gpu_fault: GPU 0: Xid 79"] * 2
    assert not alerts_of("on failed", fault)


@given(
    st.sampled_from(sorted(QUANTITIES)), st.sampled_from([">", ">=", "<", "<="]), st.floats(0, 1e6), st.integers(0, 90)
)
def test_a_valid_rule_is_parsed_as_written(name: str, compare: str, number: float, minutes: int) -> None:
    text = f"{name}{compare}{number:.6f}" + (f" for {minutes} min" if minutes else "")
    rule = parse_rule(text)
    assert (rule.name, rule.compare, rule.duration_s) == (name, compare, 60.0 * minutes)
    assert rule.threshold == pytest.approx(number, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("idle", "not a valid rule"),
        ("idle > 30 parsecs", "not a valid rule"),
        ("idel > 30%", "idle, seconds_since_step"),
        ("on sunday", "gpu_fault"),
        ("idle > 30% for 25h", "24h at most"),
    ],
)
def test_an_invalid_rule_is_an_error_that_names_the_choices(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_rule(text)


def test_every_quantity_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/watch.md").read_text()
    rows = re.findall(r"^\| `([a-z_0-9]+)` \|", page.partition("| quantity | meaning |")[2], re.MULTILINE)
    assert rows == [name for name in QUANTITIES if name not in PHASES or name == "idle"]


def test_every_quantity_is_a_field_of_the_records() -> None:
    records = {"gpu": GpuSample, "host": DeviceSample, "step": StepWindow, "sample": DeviceSample, "window": StepWindow}
    for table, rows in {"sample": MEASURED.sample, "window": MEASURED.window, **MEASURED.prometheus}.items():
        for row in rows.values():
            fields = (GpuSample if row.gpus else records[table]).__struct_fields__
            assert {row.field, row.per or row.field} <= set(fields)
