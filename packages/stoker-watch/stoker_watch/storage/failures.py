"""Failures of requests to a bucket: the kind of failure, whether and when to retry, and the message for the user.

obstore gives an exception class, and everything else as text: the status, the store's XML, the kind of a network
failure. Only this module parses that text. It does not include headers such as Retry-After. Codes and messages are in
`knowledge/storage_failures.toml`.

Waits have full jitter (AWS Architecture Blog, "Exponential Backoff and Jitter", 2015); only the total time ends a
request. obstore's own retries are used for parts of uploads only (`clients.py`): they do not retry damaged bodies, and
repeat conditional writes.
"""

import functools
import os
import random
import re
import shlex
import time
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from stoker_watch.errors import ConfigError, Conflict, ObjectMissing, StorageError, Unsupported
from stoker_watch.knowledge import read_toml
from stoker_watch.storage.clients import Credentials
from stoker_watch.storage.uri import StorageUri

Action = Literal["read", "list", "write", "delete"]
FailureKind = Literal[
    "missing", "bucket", "denied", "conflict", "region", "unknown_region", "clock",
    "credentials", "range", "name", "unsupported", "retryable", "other",
]  # fmt: skip

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<(?:Details|Message)>([^<]*)</(?:Details|Message)>")
_NETWORK = re.compile(r"kind: (Connect|Timeout|Interrupted|Request|Decode)\b")
_INVALID_KEY = re.compile(r'invalid path: .*?Path "(.*?)" contained|Path "(.*?)" contained')
_EXPECTED_REGION = re.compile(r"expecting '([a-z0-9-]+)'|<Region>([a-z0-9-]+)</Region>")

BACKOFF_BASE_S, BACKOFF_MAX_S = 0.1, 20.0
"""The n-th wait is uniform between 0 and min(BACKOFF_MAX_S, BACKOFF_BASE_S · 2ⁿ)."""
CONNECT_TIMEOUT_DIVISOR = 6
"""If a store has never responded, failures to connect are reported after 1/6 of the time, as for a wrong endpoint."""

_DONE = {"read": "read", "list": "listed", "write": "written", "delete": "deleted"}
_ERRORS: dict[FailureKind, type[StorageError]] = {
    "missing": ObjectMissing,
    "conflict": Conflict,
    "unsupported": Unsupported,
}
_RANDOM = random.Random()


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    cause: str
    fix: str = ""


class _Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Commands for a kind of store, by the scheme of its URIs."""

    list: str
    create: str = ""
    move: str = ""
    login: str = ""
    grant: str = ""
    permissions: dict[Action, str] = {}
    roles: dict[Action, str] = {}


class _Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a refusal is repaired whose response tells more than its kind."""

    fix: str
    pattern: str = ""
    scheme: str = ""
    kind: str = ""
    actions: tuple[Action, ...] = ("read", "list", "write", "delete")
    unless: str = ""


class _Knowledge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """knowledge/storage_failures.toml."""

    retryable_statuses: frozenset[int]
    codes: dict[str, FailureKind]
    messages: dict[FailureKind, _Message]
    stores: dict[str, _Store]
    refusals: list[_Refusal]


@functools.cache
def _knowledge() -> _Knowledge:
    return msgspec.convert(read_toml("storage_failures.toml"), _Knowledge)


class CorruptResponse(Exception):
    """A body that does not match its headers."""


class ObjectTooShort(Exception):
    """The object ends before the requested range."""


@dataclass(frozen=True)
class Failure:
    """name: short, for counting ("503 SlowDown", "timeout"); message: the store's; region: of the bucket, if told."""

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
    knowledge, name = _knowledge(), type(error).__name__
    if status in knowledge.retryable_statuses:
        return "retryable"
    if code in knowledge.codes:
        return knowledge.codes[code]
    signs: dict[FailureKind, bool] = {
        "region": "incorrectly configured region" in head,
        "credentials": status == 401 or "token request" in head,
        "name": name == "InvalidPathError" or "invalid path: " in head,
        "missing": isinstance(error, FileNotFoundError),
        "denied": status == 403,
        "conflict": name in ("AlreadyExistsError", "PreconditionError"),
        "range": status == 416 or "non-partial response" in head or "Range request not supported" in head,
        "unsupported": status in (405, 501) or isinstance(error, NotImplementedError) or name == "NotSupportedError",
    }
    return next((kind for kind, holds in signs.items() if holds), "other")


def caused_by(error: StorageError) -> FailureKind | None:
    """The kind of failure that an error of `to_storage_error` was raised for."""
    return classify_failure(error.__cause__).kind if isinstance(error.__cause__, Exception) else None


