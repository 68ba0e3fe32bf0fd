"""The cloud machine under a training: what it is, whether it is spot, and which notices it announces.

Asks the metadata services of Google Cloud (cloud.google.com/compute/docs/metadata) and of AWS (IMDSv2,
docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html), which are on the same host and need no
credentials. Where a bucket is, against the machine, is here too. Not here: the firmware's name of the cloud
(`environment.py`); the speed of a bucket (`data_path.py`).
"""

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
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
"""Of one request: to a service of which nothing is known, and to one that has answered, or which the firmware or a
variable names. A metadata service answers in milliseconds, unless the machine is overloaded."""
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


class CloudMachine(msgspec.Struct, frozen=True, kw_only=True):
    """What the metadata service says. None: it does not say."""

    provider: Literal["gcp", "aws"]
    machine_type: str | None = None
    """a2-highgpu-1g, g5.xlarge."""
    zone: str | None = None
    """us-central1-a, us-east-1b."""
    region: str | None = None
    spot: bool | None = None
    notices: tuple[str, ...] = ()
    """A preemption, a maintenance event or a raised risk of preemption, in words."""


class _NoService(Exception):
    """No metadata service answers; the message says why."""


def read_machine(env: Mapping[str, str] = os.environ, *, root: Path = Path("/")) -> CloudMachine | None:
    """The machine of Google Cloud or AWS on which this process runs; None if no metadata service answers. Takes at most
    about TIMEOUT_S where none is to be expected. GCE_METADATA_HOST and AWS_EC2_METADATA_SERVICE_ENDPOINT name other
    services, NO_GCE_CHECK and AWS_EC2_METADATA_DISABLED switch them off, as in the clouds' own tools."""
    return _ask_services(env, root)[0]


def check_cloud(
    env: Mapping[str, str] = os.environ, *, run_dir: str | None = None, root: Path = Path("/")
) -> list[Finding]:
    """Type of the machine, spot or not, notices that are pending. run_dir: folder or URI of the run;
    None: `runs/` in the current folder, or Vertex AI's folder for checkpoints."""
    machine, reasons = _ask_services(env, root)
    if machine is None:
        return [_without_service(detect_cloud(root), reasons)]
    place = f"{machine.zone or machine.region or 'unknown zone'} ({machine.provider})"
    spot = {True: ", spot", False: ", on demand", None: ""}[machine.spot]
    name = f"{machine.machine_type or 'machine of unknown type'} in {place}{spot}"
    evidence = "metadata service; maintenance and preemption notices can be read"
    findings = [describe("cloud_machine", machine=name, evidence=evidence)]
    findings += [describe("machine_notice", notice=notice) for notice in machine.notices]
    if machine.spot:
        findings.append(_check_spot(machine, run_dir or env.get("AIP_CHECKPOINT_DIR") or "runs", root))
    return findings


def _without_service(cloud: str | None, reasons: Mapping[str, str]) -> Finding:
    if cloud in ("gcp", "aws"):
        return describe(f"metadata_unreachable/{cloud}", reason=reasons.get(cloud, "not asked"))
    if cloud is not None:
        return describe("cloud_machine/other", cloud=cloud)
    asked = "; ".join(f"{provider}: {reason}" for provider, reason in reasons.items()) or "none was asked"
    evidence = f"no metadata service answers ({asked})"
    return describe("cloud_machine", machine="not a machine of Google Cloud or AWS", evidence=evidence)


def _check_spot(machine: CloudMachine, run_dir: str, root: Path) -> Finding:
    storage = describe_storage(run_dir, root)
    ids = {True: "spot_run_folder/network", False: "spot_run_folder", None: "spot_run_folder/unknown"}
    texts: dict[str, Any] = {"run_dir": run_dir, "kind": storage["kind"], "provider": machine.provider}
    scheme = "gs" if machine.provider == "gcp" else "s3"
    return describe(ids[storage["network"]], notice=NOTICE[machine.provider], scheme=scheme, **texts)


def _ask_services(env: Mapping[str, str], root: Path) -> tuple[CloudMachine | None, dict[str, str]]:
    """(the machine, why a service that was asked gave no answer, by provider). Both are asked at the same time."""
    cloud = detect_cloud(root)
    readers: dict[str, Callable[[Mapping[str, str], float], CloudMachine]] = {}
    named = {"gcp": env.get("GCE_METADATA_HOST"), "aws": _amazon_variable(env)}
    google_off = env.get("NO_GCE_CHECK", "").lower() in _TRUE
    if named["gcp"] or (not google_off and cloud in ("gcp", None)):
        readers["gcp"] = _read_google
    amazon_off = env.get("AWS_EC2_METADATA_DISABLED", "").lower() in _TRUE
    if not amazon_off and (named["aws"] or cloud in ("aws", None)):
        readers["aws"] = _read_amazon
    machine, reasons = None, {}
    with ThreadPoolExecutor(max_workers=2) as pool:
        answers = {
            provider: pool.submit(read, env, KNOWN_TIMEOUT_S if cloud or named[provider] else TIMEOUT_S)
            for provider, read in readers.items()
        }
        for provider, answer in answers.items():
            try:
                machine = machine or answer.result()
            except _NoService as error:
                reasons[provider] = str(error)
    return machine, reasons


