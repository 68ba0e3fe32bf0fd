"""Whether the data can be read and the run folder written, tried with the credentials that training will use.

Reading: one listing and one byte of one object. Writing: a tiny object of its own name, which is read back and deleted;
nothing else is written, and nothing at all into the data. Messages of refused requests are those of training.
"""

import errno
import os
import re
import shlex
import tempfile
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from glob import has_magic
from pathlib import Path

import msgspec

from stoker.knowledge import read_toml
from stoker.preflight.catalog import describe
from stoker_watch.errors import Conflict, StokerError, StorageError, Unsupported, make_error
from stoker_watch.findings.finding import Finding, Severity
from stoker_watch.recording.telemetry.environment import describe_storage
from stoker_watch.storage.failures import Timeouts, caused_by
from stoker_watch.storage.store import Store
from stoker_watch.storage.uri import WRITABLE_SCHEMES, StorageUri, expand_variables, is_uri, parse_uri

TIMEOUT_S = 4.0
"""Of a request with its retries; a store that never responded is given up after a sixth of it."""
PROBE_NAME = ".stoker-check-"
KERNEL_FILE_SYSTEMS = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs"})


class _Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fix: str
    pattern: str = ""
    scheme: str = ""
    kind: str = ""
    id: str = ""
    unless: str = ""


REFUSALS = msgspec.convert(read_toml("refusals.toml")["refusals"], list[_Refusal])


def check_access(data: str | None, run_dir: str | None, *, env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Reads from the data, writes into the run folder. data: a path, a URI, "demo" (which has no files) or None.
    run_dir: a path, a URI or None: Vertex AI's folder for checkpoints, which `env` names, else `runs/`."""
    folder = run_dir or env.get("AIP_CHECKPOINT_DIR") or "runs"
    with ThreadPoolExecutor(max_workers=1) as pool:
        readable = pool.submit(check_readable, data) if data and data != "demo" else None
        written = check_writable(folder)
        return [*(readable.result() if readable else []), *written]


def check_readable(location: str, *, place: str = "") -> list[Finding]:
    """Whether a path exists and can be read, or a URI be listed and an object of it be read."""
    return _tried("data_access", location, place, lambda: _read(location))


def check_writable(location: str, *, place: str = "") -> list[Finding]:
    """Whether a folder or a URI can be written, and what was written be deleted."""
    return _tried("run_access", location, place, lambda: _write(location))


def _tried(id: str, location: str, place: str, attempt: Callable[[], Finding]) -> list[Finding]:
    """The finding of an attempt; an error is a finding, too."""
    try:
        return [attempt()]
    except StokerError as error:
        return [refusal(id, location, error, place=place)]
    except Exception as error:  # noqa: BLE001  (a probe reports what it could not find out)
        return [describe(f"{id}/unknown", place or location, error=f"{type(error).__name__}: {error}")]


def refusal(id: str, location: str, error: StokerError, *, place: str = "") -> Finding:
    """The finding for an error of the storage layer; its fix is sharper where the response tells more than a status."""
    cause, fix = error.cause or "", error.fix or ""
    kind = caused_by(error) if isinstance(error, StorageError) else None
    scheme, _, path = location.partition("://")
    severity: Severity = "blocker"
    if kind == "retryable" and "no connection" not in cause and "timeout" not in cause:
        severity = "warning"  # the store answers, and may answer better in a minute
    profile = os.environ.get("AWS_PROFILE")
    login = f"aws sso login --profile {profile}" if profile else "aws sso login, or fetch new temporary keys"
    for row in REFUSALS:
        facts = ((row.scheme, scheme), (row.kind, kind), (row.id, id))
        is_case = all(wanted in ("", found) for wanted, found in facts) and row.unless not in os.environ
        if is_case and re.search(row.pattern, f"{error.what} {cause}", re.IGNORECASE):
            fix = row.fix.format(fix=fix, login=login, bucket=path.partition("/")[0])
            break
    what = error.what if error.what.endswith("..") else error.what.removesuffix(".")
    cause = cause or f"location: {error.location}"
    return describe(
        f"{id}/refused", place or error.location or location, severity=severity, what=what, cause=cause, fix=fix
    )


def _read(location: str) -> Finding:
    text = expand_variables(location)
    if not is_uri(text):
        path = Path(text)
        if not path.exists() and not any(path.parent.glob(path.name)):
            raise StorageError("The data does not exist.", location=path, fix="correct the path, or mount its disk")
        if path.exists() and not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            fix = f"chmod -R a+rX {path}"
            raise StorageError("The data cannot be read.", location=path, cause=_owner(path), fix=fix)
        return describe("data_access", location, evidence=f"{'folder' if path.is_dir() else 'file'} on this machine")
    uri = parse_uri(text)
    store = Store(uri, timeouts=Timeouts(TIMEOUT_S))
    identity = store.credentials.description
    folder = uri.key
    while has_magic(folder):
        folder = folder.rpartition("/")[0]
    info = store.stat(folder) if folder and folder == uri.key else None
    if info is None and uri.scheme in WRITABLE_SCHEMES:
        info = next(store.list(folder), None)
    if info is None:
        raise make_error(StorageError, "no-such-object", uri, identity=identity)
    if info.size_bytes:
        store.read(info.key, start=0, length=1)
    return describe("data_access", location, evidence=f"read {info.key}; credentials: {identity}")


def _write(location: str) -> Finding:
    text = expand_variables(location)
    if not is_uri(text):
        return _write_file(location, Path(text))
    uri = parse_uri(text)
    if uri.scheme not in WRITABLE_SCHEMES:
        raise StorageError("A web server cannot be written.", location=uri, fix="use a gs:// or s3:// URI")
    return _write_object(location, uri)


def _write_file(location: str, folder: Path) -> Finding:
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists())
    if not existing.is_dir():
        raise StorageError("The run folder is not a folder.", location=existing, fix="name another --run-dir")
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=PROBE_NAME) as file:
            file.write(b"stoker check")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        cause, fix = _refused_write(error, existing)
        raise StorageError("The run folder cannot be written.", location=existing, cause=cause, fix=fix) from error
    return describe("run_access", location, evidence=f"wrote and deleted a file in {existing}")


