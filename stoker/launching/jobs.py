"""The jobs of a run, whatever the place: submits and cancels them, keeps them in launch.json, so that `status`, `logs`
and `cancel` need only the run folder, and reads what the run folder and the log file say about them.

launch.json is in the run folder, in a bucket where the run is, and names places, never credentials. The places
themselves are in files of their own (`spec.PLACES`).
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stoker.errors import ObjectMissing, UsageError, writing
from stoker.launching.spec import Job, JobStatus, LaunchRequest, LaunchSpec, Place, open_place
from stoker.runs.records import EVENTS, LAUNCH, read_lines
from stoker.runs.schemas import Event
from stoker.storage.local_files import write_atomic
from stoker.storage.uri import to_run_uri, working_copy

KEPT_JOBS = 100
CANCEL_WAIT_S = 120.0
"""How long `cancel` waits for the job to save and end."""
POLL_S = 0.5


def submit(spec: LaunchSpec, place: Place, request: LaunchRequest) -> Job:
    """Submits what was checked (`check_launch`). Raises UsageError if the run has a job already."""
    for newest in read_jobs(spec.run_dir)[-1:]:
        state = open_place(newest.place).status(newest)
        if state.is_live:
            raise UsageError(
                f"The run has a job already: {newest.place} job {newest.id} is {state.state}.",
                location=spec.run_dir,
                cause=state.text,
                fix=f"`stoker launch cancel {spec.run_dir}`, then launch it again",
            )
    started_s = time.time()
    job = Job(
        place=place.name,
        id=place.submit(spec),
        name=spec.name,
        run=spec.run_dir,
        t=started_s,
        options=spec.options.set_fields(),
        request=request.kept_fields(),
        log=spec.log,
    )
    remember(job)
    return job


def cancel(job: Job) -> JobStatus:
    """Asks a job to save and end, for good, and waits until it has, at most CANCEL_WAIT_S."""
    place = open_place(job.place)
    place.cancel(job)
    deadline_s = time.monotonic() + CANCEL_WAIT_S
    while (state := place.status(job)).is_live and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return state


def read_jobs(run: str) -> list[Job]:
    """The jobs of a run, oldest first; empty if none was launched. run: a folder or a URI. Raises UsageError for a
    file that is not a list of jobs, StorageError."""
    uri = to_run_uri(run)
    location = f"{run if uri is None else uri}/{LAUNCH}"
    try:
        if uri is None:
            data = (Path(run) / LAUNCH).read_bytes()
        else:
            from stoker.storage.store import open_store  # imports obstore, which local runs do not need

            data = open_store(uri).read(uri.child(LAUNCH).key)
    except (FileNotFoundError, NotADirectoryError, ObjectMissing):
        return []
    try:
        return msgspec.json.decode(data, type=list[Job])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fix = "correct or delete it; the jobs themselves are not affected"
        raise UsageError(
            "The list of launched jobs cannot be read.", location=location, cause=str(error), fix=fix
        ) from error


def last_job(run: str) -> Job:
    """The newest job of a run. Raises UsageError if none was launched."""
    jobs = read_jobs(run)
    if not jobs:
        fix = "name the run folder that `stoker launch` printed"
        raise UsageError("No job was launched for this run.", location=run, cause=f"there is no {LAUNCH}", fix=fix)
    return jobs[-1]


def remember(job: Job) -> None:
    """Adds a job to the list of its run."""
    jobs = [*read_jobs(job.run), job][-KEPT_JOBS:]
    data = msgspec.json.format(msgspec.json.encode(jobs), indent=2)
    uri = to_run_uri(job.run)
    if uri is None:
        with writing("The list of launched jobs cannot be written.", Path(job.run) / LAUNCH):
            Path(job.run).mkdir(parents=True, exist_ok=True)
            write_atomic(Path(job.run) / LAUNCH, data)
        return
    from stoker.storage.store import open_store

    open_store(uri).write(uri.child(LAUNCH).key, data)


def recorded_end(job: Job) -> JobStatus:
    """How a job that has ended did so, as the run's events of its time say."""
    last: Event | None = None
    uri = to_run_uri(job.run)
    folder = Path(job.run) if uri is None else working_copy(uri)
    if (folder / EVENTS).exists():
        for event in read_lines(folder, EVENTS, Event):
            if event.t >= job.t and event.kind in ("started", "resumed", "preempted", "failed", "finished"):
                last = event
    if last is None:
        return JobStatus(state="unknown", text="it has ended; the run has no record of it")
    if last.kind == "finished":
        return JobStatus(state="succeeded", text="finished", exit_code=0)
    if last.kind == "preempted":
        return JobStatus(state="cancelled", text=f"stopped and saved: {last.text}", exit_code=75)
    if last.kind == "failed":
        code = last.data.get("exit_code")
        return JobStatus(state="failed", text=last.text, exit_code=code if isinstance(code, int) else None)
    return JobStatus(state="failed", text=f"killed: nothing is recorded after {last.kind!r}")


def read_log(path: str, *, follow: bool, is_running: Callable[[], bool]) -> Iterator[str]:
    """The lines of a log file; with `follow`, until the job has ended and its last line is read."""
    rest = b""
    offset = 0
    while True:
        runs = follow and is_running()  # asked before the file is read: what it wrote at its end is not missed
        try:
            with Path(path).open("rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            data = b""
        offset += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
        if not runs:
            if rest:
                yield rest.decode(errors="replace")
            return
        time.sleep(POLL_S)
