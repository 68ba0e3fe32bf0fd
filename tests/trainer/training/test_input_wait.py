"""The input wait of a real run with slow reads is attributed to the stage `fetch`, and the stages sum to the wait."""

import time
from pathlib import Path

import pytest

from stoker.data.index import Index
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker_watch.diagnosis.causes.cause import COMMON_THRESHOLDS, Threshold
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.report.explain import explain_run
from stoker_watch.runs.records import STEPS, read_lines
from stoker_watch.runs.schemas import StepWindow
from tests.drawn import draw
from tests.fixtures.training_ledger_of_a_run import settings

DELAY_S = 0.3
"""One worker: 1.2 s per batch, long compared with a training step on any machine."""


@pytest.mark.slow
def test_slow_reads_are_attributed_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = draw(tmp_path / "data")
    read = Index.read

    def slowly(self: Index, row: int) -> bytes:
        if row in self.image_indices("train"):
            time.sleep(DELAY_S)
        return read(self, row)

    monkeypatch.setattr(Index, "read", slowly)
    result = train(
        settings(data).replace(max_duration="3", eval_every="0", workers=1), TrainOptions(run_dir=str(tmp_path / "run"))
    )
    for window in read_lines(result.run, STEPS, StepWindow):
        assert sum(window.input_wait_stages.values()) == window.phases.get("input_wait", 0)
    summed = read_run(result.run).totals
    assert summed.phases["input_wait"] > 4 * DELAY_S
    assert summed.input_wait_stages["fetch"] > 0.9 * summed.phases["input_wait"]
    monkeypatch.setitem(COMMON_THRESHOLDS, "steady_s", Threshold(1.0, "a run of three steps is long enough here"))
    finding = explain_run(result.run).findings[0]
    assert finding.id == "slow_storage"
    assert "fetch: reading files" in finding.evidence[1].text
