"""Notices of a cloud or a scheduler that the machine is about to go: each asks the training to save and stop.

Google Cloud: a request to the metadata server that returns when `instance/preempted` (a spot VM, 30 s before) or
`instance/maintenance-event` changes; a thread waits for each answer and costs nothing. AWS: `spot/instance-action`
(two minutes before), asked for every five seconds, as AWS recommends. Where the firmware names neither cloud and no
variable names a metadata server, nothing is asked. The time limit of a Slurm job is in a variable (`time_limit_s`).
SIGTERM and SIGUSR1 are handled in `stopper.py`.
"""

import http.client
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from stoker.profiling.telemetry.environment import detect_cloud

GCE_HOST, AWS_ENDPOINT = "169.254.169.254", "http://169.254.169.254"
"""Link-local addresses of the metadata servers: no name has to be resolved."""
GCE_GRACE_S, AWS_GRACE_S = 30.0, 120.0
"""cloud.google.com/compute/docs/instances/spot; docs.aws.amazon.com/AWSEC2 "Spot Instance interruption notices"."""
GCE_MAINTENANCE_GRACE_S = 60.0
"""At least; VMs with GPUs get 60 minutes (cloud.google.com/compute/docs/gpus/gpu-host-maintenance)."""
LONG_POLL_S = 300.0
AWS_POLL_S = 5.0
RETRY_S = 10.0
MAX_FAILURES = 6
"""In a row; then the watch ends with a warning."""
AWS_TOKEN_TTL_S = 21600


class Notice(NamedTuple):
    """Why the machine goes, and how long it stays."""

    reason: str
    grace_s: float


class NoticeWatcher:
    """Watches for notices in daemon threads until one comes or `stop`.

    on_notice: called from a thread, once; report(kind, text): an event.
    """

    def __init__(
        self,
        on_notice: Callable[[Notice], None],
        report: Callable[[str, str], None],
        *,
        env: Mapping[str, str] = os.environ,
        cloud: str | None = None,
    ) -> None:
        self._on_notice, self._report, self._env = on_notice, report, env
        self._stopped = threading.Event()
        cloud = detect_cloud() if cloud is None else cloud
        self._sources: list[tuple[str, Callable[[], Notice | None]]] = []
        """Name of what is asked, and the function that waits for an answer."""
        self.grace_s: float | None = None
        """The shortest notice that may come; None: none is watched for."""
        if "GCE_METADATA_HOST" in env or cloud == "gcp":
            address = env.get("GCE_METADATA_HOST") or GCE_HOST
            self._sources = [
                ("the metadata server of Google Cloud", _GceKey(address, "preempted").wait),
                ("the metadata server of Google Cloud", _GceKey(address, "maintenance-event").wait),
            ]
            self.grace_s = GCE_GRACE_S
        elif env.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true" and (
            "AWS_EC2_METADATA_SERVICE_ENDPOINT" in env or cloud == "aws"
        ):
            spot = _AwsSpot(env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or AWS_ENDPOINT, self._stopped)
            self._sources = [("the metadata service of AWS", spot.wait)]
            self.grace_s = AWS_GRACE_S

    def start(self) -> None:
        for name, wait in self._sources:
            thread = threading.Thread(target=self._watch, args=(name, wait), name="stoker-notices", daemon=True)
            thread.start()

    def stop(self) -> None:
        """No notice is reported afterwards. A thread in a request is left to it."""
        self._stopped.set()

    def _watch(self, name: str, wait: Callable[[], Notice | None]) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                notice = wait()
            except _NotOffered as error:
                if not self._stopped.is_set():
                    self._report("info", f"no notices of a preemption: {name} has none ({error})")
                return
            except (OSError, http.client.HTTPException) as error:
                failures += 1
                if failures == MAX_FAILURES and not self._stopped.is_set():
                    self._report("warning", f"no more notices of a preemption: {name} does not answer: {error}")
                if failures >= MAX_FAILURES:
                    return
                self._stopped.wait(RETRY_S)
                continue
            failures = 0
            if notice is not None and not self._stopped.is_set():
                self._on_notice(notice)
                return


class _NotOffered(Exception):
    """The server answers and has no such key, or refuses it."""


class _GceKey:
    """A value below `instance/` of Google's metadata server."""

    def __init__(self, address: str, key: str) -> None:
        self._address, self._key, self._etag = address, key, ""

    def wait(self) -> Notice | None:
        """The notice that the value is; else waits until it changes, at most LONG_POLL_S. Raises OSError."""
        query = f"?wait_for_change=true&timeout_sec={LONG_POLL_S:.0f}&last_etag={self._etag}" if self._etag else ""
        connection = http.client.HTTPConnection(self._address, timeout=LONG_POLL_S + 30 if query else 10)
        try:
            path = f"/computeMetadata/v1/instance/{self._key}{query}"
            connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
            response = connection.getresponse()
            value = response.read().decode(errors="replace").strip()
        finally:
            connection.close()
        if response.status in (403, 404):
            raise _NotOffered(f"{self._key}: status {response.status}")
        if response.status != 200:
            raise OSError(f"status {response.status}")
        self._etag = response.headers.get("ETag") or "0"
        if self._key == "preempted" and value == "TRUE":
            return Notice("the notice that this spot VM is preempted", GCE_GRACE_S)
        if self._key == "maintenance-event" and value.startswith("TERMINATE"):
            return Notice("the notice of maintenance of this VM's host", GCE_MAINTENANCE_GRACE_S)
        return None


class _AwsSpot:
    """The spot interruption notice of AWS, by IMDSv2."""

    def __init__(self, endpoint: str, stopped: threading.Event) -> None:
        self._address, self._stopped = urlsplit(endpoint).netloc or endpoint, stopped
        self._token = ""

    def wait(self) -> Notice | None:
        """Asks once and, if there is no notice, waits AWS_POLL_S. Raises OSError."""
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_TTL_S)}
            status, self._token = self._request("PUT", "/latest/api/token", ttl)
            if status != 200:
                self._token = ""
                raise _NotOffered(f"token: status {status}")
        headers = {"X-aws-ec2-metadata-token": self._token}
        status, body = self._request("GET", "/latest/meta-data/spot/instance-action", headers)
        if status == 200:
            return Notice(f"the notice that this spot instance is interrupted ({body[:200]})", AWS_GRACE_S)
        if status == 401:  # the token has expired
            self._token = ""
            return None
        if status != 404:
            raise OSError(f"status {status}")
        self._stopped.wait(AWS_POLL_S)
        return None

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._address, timeout=5)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace").strip()
        finally:
            connection.close()


def time_limit_s(env: Mapping[str, str] = os.environ, *, now: Callable[[], float] = time.time) -> float | None:
    """Seconds until the time limit of the Slurm job; None if there is none (SLURM_JOB_END_TIME, Slurm 23.02)."""
    text = env.get("SLURM_JOB_END_TIME", "")
    return float(text) - now() if text.isdecimal() and int(text) > 0 else None
