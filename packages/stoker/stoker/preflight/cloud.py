"""The cloud machine under a training: what it is, whether it is spot, and which notices it announces.

Asks the metadata services of Google Cloud (cloud.google.com/compute/docs/metadata) and of AWS (IMDSv2,
docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html), which are on the same host and need no
credentials. Where a bucket is, against the machine, is here too. Not here: notices during a training
(`training/stopper.py`); the firmware's name of the cloud (`environment.py`); the speed of a bucket (`data_path.py`).
"""

import http.client
import json
import os
import re
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from stoker.knowledge import read_toml
from stoker.preflight.catalog import describe
from stoker_watch.findings.finding import Finding
from stoker_watch.recording.telemetry.environment import describe_storage, detect_cloud, detect_machine_type
from stoker_watch.storage.clients import bucket_region, find_endpoint
from stoker_watch.storage.uri import StorageUri
from stoker_watch.storage.web import open_url

TIMEOUT_S, KNOWN_TIMEOUT_S = 0.5, 5.0
"""Seconds of a request: to a service of which nothing is known, and to one that has answered, or which the firmware or
a variable names. A metadata service answers in milliseconds, unless the machine is overloaded."""
MAX_ANSWER_BYTES = 65536
GOOGLE_HOST, AMAZON_ENDPOINT = "169.254.169.254", "http://169.254.169.254"
FLAVOR = "Metadata-Flavor"
GIB = 2**30
DUAL_REGIONS: dict[str, list[str]] = read_toml("dual_regions.toml")
"""Location of a bucket of Google → the regions that it is in."""
_TRUE = ("1", "true", "yes", "on")

NOTICE = {"gcp": "30 s", "aws": "2 min"}
"""Between the notice and the end of a spot machine: cloud.google.com/compute/docs/instances/spot,
docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html."""
GOOGLE_NOTICES = {"preempted": "FALSE", "maintenance-event": "NONE"}
"""Key → its value where there is no notice."""
AMAZON_NOTICES = ("spot/instance-action", "events/recommendations/rebalance", "events/maintenance/scheduled")


class CloudMachine(msgspec.Struct, frozen=True, kw_only=True):
    """What the metadata service says. None: it does not say."""

    provider: Literal["gcp", "aws"]
    machine_type: str | None = None
    """a2-highgpu-1g, g5.xlarge."""
    zone: str
    """us-central1-a, us-east-1b."""
    region: str
    spot: bool | None = None
    notices: tuple[str, ...] = ()
    """A preemption, a maintenance event or a raised risk of preemption, in words."""


def read_machine(env: Mapping[str, str] = os.environ, *, root: Path = Path("/")) -> CloudMachine | None:
    """The machine of Google Cloud or AWS on which this process runs; None if no metadata service answers. Takes at most
    about TIMEOUT_S where none is to be expected. GCE_METADATA_HOST and AWS_EC2_METADATA_SERVICE_ENDPOINT name other
    services, NO_GCE_CHECK and AWS_EC2_METADATA_DISABLED switch them off, as in the clouds' own tools."""
    cloud, google, amazon = detect_cloud(root), env.get("GCE_METADATA_HOST"), _amazon_variable(env)
    asked = []
    if google or (cloud in ("gcp", None) and env.get("NO_GCE_CHECK", "").lower() not in _TRUE):
        asked.append((_read_google, google))
    if (amazon or cloud in ("aws", None)) and env.get("AWS_EC2_METADATA_DISABLED", "").lower() not in _TRUE:
        asked.append((_read_amazon, amazon))
    with ThreadPoolExecutor(max_workers=2) as pool:  # both at the same time
        answers = [pool.submit(read, env, KNOWN_TIMEOUT_S if cloud or named else TIMEOUT_S) for read, named in asked]
    return next(filter(None, (answer.result() for answer in answers)), None)


