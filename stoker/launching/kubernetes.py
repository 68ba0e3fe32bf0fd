"""Kubernetes: an Indexed Job, a JobSet or a TrainJob of Kubeflow, one pod per node.

The index of a pod is its rank; the first one has a name in the cluster's DNS, where the others meet. Exit codes decide
whether a pod is started again: not after those that would come again, uncounted after 75 and after a disruption (a
spot node, a drain, a higher priority). Rendering needs no client; submitting sends exactly the YAML that was rendered.
"""

import math
import re
import time
from collections.abc import Iterator
from typing import Any

import yaml

from stoker.errors import ConfigError, nearest
from stoker.launching.containers import (
    FAILING_EXIT_CODES,
    PORT,
    check_container,
    check_mig_slice,
    node_variables,
)
from stoker.launching.kubernetes_client import INDEX, KINDS, LABEL, Cluster, describe, exit_code_of, state_of
from stoker.launching.spec import Job, JobStatus, LaunchSpec, Mount, Reach, Rendered
from stoker.planning.machines import Machine, listed_machines

RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that Kubeflow Trainer comes with."""
SPOT_GRACE_S = 15
"""Of the 30 s of a spot VM, for pods that are not the system's ("Termination and graceful shutdown" in
cloud.google.com/kubernetes-engine/docs/concepts/spot-vms). EKS and AKS give more."""
SPOT_LABELS = (
    ("cloud.google.com/gke-spot", "true"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("karpenter.sh/capacity-type", "spot"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
)
"""How GKE, EKS, Karpenter and AKS mark spot nodes. GKE and AKS taint them with the same key and value."""
FOLLOW_S = 2.0


class Kubernetes:
    name = "k8s"
    reach: Reach = "containers"
    cloud: str | None = None
    options = frozenset({"namespace", "queue", "kind", "service_account"})
    max_nodes: int | None = None
    needs_image = True
    spot_grace_s: int | None = SPOT_GRACE_S
    default_grace_s = 60

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
            check_mig_slice(spec.mig_slice, machine.accelerator if machine else None)
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

    def render(self, spec: LaunchSpec) -> list[Rendered]:
        kind = _kind(spec)
        documents = {"job": _render_job, "jobset": _render_jobset, "trainjob": _render_trainjob}[kind](spec)
        text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)
        return [Rendered(f"{spec.name}.yaml", text)]

    def submit(self, spec: LaunchSpec) -> str:
        api = Cluster(_kind(spec))
        namespace = spec.options.namespace or api.namespace
        created = []
        try:
            for document in yaml.safe_load_all(self.render(spec)[0].text):
                created.append(document["kind"])
                api.create(namespace, document)
        except Exception:
            if created[:-1] == ["Service"]:
                api.delete_service(namespace, spec.name)
            raise
        return f"{_kind(spec)}/{namespace}/{spec.name}"

    def status(self, job: Job) -> JobStatus:
        kind, namespace, name = job.id.split("/")
        api = Cluster(kind)
        found = api.get(namespace, name)
        if found is None:
            return JobStatus(state="unknown", text="the cluster has no such job: it was cancelled or deleted")
        pods = [pod for pod in api.pods(namespace, name) if pod.status is not None]
        status = found.get("status") or {}
        return JobStatus(
            state=state_of(status, pods),
            text=describe(status, pods),
            nodes=tuple(sorted({pod.spec.node_name for pod in pods if pod.spec.node_name})),
            restarts=status.get("restarts", status.get("failed", 0)) if kind != "trainjob" else None,
            exit_code=exit_code_of(pods),
        )

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        """Of the first node, of its newest pod."""
        kind, namespace, name = job.id.split("/")
        api = Cluster(kind)
        seen: set[str] = set()
        while True:
            for pod in api.pods(namespace, name):
                index = (pod.metadata.annotations or {}).get(INDEX, "0")
                if index == "0" and pod.metadata.uid not in seen and pod.status.phase != "Pending":
                    yield from api.log(namespace, pod.metadata.name, follow=follow)
                    seen.add(pod.metadata.uid)
            if not follow or self.status(job).state not in ("queued", "running"):
                return
            time.sleep(FOLLOW_S)

    def cancel(self, job: Job) -> None:
        kind, namespace, name = job.id.split("/")
        api = Cluster(kind)
        api.delete(namespace, name)
        if kind == "job":
            api.delete_service(namespace, name)


def _kind(spec: LaunchSpec) -> str:
    return (spec.options.kind or "job").lower()


def _machine(spec: LaunchSpec) -> Machine | None:
    return listed_machines().get(spec.machine_type or "")


def _is_gke(spec: LaunchSpec) -> bool:
    """Whether the GPU or the machine is named as on Google's clusters."""
    machine = _machine(spec)
    return (spec.gpu or "").startswith("nvidia-") or (machine is not None and machine.cloud == "GCP")


