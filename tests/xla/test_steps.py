"""Twenty steps of every family through XLA's CPU client: losses, weights, moments, EMA and running statistics as
on a CPU, no operator that falls back to it, and two programs. `make test-xla`; skipped where torch_xla is not there.

Most compare in float64. A float32 step differs from the exact one by more than 1e-4 on a CPU alone, since rounding
flips what has no derivative: ReLUs near zero, and the signs of AdamW's first steps (docs/gpu-status.md).
"""

import os

import pytest

pytest.importorskip("torch_xla", reason="make test-xla")

os.environ["PJRT_DEVICE"] = "CPU"

import torch

from tests.xla.trials import BAD_STEP, Trial, compare, distances

TOLERANCE = 1e-4
"""Of a loss, and of a tensor's norm, after all steps."""
FOUR = (3, 0, 1, 2)

TRIALS = (
    Trial(model="retinanet_tiny_fpn", counts=FOUR, micro_batches=2),
    Trial(model="retinanet_tiny_fpn", optimizer="adamw"),
    Trial(model="fcos_resnet18_fpn"),
    Trial(model="faster_rcnn_mobilenet_v3_large_fpn"),
    Trial(model="ssdlite320_mobilenet_v3_large"),
    Trial(model="ember_n", optimizer="adamw"),
    Trial(model="deimv2_atto", optimizer="adamw", programs=4),
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def check(trial: Trial) -> None:
    cpu, xla = compare(trial)
    assert xla.fallbacks == []
    assert xla.compilations[-1] <= trial.programs, xla.compilations
    assert len(set(xla.compilations[1:])) == 1, xla.compilations
    assert [step for step, losses in enumerate(xla.losses) if losses[-1]] == [BAD_STEP]
    for step, (expected, actual) in enumerate(zip(cpu.losses, xla.losses, strict=True)):
        assert actual == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), f"step {step}"
    too_far = {name: distance for name, distance in distances(cpu, xla).items() if not distance <= TOLERANCE}
    assert too_far == {}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.model}-{trial.optimizer}")
def test_steps_are_those_of_the_cpu(trial: Trial):
    check(trial)


@pytest.mark.timeout(600)
def test_a_step_without_a_copy_of_the_statistics_fails(monkeypatch: pytest.MonkeyPatch):
    """The check sees what XLA's batch norm does not write through a view."""
    from stoker.training import optim

    monkeypatch.setattr(optim, "_copy_stats", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="running_"):
        check(Trial(model="retinanet_tiny_fpn", dtype=torch.float32, steps=BAD_STEP + 2))
