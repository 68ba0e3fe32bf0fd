"""`stoker launch ray`: a job of Ray's job server, whose driver (`ray_driver.py`) runs `stoker train` on each node.

The cluster has to have stoker, Ray and, at the same paths, the data and the run folder. `cancel` lets the training
save: the job server waits for the driver as long as the grace period.
"""

import asyncio
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.errors import PreflightError, UsageError, needs_package
from stoker.launching.spec import Job, JobStatus, LaunchSpec, Place, states

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_STATES = states(
    {"queued": "PENDING", "running": "RUNNING", "succeeded": "SUCCEEDED", "failed": "FAILED", "cancelled": "STOPPED"}
)


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver runs: its argument, as JSON."""

    arguments: tuple[str, ...]
    """Of `stoker`."""
    min_nodes: int
    max_nodes: int
    resources: dict[str, float]
    """Of Ray, for each node."""
    grace_s: int
    restarts: int


class Ray(Place):
    """A Ray cluster; `--address` (or RAY_ADDRESS) names its dashboard, default http://127.0.0.1:8265."""

    name = "ray"
    file = "job.json"
    reach = "shared files"
    options = frozenset({"address"})

    def check(self, spec: LaunchSpec) -> list[str]:
        for flag, value in (("--image", spec.image), ("--machine-type", spec.machine_type), ("--gpu", spec.mig_slice)):
            if value is not None:
                raise UsageError(f"ray has no {flag} {value}: the cluster's own nodes are used.", fix=f"without {flag}")
        if spec.time_limit_s is not None:
            raise UsageError(
                "A job of Ray has no time limit.", fix="without --time-limit; `--max-time` is of the training"
            )
        return []

    def render(self, spec: LaunchSpec) -> str:
        return msgspec.json.format(msgspec.json.encode(_request(spec)), indent=2).decode() + "\n"

    def submit(self, spec: LaunchSpec) -> str:
        id: str = _connect(spec.options.address).submit_job(**_request(spec))
        return id

    def status(self, job: Job) -> JobStatus:
        client = _connect(job.options.get("address"))
        try:
            info = client.get_job_info(job.id)
        except RuntimeError as error:
            if "does not exist" in str(error):
                return JobStatus(state="unknown", text="the cluster has no such job: it was started again since")
            raise PreflightError("Ray's job server does not answer as it should.", cause=str(error)) from error
        return JobStatus(
            state=_STATES.get(info.status.value, "unknown"),
            text=f"{info.status.value}: {info.message}",
            exit_code=info.driver_exit_code,
        )

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        client = _connect(job.options.get("address"))
        if not follow:
            yield from client.get_job_logs(job.id).splitlines()
            return
        chunks = client.tail_job_logs(job.id)
        loop, rest = asyncio.new_event_loop(), ""
        try:
            while True:
                try:
                    chunk = loop.run_until_complete(anext(chunks))
                except StopAsyncIteration:
                    break
                *lines, rest = (rest + chunk).split("\n")
                yield from lines
        finally:
            loop.close()
        if rest:
            yield rest

    def cancel(self, job: Job) -> None:
        _connect(job.options.get("address")).stop_job(job.id)


def _request(spec: LaunchSpec) -> dict[str, Any]:
    """Arguments of `JobSubmissionClient.submit_job`."""
    resources: dict[str, float] = {"CPU": spec.cpus}
    if spec.gpus:
        resources["GPU"] = spec.gpus
    if spec.gpu is not None:
        resources[f"accelerator_type:{spec.gpu}"] = 0.001  # Ray's way to ask for a type
    training = Training(
        arguments=spec.arguments,
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        resources=resources,
        grace_s=spec.grace_s,
        restarts=spec.restarts,
    )
    return {
        "entrypoint": shlex.join(
            ["python", "-m", "stoker.launching.ray_driver", msgspec.json.encode(training).decode()]
        ),
        "runtime_env": {"env_vars": {**spec.env, "RAY_JOB_STOP_WAIT_TIME_S": str(spec.grace_s)}},
        "metadata": {"name": spec.name, "run": spec.run_dir},
    }


def _connect(address: str | None) -> "JobSubmissionClient":
    with needs_package("stoker[ray]", "stoker launch ray"):
        from ray.job_submission import JobSubmissionClient
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        fix = "--address http://HOST:8265, the cluster's dashboard, or RAY_ADDRESS"
        raise PreflightError("Ray's job server cannot be reached.", cause=str(error), fix=fix) from error
