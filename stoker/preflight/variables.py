"""Environment variables that name data, output, credentials or a cluster: whether they exist, are well formed and point
somewhere.

They are set by platforms (Vertex AI, SageMaker, Slurm), by Dockerfiles and by hand, and a wrong one is noticed late: a
path that does not exist, quotes that docker's --env-file kept, a name with a typing error, which is silently ignored.
Values of variables whose name says that they are secret are never shown. Reads and writes of buckets are tried by
`access.py`.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stoker import regular_files
from stoker.errors import ConfigError, nearest
from stoker.preflight.access import check_readable, check_writable
from stoker.preflight.findings import CheckFinding, Severity, make_finding, ok
from stoker.profiling.telemetry.secrets import mask_secrets
from stoker.storage.run_uri import WRITABLE_SCHEMES
from stoker.storage.uri import is_uri, parse_uri

STOKER_VARIABLES = (
    "STOKER_CACHE_DIR", "STOKER_WEIGHTS_DIR", "STOKER_CACHE_LIMIT_GIB", "STOKER_STORAGE_TIMEOUT_S",
    "STOKER_MACHINE_TYPE", "STOKER_ALERT_WEBHOOK", "STOKER_NVTX", "STOKER_HANG_TIMEOUT_S",
)  # fmt: skip
"""What users may set; docs/check-data.md."""
_INTERNAL_VARIABLES = (
    "STOKER_HOOK", "STOKER_ALERT", "STOKER_RUN", "STOKER_TEST_DATA", "STOKER_RANK_REPORTS", "STOKER_RESTART",
    "STOKER_CORES",
)  # fmt: skip
"""Set by stoker's own processes for others, and by its tests."""
_NUMBERS = {"STOKER_STORAGE_TIMEOUT_S": 86400.0, "STOKER_CACHE_LIMIT_GIB": 2.0**40, "STOKER_HANG_TIMEOUT_S": 1e9}
"""Variable → what it must be below, from 0 on (`storage/retry.py`, `data/images/cache_policy.py`, `watchdog.py`)."""

_JSON_VARIABLES = {
    "TF_CONFIG": "blocker", "CLUSTER_SPEC": "blocker", "GOOGLE_SERVICE_ACCOUNT_KEY": "blocker",
    "SM_CHANNELS": "warning", "SM_HOSTS": "warning", "SM_HPS": "warning", "SM_TRAINING_ENV": "warning",
    "SM_RESOURCE_CONFIG": "warning", "SM_INPUT_DATA_CONFIG": "warning", "SM_USER_ARGS": "warning",
}  # fmt: skip
"""Variable with JSON → severity where it is malformed: `stoker train` refuses the first three."""
_GOOGLE_KEY_FILES = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
_CREDENTIAL_FILES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_CA_BUNDLE",
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
)  # fmt: skip
FROM_ENVIRONMENT = "read from the environment"
MAX_SHOWN = 200
"""Characters of a value."""
MAX_KEY_BYTES = 2**22
"""Of a file with keys or certificates; a bundle of all authorities has 0.3 MB."""
_GOOGLE_KEY_FIELDS = {
    "service_account": ("client_email", "private_key"),
    "authorized_user": ("client_id", "client_secret", "refresh_token"),
}

_INPUT = re.compile(
    r"(?:\w+_)?(?:DATA|DATASET|DATASETS|TRAIN|VAL|VALID|TEST|TRAINING_DATA|VALIDATION_DATA|TEST_DATA|INPUT|IMAGES?"
    r"|ANNOTATIONS?|LABELS?|TFRECORDS?)_(?:DIR|DIRECTORY|PATH|ROOT|FOLDER|URI|FILE)|DATA|DATASETS?|SM_CHANNEL_\w+"
)
"""Names of variables that say where data is. AIP_TRAINING_DATA_URI, SM_CHANNEL_TRAINING."""
_OUTPUT = re.compile(
    r"AIP_(?:MODEL|CHECKPOINT|TENSORBOARD_LOG)_DIR|SM_MODEL_DIR|SM_OUTPUT_DIR|SM_OUTPUT_DATA_DIR"
    r"|STOKER_(?:CACHE|WEIGHTS)_DIR|TMPDIR|(?:\w+_)?(?:OUTPUT|OUT|RESULTS?|MODEL|CHECKPOINTS?|CKPT|LOGS?|RUNS?|SAVE|EXPORT)"
    r"_(?:DIR|DIRECTORY|PATH|ROOT|FOLDER|URI)"
)
"""Names of variables that say where results go."""
_USED_OUTPUT = re.compile(r"AIP_(?:MODEL|CHECKPOINT|TENSORBOARD_LOG)_DIR|STOKER_(?:CACHE|WEIGHTS)_DIR|TMPDIR")
"""Those that stoker itself writes to."""
_NOT_OURS = re.compile(r"(?:XDG|LD|PYTHON|GOPATH|JAVA|SSH|DBUS|QT|VSCODE|CONDA|NVIDIA|CUDA|GITHUB|RUNNER|npm)_?")
"""Prefixes of variables of other programs that these patterns would match too."""


