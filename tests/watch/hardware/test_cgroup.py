"""Limits of the cgroup from trees of files as the kernel shows them, versions 1 and 2."""

import os
from pathlib import Path

import psutil
import pytest

from stoker_watch.hardware.cgroup import Cgroup, CgroupMemory, host_cores, host_memory, usable_cores

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def cgroup(tmp_path: Path, membership: str, files: dict[str, str]) -> Cgroup:
    write(tmp_path / "mount", files)
    (tmp_path / "membership").write_text(membership)
    return Cgroup(tmp_path / "mount", tmp_path / "membership")


def limit_and_used(found: Cgroup) -> tuple[int, int]:
    memory = found.memory_state()
    assert memory is not None
    return memory.limit, memory.used


def test_version_2_lowest_limit_counts(tmp_path: Path) -> None:
    found = cgroup(
        tmp_path,
        "0::/job/step\n",
        {
            "cgroup.controllers": "cpu memory\n",
            "job/cpu.max": "250000 100000\n",
            "job/step/cpu.max": "max 100000\n",
            "job/memory.max": f"{8 * GIB}\n",
            "job/memory.current": f"{6 * GIB}\n",
            "job/memory.stat": f"anon 1\nfile {2 * GIB}\nactive_file {2 * GIB}\ninactive_file 0\nshmem 0\n",
            "job/step/memory.max": f"{64 * GIB}\n",
            "job/step/memory.current": f"{1 * GIB}\n",
            "job/step/memory.stat": "inactive_file 0\n",
            "job/step/cpu.stat": "usage_usec 9\nthrottled_usec 1500000\n",
            "job/cpu.stat": "usage_usec 9\nthrottled_usec 2500000\n",
        },
    )
    assert found.cpu_limit_cores() == 2.5
    assert limit_and_used(found) == (8 * GIB, 4 * GIB)
    assert found.throttled_s() == 2.5


def test_version_1_inside_a_container_that_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    found = cgroup(
        tmp_path,
        "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
        {
            "cpu/cpu.cfs_quota_us": "150000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "cpu/cpu.stat": "nr_periods 7\nnr_throttled 3\nthrottled_time 4000000000\n",
            "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "memory/memory.stat": f"cache 5\ntotal_cache {GIB}\n",
        },
    )
    assert found.cpu_limit_cores() == 1.5
    assert limit_and_used(found) == (4 * GIB, 2 * GIB)
    assert found.throttled_s() == 4.0


def test_version_1_on_the_host_is_found_below_the_mount(tmp_path: Path) -> None:
    found = cgroup(
        tmp_path,
        "4:memory:/slurm/job_1\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "5\n",
            "memory/slurm/job_1/memory.limit_in_bytes": f"{GIB}\n",
            "memory/slurm/job_1/memory.usage_in_bytes": "1000\n",
            "memory/slurm/job_1/memory.stat": "total_cache 2000\n",
        },
    )
    assert limit_and_used(found) == (GIB, 0), "never negative"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cgroup.controllers": "cpu memory\n", "cpu.max": "max 100000\n",
         "memory.max": "max\n", "memory.current": "1\n"},
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n",
         "memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "1\n"},
    ],
)  # fmt: skip
def test_no_limit_is_none_not_a_number(tmp_path: Path, files: dict[str, str]) -> None:
    found = cgroup(tmp_path, "0::/\n", files)
    assert found.cpu_limit_cores() is None
    assert found.memory_state() is None
    assert found.throttled_s() is None


def test_a_machine_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    found = Cgroup(tmp_path / "absent", tmp_path / "absent too")
    assert (found.cpu_limit_cores(), found.memory_state(), found.throttled_s()) == (None, None, None)


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= host_cores() <= (os.cpu_count() or 1)
    limit, used = host_memory()
    assert 0 < limit <= psutil.virtual_memory().total
    assert 0 <= used <= limit


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/job\n", {"cgroup.controllers": "memory\n", "job/memory.events": "low 0\noom 3\noom_kill 2\n"}),
        ("4:memory:/job\n", {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}),
    ],
    ids=["version 2", "version 1"],
)
def test_processes_killed_for_memory_are_counted(membership: str, files: dict[str, str], tmp_path: Path) -> None:
    assert cgroup(tmp_path, membership, files).oom_kills() == 2
    assert Cgroup(tmp_path / "none", tmp_path / "membership").oom_kills() is None


@pytest.mark.parametrize(
    ("membership", "files", "told"),
    [
        (
            "0::/job\n",
            {
                "cgroup.controllers": "memory\n", "job/memory.max": f"{GIB}\n", "job/memory.current": "5000\n",
                "job/memory.stat": "anon 1\nfile 3000\ninactive_file 2000\nshmem 1000\n",
                "job/memory.swap.current": "700\n",
            },
            CgroupMemory(limit=GIB, used=3000, swap=700),
        ),
        (
            "0::/job\n",
            {"cgroup.controllers": "memory\n", "job/memory.max": f"{GIB}\n", "job/memory.current": "5000\n"},
            CgroupMemory(limit=GIB, used=5000, swap=None),
        ),
        (
            "4:memory:/job\n",
            {
                "memory/job/memory.limit_in_bytes": f"{GIB}\n", "memory/job/memory.usage_in_bytes": "5000\n",
                "memory/job/memory.stat": "cache 1\ntotal_cache 3000\ntotal_inactive_file 2000\ntotal_shmem 1000\n"
                "total_swap 700\n",
            },
            CgroupMemory(limit=GIB, used=3000, swap=700),
        ),
    ],
    ids=["version 2", "version 2 without swap", "version 1"],
)  # fmt: skip
def test_what_the_memory_is_used_for(
    membership: str, files: dict[str, str], told: CgroupMemory, tmp_path: Path
) -> None:
    assert cgroup(tmp_path, membership, files).memory_state() == told


def test_cgroup_of_another_process_also_after_its_end(tmp_path: Path) -> None:
    found = cgroup(
        tmp_path,
        "0::/job\n",
        {"cgroup.controllers": "cpu\n", "cpu.max": "max 100000\n", "job/cpu.max": "50000 100000\n"},
    )
    assert usable_cores(os.getpid(), found) == 0.5
    (tmp_path / "membership").unlink()
    assert found.cpu_limit_cores() == 0.5, "not the whole machine's"
    assert Cgroup.for_pid(7).membership_file == Path("/proc/7/cgroup")
