"""Every rule fires on records that have its cause, and is silent on records that lack it or do not say."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.diagnose.catalogue import CATALOGUE
from stoker.diagnose.rules import RULES, diagnose, judge, read, write_findings
from stoker.records import CONFIG, DEVICES, FINDINGS, QUARANTINE, STEPS, RunFolder
from stoker.schemas import DeviceSample, Finding, GpuSample, Quarantined, StepWindow

GIB = 2**30
HEALTHY = {"compute": 970.0, "startup": 10.0, "input_wait": 10.0, "eval": 5.0, "unattributed": 5.0}


def make_run(
    path: Path,
    phases: dict[str, float],
    *,
    windows: dict[str, Any] | None = None,
    samples: list[dict[str, Any]] | None = None,
    quarantined: tuple[str, ...] = (),
    events: tuple[tuple[str, str] | tuple[str, str, dict[str, Any]], ...] = (),
    devices: int = 1,
    price: float | None = None,
) -> Path:
    """A run folder of two windows that share `phases` (device-seconds) between them."""
    path.mkdir()
    folder = RunFolder(path, 1)
    folder.event("started")
    for part in (0.25, 0.75):
        mine = {name: seconds * part for name, seconds in phases.items()}
        fields: dict[str, Any] = {"steps": 1000, "pictures": 16000} | (windows or {})
        folder.append(STEPS, StepWindow(t=1.0, attempt=1, step=1000, wall_s=sum(mine.values()) / devices,
                                        devices=devices, phases=mine, **fields))  # fmt: skip
    for sample in samples or []:
        folder.append(DEVICES, DeviceSample(t=1.0, attempt=1, **sample))
    for name in quarantined:
        folder.append(QUARANTINE, Quarantined(t=1.0, attempt=1, row=1, path=name, error="truncated", position=1,
                                              replaced_by=2))  # fmt: skip
    for kind, text, *data in events:
        folder.event(kind, text, **(data[0] if data else {}))
    folder.event("finished")
    folder.close()
    if price is not None:
        (path / CONFIG).write_text(f"[run]\nprice = {price}\n")
    return path


def with_phase(name: str, seconds: float) -> dict[str, float]:
    return {"compute": 1000.0 - seconds, name: seconds}


def gpu(**fields: Any) -> dict[str, Any]:
    return {"gpus": [GpuSample(index=0, **fields)]}


# Cause → records that have it, records that lack it although they say something of it.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "input_bound": ({"phases": with_phase("input_wait", 60)}, {"phases": with_phase("input_wait", 40)}),
    "starved_inside_steps": (
        {"samples": [gpu(utilisation=0.5), gpu(utilisation=0.7)]},
        {"samples": [gpu(utilisation=0.9)]},
    ),
    "startup_heavy": (
        {"phases": {"compute": 800.0, "startup": 70.0, "compile": 50.0}},
        {"phases": {"compute": 100.0, "startup": 40.0}},  # a large share, but of a short run
    ),
    "evaluation_heavy": ({"phases": with_phase("eval", 150)}, {"phases": with_phase("eval", 90)}),
    "checkpoint_heavy": ({"phases": with_phase("checkpoint", 40)}, {"phases": with_phase("checkpoint", 20)}),
    "checkpoints_failed": (
        {"events": (("checkpoint_failed", "No space left on device"),)},
        {"events": (("checkpoint", "step 100"), ("warning", "the disk is nearly full"))},
    ),
    "steps_skipped": ({"windows": {"skipped": 10}}, {"windows": {"skipped": 4}}),
    "rate_lowered": ({"events": (("slowed", "back to step 80", {"rate": 0.003}),)}, {"events": (("note", "slowed"),)}),
    "loss_spikes": (
        {"events": (("loss_spike", "jumped to 9", {"try": 0.003}),) * 2},
        {"events": (("loss_spike", "jumped to 9", {"try": 0.003}),)},  # training gets over one
    ),
    "rate_too_high": ({"events": (("rate_too_high", "it rises", {"try": 0.003}),)}, {"events": ()}),
    "rate_too_low": ({"events": (("rate_too_low", "it stalls", {"try": 0.003}),)}, {"events": ()}),
    "work_lost_to_restarts": ({"phases": with_phase("recovery", 30)}, {"phases": with_phase("recovery", 10)}),
    "unattributed_time": ({"phases": with_phase("unattributed", 31)}, {"phases": with_phase("unattributed", 29)}),
    "host_memory_near_limit": (
        {"samples": [{"memory_used_bytes": 3 * GIB, "memory_limit_bytes": 10 * GIB},
                     {"memory_used_bytes": int(9.2 * GIB), "memory_limit_bytes": 10 * GIB}]},
        {"samples": [{"memory_used_bytes": int(8.5 * GIB), "memory_limit_bytes": 10 * GIB}]},
    ),
    "gpu_memory_near_limit": (
        {"samples": [gpu(memory_total_bytes=80 * GIB)], "windows": {"memory_peak_bytes": 78 * GIB}},
        {"samples": [gpu(memory_total_bytes=80 * GIB)], "windows": {"memory_peak_bytes": 70 * GIB}},
    ),
    "quarantined_pictures": ({"quarantined": ("a.jpg",)}, {"quarantined": ()}),
    "cpu_contention": (
        {"samples": [{"cpu": [0.95, 0.95], "process_cpu": 1.0, "psi_cpu": 0.4}]},
        {"samples": [{"cpu": [0.95, 0.95], "process_cpu": 1.85, "psi_cpu": 0.4}]},  # we take them ourselves
    ),
}  # fmt: skip


def causes(run: Path) -> set[str]:
    return {finding.cause for finding in diagnose(run)}


@pytest.mark.parametrize("cause", CATALOGUE)
def test_the_rule_fires_on_its_cause_and_only_its(cause: str, tmp_path: Path) -> None:
    has, lacks = CASES[cause]
    assert causes(make_run(tmp_path / "has", **({"phases": HEALTHY} | has))) == {cause}
    assert causes(make_run(tmp_path / "lacks", **({"phases": HEALTHY} | lacks))) == set()


def test_every_cause_has_a_rule_of_its_name() -> None:
    assert {rule.__name__ for rule in RULES} == set(CATALOGUE) == set(CASES)


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    assert diagnose(make_run(tmp_path / "run", HEALTHY)) == []


def test_a_run_that_died_before_its_first_line_has_no_findings(tmp_path: Path) -> None:
    assert diagnose(tmp_path) == []


@pytest.mark.parametrize("sample", [
    {"memory_used_bytes": 99 * GIB},  # no limit
    {"cpu": [1.0, 1.0]},  # not said who
    {"psi_cpu": 1.0},  # may be ourselves
    {"throttled_s": 0.5},  # of how much?
    {"throttled_s": 0.02, "process_cpu": 2.0},
    {"cpu": [0.5, 0.5], "process_cpu": 0.1, "psi_cpu": 0.1},  # others, and cores left
    gpu(memory_total_bytes=80 * GIB),  # no peak
    {"gpus": [GpuSample(index=0, utilisation=0.1), GpuSample(index=1, utilisation=0.0)]},  # which of them is ours?
    {"gpus": []},
])  # fmt: skip
def test_rules_abstain_where_records_do_not_say(sample: dict[str, Any], tmp_path: Path) -> None:
    assert diagnose(make_run(tmp_path / "run", HEALTHY, samples=[sample])) == []


def test_a_peak_of_memory_without_a_gpu_is_no_finding(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", HEALTHY, windows={"memory_peak_bytes": 10**15}, samples=[{"cpu": [0.1]}])
    assert diagnose(run) == []


@pytest.mark.parametrize(("seconds", "severity"), [(50, "warning"), (199, "warning"), (200, "critical")])
def test_severity_follows_the_thresholds(seconds: float, severity: str, tmp_path: Path) -> None:
    (finding,) = diagnose(make_run(tmp_path / "run", with_phase("input_wait", seconds)))
    assert finding.severity == severity


def test_a_finding_says_what_was_lost_where_it_is_written_and_what_to_do(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_phase("input_wait", 360), price=2.5, devices=2, samples=[{"cpu": [0.2, 0.4]}])
    (finding,) = diagnose(run)
    assert finding.lost_device_s == pytest.approx(360)
    assert finding.lost_money == pytest.approx(0.25)
    assert [(e.text, e.place) for e in finding.evidence] == [
        ("input_wait: 360.0 device-seconds, 36.0 % of the run", "steps.jsonl: phases.input_wait"),
        ("the cores were 30 % busy", "devices.jsonl: cpu"),
    ]
    assert finding.evidence[0].value == pytest.approx(0.36)
    assert "cores are idle here, so more --threads come first" in finding.fix


def test_the_fix_for_input_depends_on_the_cores(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_phase("input_wait", 360), samples=[{"cpu": [0.9, 1.0]}])
    assert "more --threads do not help" in diagnose(run)[0].fix


def test_more_threads_are_no_fix_where_the_loader_finds_their_number(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_phase("input_wait", 360), samples=[{"cpu": [0.2, 0.4]}])
    (run / CONFIG).write_text("[run]\nthreads = 0\n")
    assert "--threads" not in diagnose(run)[0].fix


@pytest.mark.parametrize(("cache", "said"), [("none", "a faster disk or --cache"), ("disk", "a faster disk comes")])
def test_a_cache_that_is_there_is_no_fix(cache: str, said: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_phase("input_wait", 200), windows={"input": {"fetch": 100.0}})
    (run / CONFIG).write_text(f'[data]\ndata = "/data/set"\n[run]\ncache = "{cache}"\n')
    assert f"so {said}" in diagnose(run)[0].fix


@pytest.mark.parametrize(
    ("data", "made_of", "said", "fix"),
    [
        ("gs://bucket/set", {"fetch": 82.0, "queue": 18.0}, "of this 82 % fetch: the bucket", "own region"),
        ("/data/set", {"fetch": 82.0, "decode": 18.0}, "of this 82 % fetch: reading files", "a faster disk"),
        ("/data/set", {"fetch": 40.0, "decode": 60.0}, "of this 60 % decode: decoding and resizing", "--cache"),
        ("/data/set", {"queue": 100.0}, "of this 100 % queue", "--cache"),
    ],
)
def test_a_wait_for_input_names_what_most_of_it_was_for(
    data: str, made_of: dict[str, float], said: str, fix: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", with_phase("input_wait", 200), windows={"input": made_of})
    (run / CONFIG).write_text(f'[data]\ndata = "{data}"\n')
    (finding,) = diagnose(run)
    stage = next(iter(sorted(made_of, key=lambda name: -made_of[name])))
    assert (finding.evidence[1].text, finding.evidence[1].place) == (said, f"steps.jsonl: input.{stage}")
    assert fix in finding.fix


@pytest.mark.parametrize("cause", ["rate_lowered", "loss_spikes", "rate_too_high", "rate_too_low"])
def test_findings_about_the_rate_name_one_to_try(cause: str, tmp_path: Path) -> None:
    (finding,) = diagnose(make_run(tmp_path / "run", HEALTHY, **CASES[cause][0]))
    assert finding.command == "--rate 0.003"
    assert finding.evidence[0].text == CASES[cause][0]["events"][0][1]


def test_without_a_price_there_is_no_money(tmp_path: Path) -> None:
    assert diagnose(make_run(tmp_path / "run", with_phase("eval", 150)))[0].lost_money is None


def test_the_largest_loss_comes_first_and_what_cost_no_time_last(tmp_path: Path) -> None:
    phases = {"compute": 500.0, "input_wait": 100.0, "eval": 300.0, "recovery": 100.5}
    run = make_run(tmp_path / "run", phases, quarantined=("a.jpg",))
    assert [f.cause for f in diagnose(run)] == [
        "evaluation_heavy", "work_lost_to_restarts", "input_bound", "quarantined_pictures",
    ]  # fmt: skip


def test_a_cpu_quota_is_contention(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", HEALTHY, samples=[{"throttled_s": 1.0, "process_cpu": 2.0}] * 2)
    (finding,) = diagnose(run)
    assert (finding.cause, finding.severity) == ("cpu_contention", "critical")


def test_quarantine_names_pictures_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", HEALTHY, quarantined=("a.jpg", "a.jpg", "b.jpg"))
    assert [e.text for e in diagnose(run)[0].evidence] == ["2 pictures", "a.jpg: truncated", "b.jpg: truncated"]


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_phase("eval", 150))
    with (run / STEPS).open("a") as file:
        file.write('{"t": 1.0, "attempt": 1, "st')
    assert causes(run) == {"evaluation_heavy"}


def test_a_price_given_later_replaces_the_runs_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_phase("eval", 360), price=2.5)
    (finding,) = judge(read(run, price=10.0))
    assert finding.lost_money == pytest.approx(1.0)


def test_findings_are_written_and_read_back(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_phase("eval", 150))
    found = diagnose(run)
    write_findings(run, found)
    assert msgspec.json.decode((run / FINDINGS).read_bytes(), type=list[Finding]) == found


def test_thresholds_rise_and_every_row_says_its_source() -> None:
    for cause in CATALOGUE.values():
        assert cause.critical_from is None or cause.critical_from > cause.warn_from, cause.id
        assert all((cause.source, cause.measure, cause.fix, cause.needs, cause.looks_like)), cause.id
