"""Submits a training, ends its job, and applies advice: what happens to jobs, whatever the place.

Each is recorded in the run folder (`jobs.py`); the places themselves are in files of their own (`spec.PLACES`).
"""

import dataclasses
import time
from typing import TYPE_CHECKING

import msgspec

from stoker.errors import UsageError
from stoker.launching.jobs import last_job, read_jobs, remember
from stoker.launching.request import check_launch, make_spec
from stoker.launching.spec import Job, JobStatus, LaunchRequest, LaunchSpec, Place, PlaceOptions, open_place

if TYPE_CHECKING:
    from stoker.launching.advise import Change, LaunchAdvice

CANCEL_WAIT_S = 120.0
"""How long `cancel` waits for the job to save and end."""
POLL_S = 0.5
PLACES_TO_APPLY = ("slurm", "k8s")
NOT_APPLIED = {
    "larger_batch": "a larger batch is another training, in a run of its own",
    "shared_gpu": "a second job, and MPS on the machine, are needed for a shared GPU",
}
"""Kinds of changes that concern more than the devices of the job."""


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


def apply(advice: "LaunchAdvice") -> tuple["Change", Job]:
    """Ends the newest job of a run and submits it again, at its place, with the best proposal that changes its devices
    only. Returns the proposal and the new job. Everything is checked before the old job is asked to end.

    Raises UsageError if there is no such proposal, or the place is not one of PLACES_TO_APPLY.
    """
    old = last_job(advice.run)
    if old.place not in PLACES_TO_APPLY:
        raise UsageError(
            f"--apply is not possible at {old.place}.",
            location=advice.run,
            choices=PLACES_TO_APPLY,
            fix="the proposals have commands that do the same by hand",
        )
    reasons = {}
    for change in advice.changes:
        reason = NOT_APPLIED.get(change.id)
        if reason is None and "machine-type" in change.flags and old.place == "slurm":
            reason = "Slurm has no machine types: name a partition"
        if reason is None:
            return change, _replace(old, change)
        reasons[change.title] = reason
    raise UsageError(
        "No proposal can be applied.",
        location=advice.run,
        cause="; ".join(f"{title}: {reason}" for title, reason in reasons.items()) or advice.summary,
    )


def _replace(old: Job, change: "Change") -> Job:
    unknown = old.request.get("env")
    if unknown:
        raise UsageError(
            f"The values of --env are not kept in {old.run}.",
            cause=f"the job has {', '.join(map(str, unknown))}",
            fix=f"{change.command} --env NAME=VALUE",
        )
    flags = {name.replace("-", "_"): value for name, value in change.flags.items()}
    kept = {name: value for name, value in old.request.items() if name not in ("resume", "run_dir")}
    request = msgspec.convert(kept | flags | {"resume": old.run}, LaunchRequest, strict=False)
    place = open_place(old.place)
    spec = make_spec(request, place, PlaceOptions(**old.options), data=None, settings=(), on_cpu=False)
    spec = dataclasses.replace(spec, name=old.name, log=old.log or spec.log)
    check_launch(spec, place)
    state = cancel(old)
    if state.is_live:
        raise UsageError(
            f"The {old.place} job {old.id} has not ended within {CANCEL_WAIT_S:.0f} s.",
            location=old.run,
            cause=state.text,
            fix=f"`stoker launch status {old.run}`; when it has ended: {change.command}",
        )
    return submit(spec, place, request)
