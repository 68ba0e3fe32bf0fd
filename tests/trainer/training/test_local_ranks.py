"""The processes that `--devices` starts, as their starter sees their ends."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.cli import rank_process
from stoker.training import local_ranks
from stoker.training.local_ranks import RankRequest, Result, _Starter, make_places
from stoker_watch.errors import Preempted, RankError
from stoker_watch.runs.evaluation import COCO_SUMMARY, Metrics


def starter(folder: Path, *codes: int) -> _Starter:
    made = _Starter(2, RankRequest(settings={}), folder)
    made._processes = [SimpleNamespace(returncode=code, poll=lambda code=code: code) for code in codes]  # type: ignore[misc]
    return made


def result(folder: Path) -> Result:
    metrics = Metrics(**dict.fromkeys(COCO_SUMMARY, 0.5), per_class=[], num_images=1, boxes=1, detections=1)
    return Result(folder, 9, metrics)


def test_the_first_rank_of_each_machine_leaves_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two machines with two devices, the second one has the ranks 2 and 3."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert [place.rank for place in make_places(2)] == [2, 3]
    monkeypatch.setattr(rank_process, "from_fields", lambda settings: settings)
    monkeypatch.setattr("stoker.training.run.train", lambda *_, **__: result(tmp_path))
    monkeypatch.setattr(rank_process.sys, "stdin", SimpleNamespace(buffer=(tmp_path / "request").open("w+b")))
    for place in make_places(2):
        rank_process.sys.stdin.buffer.write(b'{"settings":{}}\n')
        rank_process.sys.stdin.buffer.seek(0)
        for name, value in {**place.variables(), "STOKER_RANK_REPORTS": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(rank_process.REPORTS_VARIABLE, str(tmp_path))
        monkeypatch.setattr(rank_process, "_end_with_starter", lambda *_: None)
        before = (tmp_path / local_ranks.RESULT).exists()
        assert rank_process.main() == 0
        assert before is (place.local_rank == 1)
    assert starter(tmp_path, 0, 0).read_result().steps == 9


def test_ctrl_c_twice_is_no_bug(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        starter(tmp_path, 130, 75).read_result()


def test_a_signal_while_the_ranks_start_is_a_preemption(tmp_path: Path) -> None:
    """Python has no handler yet: the process ends by the signal itself."""
    one = starter(tmp_path, -signal.SIGTERM, 75)
    assert one._is_failure(-signal.SIGTERM)
    one._processes[0].send_signal = one._processes[1].send_signal = lambda *_: None  # type: ignore[method-assign]
    one.forward(signal.SIGTERM, None)
    assert not one._is_failure(-signal.SIGTERM)
    assert one._is_failure(-signal.SIGKILL)
    one.wait()
    with pytest.raises(Preempted):
        one.read_result()


def test_ranks_that_end_without_a_word(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="without a result"):
        starter(tmp_path, 0, 0).read_result()
