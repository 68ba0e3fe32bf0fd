"""The findings together: which supersede others, their order, experiments, and properties for any records."""

import dataclasses
import io
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stoker_watch.diagnosis.causes.cause import fill_apis
from stoker_watch.diagnosis.causes.learning import merge_divergence
from stoker_watch.diagnosis.engine import (
    CATALOG,
    apply_probe_result,
    diagnose,
    run_rules,
    write_findings,
)
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.findings.finding import Evidence, Finding
from stoker_watch.report.explain import explain_run, print_explanation
from stoker_watch.runs.records import (
    CONFIG,
    DEVICES,
    EVENTS,
    FINDINGS,
    PROBES,
    QUARANTINE,
    STACKS,
    STEPS,
    TRACES,
)
from stoker_watch.runs.schemas import Probe
from tests.watch.diagnosis.built import FACTS, GIB, NATIVE_CONFIG, T0, make_run
from tests.watch.diagnosis.cases import CASES, DECODING, FETCHING, _measured

FILES = (CONFIG, DEVICES, EVENTS, PROBES, QUARANTINE, STACKS, STEPS, TRACES)


def probe(ratio: float, what: str = "cached_batch") -> Probe:
    return Probe(t=1.0, attempt=1, probe=what, steps=30, before_img_per_s=100.0, after_img_per_s=100.0 * ratio,
                 ratio=ratio, ratio_low=ratio - 0.01, ratio_high=ratio + 0.01)  # fmt: skip


def names(found: list[Finding]) -> list[str]:
    return [finding.id for finding in found]


def test_the_most_exact_of_several_causes_of_the_same_wait_is_given(tmp_path: Path) -> None:
    few = NATIVE_CONFIG.replace('workers = "auto"', "workers = 1")
    waits: dict[str, Any] = {
        "fractions": {"input_wait": 0.3},
        "host": lambda _: {"cpu_core_utilization": [0.9, 0.1, 0.1, 0.1]},
    }
    for number, (more, cause) in enumerate((
        ({}, "input_bound"), ({"stages": DECODING}, "slow_decode"),
        ({"stages": DECODING, "config": few}, "too_few_workers"),
        ({"stages": DECODING, "config": few,
          "host": lambda _: {"throttled_s": 1.0, "cpu_core_utilization": [0.9, 0.1, 0.1, 0.1]}}, "cpu_quota"),
    )):  # fmt: skip
        assert names(diagnose(make_run(tmp_path / str(number), **(waits | more)))) == [cause]


def test_the_order_is_imminent_failure_then_loss_then_the_rest_then_info(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", gpus=1, facts=FACTS, fractions={"eval": 0.3, "input_wait": 0.12, "recovery": 0.15},
        gpu=lambda *_: {"memory_used_bytes": 2**30, "utilization": 0.6}, host=lambda _: {"disk_free_bytes": 10**6},
        quarantined=["a.jpg"],
    )  # fmt: skip
    assert names(diagnose(run)) == [
        "disk_nearly_full", "evaluation_heavy", "costly_restarts", "input_bound", "bad_images",
        "gpu_oversized",
    ]  # fmt: skip
    loss = make_run(tmp_path / "loss", fractions={"eval": 0.3, "input_wait": 0.22})  # a warning that cost more
    assert names(diagnose(loss)) == ["input_bound", "evaluation_heavy"]


def test_the_time_after_the_last_step_is_a_hang_once_it_is_named(tmp_path: Path) -> None:
    nothing = {"window_steps": 0, "phases": {"unattributed": 1.0}}
    window = {"window": lambda s: nothing if s > 25 else {}, "end": None, "external": True, "config": None}
    idle = window | {"host": lambda s: {"process_cpu": 0.01} if s > 25 else {}}
    for name, job, loss in (("hung", idle, "hang"), ("busy", window, "startup")):
        explanation = explain_run(make_run(tmp_path / name, **job))
        assert ("hang" in {row.phase for row in explanation.phases}) == (name == "hung")
        assert sum(row.device_s for row in explanation.phases) == pytest.approx(explanation.device_s)
        assert explanation.largest_loss is not None
        assert explanation.largest_loss.phase == loss


