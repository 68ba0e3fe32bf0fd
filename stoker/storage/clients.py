"""obstore's clients for a bucket, made from a URI, credentials, and the environment variables that name endpoints.

AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and AWS_REGION for s3, STORAGE_EMULATOR_HOST for gs, as in the clouds' own tools.
An endpoint that begins with http:// is used without TLS.
"""

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stoker.storage.credentials import Credentials
from stoker.storage.retry import Timeouts
from stoker.storage.uri import StorageUri

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

ENVIRONMENT_PREFIXES = (
    "AWS_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "GCE_METADATA_HOST", "NO_GCE_CHECK", "CLOUDSDK_CONFIG",
    "STOKER_STORAGE_",
)  # fmt: skip
"""Prefixes of the environment variables that decide how a store is opened."""
ENDPOINT_VARIABLES = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("STORAGE_EMULATOR_HOST",)}
"""By scheme; the first one that is set counts."""
PART_BYTES = 8 * 2**20
"""Part size of a multipart upload: 10,000 parts, the limit of S3, are 78 GiB."""
PART_TIMEOUT_S = 300
CONNECT_TIMEOUT_S = 5
PART_RETRIES = 3
"""obstore repeats a failed part of a multipart upload. All other requests are repeated, and counted, by `retry.py`:
obstore would also repeat a conditional write whose response was lost, and then report the condition as failed."""
MAX_TIMEOUT = timedelta(days=1)
CORES_PER_THREAD = 8
"""Cores of the machine per thread of obstore's runtime (by default it has a thread per core). One thread transfers a
gigabyte per second, and more threads wake each other: on two cores an object costs 1/8 less with one than with two."""


@dataclass(frozen=True)
class Clients:
    """`reads` times out when no byte arrives for a while; the others, which receive nothing while they send, after
    PART_TIMEOUT_S. `uploads` is for multipart uploads."""

    reads: "ObjectStore"
    writes: "ObjectStore"
    uploads: "ObjectStore"


def make_clients(uri: StorageUri, credentials: Credentials, timeouts: Timeouts) -> Clients:
    # obstore's runtime reads this at its start, with the first request; it has no other setting for it.
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(max(1, (os.cpu_count() or 1) // CORES_PER_THREAD)))
    reads = _make_client(
        uri, credentials, {"timeout": MAX_TIMEOUT, "read_timeout": timedelta(seconds=timeouts.stall_s)}, 0
    )
    write_config: ClientConfig = {"timeout": timedelta(seconds=PART_TIMEOUT_S)}
    writes = _make_client(uri, credentials, write_config, 0)
    uploads = _make_client(uri, credentials, write_config, PART_RETRIES)
    return Clients(reads, writes, uploads)


def store_environment() -> tuple[tuple[str, str], ...]:
    """The variables that decide how a store is opened; other values need another store."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIXES)))


def find_endpoint(scheme: str) -> tuple[str, str] | None:
    """(endpoint, variable that names it); None for the cloud's own."""
    names = ENDPOINT_VARIABLES.get(scheme, ())
    return next(((os.environ[name], name) for name in names if os.environ.get(name)), None)


def bucket_region(bucket: str) -> str | None:
    """The region of a bucket, which S3 tells without credentials; None: not known."""
    endpoint = find_endpoint("s3")
    url = f"{endpoint[0] if endpoint else 'https://s3.amazonaws.com'}/{bucket}"
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S) as response:
            region = response.headers.get("x-amz-bucket-region")
    except urllib.error.HTTPError as error:
        region = error.headers.get("x-amz-bucket-region")
    except OSError:
        return None
    return None if region is None else str(region)


def _make_client(
    uri: StorageUri, credentials: Credentials, timeout_config: "ClientConfig", max_retries: int
) -> "ObjectStore":
    from obstore.store import GCSStore, HTTPStore, S3Store

    client_config: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S), "user_agent": "stoker", **timeout_config}  # fmt: skip
    retry: RetryConfig = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=PART_TIMEOUT_S)}
    store_options: dict[str, Any] = dict(credentials.options)
    endpoint = find_endpoint(uri.scheme)
    if uri.scheme == "s3":
        if endpoint:
            store_options["endpoint"] = endpoint[0]
            client_config["allow_http"] = endpoint[0].startswith("http://")
        return S3Store(uri.bucket, client_options=client_config, retry_config=retry, **store_options)
    if uri.scheme == "gs":
        if endpoint:
            url = endpoint[0] if "://" in endpoint[0] else f"http://{endpoint[0]}"
            # obstore requests a token for writes even with skip_signature; with this key it requests none.
            key = {"gcs_base_url": url, "disable_oauth": True}
            key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
            store_options = {"service_account_key": json.dumps(key)}
            client_config["allow_http"] = url.startswith("http://")
        return GCSStore(uri.bucket, client_options=client_config, retry_config=retry, **store_options)
    client_config["allow_http"] = uri.scheme == "http"
    return HTTPStore(f"{uri.scheme}://{uri.bucket}", client_options=client_config, retry_config=retry)
