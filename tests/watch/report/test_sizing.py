"""Advice on the size of the machine: each rule applies for its numbers, and abstains if one is missing."""

import dataclasses
import re
from pathlib import Path

import pytest

from stoker_watch import knowledge
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.report.explain import explain_run
from stoker_watch.report.sizing import ResourceUsage, advise_sizing, resource_usage
from stoker_watch.runs.records import DEVICES, RunFolder
from stoker_watch.runs.schemas import DeviceSample, GpuSample
from tests.watch.report.runs import GIB, START_T, write_run

BASE = ResourceUsage(devices=1, phase_fractions={"compute": 0.95, "input_wait": 0.01})
APPLIES: dict[str, ResourceUsage] = {
    "more_cores": dataclasses.replace(
        BASE, phase_fractions={"compute": 0.5, "input_wait": 0.5}, cores=4.0, used_cores=3.9, fetch_fraction=0.1
    ),
    "local_disk": dataclasses.replace(BASE, phase_fractions={"compute": 0.5, "input_wait": 0.5}, fetch_fraction=0.9),
    "smaller_gpu": dataclasses.replace(
        BASE,
        phase_fractions={"compute": 0.4, "input_wait": 0.6},
        cores=4.0,
        used_cores=3.9,
        gpu_memory_fraction=0.2,
        fetch_fraction=0.9,
    ),
    "shared_gpu": dataclasses.replace(BASE, sm_active=0.1, gpu_memory_fraction=0.1),
    "larger_gpu": dataclasses.replace(BASE, sm_active=0.9),
    "fewer_gpus": dataclasses.replace(BASE, devices=8, phase_fractions={"compute": 0.6, "comm": 0.2, "straggler": 0.2}),
    "fewer_ranks": dataclasses.replace(BASE, on_cpu=True, devices=2, phase_fractions={"compute": 0.6, "comm": 0.4}),
}
"""Kind → usage for which its rule applies."""


def kinds(usage: ResourceUsage) -> set[str]:
    return {item.id for item in advise_sizing(usage)}


def test_every_rule_has_an_example() -> None:
    start = "# `stoker why` and `stoker report`: advice on the size of the machine"
    rows = (Path(knowledge.__file__).parent / "findings.toml").read_text().partition(start)[2].partition("\n# ")[0]
    assert set(re.findall(r"^\[(\w+)\]$", rows, re.MULTILINE)) == set(APPLIES)


@pytest.mark.parametrize("kind", APPLIES)
def test_a_rule_gives_evidence_with_sources(kind: str) -> None:
    advice = next(item for item in advise_sizing(APPLIES[kind]) if item.id == kind)
    assert advice.evidence
    assert any(evidence.source.partition(":")[0].endswith(".jsonl") for evidence in advice.evidence)
    assert advice.fix


@pytest.mark.parametrize("kind", APPLIES)
@pytest.mark.parametrize(
    "field",
    ["cores", "used_cores", "fetch_fraction", "gpu_memory_fraction", "sm_active"],
)
def test_a_rule_abstains_without_a_number_that_it_needs(kind: str, field: str) -> None:
    usage = APPLIES[kind]
    if getattr(usage, field) is None or (kind, field) in {
        ("more_cores", "fetch_fraction"), ("smaller_gpu", "fetch_fraction"),  # else it may be decoding
    }:  # fmt: skip
        return
    assert kind not in kinds(dataclasses.replace(usage, **{field: None}))


def test_no_advice_for_a_good_run_or_without_data() -> None:
    assert kinds(BASE) == set()
    assert kinds(ResourceUsage(devices=0, phase_fractions={})) == set()
    well = dataclasses.replace(
        BASE, sm_active=0.7, gpu_memory_fraction=0.8, cores=16.0, used_cores=6.0, fetch_fraction=0.2
    )
    assert kinds(well) == set()


def test_ranks_on_cpus_are_not_told_to_take_gpus() -> None:
    (advice,) = advise_sizing(APPLIES["fewer_ranks"])
    assert "GPU" not in advice.title + advice.fix
    assert "NVLink" not in advice.fix


def test_contradicting_advice_is_never_given() -> None:
    for usage in APPLIES.values():
        assert not {"larger_gpu", "smaller_gpu"} <= kinds(usage)
        assert not {"larger_gpu", "shared_gpu"} <= kinds(usage)


def test_the_recommended_cores_match_the_wait() -> None:
    """Half of the time is waiting, so twice the cores are as fast as the device."""
    (advice,) = (item for item in advise_sizing(APPLIES["more_cores"]) if item.id == "more_cores")
    assert "about 8 cores would decode as fast as the training needs it" in advice.evidence_text


def test_usage_is_read_from_the_time_of_the_steps(tmp_path: Path) -> None:
    """Samples before the first window, as a start writes them, do not count in the means."""
    run = write_run(tmp_path / "run", phases={"compute": 60.0, "input_wait": 40.0}, windows=1, samples=80, start_t=1e9,
                    stages={"decode": 30.0, "queue": 10.0}, sample={"process_cpu": 3.9, "cpu_limit_cores": 4.0},
                    gpu={"sm_active": 0.3, "memory_used_bytes": 3 * GIB, "memory_total_bytes": 15 * GIB})  # fmt: skip
    folder = RunFolder(run, 1)
    for t in (1e9 - 5.0, 1e9 + 500.0):  # before the first step and after the last
        folder.append(DEVICES, DeviceSample(t=t, attempt=1, process_cpu=0.0, gpus=[GpuSample(index=0, sm_active=0.0)]))
    folder.close()
    usage = resource_usage(read_run(run), {"gpu": {"gpus": [{"name": "Tesla T4"}]}})
    assert (usage.used_cores, usage.cores, usage.sm_active) == pytest.approx((3.9, 4.0, 0.3))
    assert (usage.gpu_memory_fraction, usage.fetch_fraction) == (0.2, 0.0)
    assert [item.id for item in explain_run(run).sizing_advice] == ["more_cores", "smaller_gpu"]


def test_few_samples_give_no_means(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", samples=5, sample={"process_cpu": 3.9, "cpu_limit_cores": 4.0}, gpu={"sm_active": 0.1}
    )
    usage = resource_usage(read_run(run), {})
    assert (usage.used_cores, usage.sm_active, usage.cores) == (None, None, None)


def test_devices_that_do_not_train_are_not_counted(tmp_path: Path) -> None:
    """A sample shows all GPUs of a machine where the run uses one."""
    one, both = (write_run(tmp_path / f"{devices}", devices=devices) for devices in (1, 2))
    for run in (one, both):
        folder = RunFolder(run, 1)
        for second in range(60):
            gpus = [GpuSample(index=index, sm_active=0.1) for index in range(2)]
            folder.append(DEVICES, DeviceSample(t=START_T + second, attempt=1, gpus=gpus))
        folder.close()
    assert resource_usage(read_run(one), {}).sm_active is None
    assert resource_usage(read_run(both), {}).sm_active == pytest.approx(0.1)