def check_cloud(
    env: Mapping[str, str] = os.environ, *, run_dir: str | None = None, root: Path = Path("/")
) -> list[Finding]:
    """Type of the machine, spot or not, notices that are pending. run_dir: folder or URI of the run;
    None: `runs/` in the current folder, or Vertex AI's folder for checkpoints."""
    machine, cloud = read_machine(env, root=root), detect_cloud(root)
    if machine is None and cloud in ("gcp", "aws"):
        variable = {"gcp": "NO_GCE_CHECK", "aws": "AWS_EC2_METADATA_DISABLED"}[cloud]
        is_named = cloud == "gcp" and bool(env.get("GCE_METADATA_HOST"))  # is asked nevertheless
        if env.get(variable, "").lower() in _TRUE and not is_named:
            return [describe("metadata_unreachable/off", cloud=cloud, variable=variable)]
        return [describe(f"metadata_unreachable/{cloud}")]
    if machine is None and cloud is not None:
        return [describe("cloud_machine/other", cloud=cloud)]
    if machine is None:
        evidence = "no metadata service answers"
        return [describe("cloud_machine", machine="not a machine of Google Cloud or AWS", evidence=evidence)]
    name = f"{machine.machine_type or 'machine of unknown type'} in {machine.zone} ({machine.provider})"
    evidence = "metadata service; maintenance and preemption notices can be read"
    kind = {True: ", spot", False: ", on demand", None: ""}[machine.spot]
    findings = [describe("cloud_machine", machine=f"{name}{kind}", evidence=evidence)]
    findings += [describe("machine_notice", notice=notice) for notice in machine.notices]
    if machine.spot:
        findings.append(_check_spot(machine, run_dir or env.get("AIP_CHECKPOINT_DIR") or "runs", root))
    return findings


def _check_spot(machine: CloudMachine, run_dir: str, root: Path) -> Finding:
    storage = describe_storage(run_dir, root)
    ids = {True: "spot_run_folder/network", False: "spot_run_folder", None: "spot_run_folder/unknown"}
    texts: dict[str, Any] = {"run_dir": run_dir, "kind": storage["kind"], "provider": machine.provider}
    scheme = "gs" if machine.provider == "gcp" else "s3"
    return describe(ids[storage["network"]], notice=NOTICE[machine.provider], scheme=scheme, **texts)


def _read_google(env: Mapping[str, str], timeout_s: float) -> CloudMachine | None:
    base = f"http://{env.get('GCE_METADATA_HOST') or GOOGLE_HOST}/computeMetadata/v1/instance"

    def ask(key: str, timeout_s: float = KNOWN_TIMEOUT_S) -> str:
        return (_request(f"{base}/{key}", {FLAVOR: "Google"}, timeout_s=timeout_s) or "").rpartition("/")[2]

    zone = ask("zone", timeout_s)  # projects/1/zones/us-central1-a
    if not zone:
        return None
    notices = [(key, ask(key) or quiet, quiet) for key, quiet in GOOGLE_NOTICES.items()]
    model, preemptible = ask("scheduling/provisioning-model"), ask("scheduling/preemptible").upper()
    return CloudMachine(
        provider="gcp",
        machine_type=_machine_type(env, ask("machine-type")),
        zone=zone,
        region=zone.rpartition("-")[0],
        spot=model == "SPOT" or preemptible == "TRUE" if model or preemptible else None,  # GKE conceals some keys
        notices=tuple(f"{key} is {value}" for key, value, quiet in notices if value.upper() != quiet),
    )


def _read_amazon(env: Mapping[str, str], timeout_s: float) -> CloudMachine | None:
    base = (_amazon_variable(env) or AMAZON_ENDPOINT).rstrip("/")
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _request(f"{base}/latest/api/token", lifetime, method="PUT", timeout_s=timeout_s)

    def ask(key: str) -> str | None:
        url = f"{base}/latest/meta-data/{key}"
        return _request(url, {"X-aws-ec2-metadata-token": token or ""}, timeout_s=KNOWN_TIMEOUT_S)

    zone = ask("placement/availability-zone") if token else None
    if not zone:
        return None
    notices = [(key, answer) for key in AMAZON_NOTICES if (answer := ask(key)) and not _is_over(answer)]
    life_cycle = ask("instance-life-cycle")
    return CloudMachine(
        provider="aws",
        machine_type=_machine_type(env, ask("instance-type")),
        zone=zone,
        region=ask("placement/region") or zone.rstrip("abcdefghijklmnopqrstuvwxyz"),
        spot=life_cycle == "spot" if life_cycle else None,
        notices=tuple(f"{key} is {answer}" for key, answer in notices),
    )


