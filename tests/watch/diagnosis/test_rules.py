"""Every rule finds its cause in records that have it, and in no others; healthy runs of every kind have no findings."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker_watch.diagnosis.causes.mistakes import mistake_kinds
from stoker_watch.diagnosis.engine import CATALOG, run_rules
from stoker_watch.diagnosis.notes import NOTES, collect_notes
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.findings.finding import Finding
from stoker_watch.runs.records import DEVICES
from stoker_watch.runs.schemas import Place
from tests.watch.diagnosis.built import FACTS, HEALTHY_HOST, T0, make_run
from tests.watch.diagnosis.cases import ALSO_FOUND, CASES, GIB, HEALTHY, MIB, NOTE_CASES, Case


def findings(path: Path, case: Case) -> list[Finding]:
    return run_rules(read_run(make_run(path, **({"facts": FACTS} | case))))


def notes(path: Path) -> list[Finding]:
    run = read_run(path)
    return collect_notes(run, run_rules(run))


def of(findings: list[Finding], cause: str) -> Finding:
    (finding,) = [finding for finding in findings if named(finding) == cause]
    return finding


def named(finding: Finding) -> str:
    """Its cause; of a place with possible causes the likeliest."""
    possible = [id for id, cause in CATALOG.items() if finding.fix.startswith(f"Possible causes: {cause.title} (")]
    assert not possible or (finding.id == "heavy_place" and "not certain" in finding.title)
    return possible[0] if possible else finding.id


def test_every_cause_and_every_note_has_a_case() -> None:
    assert {case.partition(":")[0] for case in CASES} == set(CATALOG)
    assert set(NOTE_CASES) == {kind.id for kind, _ in NOTES}


@pytest.mark.parametrize("case", CASES)
def test_a_rule_finds_its_cause_and_no_other(case: str, tmp_path: Path) -> None:
    cause = case.partition(":")[0]
    has, lacks = CASES[case]
    also = ALSO_FOUND.get(cause, set())
    assert cause in {finding.id for finding in findings(tmp_path / "has", has)} <= {cause, *also}
    assert {finding.id for finding in findings(tmp_path / "lacks", lacks)} <= also


@pytest.mark.parametrize("note", NOTE_CASES)
def test_a_note_is_no_finding(note: str, tmp_path: Path) -> None:
    has, lacks = NOTE_CASES[note]
    for name, case in (("has", has), ("lacks", lacks)):
        run = make_run(tmp_path / name, **({"facts": FACTS} | case))
        if note == "no_telemetry" and name == "has":
            (run / DEVICES).unlink()
        ids = {found.id for found in notes(run)}
        assert (note in ids) == (name == "has")
        assert run_rules(read_run(run)) == []


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_has_nothing_above_info(kind: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **HEALTHY[kind])
    assert [finding.id for finding in run_rules(read_run(run)) if finding.severity != "info"] == []


def test_a_run_that_died_before_its_first_line_has_no_findings(tmp_path: Path) -> None:
    assert run_rules(read_run(tmp_path)) == []


@pytest.mark.parametrize("sample", [
    {"memory_limit_bytes": None}, {"process_cpu": None, "psi_cpu": 1.0, "cpu_core_utilization": [1.0] * 4},
    {"throttled_s": 0.5, "process_cpu": None},
    {"cpu_limit_cores": None, "cpu_core_utilization": [], "threads_running": 99.0},
    {"shm_total_bytes": None}, {"open_fds": 1000, "max_fds": None}, {"net_received_bytes_s": 1e9},
])  # fmt: skip
def test_rules_abstain_if_records_are_missing(sample: dict[str, object], tmp_path: Path) -> None:
    assert set(sample) <= set(HEALTHY_HOST)
    assert findings(tmp_path / "run", {"host": lambda _: sample}) == []


def test_fractions_are_of_the_time_after_the_start_and_losses_of_all_time(tmp_path: Path) -> None:
    short = findings(tmp_path / "short", {"startup": 40, "seconds": 10, "fractions": {"input_wait": 0.3}})
    long = findings(tmp_path / "long", {"startup": 6, "seconds": 60, "fractions": {"input_wait": 0.3}})
    assert [f.id for f in short] == [f.id for f in long] == ["input_bound"]
    assert short[0].lost_device_s == pytest.approx(3.0)
    assert long[0].lost_device_s == pytest.approx(18.0)


def test_a_phase_is_lost_as_long_as_it_took(tmp_path: Path) -> None:
    for name, phase in (("evaluation_heavy", "eval"), ("host_device_syncs", "sync"), ("recompiles", "compile")):
        found = findings(tmp_path / name, {"fractions": {phase: 0.25}, "seconds": 20})
        assert of(found, name).lost_device_s == pytest.approx(5.0, rel=0.06), name


def test_the_slow_rank_is_named(tmp_path: Path) -> None:
    found = findings(tmp_path / "run", {"fractions": {"comm": 0.4}, "ranks": [{"comm": 0.4}, {"comm": 0.0}]})
    finding = of(found, "straggler")
    assert finding.evidence[0].value == 2
    assert "rank 2 is the slow one" in finding.evidence[0].text
    assert finding.lost_device_s == pytest.approx(2 * 0.4 * 40, rel=0.05)


def test_what_rank_0_does_alone_costs_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    alone = {"fractions": {"eval": 0.3}, "ranks": [{"comm": 0.3}], "seconds": 40}
    finding = of(findings(tmp_path / "alone", alone), "evaluation_heavy")
    assert finding.lost_device_s == pytest.approx(2 * 0.3 * 40, rel=0.05)
    assert any("only rank 0" in line.text for line in finding.evidence)
    both = {"fractions": {"eval": 0.3, "comm": 0.2}, "ranks": [{"eval": 0.3}], "seconds": 40}
    finding = of(findings(tmp_path / "both", both), "evaluation_heavy")
    assert finding.lost_device_s == pytest.approx(2 * 0.3 * 40, rel=0.05)
    assert not any("only rank 0" in line.text for line in finding.evidence)


@pytest.mark.parametrize(("comm", "ids"), [(0.34, ["communication_bound", "straggler"]), (0.12, ["straggler"])])
def test_a_slow_rank_does_not_hide_a_slow_exchange(comm: float, ids: list[str], tmp_path: Path) -> None:
    """The other rank waits 0.2 of its time longer in the collectives."""
    found = findings(tmp_path / "run", {"fractions": {"comm": comm + 0.2}, "ranks": [{"comm": comm}]})
    assert [finding.id for finding in found] == ids


def test_cpu_time_distinguishes_storage_from_decoding_in_a_loop_without_stages(tmp_path: Path) -> None:
    waits = {"config": None, "fractions": {"input_wait": 0.4}}
    for name, cores, cause in (
        ("rests", {"process_cpu": 0.65}, "slow_storage"),
        ("one", {"process_cpu": 1.6, "cpu_core_utilization": [1.0, 0.6, 0.0, 0.0]}, "too_few_workers"),
        ("one of two cores", {"process_cpu": 1.6, "cpu_core_utilization": [0.95, 0.7]}, "too_few_workers"),
        ("all", {"process_cpu": 3.7, "cpu_core_utilization": [0.95] * 4}, "slow_decode"),
        (
            "others",
            {"process_cpu": 1.6, "cpu_core_utilization": [1.0] * 4},
            "cpu_contention",
        ),  # then its own CPU time means nothing
    ):
        found = findings(tmp_path / name, waits | {"host": lambda _, cores=cores: cores})
        assert named(found[0]) == cause, name


def test_cpu_time_of_the_training_thread_distinguishes_computing_from_waiting(tmp_path: Path) -> None:
    def case(fractions: dict[str, float], **cpu: float) -> Case:
        return {"config": None, "fractions": fractions, "window": lambda _: {"thread_cpu_s": {"compute": 0.6, **cpu}}}

    for name, changes, host, cause in (
        ("between, computes", case({"host": 0.4}, host=0.38), {"process_cpu": 1.0}, "python_bound"),
        ("between, waits", case({"host": 0.4}, host=0.02), {"process_cpu": 1.9}, "host_device_syncs"),
        ("in steps, waits", case({}, compute=0.5), {"process_cpu": 1.6}, "host_device_syncs"),
        ("input, waits", case({"input_wait": 0.4}, input_wait=0.02), {"process_cpu": 0.65}, "slow_storage"),
        ("input, decodes", case({"input_wait": 0.4}, input_wait=0.39), {"process_cpu": 1.0}, "too_few_workers"),
        (
            "input, a worker decodes",
            case({"input_wait": 0.4}, input_wait=0.02),
            {"process_cpu": 1.5},
            "too_few_workers",
        ),
    ):
        found = findings(tmp_path / name, changes | {"host": lambda _, host=host: host | {"threads_running": 1.0}})
        assert [named(f) for f in found] == [cause], name
    crowded = {
        "cpu_core_utilization": [1.0] * 4,
        "process_cpu": 4.0,
        "threads_running": 8.0,
    }  # its own loader; no other process
    full = case({}, compute=0.5) | {"host": lambda _: crowded}
    assert findings(tmp_path / "full", full) == []
    taken = {
        "cpu_core_utilization": [1.0] * 4,
        "process_cpu": 0.94,
        "threads_running": 1.52,
    }  # a loader's process got more than it
    waits = case({"input_wait": 0.5}, compute=0.22, input_wait=0.01)
    found = findings(tmp_path / "taken", waits | {"host": lambda _: taken})
    assert [named(f) for f in found] == ["slow_decode", "cpu_contention"]


def test_decoding_by_the_training_thread_is_not_lost_to_storage(tmp_path: Path) -> None:
    waits = {"config": None, "fractions": {"input_wait": 0.4}, "host": lambda _: {"process_cpu": 0.7}}
    case = waits | {"window": lambda _: {"thread_cpu_s": {"compute": 0.6, "input_wait": 0.1}}}
    (finding,) = findings(tmp_path / "run", case | {"events": [("info", "the loader", {"workers": 0})]})
    assert named(finding) == "slow_storage"
    assert finding.lost_device_s == pytest.approx(0.3 * 40, rel=0.01)


def test_waiting_is_found_while_other_processes_use_the_cores(tmp_path: Path) -> None:
    waits = {"config": None, "fractions": {"input_wait": 0.5}}
    busy = {"cpu_core_utilization": [1.0] * 4, "process_cpu": 0.45, "threads_running": 0.55}
    found = findings(tmp_path / "run", waits | {"host": lambda _: busy})
    assert named(found[0]) == "slow_storage"


def test_a_run_that_needs_little_cpu_time_loses_little_to_other_processes(tmp_path: Path) -> None:
    for wanted, got, cause in ((0.2, 0.1, []), (1.0, 0.3, ["cpu_contention"]), (3.0, 2.6, [])):
        sample = {"cpu_core_utilization": [1.0] * 4, "process_cpu": got, "threads_running": wanted}
        job = {"external": True, "config": None, "fractions": {"unattributed": 1.0}, "host": lambda _, s=sample: s}
        found = findings(tmp_path / str(wanted), job)
        assert [f.id for f in found if f.severity != "info"] == cause, wanted


def test_waiting_for_a_busy_gpu_is_not_a_sync_problem(tmp_path: Path) -> None:
    stacks = [{"samples": 100, "main_thread": {"sync": 0.9, "compute": 0.1}, "frames": {"train (job.py:10)": 0.5}}] * 2
    job = {"external": True, "config": None, "fractions": {"unattributed": 1.0}, "stacks": stacks, "gpus": 1}
    assert "host_device_syncs" not in {f.id for f in findings(tmp_path / "busy", job)}
    idle = findings(tmp_path / "idle", job | {"gpu": lambda *_: {"utilization": 0.5}})
    assert of(idle, "host_device_syncs").lost_device_s == pytest.approx(0.5 * 39, rel=0.06)


def test_functions_that_are_compiled_once_are_no_recompiles(tmp_path: Path) -> None:
    stacks = [{"samples": 100, "main_thread": {"compile": 0.3, "compute": 0.7}}] * 2
    for job in ({"fractions": {"compile": 0.25}}, {"external": True, "config": None, "stacks": stacks}):
        for recompiles, expected in ((0, False), (1, True), (None, True)):
            counted = {"window": lambda _, count=recompiles: {"recompiles": count}}
            found = findings(tmp_path / f"{len(job)}-{recompiles}", {**job, **counted})
            assert any(finding.id == "recompiles" for finding in found) == expected, (job, recompiles)


def test_compilations_again_before_the_first_shown_step_are_lost_too(tmp_path: Path) -> None:
    """A job in JAX that prints a line now and then: its clock saw more than is after the first line."""
    job = {"fractions": {"compile": 0.25}, "startup": 40}
    counted = {"window": lambda second: {"recompiles": 1, "recompiled_s": 30.0 if second == 40 else 0.0}}
    finding = of(findings(tmp_path / "early", job | counted), "recompiles")
    alone = of(findings(tmp_path / "alone", job | {"window": lambda _: {"recompiles": 1}}), "recompiles")
    assert alone.lost_device_s is not None
    assert alone.lost_device_s < 20
    assert finding.lost_device_s == pytest.approx(30.0, rel=0.02)


def test_an_external_job_is_explained_by_its_stack_samples(tmp_path: Path) -> None:
    for cause, main in (
        ("python_bound", {"python": 0.5, "compute": 0.5}), ("slow_decode", {"decode": 0.5, "compute": 0.5}),
        ("recompiles", {"compile": 0.3, "compute": 0.7}), ("communication_bound", {"comm": 0.4, "compute": 0.6}),
        ("host_device_syncs", {"sync": 0.4, "compute": 0.6}),
    ):  # fmt: skip
        stacks = [{"samples": 100, "main_thread": main, "frames": {"train (job.py:10)": 0.5}}] * 2
        job = {
            "external": True, "config": None, "fractions": {"unattributed": 1.0}, "stacks": stacks,
            "host": lambda _: {"cpu_limit_cores": 1.0},
        }  # fmt: skip
        finding = of(findings(tmp_path / cause, job), cause)
        assert any("job.py:10" in line.text for line in finding.evidence), cause
        few = findings(tmp_path / f"{cause}-few", job | {"stacks": [stacks[0] | {"samples": 12}] * 2})
        assert of(few, cause).lost_device_s is None, "too few samples for a duration"
        assert any("estimate" in line.text for line in finding.evidence), cause


def test_python_in_evaluations_is_not_between_steps(tmp_path: Path) -> None:
    """Samples in Python that the clock's evaluations explain, while it saw next to no time between steps."""
    for evaluating, is_found in ((0.3, False), (0.05, True)):
        stacks = [{"samples": 100, "main_thread": {"python": 0.3, "compute": 0.7}}] * 2
        job = {
            "external": True, "config": None, "fractions": {"host": 0.02, "eval": evaluating}, "stacks": stacks,
            "host": lambda _: {"cpu_limit_cores": 1.0, "process_cpu": 1.0},
        }  # fmt: skip
        found = findings(tmp_path / str(evaluating), job)
        assert any(finding.id == "python_bound" for finding in found) is is_found


