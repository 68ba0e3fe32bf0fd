"""Vertex AI: a CustomJob whose worker pools are the nodes of the training.

Vertex AI gives each node its place in `CLUSTER_SPEC` (`training/cluster.py`) and starts a worker that ended with an
error again on the same machine, so that exit code 75 continues the run. Rendering needs no client; submitting parses
the JSON that was rendered, which refuses unknown fields. Never executed here: the requests are tested.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from stoker.errors import UsageError, needs_package
from stoker.launching.containers import check_container
from stoker.launching.google_cloud import (
    TIMEOUT_S,
    find_machine,
    find_parent,
    google_errors,
    log_lines,
    split_nfs,
)
from stoker.launching.spec import Job, JobStatus, LaunchSpec, Reach, Rendered, State

STATES: dict[str, State] = {
    "JOB_STATE_QUEUED": "queued",
    "JOB_STATE_PENDING": "queued",
    "JOB_STATE_RUNNING": "running",
    "JOB_STATE_UPDATING": "running",
    "JOB_STATE_CANCELLING": "running",
    "JOB_STATE_SUCCEEDED": "succeeded",
    "JOB_STATE_PARTIALLY_SUCCEEDED": "succeeded",
    "JOB_STATE_FAILED": "failed",
    "JOB_STATE_EXPIRED": "failed",
    "JOB_STATE_CANCELLED": "cancelled",
}
SPOT_GRACE_S = 30
"""cloud.google.com/compute/docs/instances/spot."""


class Vertex:
    name = "vertex"
    reach: Reach = "containers"
    cloud: str | None = "GCP"
    options = frozenset({"project", "region", "service_account"})
    max_nodes: int | None = None
    needs_image = True
    spot_grace_s: int | None = SPOT_GRACE_S
    default_grace_s = SPOT_GRACE_S

    def check(self, spec: LaunchSpec) -> list[str]:
        check_container(spec, "Vertex AI")
        find_parent(spec.options)
        _, _, gpus = find_machine(spec, "Vertex AI")
        for mount in spec.mounts:
            nfs = split_nfs(mount, "Vertex AI", buckets="gs://BUCKET:/gcs/BUCKET")
            if nfs is None and mount.path != f"/gcs/{(mount.source or '')[5:].rstrip('/')}":
                raise UsageError(
                    f"--mount {mount.source}: Vertex AI mounts every bucket at /gcs/BUCKET.",
                    fix=f"{mount.source}:/gcs/…",
                )
            if nfs is not None and not mount.path.startswith("/mnt/nfs/"):
                raise UsageError(f"--mount {mount.path}: Vertex AI mounts NFS below /mnt/nfs/.", fix="…:/mnt/nfs/data")
        warnings = []
        if spec.gpus and spec.gpus < gpus:
            warnings.append(f"{gpus - spec.gpus} of the {gpus} GPUs of a {spec.machine_type} are paid and not used")
        if spec.devices > 1:
            warnings.append(
                "Vertex AI has no setting for the size of /dev/shm; `stoker check` in the job says what it is"
            )
        return warnings

    def render(self, spec: LaunchSpec) -> list[Rendered]:
        machine_type, accelerator, count = find_machine(spec, "Vertex AI")
        machine: dict[str, Any] = {"machineType": machine_type}
        if accelerator is not None:
            machine |= {"acceleratorType": accelerator, "acceleratorCount": count}
        pool: dict[str, Any] = {
            "machineSpec": machine,
            "replicaCount": "1",
            "containerSpec": {
                "imageUri": spec.image,
                "command": ["stoker"],
                "args": list(spec.arguments),
                "env": [{"name": name, "value": value} for name, value in spec.env.items()],
            },
        }
        shares = [(mount, split_nfs(mount, "Vertex AI", buckets="")) for mount in spec.mounts]
        nfs = [{"server": nfs[0], "path": nfs[1], "mountPoint": mount.path} for mount, nfs in shares if nfs is not None]
        if nfs:
            pool["nfsMounts"] = nfs
        pools = [pool]
        if spec.max_nodes > 1:  # the first pool is one machine, that of rank 0
            pools.append({**pool, "replicaCount": str(spec.max_nodes - 1)})
        scheduling: dict[str, Any] = {
            "strategy": "SPOT" if spec.spot else "STANDARD",
            "disableRetries": spec.restarts == 0,
            "restartJobOnWorkerRestart": spec.max_nodes > 1 and spec.restarts > 0,
        }
        if spec.time_limit_s is not None:
            scheduling["timeout"] = f"{spec.time_limit_s}s"
        job_spec: dict[str, Any] = {"workerPoolSpecs": pools, "scheduling": scheduling}
        if spec.options.service_account is not None:
            job_spec["serviceAccount"] = spec.options.service_account
        if spec.run_dir.startswith("gs://"):  # TensorBoard files and the model are copied below it (training/vertex.py)
            job_spec["baseOutputDirectory"] = {"outputUriPrefix": spec.run_dir}
        job = {"displayName": spec.name, "labels": {"app": "stoker"}, "jobSpec": job_spec}
        return [Rendered(f"{spec.name}.json", json.dumps(job, indent=2, ensure_ascii=False) + "\n")]

    def submit(self, spec: LaunchSpec) -> str:
        parent = find_parent(spec.options)
        client = _open_client(parent)
        from google.cloud.aiplatform_v1.types import CustomJob

        job = CustomJob.from_json(self.render(spec)[0].text)
        with google_errors("Vertex AI does not take the job."):
            return str(client.create_custom_job(parent=parent, custom_job=job, timeout=TIMEOUT_S).name)

    def status(self, job: Job) -> JobStatus:
        client = _open_client(job.id)
        found: Any = None
        with google_errors("The job cannot be read.", missing=lambda: None):
            found = client.get_custom_job(name=job.id, timeout=TIMEOUT_S)
        if found is None:
            return JobStatus(state="unknown", text="Vertex AI has no such job: it was deleted")
        detail = found.error.message if found.error.code else ""
        return JobStatus(
            state=STATES.get(found.state.name, "unknown"), text=found.state.name + (f": {detail}" if detail else "")
        )

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        query = f'resource.type="ml_job" resource.labels.job_id="{job.id.rpartition("/")[2]}"'
        query += ' resource.labels.task_name="workerpool0-0"'
        return log_lines(
            job.id,
            query,
            follow=follow,
            is_running=lambda: self.status(job).state in ("queued", "running"),
        )

    def cancel(self, job: Job) -> None:
        client = _open_client(job.id)
        with google_errors("The job cannot be cancelled.", missing=lambda: None), _ended_is_no_error():
            client.cancel_custom_job(name=job.id, timeout=TIMEOUT_S)


@contextlib.contextmanager
def _ended_is_no_error() -> Iterator[None]:
    from google.api_core.exceptions import FailedPrecondition

    with contextlib.suppress(FailedPrecondition):  # "not in a cancellable state"
        yield


def _open_client(name: str) -> Any:
    """name: of a resource, which has the region."""
    with needs_package("google-cloud-aiplatform", "Launching on Vertex AI"):
        from google.cloud.aiplatform_v1.services.job_service import JobServiceClient
    with google_errors("Vertex AI cannot be reached."):
        return JobServiceClient(client_options={"api_endpoint": f"{name.split('/')[3]}-aiplatform.googleapis.com"})
