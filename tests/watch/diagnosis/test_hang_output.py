"""What a job that hangs has logged comes before that it hangs."""

from pathlib import Path

import pytest

from stoker_watch.diagnosis import termination
from stoker_watch.diagnosis.engine import run_rules
from stoker_watch.diagnosis.reader import read_run
from tests.watch.diagnosis.built import make_run

SHM = "RuntimeError: unable to allocate shared memory(shm) for file </torch_135_41_6>: No space left on device (28)"
"""PyTorch's message (aten/src/ATen/MapAllocator.cpp), as a loader worker prints it while the training waits for it."""


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        (["step 1 loss 0.5", "step 2 loss 0.4", SHM, "step 3 loss 0.4"], "shared_memory_full"),
        ([SHM, "step 1 loss 0.5", "step 2 loss 0.4", "step 3 loss 0.4"], "hung"),  # it went on after that
        (["step 1 loss 0.5", "step 2 loss 0.4"], "hung"),
        (["SSD.trainer INFO: No checkpoint found.", "step 1 loss 0.5"], "hung"),  # its only line of progress
    ],
)
def test_what_a_hanging_job_has_logged(
    lines: list[str], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(termination, "is_held", lambda *_: True)  # it lives
    run = make_run(
        tmp_path / "run", external=True, silent=60, end=None, host=lambda s: {"process_cpu": 0.01} if s > 44 else {}
    )
    (run / "output.log").write_text("\n".join(lines))
    found = [finding.id for finding in run_rules(read_run(run))]
    assert found[0] == first
    assert "hung" in found


THREAD = """\
step 1 loss 0.5
Exception in thread Thread-1:
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "/job/reader.py", line 7, in run
    raise RuntimeError("shard 250: bad magic number")
RuntimeError: shard 250: bad magic number"""


@pytest.mark.parametrize("lives", [True, False])
def test_a_thread_that_ended_is_what_the_others_wait_for(
    lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(termination, "is_held", lambda *_: lives)
    run = make_run(
        tmp_path / "run", external=True, silent=60, end=None, host=lambda s: {"process_cpu": 0.01} if s > 44 else {}
    )
    (run / "output.log").write_text(THREAD)
    first = next(finding for finding in run_rules(read_run(run)) if finding.id == "hung")
    assert "by RuntimeError: shard 250: bad magic number, raised at reader.py:7 (run)" in first.evidence_text
    assert first.fix.startswith("What waits for a thread that has ended")


def test_a_thread_whose_traceback_begins_behind_a_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a real job printed it (a pose network with tqdm, whose thread for previews met a picture without a joint)."""
    monkeypatch.setattr(termination, "is_held", lambda *_: True)
    run = make_run(
        tmp_path / "run", external=True, silent=60, end=None, host=lambda s: {"process_cpu": 0.01} if s > 44 else {}
    )
    header = " 14%|#3        | 11/80 [00:08<00:52]Exception in thread  15%|#5        | 12/80 [00:09<00:50]Thread-1:"
    raised = "ValueError: zero-size array to reduction operation minimum which has no identity"
    text = THREAD.replace("Exception in thread Thread-1:", header)
    (run / "output.log").write_text(text.replace("RuntimeError: shard 250: bad magic number", raised))
    first = run_rules(read_run(run))[0]
    assert first.id == "hung"
    assert f"a thread ended by {raised}, raised at reader.py:7 (run)" in first.evidence_text
