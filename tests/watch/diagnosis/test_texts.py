"""What findings say to jobs of other makers: the names of their framework, no flag of stoker, no device without one.

The patterns are written here, not taken from the code; the flags are those of the command line's help.
"""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker_watch.cli import trainer
from stoker_watch.diagnosis.causes.cause import fill_apis
from stoker_watch.diagnosis.endings import endings
from stoker_watch.diagnosis.engine import CATALOG, run_rules
from stoker_watch.diagnosis.notes import collect_notes
from stoker_watch.diagnosis.postmortem import explain
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.diagnosis.run_data import LogLine, RunRecords, Termination
from stoker_watch.findings.finding import Finding
from stoker_watch.report.explain import PHASE_MEANINGS
from stoker_watch.report.sizing import advise_sizing, resource_usage
from tests.watch.diagnosis.built import FACTS, make_run
from tests.watch.diagnosis.cases import CASES
from tests.watch.diagnosis.test_catalog import NATIVE_ONLY

OF_TORCH = r"(?i)torch|(?<!grain\.)DataLoader|\bDALI\b|TrainingArguments|\.detach\(|LightningModule"
OF_TENSORFLOW = r"\btf\.|tensorflow|TF_|AUTOTUNE|(?i:keras)|PyDataset|GradientTape"
OF_JAX = r"(?i)\bjax|flax|orbax|optax|XLA_PYTHON|jnp\."
OTHER_TRAINERS = {
    "Lightning": r"Trainer\((?!Arg)|ModelCheckpoint\(every_n|self\.log\(",
    "transformers": r"TrainingArguments",
    "timm": r"timm|--recovery-interval",
    "accelerate": r"Accelerator\b",
    "ultralytics": r"(?i)ultralytics|model\.train\(|save_period",
    "mmengine": r"train_dataloader=dict|CheckpointHook",
}
FRAMEWORKS = {
    # what `stoker watch` records → what must not be said to it
    "torch 2.9.0": (OF_TENSORFLOW, OF_JAX, *OTHER_TRAINERS.values()),
    "torch 2.9.0, pytorch_lightning": (OF_TENSORFLOW, OF_JAX, OTHER_TRAINERS["timm"], OTHER_TRAINERS["transformers"]),
    "torch 2.9.0, transformers, accelerate": (OF_TENSORFLOW, OF_JAX, OTHER_TRAINERS["timm"]),
    "torch 2.9.0, accelerate": (OF_TENSORFLOW, OF_JAX, OTHER_TRAINERS["transformers"], OTHER_TRAINERS["timm"]),
    "torch 2.9.0, timm": (OF_TENSORFLOW, OF_JAX, OTHER_TRAINERS["transformers"], OTHER_TRAINERS["Lightning"]),
    "torch 2.9.0, ultralytics": (OF_TENSORFLOW, OF_JAX, OTHER_TRAINERS["transformers"], OTHER_TRAINERS["timm"]),
    "torch 2.9.0, mmengine": (OF_TENSORFLOW, OF_JAX, OTHER_TRAINERS["transformers"], OTHER_TRAINERS["timm"]),
    "TensorFlow 2.20.0": (OF_TORCH, OF_JAX, *OTHER_TRAINERS.values()),
    "Keras 3.15.1 on tensorflow": (OF_TORCH, OF_JAX, *OTHER_TRAINERS.values()),
    "Keras 3.15.1 on torch": (OF_JAX, *OTHER_TRAINERS.values()),
    "jax 0.8.0": (OF_TORCH, OF_TENSORFLOW, *OTHER_TRAINERS.values()),
    "": (),
}  # fmt: skip
OWN_API = {
    ("checkpoint_heavy", "torch 2.9.0, pytorch_lightning"): "every_n_train_steps",
    ("checkpoint_heavy", "torch 2.9.0, timm"): "--recovery-interval",
    ("checkpoint_heavy", "torch 2.9.0, transformers, accelerate"): "save_steps",
    ("checkpoint_heavy", "torch 2.9.0, ultralytics"): "save_period",
    ("checkpoint_heavy", "jax 0.8.0"): "save_interval_steps",
    ("checkpoint_heavy", "Keras 3.15.1 on torch"): "save_freq",
    ("workers_start_again", "torch 2.9.0"): "persistent_workers=True",
    ("workers_start_again", "torch 2.9.0, transformers, accelerate"): "dataloader_persistent_workers=True",
    ("workers_start_again", "torch 2.9.0, mmengine"): "persistent_workers=True",
    ("input_bound", "TensorFlow 2.20.0"): "num_parallel_calls",
    ("input_bound", "Keras 3.15.1 on tensorflow"): "use_multiprocessing",
    ("recompiles", "jax 0.8.0"): "JAX_EXPLAIN_CACHE_MISSES",
}
MORE_CASES: dict[str, dict[str, Any]] = {
    "input_bound": {
        "fractions": {"input_wait": 0.3},
        "host": lambda _: {"process_cpu": None, "cpu_core_utilization": []},
    },
    "too_few_workers": {
        "fractions": {"input_wait": 0.4}, "events": [("info", "", {"workers": 1})],
        "host": lambda _: {"process_cpu": 1.6, "cpu_core_utilization": [1.0, 0.6, 0.0, 0.0]},
    },
}  # fmt: skip
"""Of jobs without what only `stoker train` records: stages of its loader, its number of workers."""
DEVICE = r"(?i)\bdevices?\b(?!s?\.jsonl)"
NO_RESUME = r"(?i)(continues?|continued|resumes?) from (its|the) (last|newest) checkpoint"
NEEDS_GPU = {"gpus", "traces"}
"""Of a case: without them its cause is not there on a CPU."""
TOLD_OF_DEVICES = r"No space left on device|/dev/|Device or resource busy"


