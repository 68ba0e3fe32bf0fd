"""What Vertex AI and Batch share: project and region, machines with their GPUs, errors of Google's clients, logs."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stoker.errors import ConfigError, PreflightError, UsageError, needs_package
from stoker.launching.spec import LaunchSpec, Mount, PlaceOptions
from stoker.planning.machines import Machine, listed_machines

ACCELERATORS = {
    "p100": "NVIDIA_TESLA_P100",
    "t4": "NVIDIA_TESLA_T4",
    "v100-16": "NVIDIA_TESLA_V100",
    "a100-40": "NVIDIA_TESLA_A100",
    "a100-80": "NVIDIA_A100_80GB",
    "l4": "NVIDIA_L4",
    "h100": "NVIDIA_H100_80GB",
}
"""Key of `planning/accelerators.py` → name in Vertex AI. Compute Engine and Batch write it in lower case, with `-`."""
MEGA = "NVIDIA_H100_MEGA_80GB"
"""The H100 of a3-megagpu-8g."""
PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")
REGION_VARIABLES = ("GOOGLE_CLOUD_REGION", "CLOUDSDK_COMPUTE_REGION")
LOGGING = "https://logging.googleapis.com"
FOLLOW_S = 5.0
TIMEOUT_S = 60.0


def find_parent(options: PlaceOptions, env: Mapping[str, str] | None = None) -> str:
    """projects/P/locations/R, of the flags or the variables of gcloud. Raises ConfigError."""
    env = os.environ if env is None else env
    project = options.project or next((env[name] for name in PROJECT_VARIABLES if env.get(name)), None)
    region = options.region or next((env[name] for name in REGION_VARIABLES if env.get(name)), None)
    for flag, value, name in (("--project", project, PROJECT_VARIABLES[0]), ("--region", region, REGION_VARIABLES[0])):
        if not value:
            raise ConfigError(f"Which {flag[2:]} of Google Cloud?", fix=f"{flag} NAME, or set {name}")
    return f"projects/{project}/locations/{region}"


def find_machine(spec: LaunchSpec, place: str) -> tuple[str, str | None, int]:
    """(machine type, accelerator in the words of Vertex AI, its number). Raises UsageError for a pair that does not
    exist, and for MIG slices, which machines of Google Cloud have only as nodes of GKE."""
    machines = {name: machine for name, machine in listed_machines().items() if machine.cloud == "GCP"}
    if spec.machine_type is None:
        fix = "--machine-type g2-standard-8; `stoker plan DATA` recommends one"
        raise ConfigError(f"{place} needs a machine type.", choices=list(machines)[:8], fix=fix)
    if spec.mig_slice is not None:
        raise UsageError(f"{place} has no MIG slices.", fix="k8s has them; or a machine with a smaller GPU")
    base = spec.machine_type.partition("+")[0]
    of_type = [machine for name, machine in machines.items() if name.partition("+")[0] == base]
    if not spec.gpus:
        of_type = [machine for machine in of_type if "+" not in machine.name]  # an n1 also comes without
        if not of_type:
            return base, None, 0
        return base, _accelerator(of_type[0]), of_type[0].gpus
    wanted = (spec.gpu or "").lower().replace("_", "-")
    fitting = [
        machine
        for machine in of_type
        if wanted in ("", machine.accelerator, _accelerator(machine).lower().replace("_", "-"))
        and spec.machine_type in (base, machine.name)
    ]
    if "+" not in spec.machine_type and base.startswith("n1-") and not wanted:
        fitting = []  # which GPU?
    if not fitting:
        pairs = [f"--machine-type {machine.name}" for machine in of_type] or [name for name in machines if "g2" in name]
        raise UsageError(f"{place} has no {spec.machine_type} with {spec.gpu or 'a GPU'}.", choices=pairs)
    return base, _accelerator(fitting[0]), fitting[0].gpus


def _accelerator(machine: Machine) -> str:
    return MEGA if machine.name.startswith("a3-mega") else ACCELERATORS[machine.accelerator]


def split_nfs(mount: Mount, place: str, *, buckets: str) -> tuple[str, str] | None:
    """(server, export) of a mount; None for a bucket. buckets: how the place sees one. Raises ConfigError."""
    if re.fullmatch(r"gs://[a-z0-9][a-z0-9._/-]+", mount.source or ""):
        return None
    if match := re.fullmatch(r"([\w.-]+):(/(?!/).*)", mount.source or ""):
        return match[1], match[2]
    raise ConfigError(
        f"--mount {mount.source or mount.path}: {place} cannot mount that.", choices=["SERVER:/export:/path", buckets]
    )


@contextlib.contextmanager
def google_errors(what: str, *, missing: Callable[[], None] | None = None) -> Iterator[None]:
    """Errors of Google's clients as StokerErrors. missing: called instead, if there is no such job."""
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    try:
        yield
    except auth.GoogleAuthError as error:
        fix = "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS"
        raise PreflightError("There are no credentials for Google Cloud.", cause=str(error), fix=fix) from error
    except api.NotFound as error:
        if missing is None:
            raise PreflightError(what, cause=error.message) from error
        missing()
    except api.Conflict as error:
        raise UsageError("The project has a job of this name.", cause=error.message, fix="another --name") from error
    except api.BadRequest as error:
        raise UsageError(what, cause=error.message) from error
    except api.GoogleAPICallError as error:
        raise PreflightError(what, cause=error.message) from error
    except (OSError, api.RetryError) as error:
        raise PreflightError("Google Cloud does not answer.", cause=str(error)) from error


def log_lines(parent: str, query: str, *, follow: bool, is_running: Callable[[], bool]) -> Iterator[str]:
    """The lines in Cloud Logging, oldest first; with `follow` until the job has ended. query: Logging's filter."""
    session = _open_session()
    since, seen = "", set[str]()
    while True:
        running = follow and is_running()
        for entry in _entries(session, parent, f'{query} timestamp>="{since}"' if since else query):
            if entry["insertId"] not in seen:
                seen.add(entry["insertId"])
                since = entry["timestamp"]
                payload = entry.get("jsonPayload") or {}
                yield str(entry.get("textPayload") or payload.get("message") or "").rstrip("\n")
        if not running:
            return
        time.sleep(FOLLOW_S)


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
    while True:
        with google_errors("The log cannot be read."):
            response = session.post(f"{LOGGING}/v2/entries:list", json=body, timeout=TIMEOUT_S)
        if response.status_code != 200:
            cause = f"{response.status_code}: {response.text[:300]}"
            raise PreflightError(
                "The log cannot be read.", cause=cause, fix="the role Logs Viewer (roles/logging.viewer)"
            )
        page = response.json()
        yield from page.get("entries", [])
        if not page.get("nextPageToken"):
            return
        body["pageToken"] = page["nextPageToken"]