def _metadata(spec: LaunchSpec, *, queue: bool = True) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": spec.name}
    if spec.options.namespace is not None:
        metadata["namespace"] = spec.options.namespace
    metadata["labels"] = {"app.kubernetes.io/name": "stoker", LABEL: spec.name}
    if queue and spec.options.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = spec.options.queue
    return metadata


def _api_version(kind: str) -> dict[str, Any]:
    group, version, _, name = KINDS[kind]
    return {"apiVersion": f"{group}/{version}", "kind": name}


def _suspended(spec: LaunchSpec) -> dict[str, Any]:
    return {"suspend": True} if spec.options.queue is not None else {}


def _render_job(spec: LaunchSpec) -> list[dict[str, Any]]:
    # Each preempted node makes the others fail, once.
    job_spec = {
        **_suspended(spec),
        **_job_spec(spec, spec.restarts * spec.max_nodes, master=f"{spec.name}-0.{spec.name}"),
    }
    job = {**_api_version("job"), "metadata": _metadata(spec), "spec": job_spec}
    if spec.max_nodes == 1:
        return [job]
    job_spec["template"]["spec"]["subdomain"] = spec.name
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec, queue=False),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL: spec.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    return [service, job]


def _render_jobset(spec: LaunchSpec) -> list[dict[str, Any]]:
    # A failed pod fails the Job, and JobSet starts all nodes again; the first exit codes fail the JobSet.
    template = {"spec": _job_spec(spec, 0, master=f"{spec.name}-node-0-0.{spec.name}")}
    failure = {
        "maxRestarts": spec.restarts,
        "rules": [{"name": "wouldFailAgain", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    jobset_spec = {
        **_suspended(spec),
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": failure,
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }
    return [{**_api_version("jobset"), "metadata": _metadata(spec), "spec": jobset_spec}]


def _render_trainjob(spec: LaunchSpec) -> list[dict[str, Any]]:
    pod = _pod(spec, master=f"{spec.name}-node-0-0.{spec.name}")
    container = pod["spec"].pop("containers")[0]
    patched = ("serviceAccountName", "terminationGracePeriodSeconds", "securityContext", "nodeSelector", "affinity")
    patch = {name: pod["spec"][name] for name in (*patched, "tolerations", "volumes") if name in pod["spec"]}
    patch["containers"] = [{"name": "node", "volumeMounts": container["volumeMounts"]}]
    node = {"name": "node", "template": {"spec": {"template": {"metadata": pod["metadata"], "spec": patch}}}}
    train_spec: dict[str, Any] = {
        **_suspended(spec),
        "runtimeRef": {"name": RUNTIME},
        "trainer": {
            "image": container["image"],
            "command": container["command"],
            "args": container["args"],
            "numNodes": spec.max_nodes,
            "numProcPerNode": spec.devices,
            "resourcesPerNode": container["resources"],
            "env": container["env"],
        },
        "runtimePatches": [
            {"manager": "stoker", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
        ],
    }
    if spec.time_limit_s is not None:
        train_spec["activeDeadlineSeconds"] = spec.time_limit_s
    return [{**_api_version("trainjob"), "metadata": _metadata(spec), "spec": train_spec}]


def _job_spec(spec: LaunchSpec, backoff_limit: int, *, master: str) -> dict[str, Any]:
    codes = {"containerName": "stoker", "operator": "In"}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [75]}},
        {"action": "FailJob", "onExitCodes": {**codes, "values": list(FAILING_EXIT_CODES)}},
    ]
    job_spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": spec.max_nodes,
        "parallelism": spec.max_nodes,
        "backoffLimit": backoff_limit,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
    }
    if spec.time_limit_s is not None:
        job_spec["activeDeadlineSeconds"] = spec.time_limit_s
    return {**job_spec, "template": _pod(spec, master=master)}


