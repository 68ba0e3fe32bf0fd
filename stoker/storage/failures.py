"""What a request to a bucket ended with: the kind of failure, whether it may pass, and the message for the user.

obstore gives a class, and all else as text: the status, the store's own XML, the kind of a network failure. They are
read here and nowhere else. A header such as Retry-After is not in it.
"""

import re
import shlex
from dataclasses import dataclass
from typing import Literal

from stoker.errors import Conflict, ObjectMissing, StorageError, Unsupported
from stoker.storage.credentials import Identity
from stoker.storage.uri import Address

Action = Literal["read", "list", "write", "delete"]
Kind = Literal[
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

PASSING = frozenset({408, 429, 500, 502, 503, 504})
PASSING_CODES = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable"})
"""S3 answers 400 RequestTimeout when a body came too slowly: worth another try, other than the rest of 400."""
REGION_CODES = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
CREDENTIAL_CODES = frozenset(
    {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([^<]*?)\s*</Code>")
_SAID = re.compile(r"<(?:Details|Message)>\s*([^<]*?)\s*</(?:Details|Message)>")
_NETWORK = re.compile(r"kind: (Connect|Timeout|Interrupted|Request|Decode)\b")
_ODD_KEY = re.compile(r'invalid path: .*?Path "(.*?)" contained|Path "(.*?)" contained')
_EXPECTED_REGION = re.compile(r"expecting '([a-z0-9-]+)'|<Region>([a-z0-9-]+)</Region>")

PERMISSION = {
    "gs": {"read": "storage.objects.get", "list": "storage.objects.list",
           "write": "storage.objects.create (and storage.objects.delete, to replace one)",
           "delete": "storage.objects.delete"},
    "s3": {"read": "s3:GetObject", "list": "s3:ListBucket", "write": "s3:PutObject", "delete": "s3:DeleteObject"},
}  # fmt: skip
_VERB = {"read": "read", "list": "listed", "write": "written", "delete": "deleted"}


class Damaged(Exception):
    """A body that is not what its headers promised."""


class TooShort(Exception):
    """The object ends before the range that was asked for."""


@dataclass(frozen=True)
class Failure:
    """name: short, for counting ("503 SlowDown", "timeout"); said: the store's own words; region: where the bucket is,
    where the store says so."""

    kind: Kind
    name: str
    said: str
    status: int | None = None
    unconnected: bool = False
    region: str | None = None

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.kind == "passing"


def read_failure(error: Exception) -> Failure:
    """error: what obstore raised, Damaged or TooShort."""
    if isinstance(error, Damaged):
        return Failure("passing", "damaged body", str(error))
    if isinstance(error, TooShort):
        return Failure("range", "too short", str(error))
    text = str(error)
    head = text.partition("\n\nDebug source")[0].strip()
    status = int(found[1]) if (found := _STATUS.search(head)) else None
    code = found[1] if (found := _CODE.search(head)) else None
    said = "; ".join(dict.fromkeys(words for words in _SAID.findall(head) if words))
    if not said and status is None:
        said = head.rpartition(" - ")[2]
    name = " ".join(str(part) for part in (status, code) if part is not None)
    region = (found[1] or found[2]) if (found := _EXPECTED_REGION.search(head)) else None
    kind = _kind(error, head, status, code)
    network = _NETWORK.search(text)
    if kind == "other" and status is None and network is not None:
        connecting = network[1] == "Connect"
        names = {"Connect": "no connection", "Timeout": "timeout", "Interrupted": "connection lost"}
        return Failure("passing", names.get(network[1], "network failure"), said, unconnected=connecting)
    return Failure(kind, name or type(error).__name__, said, status, region=region)


def _kind(error: Exception, head: str, status: int | None, code: str | None) -> Kind:
    if status in PASSING or code in PASSING_CODES:
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


def explain(failure: Failure, *, address: Address, identity: Identity, action: Action, tried: str) -> StorageError:
    """The error for the user. address: of the object (or the prefix) that was asked for."""
    bucket = f"{address.scheme}://{address.bucket}"
    of_cloud = address.scheme in PERMISSION
    who = f"we are {identity.text}"
    said = f"the store says: {failure.name}" + (f", {failure.said}" if failure.said else "")
    if failure.kind == "missing":
        return ObjectMissing(f"There is no object {address.name}.", place=address, cause=f"{said}; {who}",
                             fix=f"See what there is: {_list_command(address.parent)}")  # fmt: skip
    if failure.kind == "bucket":
        make = f"gcloud storage buckets create {bucket}" if address.scheme == "gs" else f"aws s3 mb {bucket}"
        return StorageError(f"There is no bucket {address.bucket}.", place=address, cause=f"{said}; {who}",
                            fix=f"Mend the name, or make it: {make}")  # fmt: skip
    if failure.kind == "conflict":
        return Conflict("The object is not what this write was to replace.", place=address,
                        cause=f"somebody else wrote it; {said}", fix="Read it again, then decide.")  # fmt: skip
    if failure.kind == "denied" and of_cloud:
        permission = PERMISSION[address.scheme][action]
        hidden = ""
        if address.scheme == "s3" and action == "read":
            hidden = "; without s3:ListBucket an object that does not exist is refused in the same words"
        return StorageError(
            f"The bucket {address.bucket} does not let this be {_VERB[action]}.",
            place=address,
            cause=f"{who}, which lacks {permission}{hidden}; {said}",
            fix=_log_in(address.scheme) if identity.anonymous else _grant(address, identity, action),
        )
    if failure.kind == "credentials" and of_cloud:
        return StorageError(f"The bucket {address.bucket} does not take our credentials.", place=address,
                            cause=f"{who}; {said}", fix=_log_in(address.scheme))  # fmt: skip
    if failure.kind == "region":
        where = f"it is in {failure.region}; " if failure.region else ""
        fix = f"export AWS_REGION={failure.region}" if failure.region else (
            f"export AWS_REGION=… as this says: aws s3api get-bucket-location --bucket {address.bucket}")  # fmt: skip
        return StorageError(f"The bucket {address.bucket} is in another region than was asked.", place=address,
                            cause=f"{where}{said}", fix=fix)  # fmt: skip
    if failure.kind == "clock":
        return StorageError(
            "This machine's clock is wrong: the store takes no signature of another hour.",
            place=address,
            cause=said,
            fix="Set it: sudo chronyc makestep, or timedatectl set-ntp true",
        )
    if failure.kind == "range":
        return StorageError("The object does not have the bytes that were asked for.", place=address,
                            cause=f"it is shorter than it was, or its server sends no parts of objects; {said}",
                            fix="Check the object; of an https server, that it answers Range requests.")  # fmt: skip
    if failure.kind == "name":
        return _explain_name(failure, address)
    if failure.kind == "unsupported":
        how = {"list": "list what it has", "read": "be read so", "write": "be written so", "delete": "delete"}[action]
        return Unsupported(f"This store cannot {how}.", place=address, cause=said, fix="Use a gs:// or s3:// address.")
    if failure.passes:
        return StorageError(f"{bucket} did not answer as it should.", place=address, cause=f"{tried}; {said}; {who}",
                            fix="Check the network, the address and the service's status page; "
                            "STOKER_STORAGE_TIMEOUT_S allows more time.")  # fmt: skip
    return StorageError(f"The object cannot be {_VERB[action]}.", place=address, cause=f"{said}; {who}")


def _explain_name(failure: Failure, address: Address) -> StorageError:
    """obstore refuses a key with an empty part, with . or .., or with a control character, and a list that has one."""
    found = _ODD_KEY.search(failure.said)
    key = found[1] or found[2] if found else address.key
    bucket = f"{address.scheme}://{address.bucket}"
    move = "gcloud storage mv" if address.scheme == "gs" else "aws s3 mv"
    plain = "/".join(part for part in key.split("/") if part not in ("", ".", "..")) or "NAME"
    ends = [shlex.quote(f"{bucket}/{name}") for name in (key, plain)]
    return StorageError(
        f"The object {key!r} has a name that cannot be read.",
        place=address,
        cause="a part of it is empty, . or .., or has a control character; that keeps all that is listed with it from"
        " being listed",
        fix=f"rename it, {move} {' '.join(ends)}, or remove it; or name a folder that it is not in",
    )


def _list_command(address: Address) -> str:
    if address.scheme == "gs":
        return f"gcloud storage ls {address}/"
    return f"aws s3 ls {address}/" if address.scheme == "s3" else f"curl -I {address}"


def _log_in(scheme: str) -> str:
    if scheme == "gs":
        return "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=KEY_FILE"
    return "AWS_PROFILE=NAME (aws configure list-profiles), or AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…"


def _grant(address: Address, identity: Identity, action: Action) -> str:
    if address.scheme == "gs":
        role = "roles/storage.objectViewer" if action in ("read", "list") else "roles/storage.objectUser"
        member = identity.member or "user:YOUR_ADDRESS"
        return f"gcloud storage buckets add-iam-policy-binding gs://{address.bucket} --member={member} --role={role}"
    resource = f"arn:aws:s3:::{address.bucket}" + ("" if action == "list" else "/*")
    statement = f'{{"Effect": "Allow", "Action": "{PERMISSION["s3"][action]}", "Resource": "{resource}"}}'
    return f"Add to a policy of that identity: {statement}"
