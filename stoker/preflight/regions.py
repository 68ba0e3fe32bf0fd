"""Where a bucket is, where the machine is, and what the traffic between the two costs.

Prices are those of `knowledge/egress.toml`. Speed is measured elsewhere (`data_path.py`).
"""

import http.client
import json
import os
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from stoker.findings.finding import Finding
from stoker.knowledge import read_toml
from stoker.preflight.catalog import describe
from stoker.preflight.cloud import GOOGLE_HOST, TIMEOUT_S, CloudMachine
from stoker.storage.clients import bucket_region, find_endpoint
from stoker.storage.uri import StorageUri

LOCATION_TIMEOUT_S = 5.0
GIB = 2**30
MIN_SHOWN_USD = 0.01
"""A cost of "0.00 USD" would say that it is free."""


class _Amazon(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    as_of: str
    virginia_ohio: float
    prices: dict[str, float]


class _Google(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    as_of: str
    near: float
    atlantic: float
    far: dict[str, float]
    continents: dict[str, str]
    dual_regions: dict[str, tuple[str, str]]


class _Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    aws: _Amazon
    gcp: _Google


PRICES = msgspec.convert(read_toml("egress.toml"), _Prices)


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
    if region in (location, *PRICES.gcp.dual_regions.get(location, ())):
        return [describe("bucket_region/same", bucket, bucket=bucket, region=region, location=location)]
    price = egress_price(uri.scheme, location, region)
    cost = price * (epoch_bytes or 0) / GIB
    per_pass = f", {cost:.2f} USD per pass over {(epoch_bytes or 0) / GIB:.1f} GiB" if cost >= MIN_SHOWN_USD else ""
    program = "gcloud storage cp -r" if is_google else "aws s3 sync"
    return [
        describe(
            "bucket_region/other",
            bucket,
            bucket=bucket,
            location=location,
            region=region,
            price=price,
            as_of=PRICES.gcp.as_of if is_google else PRICES.aws.as_of,
            per_pass=per_pass,
            rent=f"rent the machine in {location}, or " if "-" in location else "",  # not in a multi-region
            copy=f"{program} {uri} {uri.scheme}://BUCKET-IN-{region.upper()}",
        )
    ]


def egress_price(scheme: str, location: str, region: str) -> float:
    """US dollars per GB from a bucket's location to a machine's region of the same cloud."""
    if scheme == "s3":
        if {location, region} == {"us-east-1", "us-east-2"}:
            return PRICES.aws.virginia_ohio
        prices = PRICES.aws.prices
        matching = [name for name in prices if location.startswith(name)]
        return prices[max(matching, key=len)] if matching else max(prices.values())
    ends = {_continent(location), _continent(region)}
    near = PRICES.gcp.near if len(ends) == 1 else PRICES.gcp.atlantic
    return max((PRICES.gcp.far[end] for end in ends if end in PRICES.gcp.far), default=near)


def _continent(location: str) -> str:
    """us-central1, us, nam4 → us"""
    name = location.partition("-")[0].rstrip("0123456789")
    return PRICES.gcp.continents.get(name, name)


def _google_location(bucket: str, env: Mapping[str, str]) -> str | None:
    """The location of a bucket by the JSON API's storageLayout, which who may list the bucket may read. The token is
    the machine's service account's; other credentials are not tried here."""
    endpoint = find_endpoint("gs")
    headers: dict[str, str] = {}
    if endpoint is None:
        host = env.get("GCE_METADATA_HOST") or GOOGLE_HOST
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        token = _read_json(url, {"Metadata-Flavor": "Google"}, TIMEOUT_S).get("access_token")
        if not token:
            return None
        headers = {"Authorization": f"Bearer {token}"}
    base = endpoint[0] if endpoint else "https://storage.googleapis.com"
    url = f"{base if '://' in base else f'http://{base}'}/storage/v1/b/{quote(bucket, safe='')}/storageLayout"
    location = _read_json(url, headers, LOCATION_TIMEOUT_S).get("location")
    return location if isinstance(location, str) else None


def _read_json(url: str, headers: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """The object at a URL; empty when it cannot be read, which the caller reports as unknown."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s) as response:
            answer = json.loads(response.read(1 << 16))
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return answer if isinstance(answer, dict) else {}
