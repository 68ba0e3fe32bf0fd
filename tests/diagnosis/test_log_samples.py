"""Logs that were collected from jobs, sources and public threads before the patterns were written: each failure is
named first, and healthy jobs have none. `log_samples/kinds.json` maps the collectors' kinds to ids of the catalog."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stoker.diagnosis.failure_signatures import FAILURE_SIGNATURES, UNEXPLAINED
from stoker.diagnosis.output import find_tracebacks, split_log_lines
from stoker.diagnosis.postmortem import explain
from stoker.diagnosis.termination import Termination
from stoker.runs.schemas import Finding

FOLDER = Path(__file__).parent / "log_samples"
KINDS: dict[str, str | list[str]] = json.loads((FOLDER / "kinds.json").read_text())
SAMPLES: list[dict[str, Any]] = [
    {"file": f"{path.stem}:{number}", **json.loads(line)}
    for path in sorted(FOLDER.glob("*.jsonl"))
    for number, line in enumerate(path.read_text().splitlines(), start=1)
]
HEALTHY = sorted(FOLDER.glob("healthy_*/*"))
MIN_SAMPLES, MIN_KINDS, MIN_SIGNATURES = 200, 80, 80


def text_of(sample: dict[str, Any]) -> str:
    lines = sample["lines"]
    return lines if isinstance(lines, str) else "\n".join(lines)


def alarms(text: str, exit_code: int | None) -> list[Finding]:
    """Findings that are more than info; of a log alone, as `stoker why LOGFILE` shows them."""
    found = explain(Termination(exit_code=exit_code, output=split_log_lines(text.encode(), "job.log")))
    return [finding for finding in found if finding.severity != "info" and finding.cause != "ended_without_record"]


def expected(sample: dict[str, Any]) -> list[str]:
    ids = KINDS[sample["kind"]]
    return [ids] if isinstance(ids, str) else ids


def test_there_are_enough_samples_and_each_has_a_source() -> None:
    assert len(SAMPLES) >= MIN_SAMPLES
    kinds = {sample["kind"] for sample in SAMPLES}
    assert len(kinds) >= MIN_KINDS
    assert kinds <= KINDS.keys()
    assert all(sample["source"] for sample in SAMPLES)
    named = {id for kind in kinds for id in ([KINDS[kind]] if isinstance(KINDS[kind], str) else KINDS[kind])}
    assert named <= FAILURE_SIGNATURES.keys()
    assert len(named) >= MIN_SIGNATURES


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample['file']}-{sample['kind']}")
def test_the_failure_is_named_first(sample: dict[str, Any]) -> None:
    for exit_code in {None, sample.get("exit_code")}:
        found = alarms(text_of(sample), exit_code)
        assert found, "nothing was found"
        assert found[0].cause in expected(sample), exit_code


def without_frames(text: str) -> str | None:
    """Only the last lines of the tracebacks, as some loggers print errors; None: there is none."""
    lines = split_log_lines(text.encode(), "job.log")
    frames = {index for start, last in find_tracebacks(lines) for index in range(start, last)
              if not re.match(r"\S*(Error|Exception)", lines[index].text)}  # fmt: skip
    return "\n".join(line.text for index, line in enumerate(lines) if index not in frames) if frames else None


NEEDS_FRAMES = {"checkpoint_corrupt", "results_empty"}
"""Kinds whose error says nothing without its traceback: a bare EOFError."""


@pytest.mark.parametrize(
    "sample",
    [sample for sample in SAMPLES if without_frames(text_of(sample)) and sample["kind"] not in NEEDS_FRAMES],
    ids=lambda sample: f"{sample['file']}-{sample['kind']}",
)
def test_the_failure_is_named_without_its_traceback(sample: dict[str, Any]) -> None:
    text = without_frames(text_of(sample))
    assert text is not None
    found = alarms(text, None)
    assert found, "nothing was found"
    assert found[0].cause in expected(sample)


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.parametrize("exit_code", [None, 0])
def test_a_healthy_log_has_no_failure(path: Path, exit_code: int | None) -> None:
    found = explain(Termination(exit_code=exit_code, output=split_log_lines(path.read_bytes(), "job.log")))
    assert [finding for finding in found if finding.cause != "ended_without_record"] == []


HEAD = "step 1 loss: 0.9\nstep 2 loss: 0.8\nstep 3 loss: 0.7\n"
ERROR = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\nValueError: seven\n'
OOM = ERROR.replace("ValueError: seven", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
NODE = "Node is shutting down, evicting pods\n"


@pytest.mark.parametrize(("text", "exit_code", "causes"), [
    (HEAD + OOM, 143, ["gpu_out_of_memory", "preempted"]),
    (HEAD + OOM + NODE, None, ["gpu_out_of_memory", "machine_preempted"]),
    (HEAD + OOM + NODE, 137, ["gpu_out_of_memory", "machine_preempted"]),
    (HEAD + ERROR + NODE, 143, ["ended_by_error", "machine_preempted"]),
    (OOM + HEAD + NODE, 143, ["machine_preempted"]),  # the job had continued
    (HEAD + NODE + ERROR, 143, ["machine_preempted"]),  # the error came from the end
    (HEAD + "loss: nan\n" + NODE, None, ["diverged", "machine_preempted"]),
    (HEAD + "loss: nan\n", -15, ["diverged", "preempted"]),
    (HEAD, 143, ["preempted"]),
    (HEAD + "The process exited with exit code 143.\n", None, ["preempted"]),
    (NODE + HEAD, 1, ["ended_by_error"]),
])  # fmt: skip
def test_a_request_to_stop_never_hides_the_fault(text: str, exit_code: int | None, causes: list[str]) -> None:
    assert [finding.cause for finding in alarms(text, exit_code)] == causes


@pytest.mark.parametrize("end", [
    "Results saved to runs/detect/train3",
    "`Trainer.fit` stopped: `max_epochs=3` reached.",
    "{'train_runtime': 12.1, 'train_loss': 0.7, 'epoch': 3.0}",
    "Training complete.",
    "Epoch 3/3\n100/100 ━━━━━━━━━━ 9s 90ms/step - loss: 0.5\nTest: 0.7",
    "done",
])  # fmt: skip
def test_a_job_that_ended_well_unrecorded_is_no_alarm(end: str) -> None:
    """Its watcher was killed: no exit code, but its output ends as that of a finished job."""
    (finding,) = explain(Termination(output=split_log_lines((HEAD + end + "\n").encode(), "job.log")))
    assert (finding.cause, finding.severity) == ("ended_without_record", "info")
    failed = explain(Termination(output=split_log_lines((HEAD + end + "\n" + OOM).encode(), "job.log")))
    assert failed[0].cause == "gpu_out_of_memory"
    unfinished = explain(Termination(output=split_log_lines(HEAD.encode(), "job.log")))
    assert [(found.cause, found.severity) for found in unfinished] == [("ended_without_record", "critical")]


def test_an_unexplained_end_is_never_the_expectation_of_a_known_kind() -> None:
    weak = {kind for kind, ids in KINDS.items() if isinstance(ids, str) and ids in UNEXPLAINED - {"killed", "crashed"}}
    assert weak == set()
