"""Kubernetes: an Indexed Job, a JobSet or a TrainJob of Kubeflow, one pod per node.

The index of a pod is its rank; the first one has a name in the cluster's DNS, where the others meet. Exit codes decide
whether a pod is started again: not after those that would come again, uncounted after 75 and after a disruption (a
spot node, a drain, a higher priority). Rendering needs no client; submitting sends exactly the YAML that was rendered.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml

from stoker.errors import ConfigError, PreflightError, UsageError, nearest, needs_package
from stoker.launching.request import MIG_SLICES, check_container
from stoker.launching.spec import (
    FAILING_EXIT_CODES,
    PORT,
    Job,
    JobStatus,
    LaunchSpec,
    Mount,
    Place,
    State,
    fill,
    read_template,
)
from stoker.planning.machines import Machine, listed_machines

KINDS = {
    "job": ("batch", "v1", "jobs", "Job"),
    "jobset": ("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
}
"""--kind → group, version, plural, kind of the API."""
INSTALL = {
    "jobset": "install JobSet in the cluster (jobset.sigs.k8s.io), or --kind job",
    "trainjob": "install Kubeflow Trainer 2.2 or later in the cluster, or --kind job",
}
LABEL = "app.kubernetes.io/instance"
"""Of all that belongs to a job; its value is the name of the job."""
INDEX = "batch.kubernetes.io/job-completion-index"
TIMEOUT_S = 30
"""For an answer: the client itself waits without end. Following a log takes as long as the job."""
RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that Kubeflow Trainer comes with."""
FOLLOW_S = 2.0