def _is_over(events: str) -> bool:
    """Whether all scheduled events are completed or canceled: [{"Code": "system-reboot", …, "State": "active"}]."""
    states = re.findall(r'"State"\s*:\s*"(\w+)"', events)
    return events == "[]" or (bool(states) and all(state in ("completed", "canceled") for state in states))


def _request(
    url: str, headers: dict[str, str], *, timeout_s: float, method: str = "GET", behind_proxy: bool = False
) -> str | None:
    """The text at a URL; None where it is missing or concealed, and where nothing, or another program, answers."""
    try:
        request = urllib.request.Request(url, headers=headers, method=method)
        with open_url(request, timeout_s=timeout_s, proxies=None if behind_proxy else {}) as response:
            if headers.get(FLAVOR) and response.headers.get(FLAVOR) != headers[FLAVOR]:
                return None  # a captive portal
            return str(response.read(MAX_ANSWER_BYTES), "utf-8", "replace").strip()
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _amazon_variable(env: Mapping[str, str]) -> str | None:
    """The SDKs' variable, and the one of obstore (`stoker_watch/storage/clients.py`)."""
    return env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or env.get("AWS_METADATA_ENDPOINT")


def _machine_type(env: Mapping[str, str], answer: str | None) -> str | None:
    """STOKER_MACHINE_TYPE counts more than the service, as in a run's environment.json."""
    return detect_machine_type(env) if env.get("STOKER_MACHINE_TYPE", "").strip() else answer or None


def check_region(
    uri: StorageUri, machine: CloudMachine | None, *, epoch_bytes: float | None, env: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Whether the bucket is in the machine's region. epoch_bytes: what one pass over the data reads; None: unknown.
    Empty for a web server, for a store of no cloud, and where the machine is none of a cloud's."""
    if uri.scheme not in ("gs", "s3") or machine is None:
        return []
    is_google, bucket, region = uri.scheme == "gs", f"{uri.scheme}://{uri.bucket}", machine.region
    if is_google != (machine.provider == "gcp"):
        if find_endpoint(uri.scheme) is not None:  # MinIO, R2, …: what their traffic costs is not known
            return []
        return [describe("bucket_region/cloud", bucket, bucket=bucket, region=region, provider=machine.provider)]
    location = _google_location(uri.bucket, env) if is_google else bucket_region(uri.bucket)
    if location is None:
        command = f"aws s3api get-bucket-location --bucket {uri.bucket}"
        if is_google:
            command = f"gcloud storage buckets describe {bucket} --format='value(location)'"
        return [describe("bucket_region/unknown", bucket, bucket=bucket, region=region, command=command)]
    location = location.lower()
    if region in (location, *DUAL_REGIONS.get(location, ())):
        return [describe("bucket_region/same", bucket, bucket=bucket, region=region, location=location)]
    program = "gcloud storage cp -r" if is_google else "aws s3 sync"
    per_pass = f"; a pass over the data reads {epoch_bytes / GIB:.1f} GiB" if epoch_bytes else ""
    rent = f"rent the machine in {location}, or " if "-" in location else ""  # not in a multi-region
    copy = f"{program} {uri} {uri.scheme}://BUCKET-IN-{region.upper()}"
    texts: dict[str, Any] = {"bucket": bucket, "location": location, "region": region, "per_pass": per_pass}
    return [describe("bucket_region/other", bucket, **texts, rent=rent, copy=copy)]


def _google_location(bucket: str, env: Mapping[str, str]) -> str | None:
    """The location of a bucket by the JSON API's storageLayout, with the token of the machine's service account."""
    endpoint = find_endpoint("gs")
    base, headers = "https://storage.googleapis.com", {}
    if endpoint is None:
        host = env.get("GCE_METADATA_HOST") or GOOGLE_HOST
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        token = _field(_request(url, {FLAVOR: "Google"}, timeout_s=TIMEOUT_S), "access_token")
        if not token:
            return None
        headers = {"Authorization": f"Bearer {token}"}
    else:
        base = endpoint[0] if "://" in endpoint[0] else f"http://{endpoint[0]}"
    url = f"{base}/storage/v1/b/{quote(bucket, safe='')}/storageLayout"
    return _field(_request(url, headers, timeout_s=KNOWN_TIMEOUT_S, behind_proxy=True), "location")


def _field(text: str | None, name: str) -> str | None:
    """A text of a JSON object; None where there is none, which the caller reports as unknown."""
    try:
        found = json.loads(text or "")[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None
