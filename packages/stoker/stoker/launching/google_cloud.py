"""Google Cloud: a CustomJob of Vertex AI, whose worker pools are the nodes, and a job of Batch, with one task per node.

Both take the JSON that was rendered, over HTTP, with the credentials of gcloud, and refuse unknown fields. Vertex AI
gives each node its place in `CLUSTER_SPEC` (`training/cluster.py`) and starts a worker that ended with an error again
on the same machine, so that exit code 75 continues the run. Batch starts a task again unless its exit code is one that
would come again; a preempted VM is exit code 50001, and counts as a failure. Never executed here: requests are tested.
"""

import functools
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from stoker.launching.request import check_container
from stoker.launching.spec import (
    FAILING_EXIT_CODES,
    PORT,
    Job,
    JobStatus,
    LaunchPlace,
    LaunchSpec,
    Mount,
    PlaceOptions,
    fill,
    read_template,
    state_of,
)
from stoker.planning.machines import GPUS, Machine, listed_machines
from stoker_watch.errors import ConfigError, PreflightError, UsageError, make_error, needs_package

MEGA = "NVIDIA_H100_MEGA_80GB"
"""The H100 of a3-megagpu-8g."""
PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")
REGION_VARIABLES = ("GOOGLE_CLOUD_REGION", "CLOUDSDK_COMPUTE_REGION")
LOGGING = "https://logging.googleapis.com/v2/entries:list"
FOLLOW_S = 5.0
TIMEOUT_S = 60.0


