"""Twenty steps of every family through XLA's CPU client: losses, weights, moments, EMA and running statistics as
on a CPU, no operator that falls back to it, and two programs. `make test-xla`; skipped where torch_xla is not there.

They compare in float64. A float32 step differs from the exact one by more than 1e-4 on a CPU alone, since rounding
flips what has no derivative: ReLUs near zero, and the signs of AdamW's first steps (docs/gpu-status.md). Deep models
take SGD: with AdamW, a difference of 1e-11 in the weights of `ember_n` changes gradients after nine steps on a CPU too.
Faster R-CNN has fewer steps, as XLA's CPU client takes ten seconds for each in float64; D-FINE and RF-DETR, since a
step takes it a minute to compile. A DETR model has a program more for each matching, which is on the host.
"""

import os
import subprocess
import sys

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
    Trial(model="faster_rcnn_mobilenet_v3_large_fpn", steps=8),
    Trial(model="ssdlite320_mobilenet_v3_large"),
    Trial(model="ember_n"),
    Trial(model="deimv2_atto", programs=3),
    Trial(model="dfine_n", programs=3, steps=5),
    Trial(model="rf_detr_n", programs=5, steps=5),
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


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: f"{trial.model}-{trial.optimizer}")
def test_steps_are_those_of_the_cpu(trial: Trial):
    check(trial)


@pytest.mark.timeout(600)
def test_a_step_without_a_copy_of_the_statistics_fails(monkeypatch: pytest.MonkeyPatch):
    """The check sees what XLA's batch norm does not write through a view."""
    from stoker.training import optim

    monkeypatch.setattr(optim, "copy_stats", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="running_"):
        check(Trial(model="retinanet_tiny_fpn", dtype=torch.float32, steps=BAD_STEP + 2))


TWO_CHIPS = """
import torch, torch_xla
from stoker.hardware.selection import select_device
from tests.xla.test_steps import check
from tests.xla.trials import Trial

(images,), _ = select_device("xla").make_stream().to_device([torch.zeros(4, 3, 8, 8)])
print(torch_xla._XLAC._get_xla_sharding_spec(images))
check(Trial(model="retinanet_tiny_fpn", steps=5, programs=3))
"""


@pytest.mark.timeout(600)
def test_two_chips_divide_a_batch_and_make_the_steps_of_a_cpu():
    """In a process of its own, as XLA's CPU client counts its devices once. The second step is another program: its
    weights are where the first left them."""
    done = subprocess.run(
        [sys.executable, "-c", TWO_CHIPS], env={**os.environ, "CPU_NUM_DEVICES": "2"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "devices=[2,1,1,1]" in done.stdout