class Kubernetes(Place):
    name = "k8s"
    file = "{name}.yaml"
    job_id = r"(job|jobset|trainjob)(/[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?){2}"
    options = frozenset({"namespace", "queue", "kind", "service_account"})
    spot_grace_s = 15
    """Of the 30 s of a spot VM, for pods that are not the system's ("Termination and graceful shutdown" in
    cloud.google.com/kubernetes-engine/docs/concepts/spot-vms). EKS and AKS give more."""

    def check(self, spec: LaunchSpec) -> list[str]:
        kind = _kind(spec)
        if kind not in KINDS:
            near = nearest(kind, KINDS)
            raise ConfigError(
                f"--kind {kind!r}" + (f"; did you mean {near!r}?" if near else " is unknown."), choices=KINDS
            )
        check_container(spec, "Kubernetes")
        machine = _machine(spec)
        if spec.mig_slice is not None:
            _check_mig_slice(spec.mig_slice, machine.accelerator if machine else None)
        for mount in spec.mounts:
            _volume(mount, 0)
        for flag, value in (("--namespace", spec.options.namespace), ("--queue", spec.options.queue)):
            if value is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", value):
                raise ConfigError(f"{flag} {value!r} is not a name.", choices=["lower-case letters, digits and -"])
        warnings = []
        if spec.options.queue is not None:
            warnings.append("the job is suspended until Kueue admits it; without Kueue in the cluster it never starts")
        if kind == "trainjob":
            warnings.append(f"restarts of a TrainJob are those of its runtime {RUNTIME}: exit codes do not decide")
        return warnings

    def render(self, spec: LaunchSpec) -> str:
        return yaml.dump_all(_render(spec), Dumper=_Dumper, sort_keys=False, width=120)

    def submit(self, spec: LaunchSpec) -> str:
        cluster = Cluster(_kind(spec), spec.options.namespace, spec.name)
        created = []
        try:
            for document in yaml.safe_load_all(self.render(spec)):
                created.append(document["kind"])
                cluster.create(document)
        except Exception:
            if created[:-1] == ["Service"]:
                cluster.delete_service()
            raise
        return f"{cluster.kind}/{cluster.namespace}/{spec.name}"

    def status(self, job: Job) -> JobStatus:
        cluster = Cluster(*job.id.split("/"))
        found = cluster.get()
        if found is None:
            return JobStatus(state="unknown", text="the cluster has no such job: it was cancelled or deleted")
        pods = [pod for pod in cluster.pods() if pod.status is not None]
        status = found.get("status") or {}
        conditions = [row for row in status.get("conditions") or [] if row.get("status") == "True"]
        phases = sorted(pod.status.phase or "Unknown" for pod in pods)
        rows = [row for pod in pods for row in pod.status.container_statuses or [] if row.state is not None]
        ended = [row.state.terminated for row in rows if row.state.terminated is not None]
        last = max(ended, key=lambda end: str(end.finished_at or ""), default=None)
        state: State = "running" if "Running" in phases else "queued"
        names = {row.get("type") for row in conditions}
        if names & {"Complete", "Completed", "Failed"}:
            state = "failed" if "Failed" in names else "succeeded"
        # The newest condition with its reason, the phases of the pods, and what containers wait for.
        parts = []
        for newest in conditions[-1:]:
            detail = ": ".join(part for part in (newest.get("reason"), newest.get("message")) if part)
            parts.append(f"{newest.get('type')} ({detail})" if detail else str(newest.get("type")))
        parts += [f"{phases.count(phase)} pods {phase}" for phase in dict.fromkeys(phases)]
        parts += sorted({row.state.waiting.reason for row in rows if row.state.waiting is not None} - {None})
        return JobStatus(
            state=state,
            text=", ".join(parts) or "no pods yet",
            nodes=tuple(sorted({pod.spec.node_name for pod in pods if pod.spec.node_name})),
            restarts=status.get("restarts", status.get("failed", 0)) if cluster.kind != "trainjob" else None,
            exit_code=None if last is None else int(last.exit_code),
        )

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        """Of the first node, of its newest pod."""
        cluster = Cluster(*job.id.split("/"))
        seen: set[str] = set()
        while True:
            for pod in cluster.pods():
                index = (pod.metadata.annotations or {}).get(INDEX, "0")
                if index == "0" and pod.metadata.uid not in seen and pod.status.phase != "Pending":
                    yield from cluster.log(pod.metadata.name, follow=follow)
                    seen.add(pod.metadata.uid)
            if not follow or not self.status(job).is_live:
                return
            time.sleep(FOLLOW_S)

    def cancel(self, job: Job) -> None:
        cluster = Cluster(*job.id.split("/"))
        cluster.delete()
        if cluster.kind == "job":
            cluster.delete_service()


def _check_mig_slice(name: str, accelerator: str | None) -> None:
    """Raises UsageError for a slice that the GPU, or if it is unknown any GPU, does not have."""
    if accelerator is not None and accelerator not in MIG_SLICES:
        raise UsageError(f"A {accelerator} has no MIG slices.", choices=sorted(MIG_SLICES), fix="leave out --gpu")
    gpus = [accelerator] if accelerator is not None else list(MIG_SLICES)
    slices = list(dict.fromkeys(name for gpu in gpus for name in MIG_SLICES[gpu]))
    if name not in slices:
        raise UsageError(f"There is no MIG slice {name} of {accelerator or 'any GPU'}.", choices=slices)


# What is submitted


def _kind(spec: LaunchSpec) -> str:
    return (spec.options.kind or "job").lower()


def _machine(spec: LaunchSpec) -> Machine | None:
    return listed_machines().get(spec.machine_type or "")


def _is_gke(spec: LaunchSpec) -> bool:
    """Whether the GPU or the machine is named as on Google's clusters."""
    machine = _machine(spec)
    return (spec.gpu or "").startswith("nvidia-") or (machine is not None and machine.cloud == "GCP")


def _labels(spec: LaunchSpec) -> dict[str, Any]:
    return {"app.kubernetes.io/name": "stoker", LABEL: spec.name}


