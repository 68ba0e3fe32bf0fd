"""Rules of "allocation and scheduling": starts and stops, checkpoints, processors, other users of the machine.

Clocks, heat and other users of the GPUs: `gpus.py`.
"""

from stoker.diagnosis.catalogue import CATALOGUE
from stoker.diagnosis.rules.finding import (
    attempts,
    counter,
    found,
    of_phase,
    percent,
    phase,
    share_of,
    taken_by_others,
)
from stoker.diagnosis.run_data import Records
from stoker.runs.schemas import Evidence, Finding


def startup_heavy(seen: Records) -> Finding | None:
    """compile counts as far as it belongs to the start: what comes later is `recompiles`."""
    compile_s = max(0.0, seen.seconds("compile") - seen.steady.phases.get("compile", 0.0))
    seconds = seen.seconds("startup") + compile_s
    if seconds < CATALOGUE["startup_heavy"].limit("least_s") or not seen.totals.steps:  # it may still be starting
        return None
    evidence = [phase(seen, "startup"), phase(seen, "compile") if compile_s else None, attempts(seen)]
    return found(seen, "startup_heavy", seconds / seen.totals.device_s, evidence, lost_s=seconds)


def checkpoint_heavy(seen: Records) -> Finding | None:
    return _checkpoints(seen, "checkpoint_heavy", [])


def checkpoint_disk_slow(seen: Records) -> Finding | None:
    waited = seen.host.psi_io.value
    if waited is None or waited < CATALOGUE["checkpoint_disk_slow"].limit("psi_io"):
        return None
    said = counter("some task waited for storage {} of the time", waited, "psi_io")
    return _checkpoints(seen, "checkpoint_disk_slow", [said])


def cpu_quota(seen: Records) -> Finding | None:
    withheld = seen.host.withheld.value
    if withheld is None:
        return None
    said = counter("the CPU quota withheld {} of the processor time that the run wanted", withheld, "throttled_s")
    return found(seen, "cpu_quota", withheld, [said, _waiting_for_cores(seen)], lost_s=_of_cores(seen, withheld),
                 estimate=_SHARE_OF_CORES)  # fmt: skip


def cpu_contention(seen: Records) -> Finding | None:
    """A busy neighbour alone takes nothing: the run must have wanted more than it got."""
    taken, busy, others, got = taken_by_others(seen), seen.cores_busy, seen.host.others.value, seen.host.process_cpu
    if taken is None or busy is None or others is None or got.value is None:
        return None
    share, wanted = taken
    text = f"the cores were {100 * busy:.0f} % busy, {100 * others:.0f} % with other processes"
    wants = f"its threads wanted {wanted:.2f} cores and got {got.value:.2f}"
    evidence = [
        Evidence(text=text, value=others, place="devices.jsonl: cpu, process_cpu"),
        Evidence(text=wants, value=share, place="devices.jsonl: threads_running, process_cpu"),
        _waiting_for_cores(seen),
    ]
    return found(seen, "cpu_contention", share, evidence, lost_s=_of_cores(seen, share), estimate=_SHARE_OF_CORES)


def threads_oversubscribed(seen: Records) -> Finding | None:
    cause, running, cores = CATALOGUE["threads_oversubscribed"], seen.host.threads_running, seen.host.cores
    if running.value is None or not cores or running.count < cause.limit("samples"):
        return None
    if running.value - cores < cause.limit("more"):
        return None
    text = f"{running.value:,.0f} threads ran or wanted to, on {cores:g} cores"
    said = Evidence(text=text, value=running.value / cores, place="devices.jsonl: threads_running, cores")
    return found(seen, cause.id, running.value / cores, [said, _waiting_for_cores(seen)])


def idle_by_intent(seen: Records) -> Finding | None:
    return of_phase(seen, "idle_by_intent", "idle")


def work_lost_to_restarts(seen: Records) -> Finding | None:
    lost_s = seen.seconds("recovery")
    return found(seen, "work_lost_to_restarts", seen.share("recovery"), [phase(seen, "recovery"), attempts(seen)],
                 lost_s=lost_s)  # fmt: skip


def frequent_restarts(seen: Records) -> Finding | None:
    count = seen.totals.attempts
    if not count or seen.totals.wall_s / count > CATALOGUE["frequent_restarts"].limit("mean_s"):
        return None
    text = f"an attempt lasts {seen.totals.wall_s / count / 60:.1f} min on average"
    evidence = [attempts(seen), Evidence(text=text, value=seen.totals.wall_s / count, place="steps.jsonl: wall_s")]
    return found(seen, "frequent_restarts", count, evidence)


RULES = (
    startup_heavy, checkpoint_heavy, checkpoint_disk_slow, cpu_quota, cpu_contention, threads_oversubscribed,
    idle_by_intent, work_lost_to_restarts, frequent_restarts,
)  # fmt: skip

_SHARE_OF_CORES = "this share of the processor time, of what waits for processors"


def _checkpoints(seen: Records, cause_id: str, more: list[Evidence | None]) -> Finding | None:
    """The last checkpoint is what the run leaves behind, so it does not count."""
    cause, count = CATALOGUE[cause_id], seen.checkpoints
    if seen.seconds("checkpoint") < cause.limit("least_s"):
        return None
    share = share_of(seen, "checkpoint")
    if share is None or (count and share * (count - 1) / count < (cause.warn_from or 0.0)):
        return None
    said = (
        Evidence(text=f"{count} checkpoints", value=float(count), place="events.jsonl: checkpoint") if count else None
    )
    return of_phase(seen, cause_id, "checkpoint", more=[said, *more])


def _of_cores(seen: Records, share: float) -> float:
    """Device-seconds that a lack of processors took: a device that computes there loses them in all that it does."""
    names = ("compute", "input_wait", "host", "unattributed", "eval") if seen.on_cpu else ("input_wait", "host")
    return share * seen.seconds(*names)


def _waiting_for_cores(seen: Records) -> Evidence | None:
    waited = seen.host.psi_cpu.value
    if waited is None:
        return None
    return counter(f"some task waited for a core {percent(waited)} of the time", waited, "psi_cpu")
