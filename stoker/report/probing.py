"""`stoker why RUN --probe`: runs experiments on a run that has ended.

A separate process (`stoker/training/probe.py`) does the experiments, so nothing here imports torch. Its output becomes
lines of probes.jsonl, which the diagnosis reads.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stoker.diagnosis.alive import is_held, lease_holder
from stoker.errors import StokerError, UsageError
from stoker.report.explain_terminal import probe_rows
from stoker.runs import records
from stoker.runs.records import PROBES, RunFolder
from stoker.runs.schemas import Probe
from stoker.storage.uri import is_uri


def run_probes(run: str, on_progress: Callable[[str], None]) -> None:
    """Does all experiments and adds them to the records of the run. on_progress: called with a line after each one.

    Raises UsageError for a run that is still running, is in a bucket, or was not trained by `stoker train`; StokerError
    with the message of the process if it fails.
    """
    if is_uri(run):
        raise UsageError(
            "Experiments need a local run folder.", location=run, fix="copy the run to a local folder first"
        )
    path = records.open_run(run)
    if not (path / records.CONFIG).exists():
        cause = f"it has no {records.CONFIG}: the steps of an external job cannot be repeated"
        raise UsageError("Experiments need a run of `stoker train`.", location=path, cause=cause)
    if is_held(path) or lease_holder(path) is not None:
        message = "The run is still running: experiments would use its device."
        raise UsageError(message, location=path, fix="wait for its end")
    folder = RunFolder(path, records.last_attempt(path))
    try:
        for result in _run_experiments(path):
            folder.append(PROBES, result)
            on_progress(describe_probe(result))
    finally:
        folder.close()


def describe_probe(result: Probe) -> str:
    """An experiment in one line."""
    ((label, before, after, ratio, interval),) = probe_rows([result])
    return f"{label}: {interval if result.reason else f'{ratio} × as fast ({interval}), {before} → {after} img/s'}"


def _run_experiments(path: Path) -> Iterator[Probe]:
    """Yields each experiment as soon as it is done."""
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
            last_line = stderr_file.read().decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise StokerError(
                "The experiments failed.",
                location=path,
                cause=f"exit code {process.returncode}: {last_line[0]}",
                fix=f"see the full output: {sys.executable} -m stoker.training.probe {path}",
            )