def check_variables(env: Mapping[str, str] = os.environ, *, contact_stores: bool = True) -> list[CheckFinding]:
    """Every variable that names data, output, credentials or a cluster, and all of stoker's own; those in order are one
    finding. contact_stores: also list or write the buckets that they name."""
    findings = [
        *_check_names(env),
        *_check_json(env),
        *_check_credential_files(env),
        *_check_aws_keys(env),
        *_check_locations(env, contact_stores=contact_stores),
    ]
    fine = [finding for finding in findings if finding.severity == "ok"]
    others = [finding for finding in findings if finding.severity != "ok"]
    title = "no other variable" if others else "no variable"
    title, evidence = f"{title} names data, output or credentials", "the environment of this process"
    if fine:
        title = f"{len(fine)} variables are well formed and point somewhere" if len(fine) > 1 else fine[0].title
        evidence = "; ".join(f"{finding.place}: {finding.evidence_text}" for finding in fine)
    return [*others, make_finding(id="variables", severity="ok", title=title, evidence=evidence)]


def _check_names(env: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Stoker's own variables: typing errors, numbers."""
    known = (*STOKER_VARIABLES, *_INTERNAL_VARIABLES)
    for name in sorted(env):
        if name.upper().startswith("STOKER_") and name not in known:
            closest = nearest(name[7:].upper(), [known_name[7:] for known_name in STOKER_VARIABLES])
            fix = (
                f"rename it to STOKER_{closest}" if closest else f"unset it; stoker reads {', '.join(STOKER_VARIABLES)}"
            )
            yield make_finding(
                "variable_unknown",
                "warning",
                f"{name} is not a variable of stoker: it is ignored",
                FROM_ENVIRONMENT,
                fix,
                name,
            )
    for name, high in _NUMBERS.items():
        text = env.get(name, "")
        try:
            valid = not text or 0 <= float(text) < high
        except ValueError:
            valid = False
        if not valid:
            title = f"{name} is {_shown(text)!r}, not a number in its range"
            yield make_finding(
                "variable_number",
                "blocker",
                title,
                FROM_ENVIRONMENT,
                f"set a number from 0 to {high:g}, or unset it",
                name,
            )


def _check_json(env: Mapping[str, str]) -> Iterator[CheckFinding]:
    for name, severity in _JSON_VARIABLES.items():
        text = env.get(name, "")
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            quoted = text.strip()[:1] in "'\"" or '\\"' in text
            fix = "write the JSON without quotes around it and without backslashes" if quoted else "correct the JSON"
            yield make_finding(
                "variable_json", _severity(severity), f"{name} is not JSON", str(error), f"{fix}, or unset {name}", name
            )
            continue
        problem = _cluster_problem(value) if name in ("TF_CONFIG", "CLUSTER_SPEC") else ""
        if problem:
            fix = '{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'
            yield make_finding(
                "variable_cluster",
                "blocker",
                f"{name}: {problem}",
                FROM_ENVIRONMENT,
                f"write {fix}, or unset {name}",
                name,
            )
        else:
            yield ok("variables", f"{name} is well formed", "JSON", name)


def _cluster_problem(spec: object) -> str:
    """What is wrong with the description of a cluster; empty: nothing. Who is reachable: `network.py`."""
    if not isinstance(spec, dict):
        return "it is not a JSON object"
    cluster, task = spec.get("cluster"), spec.get("task", {})
    if not cluster:
        return ""  # an empty TF_CONFIG of a single process
    if not isinstance(cluster, dict) or not all(isinstance(hosts, (list, dict)) for hosts in cluster.values()):
        return "`cluster` does not name lists of host:port"
    if not isinstance(task, dict):
        return "`task` is not an object with type and index"
    kind = str(task.get("type", "worker"))
    group = cluster.get(kind)
    if group is None:
        if kind == "evaluator":  # not part of the cluster, in TensorFlow's own words
            return ""
        return f"`task` is of type {kind!r}, which `cluster` does not have ({', '.join(cluster)})"
    try:
        index = int(task.get("index", 0))
    except (TypeError, ValueError):
        return f"the index of `task` is {task.get('index')!r}"
    if not 0 <= index < len(group):
        return f"`task` is {kind} {index}, but `cluster` has {len(group)} of them"
    return ""


def _check_credential_files(env: Mapping[str, str]) -> Iterator[CheckFinding]:
    for name in (*_GOOGLE_KEY_FILES, *_CREDENTIAL_FILES):
        value = env.get(name, "")
        if not value or value == os.devnull:
            continue
        if odd := _odd_value(name, value):
            yield odd
            continue
        is_google = name in _GOOGLE_KEY_FILES
        severity: Severity = "blocker" if is_google or name == "AWS_WEB_IDENTITY_TOKEN_FILE" else "warning"
        path = Path(value)
        try:
            path = path.expanduser()
            text = regular_files.read_text(path, errors="replace", max_bytes=MAX_KEY_BYTES)
        except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
            fix = f"set {name} to an existing file, or unset it"
            if is_google:
                fix += " and run: gcloud auth application-default login"
            if not path.is_absolute():
                fix += f"; it is relative to {Path.cwd()}"
            title = f"{name} points to a file that cannot be read"
            reason = getattr(error, "strerror", None) or error
            yield make_finding("variable_credentials", severity, title, f"{_shown(value)}: {reason}", fix, name)
            continue
        problem = _google_key_problem(text) if is_google else "" if text.strip() else "it is empty"
        if problem:
            fix = (
                "gcloud iam service-accounts keys create KEY_FILE --iam-account=ACCOUNT"
                if is_google
                else f"unset {name}"
            )
            title = f"{name} points to a file without credentials"
            yield make_finding("variable_credentials", severity, title, f"{path}: {problem}", fix, name)
        else:
            yield ok("variables", f"{name} points to a readable file", str(path), name)


def _google_key_problem(text: str) -> str:
    try:
        key: Any = json.loads(text)
        kind = key.get("type", "service_account")
        missing = [field for field in _GOOGLE_KEY_FIELDS.get(kind, ()) if not key.get(field)]
    except (ValueError, AttributeError, TypeError, RecursionError):
        return "it is not a JSON object"
    return f"type {kind}, without {', '.join(missing)}" if missing else ""


def _check_aws_keys(env: Mapping[str, str]) -> Iterator[CheckFinding]:
    key, secret = env.get("AWS_ACCESS_KEY_ID", ""), env.get("AWS_SECRET_ACCESS_KEY", "")
    pair = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    if bool(key) != bool(secret):
        have, lack = pair if key else pair[::-1]
        yield make_finding(
            "variable_aws_keys",
            "warning",
            f"{have} is set without {lack}: both are ignored",
            FROM_ENVIRONMENT,
            f"export {lack}=…",
            have,
        )
    if key and secret:
        if key != key.strip() or secret != secret.strip():
            title = "an AWS key has a space or a line end around it"
            yield make_finding(
                "variable_aws_keys", "blocker", title, FROM_ENVIRONMENT, "export both again without it", pair[0]
            )
        elif key.startswith("ASIA") and not env.get("AWS_SESSION_TOKEN"):
            title = "temporary AWS keys (ASIA…) without AWS_SESSION_TOKEN: every request is refused"
            yield make_finding(
                "variable_aws_keys", "blocker", title, FROM_ENVIRONMENT, "export AWS_SESSION_TOKEN=…", pair[0]
            )
        elif key.startswith("AKIA") and env.get("AWS_SESSION_TOKEN"):
            title = "permanent AWS keys (AKIA…) with an AWS_SESSION_TOKEN of other keys"
            yield make_finding(
                "variable_aws_keys", "warning", title, FROM_ENVIRONMENT, "unset AWS_SESSION_TOKEN", "AWS_SESSION_TOKEN"
            )
    if expiration := env.get("AWS_CREDENTIAL_EXPIRATION", ""):
        try:
            expires = datetime.fromisoformat(expiration)
        except ValueError:
            return
        left_h = (
            (expires if expires.tzinfo else expires.replace(tzinfo=UTC)) - datetime.now(UTC)
        ).total_seconds() / 3600
        if left_h <= 0:
            title, fix = f"the AWS session expired at {expiration}", "aws sso login, then export the keys again"
            yield make_finding(
                "variable_aws_keys", "blocker", title, FROM_ENVIRONMENT, fix, "AWS_CREDENTIAL_EXPIRATION"
            )
        else:
            title = f"the AWS session ends in {left_h:.1f} h, and exported keys are not renewed"
            fix = "use AWS_PROFILE or a role, whose keys are renewed, if the training takes longer"
            yield make_finding(
                "variable_aws_keys", "warning", title, FROM_ENVIRONMENT, fix, "AWS_CREDENTIAL_EXPIRATION"
            )


def _check_locations(env: Mapping[str, str], *, contact_stores: bool) -> Iterator[CheckFinding]:
    """All of them at the same time: a store may not answer."""
    locations = [(name, env[name]) for name in sorted(env) if _names_location(name, env[name])]
    with ThreadPoolExecutor(max_workers=max(1, len(locations))) as pool:
        for findings in pool.map(lambda pair: _check_location(*pair, contact=contact_stores), locations):
            yield from findings


def _names_location(name: str, value: str) -> bool:
    """Whether a variable says where data is or where results go."""
    if not value or _NOT_OURS.match(name) or (os.pathsep in value and not is_uri(value)):
        return False
    if _USED_OUTPUT.fullmatch(name):
        return True
    return (_INPUT.fullmatch(name) or _OUTPUT.fullmatch(name)) is not None and _looks_like_location(value)


def _check_location(name: str, value: str, *, contact: bool) -> list[CheckFinding]:
    is_output, is_used = _OUTPUT.fullmatch(name) is not None, _USED_OUTPUT.fullmatch(name) is not None
    if odd := _odd_value(name, value):
        return [odd]
    if is_uri(value):
        try:
            uri = parse_uri(value)
        except ConfigError as error:
            severity: Severity = "blocker" if is_used else "warning"
            evidence = f"{name}={_shown(value)}"
            return [
                make_finding(
                    "variable_uri", severity, f"{name}: {error.what.removesuffix('.')}", evidence, error.fix or "", name
                )
            ]
        if not contact or uri.scheme not in WRITABLE_SCHEMES:
            return [ok("variables", f"{name} is a well-formed URI", f"{_shown(value)}; it was not requested", name)]
    if is_output:
        return _rated(check_writable(value, place=name), "variable_output", name, is_used=is_used)
    return _rated(check_readable(value, place=name), "variable_input", name, is_used=False)


def _rated(tried: list[CheckFinding], id: str, name: str, *, is_used: bool) -> list[CheckFinding]:
    """The findings of `access`, named after the variable; only what stoker itself uses stops a training."""
    rated = []
    for finding in tried:
        severity: Severity = "warning" if finding.severity == "blocker" and not is_used else finding.severity
        title = f"{name}: {finding.title[0].lower()}{finding.title[1:]}"
        fix = f"{finding.fix}; or unset {name}" if finding.severity != "ok" and finding.fix else finding.fix
        rated.append(
            make_finding(id=id, severity=severity, title=title, evidence=finding.evidence_text, fix=fix, place=name)
        )
    return rated


def _odd_value(name: str, value: str) -> CheckFinding | None:
    """A value that no shell would give: quotes of docker's --env-file, a line end, a variable that was not expanded."""
    if value[0] in "'\"" and value[-1] == value[0] and len(value) > 1:
        what, fix = "has quotes around its value", "docker's --env-file takes quotes literally: remove them"
    elif value != value.strip():
        what, fix = (
            "has a space or a line end around its value",
            "remove it (a secret file with a line end at its end?)",
        )
    elif re.search(r"\$\{?[A-Za-z_]\w*|\$\(|%\w+%|\{\{", value):
        what, fix = "has a variable in its value that was not replaced", "write the value out, or let a shell set it"
    else:
        return None
    return make_finding("variable_value", "warning", f"{name} {what}", f"{name}={_shown(value)!r}", fix, name)


def _looks_like_location(value: str) -> bool:
    """Not a flag (`DATA=1`), a name (`DATASET=coco`) or text."""
    return "/" in value or "\\" in value or value[0] in "~.$" or (len(value) < 256 and Path(value).exists())


def _shown(value: str) -> str:
    """A value without secrets, of bounded length."""
    masked = mask_secrets(value)
    return masked if len(masked) <= MAX_SHOWN else f"{masked[:MAX_SHOWN]}…"


def _severity(text: str) -> Severity:
    return "blocker" if text == "blocker" else "warning"
