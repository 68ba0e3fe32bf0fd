"""Whether a run still has a process: by the lock of its folder, which the kernel releases; by its lease in a bucket;
or, for a job that `stoker watch --pid` was attached to, by its process id."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.runs.records import locked
from stoker.storage.uri import LEASE_FILE

if TYPE_CHECKING:
    from stoker.storage.lease import LeaseHolder


def is_held(run_dir: Path, job: Mapping[str, Any] | None = None) -> bool | None:
    """Whether a process of this machine trains the run; None if the lock cannot be tried. job: that `stoker watch
    --pid` was attached to, as its newest event of a start has it."""
    if not (run_dir / ".lock").exists():
        return False
    with (
        contextlib.suppress(OSError),
        locked(run_dir) as acquired,
    ):  # a read-only copy of a run, or a file system without locks
        return not acquired or (job is not None and _is_running(job))
    return None


def lease_holder(run_dir: Path) -> "LeaseHolder | None":
    """Who trains a run in a bucket, or did so within the duration of a lease; from the copy of its lease."""
    if not (run_dir / LEASE_FILE).exists():
        return None
    from stoker.storage.lease import read_lease_file  # loads obstore, which folders do not need

    holder = read_lease_file(run_dir / LEASE_FILE)
    return holder if holder is not None and holder.remaining_s() > 0 else None


def boot_id() -> str:
    """The id of this boot of this machine; empty if the kernel has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _is_running(job: Mapping[str, Any]) -> bool:
    """Whether a process still runs, without being watched. It is identified by its pid, its start and the boot, since
    pids are reused."""
    if job.get("boot") != boot_id():
        return False
    try:
        stat_line = Path(f"/proc/{job['pid']}/stat").read_text(errors="replace")
    except OSError:  # it ended
        return False
    fields = stat_line.rpartition(")")[2].split()
    return fields[0] not in "ZX" and int(fields[19]) == job["start_ticks"]
