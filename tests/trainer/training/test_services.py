"""Services of the loop alone, where a whole training would show the same only by chance."""

from types import SimpleNamespace
from typing import Any

import pytest

from stoker.training.evaluator import Evaluator
from stoker.training.make_step import Step


@pytest.mark.parametrize("can_be_captured", [True, False])
def test_a_step_of_several_processes_is_never_captured(can_be_captured: bool, tmp_path, monkeypatch) -> None:
    """Also where a run that was started with --cuda-graph on one device continues on several."""
    monkeypatch.setattr("stoker.training.make_step.CudaCapture", lambda: None)
    config = SimpleNamespace(run=SimpleNamespace(cuda_graph=True), data=None)
    setup = SimpleNamespace(config=config, folder=SimpleNamespace(path=tmp_path))
    attempt: Any = SimpleNamespace(setup=setup, parallel=SimpleNamespace(can_be_captured=can_be_captured))
    assert (type(Step(attempt)._train).__name__ == "CudaGraphStep") is can_be_captured


def test_all_ranks_know_that_a_pending_evaluation_was_the_last_of_patience() -> None:
    """Rank 0 alone collects its metrics: the others must not train on and wait for it."""
    evaluator: Any = object.__new__(Evaluator)
    evaluator._setup = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(patience=2)),
        ranks=SimpleNamespace(share_value=lambda _: 2),  # that of rank 0
        state=SimpleNamespace(step=7),
    )
    evaluator._pending, evaluator.evaluated_step, evaluator.evals_since_best = None, 7, 1
    evaluator.collect = lambda: None
    evaluator.before_steps()
    assert evaluator.is_out_of_patience