def _render(spec: LaunchSpec) -> list[dict[str, Any]]:
    """The documents: `kubernetes.yaml` with the values of the spec. Kueue starts a job that has a queue."""
    kind, templates, values = _kind(spec), read_template("kubernetes.yaml"), _values(spec)
    values["pod"] = fill(templates["pod"], values)
    values["job"] = fill(templates["job"], values)
    group, version, _, name = KINDS[kind]
    metadata = {"name": spec.name, "namespace": spec.options.namespace}
    queued = {**_labels(spec), "kueue.x-k8s.io/queue-name": spec.options.queue}
    document = {
        "apiVersion": f"{group}/{version}",
        "kind": name,
        "metadata": {**metadata, "labels": queued},
        "spec": {"suspend": None if spec.options.queue is None else True, **fill(templates[kind], values)},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "labels": _labels(spec)},
        "spec": fill(templates["service"], values),
    }
    # JobSet and TrainJob make a Service of their own.
    documents = [service, document] if kind == "job" and spec.max_nodes > 1 else [document]
    return [fill(one, {}) for one in documents]


def _literal(text: str) -> str:
    """Kubernetes puts the value of a variable in place of `$(NAME)` in arguments and variables; `$$` stands for `$`."""
    return text.replace("$", "$$")


def _values(spec: LaunchSpec) -> dict[str, Any]:
    """Of the template. None: the field is left out."""
    several, is_job = spec.max_nodes > 1, _kind(spec) == "job"
    env: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in spec.env.items()]
    if several:
        master = f"{spec.name}-0.{spec.name}" if is_job else f"{spec.name}-node-0-0.{spec.name}"
        env += [
            {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}},
            {"name": "WORLD_SIZE", "value": str(spec.max_nodes)},
            {"name": "MASTER_ADDR", "value": master},
            {"name": "MASTER_PORT", "value": str(PORT)},
        ]
    cpus, memory_gib = _schedulable(spec)
    resources: dict[str, str | int] = {"cpu": f"{round(cpus * 1000)}m", "memory": _mebibytes(memory_gib)}
    if spec.gpus:
        resources[_gpu_resource(spec)] = spec.gpus
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _mebibytes(spec.shm_gib)}}]
    volumes += [_volume(mount, number) for number, mount in enumerate(spec.mounts)]
    paths = ["/dev/shm", *(mount.path for mount in spec.mounts)]
    # The user of the image may write to a new disk, which belongs to root.
    has_disk = any("persistentVolumeClaim" in volume for volume in volumes)
    has_bucket = any("csi" in volume for volume in volumes)
    port = {"name": "rendezvous", "containerPort": PORT, "protocol": "TCP"}
    return {
        **_placement(spec),
        "labels": _labels(spec),
        "annotations": {"gke-gcsfuse/volumes": "true"} if has_bucket else None,
        "grace_s": spec.grace_s,
        "image": spec.image,
        "arguments": list(map(_literal, spec.arguments)),
        "env": env,
        "resources": resources,
        "volumes": volumes,
        "volume_mounts": [{"name": v["name"], "mountPath": path} for v, path in zip(volumes, paths, strict=True)],
        "container_ports": [port] if several else None,
        "service_account": spec.options.service_account,
        "security_context": {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"} if has_disk else None,
        "subdomain": spec.name if several and is_job else None,
        "selector": {LABEL: spec.name},
        "service_ports": [{"name": "rendezvous", "port": PORT}],
        "nodes": spec.max_nodes,
        "devices": spec.devices,
        # A failed pod of a JobSet fails its Job; else each preempted node makes the others fail, once.
        "backoff_limit": spec.restarts * spec.max_nodes if is_job else 0,
        "restarts": spec.restarts,
        "failing_exit_codes": list(FAILING_EXIT_CODES),
        "time_limit_s": spec.time_limit_s,
        "runtime": RUNTIME,
    }


def _schedulable(spec: LaunchSpec) -> tuple[float, float]:
    """CPUs and GiB that fit on a node of the machine type besides the system: a pod that asks for all of a machine is
    never scheduled. GKE's reservation, which is more than that of EKS, and half a CPU and half a GiB for its agents
    (cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes)."""
    machine = _machine(spec)
    if machine is None:
        return spec.cpus, spec.memory_gib
    parts = ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (math.inf, 0.02))
    reserved_gib, rest_gib = 0.1, machine.memory_gib
    for size_gib, fraction in parts:
        reserved_gib += min(size_gib, rest_gib) * fraction
        rest_gib = max(0.0, rest_gib - size_gib)
    return min(spec.cpus, machine.vcpus - 0.5), min(spec.memory_gib, machine.memory_gib - reserved_gib - 0.5)


