"""obstore's stores, made from an address, an identity, and the variables that name other endpoints.

AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and AWS_REGION for s3, STORAGE_EMULATOR_HOST for gs: as the clouds' own tools read
them. An endpoint that begins with http:// is taken at its word.
"""

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore.store import GCSStore, HTTPStore, S3Store

from stoker.storage.credentials import Credentials
from stoker.storage.retry import Timeouts
from stoker.storage.uri import StorageUri

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

ENVIRONMENT_PREFIXES = (
    "AWS_",
    "GOOGLE_",
    "STORAGE_EMULATOR_HOST",
    "GCE_METADATA_HOST",
    "NO_GCE_CHECK",
    "CLOUDSDK_CONFIG",
    "STOKER_STORAGE_",
)
"""Beginnings of the variables that decide what a store is."""
PART_BYTES = 8 * 2**20
"""Of a multipart upload: 10,000 of them, S3's most, are 78 GiB."""
PART_TIMEOUT_S = 300
CONNECT_TIMEOUT_S = 5
PART_RETRIES = 3
"""Within an upload obstore repeats the part that failed. All else is repeated, and counted, by us: obstore would also
repeat a write with a condition whose answer was lost, and then find the condition broken, by itself."""
MAX_TIMEOUT = timedelta(days=1)
CORES_PER_THREAD = 8
"""Of this machine's, for each thread on which obstore's requests run, else one for each core. One carries a gigabyte a
second, and more of them wake each other: on two cores, an object costs an eighth less by one thread than by two."""


@dataclass(frozen=True)
class Clients:
    """reads gives up when no byte comes for a while; the others, which hear nothing while they send, after a long time.
    uploads: in parts."""

    reads: "ObjectStore"
    writes: "ObjectStore"
    uploads: "ObjectStore"


def make_clients(uri: StorageUri, credentials: Credentials, timeouts: Timeouts) -> Clients:
    # Read by obstore's runtime when it starts, at the first request; there is no other way to say it.
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(max(1, (os.cpu_count() or 1) // CORES_PER_THREAD)))
    reads = _make_client(
        uri, credentials, {"timeout": MAX_TIMEOUT, "read_timeout": timedelta(seconds=timeouts.stall_s)}, 0
    )
    write_config: ClientConfig = {"timeout": timedelta(seconds=PART_TIMEOUT_S)}
    writes = _make_client(uri, credentials, write_config, 0)
    uploads = _make_client(uri, credentials, write_config, PART_RETRIES)
    return Clients(reads, writes, uploads)


def store_environment() -> tuple[tuple[str, str], ...]:
    """The variables that a store was made from: another store belongs to others."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(ENVIRONMENT_PREFIXES)))


def s3_endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def describe_endpoint(scheme: str) -> str | None:
    """Where another than the cloud itself is asked, and which variable says so; for messages."""
    variables = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("STORAGE_EMULATOR_HOST",)}.get(scheme, ())
    return next((f"{os.environ[name]} ({name})" for name in variables if os.environ.get(name)), None)


def bucket_region(bucket: str) -> str | None:
    """The region that S3 says the bucket is in, which it does without credentials; None: it does not say."""
    request = urllib.request.Request(f"{s3_endpoint() or 'https://s3.amazonaws.com'}/{bucket}", method="HEAD")
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
    client_config: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S), "user_agent": "stoker", **timeout_config}  # fmt: skip
    retry: RetryConfig = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=PART_TIMEOUT_S)}
    store_options: dict[str, Any] = dict(credentials.options)
    if uri.scheme == "s3":
        endpoint = s3_endpoint()
        if endpoint:
            store_options["endpoint"] = endpoint
            client_config["allow_http"] = endpoint.startswith("http://")
        return S3Store(uri.bucket, client_options=client_config, retry_config=retry, **store_options)
    if uri.scheme == "gs":
        host = os.environ.get("STORAGE_EMULATOR_HOST")
        if host:
            url = host if "://" in host else f"http://{host}"
            # obstore writes with a token even where it is told not to sign; this key file has none to ask for.
            key = {
                "gcs_base_url": url,
                "disable_oauth": True,
                "client_email": "",
                "private_key": "",
                "private_key_id": "",
            }
            store_options = {"service_account_key": json.dumps(key)}
            client_config["allow_http"] = url.startswith("http://")
        return GCSStore(uri.bucket, client_options=client_config, retry_config=retry, **store_options)
    client_config["allow_http"] = uri.scheme == "http"
    return HTTPStore(f"{uri.scheme}://{uri.bucket}", client_options=client_config, retry_config=retry)
