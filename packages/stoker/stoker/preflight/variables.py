"""Environment variables that are ignored silently, or whose folders a training writes late: what no error says at the
first access.

They are set by platforms (Vertex AI, SageMaker, Slurm), by Dockerfiles and by hand: a name with a typing error, quotes
that docker's --env-file kept, a file that is not there. Secret values are never shown. The variables are rows of
`stoker_watch/knowledge/variables.toml`. A wrong key, bucket or endpoint is refused by `stoker_watch/storage/`.
"""

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import msgspec

from stoker.preflight.access import check_writable
from stoker.preflight.catalog import describe
from stoker_watch.errors import nearest
from stoker_watch.findings.finding import Finding
from stoker_watch.knowledge import read_toml
from stoker_watch.secrets import mask_secrets

RANK_VARIABLES = ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "TF_CONFIG", "CLUSTER_SPEC")
MAX_SHOWN = 200
"""Characters of a value."""
EXPIRATION = "AWS_CREDENTIAL_EXPIRATION"


class VariableTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`variables.toml`, which says what each list is."""

    stoker: tuple[str, ...]
    internal: tuple[str, ...]
    outputs: tuple[str, ...]
    files: tuple[str, ...]


TABLE = msgspec.convert(read_toml("variables.toml"), VariableTable)


def check_variables(env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Findings of all variables; those in order are one finding."""
    findings = [*batch_shell(env), *_check_names(env), *_check_files(env), *_check_session(env), *_check_outputs(env)]
    others = [row for row in findings if row.severity != "ok"]
    fine = [f"{row.place}: {row.title} ({row.evidence_text})" for row in findings if row.severity == "ok"]
    title = f"variables in order: {len(fine)}" if fine else "no other variable names output or credentials"
    return [*others, describe("variables", title=title, evidence="; ".join(fine) or "the environment of this process")]


def batch_shell(env: Mapping[str, str]) -> Iterator[Finding]:
    """A process in the shell of a batch script, which Slurm starts once for all tasks, and nothing has made a rank."""
    tasks, is_rank = env.get("SLURM_NTASKS", ""), any(env.get(name) for name in RANK_VARIABLES)
    if env.get("SLURM_JOB_ID") and re.fullmatch(r"[2-9]|[1-9]\d+", tasks) and not is_rank:
        yield describe("rank_of_batch_shell", "SLURM_NTASKS", tasks=tasks, nodes=env.get("SLURM_JOB_NUM_NODES", "1"))


def _check_names(env: Mapping[str, str]) -> Iterator[Finding]:
    """Typing errors in names of stoker's own variables."""
    for name in sorted(env):
        if name.upper().startswith("STOKER_") and name not in (*TABLE.stoker, *TABLE.internal):
            closest = nearest(name[7:].upper(), [known[7:] for known in TABLE.stoker])
            fix = f"rename it to STOKER_{closest}" if closest else f"unset it; stoker reads {', '.join(TABLE.stoker)}"
            yield describe("variable_unknown", name, name=name, fix=fix)


def _check_files(env: Mapping[str, str]) -> Iterator[Finding]:
    """Files of credentials or certificates that are not there, which the clients then do without."""
    for name in TABLE.files:
        value = env.get(name, "")
        if value and (odd := _odd_value(name, value)):
            yield odd
        elif value and value != os.devnull and not _is_readable(value):
            yield describe("variable_credentials", name, name=name, value=_shown(value))
        elif value and value != os.devnull:
            yield describe("variables", name, title="points to a readable file", evidence=value)


def _is_readable(value: str) -> bool:
    path = os.path.expanduser(value)
    return os.path.isfile(path) and os.access(path, os.R_OK)


def _check_session(env: Mapping[str, str]) -> Iterator[Finding]:
    """The end of a session, whose exported keys nobody renews."""
    try:
        expires = datetime.fromisoformat(env.get(EXPIRATION, ""))
    except ValueError:
        return
    hours = ((expires if expires.tzinfo else expires.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds() / 3600
    id = "variable_aws_keys/expired" if hours <= 0 else "variable_aws_keys/ends"
    yield describe(id, EXPIRATION, expiration=env[EXPIRATION], hours=hours)


def _check_outputs(env: Mapping[str, str]) -> Iterator[Finding]:
    """Folders that stoker writes, some of them when the training has ended; all at the same time: a store may not
    answer."""

    def attempt(name: str) -> Finding:
        value = env[name]
        if odd := _odd_value(name, value):
            return odd
        tried = check_writable(value, place=name)
        if tried.severity == "ok":
            return tried
        fix = f"{tried.fix}; or unset {name}" if tried.fix else f"unset {name}"
        texts = {"evidence": tried.evidence_text, "fix": fix}
        title = f"{name}: {tried.title[0].lower()}{tried.title[1:]}"
        return describe("variable_output", name, severity=tried.severity, title=title, **texts)

    with ThreadPoolExecutor(max_workers=len(TABLE.outputs)) as pool:
        yield from pool.map(attempt, [name for name in TABLE.outputs if env.get(name)])


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
