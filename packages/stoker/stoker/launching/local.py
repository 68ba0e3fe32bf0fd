"""`stoker launch local`: the training in the background of this machine, under the supervisor of `--restarts`.

The process is this module as a program (`main`). It is detached from the terminal; its output goes to launch.log in the
run folder, and the last line of it is the exit code, as no one waits for the process.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from stoker.launching.jobs import read_log, read_tail, recorded_end
from stoker.launching.spec import Job, JobStatus, LaunchPlace, LaunchSpec, State
from stoker.training.supervisor import Supervisor
from stoker_watch import regular_files
from stoker_watch.errors import UsageError, writing
from stoker_watch.recording.telemetry.machine import ForeignProcess

START_S = 1.0
"""How long a process that is being started may be without its command: the kernel sets it at the end of exec."""
_CLOCK_TOLERANCE_S = 2.0
"""psutil computes the start of a process from the clock, which may be set."""
SHOWN_LINES = 6
"""Lines of the log that are shown where the run has no record of the end."""
_END = re.compile(r"^stoker: process (\d+) ended with exit code (\d+)$", re.MULTILINE)
"""The last line of a job; `main` prints it."""
_STATES: dict[int, State] = {0: "succeeded", 75: "cancelled"}
"""Other exit codes: failed."""


class Local(LaunchPlace):
    name = "local"
    file = "command"
    reach = "this machine"
    lacks, instead = ("image", "machine_type", "gpu"), "the training runs on this machine as it is"
    job_id = r"[1-9]\d{0,9}@\d{1,12}"

    def check(self, spec: LaunchSpec) -> list[str]:
        if spec.max_nodes > 1:
            fix = "--devices N: several GPUs of one machine; or another place"
            raise UsageError(f"local has 1 node, --nodes asks for {spec.max_nodes}.", fix=fix)
        return []

    def render(self, spec: LaunchSpec) -> str:
        return shlex.join(_command(spec)) + "\n"

    def submit(self, spec: LaunchSpec) -> str:
        with writing("The log of the job cannot be written.", spec.log):
            Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
            with open(spec.log, "ab", opener=regular_files.no_links) as log:
                process = subprocess.Popen(
                    _command(spec),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        return f"{process.pid}@{psutil.Process(process.pid).create_time():.0f}"

    def status(self, job: Job) -> JobStatus:
        process = _find(job)
        if process is None:
            return _ended(job)
        return JobStatus(state="running", text=f"process {process.pid}")

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        return read_log(job.log, follow=follow, is_running=lambda: _find(job) is not None)

    def cancel(self, job: Job) -> None:
        process = _find(job)
        if process is not None:
            process.send_signal(signal.SIGTERM)  # the supervisor forwards it and does not restart


def _command(spec: LaunchSpec) -> list[str]:
    env = ("env", *(f"{name}={value}" for name, value in spec.env.items())) if spec.env else ()
    return [*env, sys.executable, "-m", "stoker.launching.local", str(spec.restarts), *spec.arguments]


def main(restarts: str, *arguments: str) -> int:
    """The process of a job: runs `stoker` with these arguments, again after a failure, and prints how it ended."""
    code = Supervisor([sys.executable, "-m", "stoker", *arguments], int(restarts)).run()
    print(f"stoker: process {os.getpid()} ended with exit code {code}", flush=True)
    return code


def _ended(job: Job) -> JobStatus:
    """How a job that has ended did so: as the run has it, if that is the end that its process printed."""
    recorded = recorded_end(job)
    tail = read_tail(job.log) if job.log else ""
    ends = list(_END.finditer(tail))
    own = next((k for k in reversed(range(len(ends))) if ends[k][1] == job.id.partition("@")[0]), None)
    if own is None:
        return recorded  # killed before it could print
    code, start = int(ends[own][2]), ends[own - 1].end() if own else 0
    if recorded.exit_code == code:
        return recorded
    lines = [line for line in tail[start : ends[own].start()].splitlines() if line.strip()][-SHOWN_LINES:]
    text = "\n".join([f"its log, {job.log}, ends with", *lines]) if lines else f"its log, {job.log}, is empty"
    return JobStatus(state=_STATES.get(code, "failed"), text=text, exit_code=code)


def _is_run(word: str, run: str) -> bool:
    """Whether an argument is the run: its URI, or any path of its folder."""
    return word == run or (os.path.isdir(word) and os.path.isdir(run) and os.path.samefile(word, run))


def _find(job: Job) -> psutil.Process | None:
    """The process of a job; None: it has ended, also where another process has its number now: one whose command does
    not name the run is never signalled."""
    pid, _, started_s = job.id.partition("@")
    try:
        process = ForeignProcess(int(pid))
        is_same = abs(process.create_time() - float(started_s)) <= _CLOCK_TOLERANCE_S
        if not is_same or process.status() == psutil.STATUS_ZOMBIE:
            return None
        deadline_s = time.monotonic() + START_S
        while not (words := process.cmdline()) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return process if any(_is_run(word, job.run) for word in words) else None
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
