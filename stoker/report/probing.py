"""`stoker why RUN --probe`: has experiments done on a run that has ended, by a program that knows how to train.

The program is `training/probe.py`, a process of its own, so that nothing here imports torch; what it prints becomes
lines of probes.jsonl, which the diagnosis reads. The experiment that a run does by itself is `training/input_probe.py`.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stoker.diagnosis.alive import is_held, lease_holder
from stoker.errors import StokerError, UsageError
from stoker.report.explain_terminal import PROBE_LABELS
from stoker.runs import records
from stoker.runs.records import PROBES, RunFolder
from stoker.runs.schemas import Probe
from stoker.storage.uri import is_uri


def run_probes(run: str, on_progress: Callable[[str], None]) -> None:
    """Does all experiments and adds them to the run's records; note: gets a line when each is done.

    Raises UsageError for a run that lives, is in a bucket, or was not trained by stoker, and StokerError with the
    program's own message where it fails.
    """
    if is_uri(run):
        raise UsageError("Experiments need the run's folder.", location=run, fix="copy the run here, and name the copy")
    path = records.open_run(run)
    if not (path / records.CONFIG).exists():
        cause = f"it has no {records.CONFIG}: stoker watched or measured it, and cannot repeat its steps"
        raise UsageError("Experiments are for runs of `stoker train`.", location=path, cause=cause)
    if is_held(path) or lease_holder(path) is not None:
        fix = "wait for its end; a run that waits for pictures does one experiment by itself"
        raise UsageError("The run is live: experiments would take its device.", location=path, fix=fix)
    folder = RunFolder(path, records.last_attempt(path))
    try:
        for result in _run_experiments(path):
            folder.append(PROBES, result)
            on_progress(describe_probe(result))
    finally:
        folder.close()


def describe_probe(result: Probe) -> str:
    """An experiment in a sentence."""
    label = PROBE_LABELS.get(result.probe, result.probe)
    if result.reason:
        return f"{label}: not tried: {result.reason}"
    return (
        f"{label}: {result.ratio:.2f} × as fast ({result.ratio_low:.2f} to {result.ratio_high:.2f}), "
        f"{result.after_img_per_s:,.1f} instead of {result.before_img_per_s:,.1f} img/s, {result.steps} steps each"
    )


def _run_experiments(path: Path) -> Iterator[Probe]:
    """Each as soon as it is done."""
    command = [sys.executable, "-m", "stoker.training.probe", str(path)]
    with (
        tempfile.TemporaryFile() as stderr_file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr_file) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            yield msgspec.json.decode(line, type=Probe)
        if process.wait() != 0:
            stderr_file.seek(0)
            last_line = stderr_file.read().decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise StokerError(
                "The experiments could not be done.",
                location=path,
                cause=f"exit code {process.returncode}: {last_line[0]}",
                fix=f"see all it says: {sys.executable} -m stoker.training.probe {path}",
            )