def _read_google(env: Mapping[str, str], timeout_s: float) -> CloudMachine:
    host = env.get("GCE_METADATA_HOST") or GOOGLE_HOST

    def ask(key: str, timeout_s: float = KNOWN_TIMEOUT_S) -> str | None:
        return _request(f"http://{host}/computeMetadata/v1/instance/{key}", {FLAVOR: "Google"}, timeout_s=timeout_s)

    zone = _last_part(ask("zone", timeout_s))
    if zone is None:
        raise _NoService("the metadata server does not know the zone")
    model, preemptible = ask("scheduling/provisioning-model"), ask("scheduling/preemptible")
    preempted, event = ask("preempted"), ask("maintenance-event")
    spot = None if model is None and preemptible is None else model == "SPOT" or _is_true(preemptible)
    return CloudMachine(
        provider="gcp",
        machine_type=_machine_type(env, _last_part(ask("machine-type"))),
        zone=zone,
        region=zone.rpartition("-")[0],
        spot=spot,
        notices=(
            *(["instance/preempted is TRUE"] if _is_true(preempted) else []),
            *([] if event in (None, "NONE") else [f"maintenance-event is {event}"]),
        ),
    )


def _read_amazon(env: Mapping[str, str], timeout_s: float) -> CloudMachine:
    base = (_amazon_variable(env) or AMAZON_ENDPOINT).rstrip("/")
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _request(f"{base}/latest/api/token", lifetime, method="PUT", timeout_s=timeout_s)
    if token is None:
        raise _NoService("it grants no token")

    def ask(key: str) -> str | None:
        url = f"{base}/latest/meta-data/{key}"
        return _request(url, {"X-aws-ec2-metadata-token": token}, timeout_s=KNOWN_TIMEOUT_S)

    zone, life_cycle = ask("placement/availability-zone"), ask("instance-life-cycle")
    if zone is None:
        raise _NoService("it does not know the availability zone")
    keys = ("spot/instance-action", "events/recommendations/rebalance", "events/maintenance/scheduled")
    answers = [(key, answer) for key in keys if (answer := ask(key)) and not _is_over(answer)]
    return CloudMachine(
        provider="aws",
        machine_type=_machine_type(env, ask("instance-type")),
        zone=zone,
        region=ask("placement/region") or zone.rstrip("abcdefghijklmnopqrstuvwxyz"),
        spot=None if life_cycle is None else life_cycle == "spot",
        notices=tuple(f"{key} is {answer}" for key, answer in answers),
    )


def _is_over(events: str) -> bool:
    """Whether all scheduled events are completed or canceled: [{"Code": "system-reboot", …, "State": "active"}]."""
    states = re.findall(r'"State"\s*:\s*"(\w+)"', events)
    return events == "[]" or (bool(states) and all(state in ("completed", "canceled") for state in states))


def _request(url: str, headers: dict[str, str], *, timeout_s: float, method: str = "GET") -> str | None:
    """The text at a URL; None where it is missing or concealed. Raises _NoService."""
    try:
        request = urllib.request.Request(url, headers=headers, method=method)
        with open_url(request, timeout_s=timeout_s, proxies={}) as response:
            flavor = headers.get(FLAVOR)
            if flavor and response.headers.get(FLAVOR) != flavor:  # a captive portal, or another program
                raise _NoService(f"{url} is not a metadata service")
            return str(response.read(MAX_ANSWER_BYTES), "utf-8", "replace").strip()
    except urllib.error.HTTPError as error:
        if error.code in (403, 404):  # GKE's metadata server conceals some keys
            return None
        raise _NoService(f"{url}: HTTP status {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _NoService(f"{url}: {getattr(error, 'reason', None) or error}") from error


def _amazon_variable(env: Mapping[str, str]) -> str | None:
    """The SDKs' variable, and the one of obstore (`stoker_watch/storage/clients.py`)."""
    return env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or env.get("AWS_METADATA_ENDPOINT")


def _machine_type(env: Mapping[str, str], answer: str | None) -> str | None:
    """STOKER_MACHINE_TYPE counts more than the service, as in a run's environment.json."""
    return detect_machine_type(env) if env.get("STOKER_MACHINE_TYPE", "").strip() else answer


def _last_part(text: str | None) -> str | None:
    """projects/1/zones/us-central1-a → us-central1-a"""
    return text.rpartition("/")[2] or None if text else None


def _is_true(text: str | None) -> bool:
    return (text or "").upper() == "TRUE"


def check_region(
    uri: StorageUri, machine: CloudMachine | None, *, epoch_bytes: float | None, env: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Whether the bucket is in the machine's region. epoch_bytes: what one pass over the data reads; None: unknown.
    Empty for a web server, for a store of no cloud, and where the machine is none of a cloud's."""
    if uri.scheme not in ("gs", "s3") or machine is None or machine.region is None:
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
    headers: dict[str, str] = {}
    if endpoint is None:
        host = env.get("GCE_METADATA_HOST") or GOOGLE_HOST
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        token = _read_field(url, {FLAVOR: "Google"}, TIMEOUT_S, "access_token")
        if not token:
            return None
        headers = {"Authorization": f"Bearer {token}"}
    base = endpoint[0] if endpoint else "https://storage.googleapis.com"
    url = f"{base if '://' in base else f'http://{base}'}/storage/v1/b/{quote(bucket, safe='')}/storageLayout"
    return _read_field(url, headers, KNOWN_TIMEOUT_S, "location")


def _read_field(url: str, headers: dict[str, str], timeout_s: float, name: str) -> str | None:
    """A text of the JSON object at a URL; None when it cannot be read, which the caller reports as unknown."""
    try:
        with open_url(urllib.request.Request(url, headers=headers), timeout_s=timeout_s) as response:
            found = json.loads(response.read(MAX_ANSWER_BYTES))[name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException):
        return None
    return found if isinstance(found, str) else None
