"""Environment variables that name data, output, credentials or a cluster: whether they exist, are well formed and point
somewhere.

They are set by platforms (Vertex AI, SageMaker, Slurm), by Dockerfiles and by hand, and a wrong one is noticed late: a
path that does not exist, quotes that docker's --env-file kept, a name with a typing error, which is silently ignored.
Values of variables whose name says that they are secret are never shown. Which variables is in
`knowledge/variables.toml`; reads and writes of buckets are tried by `access.py`.
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

from stoker import regular_files
from stoker.errors import ConfigError, nearest
from stoker.findings.finding import Finding, Severity
from stoker.knowledge import read_toml
from stoker.preflight.access import check_readable, check_writable
from stoker.preflight.catalog import describe
from stoker.secrets import mask_secrets
from stoker.storage.uri import WRITABLE_SCHEMES, is_uri, parse_uri

MAX_SHOWN = 200
"""Characters of a value."""
MAX_KEY_BYTES = 2**22
"""Of a file with keys or certificates; a bundle of all authorities has 0.3 MB."""


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
    title = f"{'no other variable' if others else 'no variable'} names data, output or credentials"
    evidence = "the environment of this process"
    if fine:
        title = f"{len(fine)} variables are well formed and point somewhere" if len(fine) > 1 else fine[0].title
        evidence = "; ".join(f"{finding.place}: {finding.evidence_text}" for finding in fine)
    return [*others, describe("variables", title=title, evidence=evidence)]


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
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            is_quoted = text.strip()[:1] in "'\"" or '\\"' in text
            fix = "write the JSON without quotes around it and without backslashes" if is_quoted else "correct the JSON"
            yield describe("variable_json", name, severity=severity, name=name, error=error, fix=fix)
            continue
        if name in ("TF_CONFIG", "CLUSTER_SPEC") and (problem := _cluster_problem(value)):
            yield describe("variable_cluster", name, name=name, problem=problem)
        else:
            yield _fine(name, "is well formed", "JSON")


def _cluster_problem(spec: object) -> str:
    """What is wrong with TF_CONFIG or CLUSTER_SPEC, the hosts of each kind of task and which of them this process is;
    empty: nothing. Who is reachable: `network.py`."""
    if not isinstance(spec, dict):
        return f"it is {_quoted(spec)}, not a JSON object"
    cluster, task = spec.get("cluster"), spec.get("task") or {}
    if not cluster:  # an empty TF_CONFIG of a single process
        return ""
    if not isinstance(cluster, dict):
        return f"`cluster` is {_quoted(cluster)}, which does not name lists of host:port"
    for name, hosts in cluster.items():
        if not isinstance(hosts, list | dict):
            return f"{_quoted(name)} of `cluster` is {_quoted(hosts)}, not a list of host:port"
    if not isinstance(task, dict):
        return f"`task` is {_quoted(task)}, not an object with type and index"
    kind = task.get("type", "worker")
    if not isinstance(kind, str):
        return f"the type of `task` is {_quoted(kind)}"
    try:
        index = int(task.get("index", 0))
    except (TypeError, ValueError, OverflowError):
        return f"the index of `task` is {_quoted(task['index'])}"
    if kind not in cluster:  # the evaluator is not part of the cluster, in TensorFlow's own words
        choices = ", ".join(map(_quoted, cluster))
        problem = f"`task` is of type {_quoted(kind)}, which `cluster` does not have ({choices})"
        return "" if kind == "evaluator" else problem
    count = len(cluster[kind])
    return "" if 0 <= index < count else f"`task` is {kind} {index}, but `cluster` has {count} of them"


def _check_files(env: Mapping[str, str]) -> Iterator[Finding]:
    for name, row in TABLE.files.items():
        value = env.get(name, "")
        if not value or value == os.devnull:
            continue
        if odd := _odd_value(name, value):
            yield odd
            continue
        path = Path(value)
        try:
            path = path.expanduser()
            text = regular_files.read_text(path, errors="replace", max_bytes=MAX_KEY_BYTES)
        except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
            more = " and run: gcloud auth application-default login" if row.google else ""
            more += "" if path.is_absolute() else f"; it is relative to {Path.cwd()}"
            reason = getattr(error, "strerror", None) or error
            yield describe(
                "variable_credentials/unreadable",
                name,
                severity=row.severity,
                name=name,
                value=_shown(value),
                reason=reason,
                more=more,
            )
            continue
        problem = _google_key_problem(text) if row.google else "" if text.strip() else "it is empty"
        if problem:
            create = "gcloud iam service-accounts keys create KEY_FILE --iam-account=ACCOUNT"
            fix = create if row.google else f"unset {name}"
            yield describe(
                "variable_credentials/empty",
                name,
                severity=row.severity,
                name=name,
                path=path,
                problem=problem,
                fix=fix,
            )
        else:
            yield _fine(name, "points to a readable file", str(path))


def _google_key_problem(text: str) -> str:
    try:
        key = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return "it is not a JSON object"
    kind = str(key.get("type", "service_account"))
    missing = [field for field in TABLE.google_key.get(kind, ()) if not key.get(field)]
    return f"type {kind}, without {', '.join(missing)}" if missing else ""


def _check_aws_keys(env: Mapping[str, str]) -> Iterator[Finding]:
    pair = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    (key, secret), token = (env.get(name, "") for name in pair), env.get("AWS_SESSION_TOKEN")
    if bool(key) != bool(secret):
        have, lack = pair if key else pair[::-1]
        yield describe("variable_aws_keys/one", have, have=have, lack=lack)
    elif key != key.strip() or secret != secret.strip():
        yield describe("variable_aws_keys/space", pair[0])
    elif key.startswith("ASIA") and not token:
        yield describe("variable_aws_keys/temporary", pair[0])
    elif key.startswith("AKIA") and token:
        yield describe("variable_aws_keys/permanent", "AWS_SESSION_TOKEN")
    expiration, place = env.get("AWS_CREDENTIAL_EXPIRATION", ""), "AWS_CREDENTIAL_EXPIRATION"
    try:
        expires = datetime.fromisoformat(expiration)
    except ValueError:
        return
    now = datetime.now(UTC)
    hours = ((expires if expires.tzinfo else expires.replace(tzinfo=UTC)) - now).total_seconds() / 3600
    if hours <= 0:
        yield describe("variable_aws_keys/expired", place, expiration=expiration)
    else:
        yield describe("variable_aws_keys/ends", place, hours=hours)


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
    is_used = re.fullmatch(TABLE.used_output, name) is not None
    if odd := _odd_value(name, value):
        return odd
    if is_uri(value):
        try:
            uri = parse_uri(value)
        except ConfigError as error:
            severity: Severity = "blocker" if is_used else "warning"
            problem, fix = error.what.removesuffix("."), error.fix or ""
            return describe(
                "variable_uri", name, severity=severity, name=name, problem=problem, value=_shown(value), fix=fix
            )
        if not contact or uri.scheme not in WRITABLE_SCHEMES:
            return _fine(name, "is a well-formed URI", f"{_shown(value)}; it was not requested")
    is_output = re.fullmatch(TABLE.output, name) is not None
    [tried] = check_writable(value, place=name) if is_output else check_readable(value, place=name)
    severity = "warning" if tried.severity == "blocker" and not is_used else tried.severity
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


def _quoted(value: object) -> str:
    """A value of JSON, with lone surrogates escaped."""
    return _shown(repr(value))


def _shown(value: str) -> str:
    """A value without secrets, of bounded length."""
    masked = mask_secrets(value)
    return masked if len(masked) <= MAX_SHOWN else f"{masked[:MAX_SHOWN]}…"