def _mebibytes(gib: float) -> str:
    return f"{math.floor(gib * 1024)}Mi"


def _gpu_resource(spec: LaunchSpec) -> str:
    if spec.mig_slice is None or _is_gke(spec):
        return "nvidia.com/gpu"  # GKE's device plugin names a slice like a GPU; the node's label says its size
    return f"nvidia.com/mig-{spec.mig_slice.replace('+', '.')}"


def _placement(spec: LaunchSpec) -> dict[str, Any]:
    """On which nodes a pod may run."""
    is_gke = _is_gke(spec)
    gpu = None if spec.mig_slice else spec.gpu
    selector = {
        "node.kubernetes.io/instance-type": spec.machine_type and spec.machine_type.partition("+")[0],
        "cloud.google.com/gke-gpu-partition-size": spec.mig_slice if is_gke else None,
        "cloud.google.com/gke-accelerator": gpu if is_gke else None,
        "nvidia.com/gpu.product": None if is_gke else gpu,
        "cloud.google.com/gke-spot": "true" if spec.spot and is_gke else None,
    }
    rows = read_template("kubernetes.yaml")["placement"]
    tolerations = rows["gpu_tolerations"] if spec.gpus else []
    if spec.spot:
        tolerations = [*tolerations, *(rows["spot_tolerations"][:1] if is_gke else rows["spot_tolerations"])]
    return {
        "affinity": rows["spot_affinity"] if spec.spot and not is_gke else None,
        "node_selector": fill(selector, {}) or None,
        "tolerations": tolerations or None,
    }