def test_workers_that_evaluations_start_are_not_their_cost(tmp_path: Path) -> None:
    """A loader that is made again for each pass over a few batches, training and evaluation."""
    for started_s, found in ((0.3, ["workers_start_again"]), (0.0, ["evaluation_heavy"])):
        job = {
            "external": True, "config": None, "seconds": 60, "steps": 4,
            "fractions": {"eval": 0.3, "input_wait": 0.1, "compute": 0.6},
            "window": lambda _, s=started_s: {"worker_starts": int(s > 0), "worker_start_s": s},
        }  # fmt: skip
        named_ids = [f.id for f in findings(tmp_path / str(started_s), job) if f.severity != "info"]
        assert [id for id in named_ids if id in ("workers_start_again", "evaluation_heavy")] == found


def test_evaluations_wait_for_storage_as_well(tmp_path: Path) -> None:
    """A loader that reads over HTTP, for training and evaluations: the clock's wait is only that of the training."""
    for waiting, more_s in ((0.9, 12.0), (0.6, 0.0)):
        stacks = [{
            "samples": 100, "main_thread": {"input_wait": waiting, "compute": 1 - waiting}, "places": [
                Place(line="train.py:9", call="torch.utils.data.dataloader.__next__", kind="input_wait",
                      samples=round(100 * waiting)),
                Place(line="train.py:12", call="model", kind="compute", samples=round(100 - 100 * waiting)),
            ],
        }] * 4  # fmt: skip
        job = {
            "external": True, "config": None, "fractions": {"input_wait": 0.6, "eval": 0.3}, "stacks": stacks,
            "host": lambda _: {"process_cpu": 0.1},
        }  # fmt: skip
        finding = of(findings(tmp_path / str(waiting), job), "slow_storage")
        assert finding.lost_device_s == pytest.approx(24.0 + more_s, rel=0.01), (waiting, finding)


