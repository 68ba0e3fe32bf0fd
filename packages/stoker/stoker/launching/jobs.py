"""The jobs of a run, whatever the place: submits and cancels them, keeps them in launch.json, so that `status`, `logs`
and `cancel` need only the run folder, and reads what the run folder and the log file say about them.

launch.json is in the run folder, also in a bucket, and names places (`spec.PLACES`), never credentials.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stoker.launching.spec import LOG, PLACES, Job, JobStatus, LaunchPlace, LaunchRequest, LaunchSpec, open_place
from stoker_watch import regular_files
from stoker_watch.errors import ObjectMissing, UsageError, writing
from stoker_watch.runs.records import EVENTS, LAUNCH, read_lines
from stoker_watch.runs.schemas import Event
from stoker_watch.storage.local_files import write_atomic
from stoker_watch.storage.uri import is_uri, to_run_uri, working_copy

KEPT_JOBS = 100
CANCEL_WAIT_S = 120.0
"""How long `cancel` waits for the job to save and end."""
POLL_S = 0.5
MAX_BYTES, PIECE_BYTES = 1 << 24, 1 << 20
"""Largest launch.json; bytes of a log that are read at once."""
_JOBS = msgspec.json.Decoder(list[Job])


def submit(spec: LaunchSpec, place: LaunchPlace, request: LaunchRequest) -> Job:
    """Submits what was checked (`check_launch`). Raises UsageError if the run has a job already."""
    jobs = read_jobs(spec.run_dir)
    for newest in newest_jobs(jobs):
        state = open_place(newest.place).status(newest)
        if state.is_live:
            what = f"The run has a job already: {newest.place} job {newest.id} is {state.state}."
            fix = f"`stoker launch cancel {spec.run_dir}`, then launch it again"
            raise UsageError(what, location=spec.run_dir, cause=state.text, fix=fix)
    spec = dataclasses.replace(spec, attempt=1 + max([len(jobs), *(job.attempt for job in jobs)]))
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
        attempt=spec.attempt,
    )
    remember(job)
    return job


def newest_jobs(jobs: list[Job]) -> list[Job]:
    """The jobs of the newest launch of a run: a search has one for each worker at a place without arrays."""
    return [job for job in jobs if job.t == jobs[-1].t]


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
            data = regular_files.read_bytes(Path(run) / LAUNCH, max_bytes=MAX_BYTES)
        else:
            from stoker_watch.storage.store import open_store  # imports obstore, which local runs do not need

            data = open_store(uri).read(uri.child(LAUNCH).key)
        jobs = [_checked(job, str(Path(run).absolute() if uri is None else uri)) for job in _JOBS.decode(data)]
    except (FileNotFoundError, NotADirectoryError, ObjectMissing):
        return []
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        what = "The list of launched jobs cannot be read."
        fix = "correct or delete it; the jobs themselves are not affected"
        raise UsageError(what, location=location, cause=str(error), fix=fix) from error
    return jobs


def _checked(job: Job, run: str) -> Job:
    """The job, of the run in which it is listed. Raises ValueError for what `submit` never writes: the file may come
    from others, and an id reaches the command line of a client."""
    if job.place not in PLACES or not re.fullmatch(open_place(job.place).job_id, job.id):
        raise ValueError(f"{job.id[:80]!r} is not the id of a job at {job.place[:80]!r}")
    name = Path(job.log).name
    if job.log and name != LOG and not (is_uri(run) and re.fullmatch(r"stoker-[a-z0-9-]{1,60}\.log", name)):
        raise ValueError(f"{job.log[:80]!r} is not the log of a launch")
    return msgspec.structs.replace(job, run=run, log=job.log if is_uri(run) or not job.log else f"{run}/{LOG}")


def launched_jobs(run: str) -> list[Job]:
    """The jobs of a run, oldest first. Raises UsageError if none was launched."""
    jobs = read_jobs(run)
    if not jobs:
        fix = "name the run folder that `stoker launch` printed"
        raise UsageError("No job was launched for this run.", location=run, cause=f"there is no {LAUNCH}", fix=fix)
    return jobs


def last_job(run: str) -> Job:
    return launched_jobs(run)[-1]


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
    from stoker_watch.storage.store import open_store

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
        return JobStatus(state="failed", text=last.text, exit_code=last.data.get("exit_code"))
    return JobStatus(state="failed", text=f"killed: nothing is recorded after {last.kind!r}")


def _read_piece(path: str, offset: int) -> bytes:
    """At most PIECE_BYTES from there on; empty at the end, and where there is no file yet."""
    try:
        with regular_files.open_file(path) as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError("The log of the job cannot be read.", location=path, cause=str(error)) from error


def read_tail(path: str) -> str:
    """The end of a log file, at most PIECE_BYTES; empty if there is none."""
    try:
        size = Path(path).stat().st_size
    except OSError:
        size = 0  # `_read_piece` says why, unless there is no file
    return _read_piece(path, max(0, size - PIECE_BYTES)).decode(errors="replace")


def read_log(path: str, *, follow: bool, is_running: Callable[[], bool]) -> Iterator[str]:
    """The lines of a log file; with `follow`, until the job has ended and its last line is read."""
    rest = b""
    offset = 0
    while True:
        runs = follow and is_running()  # asked before the file is read: what it wrote at its end is not missed
        while data := _read_piece(path, offset):
            offset += len(data)
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > PIECE_BYTES:  # a line without end
                lines, rest = [*lines, rest], b""
            for line in lines:
                yield line.decode(errors="replace")
        if not runs:
            if rest:
                yield rest.decode(errors="replace")
            return
        time.sleep(POLL_S)
