"""How long OpenMP's threads spin at a barrier before they sleep; torch's own work on a CPU waits at thousands of them a
second.

A thread that spins takes a core from others: next to a busy process, a training whose threads spin is several times
slower. A thread that sleeps has to be woken, which in a virtual machine can take so long that two threads are slower
than one. So they spin long on a machine that is otherwise idle, and briefly elsewhere (LOG.md, "Spinning, again").
"""

import os
import time
from pathlib import Path

from stoker.hardware.cgroup import Cgroup, usable_cores

LONG, SHORT = 100_000, 2_000
"""Iterations: about 5 and 0.1 ms on an Intel Xeon."""
NUM_SAMPLES, INTERVAL_S = 10, 0.001


VARIABLE = "GOMP_SPINCOUNT"
_set_here = False


def set_spin_count() -> None:
    """Sets GOMP_SPINCOUNT for this process and those that it starts, unless the user has set it."""
    global _set_here
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(choose_spin_count())
        _set_here = True


def users_environment() -> dict[str, str]:
    """The environment as the user set it, for jobs of others."""
    return {name: value for name, value in os.environ.items() if not (_set_here and name == VARIABLE)}


def choose_spin_count(loadavg: Path = Path("/proc/loadavg"), *, cores: float | None = None) -> int:
    """A value for GOMP_SPINCOUNT, by the number of tasks that run on this machine now, during 10 ms. `cores`: those
    that this process may use; OpenMP has a thread for each of the affinity mask and knows no quota."""
    usable = usable_cores(0, Cgroup()) if cores is None else cores
    if not hasattr(os, "sched_getaffinity") or usable < len(os.sched_getaffinity(0)):
        return SHORT
    others = []
    for _ in range(NUM_SAMPLES):
        try:
            running = loadavg.read_text().split()[3].partition("/")[0]
            others.append(int(running) - 1)  # this task is one of them
        except (OSError, IndexError, ValueError):
            return SHORT
        time.sleep(INTERVAL_S)
    return SHORT if sorted(others)[NUM_SAMPLES // 2] > 0 else LONG
