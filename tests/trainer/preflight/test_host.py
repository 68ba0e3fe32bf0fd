"""Each finding about the host and the container, red and green, from fake trees of /proc, /sys and cgroups."""

import dataclasses
import errno
from pathlib import Path
from typing import Any

import pytest

from stoker.preflight import host as probes
from stoker.preflight.host import Host, check_host
from stoker_watch.findings.finding import Finding
from stoker_watch.hardware.cgroup import Cgroup

GIB = 2**30


def meminfo(total: int, available: int, swap: int = 0) -> str:
    lines = {"MemTotal": total, "MemAvailable": available, "SwapTotal": 8 * GIB, "SwapFree": 8 * GIB - swap}
    return "".join(f"{name}: {size // 1024} kB\n" for name, size in lines.items())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine without faults: 8 cores, a GPU, 32 GiB, no limits."""
    write(tmp_path, {
        "proc/meminfo": meminfo(32 * GIB, 30 * GIB), "cgroup/cgroup.controllers": "cpu memory\n", "member": "0::/job\n",
        "cgroup/job/x": "", "dev/shm/x": "", "runs/x": "",
    })  # fmt: skip
    return Host(
        run_dir=tmp_path / "runs" / "new",
        num_gpus=1,
        checkpoint_bytes=2**20,
        env={},
        root=tmp_path,
        cgroup=Cgroup(tmp_path / "cgroup", tmp_path / "member"),
        affinity=8,
        max_files=65536,
        write_bytes=2**20,
    )


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def found(host: Host, **changes: Any) -> dict[str, Finding]:
    return {finding.id: finding for finding in check_host(dataclasses.replace(host, **changes))}


def test_a_machine_without_faults_is_in_order(host: Host):
    findings = found(host)
    assert {finding.severity for finding in findings.values()} == {"ok"}
    assert set(findings) == {"cpu_cores", "threads", "memory", "swap", "shm", "file_handles", "disk"}
    assert not list((host.root / "runs").glob("tmp*")), "the file that was written is gone"


@pytest.mark.parametrize(
    ("files", "changes", "id", "severity", "words"),
    [
        ({}, {"num_gpus": 4}, "cpu_cores", "warning", "2 cores per GPU"),
        ({}, {"demand_cores": 12.3, "demand_text": "410 img/s"}, "cpu_cores", "warning", "needs 12"),
        ({}, {"demand_cores": 7.9}, "cpu_cores", "ok", "8 cores per GPU"),
        ({"cgroup/job/cpu.max": "200000 100000\n", "cgroup/job/cpu.stat": "throttled_usec 5000000\n"}, {"num_gpus": 0},
         "cpu_quota", "warning", "OMP_NUM_THREADS=2"),
        ({"cgroup/job/cpu.max": "200000 100000\n"}, {"env": {"OMP_NUM_THREADS": "2"}}, "cpu_quota", "ok", "2 cores"),
        ({}, {"env": {"OMP_NUM_THREADS": "64"}}, "threads", "warning", "OMP_NUM_THREADS=64"),
        ({}, {"env": {"MKL_NUM_THREADS": "8"}}, "threads", "ok", ""),
        ({"proc/meminfo": meminfo(32 * GIB, GIB)}, {}, "memory", "warning", "1.0 GiB of memory"),
        ({"proc/meminfo": meminfo(32 * GIB, GIB // 4)}, {}, "memory", "blocker", "kill"),
        ({"cgroup/job/memory.max": f"{4 * GIB}\n", "cgroup/job/memory.current": f"{3 * GIB}\n",
          "cgroup/job/memory.stat": "inactive_file 0\n"}, {}, "memory", "warning", "of the cgroup"),
        ({"proc/meminfo": ""}, {}, "memory", "unknown", ""),
        ({"proc/meminfo": meminfo(32 * GIB, 20 * GIB, 3 * GIB)}, {}, "swap", "warning", "3.0 GiB"),
        ({}, {"max_files": 256}, "file_handles", "warning", "256 files"),
        ({}, {"checkpoint_bytes": 2**50}, "disk", "blocker", "are free"),
    ],
)  # fmt: skip
def test_each_fault(host: Host, files: dict[str, str], changes: dict[str, Any], id: str, severity: str, words: str):
    write(host.root, files)
    finding = found(host, **changes)[id]
    assert finding.severity == severity
    assert words in " ".join((finding.title, finding.evidence_text, finding.fix))
    assert finding.fix or severity in ("ok", "unknown")


def test_shared_memory_of_docker(host: Host, monkeypatch: pytest.MonkeyPatch):
    sizes = {64 * 2**20: "warning", 8 * GIB: "ok"}
    for total, severity in sizes.items():
        monkeypatch.setattr(probes.machine, "disk_usage", lambda _, total=total: (0, total))
        assert found(host)["shm"].severity == severity
    monkeypatch.setattr(probes.machine, "disk_usage", lambda _: (8 * GIB - 1, 8 * GIB))
    assert "full" in found(host)["shm"].title


def test_a_slow_disk_a_full_one_and_one_that_refuses(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probes, "measure_write_speed", lambda *_: 2.0**20)
    assert found(host, checkpoint_bytes=100 * 2**20)["disk"].severity == "warning"
    assert found(host, checkpoint_bytes=2**20)["disk"].severity == "ok"

    def refuse(*_: object) -> float:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(probes, "measure_write_speed", refuse)
    assert found(host)["disk"].evidence_text == "Disk quota exceeded"
    assert found(host)["disk"].severity == "blocker"
    assert "disk" not in found(host, run_dir=None), "a run in a bucket"
    monkeypatch.setattr(probes.machine, "free_bytes", lambda _: 3 * 2**20)
    assert found(host)["disk"].severity == "warning"


def test_a_file_system_of_the_kernel_has_no_room_to_speak_of(host: Host):
    assert "disk" not in found(host, run_dir=Path("/proc/runs"), write_bytes=0)