class GoogleCloud(LaunchPlace):
    """What Vertex AI and Batch share."""

    file = "{name}.json"
    job_id = r"projects/[\w:.-]{1,64}/locations/[a-z0-9-]{1,40}/(customJobs/\d{1,25}|jobs/[a-z0-9-]{1,63})"
    cloud = "GCP"
    options = frozenset({"project", "region", "service_account", "boot_disk"})
    spot_grace_s = default_grace_s = 30
    """Notice of a spot machine (cloud.google.com/compute/docs/instances/spot)."""
    title: str
    api: str
    """Address of its API, with `{region}`."""
    collection: str
    """Path of its jobs in the API, with `{name}` where the client chooses the name."""
    buckets: str
    """How --mount names a bucket."""

    def check(self, spec: LaunchSpec) -> list[str]:
        check_container(spec, self.title)
        find_parent(spec.options)
        if not re.fullmatch(r"[1-9]\d{1,4}", spec.options.boot_disk or "100"):
            raise ConfigError(f"--boot-disk {spec.options.boot_disk} is not a size in GB.", choices=["10 … 99999"])
        _, _, gpus = self.find_machine(spec)
        for mount in spec.mounts:
            if mount.nfs is None and not re.fullmatch(r"gs://[a-z0-9][a-z0-9._/-]+", mount.source or ""):
                what = f"--mount {mount.source or mount.path}: {self.title} cannot mount that."
                raise ConfigError(what, choices=["SERVER:/export:/path", self.buckets])
        if spec.gpus and spec.gpus < gpus:
            return [f"{gpus - spec.gpus} of the {gpus} GPUs of a {spec.machine_type} are paid and not used"]
        return []

    def submit(self, spec: LaunchSpec) -> str:
        url = f"{self.url(find_parent(spec.options))}/{self.collection.format(name=spec.job_name)}"
        body = json.loads(self.render(spec))
        return str(_call("POST", url, f"{self.title} does not take the job.", body=body)["name"])

    def status(self, job: Job) -> JobStatus:
        found = self.find(job)
        if found is None:
            return JobStatus(state="unknown", text=f"{self.title} has no such job: it was deleted")
        state, reason, exit_code = self.describe(found)
        text = f"{state}: {reason}" if reason else state
        return JobStatus(state=state_of(self.name, state), text=text, exit_code=exit_code)

    def cancel(self, job: Job) -> None:
        """The cloud keeps the job, as cancelled. 400: it ended meanwhile."""
        if self.status(job).is_live:
            _call("POST", f"{self.url(job.id)}:cancel", "The job cannot be cancelled.", body={}, ignored=(400, 404))

    def describe(self, found: dict[str, Any]) -> tuple[str, str, int | None]:
        """(state of the place, reason, exit code) of a job as the API has it."""
        raise NotImplementedError

    def find(self, job: Job) -> Any:
        """The job as the API has it; None: there is none."""
        return _call("GET", self.url(job.id), "The job cannot be read.", ignored=(404,))

    def url(self, name: str) -> str:
        """The address of a resource: projects/P/locations/REGION/…"""
        return f"{self.api.format(region=name.split('/')[3])}/{name}"

    def find_machine(self, spec: LaunchSpec) -> tuple[str, str | None, int]:
        """(machine type, accelerator in the words of Vertex AI, its number). Raises UsageError for a pair that does not
        exist, and for MIG slices, which machines of Google Cloud have only as nodes of GKE."""
        machines = {name: machine for name, machine in listed_machines().items() if machine.cloud == "GCP"}
        if spec.machine_type is None:
            fix = "--machine-type g2-standard-8; `stoker plan DATA` recommends one"
            raise ConfigError(f"{self.title} needs a machine type.", choices=list(machines)[:8], fix=fix)
        if spec.mig_slice is not None:
            raise UsageError(f"{self.title} has no MIG slices.", fix="k8s has them; or a machine with a smaller GPU")
        base = spec.machine_type.partition("+")[0]
        of_type = [machine for name, machine in machines.items() if name.partition("+")[0] == base]
        if not spec.gpus:
            of_type = [machine for machine in of_type if "+" not in machine.name]  # an n1 also comes without
            return (base, _accelerator(of_type[0]), of_type[0].gpus) if of_type else (base, None, 0)
        wanted = (spec.gpu or "").lower().replace("_", "-")
        fitting = [
            machine
            for machine in of_type
            if wanted in ("", machine.accelerator, _accelerator(machine).lower().replace("_", "-"))
            and spec.machine_type in (base, machine.name)
        ]
        which_gpu = spec.machine_type == base and base.startswith("n1-") and not wanted
        if which_gpu or not fitting:
            pairs = [f"--machine-type {machine.name}" for machine in of_type]
            pairs = pairs or [name for name in machines if "g2" in name]
            raise UsageError(f"{self.title} has no {spec.machine_type} with {spec.gpu or 'a GPU'}.", choices=pairs)
        return base, _accelerator(fitting[0]), fitting[0].gpus

    def values(self, spec: LaunchSpec) -> dict[str, Any]:
        """What the templates of both have."""
        machine_type, accelerator, gpus = self.find_machine(spec)
        return {
            "spec": spec,
            "machine_type": machine_type,
            "accelerator": accelerator,
            "gpus": gpus or None,
            "provisioning": "SPOT" if spec.spot else "STANDARD",
            "time_limit": spec.time_limit_s and f"{spec.time_limit_s}s",
        }

    def log_lines(self, job: Job, query: str, *, follow: bool) -> Iterator[str]:
        """The lines in Cloud Logging, oldest first; with `follow` until the job has ended. query: Logging's filter."""
        body = {"resourceNames": ["/".join(job.id.split("/")[:2])], "orderBy": "timestamp asc", "pageSize": 1000}
        since, seen = "", set[str]()
        while True:
            running = follow and self.status(job).is_live
            body |= {"filter": f'{query} timestamp>="{since}"' if since else query}
            token: dict[str, str] | None = {}
            while token is not None:
                page = _call("POST", LOGGING, "The log cannot be read.", body=body | token)
                for entry in page.get("entries", []):
                    if entry["insertId"] not in seen:
                        seen.add(entry["insertId"])
                        since = entry["timestamp"]
                        payload = entry.get("jsonPayload") or {}
                        yield str(entry.get("textPayload") or payload.get("message") or "").rstrip("\n")
                token = {"pageToken": page["nextPageToken"]} if page.get("nextPageToken") else None
            if not running:
                return
            time.sleep(FOLLOW_S)


