"""The official client of Kubernetes, for one kind of job: its errors become StokerErrors. What is submitted:
`kubernetes.py`."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from stoker.errors import PreflightError, UsageError, needs_package
from stoker.launching.spec import State

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
LIMIT: dict[str, Any] = {"_request_timeout": 30}
"""Seconds for an answer: the client itself waits without end. Following a log takes as long as the job."""


class Cluster:
    """The official client, for objects of one kind; its errors become StokerErrors."""

    def __init__(self, kind: str) -> None:
        with needs_package("kubernetes", "Launching on Kubernetes"):
            import kubernetes
        self._api_error = kubernetes.client.ApiException
        self._group, self._version, self._plural, self._kind = KINDS[kind]
        self._key = kind
        self.namespace = "default"
        file = os.environ.get("KUBECONFIG")
        try:
            kubernetes.config.load_config(**({"config_file": file} if file else {}))
            with contextlib.suppress(kubernetes.config.ConfigException):  # inside a cluster there is no context
                _, active = kubernetes.config.list_kube_config_contexts(config_file=file)
                self.namespace = active["context"].get("namespace") or "default"
        except kubernetes.config.ConfigException as error:
            fix = "set KUBECONFIG, or kubectl config use-context NAME"
            raise PreflightError(
                "No Kubernetes cluster is configured.", location=file or "~/.kube/config", cause=str(error), fix=fix
            ) from error
        self._objects: Any = kubernetes.client.CustomObjectsApi()
        self._core: Any = kubernetes.client.CoreV1Api()

    def create(self, namespace: str, document: Any) -> None:
        with self._errors(f"The cluster does not take the {document['kind']}."):
            if document["kind"] == "Service":
                self._core.create_namespaced_service(namespace, document, **LIMIT)
            else:
                self._objects.create_namespaced_custom_object(*self._place(namespace), document, **LIMIT)

    def get(self, namespace: str, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = None
        with self._errors("The job cannot be read.", missing_is_none=True):
            found = self._objects.get_namespaced_custom_object(*self._place(namespace), name, **LIMIT)
        return found

    def pods(self, namespace: str, name: str) -> list[Any]:
        """Oldest first."""
        with self._errors("The pods of the job cannot be read."):
            pods = self._core.list_namespaced_pod(namespace, label_selector=f"{LABEL}={name}", **LIMIT).items
        return sorted(pods, key=lambda pod: str(pod.metadata.creation_timestamp))

    def log(self, namespace: str, pod: str, *, follow: bool) -> Iterator[str]:
        with self._errors("The output of the job cannot be read."):
            response = self._core.read_namespaced_pod_log(pod, namespace, follow=follow, _preload_content=False)
            for line in response:
                yield line.decode(errors="replace").rstrip("\n")

    def delete(self, namespace: str, name: str) -> None:
        """Pods get SIGTERM and their grace period."""
        with self._errors("The job cannot be cancelled.", missing_is_none=True):
            self._objects.delete_namespaced_custom_object(
                *self._place(namespace), name, body={"propagationPolicy": "Foreground"}, **LIMIT
            )

    def delete_service(self, namespace: str, name: str) -> None:
        with self._errors("The Service of the job cannot be deleted.", missing_is_none=True):
            self._core.delete_namespaced_service(name, namespace, **LIMIT)

    def _place(self, namespace: str) -> tuple[str, str, str, str]:
        return self._group, self._version, namespace, self._plural

    @contextlib.contextmanager
    def _errors(self, what: str, *, missing_is_none: bool = False) -> Iterator[None]:
        import urllib3

        try:
            yield
        except self._api_error as error:
            if error.status == 404 and missing_is_none:
                return
            message = _message(error)
            if error.status == 409:
                fix = "another --name, or `stoker launch cancel` first"
                raise UsageError("The cluster has a job of this name.", cause=message, fix=fix) from error
            if error.status == 404 and self._key in INSTALL:
                raise PreflightError(
                    f"The cluster has no {self._kind}.", cause=message, fix=INSTALL[self._key]
                ) from error
            kind = UsageError if error.status in (400, 422) else PreflightError
            raise kind(what, cause=f"{error.status} {message}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            fix = "kubectl cluster-info shows whether it answers"
            raise PreflightError("The Kubernetes cluster does not answer.", cause=str(error), fix=fix) from error


def _message(error: Any) -> str:
    try:
        return str(msgspec.json.decode(error.body or b"")["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return str(error.reason)


def state_of(status: dict[str, Any], pods: list[Any]) -> State:
    true = {row.get("type") for row in status.get("conditions") or [] if row.get("status") == "True"}
    if true & {"Complete", "Completed"}:
        return "succeeded"
    if "Failed" in true:
        return "failed"
    return "running" if any(pod.status.phase == "Running" for pod in pods) else "queued"


def describe(status: dict[str, Any], pods: list[Any]) -> str:
    """The newest condition with its reason, and the phases of the pods."""
    rows = [row for row in status.get("conditions") or [] if row.get("status") == "True"]
    parts = []
    if rows:
        last = rows[-1]
        detail = ": ".join(part for part in (last.get("reason"), last.get("message")) if part)
        parts.append(f"{last.get('type')} ({detail})" if detail else str(last.get("type")))
    phases = sorted(pod.status.phase or "Unknown" for pod in pods)
    parts += [f"{phases.count(phase)} pods {phase}" for phase in dict.fromkeys(phases)]
    waiting = {
        container.state.waiting.reason
        for pod in pods
        for container in pod.status.container_statuses or []
        if container.state is not None and container.state.waiting is not None and container.state.waiting.reason
    }
    return ", ".join([*parts, *sorted(waiting)]) or "no pods yet"


def exit_code_of(pods: list[Any]) -> int | None:
    """Of the container that ended last."""
    ended = [
        container.state.terminated
        for pod in pods
        for container in pod.status.container_statuses or []
        if container.state is not None and container.state.terminated is not None
    ]
    last = max(ended, key=lambda row: str(row.finished_at or ""), default=None)
    return None if last is None else int(last.exit_code)
