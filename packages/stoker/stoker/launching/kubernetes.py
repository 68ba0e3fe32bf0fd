"""Kubernetes: an Indexed Job, one pod per node; several nodes are a JobSet of that Job where the cluster has JobSet.

The index of a pod is its rank; the first one has a name in the cluster's DNS, where the others meet. Exit codes decide
whether a pod is started again: not after those that would come again, uncounted after 75 and after a disruption (a
spot node, a drain, a higher priority). The image's own entry point starts `stoker`: a `command` would take the place of
its init, and a process 1 without one ignores SIGTERM. What has no flag is merged into the pods (`--patch`).
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import yaml

from stoker.launching.request import MIG_SLICES, check_container
from stoker.launching.spec import (
    FAILING_EXIT_CODES,
    PORT,
    Job,
    JobStatus,
    LaunchPlace,
    LaunchSpec,
    Mount,
    State,
    fill,
    read_template,
)
from stoker.planning.machines import GPUS, Machine, find_machine
from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, PreflightError, UsageError, needs_package

KINDS = {"job": ("batch", "v1", "jobs"), "jobset": ("jobset.x-k8s.io", "v1alpha2", "jobsets")}
"""Group, version, plural of the API."""
LABEL = "app.kubernetes.io/instance"
"""Label of all that belongs to a job; its value is the name of the job."""
INDEX = "batch.kubernetes.io/job-completion-index"
TIMEOUT_S = 30
"""Seconds for an answer: the client itself waits without end. Following a log takes as long as the job."""
FOLLOW_S = 2.0


GRACE_VARIABLE = "STOKER_GRACE_S"
"""Tells the training how long its pod stays after SIGTERM (`training/stopper.py`, which needs torch)."""


class Kubernetes(LaunchPlace):
    name = "k8s"
    file = "{name}.yaml"
    has_secrets = True
    job_id = r"(job|jobset)(/[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?){2}"
    options = frozenset({"namespace", "queue", "patch", "service_account"})
    spot_grace_s = 15
    """Seconds of the 30 s of a spot VM for pods that are not the system's ("Termination and graceful shutdown" in
    cloud.google.com/kubernetes-engine/docs/concepts/spot-vms). EKS and AKS give more."""

    def check(self, spec: LaunchSpec) -> list[str]:
        check_container(spec, "Kubernetes")
        machine = _machine(spec)
        if spec.mig_slice is not None:
            _check_mig_slice(spec.mig_slice, machine.accelerator if machine else None)
        for mount in spec.mounts:
            _volume(mount, 0)
        for flag, value in (("--namespace", spec.options.namespace), ("--queue", spec.options.queue)):
            if value is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", value):
                raise ConfigError(f"{flag} {value!r} is not a name.", choices=["lower-case letters, digits and -"])
        for secret, key in spec.secrets.values():
            if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", secret):
                raise ConfigError(f"--secret …={secret}/{key}: a Secret's name has lower-case letters, digits, - and .")
        _read_patch(spec)
        if spec.options.queue is None:
            return []
        return ["the job is suspended until Kueue admits it; without Kueue in the cluster it never starts"]

    def render(self, spec: LaunchSpec, kind: str = "job") -> str:
        return yaml.dump_all(_render(spec, kind), Dumper=_Dumper, sort_keys=False, width=120)

    def submit(self, spec: LaunchSpec) -> str:
        cluster = Cluster("job", spec.options.namespace, spec.job_name)
        if spec.max_nodes > 1 and cluster.has_kind("jobset"):
            cluster = Cluster("jobset", spec.options.namespace, spec.job_name)
        created = []
        try:
            for document in yaml.safe_load_all(self.render(spec, cluster.kind)):
                created.append(document["kind"])
                cluster.create(document)
        except Exception:
            if created[:-1] == ["Service"]:
                cluster.delete_service()
            raise
        return f"{cluster.kind}/{cluster.namespace}/{spec.job_name}"

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
        return JobStatus(
            state=state,
            text=", ".join(_explain(conditions, phases, rows)) or "no pods yet",
            nodes=tuple(sorted({pod.spec.node_name for pod in pods if pod.spec.node_name})),
            restarts=status.get("restarts", status.get("failed", 0)),
            exit_code=None if last is None else int(last.exit_code),
        )

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        """The output of the first node, from its newest pod."""
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


def _explain(conditions: list[Any], phases: list[str], containers: list[Any]) -> Iterator[str]:
    """The newest condition with its reason, the phases of the pods, and what containers wait for."""
    for newest in conditions[-1:]:
        detail = ": ".join(part for part in (newest.get("reason"), newest.get("message")) if part)
        yield f"{newest.get('type')} ({detail})" if detail else str(newest.get("type"))
    yield from (f"{phases.count(phase)} pods {phase}" for phase in dict.fromkeys(phases))
    yield from sorted({row.state.waiting.reason for row in containers if row.state.waiting is not None} - {None})


def _check_mig_slice(name: str, accelerator: str | None) -> None:
    """Raises UsageError for a slice that the GPU, or if it is unknown any GPU, does not have."""
    if accelerator is not None and accelerator not in MIG_SLICES:
        raise UsageError(f"A {accelerator} has no MIG slices.", choices=sorted(MIG_SLICES), fix="leave out --gpu")
    gpus = MIG_SLICES if accelerator is None else [accelerator]
    slices = dict.fromkeys(name for gpu in gpus for name in MIG_SLICES[gpu])
    if name not in slices:
        raise UsageError(f"There is no MIG slice {name} of {accelerator or 'any GPU'}.", choices=slices)


# What is submitted


def _machine(spec: LaunchSpec) -> Machine | None:
    return find_machine(spec.machine_type or "", spec.gpu)


def _is_gke(spec: LaunchSpec) -> bool:
    """Whether the GPU or the machine is named as on Google's clusters."""
    machine, is_named = _machine(spec), spec.tpu is not None or (spec.gpu or "").startswith("nvidia-")
    return is_named or (machine is not None and machine.cloud == "GCP")