class Vertex(GoogleCloud):
    name = "vertex"
    title = "Vertex AI"
    api = "https://{region}-aiplatform.googleapis.com/v1"
    collection = "customJobs"
    buckets = "gs://BUCKET:/gcs/BUCKET"

    def check(self, spec: LaunchSpec) -> list[str]:
        warnings = super().check(spec)
        for mount in spec.mounts:
            if mount.nfs is None and mount.path != f"/gcs/{(mount.source or '')[5:].rstrip('/')}":
                raise make_error(UsageError, "vertex-mount", source=mount.source)
            if mount.nfs is not None and not mount.path.startswith("/mnt/nfs/"):
                raise UsageError(f"--mount {mount.path}: Vertex AI mounts NFS below /mnt/nfs/.", fix="…:/mnt/nfs/data")
        if spec.devices > 1:
            warnings.append(
                "Vertex AI has no setting for the size of /dev/shm; `stoker check` in the job says what it is"
            )
        return warnings

    def render(self, spec: LaunchSpec) -> str:
        nfs = [{"server": m.nfs[0], "path": m.nfs[1], "mountPoint": m.path} for m in spec.mounts if m.nfs is not None]
        template = read_template("vertex.yaml")
        values = self.values(spec) | {
            "disk_gb": spec.options.boot_disk and int(spec.options.boot_disk),
            "arguments": list(spec.arguments),
            # Vertex AI puts values of variables in place of $(NAME); $$ stands for $.
            "env": [{"name": name, "value": value.replace("$(", "$$(")} for name, value in spec.env.items()],
            "nfs": nfs or None,
            "never_restarts": spec.restarts == 0,
            "restarts_together": spec.max_nodes > 1 and spec.restarts > 0,
            "output": spec.run_dir if spec.run_dir.startswith("gs://") else None,
        }
        # The first pool is one machine, that of rank 0.
        replicas = ["1", str(spec.max_nodes - 1)] if spec.max_nodes > 1 else ["1"]
        pools = [fill(template["pool"], {**values, "replicas": number}) for number in replicas]
        return _to_json(template["job"], {**values, "pools": pools})

    def describe(self, found: dict[str, Any]) -> tuple[str, str, int | None]:
        return found.get("state", ""), found.get("error", {}).get("message", ""), None

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        query = f'resource.type="ml_job" resource.labels.job_id="{job.id.rpartition("/")[2]}"'
        return self.log_lines(job, f'{query} resource.labels.task_name="workerpool0-0"', follow=follow)


MAX_RETRIES = 10
"""Retries of a task of Batch: cloud.google.com/batch/docs/automate-task-retries."""


class GcpBatch(GoogleCloud):
    name = "gcp-batch"
    title = "Batch"
    api = "https://batch.googleapis.com/v1"
    collection = "jobs?jobId={name}"
    buckets = "gs://BUCKET:/path"
    options = GoogleCloud.options | {"gpu_driver"}
    has_secrets = True
    """Secrets of Secret Manager: a key is a version of the secret."""

    def check(self, spec: LaunchSpec) -> list[str]:
        warnings = super().check(spec)
        if (driver := spec.options.gpu_driver) is not None:
            if not re.fullmatch(r"\d{3,4}\.\d{1,3}(\.\d{1,3})?", driver):
                what = f"--gpu-driver {driver} is not the version of a driver."
                raise ConfigError(what, fix="550.90.07, for example")
            if self.find_machine(spec)[1] is None:
                raise ConfigError(f"--gpu-driver {driver}: the machine {spec.machine_type} has no GPU.")
        if spec.restarts > MAX_RETRIES:
            raise UsageError(f"--restarts {spec.restarts}: Batch retries a task at most {MAX_RETRIES} times.")
        if spec.spot:
            text = f"Batch retries a task {MAX_RETRIES} times, preemptions included; then the same command continues"
            warnings.insert(0, text)
        return warnings

    def render(self, spec: LaunchSpec) -> str:
        values = self.values(spec)
        machine_type, accelerator, count = values["machine_type"], values["accelerator"], values["gpus"]
        template, several = read_template("gcp_batch.yaml"), spec.max_nodes > 1
        variables = {**spec.env, **({"WORLD_SIZE": str(spec.max_nodes), "MASTER_PORT": str(PORT)} if several else {})}
        project = find_parent(spec.options).split("/")[1]
        secrets = {
            name: f"projects/{project}/secrets/{secret}/versions/{version}"
            for name, (secret, version) in spec.secrets.items()
        }
        accelerators = None
        driver = spec.options.gpu_driver
        if accelerator is not None and (machine_type.startswith("n1-") or driver):  # other types have their GPUs
            gpus = {"type": accelerator.lower().replace("_", "-"), "count": str(count), "driverVersion": driver}
            accelerators = [{name: value for name, value in gpus.items() if value}]
        values |= {
            "runnables": _runnables(spec, template),
            "cpu_milli": str(spec.cpus * 1000),
            "memory_mib": str(int(spec.memory_gib * 1024)),
            "retries": MAX_RETRIES if spec.spot else spec.restarts,
            "failing_exit_codes": list(FAILING_EXIT_CODES),
            "volumes": [_volume(mount, number) for number, mount in enumerate(spec.mounts)] or None,
            "variables": variables or None,
            "secrets": secrets or None,
            "nodes": str(spec.max_nodes),
            "several": several or None,
            "accelerators": accelerators,
            "has_gpus": accelerator is not None or None,
        }
        return _to_json(template["job"], values)

    def describe(self, found: dict[str, Any]) -> tuple[str, str, int | None]:
        status = found.get("status", {})
        last = (status.get("statusEvents") or [{}])[-1]
        return status.get("state", ""), last.get("description", ""), last.get("taskExecution", {}).get("exitCode")

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        found = self.find(job)
        if found is None:
            return iter(())
        query = f'logName="projects/{job.id.split("/")[1]}/logs/batch_task_logs" labels.job_uid="{found["uid"]}"'
        return self.log_lines(job, query, follow=follow)


