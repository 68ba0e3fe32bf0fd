"""`stoker launch slurm`: one batch script, `slurm.sbatch` with its @fields@ filled in, submitted with sbatch.

Each node gets one task, which starts the ranks of its GPUs. What decides whether a job is lost:

- Preemption sends SIGTERM to the steps only. A script that exits during the grace time is FAILED and not requeued: so
  it requeues itself, if the training saved (exit code 75) and the job was not cancelled.
- `--signal=B:USR1@N` warns the script N seconds before the time limit; it asks the training to save, and is requeued.
- The training gets SIGTERM through Slurm (`scancel --signal`): srun itself answers SIGTERM by killing the step.
- The training is told the address of the first node as Slurm has it: names of nodes need not resolve.
- Requeues after a failure are counted in the job's comment, because SLURM_RESTART_COUNT counts preemptions, too.

`sacct` is not used: it needs a database that many clusters lack.
"""

import contextlib
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.launching.jobs import read_log, recorded_end
from stoker.launching.spec import Job, JobStatus, LaunchPlace, LaunchSpec, state_of
from stoker_watch.errors import PreflightError, UsageError, make_error, writing
from stoker_watch.storage.uri import is_uri

COMMAND_TIMEOUT_S = 60
"""Seconds for a client: it waits for a controller that is busy or restarts."""
STRAGGLER_WAIT_S = 900
"""How long the other nodes may run after the first one has ended: rank 0 may still upload the results
(`bucket_run.FINISHED_TIMEOUT_S`)."""


