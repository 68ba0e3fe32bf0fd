"""Batch of Google Cloud: a job with one task per node.

Batch starts a task again unless its exit code is one that would come again; a preempted VM is exit code 50001. At most
ten times, which it does not count apart from failures. Rendering needs no client; submitting parses the JSON that was
rendered, which refuses unknown fields. Never executed here: the requests are tested.
"""

from collections.abc import Iterator
from typing import Any

from stoker.errors import UsageError
from stoker.launching.containers import FAILING_EXIT_CODES, PORT, fill, read_template
from stoker.launching.google_cloud import TIMEOUT_S, GoogleCloud, find_parent, to_json
from stoker.launching.spec import Job, JobStatus, LaunchSpec, Mount, states

MAX_RETRIES = 10
"""cloud.google.com/batch/docs/automate-task-retries."""
STATES = states(
    {
        "queued": "QUEUED SCHEDULED",
        "running": "RUNNING CANCELLATION_IN_PROGRESS",
        "succeeded": "SUCCEEDED",
        "failed": "FAILED",
        "cancelled": "CANCELLED DELETION_IN_PROGRESS",
    }
)
DRIVER_VOLUMES = ("/var/lib/nvidia/lib64:/usr/local/nvidia/lib64", "/var/lib/nvidia/bin:/usr/local/nvidia/bin")
"""Where Batch's image has the driver, and where containers look for it
(cloud.google.com/batch/docs/create-run-job-gpus)."""
START = 'export RANK="$BATCH_NODE_INDEX" MASTER_ADDR="$BATCH_MAIN_NODE_HOSTNAME"; exec stoker "$@"'
OPEN_PORTS = "iptables -w -I INPUT -p tcp -j ACCEPT || true"
"""Batch's image drops what comes from other machines, and ranks connect to ports that the kernel chooses. The firewall
of the network stays as it is."""


class GcpBatch(GoogleCloud):
    name = "gcp-batch"
    title = "Batch"
    package = "google-cloud-batch"
    buckets = "gs://BUCKET:/path"

    def check(self, spec: LaunchSpec) -> list[str]:
        warnings = super().check(spec)
        if spec.restarts > MAX_RETRIES:
            raise UsageError(f"--restarts {spec.restarts}: Batch retries a task at most {MAX_RETRIES} times.")
        if spec.spot:
            text = f"Batch retries a task {MAX_RETRIES} times, preemptions included; then the same command continues"
            warnings.insert(0, text)
        return warnings

    def render(self, spec: LaunchSpec) -> str:
        machine_type, accelerator, count = self.find_machine(spec)
        several = spec.max_nodes > 1
        variables = {**spec.env, **({"WORLD_SIZE": str(spec.max_nodes), "MASTER_PORT": str(PORT)} if several else {})}
        accelerators = None
        if accelerator is not None and machine_type.startswith("n1-"):  # other types have their GPUs
            accelerators = [{"type": accelerator.lower().replace("_", "-"), "count": str(count)}]
        values = {
            "runnables": _runnables(spec),
            "cpu_milli": str(spec.cpus * 1000),
            "memory_mib": str(int(spec.memory_gib * 1024)),
            "retries": MAX_RETRIES if spec.spot else spec.restarts,
            "failing_exit_codes": list(FAILING_EXIT_CODES),
            "volumes": [_volume(mount, number) for number, mount in enumerate(spec.mounts)] or None,
            "environment": {"variables": variables} if variables else None,
            "time_limit": spec.time_limit_s and f"{spec.time_limit_s}s",
            "nodes": str(spec.max_nodes),
            "several": several or None,
            "machine_type": machine_type,
            "provisioning": "SPOT" if spec.spot else "STANDARD",
            "accelerators": accelerators,
            "has_gpus": accelerator is not None or None,
            "service_account": spec.options.service_account and {"email": spec.options.service_account},
        }
        return to_json(fill(read_template("gcp_batch.yaml"), values))

    def submit(self, spec: LaunchSpec) -> str:
        parent = find_parent(spec.options)
        with self.client(parent, "Batch does not take the job.") as client:
            from google.cloud.batch_v1.types import Job as BatchJob

            job = BatchJob.from_json(self.render(spec))
            return str(client.create_job(parent=parent, job=job, job_id=spec.name, timeout=TIMEOUT_S).name)

    def status(self, job: Job) -> JobStatus:
        found = self._get(job)
        if found is None:
            return JobStatus(state="unknown", text="Batch has no such job: it was deleted")
        state, events = found.status.state.name, list(found.status.status_events)
        return JobStatus(
            state=STATES.get(state, "unknown"),
            text=f"{state}: {events[-1].description}" if events else state,
            exit_code=(events[-1].task_execution.exit_code if events else 0) or None,
        )

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        found = self._get(job)
        if found is None:
            return iter(())
        query = f'logName="projects/{job.id.split("/")[1]}/logs/batch_task_logs" labels.job_uid="{found.uid}"'
        return self.log_lines(job, query, follow=follow)

    def cancel(self, job: Job) -> None:
        """Batch keeps the job, as cancelled."""
        if self.status(job).is_live:
            with self.client(job.id, "The job cannot be cancelled.", "NotFound") as client:
                client.cancel_job(request={"name": job.id}, timeout=TIMEOUT_S)

    def open_client(self, name: str) -> Any:  # noqa: ARG002  # all regions have one address
        from google.cloud.batch_v1 import BatchServiceClient

        return BatchServiceClient(transport="rest")

    def _get(self, job: Job) -> Any:
        found: Any = None
        with self.client(job.id, "The job cannot be read.", "NotFound") as client:
            found = client.get_job(name=job.id, timeout=TIMEOUT_S)
        return found


def _volume(mount: Mount, number: int) -> dict[str, Any]:
    if mount.nfs is None:
        return {"gcs": {"remotePath": (mount.source or "")[5:]}, "mountPath": _host_path(number)}
    server, export = mount.nfs
    return {"nfs": {"server": server, "remotePath": export}, "mountPath": _host_path(number)}


def _runnables(spec: LaunchSpec) -> list[dict[str, Any]]:
    several = spec.max_nodes > 1
    options = [f"--shm-size={int(spec.shm_gib * 1024)}m"]
    options += ["--network=host"] if several else []
    options += ["--privileged"] if spec.gpus else []
    volumes = [f"{_host_path(number)}:{mount.path}" for number, mount in enumerate(spec.mounts)]
    container = {
        "imageUri": spec.image,
        "entrypoint": "/bin/sh" if several else "stoker",
        "commands": ["-c", START, "stoker", *spec.arguments] if several else list(spec.arguments),
        "volumes": [*volumes, *(DRIVER_VOLUMES if spec.gpus else ())] or None,
        "options": " ".join(options),
    }
    return [*([{"script": {"text": OPEN_PORTS}}] if several else []), {"container": container}]


def _host_path(number: int) -> str:
    return f"/mnt/disks/mount-{number}"