def _read_patch(spec: LaunchSpec) -> dict[str, Any]:
    """What --patch merges into the pod template. Raises ConfigError."""
    path = spec.options.patch
    if path is None:
        return {}
    try:
        patch = yaml.safe_load(regular_files.read_text(path, max_bytes=1 << 20))
        found: dict[str, Any] = msgspec.convert(patch, dict[Literal["metadata", "spec"], dict[str, Any]])
    except (OSError, ValueError, RecursionError, yaml.YAMLError, msgspec.ValidationError) as error:
        what, fix = "The file of --patch is not a part of a pod.", "`spec:`, `metadata:` or both (docs/launch.md)"
        raise ConfigError(what, location=path, cause=str(error), fix=fix) from error
    return found


def merge(base: Any, patch: Any) -> Any:
    """`base` with a patch, after the rules of kubectl: objects are merged field by field, lists whose items have a name
    or a mountPath (containers, volumes, env) by that, other values and lists are replaced, and null deletes."""

    def key(item: Any) -> Any:
        return item.get("mountPath", item.get("name")) if isinstance(item, dict) else None

    if isinstance(base, dict) and isinstance(patch, dict):
        merged = {**base, **{name: merge(base.get(name), value) for name, value in patch.items()}}
        return {name: value for name, value in merged.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and all(map(key, (*base, *patch))):
        items = {key(item): item for item in base}
        items |= {key(item): merge(items.get(key(item)), item) for item in patch}
        return list(items.values())
    return patch


def _render(spec: LaunchSpec, kind: str) -> list[dict[str, Any]]:
    """The documents: `kubernetes.yaml` with the values of the spec. A JobSet makes a Service of its own."""
    templates = read_template("kubernetes.yaml")
    values = _values(spec, templates, is_job=kind == "job")
    values["pod"] = merge(fill(templates["pod"], values), _read_patch(spec))
    values["job"] = fill(templates["job_spec"], values)
    return [fill(templates[name], values) for name in (["service", kind] if values["subdomain"] else [kind])]


def _literal(text: str) -> str:
    """Kubernetes puts the value of a variable in place of `$(NAME)` in arguments and variables; `$$` stands for `$`."""
    return text.replace("$", "$$")


def _values(spec: LaunchSpec, templates: Any, *, is_job: bool) -> dict[str, Any]:
    """The values of the template. None: the field is left out."""
    several, job_name = spec.max_nodes > 1, spec.job_name
    env: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in spec.env.items()]
    env += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, (secret, key) in spec.secrets.items()
    ]
    if several:
        master = f"{job_name}-0.{job_name}" if is_job else f"{job_name}-node-0-0.{job_name}"
        place = {"world_size": str(spec.max_nodes), "master": master, "port": str(PORT)}
        env += fill(templates["rank_env"], place)
    if GRACE_VARIABLE not in {*spec.env, *spec.secrets}:
        grace_s = min(spec.grace_s, Kubernetes.spot_grace_s) if spec.spot else spec.grace_s
        env.append({"name": GRACE_VARIABLE, "value": str(grace_s)})
    cpus, memory_gib = _schedulable(spec)
    resources: dict[str, str | int] = {"cpu": f"{round(cpus * 1000)}m", "memory": _mebibytes(memory_gib)}
    if spec.gpus:
        resources[_gpu_resource(spec)] = spec.gpus
    if spec.tpu is not None:
        resources["google.com/tpu"] = spec.tpu.chips  # GKE places a pod only if it asks for all chips of the node
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _mebibytes(spec.shm_gib)}}]
    volumes += [_volume(mount, number) for number, mount in enumerate(spec.mounts)]
    paths = ["/dev/shm", *(mount.path for mount in spec.mounts)]
    # The user of the image may write to a new disk, which belongs to root.
    has_bucket = any("csi" in volume for volume in volumes)
    # the user of the image is in this group; the driver of buckets takes it from the pod, too
    is_shared = has_bucket or any("persistentVolumeClaim" in volume for volume in volumes)
    suspend = None if spec.options.queue is None else True
    return {
        **_placement(spec),
        "spec": spec,
        "suspend": suspend,
        "job_suspend": suspend if is_job else None,
        "annotations": {"gke-gcsfuse/volumes": "true"} if has_bucket else None,
        "arguments": list(map(_literal, spec.arguments)),
        "env": env,
        "resources": resources,
        "volumes": volumes,
        "volume_mounts": [{"name": v["name"], "mountPath": path} for v, path in zip(volumes, paths, strict=True)],
        "container_ports": templates["rank_ports"] if several else None,
        "security_context": {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"} if is_shared else None,
        "subdomain": job_name if several and is_job else None,
        # A failed pod of a JobSet fails its Job; else each preempted node makes the others fail, once.
        "backoff_limit": spec.restarts * spec.max_nodes if is_job else 0,
        "failing_exit_codes": list(FAILING_EXIT_CODES),
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
    gpu, machine = None if spec.mig_slice else spec.gpu, _machine(spec)
    if gpu is None and machine is not None and "+" in machine.name:  # an n1, of which nodes have other GPUs as well
        gpu = GPUS[machine.accelerator].google.lower().replace("_", "-")
    selector = {
        "node.kubernetes.io/instance-type": spec.machine_type and spec.machine_type.partition("+")[0],
        "cloud.google.com/gke-gpu-partition-size": spec.mig_slice if is_gke else None,
        "cloud.google.com/gke-accelerator": gpu if is_gke else None,
        "nvidia.com/gpu.product": None if is_gke else gpu,
        "cloud.google.com/gke-tpu-accelerator": None if spec.tpu is None else spec.tpu.gke,
        "cloud.google.com/gke-tpu-topology": None if spec.tpu is None else spec.tpu.topology,
        "cloud.google.com/gke-spot": "true" if spec.spot and is_gke else None,
    }
    rows = read_template("kubernetes.yaml")["placement"]
    tolerations = rows["gpu_tolerations"] if spec.gpus else rows["tpu_tolerations"] if spec.tpu is not None else []
    if spec.spot:
        tolerations = [*tolerations, *(rows["spot_tolerations"][:1] if is_gke else rows["spot_tolerations"])]
    return {
        "affinity": rows["spot_affinity"] if spec.spot and not is_gke else None,
        "node_selector": selector,
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
    choices = ["CLAIM:/path", "SERVER:/export:/path", "gs://BUCKET:/path (GKE)"]
    raise ConfigError(f"--mount {source or mount.path}: a pod cannot mount that.", choices=choices)


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
            what, fix = "No Kubernetes cluster is configured.", "set KUBECONFIG, or kubectl config use-context NAME"
            raise PreflightError(what, location=file or "~/.kube/config", cause=str(error), fix=fix) from error
        self._objects: Any = kubernetes.client.CustomObjectsApi()
        self._core: Any = kubernetes.client.CoreV1Api()
        group, version, plural = KINDS[kind]
        self._path = (group, version, self.namespace, plural)

    def has_kind(self, kind: str) -> bool:
        get, (group, version, plural) = self._objects.get_api_resources, KINDS[kind]
        found = self._call("The cluster's kinds cannot be read.", get, group, version, missing_is_none=True)
        return found is not None and any(row.name == plural for row in found.resources)

    def create(self, document: Any) -> None:
        what = f"The cluster does not take the {document['kind']}."
        if document["kind"] == "Service":
            self._call(what, self._core.create_namespaced_service, self.namespace, document)
        else:
            self._call(what, self._objects.create_namespaced_custom_object, *self._path, document)

    def get(self) -> Any:
        """The job as the API has it; None: there is none."""
        get = self._objects.get_namespaced_custom_object
        return self._call("The job cannot be read.", get, *self._path, self._name, missing_is_none=True)

    def pods(self) -> list[Any]:
        """The pods of the job, oldest first."""
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
            kind = UsageError if error.status in (400, 422) else PreflightError
            raise kind(what, cause=f"{error.status} {message}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            fix = "kubectl cluster-info shows whether it answers"
            raise PreflightError("The Kubernetes cluster does not answer.", cause=str(error), fix=fix) from error
