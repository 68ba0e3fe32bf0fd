"""Kubernetes: rendered manifests against the schemas of several versions and against rules of our own; the official
client against a local server."""

import copy
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.launching.jobs import submit
from stoker.launching.kubernetes import Kubernetes
from stoker.launching.spec import Job, LaunchRequest, LaunchSpec, Mount, PlaceOptions
from stoker.training.cluster import find_place
from stoker_watch.errors import PreflightError, StokerError, UsageError
from tests.bounded import bounded
from tests.fixtures.special_files import replace_by
from tests.trainer.launching.cloud import FakeApi, make_spec, serving
from tests.trainer.launching.kubernetes_rules import problems

VERSIONS = ("1.29", "1.31", "1.34", "1.37")
KINDS = ("job", "jobset")
SPECS = {
    "one GPU": make_spec(),
    "nodes": make_spec(max_nodes=2, min_nodes=2, devices=4, gpus=4, cpus=48, machine_type="g2-standard-48"),
    "spot on GKE": make_spec(spot=True, gpu="nvidia-l4", grace_s=15),
    "spot": make_spec(spot=True, max_nodes=3, min_nodes=3, gpu="Tesla-T4"),
    "MIG slice": make_spec(gpu="1g.10gb+me"),
    "MIG slice on GKE": make_spec(gpu="1g.10gb", machine_type="a2-ultragpu-1g", cpus=12),
    "CPU": make_spec(gpus=0, devices=2),
    "mounts": make_spec(
        mounts=(Mount("/data", "coco"), Mount("/nfs", "10.0.0.2:/export"), Mount("/gcs", "gs://bucket")),
        time_limit_s=3600,
        env={"NCCL_DEBUG": "INFO", "ON": "y"},
        options=PlaceOptions(queue="gpus", namespace="team", service_account="trainer"),
    ),
}
CASES = [pytest.param(spec, kind, id=f"{name}, {kind}") for name, spec in SPECS.items() for kind in KINDS]


def render(spec: LaunchSpec, kind: str = "job") -> list[dict[str, Any]]:
    place = Kubernetes()
    place.check(spec)
    return list(yaml.safe_load_all(place.render(spec, kind)))


@pytest.mark.parametrize(("spec", "kind"), CASES)
def test_manifests_break_no_rule(spec: LaunchSpec, kind: str):
    assert problems(render(spec, kind)) == []


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_schemas_of_several_versions_take_jobs(spec: LaunchSpec):
    validate = pytest.importorskip("kubernetes_validate", reason="uv pip install kubernetes-validate").validate
    documents = render(spec)
    template = render(spec, "jobset")[0]["spec"]["replicatedJobs"][0]["template"]
    documents.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, **template})
    for document in documents:
        for version in VERSIONS:
            validate(document, version, strict=True)


def test_schemas_refuse_an_unknown_field():
    module = pytest.importorskip("kubernetes_validate", reason="uv pip install kubernetes-validate")
    job = render(make_spec())[0]
    job["spec"]["backofLimit"] = 3
    with pytest.raises(module.ValidationError):
        module.validate(job, VERSIONS[-1], strict=True)


