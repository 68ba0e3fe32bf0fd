"""Runs, checkpoints, model files and settings that versions before 0.2 wrote stay readable.

`run_of_old_names.tar.gz` is a run that such a version wrote on the demo: killed by SIGTERM at step 80 of 120, with its
tensors set to zero so that it is small, and with a line of every record in which every renamed field is set.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest

from stoker.config import old_names
from stoker.config.settings import SECTION_OF, from_toml
from stoker.evaluation.document import read_evaluation
from stoker.report.explain import explain_run
from stoker.runs import records, schemas
from stoker.runs.totals import compute_totals
from stoker.storage.lease import LeaseHolder

ARCHIVE = Path(__file__).with_name("run_of_old_names.tar.gz")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run-before-renaming"


def read(run: Path, name: str, kind: type[msgspec.Struct]) -> list[msgspec.Struct]:
    return list(records.read_lines(run, name, kind))


def test_lines_of_every_record_are_read_with_all_their_values(run: Path) -> None:
    window = read(run, "steps.jsonl", schemas.StepWindow)[-1]
    assert isinstance(window, schemas.StepWindow)
    assert (window.window_steps, window.num_images, window.lr, window.skipped_steps) == (4, 16, 0.002, 2)
    assert (window.host_bound_steps, window.thread_cpu_s) == (3, {"compute": 1.25})
    assert window.input_wait_stages == {"decode": 0.5}
    (trace,) = read(run, "traces.jsonl", schemas.TraceWindow)
    assert isinstance(trace, schemas.TraceWindow)
    assert (trace.window_steps, trace.tensor_core_fraction) == (3, 0.5)
    assert (trace.gaps[0].duration_s, trace.gaps[0].host_op, trace.kernels[0].name) == (0.125, "aten::item", "gemm")
    (stacks,) = read(run, "stacks.jsonl", schemas.StackWindow)
    assert isinstance(stacks, schemas.StackWindow)
    assert stacks.main_thread == {"input_wait": 0.75, "compute": 0.25}
    probes = read(run, "probes.jsonl", schemas.Probe)
    assert [probe.probe for probe in probes if isinstance(probe, schemas.Probe)] == ["double_batch", "fewer_workers"]
    sample = read(run, "devices.jsonl", schemas.DeviceSample)[-1]
    assert isinstance(sample, schemas.DeviceSample)
    assert (sample.open_fds, sample.max_fds, sample.cpu_limit_cores) == (40, 1024, 2.0)
    assert sample.cpu_core_utilization == [0.5, 1.0]
    assert (sample.gpus[0].utilization, sample.gpus[0].memory_utilization, sample.gpus[0].power_w) == (0.5, 0.25, 100)
    (bad,) = read(run, "quarantine.jsonl", schemas.Quarantined)
    assert isinstance(bad, schemas.Quarantined)
    assert (bad.image_index, bad.sample_position, bad.replaced_by) == (17, 33, 18)


def test_events_have_the_kinds_and_keys_of_now(run: Path) -> None:
    events = [event for event in records.read_lines(run, "events.jsonl", schemas.Event)]
    by_kind = {event.kind: event for event in events}
    assert {event.kind for event in events} <= set(records.EVENT_KINDS)
    rollback = {"failed_at": 79, "rollback_step": 80, "count": 1, "lr": 0.0005, "best_ap": 0.01}
    assert by_kind["rolled_back"].data == rollback
    assert by_kind["lr_too_high"].data["suggested_lr"] == by_kind["loss_spike"].data["suggested_lr"] == 0.0005
    assert by_kind["loss_spike"].data["baseline"] == 1.5
    facts = next(event.data["facts"] for event in events if "facts" in event.data)
    assert (facts["num_images"], facts["median_pixels"]) == (2000, 16384)
    assert "ap50" in by_kind["evaluated"].data["metrics"]


def test_settings_are_read_with_their_reasons(run: Path) -> None:
    config, reasons = from_toml(run / "config.toml")
    assert (config.data.image_size, config.data.augment, config.run.max_duration) == ((64, 64), "default", "120")
    assert (config.run.compile, config.run.workers, config.run.batch_size) == (False, "auto", 4)
    assert (config.model.backbone_norm, config.optim.lr, config.run.cache) == ("bn", 0.0015, "none")
    assert set(reasons) <= set(SECTION_OF)
    assert "lr" in reasons
    tables = records.read_settings(run)
    assert tables is not None
    assert tables["run"]["workers"] == "auto"
    assert "canvas" not in tables["data"]


def test_every_old_setting_has_a_setting_of_now() -> None:
    assert set(old_names.SETTINGS.values()) <= set(SECTION_OF)
    assert not set(old_names.SETTINGS) & set(SECTION_OF)


@pytest.mark.parametrize("struct", [name for name in old_names.FIELDS if hasattr(schemas, name)])
def test_every_old_field_has_a_field_of_now(struct: str) -> None:
    names = set(getattr(schemas, struct).__struct_fields__)
    assert set(old_names.FIELDS[struct].values()) <= names
    assert not set(old_names.FIELDS[struct]) & names


def test_evaluation_findings_and_lease_are_read(run: Path) -> None:
    evaluation = read_evaluation(run)
    assert evaluation is not None
    assert evaluation.worst[0].gt_boxes
    assert sum(result.tp for result in evaluation.classes) >= 0
    finding = old_names.decode(
        msgspec.json.encode(msgspec.json.decode((run / "findings.json").read_bytes())[0]), schemas.Finding
    )
    assert (finding.cause, finding.lost_cost, finding.probe_result) == ("lr_too_low", 2.0, "v")
    assert finding.config_patch == {"lr": 0.02, "image_size": [64, 64]}
    assert finding.evidence[0].source == "steps.jsonl:3"
    holder = old_names.decode((run / "lease.json").read_bytes(), LeaseHolder)
    assert (holder.user, holder.process_start, holder.lease_duration_s) == ("ann", 123.0, 60.0)


def test_the_run_is_explained(run: Path) -> None:
    explanation = explain_run(run)
    totals = compute_totals(run)
    assert explanation.num_images == totals.num_images > 16
    assert sum(totals.phases.values()) == pytest.approx(totals.device_s)
    assert {row.phase for row in explanation.phases} >= {"compute", "startup", "input_wait"}


def test_checkpoint_and_model_are_loaded(run: Path) -> None:
    torch = pytest.importorskip("torch")
    from stoker.models.weights.model_file import load_model
    from stoker.training import checkpoint

    assert checkpoint.healthy_steps(run) == [80]
    loaded = checkpoint.load_newest(run, lambda kind, text: pytest.fail(f"{kind}: {text}"))
    assert loaded is not None
    assert loaded.step == 80
    assert loaded.state["data"] == {
        "num_images": 2000, "classes": ["circle", "square", "triangle", "star", "cross", "ring"], "max_boxes": 8
    }  # fmt: skip
    keys = {"optimizer_step", "evals_since_best", "pending_eval", "skipped_streak", "rollbacks"}
    assert keys <= set(loaded.state)
    model, metadata = load_model(run / "best.safetensors")
    assert (metadata.image_size, metadata.settings.backbone_norm) == ((64, 64), "bn")
    assert all(torch.count_nonzero(parameter) == 0 for parameter in model.parameters())


@pytest.mark.slow
def test_the_run_is_resumed_to_its_end(run: Path) -> None:
    """The state of the checkpoint is taken over; the weights are zero, so the numbers mean nothing."""
    command = [sys.executable, "-m", "stoker", "train", "--resume", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode in (0, 6), done.stderr
    attempt = records.last_attempt(run)
    assert attempt == 2
    steps = [w for w in records.read_lines(run, "steps.jsonl", schemas.StepWindow) if w.attempt == attempt]
    assert max(window.step for window in steps) > 80
    if done.returncode == 0:
        assert records.is_finished(run)