def flags_of_train() -> set[str]:
    """None where the trainer is not installed: then no flags are looked for."""
    if not trainer.IS_INSTALLED:
        return set()
    printed = subprocess.run(
        [sys.executable, "-m", "stoker_watch", "train", "--help-all"], capture_output=True, text=True, check=True
    ).stdout
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", printed))
    assert {"--batch-size", "--workers", "--cache", "--run-dir"} <= flags
    return flags - {"--help", "--help-all"}


@pytest.fixture(scope="module")
def flags() -> set[str]:
    return flags_of_train()


def whole_text(finding: Finding) -> str:
    """What is printed of it, without the names of records."""
    return "\n".join(
        [finding.title, *(item.text for item in finding.evidence), finding.fix, finding.command or "",
         finding.probe_result or "", *finding.config_patch]
    )  # fmt: skip


def check(text: str, flags: set[str], *, has_device: bool) -> None:
    assert not set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) & flags, text
    assert not re.search(r"STOKER_|--batch-size auto|auto.?batch|`stoker (train|predict|export|launch)", text), text
    assert not re.search(NO_RESUME, text), text
    assert not re.search(r"\{\w*\}", text), text
    if not has_device:
        assert not re.search(DEVICE, re.sub(TOLD_OF_DEVICES, "", text)), text


def foreign(case: dict[str, Any], *, external: bool) -> dict[str, Any]:
    """The case as a watched job, or as one inside of `stoker.measure`."""
    inside = ("info", "", {"coverage": {"inside the job": f"recorded: {MAIN[0]}"}})
    return {**case, "external": external, "config": None, "events": [*case.get("events", ()), inside]}


MAIN = ("torch 2.9.0", "TensorFlow 2.20.0", "")