def test_models_of_kubeflow_keep_every_field():
    """They drop unknown fields silently: what comes back has to be what went in. In a process of its own: where
    pydantic is imported, cyclopts parses command lines by its rules."""
    if importlib.util.find_spec("kubeflow_trainer_api") is None:
        pytest.skip("uv pip install kubeflow-trainer-api")
    documents = {"JobsetV1alpha2JobSet": [render(spec, "jobset")[0] for spec in SPECS.values()]}
    code = """
import json, sys
from kubeflow_trainer_api import models
documents = json.load(sys.stdin)
json.dump({n: [getattr(models, n).from_dict(d).to_dict() for d in documents[n]] for n in documents}, sys.stdout)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(documents), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == documents


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 3])
def test_pods_find_their_place(kind: str, nodes: int):
    """With the variables of the manifest, and the index that the controller of Jobs sets."""
    document = render(make_spec(max_nodes=nodes, min_nodes=nodes), kind)[-1]
    job = document["spec"] if kind == "job" else document["spec"]["replicatedJobs"][0]["template"]["spec"]
    env = job["template"]["spec"]["containers"][0]["env"]
    places = [find_place({row["name"]: row.get("value", str(index)) for row in env}) for index in range(nodes)]

    if nodes == 1:
        assert places == [None]
        return
    assert [place.rank for place in places if place] == list(range(nodes))
    assert {(place.world_size, place.local_world_size) for place in places if place} == {(nodes, 1)}


def broken(change: Callable[[dict[str, Any], dict[str, Any]], object]) -> list[str]:
    """What the rules say of the Job of two nodes after a change. change(job, pod)."""
    documents = copy.deepcopy(render(SPECS["nodes"]))
    change(documents[1]["spec"], documents[1]["spec"]["template"]["spec"])
    return problems(documents)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("restartPolicy", lambda _, pod: pod.update(restartPolicy="Always")),
        ("gang", lambda job, _: job.update(parallelism=1)),
        ("completionMode", lambda job, _: job.pop("completionMode")),
        ("rank", lambda _, pod: pod["containers"][0]["env"][0].update(valueFrom={"fieldRef": {"fieldPath": "x"}})),
        ("worldSize", lambda job, _: job.update(completions=4, parallelism=4)),
        ("service", lambda _, pod: pod.pop("subdomain")),
        ("containerName", lambda _, pod: pod["containers"][0].update(name="main")),
        ("exitCodes", lambda job, _: job["podFailurePolicy"]["rules"][2]["onExitCodes"]["values"].insert(0, 0)),
        ("env", lambda _, pod: pod["containers"][0]["env"].append({"name": "RANK", "value": "0"})),
        ("portName", lambda _, pod: pod["containers"][0]["ports"][0].update(name="rendezvous-of-the-ranks")),
        ("quantity", lambda _, pod: pod["containers"][0]["resources"]["limits"].update(cpu="8 cores")),
        ("gpu", lambda _, pod: pod["containers"][0]["resources"].update(requests={"cpu": "8"})),
        ("volumes", lambda _, pod: pod["volumes"].append({"name": "data", "emptyDir": {}})),
        ("shm", lambda _, pod: pod["volumes"][0].update(emptyDir={})),
        ("shmSize", lambda _, pod: pod["volumes"][0]["emptyDir"].update(sizeLimit="999999Mi")),
        ("nodeSelector", lambda _, pod: pod.update(nodeSelector={"gpu": "NVIDIA L4"})),
        ("hostname", lambda job, _: job.update(completions=10**55, parallelism=10**55)),
        ("podFailurePolicy", lambda job, _: job["podFailurePolicy"]["rules"][0].update(onExitCodes={
            "containerName": "stoker", "operator": "In", "values": [1]})),
    ],
)  # fmt: skip
def test_each_rule_finds_a_broken_manifest(rule: str, change: Callable[..., object]):
    assert rule in broken(change)


def test_exit_codes_decide_about_restarts():
    policy = render(make_spec(max_nodes=2, min_nodes=2, restarts=3))[1]["spec"]
    rules = policy["podFailurePolicy"]["rules"]

    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("Ignore", None), ("Ignore", [75]), ("FailJob", [2, 3, 4, 6]),
    ]  # fmt: skip
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert policy["backoffLimit"] == 6  # each preempted node makes the other one fail, too
    assert policy["podReplacementPolicy"] == "Failed"  # two pods never hold the run


def test_gpus_and_slices_are_asked_for_in_the_words_of_the_cluster():
    pods = {name: render(spec)[-1]["spec"]["template"]["spec"] for name, spec in SPECS.items()}
    limits = {name: pod["containers"][0]["resources"]["limits"] for name, pod in pods.items()}

    assert limits["nodes"]["nvidia.com/gpu"] == 4
    assert limits["MIG slice"]["nvidia.com/mig-1g.10gb.me"] == 1
    assert limits["MIG slice on GKE"]["nvidia.com/gpu"] == 1
    assert pods["MIG slice on GKE"]["nodeSelector"]["cloud.google.com/gke-gpu-partition-size"] == "1g.10gb"
    assert not any("nvidia" in name for name in limits["CPU"])
    assert "tolerations" not in pods["CPU"]


def test_spot_nodes_of_any_cloud_are_found():
    """On GKE by the label that its autoscaler knows; elsewhere one of the labels is enough."""
    gke = render(SPECS["spot on GKE"])[0]["spec"]["template"]["spec"]
    assert gke["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4", "cloud.google.com/gke-spot": "true"}
    assert {row["key"] for row in gke["tolerations"]} == {"nvidia.com/gpu", "cloud.google.com/gke-spot"}

    any_cloud = render(SPECS["spot"])[1]["spec"]["template"]["spec"]
    terms = any_cloud["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {term["matchExpressions"][0]["key"] for term in terms} == {
        "cloud.google.com/gke-spot", "eks.amazonaws.com/capacityType", "karpenter.sh/capacity-type",
        "kubernetes.azure.com/scalesetpriority",
    }  # fmt: skip


@pytest.mark.parametrize("machine", ["g2-standard-4", "g2-standard-48", "a2-megagpu-16g"])
def test_a_pod_leaves_room_for_the_system_of_its_node(machine: str):
    """The default of --cpus and --memory is the machine. Below: vCPUs and GiB less GKE's reservation, by hand."""
    spec = make_spec(machine_type=machine, cpus=10**3, memory_gib=10**4)
    limits = render(spec)[0]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    allocatable = {"g2-standard-4": (3.92, 13.3), "g2-standard-48": (47.81, 181.3), "a2-megagpu-16g": (95.69, 1325.9)}
    cpus, memory_gib = allocatable[machine]
    assert cpus - 1 < float(limits["cpu"].removesuffix("m")) / 1000 < cpus
    assert memory_gib - 1 < float(limits["memory"].removesuffix("Mi")) / 1024 < memory_gib


