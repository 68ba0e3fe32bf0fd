"""What a request to a bucket ended with: the kind of failure, whether it may pass, and the message for the user.

obstore gives a class, and all else as text: the status, the store's own XML, the kind of a network failure. They are
read here and nowhere else. A header such as Retry-After is not in it.
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
    "missing",
    "bucket",
    "denied",
    "conflict",
    "region",
    "clock",
    "credentials",
    "range",
    "name",
    "unsupported",
    "passing",
    "other",
]

RETRYABLE_STATUS = frozenset({408, 429, 500, 502, 503, 504})
RETRYABLE_CODES = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable"})
"""S3 answers 400 RequestTimeout when a body came too slowly: worth another try, other than the rest of 400."""
REGION_CODES = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
CREDENTIAL_CODES = frozenset(
    {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([^<]*?)\s*</Code>")
_MESSAGE = re.compile(r"<(?:Details|Message)>\s*([^<]*?)\s*</(?:Details|Message)>")
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
    """A body that is not what its headers promised."""


class ObjectTooShort(Exception):
    """The object ends before the range that was asked for."""


@dataclass(frozen=True)
class Failure:
    """name: short, for counting ("503 SlowDown", "timeout"); said: the store's own words; region: where the bucket is,
    where the store says so."""

    kind: FailureKind
    name: str
    message: str
    status: int | None = None
    connection_failed: bool = False
    region: str | None = None

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.kind == "passing"


def classify_failure(error: Exception) -> Failure:
    """error: what obstore raised, Damaged or TooShort."""
    if isinstance(error, CorruptResponse):
        return Failure("passing", "damaged body", str(error))
    if isinstance(error, ObjectTooShort):
        return Failure("range", "too short", str(error))
    text = str(error)
    head = text.partition("\n\nDebug source")[0].strip()
    status = int(match[1]) if (match := _STATUS.search(head)) else None
    code = match[1] if (match := _CODE.search(head)) else None
    message = "; ".join(dict.fromkeys(sentence for sentence in _MESSAGE.findall(head) if sentence))
    if not message and status is None:
        message = head.rpartition(" - ")[2]
    name = " ".join(str(part) for part in (status, code) if part is not None)
    region = (match[1] or match[2]) if (match := _EXPECTED_REGION.search(head)) else None
    kind = _failure_kind(error, head, status, code)
    network = _NETWORK.search(text)
    if kind == "other" and status is None and network is not None:
        connecting = network[1] == "Connect"
        names = {"Connect": "no connection", "Timeout": "timeout", "Interrupted": "connection lost"}
        return Failure("passing", names.get(network[1], "network failure"), message, connection_failed=connecting)
    return Failure(kind, name or type(error).__name__, message, status, region=region)


def _failure_kind(error: Exception, head: str, status: int | None, code: str | None) -> FailureKind:
    if status in RETRYABLE_STATUS or code in RETRYABLE_CODES:
        return "passing"
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


def to_storage_error(
    failure: Failure, *, uri: StorageUri, credentials: Credentials, action: Action, attempts_text: str
) -> StorageError:
    """The error for the user. address: of the object (or the prefix) that was asked for."""
    bucket = f"{uri.scheme}://{uri.bucket}"
    is_cloud = uri.scheme in PERMISSION
    credentials_text = f"we are {credentials.description}"
    store_message = f"the store says: {failure.name}" + (f", {failure.message}" if failure.message else "")
    if failure.kind == "missing":
        return ObjectMissing(f"There is no object {uri.name}.", location=uri, cause=f"{store_message}; {credentials_text}",
                             fix=f"See what there is: {_list_command(uri.parent)}")  # fmt: skip
    if failure.kind == "bucket":
        create_command = f"gcloud storage buckets create {bucket}" if uri.scheme == "gs" else f"aws s3 mb {bucket}"
        return StorageError(f"There is no bucket {uri.bucket}.", location=uri, cause=f"{store_message}; {credentials_text}",
                            fix=f"Mend the name, or make it: {create_command}")  # fmt: skip
    if failure.kind == "conflict":
        return Conflict("The object is not what this write was to replace.", location=uri,
                        cause=f"somebody else wrote it; {store_message}", fix="Read it again, then decide.")  # fmt: skip
    if failure.kind == "denied" and is_cloud:
        permission = PERMISSION[uri.scheme][action]
        hint = ""
        if uri.scheme == "s3" and action == "read":
            hint = "; without s3:ListBucket an object that does not exist is refused in the same words"
        return StorageError(
            f"The bucket {uri.bucket} does not let this be {_VERB[action]}.",
            location=uri,
            cause=f"{credentials_text}, which lacks {permission}{hint}; {store_message}",
            fix=_login_command(uri.scheme) if credentials.anonymous else _grant_command(uri, credentials, action),
        )
    if failure.kind == "credentials" and is_cloud:
        return StorageError(f"The bucket {uri.bucket} does not take our credentials.", location=uri,
                            cause=f"{credentials_text}; {store_message}", fix=_login_command(uri.scheme))  # fmt: skip
    if failure.kind == "region":
        region_text = f"it is in {failure.region}; " if failure.region else ""
        fix = f"export AWS_REGION={failure.region}" if failure.region else (
            f"export AWS_REGION=… as this says: aws s3api get-bucket-location --bucket {uri.bucket}")  # fmt: skip
        return StorageError(f"The bucket {uri.bucket} is in another region than was asked.", location=uri,
                            cause=f"{region_text}{store_message}", fix=fix)  # fmt: skip
    if failure.kind == "clock":
        return StorageError(
            "This machine's clock is wrong: the store takes no signature of another hour.",
            location=uri,
            cause=store_message,
            fix="Set it: sudo chronyc makestep, or timedatectl set-ntp true",
        )
    if failure.kind == "range":
        return StorageError("The object does not have the bytes that were asked for.", location=uri,
                            cause=f"it is shorter than it was, or its server sends no parts of objects; {store_message}",
                            fix="Check the object; of an https server, that it answers Range requests.")  # fmt: skip
    if failure.kind == "name":
        return _invalid_name_error(failure, uri)
    if failure.kind == "unsupported":
        denied_verb = {"list": "list what it has", "read": "be read so", "write": "be written so", "delete": "delete"}[
            action
        ]
        return Unsupported(
            f"This store cannot {denied_verb}.", location=uri, cause=store_message, fix="Use a gs:// or s3:// address."
        )
    if failure.is_retryable:
        return StorageError(f"{bucket} did not answer as it should.", location=uri, cause=f"{attempts_text}; {store_message}; {credentials_text}",
                            fix="Check the network, the address and the service's status page; "
                            "STOKER_STORAGE_TIMEOUT_S allows more time.")  # fmt: skip
    return StorageError(
        f"The object cannot be {_VERB[action]}.", location=uri, cause=f"{store_message}; {credentials_text}"
    )


def _invalid_name_error(failure: Failure, uri: StorageUri) -> StorageError:
    """obstore refuses a key with an empty part, with . or .., or with a control character, and a list that has one."""
    match = _INVALID_KEY.search(failure.message)
    key = match[1] or match[2] if match else uri.key
    bucket = f"{uri.scheme}://{uri.bucket}"
    move_command = "gcloud storage mv" if uri.scheme == "gs" else "aws s3 mv"
    valid_key = "/".join(part for part in key.split("/") if part not in ("", ".", "..")) or "NAME"
    quoted_uris = [shlex.quote(f"{bucket}/{name}") for name in (key, valid_key)]
    return StorageError(
        f"The object {key!r} has a name that cannot be read.",
        location=uri,
        cause="a part of it is empty, . or .., or has a control character; that keeps all that is listed with it from"
        " being listed",
        fix=f"rename it, {move_command} {' '.join(quoted_uris)}, or remove it; or name a folder that it is not in",
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
    return f"Add to a policy of that identity: {statement}"