def _pod(spec: LaunchSpec, *, master: str) -> dict[str, Any]:
    """The template of a pod, which is a node of the training."""
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in spec.env.items()]
    if spec.max_nodes > 1:
        index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        env += [{"name": "RANK", "valueFrom": index}]
        env += [{"name": name, "value": value} for name, value in node_variables(spec, master).items()]
    cpus, memory_gib = _schedulable(spec)
    resources: dict[str, str | int] = {"cpu": f"{round(cpus * 1000)}m", "memory": _mebibytes(memory_gib)}
    if spec.gpus:
        resources[_gpu_resource(spec)] = spec.gpus
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _mebibytes(spec.shm_gib)}}]
    volumes += [_volume(mount, number) for number, mount in enumerate(spec.mounts)]
    paths = ["/dev/shm", *(mount.path for mount in spec.mounts)]
    container: dict[str, Any] = {
        "name": "stoker",
        "image": spec.image,
        "command": ["stoker"],
        "args": list(spec.arguments),
        "env": env,
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": [
            {"name": volume["name"], "mountPath": path} for volume, path in zip(volumes, paths, strict=True)
        ],
    }
    if spec.max_nodes > 1:
        container["ports"] = [{"name": "rendezvous", "containerPort": PORT, "protocol": "TCP"}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.grace_s,
        "enableServiceLinks": False,  # a Service named stoker would set STOKER_… variables
        "automountServiceAccountToken": False,
        **_placement(spec),
        "containers": [container],
        "volumes": volumes,
    }
    if spec.options.service_account is not None:
        pod["serviceAccountName"] = spec.options.service_account
    if any("persistentVolumeClaim" in volume for volume in volumes):
        # The user of the image may write to a new disk, which belongs to root.
        pod["securityContext"] = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    metadata: dict[str, Any] = {"labels": {"app.kubernetes.io/name": "stoker", LABEL: spec.name}}
    if any("csi" in volume for volume in volumes):
        metadata["annotations"] = {"gke-gcsfuse/volumes": "true"}
    return {"metadata": metadata, "spec": pod}


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
    selector: dict[str, str] = {}
    tolerations: list[dict[str, str]] = []
    if spec.machine_type is not None:
        selector["node.kubernetes.io/instance-type"] = spec.machine_type.partition("+")[0]
    if spec.gpus:
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if spec.mig_slice is not None and _is_gke(spec):
        selector["cloud.google.com/gke-gpu-partition-size"] = spec.mig_slice
    elif spec.mig_slice is None and spec.gpu is not None:
        label = "cloud.google.com/gke-accelerator" if _is_gke(spec) else "nvidia.com/gpu.product"
        selector[label] = spec.gpu
    placement: dict[str, Any] = {}
    if spec.spot:
        known = SPOT_LABELS[:1] if _is_gke(spec) else SPOT_LABELS
        for key, value in known:
            if value in ("true", "spot") and "karpenter" not in key:
                tolerations.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
        if len(known) == 1:
            selector[known[0][0]] = known[0][1]
        else:  # terms are alternatives
            terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]} for key, value in known]
            required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            placement["affinity"] = {"nodeAffinity": required}
    if selector:
        placement["nodeSelector"] = selector
    if tolerations:
        placement["tolerations"] = tolerations
    return placement


def _volume(mount: Mount, number: int) -> dict[str, Any]:
    """A claim, an NFS export, or a bucket by GKE's Cloud Storage FUSE. Raises ConfigError."""
    source, name = mount.source or "", f"mount-{number}"
    if match := re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]+)/?", source):
        attributes = {"bucketName": match[1], "mountOptions": "implicit-dirs"}
        return {"name": name, "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}
    if match := re.fullmatch(r"([\w.-]+):(/(?!/).*)", source):
        return {"name": name, "nfs": {"server": match[1], "path": match[2]}}
    if re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", source):
        return {"name": name, "persistentVolumeClaim": {"claimName": source}}
    raise ConfigError(
        f"--mount {source or mount.path}: a pod cannot mount that.",
        choices=["CLAIM:/path", "SERVER:/export:/path", "gs://BUCKET:/path (GKE)"],
    )


class _Dumper(yaml.SafeDumper):
    """Quotes strings that another reader of YAML takes for numbers or booleans: PyYAML writes `--lr 1e-3` as 1e-3,
    which kubectl reads as a number."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.match(r"(?:--)?[A-Za-z/]", text) and text.lower() not in ("y", "n")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)
