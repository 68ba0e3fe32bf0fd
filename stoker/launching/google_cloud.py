"""What Vertex AI and Batch share: project and region, machines with their GPUs, errors of Google's clients, logs."""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from stoker.errors import ConfigError, PreflightError, UsageError, needs_package
from stoker.launching.containers import check_container
from stoker.launching.spec import Job, LaunchSpec, Place, PlaceOptions
from stoker.planning.accelerators import GPUS
from stoker.planning.machines import Machine, listed_machines

MEGA = "NVIDIA_H100_MEGA_80GB"
"""The H100 of a3-megagpu-8g."""
PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")
REGION_VARIABLES = ("GOOGLE_CLOUD_REGION", "CLOUDSDK_COMPUTE_REGION")
LOGGING = "https://logging.googleapis.com"
FOLLOW_S = 5.0
TIMEOUT_S = 60.0
SPOT_GRACE_S = 30
"""cloud.google.com/compute/docs/instances/spot."""


class GoogleCloud(Place):
    file = "{name}.json"
    cloud = "GCP"
    options = frozenset({"project", "region", "service_account"})
    spot_grace_s = default_grace_s = SPOT_GRACE_S
    title: str
    package: str
    """Of Google's client."""
    buckets: str
    """How --mount names a bucket."""

    def check(self, spec: LaunchSpec) -> list[str]:
        check_container(spec, self.title)
        find_parent(spec.options)
        _, _, gpus = self.find_machine(spec)
        for mount in spec.mounts:
            if mount.nfs is None and not re.fullmatch(r"gs://[a-z0-9][a-z0-9._/-]+", mount.source or ""):
                raise ConfigError(
                    f"--mount {mount.source or mount.path}: {self.title} cannot mount that.",
                    choices=["SERVER:/export:/path", self.buckets],
                )
        if spec.gpus and spec.gpus < gpus:
            return [f"{gpus - spec.gpus} of the {gpus} GPUs of a {spec.machine_type} are paid and not used"]
        return []

    def open_client(self, name: str) -> Any:
        """Google's client. name: of a resource, which has the region."""
        raise NotImplementedError

    @contextlib.contextmanager
    def client(self, name: str, what: str, *ignored: str) -> Iterator[Any]:
        """A block that uses the client; its errors are StokerErrors. ignored: classes of errors that end the block."""
        with (
            needs_package(self.package, f"Launching on {self.title}"),
            google_errors(f"{self.title} cannot be reached."),
        ):
            client = self.open_client(name)
        with google_errors(what, *ignored):
            yield client

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

    def log_lines(self, job: Job, query: str, *, follow: bool) -> Iterator[str]:
        """The lines in Cloud Logging, oldest first; with `follow` until the job has ended. query: Logging's filter."""
        session = _open_session()
        since, seen = "", set[str]()
        while True:
            running = follow and self.status(job).is_live
            for entry in _entries(session, job.id, f'{query} timestamp>="{since}"' if since else query):
                if entry["insertId"] not in seen:
                    seen.add(entry["insertId"])
                    since = entry["timestamp"]
                    payload = entry.get("jsonPayload") or {}
                    yield str(entry.get("textPayload") or payload.get("message") or "").rstrip("\n")
            if not running:
                return
            time.sleep(FOLLOW_S)


def to_json(job: dict[str, Any]) -> str:
    return json.dumps(job, indent=2, ensure_ascii=False) + "\n"


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


@contextlib.contextmanager
def google_errors(what: str, *ignored: str) -> Iterator[None]:
    """Errors of Google's clients as StokerErrors, except those of the classes `ignored`."""
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    try:
        with contextlib.suppress(*(getattr(api, name) for name in ignored)):
            yield
    except auth.GoogleAuthError as error:
        fix = "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS"
        raise PreflightError("There are no credentials for Google Cloud.", cause=str(error), fix=fix) from error
    except api.Conflict as error:
        raise UsageError("The project has a job of this name.", cause=error.message, fix="another --name") from error
    except api.BadRequest as error:
        raise UsageError(what, cause=error.message) from error
    except api.GoogleAPICallError as error:
        raise PreflightError(what, cause=error.message) from error
    except (OSError, api.RetryError) as error:
        raise PreflightError("Google Cloud does not answer.", cause=str(error)) from error


def _open_session() -> Any:
    """An HTTP session with the credentials of this machine."""
    with needs_package("google-auth", "Reading the log of a job"):
        import google.auth
        from google.auth.transport.requests import AuthorizedSession
    with google_errors("The log cannot be read."):
        credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/logging.read"])
    return AuthorizedSession(credentials)


def _entries(session: Any, parent: str, query: str) -> Iterator[dict[str, Any]]:
    project = "/".join(parent.split("/")[:2])
    body = {"resourceNames": [project], "filter": query, "orderBy": "timestamp asc", "pageSize": 1000}
    what = "The log cannot be read."
    while True:
        with google_errors(what):
            response = session.post(f"{LOGGING}/v2/entries:list", json=body, timeout=TIMEOUT_S)
        if response.status_code != 200:
            cause = f"{response.status_code}: {response.text[:300]}"
            raise PreflightError(what, cause=cause, fix="the role Logs Viewer (roles/logging.viewer)")
        page = response.json()
        yield from page.get("entries", [])
        if not page.get("nextPageToken"):
            return
        body["pageToken"] = page["nextPageToken"]
