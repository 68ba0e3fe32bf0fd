"""Rules of "too little parallel work": the device has pictures, and stands still or works at half its width."""

from stoker.diagnosis.catalogue import CATALOGUE
from stoker.diagnosis.rules.finding import (
    counter,
    found,
    held_back,
    is_long_enough,
    of_phase,
    percent,
    phase,
    sampled_s,
    share_of,
    stack_share,
    stacks,
    thread_cpu,
    wanted_cpu,
)
from stoker.diagnosis.run_data import Records
from stoker.runs.schemas import Evidence, Finding


def python_bound(seen: Records) -> Finding | None:
    """The thread computes between steps: its stacks say so, or the process uses a core meanwhile. Where nobody can tell
    whether it computes or waits, `host` alone is believed half."""
    phases = _between(seen)
    share = share_of(seen, *phases)
    rests = None if share is None else _rests(seen, share)
    by_stacks = _by_stacks(seen, "python_bound", "Python", "python")
    if rests is None:
        phases = tuple(name for name in phases if name == "host")
    if not phases or rests is True or (rests is None and by_stacks is not None):
        return by_stacks
    more = [_process(seen), stacks(seen, "Python", "python")]
    by_clock = of_phase(seen, "python_bound", *phases, more=more, confidence=0.5 if rests is None else None)
    return by_clock or by_stacks


def host_waits(seen: Records) -> Finding | None:
    """The thread waits by name; between steps, while the process uses little of a core; or in steps of a job that
    computes on processors, while they use less than the steps take."""
    between = _between(seen)
    share = share_of(seen, *between)
    rests = share is not None and _rests(seen, share) is True
    phases = (*(("sync",) if seen.seconds("sync") > 0 else ()), *(between if rests else ()))
    more = [_process(seen), stacks(seen, "a wait", "sync", "idle")]
    by_clock = of_phase(seen, "host_waits", *phases, more=more) if phases else None
    return by_clock or _rests_in_steps(seen) or _by_stacks(seen, "host_waits", "a wait", "sync", "idle")


def _rests_in_steps(seen: Records) -> Finding | None:
    """By the thread's own processor time; else by a lower bound: all that the process used is taken for steps."""
    cpu, share, of_thread = wanted_cpu(seen), share_of(seen, "compute"), thread_cpu(seen, "compute")
    if seen.ours or not seen.on_cpu or seen.ranks > 1 or cpu is None or not share:
        return None
    rest = share - cpu
    if of_thread is not None:  # where cores are short, a thread's part of what was withheld is not known
        rest = min(rest, share * (1 - of_thread)) if held_back(seen) != 1 else share * (1 - of_thread)
    text = f"the process used {cpu:.2f} cores while {percent(share)} of the time was in steps"
    said = Evidence(text=text, value=cpu, place="devices.jsonl: process_cpu")
    if of_thread is not None:
        text = f"the training thread computed {percent(of_thread)} of its time in steps"
        said = Evidence(text=text, value=of_thread, place="steps.jsonl: cpu.compute")
    return found(seen, "host_waits", rest, [said, phase(seen, "compute"), stacks(seen, "a wait", "sync", "idle")],
                 lost_s=rest * seen.steady.device_s,
                 estimate="the time in steps in which no processor worked")  # fmt: skip


def launch_bound(seen: Records) -> Finding | None:
    traces, cause = seen.traces, CATALOGUE["launch_bound"]
    kernel_s = traces.kernel_s.value
    if traces.idle is None or kernel_s is None or kernel_s > cause.limit("kernel_s"):
        return None
    text = (
        f"the median kernel takes {1e6 * kernel_s:.1f} µs, and a step has {traces.launches / max(1, traces.steps):,.0f}"
    )
    evidence = [_idle(seen), Evidence(text=text, value=kernel_s, place="traces.jsonl: kernel_median_s"), _starved(seen)]
    return found(seen, cause.id, traces.idle, evidence, lost_s=_still_s(seen, traces.idle), estimate=_ESTIMATE)


def starved_inside_steps(seen: Records) -> Finding | None:
    """By traces where there are some, else by the second witness."""
    idle = seen.traces.idle
    if idle is not None:
        return found(seen, "starved_inside_steps", idle, [_idle(seen), _starved(seen)], lost_s=_still_s(seen, idle),
                     estimate=_ESTIMATE)  # fmt: skip
    busy = driver_utilisation(seen)
    computed = share_of(seen, "compute")
    if busy is None or computed is None:
        return None
    said = counter(f"the driver saw kernels {100 * busy:.0f} % of the time", busy, "gpus")
    gap = computed - busy
    return found(seen, "starved_inside_steps", gap, [phase(seen, "compute"), said, _starved(seen)],
                 lost_s=gap * seen.steady.device_s,
                 estimate="the driver's utilisation is a sample, and coarse")  # fmt: skip