# Strings that PyYAML writes plain, and that kubectl's reader takes for numbers or booleans.
@pytest.mark.parametrize(
    "text", ["1e-3", "1E5", "0x1F", "0o17", "012", "1_000", "12e03", "y", "N", "+1", ".5", "1:30", ""]
)
def test_arguments_stay_text_for_kubectl(text: str):
    rendered = Kubernetes().render(make_spec(arguments=("train", "--lr", text)))
    line = next(line for line in rendered.splitlines() if text in line and line.strip() != "-" and '- "' in line)
    assert line.strip() == f'- "{text}"'


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20), max_size=4))
def test_any_argument_survives_the_file(texts: list[str]):
    spec = make_spec(arguments=("train", *texts), env={f"V{number}": text for number, text in enumerate(texts)})
    container = render(spec)[0]["spec"]["template"]["spec"]["containers"][0]
    assert [as_kubelet_reads(text) for text in container["args"]] == ["train", *texts]
    assert [as_kubelet_reads(row["value"]) for row in container["env"] if row["name"] != "STOKER_GRACE_S"] == texts


def as_kubelet_reads(text: str) -> str:
    """After the expansion of a cluster that knows no variable: two `$` are one, `$(NAME)` stays, and so does another
    `$` (third_party/forked/golang/expansion/expand.go of kubernetes/kubernetes)."""
    return re.sub(r"\$(\$|\([^)]*\))?", lambda match: "$" if match[1] == "$" else match[0], text)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"options": PlaceOptions(patch="/nowhere.yaml")}, "The file of --patch is not a part of a pod"),
        ({"secrets": {"RANK": ("a", "b")}}, "--env RANK"),
        ({"secrets": {"A": ("b", "c")}, "env": {"A": "d"}}, "A is a variable of --env and of --secret"),
        ({"secrets": {"A": ("My_Secret", "c")}}, "a Secret's name"),
        ({"options": PlaceOptions(namespace="Team A")}, "--namespace 'Team A'"),
        ({"options": PlaceOptions(queue="gpus/a")}, "--queue 'gpus/a'"),
        ({"max_nodes": 8}, "a fixed number of nodes"),
        ({"gpu": "1g.11gb"}, "MIG slice 1g.11gb"),
        ({"gpu": "1g.5gb", "machine_type": "a2-ultragpu-1g"}, "no MIG slice 1g.5gb of a100-80"),
        ({"gpu": "1g.5gb", "machine_type": "g2-standard-8"}, "A l4 has no MIG slices"),
        ({"mounts": (Mount("/data"),)}, "--mount /data"),
        ({"mounts": (Mount("/data", "s3://bucket"),)}, "--mount s3://bucket"),
        ({"env": {"RANK": "0"}}, "--env RANK"),
        ({"image": "Registry/Stoker:1"}, "not the name of a container image"),
        ({"image": "stoker: latest"}, "not the name of a container image"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_sent(changes: dict[str, Any], expected: str):
    with pytest.raises(UsageError, match=expected.replace("[", r"\[")):
        Kubernetes().check(make_spec(**changes))


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder", "digits", "nested"])
def test_a_patch_that_is_no_file_of_a_person(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "patch.yaml"
    text = {"digits": "spec: {a: " + "9" * 5000 + "}", "nested": "[" * 5000}
    path.write_text(text[kind]) if kind in text else replace_by(kind, path, size_bytes=0)
    with bounded(seconds=6, megabytes=256), pytest.raises(UsageError, match=r"(?s)--patch.*patch\.yaml"):
        Kubernetes().check(make_spec(options=PlaceOptions(patch=str(path))))


def test_images_are_named_as_registries_name_them():
    digest = "a" * 64
    for image in ("stoker", "me/stoker:1.0_b", "localhost:5000/a/b-c__d:x", f"ghcr.io/o/stoker@sha256:{digest}"):
        Kubernetes().check(make_spec(image=image))


def test_a_missing_client_names_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(PreflightError, match="needs the package kubernetes") as raised:
        Kubernetes().submit(make_spec())
    assert "pip install kubernetes" in str(raised.value)


# From here on the official client, against a local server.


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    pytest.importorskip("kubernetes", reason="uv pip install kubernetes")
    with serving(lambda *_: (201, {})) as api:
        configure(tmp_path / "kubeconfig", api.address, monkeypatch)
        yield api


def configure(path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "vision"}}],
    }
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("job", ["/api/v1/namespaces/vision/services", "/apis/batch/v1/namespaces/vision/jobs"]),
        ("jobset", ["/apis/jobset.x-k8s.io/v1alpha2/namespaces/vision/jobsets"]),
    ],
)
def test_what_is_sent_is_what_was_rendered(cluster: FakeApi, kind: str, paths: list[str]):
    """Several nodes are a JobSet where the cluster has JobSet; one node is a Job anywhere."""
    spec = SPECS["nodes"]
    cluster.answer = with_jobset(lambda *_: (201, {})) if kind == "jobset" else without_jobset(lambda *_: (201, {}))
    assert Kubernetes().submit(spec) == f"{kind}/vision/stoker-one"
    sent = [request for request in cluster.requests if request.method == "POST"]
    assert [request.path.partition("?")[0] for request in sent] == paths
    assert [request.body for request in sent] == render(spec, kind)
    assert Kubernetes().submit(make_spec()) == "job/vision/stoker-one"


