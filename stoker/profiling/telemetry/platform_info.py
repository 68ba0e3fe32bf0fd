"""Where a run runs: whose machine it is, how its processors are laid out, and on what its folders lie.

From files of /sys and /proc, once at the start (`environment`); nobody is asked over the network. What is not said is
None: containers often hide it.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.profiling.telemetry.procfs import read_text_or_none
from stoker.profiling.telemetry.timeouts import TimeoutWorker

CLOUDS = (
    ("sys_vendor", r"Google", "gcp"),
    ("product_name", r"Google Compute Engine", "gcp"),
    ("sys_vendor", r"Amazon EC2", "aws"),
    ("bios_vendor", r"Amazon EC2", "aws"),
    ("chassis_asset_tag", r"7783-7084-3265-9085-8269-3286-77$", "azure"),
    ("chassis_asset_tag", r"OracleCloud\.com", "oracle"),
    ("sys_vendor", r"Alibaba Cloud", "alibaba"),
    ("sys_vendor", r"DigitalOcean", "digitalocean"),
    ("sys_vendor", r"Hetzner", "hetzner"),
    ("sys_vendor", r"Scaleway", "scaleway"),
    ("sys_vendor", r"Vultr", "vultr"),
    ("sys_vendor", r"OpenStack", "openstack"),
    ("product_name", r"OpenStack", "openstack"),
)
"""File of the firmware's table, how its text begins, whose machine that is; as in cloud-init's ds-identify."""

NETWORK_FILESYSTEMS = re.compile(
    r"nfs|cifs|smb|9p$|virtiofs$|ceph|lustre|gpfs|beegfs|glusterfs|afs|fuse\.(?!fuse-overlayfs)|gcsfuse"
)
"""File systems whose bytes come over a network, or through a program that may fetch them from one."""

QUERY_TIMEOUT_S = 20.0
"""How long a start waits for one of these questions: a driver or a storage may hang."""


def detect_cloud(root: Path = Path("/")) -> str | None:
    """Whose machine this is, by what its firmware says."""
    for name, pattern, provider in CLOUDS:
        if re.match(pattern, read_text_or_none(f"{root}/sys/class/dmi/id/{name}") or ""):
            return provider
    return None


def system_vendor(root: Path = Path("/")) -> str | None:
    """Maker and model, as the firmware says them."""
    parts = [read_text_or_none(f"{root}/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in parts if part) or None


def count_cpu_sockets(root: Path = Path("/")) -> int | None:
    """Processors in the sense of chips."""
    packages = {path.read_text() for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/topology/physical_package_id")}
    return len(packages) or None


def count_numa_nodes(root: Path = Path("/")) -> int | None:
    return len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or None


def huge_page_mode(root: Path = Path("/")) -> str | None:
    """When the kernel gives processes huge pages: always, madvise, never."""
    match = re.search(r"\[(\w+)\]", read_text_or_none(f"{root}/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return match[1] if match else None


def describe_storage(location: str | Path, root: Path = Path("/")) -> dict[str, Any]:
    """On what a folder, or an address in a bucket, lies. kind: of file system, or the store; network: bytes come over
    one; rotational: of a disk with platters, None where no disk shows."""
    if "://" in str(location):
        return {"kind": str(location).partition("://")[0], "network": True, "rotational": None}
    mount = query_with_timeout(lambda: _find_mount(os.path.realpath(location), root), None)
    if mount is None:
        return {"kind": None, "network": None, "rotational": None}
    device, kind = mount
    return {
        "kind": kind,
        "network": NETWORK_FILESYSTEMS.match(kind) is not None,
        "rotational": _is_rotational(device, root),
    }


def query_with_timeout(query: Callable[[], Any], default: Any) -> Any:
    """What it says, or `otherwise` when it says nothing for ANSWER_WITHIN_S."""
    worker = TimeoutWorker(lambda: query, name="environment")
    answer = worker.call(QUERY_TIMEOUT_S)
    worker.stop()
    return default if answer is None else answer


def _find_mount(path: str, root: Path) -> tuple[str, str] | None:
    """(major:minor, kind) of the file system that holds a folder (proc_pid_mountinfo(5))."""
    best, best_length = None, 0
    for line in (read_text_or_none(f"{root}/proc/self/mountinfo") or "").splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        mount_point = fields[4].replace("\\040", " ")
        contains = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        if contains and len(mount_point) >= best_length:  # of two on one point, the later one is seen
            best, best_length = (fields[2], source.split()[0]), len(mount_point)
    return best


def _is_rotational(device: str, root: Path) -> bool | None:
    device_dir = f"{root}/sys/dev/block/{device}"
    value = read_text_or_none(f"{device_dir}/queue/rotational") or read_text_or_none(
        f"{device_dir}/../queue/rotational"
    )  # a partition's is its disk's
    return None if value is None else value == "1"