def test_the_start_is_not_the_largest_loss_beside_a_fault(tmp_path: Path) -> None:
    for fraction, phase in ((0.3, "input_wait"), (0.05, "startup")):
        run = make_run(tmp_path / phase, startup=30, fractions={"input_wait": fraction})
        loss = explain_run(run).largest_loss
        assert loss is not None
        assert loss.phase == phase


def test_a_job_with_a_clock_is_not_called_untimed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", external=True, config=None, fractions={"unattributed": 1.0})
    explanation = explain_run(run)
    for coverage, text in (
        ({"inside the job": "recorded: compilations of jax 0.10; its steps are those of the output"}, "saw no step"),
        (
            {"inside the job": "recorded: torch in a process, without a known data loader"},
            "where its batches come from",
        ),
        ({"inside the job": "not recorded: --no-hook"}, "the job was not timed from inside"),
    ):
        output = io.StringIO()
        print_explanation(msgspec.structs.replace(explanation, coverage=coverage), output, width=200)
        assert text in output.getvalue()


def test_an_end_by_request_does_not_hide_the_fault(tmp_path: Path) -> None:
    stopped = [("preempted", "SIGTERM", {})]
    run = make_run(tmp_path / "run", fractions={"input_wait": 0.12, "idle": 0.0}, events=stopped, end=None)
    assert names(diagnose(run))[0] == "input_bound"
    info = make_run(tmp_path / "info", external=True, config=None, startup=70, events=stopped, end=None)
    assert names(diagnose(info)) == ["preempted", "startup_heavy"]


def test_contention_is_the_last_of_its_severity(tmp_path: Path) -> None:
    host = {"cpu_core_utilization": [1.0] * 4, "process_cpu": 0.5, "threads_running": 2.0}
    run = make_run(tmp_path / "run", fractions={"eval": 0.3}, host=lambda _: host)
    found = diagnose(run)
    assert names(found) == ["evaluation_heavy", "cpu_contention"]
    assert (found[0].lost_device_s or 0.0) < (found[1].lost_device_s or 0.0)


def test_what_is_set_already_or_does_not_exist_is_not_advised(tmp_path: Path) -> None:
    native = diagnose(make_run(tmp_path / "ours", fractions={"input_wait": 0.3}, stages=FETCHING))[0]
    assert (native.id, native.command, native.config_patch) == ("slow_storage", "--cache disk", {"cache": "disk"})
    cached = NATIVE_CONFIG.replace('cache = "none"', 'cache = "disk"')
    done = diagnose(make_run(tmp_path / "done", fractions={"input_wait": 0.3}, stages=FETCHING, config=cached))[0]
    assert (done.id, done.command, done.config_patch) == ("slow_storage", None, {})
    assert done.fix == f"{native.fix} (cache is disk already)"
    case = _measured(fractions={"input_wait": 0.3}, host=lambda _: {"process_cpu": 0.75})
    external = diagnose(make_run(tmp_path / "others", **case))[0]
    assert (external.id, external.command, external.config_patch) == ("heavy_place", None, {})
    assert fill_apis(CATALOG["slow_storage"].external_fix) in external.fix


def test_the_price_of_a_measured_run_comes_from_its_first_event(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **_measured(fractions={"input_wait": 0.3}))
    events = (
        (run / EVENTS)
        .read_text()
        .replace('"kind":"started"', '"kind":"started","data":{"price_per_device_hour":7.2}', 1)
    )
    (run / EVENTS).write_text(events)
    (finding, *_) = diagnose(run)
    assert finding.lost_device_s is not None
    assert finding.lost_cost == pytest.approx(finding.lost_device_s * 7.2 / 3600)


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    failed = [("failed", "[Errno 28] No space left on device", {"exit_code": 3})]
    for events, cause in (([], "disk_nearly_full"), (failed, "disk_full")):
        run = make_run(tmp_path / cause, host=lambda _: {"disk_free_bytes": 10**6}, events=events, end=None)
        assert [name for name in names(diagnose(run)) if name.startswith("disk")] == [cause]


