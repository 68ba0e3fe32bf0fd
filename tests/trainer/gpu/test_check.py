"""`stoker check` on a real GPU: what the fakes stand for in tests/trainer/preflight/test_gpu.py."""

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from stoker.config.settings import from_fields  # noqa: E402
from stoker.hardware.selection import select_device  # noqa: E402
from stoker.planning.check import ask_memory_fit  # noqa: E402
from stoker.preflight.gpu import check_gpu  # noqa: E402
from stoker.preflight.short import quick_findings  # noqa: E402
from stoker_watch.recording.telemetry.gpu import read_driver  # noqa: E402
from tests.drawn import draw  # noqa: E402


def test_a_gpu_that_works_computes_and_its_versions_fit() -> None:
    found = {finding.id: finding for finding in check_gpu()}
    assert found["kernel"].severity == "ok"
    assert "TFLOP/s" in found["kernel"].evidence
    assert found["architecture"].severity == found["driver"].severity == found["cudnn"].severity == "ok"
    assert not [finding for finding in found.values() if finding.severity == "blocker"]


def test_the_driver_answers_what_is_asked_of_it() -> None:
    state = read_driver({})
    assert state.version
    assert state.num_gpus == len(state.gpus)
    gpu = state.gpus[0]
    assert gpu.persistence is not None
    assert gpu.compute_mode is not None


def test_the_short_form_takes_less_than_two_seconds_and_does_not_report_itself(tmp_path: Path) -> None:
    device = select_device("cuda")
    start_s = time.perf_counter()
    found = {finding.id for finding in quick_findings(device, tmp_path)}
    assert time.perf_counter() - start_s < 2.0
    assert "gpu_in_use" not in found


def test_the_worst_case_batch_is_measured(tmp_path: Path) -> None:
    settings = {"data": draw(tmp_path / "drawn"), "model": "retinanet_tiny_fpn", "weights": "none", "batch_size": 8}
    answer = ask_memory_fit(from_fields(settings), 300.0)
    fit = answer.fit
    assert fit is not None
    assert "tried on the device" in answer.finding.evidence_text
    assert fit.images_per_s > 0
