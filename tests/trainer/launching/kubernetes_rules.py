"""What an API server refuses, or what would never run, and no schema says: rules for rendered manifests.

Sources: pkg/apis/batch/validation and pkg/apis/core/validation of kubernetes/kubernetes, and what each rule names.
"""

import re
from collections.abc import Iterator
from typing import Any

QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:m|[kMGTP]i?)?")
DNS_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9](?:[a-z0-9-]{0,13}[a-z0-9])?")
LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?)?")


def problems(documents: list[dict[str, Any]]) -> list[str]:
    """Names of the rules that the documents break."""
    found: list[str] = []
    for document in documents:
        if not DNS_LABEL.fullmatch(document["metadata"]["name"]):
            found.append("name")
        if not all(LABEL_VALUE.fullmatch(value) for value in document["metadata"].get("labels", {}).values()):
            found.append("label")
        if document["kind"] == "Job":
            found += _job(document["spec"], document["metadata"]["name"], documents)
        elif document["kind"] == "JobSet":
            for replicated in document["spec"]["replicatedJobs"]:
                found += _job(replicated["template"]["spec"], f"{document['metadata']['name']}-node-0", [])
    return found


def _job(spec: dict[str, Any], name: str, documents: list[dict[str, Any]]) -> Iterator[str]:
    pod = spec["template"]["spec"]
    if pod.get("restartPolicy") != "Never":
        yield "restartPolicy"  # of a Job with podFailurePolicy nothing else is allowed
    if spec["completions"] != spec["parallelism"]:
        yield "gang"  # otherwise some ranks wait for others that never start
    if spec["completions"] > 1:
        if spec.get("completionMode") != "Indexed":
            yield "completionMode"
        env = {row["name"]: row for row in pod["containers"][0]["env"]}
        path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        if env.get("RANK", {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") != path:
            yield "rank"
        if env.get("WORLD_SIZE", {}).get("value") != str(spec["completions"]):
            yield "worldSize"
        host, _, service = env.get("MASTER_ADDR", {}).get("value", "").partition(".")
        if host != f"{name}-0":
            yield "master"
        if documents:
            services = [row for row in documents if row["kind"] == "Service" and row["metadata"]["name"] == service]
            if not services or pod.get("subdomain") != service:
                yield "service"
            elif services[0]["spec"].get("clusterIP") != "None":
                yield "headless"
            elif services[0]["spec"]["selector"].items() - spec["template"]["metadata"]["labels"].items():
                yield "selector"
    if len(f"{name}-{spec['completions'] - 1}") > 63:
        yield "hostname"
    policy = spec["podFailurePolicy"]["rules"]
    if len(policy) > 20 or any(("onExitCodes" in rule) == ("onPodConditions" in rule) for rule in policy):
        yield "podFailurePolicy"
    for rule in policy:
        codes = rule.get("onExitCodes")
        if codes is None:
            continue
        if codes["containerName"] not in {container["name"] for container in pod["containers"]}:
            yield "containerName"
        if 0 in codes["values"] or sorted(set(codes["values"])) != codes["values"]:
            yield "exitCodes"  # sorted, unique, and 0 is not a failure
    yield from _pod(pod)


def _pod(pod: dict[str, Any]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in pod["containers"]:
        names = [row["name"] for row in container["env"]]
        if len(set(names)) < len(names):
            yield "env"
        if any(not PORT_NAME.fullmatch(port["name"]) for port in container.get("ports", [])):
            yield "portName"
        resources = container["resources"]
        for quantities in resources.values():
            if not all(QUANTITY.fullmatch(str(value)) for value in quantities.values()):
                yield "quantity"
        for name, value in resources["limits"].items():
            if name.startswith("nvidia.com/") and resources["requests"].get(name) != value:
                yield "gpu"  # extended resources cannot be overcommitted
        mounted = [mount["name"] for mount in container["volumeMounts"]]
        if set(mounted) != set(volumes):
            yield "volumes"
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        if len(set(paths)) < len(paths):
            yield "mountPath"
        shm = next((volumes[row["name"]] for row in container["volumeMounts"] if row["mountPath"] == "/dev/shm"), {})
        if shm.get("emptyDir", {}).get("medium") != "Memory":
            yield "shm"
        elif _mebibytes(shm["emptyDir"]["sizeLimit"]) >= _mebibytes(resources["limits"]["memory"]):
            yield "shmSize"  # it counts as memory of the container
    if any(not LABEL_VALUE.fullmatch(value) for value in pod.get("nodeSelector", {}).values()):
        yield "nodeSelector"


def _mebibytes(text: str) -> int:
    return int(text.removesuffix("Mi"))
