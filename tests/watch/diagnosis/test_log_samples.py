"""Logs that were collected from jobs, sources and public threads before the patterns were written: each failure is
named first, and healthy jobs have none. `log_samples/kinds.json` maps the collectors' kinds to ids of the catalog."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stoker_watch.diagnosis.endings import UNEXPLAINED, endings, find_normal_end, find_progress, find_tracebacks
from stoker_watch.diagnosis.postmortem import explain
from stoker_watch.diagnosis.run_data import LogLine, Termination
from stoker_watch.diagnosis.termination import split_log_lines
from stoker_watch.findings.finding import Finding

FOLDER = Path(__file__).parent / "log_samples"
KINDS: dict[str, str | list[str]] = json.loads((FOLDER / "kinds.json").read_text())
SAMPLES: list[dict[str, Any]] = [
    {"file": f"{path.stem}:{number}", **json.loads(line)}
    for path in sorted(FOLDER.glob("*.jsonl"))
    for number, line in enumerate(path.read_text().splitlines(), start=1)
]
FILES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
HEALTHY = sorted(FOLDER.glob("healthy_*/*"))
MIN_SAMPLES, MIN_KINDS, MIN_SIGNATURES, MIN_HEALTHY = 500, 300, 150, 40
REMARKS_OF_HEALTHY_JOBS = ("trained_on_cpu", "no_gpu_driver", "checkpoint_not_saved")


def text_of(sample: dict[str, Any]) -> str:
    lines = sample["lines"]
    return lines if isinstance(lines, str) else "\n".join(lines)


def alarms(text: str, exit_code: int | None) -> list[Finding]:
    """Findings that are more than info, and an interruption; of a log alone, as `stoker why LOGFILE` shows them."""
    found = explain(Termination(exit_code=exit_code, output=split_log_lines(text.encode(), "job.log")))
    return [
        finding
        for finding in found
        if finding.id == "interrupted" or (finding.severity != "info" and finding.id != "ended_without_record")
    ]


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
    assert named <= endings().keys()
    assert len(named) >= MIN_SIGNATURES


def misnamed(sample: dict[str, Any], text: str, exit_codes: set[int | None]) -> list[str]:
    """A line for each exit code with which the first finding is not an expected one."""
    first = {exit_code: (alarms(text, exit_code) or [None])[0] for exit_code in exit_codes}
    return [
        f"{sample['file']} {sample['kind']}, exit code {exit_code}: {finding and finding.id}, not {expected(sample)}"
        for exit_code, finding in first.items()
        if finding is None or finding.id not in expected(sample)
    ]


@pytest.mark.parametrize("file", FILES)
def test_the_failure_is_named_first(file: str) -> None:
    samples = [sample for sample in SAMPLES if sample["file"].startswith(file + ":")]
    wrong = [line for sample in samples for line in misnamed(sample, text_of(sample), {None, sample.get("exit_code")})]
    assert samples
    assert not wrong, "\n".join(wrong)


def without_frames(text: str) -> str | None:
    """Only the last lines of the tracebacks, as some loggers print errors; None: there is none."""
    lines = split_log_lines(text.encode(), "job.log")
    frames = {index for start, last in find_tracebacks(lines) for index in range(start, last)
              if not re.match(r"\S*(Error|Exception)", lines[index].text)}  # fmt: skip
    return "\n".join(line.text for index, line in enumerate(lines) if index not in frames) if frames else None


NEEDS_FRAMES = {
    "checkpoint_corrupt",
    "coco_results_empty",
    "detr_label_out_of_range",
    "output_directory_missing",
    "results_empty",
}
"""Kinds whose error does not tell the reason without its traceback: a bare EOFError."""


@pytest.mark.parametrize("file", FILES)
def test_the_failure_is_named_without_its_traceback(file: str) -> None:
    samples = [sample for sample in SAMPLES if sample["file"].startswith(file + ":")]
    wrong = [
        line
        for sample in samples
        if (text := without_frames(text_of(sample))) and sample["kind"] not in NEEDS_FRAMES
        for line in misnamed(sample, text, {None})
    ]
    assert not wrong, "\n".join(wrong)


def test_a_healthy_log_has_no_failure() -> None:
    wrong = [
        f"{path.parent.name}/{path.name}, exit code {exit_code}: {finding.id}: {finding.evidence[0].text}"
        for path in HEALTHY
        for exit_code in (None, 0)
        for finding in explain(Termination(exit_code=exit_code, output=split_log_lines(path.read_bytes(), "job.log")))
        if finding.id not in ("ended_without_record", *REMARKS_OF_HEALTHY_JOBS)
    ]
    assert len(HEALTHY) >= MIN_HEALTHY
    assert not wrong, "\n".join(wrong)


def before_its_end(path: Path) -> tuple[LogLine, ...]:
    """The lines of a healthy log up to one of progress before its end, as of a job that was killed there; else
    empty."""
    lines = split_log_lines(path.read_bytes(), "job.log")
    end = find_normal_end(lines)
    progress = [index for index in find_progress(lines) if end is None or index < end]
    lines = lines[: progress[-1] + 1] if progress else ()
    while lines and find_normal_end(lines) is not None:
        lines = lines[:-1]
    return lines


def test_a_healthy_job_that_was_killed_has_no_other_failure() -> None:
    cut = {path: lines for path in HEALTHY if (lines := before_its_end(path))}
    wrong = [
        f"{path.parent.name}/{path.name}, exit code {exit_code}: {finding.id}: {finding.evidence[0].text}"
        for path, lines in cut.items()
        for exit_code in (None, 137, 143)
        for finding in explain(Termination(exit_code=exit_code, output=lines))
        if finding.severity != "info"
        and finding.id not in ("ended_without_record", "killed", "preempted", *REMARKS_OF_HEALTHY_JOBS)
    ]
    assert len(cut) >= MIN_HEALTHY / 2
    assert not wrong, "\n".join(wrong)


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
    assert [finding.id for finding in alarms(text, exit_code)] == causes


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
    assert (finding.id, finding.severity) == ("ended_without_record", "info")
    failed = explain(Termination(output=split_log_lines((HEAD + end + "\n" + OOM).encode(), "job.log")))
    assert failed[0].id == "gpu_out_of_memory"
    unfinished = explain(Termination(output=split_log_lines(HEAD.encode(), "job.log")))
    assert [(found.id, found.severity) for found in unfinished] == [("ended_without_record", "critical")]


def test_an_unexplained_end_is_never_the_expectation_of_a_known_kind() -> None:
    weak = {kind for kind, ids in KINDS.items() if isinstance(ids, str) and ids in UNEXPLAINED - {"killed", "crashed"}}
    assert weak == set()
