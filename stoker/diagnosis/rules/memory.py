"""Rules about memory, on the device and on the host, and about what else runs out: /dev/shm, open files."""

from stoker.diagnosis.catalogue import CATALOGUE
from stoker.diagnosis.rules.finding import counter, found, is_long_enough
from stoker.diagnosis.run_data import Records
from stoker.diagnosis.series import Course, Line
from stoker.runs.schemas import Evidence, Finding

GIB = 2**30


def gpu_memory_unused(seen: Records) -> Finding | None:
    shares = [gpu.memory_used / gpu.memory_bytes for gpu in seen.gpus.values() if gpu.memory_used and gpu.memory_bytes]
    if not shares or not is_long_enough(seen) or seen.on_cpu:
        return None
    said = counter("at most {} of the memory was in use", max(shares), "gpus.memory_used_bytes")
    return found(seen, "gpu_memory_unused", 1 - max(shares), [said])


def gpu_memory_grows(seen: Records) -> Finding | None:
    found_lines = [(index, gpu, line) for index, gpu in seen.gpus.items() if (line := _steady(gpu.memory)) is not None]
    rows = [(gpu.memory_bytes - gpu.memory.values[-1], line, index, gpu)
            for index, gpu, line in found_lines if gpu.memory_bytes]  # fmt: skip
    if not rows or any(gpu.others.value for _, _, _, gpu in rows):
        return None
    free, line, index, gpu = min(rows, key=lambda row: row[0] / row[1].slope)
    text = f"GPU {index}: {gpu.memory.growth / GIB:.2f} GiB more in {gpu.memory.span_s:,.0f} s, in a straight line"
    evidence = [
        Evidence(text=text, value=line.slope, place="devices.jsonl: gpus.memory_used_bytes"),
        _when_full(max(0.0, free) / line.slope),
    ]
    return found(seen, "gpu_memory_grows", max(0.0, free) / line.slope / 3600, evidence)


def gpu_memory_fragmented(seen: Records) -> Finding | None:
    cause, peak = CATALOGUE["gpu_memory_fragmented"], seen.memory_peak_bytes
    if peak is None or seen.on_cpu or len(seen.gpus) != 1:
        return None
    (gpu,) = seen.gpus.values()
    if not gpu.memory_used or not gpu.memory_bytes or gpu.others.value != 0:
        return None
    if gpu.memory_used / gpu.memory_bytes < cause.limit("full"):
        return None
    text = f"the driver shows {gpu.memory_used / GIB:.1f} GiB in use, the program had at most {peak / GIB:.1f}"
    share = (gpu.memory_used - peak) / gpu.memory_bytes
    evidence = [Evidence(text=text, value=share, place="devices.jsonl: gpus.memory_used_bytes; steps.jsonl")]
    return found(seen, cause.id, share, evidence)


def gpu_memory_near_limit(seen: Records) -> Finding | None:
    sizes = [gpu.memory_bytes for gpu in seen.gpus.values() if gpu.memory_bytes]
    if seen.memory_peak_bytes is None or not sizes or seen.on_cpu:
        return None
    share = seen.memory_peak_bytes / min(sizes)
    text = f"{seen.memory_peak_bytes / GIB:.1f} of {min(sizes) / GIB:.1f} GiB were allocated"
    evidence = [Evidence(text=text, value=share, place="steps.jsonl: memory_peak_bytes")]
    return found(seen, "gpu_memory_near_limit", share, evidence)


def host_memory_near_limit(seen: Records) -> Finding | None:
    share = seen.host.memory_share
    if share is None:
        return None
    text = f"at most {100 * share:.0f} % of the limit was in use"
    evidence = [Evidence(text=text, value=share, place="devices.jsonl: memory_used_bytes")]
    return found(seen, "host_memory_near_limit", share, evidence)


def host_memory_leak(seen: Records) -> Finding | None:
    """A cache that is being filled grows as straight, so a run that keeps decoded pictures abstains."""
    host, line = seen.host, _steady(seen.host.rss)
    if line is None or host.memory_free is None or seen.settings.get("cache", "none") != "none":
        return None
    left_s = host.memory_free / line.slope
    text = f"{host.rss.growth / 2**20:,.0f} MiB more in {host.rss.span_s:,.0f} s, in a straight line " \
           f"({line.slope / 2**20:.2f} MiB/s)"  # fmt: skip
    evidence = [Evidence(text=text, value=line.slope, place="devices.jsonl: rss_bytes"), _when_full(left_s)]
    return found(seen, "host_memory_leak", left_s / 3600, evidence)


