"""Environment variables that name data, output, credentials or a cluster: whether they are well formed and what they
name is there.

They are set by platforms (Vertex AI, SageMaker, Slurm), by Dockerfiles and by hand, and a wrong one is noticed late: a
path that does not exist, quotes that docker's --env-file kept, a name with a typing error. Secret values are never
shown. The variables are rows of `stoker_watch/knowledge/variables.toml`; `access.py` tries to read and write buckets.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from stoker.preflight.access import check_readable, check_writable
from stoker.preflight.catalog import describe
from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, nearest
from stoker_watch.findings.finding import Finding, Severity
from stoker_watch.knowledge import read_toml
from stoker_watch.secrets import mask_secrets
from stoker_watch.storage.uri import WRITABLE_SCHEMES, is_uri, parse_uri

MAX_SHOWN = 200
"""Characters of a value."""
MAX_KEY_BYTES = 2**22
"""Of a file with keys or certificates; a bundle of all authorities has 0.3 MB."""
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    severity: Severity
    google: bool = False


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stoker: tuple[str, ...]
    internal: tuple[str, ...]
    input: str
    output: str
    used_output: str
    not_ours: str
    numbers: dict[str, float]
    json: dict[str, Severity]
    files: dict[str, _File]
    google_key: dict[str, list[str]]


TABLE = msgspec.convert(read_toml("variables.toml"), _Table)


def check_variables(env: Mapping[str, str] = os.environ, *, contact_stores: bool = True) -> list[Finding]:
    """Every variable that names data, output, credentials or a cluster, and all of stoker's own; those in order are one
    finding. contact_stores: also list or write the buckets that they name."""
    findings = [
        *_check_names(env),
        *_check_json(env),
        *_check_files(env),
        *_check_aws_keys(env),
        *_check_locations(env, contact_stores=contact_stores),
    ]
    fine = [finding for finding in findings if finding.severity == "ok"]
    others = [finding for finding in findings if finding.severity != "ok"]
    title = f"variables in order: {len(fine)}" if fine else "no other variable names data, output or credentials"
    evidence = "; ".join(f"{finding.title} ({finding.evidence_text})" for finding in fine)
    return [*others, describe("variables", title=title, evidence=evidence or "the environment of this process")]


def _fine(name: str, title: str, evidence: str) -> Finding:
    return describe("variables", name, title=f"{name} {title}", evidence=evidence)


def _check_names(env: Mapping[str, str]) -> Iterator[Finding]:
    """Stoker's own variables: typing errors, numbers."""
    for name in sorted(env):
        if name.upper().startswith("STOKER_") and name not in (*TABLE.stoker, *TABLE.internal):
            closest = nearest(name[7:].upper(), [known[7:] for known in TABLE.stoker])
            fix = f"rename it to STOKER_{closest}" if closest else f"unset it; stoker reads {', '.join(TABLE.stoker)}"
            yield describe("variable_unknown", name, name=name, fix=fix)
    for name, high in TABLE.numbers.items():
        text = env.get(name, "")
        try:
            is_valid = not text or 0 <= float(text) < high
        except ValueError:
            is_valid = False
        if not is_valid:
            yield describe("variable_number", name, name=name, value=_shown(text), high=high)


def _check_json(env: Mapping[str, str]) -> Iterator[Finding]:
    for name, severity in TABLE.json.items():
        text = env.get(name, "")
        if not text.strip():
            continue
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            is_quoted = text.strip()[:1] in "'\"" or '\\"' in text
            fix = "write the JSON without quotes around it and without backslashes" if is_quoted else "correct the JSON"
            yield describe("variable_json", name, severity=severity, name=name, error=error, fix=fix)
        else:
            yield _fine(name, "is well formed", "JSON")


def _check_files(env: Mapping[str, str]) -> Iterator[Finding]:
    for name, row in TABLE.files.items():
        value = env.get(name, "")
        if not value or value == os.devnull:
            continue
        if odd := _odd_value(name, value):
            yield odd
            continue
        try:
            text = regular_files.read_text(Path(value).expanduser(), errors="replace", max_bytes=MAX_KEY_BYTES)
            problem = _google_key_problem(text) if row.google else "" if text.strip() else "it is empty"
        except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
            problem = f"it cannot be read: {getattr(error, 'strerror', None) or error}"
        if not problem:
            yield _fine(name, "points to a readable file", value)
            continue
        login = ", and run: gcloud auth application-default login" if row.google else ""
        texts: dict[str, Any] = {"name": name, "value": _shown(value), "problem": problem, "login": login}
        yield describe("variable_credentials", name, severity=row.severity, **texts)