def batch_too_small(seen: Records) -> Finding | None:
    cause = CATALOGUE["batch_too_small"]
    steady = seen.steady
    probe = seen.probes.get("twice_the_batch")
    if probe is not None and probe.ratio > 1:
        saved = 1 - 1 / probe.ratio
        return found(seen, cause.id, saved, [_batch(seen), _step_time(seen)], lost_s=saved * seen.seconds("compute"),
                     estimate="what twice the batch saved while it was tried", confidence=0.8)  # fmt: skip
    if not is_long_enough(seen) or not steady.pictured_steps:
        return None
    if steady.pictures / steady.pictured_steps > cause.limit("batch") or "batch" in seen.reasons:
        return None
    used = seen.host.memory_share
    shares = [gpu.memory_used / gpu.memory_bytes for gpu in seen.gpus.values() if gpu.memory_used and gpu.memory_bytes]
    used = max(shares) if shares and not seen.on_cpu else used
    worked_s = share_of(seen, "compute", "host", "unattributed")
    if (used is not None and used > cause.limit("memory")) or not worked_s or not steady.steps:
        return None
    step_s = worked_s * steady.device_s / steady.steps / seen.devices
    fixed = min(1.0, cause.limit("overhead_s") / step_s) if step_s > 0 else None
    return found(seen, cause.id, fixed, [_batch(seen), _step_time(seen)])


def gpu_underfilled(seen: Records) -> Finding | None:
    means = [gpu.sm_active.value for gpu in seen.gpus.values() if gpu.sm_active.value is not None]
    if not means:
        return None
    most = max(means)
    said = counter("at most {} of the multiprocessors had work while the GPU was busy", most, "gpus.sm_active")
    return found(seen, "gpu_underfilled", 1 - most, [said])


def recompiles(seen: Records) -> Finding | None:
    share = seen.steady.phases.get("compile", 0.0)
    if share > 0 and is_long_enough(seen):
        return found(seen, "recompiles", seen.steady_share("compile"), [phase(seen, "compile")], lost_s=share)
    return _by_stacks(seen, "recompiles", "compiling", "compile")


RULES = (
    python_bound, host_waits, launch_bound, starved_inside_steps, batch_too_small, gpu_underfilled, recompiles,
)  # fmt: skip

_ESTIMATE = "the share of the traced time without work, times the time in steps; tracing slows the host"


def driver_utilisation(seen: Records) -> float | None:
    """Mean over the GPUs, where they are just the devices that train."""
    means = [gpu.utilisation.value for gpu in seen.gpus.values() if gpu.utilisation.value is not None]
    if not means or len(means) != len(seen.gpus) or len(means) != seen.totals.devices:
        return None
    return sum(means) / len(means)


def _by_stacks(seen: Records, cause_id: str, what: str, *kinds: str) -> Finding | None:
    """Of a job whose loop nobody times. No device stood still for longer than its driver says."""
    share = stack_share(seen, cause_id, *kinds)
    if share is None or not is_long_enough(seen):
        return None
    busy = [gpu.utilisation.value for gpu in seen.gpus.values() if gpu.utilisation.value is not None]
    share = min(share, 1 - max(busy, default=0.0))
    evidence = [stacks(seen, what, *kinds), _process(seen)]
    return found(seen, cause_id, share, evidence, lost_s=sampled_s(seen, share),
                 estimate="the share of the main thread's stacks")  # fmt: skip


def _between(seen: Records) -> tuple[str, ...]:
    """Phases in which the training thread is between steps, in its loop's own code; of a loop in `stoker.measure` what
    nothing brackets is such."""
    names = ("host",) if seen.ours or seen.watched else ("host", "unattributed")
    return tuple(name for name in names if seen.seconds(name) > 0)


def _rests(seen: Records, share: float) -> bool | None:
    """Whether the thread used little of a core between steps: that was measured, or the process used little, if it used
    one in the rest of the time."""
    of_thread = thread_cpu(seen, *_between(seen))
    if of_thread is not None:
        return of_thread < CATALOGUE["host_waits"].limit("busy")
    cpu = wanted_cpu(seen)
    if cpu is None or share <= 0:
        return None
    return max(0.0, cpu - (1 - share)) / share < CATALOGUE["host_waits"].limit("busy")


def _process(seen: Records) -> Evidence | None:
    cpu = seen.host.process_cpu.value
    return None if cpu is None else counter(f"the process used {cpu:.2f} cores", cpu, "process_cpu")


def _still_s(seen: Records, idle: float) -> float:
    return idle * seen.seconds("compute")


def _idle(seen: Records) -> Evidence | None:
    idle, traces = seen.traces.idle, seen.traces
    if idle is None:
        return None
    text = f"no kernel and no copy ran in {percent(idle)} of {traces.steps} traced steps"
    if traces.longest_gap is not None:
        took_s, host = traces.longest_gap
        text += f"; the longest gap was {1e3 * took_s:.1f} ms, with the host in {host or 'Python'}"
    return Evidence(text=text, value=idle, place="traces.jsonl: busy_s, wall_s, gaps")


def _starved(seen: Records) -> Evidence | None:
    if not seen.starved_of:
        return None
    share = seen.starved / seen.starved_of
    text = f"the device had finished {percent(share)} of the steps when the last of their work was only just issued"
    return Evidence(text=text, value=share, place="steps.jsonl: starved")


def _batch(seen: Records) -> Evidence | None:
    steady = seen.steady
    if not steady.pictured_steps:
        return None
    batch = steady.pictures / steady.pictured_steps
    return Evidence(text=f"{batch:g} pictures a step", value=batch, place="steps.jsonl: pictures, steps")


def _step_time(seen: Records) -> Evidence | None:
    steady = seen.steady
    if not steady.steps or steady.wall_s <= 0:
        return None
    per_s = steady.steps / steady.wall_s
    return Evidence(text=f"{per_s:,.1f} steps a second", value=per_s, place="steps.jsonl: steps, wall_s")
