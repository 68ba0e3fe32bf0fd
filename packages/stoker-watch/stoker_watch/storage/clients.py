"""obstore's clients for a bucket, and the credentials with which they sign: one search of the standard chain per store.

obstore signs the requests. This module adds what obstore does not do: the profiles of `~/.aws`, the end of the chain,
and the name of the identity, for messages. Without credentials, public buckets are read unsigned, as gcsfs and s3fs do;
the metadata service is queried once, for at most a second, so that a machine without one does not hang. Environment
variables are those of the clouds' own tools, also for endpoints (ENDPOINT_VARIABLES; without TLS where they begin with
http://); AWS_SKIP_SIGNATURE=true and GOOGLE_SKIP_SIGNATURE=true send unsigned requests.
"""

import configparser
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker_watch import regular_files
from stoker_watch.errors import StorageError, make_error, needs_package
from stoker_watch.storage.uri import StorageUri
from stoker_watch.storage.web import open_url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

ENVIRONMENT_PREFIXES = (
    "AWS_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "GCE_METADATA_HOST", "NO_GCE_CHECK", "CLOUDSDK_CONFIG",
    "STOKER_STORAGE_",
)  # fmt: skip
"""Prefixes of the environment variables that decide how a store is opened."""
ENDPOINT_VARIABLES = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "gs": ("STORAGE_EMULATOR_HOST",)}
"""By scheme; the first one that is set counts."""
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
GOOGLE_KEY_FIELDS = {
    "service_account": ("client_email", "private_key"),
    "authorized_user": ("client_id", "client_secret", "refresh_token"),
}
"""Type of a Google key → what it must have."""
MAX_KEY_BYTES = 2**22
"""A key file has a few kilobytes; more is not read."""
GCLOUD_LOGIN = "gcloud auth application-default login"
GOOGLE_KEY_FIX = f"a key file of a service account; or unset the variable and run: {GCLOUD_LOGIN}"
PART_BYTES = 8 * 2**20
"""Part size of a multipart upload: 10,000 parts, the limit of S3, are 78 GiB."""
PART_TIMEOUT_S = 300
CONNECT_TIMEOUT_S = 5
PART_RETRIES = 3
"""obstore repeats a failed part of a multipart upload. All other requests are repeated, and counted, by `failures.py`:
obstore would also repeat a conditional write whose response was lost, and then report the condition as failed."""
MAX_TIMEOUT = timedelta(days=1)
CORES_PER_THREAD = 8
"""Cores of the machine per thread of obstore's runtime (by default it has a thread per core). One thread transfers a
gigabyte per second, and more threads wake each other: on two cores an object costs 1/8 less with one than with two."""
METADATA_TIMEOUT_S = 1.0
"""A metadata service is on the same host: it responds in milliseconds or not at all."""
REFRESH_INTERVAL = timedelta(minutes=5)
"""Keys of `~/.aws/credentials` are read again after this time: tools that rotate keys rewrite the file."""


@dataclass(frozen=True)
class Credentials:
    """description: for messages; options: for obstore's store; iam_member: as an IAM policy names it, if known."""

    description: str
    options: Mapping[str, Any] = field(default_factory=dict)
    iam_member: str | None = None
    anonymous: bool = False


def find_credentials(scheme: str) -> Credentials:
    """scheme: one of uri.SCHEMES. Raises StorageError when credentials are configured but cannot be used."""
    if scheme == "s3":
        return _aws_credentials()
    if scheme == "gs":
        return _gcp_credentials()
    return Credentials("anonymous (https addresses are read without credentials)", anonymous=True)


def _anonymous(reason: str) -> Credentials:
    return Credentials(f"anonymous ({reason})", {"skip_signature": True}, anonymous=True)


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def _aws_credentials() -> Credentials:
    env = os.environ
    if _is_true("AWS_SKIP_SIGNATURE"):
        return _anonymous("AWS_SKIP_SIGNATURE")
    if (key := env.get("AWS_ACCESS_KEY_ID")) and env.get("AWS_SECRET_ACCESS_KEY"):
        for name in AWS_KEYS:  # obstore panics at a line end, and a space is a wrong signature
            if env.get(name, "") != env.get(name, "").strip():
                raise make_error(StorageError, "aws-variable-with-space", name, name=name)
        return Credentials(f"access key {_abbreviate_key(key)} (AWS_ACCESS_KEY_ID)")
    if env.get("AWS_WEB_IDENTITY_TOKEN_FILE") and (role := env.get("AWS_ROLE_ARN")):
        return Credentials(f"role {role} (AWS_WEB_IDENTITY_TOKEN_FILE)", iam_member=role)
    if profile := _aws_profile():
        return profile
    alone = [name for name in AWS_KEYS[:2] if env.get(name)]
    if alone:
        [lack] = {*AWS_KEYS[:2]} - {*alone}
        raise make_error(StorageError, "aws-variable-alone", alone[0], name=alone[0], lack=lack)
    if env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        return Credentials("the container's role (AWS_CONTAINER_CREDENTIALS_*)")
    if not _is_true("AWS_EC2_METADATA_DISABLED") and (role := _ec2_instance_role()):
        return Credentials(f"the instance's role {role}", iam_member=role)
    return _anonymous("no AWS credentials in the environment, in ~/.aws or of an instance")