def test_a_training_thread_that_decodes_while_cores_are_idle_needs_workers(tmp_path: Path) -> None:
    stacks = [{"main_thread": {"decode": 0.5, "compute": 0.5}}] * 2
    found = findings(tmp_path / "run", {
        "external": True, "config": None, "fractions": {"unattributed": 1.0}, "stacks": stacks,
        "host": lambda _: {"process_cpu": 1.0},
    })  # fmt: skip
    assert of(found, "too_few_workers").severity == "critical"


def test_a_loss_that_rises_in_an_external_job_is_an_lr_too_high(tmp_path: Path) -> None:
    rises = {"config": None, "losses": lambda s: {"total": 2.0 if s < 10 else 2.0 * 1.1 ** (s - 10)}}
    finding = of(findings(tmp_path / "run", rises), "lr_too_high")
    assert finding.lost_device_s == pytest.approx(30, abs=12)
    blew_up = {"config": None, "losses": lambda s: {"total": 1e17 if s == 0 else 900.0 + 100 * (s % 4)}}
    assert "jumped to 1e+17" in of(findings(tmp_path / "blew_up", blew_up), "lr_too_high").evidence[0].text
    above = {"config": None, "losses": lambda s: {"total": 1.5 if s == 0 else 500.0 + 100 * (s % 4)}}
    assert "was 1.5 at the beginning" in of(findings(tmp_path / "above", above), "lr_too_high").evidence[0].text
    mean = {
        "config": None,
        "losses": lambda s: {"total": 5e19 / (s + 1)},
    }  # since the start of the epoch, as Keras prints it
    assert "the loss is " in of(findings(tmp_path / "mean", mean), "lr_too_high").evidence[0].text
    jumps = {"config": None, "losses": lambda s: {"total": 1.5 if s % 9 != 5 else 180.0}}
    finding = of(findings(tmp_path / "jumps", jumps), "lr_too_high")
    assert "has jumped 4 times, to 180 at most" in finding.evidence[0].text
    to_zero = {"config": None, "losses": lambda s: {"total": (1.1, 6e7, 2e7)[s] if s < 3 else 0.0}}
    assert "jumped to 6e+07" in of(findings(tmp_path / "to_zero", to_zero), "lr_too_high").evidence[0].text
    once = {"config": None, "losses": lambda s: {"total": (1.1, 6e7)[s] if s < 2 else 0.0}}
    assert findings(tmp_path / "once", once) == []
    small = {"config": None, "losses": lambda s: {"total": 2.0 * 0.8**s if s % 9 != 5 else 0.5}}  # below its beginning
    assert findings(tmp_path / "small", small) == []
    stays = {"config": None, "losses": lambda s: {"total": (2.3, 8000.0)[s] if s < 2 else 5.2 + 0.1 * (s % 3)}}
    finding = of(findings(tmp_path / "stays", stays), "lr_too_high")
    assert "was 2.3 at the beginning, jumped to 8e+03 and is 5.3 now" in finding.evidence[0].text
    returns = {"config": None, "losses": lambda s: {"total": (2.3, 80.0)[s] if s < 2 else 2.2 * 0.98**s}}
    assert findings(tmp_path / "returns", returns) == []
    noisy = {"config": None, "losses": lambda s: {"total": 2.0 * (1.0 + 0.5 * (s % 3))}}
    assert [f.severity for f in findings(tmp_path / "noisy", noisy)] == ["info"]  # it learns nothing


