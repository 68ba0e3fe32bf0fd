"""Whether what a training writes can be written, tried with its own credentials: a tiny file or object of its own name,
which is deleted again.

Messages of refused requests are those of training. Whether the data can be read is tried where it is opened
(`planning/check.py`).
"""

import errno
import os
import shlex
import tempfile
import uuid
from pathlib import Path

from stoker.preflight.catalog import describe, refused, severity_of_refusal
from stoker_watch.errors import StokerError, StorageError
from stoker_watch.findings.finding import Finding
from stoker_watch.recording.telemetry.environment import describe_storage
from stoker_watch.storage.failures import Timeouts
from stoker_watch.storage.store import Store
from stoker_watch.storage.uri import WRITABLE_SCHEMES, StorageUri, expand_variables, is_uri, parse_uri

TIMEOUT_S = 4.0
"""Seconds of a request with its retries; a store that never responded is given up after a sixth of it."""
PROBE_NAME = ".stoker-check-"
KERNEL_FILE_SYSTEMS = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs"})


def check_writable(location: str, *, place: str = "") -> Finding:
    """Whether a folder or a URI can be written, and what was written be deleted. place: what names it, a variable."""
    place = place or location
    try:
        text = expand_variables(location)
        return _write_object(parse_uri(text), place) if is_uri(text) else _write_file(Path(text), place)
    except StokerError as error:
        return refused("run_access", error, place, severity=severity_of_refusal(error))
    except Exception as error:  # noqa: BLE001  (a probe reports what it could not find out)
        return describe("run_access/unknown", place, error=f"{type(error).__name__}: {error}")


def _write_file(folder: Path, place: str) -> Finding:
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
    return describe("run_access", place, evidence=f"wrote and deleted a file in {existing}")


def _refused_write(error: OSError, folder: Path) -> tuple[str, str]:
    """(cause, fix) of a folder that cannot be written."""
    what, elsewhere, name = error.strerror or str(error), "name another --run-dir", shlex.quote(str(folder))
    kind, status = describe_storage(folder)["kind"], folder.stat()
    if kind in KERNEL_FILE_SYSTEMS:
        return f"{what}; {folder} is on {kind}, which shows the kernel and keeps no files", elsewhere
    if error.errno == errno.EROFS:
        mount = next((path for path in (folder, *folder.parents) if path.is_mount()), folder)
        repair = f"sudo mount -o remount,rw {shlex.quote(str(mount))}; of a container, mount it without :ro"
        return f"{what}: {mount} is mounted read-only", f"{elsewhere}, or: {repair}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}: no file fits", f"make room (df -h {name} and df -i {name} show what is used), or {elsewhere}"
    if status.st_uid != os.getuid():
        elsewhere += f", or: sudo chown $(id -u) {name}"
    elif status.st_mode & 0o300 != 0o300:
        elsewhere += f", or: chmod u+wx {name}"
    owner = f"its owner user {status.st_uid}, this process is user {os.getuid()}"
    return f"{what}; its mode is {status.st_mode & 0o7777:o}, {owner}", elsewhere


def _write_object(uri: StorageUri, place: str) -> Finding:
    if uri.scheme not in WRITABLE_SCHEMES:
        raise StorageError("A web server cannot be written.", location=uri, fix="use a gs:// or s3:// URI")
    store, probe = Store(uri, timeouts=Timeouts(TIMEOUT_S)), uri.child(f"{PROBE_NAME}{uuid.uuid4().hex}")
    store.write(probe.key, b"stoker check")
    try:
        store.delete(probe.key)
    except StorageError as error:
        return describe("run_access/not_deleted", place, cause=error.cause, object=probe, fix=error.fix)
    evidence = f"wrote and deleted an object; credentials: {store.credentials.description}"
    return describe("run_access", place, evidence=evidence)
