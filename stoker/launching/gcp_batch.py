"""Batch of Google Cloud: a job with one task per node.

Batch starts a task again unless its exit code is one that would come again; a preempted VM is exit code 50001. At most
ten times, which it does not count apart from failures. Rendering needs no client; submitting parses the JSON that was
rendered, which refuses unknown fields. Never executed here: the requests are tested.
"""

import json
from collections.abc import Iterator
from typing import Any

from stoker.errors import UsageError, needs_package
from stoker.launching.containers import FAILING_EXIT_CODES, PORT, check_container
from stoker.launching.google_cloud import (
    TIMEOUT_S,
    find_machine,
    find_parent,
    google_errors,
    log_lines,
    split_nfs,
)
from stoker.launching.spec import Job, JobStatus, LaunchSpec, Reach, Rendered, State

MAX_RETRIES = 10
"""cloud.google.com/batch/docs/automate-task-retries."""
SPOT_GRACE_S = 30
STATES: dict[str, State] = {
    "QUEUED": "queued",
    "SCHEDULED": "queued",
    "RUNNING": "running",
    "CANCELLATION_IN_PROGRESS": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "DELETION_IN_PROGRESS": "cancelled",
}
DRIVER_VOLUMES = ("/var/lib/nvidia/lib64:/usr/local/nvidia/lib64", "/var/lib/nvidia/bin:/usr/local/nvidia/bin")
"""Where Batch's image has the driver, and where containers look for it
(cloud.google.com/batch/docs/create-run-job-gpus)."""
START = 'export RANK="$BATCH_NODE_INDEX" MASTER_ADDR="$BATCH_MAIN_NODE_HOSTNAME"; exec stoker "$@"'
OPEN_PORTS = "iptables -w -I INPUT -p tcp -j ACCEPT || true"
"""Batch's image drops what comes from other machines, and ranks connect to ports that the kernel chooses. The firewall
of the network stays as it is."""