def test_a_native_run_is_judged_by_its_losses_at_any_length(tmp_path: Path) -> None:
    jumped = {"losses": lambda s: {"total": (2.3, 8000.0)[s] if s < 2 else 7.2 + 0.1 * (s % 3)}}
    assert findings(tmp_path / "short", {**jumped, "seconds": 12})[0].id == "lr_too_high"
    assert findings(tmp_path / "long", {**jumped, "seconds": 40})[0].id == "lr_too_high"


def test_a_flat_loss_alone_is_info_and_only_after_many_steps(tmp_path: Path) -> None:
    flat = {"config": None, "losses": lambda _: {"total": 2.3}, "window": lambda _: {"grad_norm": 0.5}}
    finding = of(findings(tmp_path / "long", flat), "lr_too_low")
    assert (finding.severity, finding.command, finding.lost_device_s) == ("info", None, None)
    assert findings(tmp_path / "short", flat | {"steps": 3}) == []


def test_an_event_about_a_low_lr_is_forgotten_when_the_loss_falls(tmp_path: Path) -> None:
    event = CASES["lr_too_low"][0] | {"window": None, "events": [("lr_too_low", "nothing changes", {})]}
    assert of(findings(tmp_path / "flat", event), "lr_too_low").severity == "warning"
    later = event | {"losses": lambda s: {"total": 2.3 if s < 20 else 2.3 * 0.9 ** (s - 20)}}
    assert findings(tmp_path / "later", later) == []


def test_samples_that_contradict_a_cause_are_no_evidence(tmp_path: Path) -> None:
    """The clock has time in which the training thread prepares batches, and no sample shows it."""
    job = {
        "external": True, "config": None, "fractions": {"input_wait": 0.4}, "host": lambda _: {"process_cpu": 0.95},
        "window": lambda _: {"thread_cpu_s": {"compute": 0.58, "input_wait": 0.38}},
        "events": [("info", "", {"workers": 0})],
    }  # fmt: skip
    all_cores = job | {"host": lambda _: {"process_cpu": 0.95, "cpu_limit_cores": 1.0}}
    clock = of(findings(tmp_path / "clock", all_cores), "slow_decode")
    assert "prepares the batches itself: it computed 95.0 % of that time" in clock.evidence[1].text
    contradicting = all_cores | {"stacks": [{"main_thread": {"compute": 1.0}, "samples": 12}]}
    finding = of(findings(tmp_path / "contradicting", contradicting), "slow_decode")
    assert not any("samples" in line.text for line in finding.evidence)
    assert clock.confidence is not None
    assert finding.id == "heavy_place"
    assert f"({clock.confidence / 2:.0%}; " in finding.fix
    waits = job | {"fractions": {}, "window": lambda _: {"thread_cpu_s": {"compute": 0.5}},
                   "host": lambda _: {"process_cpu": 0.6}}  # fmt: skip
    assert of(findings(tmp_path / "waits", waits), "host_device_syncs").severity == "critical"
    computes = waits | {"stacks": [{"main_thread": {"compute": 1.0}, "samples": 12}]}
    assert findings(tmp_path / "computes", computes) == []


def test_a_loader_without_workers_is_judged_by_the_training_thread(tmp_path: Path) -> None:
    """Threads of the model compute too, so the CPU time of the process says nothing of the loader."""
    job = {
        "external": True, "config": None, "fractions": {"input_wait": 0.4}, "host": lambda _: {"process_cpu": 1.2},
        "window": lambda _: {"thread_cpu_s": {"compute": 0.6, "input_wait": 0.02}},
    }  # fmt: skip
    inline = job | {"events": [("info", "", {"workers": 0})]}
    assert [named(f) for f in findings(tmp_path / "inline", inline)] == ["slow_storage"]


def test_the_cpu_time_of_loader_processes_is_that_of_the_job_besides_the_training_process(tmp_path: Path) -> None:
    """Threads of the model compute as much in both jobs."""
    for workers_cpu, cause in ((0.2, "slow_storage"), (0.9, "too_few_workers")):
        job = {
            "external": True, "config": None, "fractions": {"input_wait": 0.4},
            "host": lambda _, cores=1.2 + workers_cpu: {"process_cpu": cores},
            "window": lambda _: {"thread_cpu_s": {"compute": 0.6, "input_wait": 0.01}, "process_cpu_s": 1.2},
            "events": [("info", "", {"workers": 1})],
        }  # fmt: skip
        assert [named(f) for f in findings(tmp_path / cause, job)] == [cause]


def test_threads_of_torch_are_no_loader_and_threads_of_tensorflow_may_be(tmp_path: Path) -> None:
    for frameworks, cause in (("Keras 3 on torch", "slow_storage"), ("Keras 3 on tensorflow", "too_few_workers")):
        coverage = {"coverage": {"inside the job": f"recorded: {frameworks} in a process"}}
        job = {
            "external": True, "config": None, "fractions": {"input_wait": 0.4},
            "host": lambda _: {"process_cpu": 1.2, "cpu_core_utilization": [0.3] * 4},
            "window": lambda _: {"thread_cpu_s": {"compute": 0.58, "input_wait": 0.01}, "process_cpu_s": 1.2},
            "events": [("info", "inside the job", coverage)],
        }  # fmt: skip
        assert [named(f) for f in findings(tmp_path / frameworks, job)] == [cause]


def test_a_short_run_has_no_warning_about_its_start_or_evaluation(tmp_path: Path) -> None:
    def one_evaluation(seconds: int, fraction: float) -> dict[str, Any]:
        line = {"window_steps": 0, "phases": {"eval": 1.0}}
        return {"fractions": {}, "window": lambda s: line if 10 <= s < 10 + fraction * seconds else {}}

    job = {"external": True, "config": None, "fractions": {"eval": 0.4}}
    each_step = job | {"seconds": 30, "steps": 2}
    assert of(findings(tmp_path / "each step", each_step), "evaluation_heavy").severity == "critical"
    for seconds, steps, severity in ((30, 4, ["info"]), (30, 8, ["critical"]), (200, 8, ["critical"])):
        job |= one_evaluation(seconds, 0.4)
        found = findings(tmp_path / f"{seconds}-{steps}", job | {"seconds": seconds, "steps": steps})
        assert [f.severity for f in found if f.id == "evaluation_heavy"] == severity
    half = job | one_evaluation(30, 0.5) | {"seconds": 30, "steps": 2}
    assert of(findings(tmp_path / "half", half), "evaluation_heavy").severity == "critical"
    for seconds, fraction, severity in ((60, 0.12, "info"), (60, 0.2, "warning"), (200, 0.12, "warning")):
        often = job | {"window": None} | {"seconds": seconds, "fractions": {"eval": fraction}}
        found = findings(tmp_path / f"often-{seconds}-{fraction}", often)
        assert [(f.id, f.severity) for f in found] == [("evaluation_heavy", severity)]
    few = job | one_evaluation(60, 0.15) | {"seconds": 60, "steps": 8}
    assert [f.id for f in findings(tmp_path / "few", few)] == [], "at the end of an epoch"
    for seconds, severity in ((60, ["info"]), (200, ["warning"])):
        found = findings(tmp_path / f"start-{seconds}", {"startup": 70, "seconds": seconds})
        assert [f.severity for f in found] == severity