class Slurm(LaunchPlace):
    """The cluster that sbatch of this machine submits to."""

    name = "slurm"
    file = "{name}.sbatch"
    reach = "shared files"
    options = frozenset({"partition", "account"})
    lacks = ("image", "machine_type")
    instead = "every node has the interpreter of this stoker, and --partition and --gpu choose the nodes"
    default_grace_s = 120
    job_id = r"\d{1,12}"

    def check(self, spec: LaunchSpec) -> list[str]:
        if spec.spot and spec.options.partition is None:
            fix = "--partition NAME (`sinfo` lists them)"
            raise UsageError("Which partition of the cluster can be preempted?", fix=fix)
        if spec.time_limit_s is not None and spec.time_limit_s <= 2 * spec.grace_s:
            raise UsageError(
                f"A time limit of {spec.time_limit_s} s leaves no time to train: {spec.grace_s} s are for the save.",
                fix=f"--time-limit {math.ceil(4 * spec.grace_s / 60)}min, or a smaller --grace",
            )
        if (spec.mounts or not is_uri(spec.run_dir)) and (kind := spec.local_storage(sys.executable)) is not None:
            raise make_error(UsageError, "interpreter-not-shared", sys.executable, storage=kind, folder=sys.prefix)
        if is_uri(spec.run_dir) and (kind := spec.local_storage(spec.log)) is not None:
            folder, name = Path(spec.log).parent, Path(spec.log).name
            return [
                f"the log {name} is written into the folder from which the job is submitted, and {folder} is on a "
                f"local file system of this machine ({kind}): Slurm fails a job on a node without that folder, and "
                "`stoker launch logs` sees none; submit it from a folder on a network file system, or add "
                "`--mount PATH`, if all nodes see PATH"
            ]
        return []

    def render(self, spec: LaunchSpec) -> str:
        options = {
            "job-name": spec.name,
            "partition": spec.options.partition,
            "account": spec.options.account,
            "nodes": f"{spec.min_nodes}-{spec.max_nodes}" if spec.is_elastic else str(spec.min_nodes),
            # With it Slurm takes the number of tasks to be that of the fewest nodes, and allocates no more.
            "ntasks-per-node": None if spec.is_elastic else "1",
            "cpus-per-task": str(spec.cpus),
            "mem": f"{round(spec.memory_gib * 1024)}M",
            "gres": f"gpu:{spec.gpu}:{spec.gpus}" if spec.gpu else f"gpu:{spec.gpus}" if spec.gpus else None,
            "time": None if spec.time_limit_s is None else str(math.ceil(spec.time_limit_s / 60)),
            "signal": f"B:USR1@{spec.grace_s}",
            "open-mode": "append",
            "array": f"0-{spec.tasks - 1}" if spec.tasks > 1 else None,
            # Slurm replaces %j and others, and puts a name without folder where the job is submitted.
            "output": (Path(spec.log).name if is_uri(spec.run_dir) else spec.log).replace("%", "%%"),
        }
        lines = [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
        python = [sys.executable, "-m"]
        choose = [*python, "stoker.launching.elastic", spec.run_dir, json.dumps(dict(spec.batch))]
        choose += [str(spec.devices), str(spec.min_nodes)]
        values = {
            "choose": f"used=$({shlex.join(choose)} $names)" if spec.is_elastic else "used=",
            "options": "\n".join(lines),
            "exports": "\n".join(f"export {name}={shlex.quote(value)}" for name, value in spec.env.items()),
            "command": shlex.join([*python, "stoker", *spec.arguments]),
            "cpus": str(spec.cpus),  # srun has not taken it from the job since Slurm 22.05
            "wait_s": str(STRAGGLER_WAIT_S),
            "restarts": str(spec.restarts),
        }
        template = Path(__file__).with_suffix(".sbatch").read_text(encoding="utf-8")
        return re.sub(r"@(\w+)@", lambda match: values[match[1]], template)

    def submit(self, spec: LaunchSpec) -> str:
        with writing("The log of the job cannot be written.", spec.log):
            Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
        folder = Path(spec.log).parent if is_uri(spec.run_dir) else None
        answer = _run(["sbatch", "--parsable"], stdin=self.render(spec), folder=folder)
        return answer.strip().partition(";")[0]  # a federation adds its cluster's name

    def status(self, job: Job) -> JobStatus:
        try:
            answer = _run(["scontrol", "--oneliner", "show", "job", job.id])
        except _UnknownJob:
            return recorded_end(job)
        tasks = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in answer.splitlines() if line.strip()]
        live = [task for task in tasks if state_of("slurm", task.get("JobState", "")) in ("queued", "running")]
        fields = next(iter(live or tasks), {})  # of an array, a task that is not over
        state, reason = fields.get("JobState", ""), fields.get("Reason", "None")
        code, _, number = fields.get("ExitCode", "0:0").partition(":")
        return JobStatus(
            state=state_of("slurm", state),
            text=state if reason == "None" else f"{state} ({reason})",
            nodes=() if fields.get("NodeList") in (None, "", "(null)") else (fields["NodeList"],),
            restarts=int(fields.get("Restarts", "0")),
            exit_code=None
            if state in ("PENDING", "RUNNING")
            else int(code) or (128 + int(number) if int(number) else 0),
        )

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        return read_log(job.log, follow=follow, is_running=lambda: self.status(job).is_live)

    def cancel(self, job: Job) -> None:
        with contextlib.suppress(_UnknownJob):
            _run(["scancel", job.id])


class _UnknownJob(PreflightError):
    """Slurm has forgotten the job: it ended more than MinJobAge (300 s) ago."""


def _run(command: Sequence[str], *, stdin: str = "", folder: Path | None = None) -> str:
    """What a client prints. folder: where it runs; None: here. Raises PreflightError."""
    if shutil.which(command[0]) is None:
        fix = "submit on a login node of the cluster (Debian: `apt install slurm-client`)"
        raise PreflightError(f"Slurm's {command[0]} is not installed here.", fix=fix)
    try:
        done = subprocess.run(
            command, input=stdin, cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        what = f"{command[0]} did not answer within {COMMAND_TIMEOUT_S} s."
        raise PreflightError(what, fix="`scontrol ping` shows the controllers") from error
    if done.returncode == 0:
        return done.stdout
    kind = _UnknownJob if "Invalid job id" in done.stderr else PreflightError
    raise kind(f"{command[0]} refused: exit code {done.returncode}.", cause=done.stderr.strip() or None)
