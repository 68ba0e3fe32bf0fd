"""What the stub of NVIDIA's driver reports in the simulated causes of `diagnose.py`: scenes, second by second.

A healthy H100 at work, and the same with one fault. The format of the scenes, with its key names, is that of
`tests/watch/recording/nvml_stub.c`. Simulated: no scene was recorded from a real GPU.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

LENGTH_S = 60
"""Length of a scene: longer than any of its jobs."""
SM_UTIL, SM_OCCUPANCY, ANY_TENSOR_UTIL, DRAM_BW_UTIL = 2, 3, 5, 10
"""NVML's numbers of GPM counters (nvml.h, nvmlGpmMetricId_t)."""
SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, SETTINGS = 0x4, 0x8, 0x20, 0x40, 0x2
"""NVML's bits of clock event reasons."""

Second = dict[str, float | int | str]


@dataclass(frozen=True)
class Moment:
    """level: how strong the fault is."""

    level: float
    second: int
    rng: random.Random


Wrong = Callable[[Moment], Second]
"""The counters that differ in that second."""

HEALTHY: Second = {
    "memory_total": 85_899_345_920, "memory_used": 64_000_000_000, "memory_utilization": 60, "power_limit_mw": 700_000,
    "sm_clock_max": 1980, "memory_clock": 2619, "memory_clock_max": 2619, "temperature": 61, "throttle": 0,
    "pcie_generation": 5, "pcie_generation_max": 5, "pcie_width": 16, "pcie_width_max": 16, "pcie_sent_kb": 40_000,
    "pcie_received_kb": 700_000, "ecc_corrected": 0, "ecc_uncorrected": 0, "gpm": 1,
}  # fmt: skip


def scene(wrong: Wrong, level: float, seed: int) -> str:
    """The lines of a scene. level: how strong the fault is."""
    rng = random.Random(seed)
    lines = [
        "-1 count 1",
        "-1 driver 580.95.05",
        "-1 cuda 13000",
        "0 name NVIDIA H100 80GB HBM3",
        "0 uuid GPU-simulated",
    ]
    lines += [f"0 {key} {value}" for key, value in HEALTHY.items()]
    for second in range(LENGTH_S):
        now: Second = {
            "utilization": rng.randint(93, 100), "power_mw": rng.randint(540_000, 640_000), "sm_clock": 1980,
            f"gpm.{SM_UTIL}": rng.uniform(78, 90), f"gpm.{SM_OCCUPANCY}": rng.uniform(40, 55),
            f"gpm.{ANY_TENSOR_UTIL}": rng.uniform(28, 42), f"gpm.{DRAM_BW_UTIL}": rng.uniform(35, 50),
        }  # fmt: skip
        now |= wrong(Moment(level, second, rng))
        lines += [f"@{second} 0 {key} {value}" for key, value in now.items()]
    return "\n".join(lines) + "\n"


def nothing(_: Moment) -> Second:
    return {}


def hot(now: Moment) -> Second:
    """level: fraction of the seconds with a thermal slowdown."""
    if now.rng.random() >= now.level:
        return {"temperature": now.rng.randint(84, 86)}
    return {
        "throttle": SW_THERMAL,
        "temperature": now.rng.randint(86, 88),
        "sm_clock": now.rng.randrange(1200, 1700, 15),
    }


def power_capped(now: Moment) -> Second:
    """level: fraction of the clock that the power limit takes."""
    clock = round(1980 * (1 - now.level) + now.rng.uniform(-30, 30))
    return {"throttle": SW_POWER_CAP, "power_limit_mw": 350_000, "power_mw": 349_000, "sm_clock": clock}


def clock_low(now: Moment) -> Second:
    """level: fraction of the clock that a setting takes."""
    return {"throttle": SETTINGS, "sm_clock": round(1980 * (1 - now.level)), "power_mw": 300_000}


def pcie_degraded(now: Moment) -> Second:
    """level: steps of two by which the link is slower; the first is half of the lanes, the others generations."""
    return {"pcie_width": 8, "pcie_generation": 5 - (int(now.level) - 1)}


def memory_errors(now: Moment) -> Second:
    """level: corrected errors a second; from a thousand on one that is not corrected."""
    return {"ecc_corrected": int(now.level * now.second), "ecc_uncorrected": int(now.level >= 1000 and now.second >= 5)}


def xid(now: Moment) -> Second:
    """level: below 1, an error of the program (31); 79, the GPU has fallen off the bus."""
    return {"xid": 79 if now.level >= 1 else 31} if now.second == 6 else {}


def others(now: Moment) -> Second:
    """level: 1, another process computes on the GPU all the time; below, from second 8 to 18."""
    there = now.level >= 1 or 8 <= now.second < 18
    return {"processes": 4_000_000 if there else "none"}


def underfilled(now: Moment) -> Second:
    """level: fraction of the multiprocessors without work."""
    active = 100 * (1 - now.level)
    return {
        f"gpm.{SM_UTIL}": active, f"gpm.{SM_OCCUPANCY}": active / 3, f"gpm.{ANY_TENSOR_UTIL}": active / 4,
        f"gpm.{DRAM_BW_UTIL}": active / 3, "power_mw": 160_000,
    }  # fmt: skip


def no_tensor_cores(now: Moment) -> Second:
    """level: fraction of the time in which they work."""
    return {f"gpm.{ANY_TENSOR_UTIL}": 100 * now.level}


def memory_grows(now: Moment) -> Second:
    """level: bytes a second, in millions."""
    return {"memory_used": int(30e9 + now.level * 1e6 * now.second)}
