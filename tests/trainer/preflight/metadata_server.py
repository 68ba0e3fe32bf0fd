"""The metadata services of Google Cloud and of AWS (IMDSv2) on loopback, as strict as the real ones.

with MetadataServer(google(zone="us-central1-a")) as server:
    read_machine(server.google_env)
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "AQAEAD-a-session-token"
NOWHERE = {"NO_GCE_CHECK": "true", "AWS_EC2_METADATA_DISABLED": "true"}
"""Variables of a process that asks no metadata service."""


def google(**changes: str) -> dict[str, str]:
    """Keys of an on-demand a2-highgpu-1g, by path; changes: by the last part, `on_host_maintenance="MIGRATE"`."""
    keys = {
        "machine-type": "projects/123/machineTypes/a2-highgpu-1g",
        "zone": "projects/123/zones/us-central1-a",
        "scheduling/preemptible": "FALSE",
        "scheduling/provisioning-model": "STANDARD",
        "scheduling/on-host-maintenance": "TERMINATE",
        "scheduling/automatic-restart": "TRUE",
        "maintenance-event": "NONE",
        "preempted": "FALSE",
        "service-accounts/default/token": json.dumps({"access_token": "ya29.test", "expires_in": 3599}),
    }
    for name, value in changes.items():
        path = next(path for path in keys if path.rpartition("/")[2] == name.replace("_", "-"))
        keys[path] = f"projects/123/x/{value}" if path in ("machine-type", "zone") else value
    return {f"/computeMetadata/v1/instance/{path}": value for path, value in keys.items()}


def amazon(**changes: str) -> dict[str, str]:
    """Keys of an on-demand g5.xlarge. Those that are absent where nothing is announced are added by changes."""
    keys = {
        "instance-type": "g5.xlarge",
        "placement/availability-zone": "us-east-1b",
        "placement/region": "us-east-1",
        "instance-life-cycle": "on-demand",
        "events/maintenance/scheduled": "[]",
    }
    paths = {
        "life_cycle": "instance-life-cycle",
        "action": "spot/instance-action",
        "rebalance": "events/recommendations/rebalance",
        "scheduled": "events/maintenance/scheduled",
    }
    keys |= {paths[name]: value for name, value in changes.items()}
    return {f"/latest/meta-data/{path}": value for path, value in keys.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "MetadataServer"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        is_google = self.path.startswith("/computeMetadata/")
        if is_google and (self.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in self.headers):
            self._answer(403, "Missing required header 'Metadata-Flavor': 'Google'")
        elif not is_google and self.headers.get("X-aws-ec2-metadata-token") != TOKEN:
            self._answer(401, "")
        elif self.path in self.server.keys:
            self._answer(200, self.server.keys[self.path], flavor=is_google and not self.server.portal)
        else:
            self._answer(404, "")

    def do_PUT(self) -> None:
        self.server.requests.append(self.path)
        valid = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        if not any(key.startswith("/latest/") for key in self.server.keys):
            self._answer(404, "")
        else:
            self._answer(200 if valid else 400, TOKEN if valid else "")

    def _answer(self, status: int, body: str, *, flavor: bool = False) -> None:
        data = body.encode()
        self.send_response(status)
        if flavor:
            self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class MetadataServer(ThreadingHTTPServer):
    """keys: value by path, may be changed while it runs. portal: answers without the header that marks the service."""

    daemon_threads = True

    def __init__(self, keys: dict[str, str], *, portal: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.keys, self.portal = keys, portal
        self.requests: list[str] = []
        self.address = f"127.0.0.1:{self.server_port}"
        self.google_env = {"GCE_METADATA_HOST": self.address, "AWS_EC2_METADATA_DISABLED": "true"}
        self.amazon_env = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{self.address}/", "NO_GCE_CHECK": "true"}
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> "MetadataServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