def _refused_write(error: OSError, folder: Path) -> tuple[str, str]:
    """(cause, fix) of a folder that cannot be written."""
    what, elsewhere, name = error.strerror or str(error), "name another --run-dir", shlex.quote(str(folder))
    kind = describe_storage(folder)["kind"]
    if kind in KERNEL_FILE_SYSTEMS:
        return f"{what}; {folder} is on {kind}, which shows the kernel and keeps no files", elsewhere
    if error.errno == errno.EROFS:
        mount = next((path for path in (folder, *folder.parents) if path.is_mount()), folder)
        repair = f"sudo mount -o remount,rw {shlex.quote(str(mount))}; of a container, mount it without :ro"
        return f"{what}: {mount} is mounted read-only", f"{elsewhere}, or: {repair}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}: no file fits", f"make room (df -h {name} and df -i {name} show what is used), or {elsewhere}"
    status = folder.stat()
    if not hasattr(os, "getuid") or status.st_uid != os.getuid():
        elsewhere += f", or: sudo chown $(id -u) {name}"
    elif status.st_mode & 0o300 != 0o300:
        elsewhere += f", or: chmod u+wx {name}"
    return f"{what}; {_owner(folder)}", elsewhere


def _write_object(location: str, uri: StorageUri) -> Finding:
    store = Store(uri, timeouts=Timeouts(TIMEOUT_S))
    key, content = uri.child(f"{PROBE_NAME}{uuid.uuid4().hex}").key, b"stoker check"
    store.write(key, content)
    notes = []
    try:
        if store.read(key) != content:
            notes.append("the object that was read back is another one")
        store.write(key, content, if_absent=True)
        notes.append("conditional writes are ignored: a second process could train the same run")
    except Conflict:
        pass  # as it must be
    except Unsupported:
        notes.append("no conditional writes: a second process could train the same run")
    identity = store.credentials.description
    try:
        store.delete(key)
    except StorageError as error:
        refused = refusal("run_access", location, error)
        left = uri.child(key.rpartition("/")[2])
        return describe("run_access/not_deleted", location, cause=refused.evidence_text, object=left, fix=refused.fix)
    if notes:
        evidence = f"{'; '.join(notes)}; credentials: {identity}"
        return describe("run_access/reservation", location, evidence=evidence)
    return describe("run_access", location, evidence=f"wrote, read and deleted an object; credentials: {identity}")


def _owner(path: Path) -> str:
    status = path.stat()
    user = f", this process is user {os.getuid()}" if hasattr(os, "getuid") else ""
    return f"its mode is {status.st_mode & 0o7777:o}, its owner user {status.st_uid}{user}"
