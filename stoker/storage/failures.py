"""Failures of requests to a bucket: the kind of failure, whether a retry may help, and the message for the user.

obstore gives an exception class, and everything else as text: the status, the store's XML, the kind of a network
failure. Only this module parses that text. It does not include headers such as Retry-After.
"""

import re
import shlex
from dataclasses import dataclass
from typing import Literal

from stoker.errors import Conflict, ObjectMissing, StorageError, Unsupported
from stoker.storage.credentials import Credentials
from stoker.storage.uri import StorageUri

Action = Literal["read", "list", "write", "delete"]
FailureKind = Literal[
    "missing", "bucket", "denied", "conflict", "region", "clock",
    "credentials", "range", "name", "unsupported", "retryable", "other",
]  # fmt: skip

RETRYABLE_STATUS = frozenset({408, 429, 500, 502, 503, 504})
RETRYABLE_CODES = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable"})
"""S3 responds 400 RequestTimeout to a body that arrives too slowly: worth a retry, unlike other responses of 400."""
REGION_CODES = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
CREDENTIAL_CODES = frozenset(
    {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<(?:Details|Message)>([^<]*)</(?:Details|Message)>")
_NETWORK = re.compile(r"kind: (Connect|Timeout|Interrupted|Request|Decode)\b")
_INVALID_KEY = re.compile(r'invalid path: .*?Path "(.*?)" contained|Path "(.*?)" contained')
_EXPECTED_REGION = re.compile(r"expecting '([a-z0-9-]+)'|<Region>([a-z0-9-]+)</Region>")

PERMISSION = {
    "gs": {"read": "storage.objects.get", "list": "storage.objects.list",
           "write": "storage.objects.create (and storage.objects.delete, to replace one)",
           "delete": "storage.objects.delete"},
    "s3": {"read": "s3:GetObject", "list": "s3:ListBucket", "write": "s3:PutObject", "delete": "s3:DeleteObject"},
}  # fmt: skip
_VERB = {"read": "read", "list": "listed", "write": "written", "delete": "deleted"}


class CorruptResponse(Exception):
    """A body that does not match its headers."""


class ObjectTooShort(Exception):
    """The object ends before the requested range."""


@dataclass(frozen=True)
class Failure:
    """name: short, for counting ("503 SlowDown", "timeout"); message: the store's text; region: of the bucket, if the
    store tells it."""

    kind: FailureKind
    name: str
    message: str
    status: int | None = None
    connection_failed: bool = False
    region: str | None = None

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.kind == "retryable"


def classify_failure(error: Exception) -> Failure:
    """error: an exception of obstore, CorruptResponse or ObjectTooShort."""
    if isinstance(error, CorruptResponse):
        return Failure("retryable", "damaged body", str(error))
    if isinstance(error, ObjectTooShort):
        return Failure("range", "too short", str(error))
    text = str(error)
    head = text.partition("\n\nDebug source")[0].strip()
    status = int(match[1]) if (match := _STATUS.search(head)) else None
    code = match[1].strip() if (match := _CODE.search(head)) else None
    message = "; ".join(dict.fromkeys(sentence for text in _MESSAGE.findall(head) if (sentence := text.strip())))
    if not message and status is None:
        message = head.rpartition(" - ")[2]
    name = " ".join(str(part) for part in (status, code) if part is not None)
    region = (match[1] or match[2]) if (match := _EXPECTED_REGION.search(head)) else None
    kind = _failure_kind(error, head, status, code)
    network = _NETWORK.search(text)
    if kind == "other" and status is None and network is not None:
        connecting = network[1] == "Connect"
        names = {"Connect": "no connection", "Timeout": "timeout", "Interrupted": "connection lost"}
        return Failure("retryable", names.get(network[1], "network failure"), message, connection_failed=connecting)
    return Failure(kind, name or type(error).__name__, message, status, region=region)


def _failure_kind(error: Exception, head: str, status: int | None, code: str | None) -> FailureKind:
    if status in RETRYABLE_STATUS or code in RETRYABLE_CODES:
        return "retryable"
    if code == "NoSuchBucket":
        return "bucket"
    if code == "RequestTimeTooSkewed":
        return "clock"
    if code in REGION_CODES or "incorrectly configured region" in head:
        return "region"
    if code in CREDENTIAL_CODES or status == 401 or "token request" in head:
        return "credentials"
    if type(error).__name__ == "InvalidPathError" or "invalid path: " in head:
        return "name"
    if isinstance(error, FileNotFoundError):
        return "missing"
    if status == 403:
        return "denied"
    if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
        return "conflict"
    if status == 416 or "non-partial response" in head or "Range request not supported" in head:
        return "range"
    if status in (405, 501) or isinstance(error, NotImplementedError) or type(error).__name__ == "NotSupportedError":
        return "unsupported"
    return "other"


def caused_by(error: StorageError) -> FailureKind | None:
    """The kind of failure that an error of `to_storage_error` was raised for."""
    return classify_failure(error.__cause__).kind if isinstance(error.__cause__, Exception) else None


def to_storage_error(
    failure: Failure, *, uri: StorageUri, credentials: Credentials, action: Action, attempts_text: str
) -> StorageError:
    """The error for the user. uri: of the object (or the prefix) that was requested."""
    if failure.kind == "name":
        return _invalid_name_error(failure, uri)
    bucket = f"{uri.scheme}://{uri.bucket}"
    identity = f"credentials: {credentials.description}"
    response = f"response: {failure.name}" + (f", {failure.message}" if failure.message else "")
    error: type[StorageError] = StorageError
    what, cause, fix = f"The object cannot be {_VERB[action]}.", f"{response}; {identity}", ""
    if failure.kind == "missing":
        error, what = ObjectMissing, f"There is no object {uri.name}."
        fix = f"List the objects that exist: {_list_command(uri.parent)}"
    elif failure.kind == "bucket":
        what = f"There is no bucket {uri.bucket}."
        create = f"gcloud storage buckets create {bucket}" if uri.scheme == "gs" else f"aws s3 mb {bucket}"
        fix = f"Correct the name, or create it: {create}"
    elif failure.kind == "conflict":
        error, what = Conflict, "The object is not the version that this write replaces."
        cause, fix = f"another process wrote it; {response}", "Read it again, then decide."
    elif failure.kind == "denied" and uri.scheme in PERMISSION:
        what = f"No permission to {action} objects of the bucket {uri.bucket}."
        hint = ""
        if uri.scheme == "s3" and action == "read":
            hint = " (without s3:ListBucket the response is the same for an object that does not exist)"
        cause = f"{identity}; missing permission: {PERMISSION[uri.scheme][action]}{hint}; {response}"
        fix = _login_command(uri.scheme) if credentials.anonymous else _grant_command(uri, credentials, action)
    elif failure.kind == "credentials" and uri.scheme in PERMISSION:
        what, cause = f"The bucket {uri.bucket} rejects the credentials.", f"{identity}; {response}"
        fix = _login_command(uri.scheme)
    elif failure.kind == "region":
        what = f"The bucket {uri.bucket} is in another region."
        cause = f"it is in {failure.region}; {response}" if failure.region else response
        fix = f"export AWS_REGION={failure.region or '…'}"
        if not failure.region:
            fix += f" with the region of: aws s3api get-bucket-location --bucket {uri.bucket}"
    elif failure.kind == "clock":
        what, cause = "The clock of this machine is wrong: the store rejects the time of the signature.", response
        fix = "Set it: sudo chronyc makestep, or timedatectl set-ntp true"
    elif failure.kind == "range":
        what = "The object does not have the requested bytes."
        cause = f"it is shorter than before, or its server does not support Range requests; {response}"
        fix = "Check the object; for an https server, check that it supports Range requests."
    elif failure.kind == "unsupported":
        error, cause = Unsupported, response
        what = (
            "This store cannot list objects." if action == "list" else f"This store: objects cannot be {_VERB[action]}."
        )
        fix = "Use a gs:// or s3:// URI."
    elif failure.is_retryable:
        what, cause = f"{bucket} did not respond correctly.", f"{attempts_text}; {response}; {identity}"
        fix = (
            "Check the network, the URI and the status page of the service; STOKER_STORAGE_TIMEOUT_S allows more time."
        )
    return error(what, location=uri, cause=cause, fix=fix or None)


def _invalid_name_error(failure: Failure, uri: StorageUri) -> StorageError:
    """obstore refuses a key with an empty part, with . or .., or with a control character, also in a listing."""
    match = _INVALID_KEY.search(failure.message)
    key = match[1] or match[2] if match else uri.key
    bucket = f"{uri.scheme}://{uri.bucket}"
    move_command = "gcloud storage mv" if uri.scheme == "gs" else "aws s3 mv"
    valid_key = "/".join(part for part in key.split("/") if part not in ("", ".", "..")) or "NAME"
    quoted_uris = [shlex.quote(f"{bucket}/{name}") for name in (key, valid_key)]
    return StorageError(
        f"The object {key!r} has a name that cannot be read.",
        location=uri,
        cause="a part of it is empty, . or .., or has a control character; a listing that includes it fails",
        fix=f"rename it, {move_command} {' '.join(quoted_uris)}, or remove it; or name a folder without it",
    )


def _list_command(uri: StorageUri) -> str:
    if uri.scheme == "gs":
        return f"gcloud storage ls {uri}/"
    return f"aws s3 ls {uri}/" if uri.scheme == "s3" else f"curl -I {uri}"


def _login_command(scheme: str) -> str:
    if scheme == "gs":
        return "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=KEY_FILE"
    return "AWS_PROFILE=NAME (aws configure list-profiles), or AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…"


def _grant_command(uri: StorageUri, credentials: Credentials, action: Action) -> str:
    if uri.scheme == "gs":
        role = "roles/storage.objectViewer" if action in ("read", "list") else "roles/storage.objectUser"
        member = credentials.iam_member or "user:YOUR_ADDRESS"
        return f"gcloud storage buckets add-iam-policy-binding gs://{uri.bucket} --member={member} --role={role}"
    resource = f"arn:aws:s3:::{uri.bucket}" + ("" if action == "list" else "/*")
    statement = f'{{"Effect": "Allow", "Action": "{PERMISSION["s3"][action]}", "Resource": "{resource}"}}'
    return f"Add to a policy of this identity: {statement}"