def _abbreviate_key(key: str) -> str:
    return key if len(key) <= 8 else f"{key[:4]}…{key[-4:]}"


def _aws_profile() -> Credentials | None:
    """AWS_PROFILE, else `default`, of ~/.aws. Static keys are read here; SSO and roles need boto3."""
    name = os.environ.get("AWS_PROFILE")
    keys, settings = _read_profile(name or "default")
    region = settings.get("region", keys.get("region"))
    options: dict[str, Any] = {}
    if region and not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        options["region"] = region
    key = keys.get("aws_access_key_id")
    if key and "aws_secret_access_key" in keys:
        options["credential_provider"] = lambda: _profile_keys(name or "default")
        return Credentials(f"access key {_abbreviate_key(key)} (profile {name or 'default'} of ~/.aws)", options)
    if name is None:
        return None
    with needs_package("boto3", f"The AWS profile {name}, which has no access key (SSO, a role or a program),"):
        from obstore.auth.boto3 import Boto3CredentialProvider
    try:
        options["credential_provider"] = Boto3CredentialProvider()
    except Exception as error:  # botocore has no common base for what a profile can lack
        raise make_error(StorageError, "aws-profile-not-usable", "AWS_PROFILE", cause=str(error), name=name) from error
    return Credentials(f"profile {name} (AWS_PROFILE)", options)


def _read_profile(profile: str) -> tuple[dict[str, str], dict[str, str]]:
    """The entries of a profile in the credentials file and in the config file; empty when there are none."""
    sources = (
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", profile),
        ("AWS_CONFIG_FILE", "~/.aws/config", profile if profile == "default" else f"profile {profile}"),
    )
    sections = []
    for variable, default, section in sources:
        path = Path(os.environ.get(variable) or default).expanduser()
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise StorageError("The AWS settings cannot be read.", location=path, cause=str(error)) from error
        sections.append(dict(parser[section]) if parser.has_section(section) else {})
    return sections[0], sections[1]


def _profile_keys(profile: str) -> dict[str, Any]:
    """The credential provider for obstore, called when it has no keys or they have expired."""
    keys, _ = _read_profile(profile)
    return {
        "access_key_id": keys["aws_access_key_id"],
        "secret_access_key": keys["aws_secret_access_key"],
        "token": keys.get("aws_session_token"),
        "expires_at": datetime.now(timezone.utc) + REFRESH_INTERVAL,
    }