def to_storage_error(
    failure: Failure, uri: StorageUri, credentials: Credentials, action: Action, *, attempts_text: str
) -> StorageError:
    """The error for the user. uri: of the object (or the prefix) that was requested."""
    knowledge, root = _knowledge(), f"{uri.scheme}://{uri.bucket}"
    store = knowledge.stores.get(uri.scheme, knowledge.stores["https"])
    kind = failure.kind
    if kind == "region" and failure.region is None:
        kind = "unknown_region"
    if kind in ("denied", "credentials") and not store.permissions:
        kind = "other"
    match = _INVALID_KEY.search(failure.message)
    key = (match[1] or match[2]) if match else uri.key
    valid_key = "/".join(part for part in key.split("/") if part not in ("", ".", "..")) or "NAME"
    permission = missing = store.permissions.get(action, "")
    if permission == "s3:GetObject":
        missing += " (without s3:ListBucket the response is the same for an object that does not exist)"
    words = {
        "action": action,
        "done": _DONE[action],
        "name": uri.name,
        "key": repr(key),
        "bucket": uri.bucket,
        "root": root,
        "uri_parent": uri.parent,
        "region": failure.region,
        "attempts": attempts_text,
        "identity": f"credentials: {credentials.description}",
        "response": f"response: {failure.name}" + (f", {failure.message}" if failure.message else ""),
        "permission": permission,
        "missing": missing,
        "role": store.roles.get(action),
        "member": credentials.iam_member or "user:YOUR_ADDRESS",
        "resource": uri.bucket + ("" if action == "list" else "/*"),
        "from_to": " ".join(shlex.quote(f"{root}/{name}") for name in (key, valid_key)),
    }
    commands = {name: getattr(store, name).format(**words) for name in ("list", "create", "move", "login", "grant")}
    if credentials.anonymous:
        commands["grant"] = commands["login"]
    message = knowledge.messages[kind]
    what, cause, fix = (text.format(**words, **commands) for text in (message.what, message.cause, message.fix))
    profile = os.environ.get("AWS_PROFILE")
    session = f"aws sso login --profile {profile}" if profile else "aws sso login, or fetch new temporary keys"
    for row in knowledge.refusals:
        is_case = row.scheme in ("", uri.scheme) and row.kind in ("", kind) and action in row.actions
        if is_case and row.unless not in os.environ and re.search(row.pattern, cause, re.IGNORECASE):
            fix = row.fix.format(fix=fix, session=session, bucket=uri.bucket)
            break
    return _ERRORS.get(kind, StorageError)(what, location=uri, cause=cause, fix=fix or None)


@dataclass(frozen=True)
class Timeouts:
    """Times in seconds. total_s: of a request with all its retries (STOKER_STORAGE_TIMEOUT_S), of which an attempt
    counts for at most twice `stall_s`: a process that was stopped, or a machine that slept, has not waited."""

    total_s: float = 120.0

    @property
    def stall_s(self) -> float:
        """Time without a byte after which a connection is closed and the request retried."""
        return self.total_s / 8

    @classmethod
    def from_environment(cls) -> "Timeouts":
        text = os.environ.get("STOKER_STORAGE_TIMEOUT_S")
        if not text:
            return cls()
        try:
            total_s = float(text)
        except ValueError:
            total_s = 0.0
        if not 0.0 < total_s < 86400.0:
            choices, fix = ["seconds, above 0 and below 86400"], f"Unset it for the default, {cls.total_s:g}."
            raise ConfigError(f"STOKER_STORAGE_TIMEOUT_S is {text!r}.", choices=choices, fix=fix)
        return cls(total_s)


@dataclass
class RequestCounters:
    """What was asked of a store, about: threads do not wait for each other to count."""

    requests: int = 0
    """With retries and hedges."""
    retries: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """By name: "503 SlowDown", "timeout", …; includes failures that a retry solved."""
    has_responded: bool = False
    """Whether the store ever responded, even with an error."""


class RetryState:
    """One request and its retries."""

    def __init__(self, timeouts: Timeouts, counters: RequestCounters) -> None:
        self._timeouts, self._counters = timeouts, counters
        self._start_s = self._attempt_start_s = time.monotonic()
        self._spent_s = 0.0
        self.failures: list[Failure] = []
        counters.requests += 1

    def next_wait_s(self, failure: Failure) -> float | None:
        """Seconds to wait before the next attempt; None: give up."""
        self.failures.append(failure)
        counters = self._counters
        counters.has_responded = counters.has_responded or failure.status is not None
        counters.failures[failure.name] = counters.failures.get(failure.name, 0) + 1
        if not failure.is_retryable:
            return None
        total_s = self._timeouts.total_s
        if failure.connection_failed and not counters.has_responded:
            total_s /= CONNECT_TIMEOUT_DIVISOR
        now = time.monotonic()
        self._spent_s += min(now - self._attempt_start_s, 2 * self._timeouts.stall_s)
        remaining_s = total_s - self._spent_s
        # Not the global generator of `random`, whose numbers a training may use.
        wait_s = _RANDOM.uniform(0.0, min(BACKOFF_MAX_S, BACKOFF_BASE_S * 2.0 ** (len(self.failures) - 1)))
        if wait_s >= remaining_s:
            return None
        self._spent_s += wait_s
        self._attempt_start_s = now + wait_s
        counters.requests += 1
        counters.retries += 1
        return wait_s

    def describe(self) -> str:
        """The attempts, for the message."""
        elapsed_s = time.monotonic() - self._start_s
        names = [failure.name for failure in self.failures]
        kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        return f"tried {len(names)} times in {elapsed_s:.0f} s: {kinds}"