class GcpBatch:
    name = "gcp-batch"
    reach: Reach = "containers"
    cloud: str | None = "GCP"
    options = frozenset({"project", "region", "service_account"})
    max_nodes: int | None = None
    needs_image = True
    spot_grace_s: int | None = SPOT_GRACE_S
    default_grace_s = SPOT_GRACE_S

    def check(self, spec: LaunchSpec) -> list[str]:
        check_container(spec, "Batch")
        find_parent(spec.options)
        _, _, gpus = find_machine(spec, "Batch")
        for mount in spec.mounts:
            split_nfs(mount, "Batch", buckets="gs://BUCKET:/path")
        if spec.restarts > MAX_RETRIES:
            raise UsageError(f"--restarts {spec.restarts}: Batch retries a task at most {MAX_RETRIES} times.")
        warnings = []
        if spec.spot:
            warnings.append(
                f"Batch retries a task {MAX_RETRIES} times, preemptions included; then the same command continues"
            )
        if spec.gpus and spec.gpus < gpus:
            warnings.append(f"{gpus - spec.gpus} of the {gpus} GPUs of a {spec.machine_type} are paid and not used")
        return warnings

    def render(self, spec: LaunchSpec) -> list[Rendered]:
        machine_type, accelerator, count = find_machine(spec, "Batch")
        policy: dict[str, Any] = {"machineType": machine_type, "provisioningModel": "SPOT" if spec.spot else "STANDARD"}
        if accelerator is not None and machine_type.startswith("n1-"):  # other types have their GPUs
            policy["accelerators"] = [{"type": accelerator.lower().replace("_", "-"), "count": str(count)}]
        instance: dict[str, Any] = {"policy": policy}
        if accelerator is not None:
            instance["installGpuDrivers"] = True
        allocation: dict[str, Any] = {"instances": [instance]}
        if spec.options.service_account is not None:
            allocation["serviceAccount"] = {"email": spec.options.service_account}
        task: dict[str, Any] = {
            "runnables": _runnables(spec),
            "computeResource": {"cpuMilli": str(spec.cpus * 1000), "memoryMib": str(int(spec.memory_gib * 1024))},
            "maxRetryCount": MAX_RETRIES if spec.spot else spec.restarts,
            "lifecyclePolicies": [{"action": "FAIL_TASK", "actionCondition": {"exitCodes": list(FAILING_EXIT_CODES)}}],
        }
        if volumes := [_volume(spec, number) for number in range(len(spec.mounts))]:
            task["volumes"] = volumes
        variables = dict(spec.env)
        if spec.max_nodes > 1:
            variables |= {"WORLD_SIZE": str(spec.max_nodes), "MASTER_PORT": str(PORT)}
        if variables:
            task["environment"] = {"variables": variables}
        if spec.time_limit_s is not None:
            task["maxRunDuration"] = f"{spec.time_limit_s}s"
        nodes = str(spec.max_nodes)
        group: dict[str, Any] = {"taskSpec": task, "taskCount": nodes, "parallelism": nodes, "taskCountPerNode": "1"}
        if spec.max_nodes > 1:
            group["requireHostsFile"] = True  # all VMs are there before a task starts
        job = {
            "taskGroups": [group],
            "allocationPolicy": allocation,
            "logsPolicy": {"destination": "CLOUD_LOGGING"},
            "labels": {"app": "stoker"},
        }
        return [Rendered(f"{spec.name}.json", json.dumps(job, indent=2, ensure_ascii=False) + "\n")]

    def submit(self, spec: LaunchSpec) -> str:
        parent = find_parent(spec.options)
        client = _open_client()
        from google.cloud.batch_v1.types import Job as BatchJob

        job = BatchJob.from_json(self.render(spec)[0].text)
        with google_errors("Batch does not take the job."):
            created = client.create_job(parent=parent, job=job, job_id=spec.name, timeout=TIMEOUT_S)
            return str(created.name)

    def status(self, job: Job) -> JobStatus:
        found = self._get(job)
        if found is None:
            return JobStatus(state="unknown", text="Batch has no such job: it was deleted")
        events = list(found.status.status_events)
        detail = f": {events[-1].description}" if events else ""
        code = events[-1].task_execution.exit_code if events else 0
        return JobStatus(
            state=STATES.get(found.status.state.name, "unknown"),
            text=f"{found.status.state.name}{detail}",
            exit_code=code or None,
        )

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        found = self._get(job)
        if found is None:
            return iter(())
        project = job.id.split("/")[1]
        query = f'logName="projects/{project}/logs/batch_task_logs" labels.job_uid="{found.uid}"'
        return log_lines(
            job.id,
            query,
            follow=follow,
            is_running=lambda: self.status(job).state in ("queued", "running"),
        )

    def cancel(self, job: Job) -> None:
        """Batch keeps the job, as cancelled."""
        if self.status(job).state not in ("queued", "running"):
            return
        client = _open_client()
        with google_errors("The job cannot be cancelled.", missing=lambda: None):
            client.cancel_job(request={"name": job.id}, timeout=TIMEOUT_S)

    def _get(self, job: Job) -> Any:
        client = _open_client()
        found: Any = None
        with google_errors("The job cannot be read.", missing=lambda: None):
            found = client.get_job(name=job.id, timeout=TIMEOUT_S)
        return found


def _runnables(spec: LaunchSpec) -> list[dict[str, Any]]:
    options = [f"--shm-size={int(spec.shm_gib * 1024)}m"]
    container: dict[str, Any] = {"imageUri": spec.image, "entrypoint": "stoker", "commands": list(spec.arguments)}
    runnables: list[dict[str, Any]] = []
    if spec.max_nodes > 1:
        runnables.append({"script": {"text": OPEN_PORTS}})
        options.append("--network=host")
        container |= {"entrypoint": "/bin/sh", "commands": ["-c", START, "stoker", *spec.arguments]}
    volumes = [f"{_host_path(number)}:{mount.path}" for number, mount in enumerate(spec.mounts)]
    if spec.gpus:
        options.append("--privileged")
        volumes += DRIVER_VOLUMES
    if volumes:
        container["volumes"] = volumes
    container["options"] = " ".join(options)
    return [*runnables, {"container": container}]


def _host_path(number: int) -> str:
    return f"/mnt/disks/mount-{number}"


def _volume(spec: LaunchSpec, number: int) -> dict[str, Any]:
    mount = spec.mounts[number]
    nfs = split_nfs(mount, "Batch", buckets="gs://BUCKET:/path")
    if nfs is None:
        return {"gcs": {"remotePath": (mount.source or "")[5:]}, "mountPath": _host_path(number)}
    return {"nfs": {"server": nfs[0], "remotePath": nfs[1]}, "mountPath": _host_path(number)}


def _open_client() -> Any:
    with needs_package("google-cloud-batch", "Launching on Batch"):
        from google.cloud.batch_v1 import BatchServiceClient
    with google_errors("Batch cannot be reached."):
        return BatchServiceClient(transport="rest")
