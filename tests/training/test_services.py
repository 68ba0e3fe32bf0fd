"""Services of the loop alone, where a whole training would show the same only by chance."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import CaptureFailed
from stoker.training.evaluator import Evaluator
from stoker.training.make_step import Step
from stoker.training.saver import Saver


@pytest.mark.parametrize("can_be_captured", [True, False])
def test_a_step_of_several_processes_is_never_captured(can_be_captured: bool, tmp_path, monkeypatch) -> None:
    """Also where a run that was started with --cuda-graph on one device continues on several."""
    monkeypatch.setattr("stoker.training.make_step.CudaCapture", lambda: None)
    config = SimpleNamespace(run=SimpleNamespace(cuda_graph=True), data=None)
    setup = SimpleNamespace(config=config, folder=SimpleNamespace(path=tmp_path))
    attempt: Any = SimpleNamespace(setup=setup, parallel=SimpleNamespace(can_be_captured=can_be_captured))
    assert (type(Step(attempt)._train).__name__ == "CudaGraphStep") is can_be_captured


def test_a_save_that_fails_on_a_spoiled_device_does_not_hide_the_failed_capture() -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    events: list[str] = []
    loader = SimpleNamespace(
        state_dict=lambda: {"position": 12}, load_state_dict=lambda state: events.append(str(state))
    )
    saver: Any = object.__new__(Saver)
    saver._setup = SimpleNamespace(
        loader=loader,
        config=SimpleNamespace(run=SimpleNamespace(batch_size=4)),
        writer=SimpleNamespace(wait=lost),
    )
    saver._ledger = SimpleNamespace(phase=lambda _: contextlib.nullcontext())
    saver._log_event = lambda kind, text: events.append(f"{kind}: {text}")
    saver.save = lambda: None
    saver.save_before_restart(CaptureFailed("A step could not be captured.", cause="why"))
    assert events[0] == "cuda_graph_failed: A step could not be captured. why; training restarts without a graph"
    assert events[1] == "{'position': 8}", "the step that failed has not run: its batch comes again"
    assert events[2].startswith("checkpoint_failed: the state could not be saved: RuntimeError: CUDA error")


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
