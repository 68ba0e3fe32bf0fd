"""Where a bucket is, where the machine is, and what the traffic between the two costs.

Prices are list prices per GB that leaves the bucket's region, without free tiers, discounts and private links: they
show the order of magnitude of a bill. Speed is measured elsewhere (`data_path.py`).
"""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import quote

from stoker.preflight.cloud import GOOGLE_HOST, TIMEOUT_S, CloudMachine
from stoker.preflight.findings import CheckFinding, make_finding
from stoker.storage.clients import bucket_region, find_endpoint
from stoker.storage.uri import StorageUri

LOCATION_TIMEOUT_S = 5.0
GIB = 2**30
MIN_SHOWN_USD = 0.01
"""A cost of "0.00 USD" would say that it is free."""

AWS_AS_OF = "2022-04-06"
_AWS_PRICES = {
    "us-": 0.02, "ca-": 0.02, "eu-": 0.02, "af-south-1": 0.147, "me-south-1": 0.1105, "sa-east-1": 0.138,
    "ap-south-1": 0.086, "ap-northeast-2": 0.08, "ap-northeast-": 0.09, "ap-southeast-1": 0.09,
    "ap-southeast-2": 0.098, "ap-southeast-3": 0.10, "ap-east-1": 0.09,
}  # fmt: skip
"""Region of the bucket, or the start of its name → US dollars per GB to any other region: AWS's price list
"DataTransfer InterRegion Outbound", published on AWS_AS_OF, as copied in github.com/tetratelabs/istio-cost-analyzer
(pricing/aws/aws_rates.json). 0.02 from us-east-1 is confirmed for January 2026 (repost.aws, "Cost effective methods for
accessing S3 buckets cross-region"). Longer names first."""
_AWS_VIRGINIA_OHIO = 0.01
_VIRGINIA_OHIO = {"us-east-1", "us-east-2"}

GCP_AS_OF = "2025"
_GCP_NEAR = 0.02
"""Within North America, within Europe; a multi-region on the machine's continent costs the same since October 2022
(cloud.google.com/storage/pricing-announce#network)."""
_GCP_ATLANTIC = 0.05
_GCP_FAR = {"asia": 0.08, "australia": 0.10, "me": 0.11, "africa": 0.11, "southamerica": 0.14}
"""Continent → US dollars per GB, where it is at either end; the higher of both (cloud.google.com/storage/pricing,
network; cloud.google.com/vpc/network-pricing, inter-region). Confirmed by a copy (github.com/mongodb/docs,
gcp-data-transfer-costs.rst): 0.02 within North America, 0.08 to Asia; not confirmed: the others."""
_GCP_CONTINENT = {"us": "us", "northamerica": "us", "nam": "us", "eu": "europe", "europe": "europe", "eur": "europe"}

_DUAL_REGIONS = {
    "nam4": ("us-central1", "us-east1"), "eur4": ("europe-north1", "europe-west4"),
    "asia1": ("asia-northeast1", "asia-northeast2"), "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"), "eur8": ("europe-west3", "europe-west6"),
}  # fmt: skip
"""cloud.google.com/storage/docs/locations#predefined"""