def memory_pressure(seen: Records) -> Finding | None:
    cause, host = CATALOGUE["memory_pressure"], seen.host
    waited = host.psi_memory.value
    grown = 0.0 if host.swap.most is None or host.swap.least is None else host.swap.most - host.swap.least
    if waited is None and not grown:
        return None
    evidence = [counter("some task waited for memory {} of the time", waited, "psi_memory")]
    if grown:
        text = f"swap grew by {grown / GIB:.2f} GiB"
        evidence.append(Evidence(text=text, value=grown, place="devices.jsonl: swap_used_bytes"))
    return found(seen, cause.id, max(waited or 0.0, grown / cause.limit("swap_bytes")), evidence)


def processes_killed_for_memory(seen: Records) -> Finding | None:
    kills = seen.host.oom_kills
    text = f"the kernel killed {kills} processes of the cgroup for memory"
    evidence = [Evidence(text=text, value=float(kills), place="devices.jsonl: oom_kills")]
    return found(seen, "processes_killed_for_memory", kills, evidence)


def shared_memory_small(seen: Records) -> Finding | None:
    """A full one is worth a word only where something of the job is in it; a small one where it is half full."""
    cause, used, size = CATALOGUE["shared_memory_small"], seen.host.shm, seen.host.shm_bytes
    if used is None or size is None:
        return None
    if used < (cause.warn_from or 1.0) and size > cause.limit("docker_bytes"):
        return None
    evidence = [
        counter("at most {} of /dev/shm was in use", used, "shm_used_bytes"),
        Evidence(text=f"it has {size / 2**20:,.1f} MiB", value=float(size), place="devices.jsonl: shm_total_bytes"),
    ]
    return found(seen, cause.id, used, evidence)


def handles_run_out(seen: Records) -> Finding | None:
    cause, handles, limit = CATALOGUE["handles_run_out"], seen.host.handles, seen.host.handles_limit
    if not handles.points or not limit:
        return None
    most = max(handles.values)
    share = most / limit
    evidence = [Evidence(text=f"{most:,.0f} of {limit:,} files were open", value=share, place="devices.jsonl: handles")]
    line = _straight(handles, cause.id)
    if line is not None and handles.growth >= cause.limit("least_growth"):
        hours = (limit - most) / line.slope / 3600
        text = f"{handles.growth:,.0f} more in {handles.span_s:,.0f} s, in a straight line: in {_long(3600 * hours)} " \
               "there are none left"  # fmt: skip
        evidence.append(Evidence(text=text, value=line.slope, place="devices.jsonl: handles"))
        if hours <= (CATALOGUE["host_memory_leak"].warn_from or 0.0) and share < (cause.warn_from or 1.0):
            share = cause.warn_from or 1.0
    return found(seen, cause.id, share, evidence)


RULES = (
    gpu_memory_unused, gpu_memory_grows, gpu_memory_fragmented, gpu_memory_near_limit, host_memory_near_limit,
    host_memory_leak, memory_pressure, processes_killed_for_memory, shared_memory_small, handles_run_out,
)  # fmt: skip


def _steady(course: Course) -> Line | None:
    """The line of a leak of memory."""
    cause = CATALOGUE["host_memory_leak"]
    return _straight(course, cause.id) if course.growth >= cause.limit("least_growth_bytes") else None


def _straight(course: Course, cause_id: str) -> Line | None:
    cause = CATALOGUE[cause_id]
    return course.grows_steadily(
        straight=cause.limit("straight"), goes_on=cause.limit("goes_on"), least_span_s=cause.limit("least_span_s"),
        least_points=cause.limit("least_points"),
    )  # fmt: skip


def _when_full(left_s: float) -> Evidence:
    return Evidence(text=f"in {_long(left_s)} it is full", value=left_s)


def _long(seconds: float) -> str:
    hours = seconds / 3600
    days = hours / 24
    if days >= 2:
        return f"{days:,.0f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{seconds / 60:.0f} min"