def test_a_start_delayed_by_other_processes_names_them(tmp_path: Path) -> None:
    def host(second: int) -> dict[str, object]:
        busy = {"cpu_core_utilization": [1.0] * 4, "busiest_processes": {"python train.py": 1.5, "ffmpeg": 1.25}}
        return busy if second <= 70 else {}

    finding = of(findings(tmp_path / "run", {"startup": 70, "seconds": 200, "host": host}), "startup_heavy")
    texts = [line.text for line in finding.evidence]
    assert "during the start, the cores were 100 % busy, 58 % with other processes" in texts
    assert "the busiest other processes: python train.py (1.50 cores), ffmpeg (1.25 cores)" in texts
    assert finding.fix == CATALOG["cpu_contention"].fix
    quiet = of(findings(tmp_path / "quiet", {"startup": 70, "seconds": 200}), "startup_heavy")
    assert quiet.fix == CATALOG["startup_heavy"].fix


def test_contention_names_the_processes_and_is_info_unless_it_takes_half(tmp_path: Path) -> None:
    def case(got: float) -> Case:
        sample = {"cpu_core_utilization": [1.0] * 4, "process_cpu": got, "threads_running": 4.0,
                  "busiest_processes": {"busy": 4.0 - got}}  # fmt: skip
        return {"external": True, "config": None, "host": lambda _: sample}

    info = of(findings(tmp_path / "third", case(2.75)), "cpu_contention")
    assert info.severity == "info"
    assert "the busiest other processes: busy (1.25 cores)" in [line.text for line in info.evidence]
    assert of(findings(tmp_path / "most", case(1.0)), "cpu_contention").severity == "warning"
    assert of(findings(tmp_path / "half", case(2.0)), "cpu_contention").severity == "warning"


def test_the_free_space_is_said_to_be_the_lowest(tmp_path: Path) -> None:
    sizes = iter([6 * 2**20] + [400 * 2**20] * 1000)
    found = findings(tmp_path / "run", {"host": lambda _: {"disk_free_bytes": next(sizes)}})
    assert of(found, "disk_nearly_full").evidence[0].text == "only 6 MiB were free at the lowest"


def test_a_slow_rank_in_a_watched_job_must_be_slower_than_noise(tmp_path: Path) -> None:
    job = {"external": True, "config": None}
    noise = findings(tmp_path / "noise", job | {"fractions": {"comm": 0.12}, "ranks": [{"comm": 0.02}]})
    assert noise == []
    slow = findings(tmp_path / "slow", job | {"fractions": {"comm": 0.4}, "ranks": [{"comm": 0.02}]})
    assert [f.id for f in slow] == ["straggler"]


@pytest.mark.parametrize("cause", ["unstable_training: rollback", "unstable_training: loss spikes", "lr_too_high"])
def test_findings_about_the_lr_suggest_one(cause: str, tmp_path: Path) -> None:
    finding = of(findings(tmp_path / "run", CASES[cause][0]), cause.partition(":")[0])
    assert finding.command == "--lr 0.003"


def test_severity_follows_the_thresholds(tmp_path: Path) -> None:
    for fraction, severity in ((0.12, "warning"), (0.19, "warning"), (0.21, "critical")):
        found = findings(tmp_path / str(fraction), {"fractions": {"input_wait": fraction}})
        assert of(found, "input_bound").severity == severity


def test_xids_are_explained(tmp_path: Path) -> None:
    mine = findings(tmp_path / "mine", {"gpus": 1, "gpu": lambda s, _: {"xids": [31]} if s == 9 else {}})
    assert of(mine, "gpu_errors").severity == "warning"
    assert "not its own" in of(mine, "gpu_errors").evidence[0].text
    other = findings(tmp_path / "other", {"gpus": 1, "gpu": lambda s, _: {"xids": [9999]} if s == 9 else {}})
    assert of(other, "gpu_errors").severity == "critical"


def test_quarantined_images_are_counted_once(tmp_path: Path) -> None:
    found = findings(tmp_path / "run", {"quarantined": ["a.jpg", "a.jpg", "b.jpg"]})
    assert [e.text for e in of(found, "bad_images").evidence] == [
        "2 images", "a.jpg: truncated", "b.jpg: truncated",
    ]  # fmt: skip


def test_a_hang_comes_before_the_kill_that_ended_it(tmp_path: Path) -> None:
    case = CASES["hung"][0]
    found = findings(tmp_path / "run", case)
    assert [finding.id for finding in found][:2] == ["hung", "ended_without_record"]


def test_a_first_window_with_the_start_is_no_usual_step_time(tmp_path: Path) -> None:
    """In an external job, the first window includes the start."""
    first = {"wall_s": 6.0, "phases": {"startup": 5.5, "compute": 0.5}}
    found = findings(tmp_path / "run", {
        "silent": 16, "seconds": 4, "end": None, "host": lambda s: {"process_cpu": 0.01} if s > 9 else {},
        "window": lambda s: first if s == 6 else {},
    })  # fmt: skip
    assert found[0].id == "hung"


def test_what_a_process_does_at_its_end_is_not_judged(tmp_path: Path) -> None:
    """A leak whose memory is freed with the last step; time in which a process exits."""
    leak = {"host": lambda s: {"rss_bytes": 10**9 + 10**7 * min(s, 45) if s < 45 else 10**8}}
    assert [f.id for f in findings(tmp_path / "leak", leak)] == ["host_memory_leak"]
    tail = {"config": None, "window": lambda s: {"window_steps": 0, "phases": {"unattributed": 1.0}} if s > 20 else {},
            "fractions": {"input_wait": 0.3}}  # fmt: skip
    found = findings(tmp_path / "tail", tail)
    assert [named(f) for f in found] == ["too_few_workers"]


