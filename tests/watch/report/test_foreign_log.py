"""`stoker why LOGFILE`."""

import io
from pathlib import Path

import msgspec
import pytest

from stoker_watch.diagnosis.termination import MAX_OUTPUT_BYTES
from stoker_watch.errors import UsageError
from stoker_watch.report.explain import LogExplanation, explain_log, print_log_explanation


def printed(explanation: LogExplanation) -> str:
    file = io.StringIO()
    print_log_explanation(explanation, file)
    return file.getvalue()


def test_a_log_with_a_known_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = Path("job.log")
    log.write_text(
        "step 1\nTraceback (most recent call last):\n  File a\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    )
    explanation = explain_log(log)
    (finding,) = explanation.findings
    assert finding.id == "gpu_out_of_memory"
    assert (
        printed(explanation)
        == f"""\
job.log: a log, not a recorded run; 4 lines, 95 B

critical {finding.title}
         torch.OutOfMemoryError: CUDA out of memory.  [job.log:4]
         fix: {finding.fix}

Not known from the log alone:
  the exit code or signal, and whether the job has ended
  whether the kernel killed it (out of memory), and the state of GPU, memory and disk
  where its time went
`stoker why --explain ID` explains: gpu_out_of_memory
Next time, record the job with `stoker watch -- COMMAND` to get numbers.
"""
    )


@pytest.mark.parametrize("text", ["", "step 1 loss=0.3\nstep 2 loss=0.2\n", "\n\n"])
def test_a_log_without_an_error_has_no_finding(tmp_path: Path, text: str) -> None:
    log = tmp_path / "job.log"
    log.write_text(text)
    explanation = explain_log(log)
    assert explanation.findings == []
    assert "It contains no known reason for the end of a job." in printed(explanation)


@pytest.mark.parametrize(("text", "cause"), [
    ("step 5 loss=0.5\nstep 6 loss=nan\n", "diverged"),
    ("Traceback (most recent call last):\n  File x\nValueError: odd\n", "ended_by_error"),
    ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed.\n", "loader_worker_killed"),
])  # fmt: skip
def test_the_cause_in_logs_of_other_programs(tmp_path: Path, text: str, cause: str) -> None:
    log = tmp_path / "job.log"
    log.write_text(text)
    assert explain_log(log).findings[0].id == cause


def test_binary_data_is_tolerated_and_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    last = b"RuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n"
    log.write_bytes((b"\xff\x00\x1b[2J" * 200 + b"\n") * (MAX_OUTPUT_BYTES // 1000) + last)
    explanation = explain_log(log)
    assert explanation.findings
    assert any("1.0 MiB" in item for item in explanation.not_known)
    assert "\x1b" not in printed(explanation)
    assert msgspec.json.decode(msgspec.json.encode(explanation), type=LogExplanation) == explanation


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        explain_log(tmp_path / "none.log")
