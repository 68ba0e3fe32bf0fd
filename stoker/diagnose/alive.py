"""Whether a run still has a process: by the lock of its folder, which the kernel frees, or by its lease in a bucket."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.records import locked
from stoker.storage.runs import LEASE

if TYPE_CHECKING:
    from stoker.storage.lease import Holder


def is_held(run: Path) -> bool | None:
    """Whether a living process of this machine trains the run; None where the lock cannot be tried."""
    if not (run / ".lock").exists():
        return False
    with contextlib.suppress(OSError), locked(run) as free:  # a read-only copy of a run, or no locks there
        return not free
    return None


def lease_holder(run: Path) -> "Holder | None":
    """Who trains a run in a bucket, or did within the time of a lease; from the copy of its lease."""
    if not (run / LEASE).exists():
        return None
    from stoker.storage.lease import read_file  # loads obstore, which folders do not need

    holder = read_file(run / LEASE)
    return holder if holder is not None and holder.left_s() > 0 else None
