"""Whether a run still has a process: by the lock of its folder, which the kernel frees, by its lease in a bucket, or,
of a job that ran before it was watched, by the number of its process."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.runs.records import EVENTS, locked, read_lines
from stoker.runs.schemas import Event
from stoker.storage.run_uri import LEASE

if TYPE_CHECKING:
    from stoker.storage.lease import Holder


def is_held(run: Path) -> bool | None:
    """Whether a living process of this machine trains the run; None where the lock cannot be tried."""
    if not (run / ".lock").exists():
        return False
    with contextlib.suppress(OSError), locked(run) as free:  # a read-only copy of a run, or no locks there
        return not free or _job_lives(run)
    return None


def lease_holder(run: Path) -> "Holder | None":
    """Who trains a run in a bucket, or did within the time of a lease; from the copy of its lease."""
    if not (run / LEASE).exists():
        return None
    from stoker.storage.lease import read_file  # loads obstore, which folders do not need

    holder = read_file(run / LEASE)
    return holder if holder is not None and holder.left_s() > 0 else None


def boot_id() -> str:
    """Of this boot of this machine; empty where the kernel has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _job_lives(run: Path) -> bool:
    """Whether the job that `stoker watch --pid` was attached to lives on, and is watched no more. A process is known by
    its number, its start and the boot: numbers are given again."""
    began = [event.data["job"] for event in read_lines(run, EVENTS, Event) if event.kind in ("started", "resumed")
             and "job" in event.data]  # fmt: skip
    if not began or began[-1].get("boot") != boot_id():
        return False
    try:
        text = Path(f"/proc/{began[-1]['pid']}/stat").read_text(errors="replace")
    except OSError:  # it ended
        return False
    words = text.rpartition(")")[2].split()
    return words[0] not in "ZX" and int(words[19]) == began[-1]["began"]