def _gcp_credentials() -> Credentials:
    env = os.environ
    if host := env.get("STORAGE_EMULATOR_HOST"):
        return _anonymous(f"STORAGE_EMULATOR_HOST={host}")
    if _is_true("GOOGLE_SKIP_SIGNATURE"):
        return _anonymous("GOOGLE_SKIP_SIGNATURE")
    if text := env.get("GOOGLE_SERVICE_ACCOUNT_KEY"):
        return _parse_key_file(text, "GOOGLE_SERVICE_ACCOUNT_KEY")
    for variable in ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS"):
        if key_path := env.get(variable):
            fix = f"Set {variable} to a key file, or unset it and run: {GCLOUD_LOGIN}"
            return _read_key_file(Path(key_path), variable, fix)
    folder = Path(env.get("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
    default = folder / "application_default_credentials.json"
    if default.is_file():
        return _read_key_file(default, GCLOUD_LOGIN, f"Run again: {GCLOUD_LOGIN}")
    if not _is_true("NO_GCE_CHECK") and (email := _gce_service_account()):
        return Credentials(f"the instance's service account {email}", iam_member=f"serviceAccount:{email}")
    return _anonymous("no Google credentials in the environment, of gcloud or of an instance")


def _read_key_file(path: Path, source: str, fix: str) -> Credentials:
    try:
        text = regular_files.read_text(path.expanduser(), max_bytes=MAX_KEY_BYTES)
    except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: ~ of a user that does not exist
        cause = str(error)
        raise make_error(StorageError, "key-file-unreadable", path, cause=cause, fix=fix, source=source) from error
    return _parse_key_file(text, source)


def _parse_key_file(text: str, source: str) -> Credentials:
    try:
        data = json.loads(text)
        credential_type = data.get("type", "service_account")
        if not isinstance(credential_type, str):
            raise ValueError("its type is no text")
    except (ValueError, AttributeError, RecursionError) as error:
        raise make_error(StorageError, "google-key-no-json", source, cause=str(error), fix=GOOGLE_KEY_FIX) from error
    missing = [name for name in GOOGLE_KEY_FIELDS.get(credential_type, ()) if not data.get(name)]
    if missing and not data.get("disable_oauth"):  # the key of an emulator has none
        lack, fix = ", ".join(missing), GOOGLE_KEY_FIX
        raise make_error(StorageError, "google-key-incomplete", source, fix=fix, type=credential_type, lack=lack)
    if credential_type == "service_account":
        email = data.get("client_email", "")
        return Credentials(f"service account {email} ({source})", iam_member=f"serviceAccount:{email}")
    if credential_type == "authorized_user":
        return Credentials(f"user {data.get('account') or 'of gcloud'} ({source})")
    with needs_package("google-auth", f"Google credentials of type {credential_type} ({source})"):
        from obstore.auth.google import GoogleCredentialProvider
    account = data.get("service_account_impersonation_url", "").rpartition("/")[2].partition(":")[0]
    return Credentials(f"{account or credential_type} ({source})", {"credential_provider": GoogleCredentialProvider()})


def _ec2_instance_role() -> str | None:
    """The role of an EC2 instance (IMDSv2); None: not an instance, or without a role."""
    base = os.environ.get("AWS_METADATA_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token = _query_metadata(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    if not token:
        return None
    role = _query_metadata(f"{base}/latest/meta-data/iam/security-credentials/", {"X-aws-ec2-metadata-token": token})
    return role.split()[0] if role else None


def _gce_service_account() -> str | None:
    """The service account of a Google instance, or of a pod's workload identity; None: neither, or without one."""
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/email"
    return _query_metadata(url, {"Metadata-Flavor": "Google"})


def _query_metadata(url: str, headers: dict[str, str], *, method: str = "GET") -> str | None:
    """The response of a metadata service; None when there is no service or it refuses."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with open_url(request, timeout_s=METADATA_TIMEOUT_S, proxies={}) as response:
            return str(response.read(4096), "utf-8", "replace").strip()
    except (OSError, urllib.error.URLError):
        return None


@dataclass(frozen=True)
class Clients:
    """`reads` times out when no byte arrives for a while; the others, which receive nothing while they send, after
    PART_TIMEOUT_S. `uploads` is for multipart uploads."""

    reads: "ObjectStore"
    writes: "ObjectStore"
    uploads: "ObjectStore"


def make_clients(uri: StorageUri, credentials: Credentials, *, stall_s: float) -> Clients:
    """stall_s: time without a byte after which a read is given up. Raises StorageError."""
    # obstore's runtime reads this at its start, with the first request; it has no other setting for it.
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(max(1, (os.cpu_count() or 1) // CORES_PER_THREAD)))
    from obstore.exceptions import BaseError

    write_config: ClientConfig = {"timeout": timedelta(seconds=PART_TIMEOUT_S)}
    try:
        reads = _make_client(uri, credentials, {"timeout": MAX_TIMEOUT, "read_timeout": timedelta(seconds=stall_s)}, 0)
        writes = _make_client(uri, credentials, write_config, 0)
        uploads = _make_client(uri, credentials, write_config, PART_RETRIES)
    except BaseError as error:
        cause = f"{str(error).partition(chr(10))[0]}; credentials: {credentials.description}"
        raise make_error(StorageError, "bucket-not-opened", uri, cause=cause) from error
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
        with open_url(request, timeout_s=CONNECT_TIMEOUT_S) as response:
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
            if "://" not in endpoint[0]:  # obstore panics
                choices = ["http://HOST:PORT", "https://HOST"]
                raise StorageError(f"{endpoint[1]}={endpoint[0]} is not an address.", location=uri, choices=choices)
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