def check_region(
    uri: StorageUri, machine: CloudMachine | None, *, epoch_bytes: float | None, env: Mapping[str, str] = os.environ
) -> list[CheckFinding]:
    """Whether the bucket is in the machine's region. epoch_bytes: what one pass over the data reads; None: unknown.
    Empty for a web server, for a store of no cloud, and where the machine is none of a cloud's."""
    if uri.scheme not in ("gs", "s3") or machine is None or machine.region is None:
        return []
    bucket = f"{uri.scheme}://{uri.bucket}"
    if (uri.scheme == "gs") != (machine.provider == "gcp"):
        if find_endpoint(uri.scheme) is not None:  # MinIO, R2, …: what their traffic costs is not known
            return []
        return [
            make_finding(
                id="bucket_region",
                severity="warning",
                title=f"{bucket} is in another cloud than this machine: its traffic is billed as internet traffic",
                evidence=f"the machine is in {machine.region} ({machine.provider}); list prices are 0.08 to 0.12 USD "
                "per GB",
                fix="copy the data into a bucket of the machine's cloud and region",
                place=bucket,
            )
        ]
    location = bucket_region(uri.bucket) if uri.scheme == "s3" else _google_location(uri.bucket, machine, env)
    if location is None:
        command = (
            f"gcloud storage buckets describe {bucket} --format='value(location)'"
            if uri.scheme == "gs"
            else f"aws s3api get-bucket-location --bucket {uri.bucket}"
        )
        return [
            make_finding(
                id="bucket_region",
                severity="unknown",
                title=f"the region of {bucket} could not be read",
                evidence=f"the machine is in {machine.region}; reading a bucket of another region is slower and billed",
                fix=command,
                place=bucket,
            )
        ]
    location = location.lower()
    if machine.region in (location, *_DUAL_REGIONS.get(location, ())):
        return [
            make_finding(
                id="bucket_region",
                severity="ok",
                title=f"{bucket} is in the machine's region, {machine.region}",
                evidence=f"location of the bucket: {location}",
                place=bucket,
            )
        ]
    price = egress_price(uri.scheme, location, machine.region)
    cost = f"about {price:g} USD per GB (list price, {GCP_AS_OF if uri.scheme == 'gs' else AWS_AS_OF})"
    if epoch_bytes and price * epoch_bytes / GIB >= MIN_SHOWN_USD:
        cost += f", {price * epoch_bytes / GIB:.2f} USD per pass over {epoch_bytes / GIB:.1f} GiB"
    copy = "gcloud storage cp -r" if uri.scheme == "gs" else "aws s3 sync"
    rent = f"rent the machine in {location}, or " if "-" in location else ""  # not in a multi-region
    return [
        make_finding(
            id="bucket_region",
            severity="warning",
            title=f"{bucket} is in {location}, the machine in {machine.region}: {price:g} USD per GB that is read",
            evidence=f"traffic that leaves {location} costs {cost}",
            fix=f"{rent}copy the data once: {copy} {uri} {uri.scheme}://BUCKET-IN-{machine.region.upper()}; a cache on "
            "disk (--cache disk) reads each training image once",
            place=bucket,
        )
    ]


def egress_price(scheme: str, location: str, region: str) -> float:
    """US dollars per GB from a bucket's location to a machine's region of the same cloud."""
    if scheme == "s3":
        if {location, region} == _VIRGINIA_OHIO:
            return _AWS_VIRGINIA_OHIO
        matching = [name for name in _AWS_PRICES if location.startswith(name)]
        return _AWS_PRICES[max(matching, key=len)] if matching else max(_AWS_PRICES.values())
    ends = {_continent(location), _continent(region)}
    far = [_GCP_FAR[end] for end in ends if end in _GCP_FAR]
    if far:
        return max(far)
    return _GCP_NEAR if len(ends) == 1 else _GCP_ATLANTIC


def _continent(location: str) -> str:
    """us-central1, us, nam4 → us"""
    name = location.partition("-")[0].rstrip("0123456789")
    return _GCP_CONTINENT.get(name, name)


def _google_location(bucket: str, machine: CloudMachine, env: Mapping[str, str]) -> str | None:
    """The location of a bucket by the JSON API's storageLayout, which who may list the bucket may read. The token is
    the machine's service account's; other credentials are not tried here."""
    endpoint = find_endpoint("gs")
    headers: dict[str, str] = {}
    if endpoint is None:
        if machine.provider != "gcp" or (token := _google_token(env)) is None:
            return None
        headers = {"Authorization": f"Bearer {token}"}
    base = endpoint[0] if endpoint else "https://storage.googleapis.com"
    url = f"{base if '://' in base else f'http://{base}'}/storage/v1/b/{quote(bucket, safe='')}/storageLayout"
    answer = _read_json(url, headers, LOCATION_TIMEOUT_S)
    location = answer.get("location")
    return location if isinstance(location, str) else None


def _google_token(env: Mapping[str, str]) -> str | None:
    host = env.get("GCE_METADATA_HOST") or GOOGLE_HOST
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    token = _read_json(url, {"Metadata-Flavor": "Google"}, TIMEOUT_S).get("access_token")
    return token if isinstance(token, str) else None


def _read_json(url: str, headers: dict[str, str], timeout_s: float) -> dict[str, object]:
    """The object at a URL; empty when it cannot be read, which the caller reports as unknown."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s) as response:
            answer = json.loads(response.read(1 << 16))
    except (OSError, ValueError, urllib.error.URLError, http.client.HTTPException):
        return {}
    return answer if isinstance(answer, dict) else {}
