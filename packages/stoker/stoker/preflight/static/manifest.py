"""What a Kubernetes manifest says about each pod of a job: facts for the rows of `job_rules.toml`. Pods are found in
every kind of document. What depends on the cluster (runtime classes, taints) is not judged."""

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from stoker.preflight.catalog import JOB_FILES, judge_job
from stoker.preflight.static.requirements import MAX_YAML_BRACKETS
from stoker_watch.findings.finding import Finding

_PATTERNS, _VERSIONS = JOB_FILES["patterns"], JOB_FILES["api_versions"]
LINES = "\0"
"""Key under which a mapping has the lines of its keys."""


class _SafeLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        found = super().construct_mapping(node, deep=deep)
        return {**found, LINES: {str(key.value): key.start_mark.line + 1 for key, _ in node.value}}


def _at(fields: Any, *path: str) -> Any:
    """The value under keys of nested mappings; an empty mapping where there is none."""
    for key in path:
        fields = fields.get(key) if isinstance(fields, dict) else None
    return {} if fields is None else fields


def _by(rows: Any, key: str) -> dict[str, Any]:
    """The mappings of a list by one of their fields."""
    rows = rows if isinstance(rows, list) else []
    return {str(row[key]).rstrip("/"): row for row in rows if key in _at(row, LINES)}


def _amount(value: Any) -> float:
    """The number of a quantity: 512Mi, 0.5, 500m; NaN for another text."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(m|[kMGTP]?)(i?)", str(value))
    power = -1 if match and match[2] == "m" else " kMGTP".find(match[2] or " ") if match else 0
    return float(match[1]) * (1024.0 if match[3] else 1000.0) ** power if match else math.nan


def check_manifest(text: str, place: str) -> Iterator[Finding]:
    """All findings of the documents of a file. Raises ValueError with the reason."""
    try:
        plain = text if text.count("[") + text.count("{") < MAX_YAML_BRACKETS else ""
        documents = [row for row in yaml.load_all(plain, _SafeLoader) if {"apiVersion", "kind"} <= {*_at(row, LINES)}]
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        raise ValueError(f"is no YAML, a template must be rendered first: {error}".partition("\n")[0]) from error
    if not documents:
        raise ValueError("is neither a Slurm batch script nor a manifest of Kubernetes")
    for row in documents:
        kind, version = str(row["kind"]), str(row["apiVersion"])
        known = next((name for name in _VERSIONS if name.lower() == kind.lower()), kind)
        good = _VERSIONS.get(known, [version])
        facts = {"kind": kind, "known": known, "version": version, "good": good[0], "other_kind": known != kind}
        yield from judge_job("document", {**facts, "gone": known == kind and version not in good}, row[LINES], place)
    pods = [(document, *found) for document in documents for found in _find_pods(document, 1, set())]
    total = math.nan if re.search(r"[:,\[-]\s*\*\w", text) else sum(count for *_, count in pods)
    for document, pod, _ in pods:
        for container in pod["containers"]:
            limits, requests = (_at(container, "resources", name) for name in ("limits", "requests"))
            for name, line in sorted({**_at(limits, LINES), **_at(requests, LINES)}.items()):
                limit, request = _amount(_at(limits, name)), _amount(_at(requests, name))
                facts = {"limit": limit, "request": request, "name": name, "device": "/" in name}
                facts |= {"limited": name in _at(limits, LINES), "fraction": limit % 1 > 0 or request % 1 > 0}
                yield from judge_job("resource", facts, {"": line}, place)
            yield from judge_job("container", *_describe(document, pod, container, total), place)


def _find_pods(node: Any, count: int, seen: set[int]) -> Iterator[tuple[Any, int]]:
    """Specifications of pods, and how many pods each is for. seen: mappings and lists that an alias may repeat."""
    values = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if not values or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(_at(node, "containers"), list):
        yield node, count
    for name in ("replicas", "parallelism"):
        count *= number if isinstance(number := _at(node, name), int) and number < 10**6 else 1
    for value in values:
        yield from _find_pods(value, count, seen)


def _describe(document: Any, pod: Any, container: Any, total: float) -> tuple[dict[str, Any], dict[str, int]]:
    """Facts of a container, and the lines of what they are about."""
    given, env = [_at(container, key) for key in ("command", "args")], _by(_at(container, "env"), "name")
    words = [str(word) for row in given if isinstance(row, list) for word in row]
    limits, command, kind = _at(container, "resources", "limits"), " ".join(words), document["kind"]
    mounts = _by(_at(container, "volumeMounts"), "mountPath")
    shared = _at(_by(_at(pod, "volumes"), "name").get(str(_at(mounts.get("/dev/shm"), "name"))), "emptyDir")
    numbers = {name: re.findall(_PATTERNS[name], command)[-1:] for name in ("workers", "processes", "pods")}
    gpus = sum(_amount(_at(limits, name)) for name in _at(limits, LINES) if re.search(_PATTERNS["gpu_resource"], name))
    lines = _at(document, "spec", LINES) | pod[LINES] | _at(container, LINES) | _at(shared, LINES)
    return {
        "batch": str(document["apiVersion"]).startswith("batch/"), "pod": kind == "Pod", "jobset": kind == "JobSet",
        "always": pod.get("restartPolicy", "Always") == "Always", "policy": "restartPolicy" in pod,
        "backoff": _amount(_at(document, "spec", "backoffLimit")), "trains": re.search(_PATTERNS["trains"], command),
        "torch": kind == "PyTorchJob" or re.search(_PATTERNS["torch"], f"{_at(container, 'image')} {command}"),
        "shm": "/dev/shm" in mounts or pod.get("hostIPC"), "disk": shared and _at(shared, "medium") != "Memory",
        "shm_size": _amount(_at(shared, "sizeLimit")), "memory": _amount(_at(limits, "memory") or 0), "gpus": gpus,
        "command_text": isinstance(given[0], str), "args_text": isinstance(given[1], str), "text": command[:60],
        "one_word": given[0] and len(words) == 1 and re.search(r"\S\s+-*\w", words[0]),
        "lost_words": re.match(_PATTERNS["lost_words"], "\n".join(words)), "first": "".join(words[2:3])[:60],
        "world": _amount(_at(env.get("WORLD_SIZE"), "value")), "total": total, "of_gpus": total * max(gpus, 1),
        "localhost": re.match(r"localhost|127\.", str(_at(env.get("MASTER_ADDR"), "value"))),
        **{name: _amount("".join(found) or 0) for name, found in numbers.items()},
    }, lines | {name: row[LINES]["name"] for name, row in env.items()}  # fmt: skip