def test_a_fall_of_ap_on_few_boxes_is_no_overfitting(tmp_path: Path) -> None:
    for boxes, found in ((3, []), (300, ["overfitting"]), (None, ["overfitting"])):
        told = [{"ap": ap} | ({} if boxes is None else {"boxes": boxes}) for ap in (0.5, 0.9, 0.8, 0.7)]
        events = [("evaluated", "", {"metrics": metrics}) for metrics in told]
        run = make_run(tmp_path / str(boxes), events=events, event_t=lambda n: T0 + 10 + 5 * n)
        assert names(diagnose(run)) == found


def test_a_probe_confirms_refutes_or_leaves_a_cause_open() -> None:
    finding = Finding(id="input_bound", severity="critical", title="", confidence=0.8,
                      evidence=[Evidence(text="", value=0.3)])  # fmt: skip
    confirmed = apply_probe_result(finding, {"cached_batch": probe(1.4)})
    assert (confirmed.severity, confirmed.confidence) == ("critical", 0.95)
    assert confirmed.probe_result is not None
    assert confirmed.probe_result.startswith("confirmed by cached batch: 100.0 img/s before, 140.0 after")
    refuted = apply_probe_result(finding, {"cached_batch": probe(1.0)})
    assert (refuted.severity, refuted.confidence) == ("info", 0.2)
    assert refuted.probe_result is not None
    open_ = apply_probe_result(
        finding, {"cached_batch": msgspec.structs.replace(probe(1.1), ratio_low=0.9, ratio_high=1.3)}
    )
    assert (open_.severity, open_.confidence, open_.probe_result) == ("critical", 0.8, None)
    assert len(open_.evidence) == 2
    assert apply_probe_result(finding, {"double_batch": probe(2.0, "double_batch")}) == finding


def test_a_failed_probe_changes_nothing(tmp_path: Path) -> None:
    fields = msgspec.to_builtins(probe(1.0)) | {"reason": "no room"}
    run = make_run(tmp_path / "run", fractions={"input_wait": 0.3}, probes=[fields])
    assert diagnose(run)[0].severity == "critical"


def test_a_double_batch_probe_proves_a_batch_too_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", gpus=1, probes=[msgspec.to_builtins(probe(1.5, "double_batch"))])
    (finding,) = diagnose(run)
    assert finding.id == "batch_too_small"
    assert finding.lost_device_s == pytest.approx(40 / 3, rel=0.01)
    assert finding.config_patch == {"auto_batch": True}


@pytest.mark.parametrize(("steps", "severity"), [(250, "critical"), (100, "info")])
def test_steps_of_one_image_below_their_fixed_cost_are_no_guess(steps: int, severity: str, tmp_path: Path) -> None:
    """4 ms, 10 ms; a record of a second each."""
    run = make_run(tmp_path / "run", external=True, config=None, steps=steps, num_images=steps)
    (finding,) = [finding for finding in diagnose(run) if finding.id == "batch_too_small"]
    assert finding.severity == severity


@pytest.mark.parametrize(("gpus", "ms", "severity"), [(0, 40, "critical"), (0, 100, "warning"), (1, 40, "warning"),
                                                      (0, 250, None), (1, 60, None)])  # fmt: skip
def test_a_small_batch_of_a_training_of_stoker(gpus: int, ms: int, severity: str | None, tmp_path: Path) -> None:
    """Its fixed cost is known, and is less on a GPU."""
    steps = 1000 // ms
    config = '[model]\nname = "tiny"\n[train]\nbatch_size = 1\n[data]\ntrain = "d"\n[run]\nworkers = 1\n'
    run = make_run(tmp_path / "run", gpus=gpus, config=config, steps=steps, num_images=steps,
                   gpu=lambda *_: {"memory_used_bytes": 8 * GIB})  # fmt: skip
    found = [finding.severity for finding in diagnose(run) if finding.id == "batch_too_small"]
    assert found == ([] if severity is None else [severity])


