"""Steps of a small model through XLA's CPU client: as on a CPU, no operator that falls back to it, and no program that
is compiled after the second step. `make test-xla`; skipped where torch_xla is not there."""

import os

import pytest

pytest.importorskip("torch_xla", reason="make test-xla")

os.environ["PJRT_DEVICE"] = "CPU"

import torch

from tests.xla.trials import Outcome, Trial, compare

TOLERANCE = 1e-4
"""Of a loss, and of a tensor's norm, after all steps."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def check(cpu: Outcome, xla: Outcome) -> None:
    assert xla.fallbacks == []
    # The first step, which computes the anchors as well; the second, which finds them; and `take` of the sums.
    assert xla.compilations[-1] <= 3, xla.compilations
    assert len(set(xla.compilations[2:])) == 1, xla.compilations
    for step, (expected, actual) in enumerate(zip(cpu.losses, xla.losses, strict=True)):
        assert actual == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), f"step {step}"
    assert cpu.tensors.keys() == xla.tensors.keys()
    for name, tensor in cpu.tensors.items():
        distance = (xla.tensors[name].double() - tensor.double()).norm()
        assert distance <= TOLERANCE * tensor.double().norm() + 1e-6, name


@pytest.mark.timeout(600)
def test_steps_are_those_of_the_cpu():
    check(*compare(Trial(model="retinanet_tiny_fpn")))


@pytest.mark.timeout(600)
def test_a_step_without_a_copy_of_the_statistics_fails(monkeypatch: pytest.MonkeyPatch):
    """The check sees what XLA's batch norm does not write through a view."""
    from stoker.training import optim

    monkeypatch.setattr(optim, "_copy_stats", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="running_"):
        check(*compare(Trial(model="retinanet_tiny_fpn")))