Answer = Callable[[str, str, Any], tuple[int, Any]]


def with_jobset(answer: Answer) -> Answer:
    row = {"name": "jobsets", "singularName": "jobset", "namespaced": True, "kind": "JobSet", "verbs": ["create"]}
    kinds = {"kind": "APIResourceList", "groupVersion": "jobset.x-k8s.io/v1alpha2", "resources": [row]}
    return lambda method, path, body: (200, kinds) if path.endswith("x-k8s.io/v1alpha2") else answer(method, path, body)


def without_jobset(answer: Answer) -> Answer:
    missing = (404, {"message": "the server could not find the requested resource"})
    return lambda method, path, body: missing if path.endswith("x-k8s.io/v1alpha2") else answer(method, path, body)


def test_the_same_command_continues_where_a_job_that_ended_holds_its_name(cluster: FakeApi, tmp_path: Path):
    names: set[str] = set()
    complete = {"metadata": {"name": "x"}, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "GET":
            return 200, {"kind": "PodList", "apiVersion": "v1", "items": []} if path.endswith("/pods") else complete
        name = f"{path}/{body['metadata']['name']}"
        taken = name in names
        names.add(name)
        return (409, {"message": "already exists"}) if taken else (201, {})

    cluster.answer = without_jobset(answer)
    spec = dataclasses.replace(SPECS["nodes"], run_dir=str(tmp_path / "run"))
    jobs = [submit(spec, Kubernetes(), LaunchRequest()) for _ in range(3)]
    assert [job.id.rpartition("/")[2] for job in jobs] == ["stoker-one", "stoker-one-a2", "stoker-one-a3"]
    sent = [request.body for request in cluster.requests if request.method == "POST"]
    assert problems(sent[-2:]) == []
    assert {body["metadata"]["labels"]["app.kubernetes.io/part-of"] for body in sent} == {"stoker-one"}


def test_the_entry_point_of_the_image_starts_the_training():
    """A `command` would take the place of tini: process 1 ignores a SIGTERM that it does not handle."""
    for kind in KINDS:
        assert "command" not in json.dumps(render(SPECS["nodes"], kind))
    dockerfile = Path(__file__).resolve().parents[3] / "Dockerfile"
    assert 'ENTRYPOINT ["tini", "--", "stoker"]' in dockerfile.read_text()


def test_secrets_are_named_and_never_contained():
    spec = make_spec(secrets={"WANDB_API_KEY": ("wandb", "api-key")}, env={"A": "b"})
    env = render(spec)[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert env[1] == {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api-key"}}}


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (make_spec(grace_s=120), ["120"]), (make_spec(grace_s=120, spot=True), ["15"]),
        (make_spec(env={"STOKER_GRACE_S": "9"}), ["9"]),
    ],
)  # fmt: skip
def test_the_training_knows_how_long_its_pod_stays(spec: LaunchSpec, values: list[str]):
    env = render(spec)[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [row["value"] for row in env if row["name"] == "STOKER_GRACE_S"] == values


PATCH = """
metadata: {annotations: {networking.gke.io/default-interface: eth0}}
spec:
  hostNetwork: true
  imagePullSecrets: [{name: registry}]
  tolerations: [{key: rdma, operator: Exists}]
  containers:
  - name: stoker
    securityContext: {capabilities: {add: [IPC_LOCK]}}
    resources: {limits: {rdma/hca: 1, ephemeral-storage: 100Gi}, requests: {rdma/hca: 1, ephemeral-storage: 100Gi}}
    volumeMounts: [{name: libraries, mountPath: /usr/local/nccl}]
    ports: null
  - {name: tcpx-daemon, image: tcpx}
  volumes: [{name: libraries, hostPath: {path: /home/kubernetes/bin/nvidia}}]
"""


def test_a_patch_adds_what_has_no_flag(tmp_path: Path):
    path = tmp_path / "pod.yaml"
    path.write_text(PATCH)
    plain, patched = (
        render(dataclasses.replace(SPECS["nodes"], options=PlaceOptions(patch=patch))) for patch in (None, str(path))
    )
    before, after = (documents[1]["spec"]["template"]["spec"] for documents in (plain, patched))
    trainer = after["containers"][0]
    assert trainer["args"] == before["containers"][0]["args"]
    assert trainer["resources"]["limits"] == before["containers"][0]["resources"]["limits"] | {
        "rdma/hca": 1, "ephemeral-storage": "100Gi",
    }  # fmt: skip
    assert [mount["mountPath"] for mount in trainer["volumeMounts"]] == ["/dev/shm", "/usr/local/nccl"]
    assert "ports" not in trainer
    assert [container["name"] for container in after["containers"]] == ["stoker", "tcpx-daemon"]
    assert [volume["name"] for volume in after["volumes"]] == ["shm", "libraries"]
    assert after["tolerations"] == [{"key": "rdma", "operator": "Exists"}]
    assert (after["hostNetwork"], after["imagePullSecrets"]) == (True, [{"name": "registry"}])
    validate = pytest.importorskip("kubernetes_validate", reason="uv pip install kubernetes-validate").validate
    validate(patched[1], VERSIONS[-1], strict=True)
    for text in ("spec: [", "- a", "containers: []", "spec: 1"):
        path.write_text(text)
        with pytest.raises(UsageError, match="not a part of a pod"):
            Kubernetes().check(make_spec(options=PlaceOptions(patch=str(path))))


def refuse(status: int, message: str) -> Callable[[str, str, Any], tuple[int, Any]]:
    """An API server that takes Services and refuses jobs."""
    reply = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status}
    return without_jobset(
        lambda method, path, _: (201, {}) if "services" in path or method == "DELETE" else (status, reply)
    )


@pytest.mark.parametrize(
    ("status", "message", "error", "expected"),
    [
        (409, 'jobs.batch "stoker-one" already exists', UsageError, "has a job of this name"),
        (422, "spec.template: Invalid value", UsageError, "spec.template: Invalid value"),
        (403, "jobs.batch is forbidden: exceeded quota", PreflightError, "exceeded quota"),
        (500, "etcdserver: request timed out", PreflightError, "request timed out"),
    ],
)
def test_a_refusal_is_named_and_leaves_nothing_behind(
    cluster: FakeApi, status: int, message: str, error: type[StokerError], expected: str
):
    cluster.answer = refuse(status, message)
    with pytest.raises(error) as raised:
        Kubernetes().submit(SPECS["nodes"])
    assert expected in str(raised.value)
    assert cluster.requests[-1].method == "DELETE"
    assert "services/stoker-one" in cluster.requests[-1].path


def test_a_service_of_another_job_is_left_alone(cluster: FakeApi):
    cluster.answer = without_jobset(lambda *_: (409, {"message": 'services "stoker-one" already exists'}))
    with pytest.raises(UsageError, match="of this name"):
        Kubernetes().submit(SPECS["nodes"])
    assert [request.method for request in cluster.requests] == ["GET", "POST"]


def test_no_cluster_and_one_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("kubernetes", reason="uv pip install kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(PreflightError, match="No Kubernetes cluster is configured"):
        Kubernetes().submit(make_spec())
    configure(tmp_path / "kubeconfig", "http://127.0.0.1:1", monkeypatch)
    with pytest.raises(PreflightError, match="does not answer"):
        Kubernetes().submit(make_spec())


def pod(name: str, phase: str, *, index: int = 0, container: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata = {
        "name": name,
        "uid": name,
        "creationTimestamp": "2026-11-22T12:00:00Z",
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
    }
    row = {"name": "stoker", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": container or {}}
    return {"metadata": metadata, "spec": {"containers": [], "nodeName": f"node-{index}"},
            "status": {"phase": phase, "containerStatuses": [row]}}  # fmt: skip


def answering(status: dict[str, Any], pods: list[dict[str, Any]]) -> Callable[[str, str, Any], tuple[int, Any]]:
    def answer(_method: str, path: str, _body: Any) -> tuple[int, Any]:
        if path.endswith("/log"):
            return 200, f"line of {path.split('/')[-2]}\nlast line\n"
        if path.endswith("/pods"):
            return 200, {"kind": "PodList", "apiVersion": "v1", "items": pods}
        return 200, {"metadata": {"name": "stoker-one"}, "status": status}

    return answer


JOB = Job(place="k8s", id="job/vision/stoker-one", name="stoker-one", run="gs://bucket/runs/one", t=0.0)


@pytest.mark.parametrize(
    ("status", "pods", "state", "text", "exit_code"),
    [
        ({}, [], "queued", "no pods yet", None),
        ({"conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended"}]}, [], "queued",
         "Suspended (JobSuspended)", None),
        ({"active": 1}, [pod("a", "Pending", container={"waiting": {"reason": "ImagePullBackOff"}})], "queued",
         "1 pods Pending, ImagePullBackOff", None),
        ({"active": 2, "failed": 1}, [pod("a", "Running"), pod("b", "Running", index=1)], "running", "2 pods Running",
         None),
        ({"conditions": [{"type": "Complete", "status": "True"}]},
         [pod("a", "Succeeded", container={"terminated": {"exitCode": 0}})], "succeeded", "Complete", 0),
        ({"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 4"}]},
         [pod("a", "Failed", container={"terminated": {"exitCode": 4}})], "failed",
         "Failed (PodFailurePolicy: exit code 4)", 4),
    ],
)  # fmt: skip
def test_status_in_the_words_of_the_cluster(
    cluster: FakeApi, status: dict[str, Any], pods: list[dict[str, Any]], state: str, text: str, exit_code: int | None
):
    cluster.answer = answering(status, pods)
    found = Kubernetes().status(JOB)
    assert (found.state, found.exit_code) == (state, exit_code)
    assert found.text.startswith(text)
    assert found.restarts == status.get("failed", 0)


def test_logs_are_those_of_the_first_node(cluster: FakeApi):
    ended = {"terminated": {"exitCode": 0}}
    pods = [pod("b", "Succeeded", index=1, container=ended), pod("a", "Succeeded", container=ended)]
    cluster.answer = answering({"conditions": [{"type": "Complete", "status": "True"}]}, pods)
    for follow in (False, True):
        assert list(Kubernetes().logs(JOB, follow=follow)) == ["line of a", "last line"]


def test_cancel_deletes_the_job_and_its_service(cluster: FakeApi):
    cluster.answer = lambda *_: (200, {})
    Kubernetes().cancel(JOB)
    assert [(request.method, request.path.partition("?")[0]) for request in cluster.requests] == [
        ("DELETE", "/apis/batch/v1/namespaces/vision/jobs/stoker-one"),
        ("DELETE", "/api/v1/namespaces/vision/services/stoker-one"),
    ]
    assert cluster.requests[0].body == {"propagationPolicy": "Foreground"}

    cluster.answer = lambda *_: (404, {"message": "not found"})
    Kubernetes().cancel(JOB)  # a job that has ended is no error
    assert Kubernetes().status(JOB).state == "unknown"
    assert "secret" not in json.dumps([request.body for request in cluster.requests])
