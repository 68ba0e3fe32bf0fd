"""Vertex AI: a CustomJob whose worker pools are the nodes of the training.

Vertex AI gives each node its place in `CLUSTER_SPEC` (`training/cluster.py`) and starts a worker that ended with an
error again on the same machine, so that exit code 75 continues the run. Rendering needs no client; submitting parses
the JSON that was rendered, which refuses unknown fields. Never executed here: the requests are tested.
"""

from collections.abc import Iterator
from typing import Any

from stoker.errors import UsageError
from stoker.launching.containers import fill, read_template
from stoker.launching.google_cloud import TIMEOUT_S, GoogleCloud, find_parent, to_json
from stoker.launching.spec import Job, JobStatus, LaunchSpec, states

STATES = states(
    {
        "queued": "JOB_STATE_QUEUED JOB_STATE_PENDING",
        "running": "JOB_STATE_RUNNING JOB_STATE_UPDATING JOB_STATE_CANCELLING",
        "succeeded": "JOB_STATE_SUCCEEDED JOB_STATE_PARTIALLY_SUCCEEDED",
        "failed": "JOB_STATE_FAILED JOB_STATE_EXPIRED",
        "cancelled": "JOB_STATE_CANCELLED",
    }
)


class Vertex(GoogleCloud):
    name = "vertex"
    title = "Vertex AI"
    package = "google-cloud-aiplatform"
    buckets = "gs://BUCKET:/gcs/BUCKET"

    def check(self, spec: LaunchSpec) -> list[str]:
        warnings = super().check(spec)
        for mount in spec.mounts:
            if mount.nfs is None and mount.path != f"/gcs/{(mount.source or '')[5:].rstrip('/')}":
                raise UsageError(
                    f"--mount {mount.source}: Vertex AI mounts every bucket at /gcs/BUCKET.",
                    fix=f"{mount.source}:/gcs/…",
                )
            if mount.nfs is not None and not mount.path.startswith("/mnt/nfs/"):
                raise UsageError(f"--mount {mount.path}: Vertex AI mounts NFS below /mnt/nfs/.", fix="…:/mnt/nfs/data")
        if spec.devices > 1:
            warnings.append(
                "Vertex AI has no setting for the size of /dev/shm; `stoker check` in the job says what it is"
            )
        return warnings

    def render(self, spec: LaunchSpec) -> str:
        machine_type, accelerator, count = self.find_machine(spec)
        nfs = [{"server": m.nfs[0], "path": m.nfs[1], "mountPoint": m.path} for m in spec.mounts if m.nfs is not None]
        template = read_template("vertex.yaml")
        values = {
            "machine_type": machine_type,
            "accelerator": accelerator,
            "accelerators": count or None,
            "image": spec.image,
            "arguments": list(spec.arguments),
            "env": [{"name": name, "value": value} for name, value in spec.env.items()],
            "nfs": nfs or None,
            "name": spec.name,
            "strategy": "SPOT" if spec.spot else "STANDARD",
            "never_restarts": spec.restarts == 0,
            "restarts_together": spec.max_nodes > 1 and spec.restarts > 0,
            "time_limit": spec.time_limit_s and f"{spec.time_limit_s}s",
            "service_account": spec.options.service_account,
            "output": {"outputUriPrefix": spec.run_dir} if spec.run_dir.startswith("gs://") else None,
        }
        # The first pool is one machine, that of rank 0.
        replicas = ["1", str(spec.max_nodes - 1)] if spec.max_nodes > 1 else ["1"]
        pools = [fill(template["pool"], {**values, "replicas": number}) for number in replicas]
        return to_json(fill(template["job"], {**values, "pools": pools}))

    def submit(self, spec: LaunchSpec) -> str:
        parent = find_parent(spec.options)
        with self.client(parent, "Vertex AI does not take the job.") as client:
            from google.cloud.aiplatform_v1.types import CustomJob

            job = CustomJob.from_json(self.render(spec))
            return str(client.create_custom_job(parent=parent, custom_job=job, timeout=TIMEOUT_S).name)

    def status(self, job: Job) -> JobStatus:
        found: Any = None
        with self.client(job.id, "The job cannot be read.", "NotFound") as client:
            found = client.get_custom_job(name=job.id, timeout=TIMEOUT_S)
        if found is None:
            return JobStatus(state="unknown", text="Vertex AI has no such job: it was deleted")
        state = found.state.name
        text = f"{state}: {found.error.message}" if found.error.code and found.error.message else state
        return JobStatus(state=STATES.get(state, "unknown"), text=text)

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        query = f'resource.type="ml_job" resource.labels.job_id="{job.id.rpartition("/")[2]}"'
        return self.log_lines(job, f'{query} resource.labels.task_name="workerpool0-0"', follow=follow)

    def cancel(self, job: Job) -> None:
        # A job that has ended is "not in a cancellable state": FailedPrecondition.
        with self.client(job.id, "The job cannot be cancelled.", "NotFound", "FailedPrecondition") as client:
            client.cancel_custom_job(name=job.id, timeout=TIMEOUT_S)

    def open_client(self, name: str) -> Any:
        from google.cloud.aiplatform_v1.services.job_service import JobServiceClient

        return JobServiceClient(client_options={"api_endpoint": f"{name.split('/')[3]}-aiplatform.googleapis.com"})