def _volume(mount: Mount, number: int) -> dict[str, Any]:
    """A claim, an NFS export, or a bucket by GKE's Cloud Storage FUSE. Raises ConfigError."""
    source, name = mount.source or "", f"mount-{number}"
    if match := re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]+)/?", source):
        attributes = {"bucketName": match[1], "mountOptions": "implicit-dirs"}
        return {"name": name, "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}
    if mount.nfs is not None:
        return {"name": name, "nfs": {"server": mount.nfs[0], "path": mount.nfs[1]}}
    if re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", source):
        return {"name": name, "persistentVolumeClaim": {"claimName": source}}
    raise ConfigError(
        f"--mount {source or mount.path}: a pod cannot mount that.",
        choices=["CLAIM:/path", "SERVER:/export:/path", "gs://BUCKET:/path (GKE)"],
    )


class _Dumper(yaml.SafeDumper):
    """Quotes strings that another reader of YAML takes for numbers or booleans: PyYAML writes `--lr 1e-3` as 1e-3,
    which kubectl reads as a number."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.match(r"(?:--)?[A-Za-z/]", text) and text.lower() not in ("y", "n")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


# The official client


class Cluster:
    """The official client, for one job; its errors become StokerErrors. namespace: None takes that of the context."""

    def __init__(self, kind: str, namespace: str | None, name: str) -> None:
        with needs_package("kubernetes", "Launching on Kubernetes"):
            import kubernetes
        self.kind, self.namespace, self._name = kind, namespace or "default", name
        self._api_error = kubernetes.client.ApiException
        file = os.environ.get("KUBECONFIG")
        try:
            kubernetes.config.load_config(**({"config_file": file} if file else {}))
            with contextlib.suppress(kubernetes.config.ConfigException):  # inside a cluster there is no context
                _, active = kubernetes.config.list_kube_config_contexts(config_file=file)
                self.namespace = namespace or active["context"].get("namespace") or "default"
        except kubernetes.config.ConfigException as error:
            fix = "set KUBECONFIG, or kubectl config use-context NAME"
            raise PreflightError(
                "No Kubernetes cluster is configured.", location=file or "~/.kube/config", cause=str(error), fix=fix
            ) from error
        self._objects: Any = kubernetes.client.CustomObjectsApi()
        self._core: Any = kubernetes.client.CoreV1Api()
        group, version, plural, _ = KINDS[kind]
        self._path = (group, version, self.namespace, plural)

    def create(self, document: Any) -> None:
        what = f"The cluster does not take the {document['kind']}."
        if document["kind"] == "Service":
            self._call(what, self._core.create_namespaced_service, self.namespace, document)
        else:
            self._call(what, self._objects.create_namespaced_custom_object, *self._path, document)

    def get(self) -> Any:
        """None: there is no such job."""
        get = self._objects.get_namespaced_custom_object
        return self._call("The job cannot be read.", get, *self._path, self._name, missing_is_none=True)

    def pods(self) -> list[Any]:
        """Oldest first."""
        what, list_pods = "The pods of the job cannot be read.", self._core.list_namespaced_pod
        pods = self._call(what, list_pods, self.namespace, label_selector=f"{LABEL}={self._name}").items
        return sorted(pods, key=lambda pod: str(pod.metadata.creation_timestamp))

    def log(self, pod: str, *, follow: bool) -> Iterator[str]:
        with self._errors("The output of the job cannot be read."):
            response = self._core.read_namespaced_pod_log(pod, self.namespace, follow=follow, _preload_content=False)
            for line in response:
                yield line.decode(errors="replace").rstrip("\n")

    def delete(self) -> None:
        """Pods get SIGTERM and their grace period."""
        what, delete = "The job cannot be cancelled.", self._objects.delete_namespaced_custom_object
        body = {"propagationPolicy": "Foreground"}
        self._call(what, delete, *self._path, self._name, body=body, missing_is_none=True)

    def delete_service(self) -> None:
        what, delete = "The Service of the job cannot be deleted.", self._core.delete_namespaced_service
        self._call(what, delete, self._name, self.namespace, missing_is_none=True)

    def _call(self, what: str, method: Any, *arguments: Any, missing_is_none: bool = False, **options: Any) -> Any:
        found: Any = None
        with self._errors(what, missing_is_none=missing_is_none):
            found = method(*arguments, **options, _request_timeout=TIMEOUT_S)
        return found

    @contextlib.contextmanager
    def _errors(self, what: str, *, missing_is_none: bool = False) -> Iterator[None]:
        import urllib3

        try:
            yield
        except self._api_error as error:
            if error.status == 404 and missing_is_none:
                return
            try:
                message = str(msgspec.json.decode(error.body or b"")["message"])
            except (msgspec.DecodeError, KeyError, TypeError):
                message = str(error.reason)
            if error.status == 409:
                fix = "another --name, or `stoker launch cancel` first"
                raise UsageError("The cluster has a job of this name.", cause=message, fix=fix) from error
            if error.status == 404 and self.kind in INSTALL:
                missing = f"The cluster has no {KINDS[self.kind][3]}."
                raise PreflightError(missing, cause=message, fix=INSTALL[self.kind]) from error
            kind = UsageError if error.status in (400, 422) else PreflightError
            raise kind(what, cause=f"{error.status} {message}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            fix = "kubectl cluster-info shows whether it answers"
            raise PreflightError("The Kubernetes cluster does not answer.", cause=str(error), fix=fix) from error