def test_memory_grows_with_the_steps_also_where_these_become_slower(tmp_path: Path) -> None:
    """Recorded of a job that keeps activations: 14 MB a step, 80 steps a second at first, then 33. A cache that fills
    slows down over steps as well."""
    steps = [80 * min(s, 6) + 33 * max(0, s - 6) for s in range(80)]
    slower = {"window": lambda s: {"step": steps[s], "window_steps": steps[s] - steps[max(0, s - 1)]}}
    leak = {"host": lambda s: {"rss_bytes": 10**9 + 14_000_000 * steps[s]}, "seconds": 18, "startup": 0}
    assert [f.id for f in findings(tmp_path / "leak", leak | slower)] == ["host_memory_leak"]
    cache = {"host": lambda s: {"rss_bytes": 10**9 + 14_000_000 * min(500, steps[s])}, "seconds": 40, "startup": 0}
    assert not findings(tmp_path / "cache", cache | slower)


def test_a_leak_is_seen_through_the_workers_of_each_epoch(tmp_path: Path) -> None:
    """Recorded of a job that caches: its workers share 450 MB with it, which count twice, and end after 20 s each."""

    def memory(s: int) -> dict[str, int]:
        own = 900_000_000 + 15_000_000 * s
        return {"largest_rss_bytes": own, "rss_bytes": own + 450_000_000 * (1 + (s % 20 > 17))}

    found = of(findings(tmp_path / "run", {"host": memory, "seconds": 40}), "host_memory_leak")
    assert "in a straight line (14.3" in found.evidence[0].text


@pytest.mark.parametrize(("in_workers", "is_named"), [(0.9, True), (0.1, False)])
def test_memory_that_grows_in_loader_workers_is_theirs(in_workers: float, is_named: bool, tmp_path: Path) -> None:
    def memory(s: int) -> dict[str, int]:
        return {"rss_bytes": 10**9 + 10**7 * s, "largest_rss_bytes": int(8e8 + (1 - in_workers) * 10**7 * s)}

    found = of(findings(tmp_path / "run", {"host": memory}), "host_memory_leak")
    assert ("besides the largest one" in found.evidence_text) is is_named