@pytest.mark.parametrize("all_pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_cause_says_to_a_foreign_job_what_it_does_not_have(all_pairs: bool, flags: set[str], tmp_path: Path) -> None:
    """Of all cases and the main frameworks, and of each other one the cases with names of its own; or of all pairs. A
    run is written and read once, and then said to be of each framework; without a GPU and in `stoker.measure`, of one.
    """
    seen: dict[str, dict[str, str]] = {frameworks: {} for frameworks in FRAMEWORKS}
    for number, has in enumerate([*(has for has, _ in CASES.values()), *MORE_CASES.values()]):
        for on_gpu, external in ((True, True), (False, True), (False, False)):
            case = foreign(has, external=external)
            if on_gpu:
                case = {"gpus": 1} | case
            run = read_run(make_run(tmp_path / f"{number}-{on_gpu}-{external}", **({"facts": FACTS} | case)))
            assert run.frameworks == f"recorded: {MAIN[0]}"
            ids: set[str] | None = None
            for frameworks in FRAMEWORKS:  # MAIN[0] is the first
                has_own_name = any(cause in (ids or ()) for cause, framework in OWN_API if framework == frameworks)
                if all_pairs or ids is None or (on_gpu and frameworks in MAIN) or has_own_name:
                    run = dataclasses.replace(run, frameworks=frameworks and f"recorded: {frameworks}")
                    texts = check_findings(run, frameworks, flags, has_device=bool(case.get("gpus")))
                    seen[frameworks] |= texts
                    ids = set(texts) if ids is None else ids
    for frameworks in FRAMEWORKS if all_pairs else MAIN[:1]:
        missing = set(CATALOG) - seen[frameworks].keys() - NATIVE_ONLY - {"augmentation_heavy", "training_from_scratch"}
        assert not missing, f"no case as a watched job: {missing}"
    for (cause, frameworks), api in OWN_API.items():
        assert api in seen[frameworks][cause], (cause, frameworks)


def check_findings(run: RunRecords, frameworks: str, flags: set[str], *, has_device: bool) -> dict[str, str]:
    """Checks all findings of a run; returns their texts by id."""
    seen: dict[str, str] = {}
    found = run_rules(run)
    for finding in [*found, *collect_notes(run, found), *advise_sizing(resource_usage(run, {}))]:
        text = seen[finding.id] = whole_text(finding)
        check(text, flags, has_device=has_device)
        for pattern in FRAMEWORKS[frameworks]:
            assert not re.search(pattern, f"{finding.fix}\n{finding.command}"), (frameworks, finding.fix)
    meanings = "; ".join(PHASE_MEANINGS[phase] for phase in run.totals.phases if phase != "h2d")
    assert has_device or not re.search(DEVICE, meanings)
    return seen


@pytest.mark.parametrize("frameworks", FRAMEWORKS)
@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_rows_name_the_api_of_the_framework(cause: Any, frameworks: str) -> None:
    if cause.id in NATIVE_ONLY or cause.required_records[0].startswith("config.toml"):
        return
    others = [fix for name, fix in cause.other_fixes.items() if name != "graph"]  # said where torch's tensors were seen
    for fix in (cause.external_fix or cause.fix, *others):
        text = fill_apis(fix, frameworks)
        for pattern in FRAMEWORKS[frameworks]:
            assert not re.search(pattern, text), text


def test_the_loader_that_the_stacks_show_is_named() -> None:
    fix = CATALOG["too_few_workers"].external_fix
    assert "use_multiprocessing" in fill_apis(fix, "Keras 3.15.1 on torch")
    assert "DataLoader(num_workers" in fill_apis(fix, "Keras 3.15.1 on torch", "torch.utils.data.dataloader.__next__")
    assert "num_parallel_calls" in fill_apis(fix, "Keras 3.15.1 on tensorflow", "__next__ (data/ops/iterator_ops.py)")
    assert "DataLoader" in fill_apis(fix, "", "torch.utils.data.dataloader.__next__")


ABOUT_DEVICES = {"gpu_index_invalid", "no_gpu_found", "device_mismatch", "op_not_implemented", "batch_configuration"}
"""Endings whose lines are printed where a device was asked for."""


@pytest.mark.parametrize("ending", endings().values(), ids=lambda ending: ending.id)
def test_no_ending_says_what_the_job_does_not_have(ending: Any, flags: set[str]) -> None:
    check(f"{ending.title}\n{ending.fix}", flags, has_device=ending.id in ABOUT_DEVICES)
    for sample in ending.samples:
        output = tuple(LogLine(line, "output.log:1") for line in sample.text.splitlines())
        for finding in explain(Termination(exit_code=1, source="events.jsonl:2", output=output)):
            check(f"{finding.title}\n{finding.fix}\n{finding.command}", flags,
                  has_device=finding.id in ABOUT_DEVICES)  # fmt: skip