def _google_key_problem(text: str) -> str:
    try:
        key = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return "it is not a JSON object"
    kind = str(key.get("type", "service_account"))
    missing = [field for field in TABLE.google_key.get(kind, ()) if not key.get(field)]
    return f"type {kind}, without {', '.join(missing)}" if missing else ""


def _check_aws_keys(env: Mapping[str, str]) -> Iterator[Finding]:
    key, secret, token = (env.get(name, "") for name in AWS_KEYS)
    if bool(key) != bool(secret):
        have, lack = AWS_KEYS[:2] if key else AWS_KEYS[1::-1]
        yield describe("variable_aws_keys/one", have, have=have, lack=lack)
    elif key != key.strip() or secret != secret.strip():
        yield describe("variable_aws_keys/space", AWS_KEYS[0])
    elif key.startswith("ASIA") and not token:
        yield describe("variable_aws_keys/temporary", AWS_KEYS[0])
    elif key.startswith("AKIA") and token:
        yield describe("variable_aws_keys/permanent", AWS_KEYS[2])
    expiration, place = env.get("AWS_CREDENTIAL_EXPIRATION", ""), "AWS_CREDENTIAL_EXPIRATION"
    try:
        expires = datetime.fromisoformat(expiration)
    except ValueError:
        return
    hours = ((expires if expires.tzinfo else expires.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds() / 3600
    id = "variable_aws_keys/expired" if hours <= 0 else "variable_aws_keys/ends"
    yield describe(id, place, expiration=expiration, hours=hours)


def _check_locations(env: Mapping[str, str], *, contact_stores: bool) -> Iterator[Finding]:
    """All of them at the same time: a store may not answer."""
    locations = [(name, env[name]) for name in sorted(env) if _names_location(name, env[name])]
    with ThreadPoolExecutor(max_workers=max(1, len(locations))) as pool:
        yield from pool.map(lambda pair: _check_location(*pair, contact=contact_stores), locations)


def _names_location(name: str, value: str) -> bool:
    """Whether a variable says where data is or where results go."""
    if not value or re.match(TABLE.not_ours, name) or (os.pathsep in value and not is_uri(value)):
        return False
    if re.fullmatch(TABLE.used_output, name):
        return True
    # Not a flag (`DATA=1`), a name (`DATASET=coco`) or text.
    is_path = "/" in value or "\\" in value or value[0] in "~.$" or (len(value) < 256 and Path(value).exists())
    return is_path and re.fullmatch(f"{TABLE.input}|{TABLE.output}", name) is not None


def _check_location(name: str, value: str, *, contact: bool) -> Finding:
    worst: Severity = "blocker" if re.fullmatch(TABLE.used_output, name) else "warning"
    if odd := _odd_value(name, value):
        return odd
    if is_uri(value):
        try:
            uri = parse_uri(value)
        except ConfigError as error:
            problem, fix = error.what.removesuffix("."), error.fix or ""
            return describe(
                "variable_uri", name, severity=worst, name=name, problem=problem, value=_shown(value), fix=fix
            )
        if not contact or uri.scheme not in WRITABLE_SCHEMES:
            return _fine(name, "is a well-formed URI", f"{_shown(value)}; it was not requested")
    is_output = re.fullmatch(TABLE.output, name) is not None
    [tried] = check_writable(value, place=name) if is_output else check_readable(value, place=name)
    severity = worst if tried.severity == "blocker" else tried.severity
    fix = f"{tried.fix}; or unset {name}" if tried.severity != "ok" and tried.fix else tried.fix
    title = f"{name}: {tried.title[0].lower()}{tried.title[1:]}"
    id = "variable_output" if is_output else "variable_input"
    return describe(id, name, severity=severity, title=title, evidence=tried.evidence_text, fix=fix)


def _odd_value(name: str, value: str) -> Finding | None:
    """A value that no shell would give: quotes of docker's --env-file, a line end, a variable that was not expanded."""
    if value[0] in "'\"" and value[-1] == value[0] and len(value) > 1:
        kind = "quotes"
    elif value != value.strip():
        kind = "space"
    elif re.search(r"\$\{?[A-Za-z_]\w*|\$\(|%\w+%|\{\{", value):
        kind = "variable"
    else:
        return None
    return describe(f"variable_value/{kind}", name, name=name, value=_shown(value))


def _shown(value: str) -> str:
    """A value without secrets, of bounded length."""
    masked = mask_secrets(value)
    return masked if len(masked) <= MAX_SHOWN else f"{masked[:MAX_SHOWN]}…"