def test_a_cost_needs_a_price_and_an_explicit_price_replaces_the_runs_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", fractions={"sync": 0.25}, price=90.0)
    assert diagnose(run)[0].lost_cost == pytest.approx(10 * 90 / 3600)
    records = read_run(run)
    records = dataclasses.replace(records, price_per_device_hour=360.0)
    assert run_rules(records)[0].lost_cost == pytest.approx(1.0)
    assert diagnose(make_run(tmp_path / "none", fractions={"sync": 0.25}))[0].lost_cost is None


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", fractions={"sync": 0.25})
    with (run / STEPS).open("a") as file:
        file.write('{"t": 1.0, "attempt": 1, "st')
    assert names(diagnose(run)) == ["host_device_syncs"]


def test_why_prints_notes_below_the_findings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", fractions={"idle": 0.2, "sync": 0.25})
    output = io.StringIO()
    print_explanation(explain_run(run), output, width=200)
    finding, note = (
        output.getvalue().index("The training thread waits"),
        output.getvalue().index("info     there was no work"),
    )
    assert finding < note


def test_findings_are_written_and_read_back(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", fractions={"sync": 0.25})
    found = diagnose(run)
    write_findings(run, found)
    assert msgspec.json.decode((run / FINDINGS).read_bytes(), type=list[Finding]) == found


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    causes=st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=4),
    missing=st.sets(st.sampled_from(FILES)),
    seed=st.integers(0, 2**31),
)
@example(causes=["empty_input", "slow_decode: by stage"], missing=set(), seed=0)  # a guess and a cause of the same time
def test_any_records_give_consistent_findings(
    causes: list[str], missing: set[str], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Several causes at once, missing files, missing fields. Lost time is never more than the time of the run."""
    case: dict[str, Any] = {"seconds": 15}
    for cause in causes:
        case |= {name: value for name, value in CASES[cause][0].items() if name not in ("seconds", "startup")}
    run = make_run(tmp_path_factory.mktemp("runs") / "run", **case)
    for name in missing:
        (run / name).unlink(missing_ok=True)
    thin = random.Random(seed)
    if (run / DEVICES).exists():
        lines = [msgspec.json.decode(line) for line in (run / DEVICES).read_bytes().splitlines()]
        for line in lines:
            for field in set(line) - {"t", "attempt", "gpus"}:
                if thin.random() < 0.3:
                    del line[field]
        (run / DEVICES).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    records = read_run(run)
    found = run_rules(records)
    assert len(names(found)) == len(set(names(found)))
    for finding in found:
        assert finding.evidence
        assert 0 <= (finding.lost_device_s or 0.0) <= records.totals.device_s
        assert finding.severity in ("critical", "warning", "info")
    # a place and a cause are one only where the place is that of the cause
    sure = [name for name in names(found) if name in CATALOG and name != "heavy_place"]
    left_out = {other for name in sure for other in CATALOG[name].supersedes} - {"heavy_place"}
    told = {finding.id for finding in found if finding.severity == "info"}
    assert not (left_out & set(names(found))) or told
    ours = [finding for finding in found if finding.id in CATALOG and finding.id != "hung"]
    first_told = next((n for n, finding in enumerate(ours) if finding.severity == "info"), len(ours))
    assert all(finding.severity == "info" for finding in ours[first_told:])


def test_a_loss_that_is_nan_is_one_finding(tmp_path: Path) -> None:
    """The line of the output, and what the records know more: where, and what it cost."""
    ended = Finding(id="diverged", severity="critical", title="ended", evidence=[Evidence(text="Loss is nan")])
    lost = Finding(id="non_finite_loss", severity="critical", title="lost", evidence=[Evidence(text="step 7")],
                   lost_device_s=9.0, place="train.py:3")  # fmt: skip
    other = Finding(id="input_bound", severity="warning", title="other")
    run = read_run(make_run(tmp_path / "run"))
    ends, others = merge_divergence(run, [ended], [lost, other])
    assert [(f.id, f.title, f.lost_device_s, f.place) for f in ends] == [("diverged", "ended", 9.0, "train.py:3")]
    assert [evidence.text for evidence in ends[0].evidence] == ["Loss is nan", "step 7"]
    assert others == [other]
    assert merge_divergence(run, [], [lost]) == ([], [lost])
    assert merge_divergence(run, [ended], [other]) == ([ended], [other])