def _volume(mount: Mount, number: int) -> dict[str, Any]:
    bucket = {"gcs": {"remotePath": (mount.source or "")[5:]}}
    source = bucket if mount.nfs is None else {"nfs": {"server": mount.nfs[0], "remotePath": mount.nfs[1]}}
    return {**source, "mountPath": _host_path(number)}


def _runnables(spec: LaunchSpec, template: dict[str, Any]) -> list[dict[str, Any]]:
    several = spec.max_nodes > 1
    options = [f"--shm-size={int(spec.shm_gib * 1024)}m"]
    options += ["--network=host"] if several else []
    options += ["--privileged"] if spec.gpus else []
    volumes = [f"{_host_path(number)}:{mount.path}" for number, mount in enumerate(spec.mounts)]
    values = {
        "spec": spec,
        "entrypoint": "/bin/sh" if several else None,
        "commands": [*template["start"], *spec.arguments] if several else list(spec.arguments),
        "volumes": [*volumes, *(template["driver_volumes"] if spec.gpus else ())] or None,
        "options": " ".join(options),
    }
    return [*([template["open_ports"]] if several else []), fill(template["runnable"], values)]


def _host_path(number: int) -> str:
    return f"/mnt/disks/mount-{number}"


def _to_json(template: Any, values: dict[str, Any]) -> str:
    return json.dumps(fill(template, values), indent=2, ensure_ascii=False) + "\n"


def find_parent(options: PlaceOptions) -> str:
    """projects/P/locations/R, of the flags or the variables of gcloud. Raises ConfigError."""
    found = []
    for flag, value, names in (
        ("--project", options.project, PROJECT_VARIABLES),
        ("--region", options.region, REGION_VARIABLES),
    ):
        found.append(value or next((os.environ[name] for name in names if os.environ.get(name)), None))
        if not found[-1]:
            raise ConfigError(f"Which {flag[2:]} of Google Cloud?", fix=f"{flag} NAME, or set {names[0]}")
    return "projects/{}/locations/{}".format(*found)


def _accelerator(machine: Machine) -> str:
    return MEGA if machine.name.startswith("a3-mega") else GPUS[machine.accelerator].google


# The APIs


@functools.cache
def _open_session() -> Any:
    """An HTTP session with the credentials of this machine."""
    import google.auth
    from google.auth.transport.requests import AuthorizedSession

    credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
    return AuthorizedSession(credentials)


def _call(method: str, url: str, what: str, *, body: Any = None, ignored: tuple[int, ...] = ()) -> Any:
    """The answer of an API; None if its status is one of `ignored`. what: the message of the error otherwise. Raises
    UsageError for a request that is refused, PreflightError."""
    with needs_package("google-auth[requests]", "Google Cloud"):
        from google.auth.exceptions import GoogleAuthError
    try:
        response = _open_session().request(method, url, json=body, timeout=TIMEOUT_S)
    except GoogleAuthError as error:
        fix = "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS"
        raise PreflightError("There are no credentials for Google Cloud.", cause=str(error), fix=fix) from error
    except OSError as error:
        raise PreflightError("Google Cloud does not answer.", cause=str(error)) from error
    if response.ok:
        return response.json()
    if response.status_code in ignored:
        return None
    try:
        cause = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        cause = f"{response.status_code}: {response.text[:300]}"
    if response.status_code == 409:
        raise UsageError("The project has a job of this name.", cause=cause, fix="another --name")
    raise (UsageError if response.status_code == 400 else PreflightError)(what, cause=cause)