@pytest.mark.parametrize(
    ("limit", "growth", "severity"), [(16, [], "warning"), (160, [], "info"), (160, None, "warning")]
)
def test_memory_that_would_last_for_hours_is_info_where_nothing_holds_it(
    limit: int, growth: list[Any] | None, severity: str, tmp_path: Path
) -> None:
    """As of a healthy GAN that was seen for 35 s. limit: GiB of the machine."""
    holder = {"name": "kept", "place": "train.py:9", "text": "`kept` has 900 entries", "bytes": 1e8, "grown": 1e8,
              "graph": False}  # fmt: skip
    job = {"host": lambda s: {"rss_bytes": 2 * GIB + 7 * MIB * (s // 3), "memory_limit_bytes": limit * GIB,
                              "memory_used_bytes": 4 * GIB},
           "facts": FACTS | {"growth": [holder] if growth is None else growth}}  # fmt: skip
    found = of(findings(tmp_path / "run", job), "host_memory_leak")
    assert found.severity == severity
    assert ("watch it for longer" in found.evidence_text) is (severity == "info")


@pytest.mark.parametrize(
    ("kind", "job", "severity"),
    [
        ("retained_graph", {"host": lambda s: {"rss_bytes": GIB + 100 * MIB * (s % 9)}}, "warning"),
        ("retained_graph", {"host": lambda s: {"rss_bytes": GIB + 100 * MIB * (s % 3)}}, "info"),
        ("torch_threads", {}, "warning"),
        ("torch_threads", {"gpus": 1}, None),
        ("weights_grow", {"losses": lambda s: {"total": 5.0 + 0.1 * (s % 3)}}, "warning"),
        ("weights_grow", {"losses": lambda s: {"total": 5.0 / (1 + s)}}, None),
        ("weights_grow", {}, None),
        ("class_loss", {"losses": lambda s: {"total": 2.3026 + 0.01 * (s % 3 - 1)}}, "warning"),
        ("class_loss", {"losses": lambda s: {"total": 2.3 / (1 + s)}}, None),
        ("class_loss", {"losses": lambda s: {"total": 1.9 + 0.01 * (s % 3 - 1)}}, "info"),
    ],
)
def test_what_harms_only_together_with_a_symptom(
    kind: str, job: dict[str, Any], severity: str | None, tmp_path: Path
) -> None:
    """Graphs that are kept where memory rises, threads where the cores compute, weights where nothing is learned."""
    seen = {"kind": kind, "place": "/job/train.py:9", "threads": 8, "cores": 2, "steps": 16, "factor": 15.0,
            "first": 0.03, "last": 0.4, "lr": 0.1, "optimizer": "Adam", "classes": 10}  # fmt: skip
    inside = {"external": True, "config": None, "facts": FACTS | {"mistakes": [seen]}}
    found = {finding.id: finding.severity for finding in findings(tmp_path / "run", job | inside)}
    assert found.get(mistake_kinds()[kind].cause) == severity


@pytest.mark.parametrize(("lowest", "is_found"), [(1.25e-6, True), (3e-6, False)])
def test_a_schedule_of_epochs_that_is_counted_in_steps(lowest: float, is_found: bool, tmp_path: Path) -> None:
    """From 3e-4 within 10 of 45 s."""
    job = {"external": True, "config": None, "window": lambda s: {"lr": lowest if s > 10 else 3e-4, "window_steps": 8}}
    assert ("lr_too_low" in [finding.id for finding in findings(tmp_path / "run", job)]) is is_found


def test_a_leak_is_the_reason_of_an_end_for_memory(tmp_path: Path) -> None:
    """Also of one by a limit that the telemetry does not see: 12 GiB of the machine are free."""
    leak = {"host": lambda s: {"rss_bytes": 10**9 + 10**8 * s}, "external": True, "config": None, "end": None}
    alive = findings(tmp_path / "alive", leak | {"end": "finished"})[0]
    assert alive.evidence[1].text == "it will be full in 2 min, at step 1,400"
    for name, data, ending in (
        ("limit", {"exit_code": 1}, "host_out_of_memory"),
        ("kernel", {"exit_code": 137, "signal": 9, "oom_kills": 1}, "oom_killed"),
    ):
        text = "MemoryError: Unable to allocate 1.2 GiB for an array with shape (9,)" if name == "limit" else "killed"
        found = findings(tmp_path / name, leak | {"events": [("failed", text, data)], "event_t": lambda _: T0 + 46})
        assert [(f.id, f.severity) for f in found[:2]] == [("host_memory_leak", "critical"), (ending, "critical")]
        assert found[0].evidence[0].text.endswith("95.37 MiB/s, 11.92 MiB a step)"), found[0].evidence
        assert "full in" not in " ".join(line.text for line in found[0].evidence)


def test_open_files_near_the_limit_are_a_note_and_a_leak_of_them_is_not(tmp_path: Path) -> None:
    severities = {"many": lambda _: {"open_fds": 1000}, "leak": lambda s: {"open_fds": 100 + s}}
    found = {name: findings(tmp_path / name, {"host": host}) for name, host in severities.items()}
    assert [(f.id, f.severity) for f in found["many"]] == [("fd_limit_near", "info")]
    assert [(f.id, f.severity) for f in found["leak"]] == [("fd_limit_near", "critical")]  # in a quarter of an hour


def test_a_single_long_pause_between_steps_is_no_cost_of_the_steps(tmp_path: Path) -> None:
    """As after the first epoch of Ultralytics, which imports its plots then."""
    job = {"external": True, "config": None, "seconds": 12, "fractions": {}}
    once = job | {"window": lambda s: {"phases": {"host": 5.9, "compute": 0.1}, "wall_s": 6.0} if s == 14 else {}}
    each = job | {"window": lambda _: {"phases": {"host": 0.2, "compute": 0.8}}}
    assert [f.id for f in findings(tmp_path / "once", once | {"host": lambda _: {"process_cpu": 1.0}})] == []
    found = findings(tmp_path / "each", each | {"host": lambda _: {"process_cpu": 1.0}})
    assert [f.id for f in found] == ["python_bound"]


def test_a_mistake_precedes_python_that_is_slow(tmp_path: Path) -> None:
    """Python between the steps is often in the nature of a program; other causes keep their order."""
    mistake = {"facts": FACTS | {"mistakes": [{"kind": "eval_mode", "place": "train.py:90"}]}}
    for cause, is_first in (("python_bound", True), ("input_bound", False)):
        job, _ = CASES[cause]
        order = {f.id: f.severity for f in findings(tmp_path / cause, job | mistake) if f.severity != "info"}
        assert order[cause] == order["training_mistake"] == "warning"
        assert (next(iter(order)) == "training_mistake") is is_first


def test_gradients_of_zero_beside_a_loss_of_zero_are_labels_that_do_not_count(tmp_path: Path) -> None:
    mistake = {"facts": FACTS | {"mistakes": [{"kind": "zero_gradients", "place": "train.py:36", "step": 48}]}}
    for name, loss in (("none", 0.0), ("some", 0.5)):
        job = mistake | {"losses": lambda _, x=loss: {"total": x}}
        finding = of(findings(tmp_path / name, job), "training_mistake")
        assert finding.place == "train.py:36"
        assert ("no target of any sample counts" in finding.evidence_text) == (loss == 0)


def test_few_stack_samples_prove_little(tmp_path: Path) -> None:
    job = {"external": True, "config": None, "fractions": {"unattributed": 1.0}}
    main = {"python": 0.2, "compute": 0.8}
    few = findings(tmp_path / "few", job | {"stacks": [{"main_thread": main, "samples": 5}]})
    many = findings(tmp_path / "many", job | {"stacks": [{"main_thread": main, "samples": 50}] * 4})
    assert "python_bound" not in {f.id for f in few}
    assert "python_bound" in {f.id for f in many}


def test_stack_samples_of_the_start_do_not_count(tmp_path: Path) -> None:
    """Half of a line's samples are imports."""
    job = {"external": True, "config": None, "fractions": {"unattributed": 1.0}, "startup": 10}
    line = {"t": 1_000_016.0, "main_thread": {"other": 0.5, "python": 0.25, "compute": 0.25}, "samples": 40}
    finding = of(findings(tmp_path / "run", job | {"stacks": [line]}), "python_bound")
    assert finding.evidence[0].value == pytest.approx(0.5)


@pytest.mark.parametrize("samples", [40, 0])
def test_a_watched_job_without_a_clock_has_no_unattributed_time_where_stacks_tell_what_it_did(
    samples: int, tmp_path: Path
) -> None:
    stacks = [{"samples": samples, "main_thread": {"python": 1.0}, "t": T0 + 20.0 + 10 * n} for n in range(3)]
    make_run(tmp_path / "run", external=True, config=None, fractions={"unattributed": 1.0}, seconds=60,
             stacks=stacks if samples else ())  # fmt: skip
    named_notes = [note.id for note in notes(tmp_path / "run")]
    assert ("unattributed_time" in named_notes) is (samples == 0)


@pytest.mark.parametrize(("lines", "is_found"), [(range(10, 60, 10), True), (range(50, 60, 10), False)])
def test_one_burst_of_compilations_is_not_recompiling(lines: range, is_found: bool, tmp_path: Path) -> None:
    """Forty small functions that JAX compiles when samples are drawn for the first time, in a line of ten seconds."""

    def line(second: int) -> dict[str, Any]:
        compiles = second in lines
        return {"recompiles": 40 * compiles, "wall_s": 8.0 if compiles else 1.0,
                "phases": {"compile": 4.0, "unattributed": 4.0} if compiles else {"unattributed": 1.0}}  # fmt: skip

    case = {"external": True, "config": None, "seconds": 60, "window": line}
    assert ("recompiles" in {finding.id for finding in findings(tmp_path / "run", case)}) is is_found


@pytest.mark.parametrize(("without", "severity"), [(1, "critical"), (0, None)])
def test_an_optimizer_without_gradients_learns_nothing(without: int, severity: str | None, tmp_path: Path) -> None:
    seen = {"kind": "no_gradients", "place": "train.py:60", "steps": 32}
    job = {"config": None, "external": True, "seconds": 40, "losses": lambda s: {"total": 2.3 - 0.02 * s},
           "facts": FACTS | {"mistakes": [seen]},
           "window": lambda _: {"steps_without_gradients": 5 * without, "window_steps": 5}}  # fmt: skip
    found = {finding.id: finding for finding in findings(tmp_path / "run", job)}
    assert (found["lr_too_low"].severity if "lr_too_low" in found else None) == severity
    if severity:
        assert "no parameter of the optimizer had a gradient in" in found["lr_too_low"].evidence[0].text
        assert found["lr_too_low"].place == "train.py:60"


@pytest.mark.parametrize(
    ("lr", "is_found"),
    [
        (lambda s: 0.1 * 0.1 ** (s // 3), True),  # StepLR(30) that is stepped after each batch
        (lambda s: 0.1 * 0.1 ** (s // 20), False),  # after each epoch
        (lambda s: 0.05 * (1 + math.cos(math.pi * s / 60)), False),
        (lambda s: 1e-6 * s, False),  # a warm-up
    ],
)
def test_a_schedule_that_counts_batches_as_epochs(lr: Callable[[int], float], is_found: bool, tmp_path: Path) -> None:
    job = {"config": None, "external": True, "seconds": 60, "losses": lambda s: {"total": 2.3 - 0.02 * s},
           "window": lambda s: {"lr": lr(s), "window_steps": 10}}  # fmt: skip
    found = [finding for finding in findings(tmp_path / "run", job) if finding.id == "lr_too_low"]
    assert [finding.severity for finding in found] == (["warning"] if is_found else [])
    assert all("early" in finding.title or "before the end" in finding.title for finding in found)


@pytest.mark.parametrize(("rise", "is_sudden"), [(0.0, True), (0.2, False)])
def test_a_loss_that_becomes_nan_at_once_is_not_the_learning_rate(rise: float, is_sudden: bool, tmp_path: Path) -> None:
    """But the batch, or an operation; a loss that has grown before is."""
    job = {"config": None, "external": True, "seconds": 60,
           "losses": lambda s: {"total": 1.0 + rise * s} if s < 30 else {},
           "events": [("warning", "the job printed that total is nan", {"not_finite": "total"})]}  # fmt: skip
    found = of(findings(tmp_path / "run", job), "non_finite_loss")
    assert found.fix.startswith("It became so at once") is is_sudden
    assert ("the last finite loss was 1" in found.evidence_text) is is_sudden


@pytest.mark.parametrize(("from_second", "is_found"), [(None, True), (2, False)])
def test_a_learning_rate_of_zero(from_second: int | None, is_found: bool, tmp_path: Path) -> None:
    """As an integer division makes it; not in the first steps of a warm-up. The loss may not be known."""

    def rate(second: int) -> float:
        return 0.0 if from_second is None or second < from_second else 0.1

    job = {"config": None, "external": True, "seconds": 60, "losses": lambda _: {},
           "window": lambda s: {"lr": rate(s), "window_steps": 10}}  # fmt: skip
    found = [finding for finding in findings(tmp_path / "run", job) if finding.id == "lr_too_low"]
    assert [(finding.title, finding.severity) for finding in found] == (
        [("The learning rate is 0", "critical")] if is_found else []
    )


@pytest.mark.parametrize(
    ("loss", "is_found"),
    [
        (lambda s: 1.4 - 0.1 * s * s, True),  # nll_loss of probabilities that are none
        (lambda s: 1.4 - 0.05 * s, False),  # a critic
        (lambda s: -100 - s, False),  # a likelihood, which may be negative from the beginning
    ],
)
def test_a_loss_that_falls_without_a_bound(loss: Callable[[int], float], is_found: bool, tmp_path: Path) -> None:
    job = {"config": None, "external": True, "seconds": 60, "losses": lambda s: {"total": loss(s)}}
    found = [finding.title for finding in findings(tmp_path / "run", job) if finding.id == "training_mistake"]
    assert len(found) == is_found
    assert all("below zero" in title for title in found)


@pytest.mark.parametrize(
    ("loss", "finding"),
    [
        (lambda _: 2.3026, ("lr_too_low", "guesses among 10 classes")),  # inputs of 0 to 255 ended all learning
        (lambda s: 4.9 if s < 5 else 6.2402, ("lr_too_high", "and does not change")),  # features that are all the same
        (lambda s: 2.3026 + 0.01 * (s % 3), None),  # the noise of a training that learns slowly
        (lambda s: 2.3 - 0.02 * s if s < 50 else 1.3012, None),  # as low as it gets
        (lambda _: 0.01, None),  # of two decimals nothing is seen
        (lambda s: 2.3026 if s < 30 else 2.0, None),  # it began late
    ],
)
def test_a_loss_that_does_not_change_at_all(
    loss: Callable[[int], float], finding: tuple[str, str] | None, tmp_path: Path
) -> None:
    job = {"config": None, "external": True, "seconds": 60, "losses": lambda s: {"total": loss(s)},
           "window": lambda _: {"window_steps": 4}}  # fmt: skip
    found = [one for one in findings(tmp_path / "run", job) if one.severity != "info"]
    assert [one.id for one in found] == ([finding[0]] if finding else [])
    assert all(finding is not None and finding[1] in one.evidence[0].text for one in found)


@pytest.mark.parametrize(
    ("loss", "id"),
    [(lambda _: 2.3026, "lr_too_low"), (lambda s: 2.3 + 4 * s, "lr_too_high"), (lambda s: 2 / (1 + s), "")],
)
def test_images_up_to_255_are_a_reason_where_a_training_fails(
    loss: Callable[[int], float], id: str, tmp_path: Path
) -> None:
    job = {"config": None, "external": True, "seconds": 60, "losses": lambda s: {"total": loss(s)},
           "window": lambda _: {"window_steps": 4},
           "facts": FACTS | {"mistakes": [{"kind": "unscaled_images", "place": "/job/train.py:9"}]}}  # fmt: skip
    found = [one for one in findings(tmp_path / "run", job) if one.severity != "info"]
    assert [one.id for one in found] == ([id] if id else [])
    assert all("/job/train.py:9: the images" in "\n".join(e.text for e in one.evidence) for one in found)


@pytest.mark.parametrize(("inside", "is_found"), [("torch in a process, without a known data loader", True),
                                                   ("compilations of jax 0.10", False)])  # fmt: skip
def test_evaluations_of_a_job_whose_loader_is_not_known(inside: str, is_found: bool, tmp_path: Path) -> None:
    """A loop that takes single images of a list; the clock saw its steps and evaluations."""
    fractions = {"eval": 0.5, "unattributed": 0.5, "compute": 0}
    job = {"config": None, "external": True, "seconds": 60, "fractions": fractions,
           "events": [("info", "inside", {"coverage": {"inside the job": f"recorded: {inside}"}})]}  # fmt: skip
    found = {finding.id: finding.severity for finding in findings(tmp_path / "run", job)}
    assert (found.get("evaluation_heavy") in ("warning", "critical")) is is_found


@pytest.mark.parametrize(("noise", "severity"), [(0.0, "warning"), (0.03, "info")])
def test_a_loss_that_is_still_for_a_thousand_steps_is_a_warning(noise: float, severity: str, tmp_path: Path) -> None:
    """All layers are frozen; a loss that is as low as it gets still varies."""
    losses = [2.3 * (1 - noise * (s >= 10) + noise * (s >= 30) / 2 + noise / 20 * (s % 2)) for s in range(100)]
    job = {"config": None, "external": True, "seconds": 60, "losses": lambda s: {"total": losses[s]},
           "window": lambda _: {"window_steps": 40}}  # fmt: skip
    assert of(findings(tmp_path / "run", job), "lr_too_low").severity == severity


@pytest.mark.parametrize(("last", "is_found"), [(30, False), (60, True)])
def test_what_is_compiled_in_the_first_half_only_is_not_compiled_again_and_again(
    last: int, is_found: bool, tmp_path: Path
) -> None:
    """As a program of JAX, whose parts are used for the first time in its first minute."""

    def line(second: int) -> dict[str, Any]:
        compiles = second < last
        return {"recompiles": 4 * compiles,
                "phases": {"compile": 0.4, "unattributed": 0.6} if compiles else {"unattributed": 1.0}}  # fmt: skip

    case = {"external": True, "config": None, "seconds": 60, "window": line}
    assert ("recompiles" in {finding.id for finding in findings(tmp_path / "run", case)}) is is_found
