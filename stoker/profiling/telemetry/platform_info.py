"""The platform of a run: cloud, CPU layout, and the storage of its folders.

Read once at the start from files in /sys and /proc (`environment`); no network requests. A fact that is not available
is None: containers often hide it.
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
"""File of the DMI table, pattern at the start of its text, cloud; as in cloud-init's ds-identify."""

NETWORK_FILESYSTEMS = re.compile(
    r"nfs|cifs|smb|9p$|virtiofs$|ceph|lustre|gpfs|beegfs|glusterfs|afs|fuse\.(?!fuse-overlayfs)|gcsfuse"
)
"""File systems that read over a network, or through a program that may do so."""

QUERY_TIMEOUT_S = 20.0
"""Timeout of one query at the start: a driver or a storage may hang."""


def detect_cloud(root: Path = Path("/")) -> str | None:
    """The cloud of this machine, by its firmware."""
    for name, pattern, provider in CLOUDS:
        if re.match(pattern, read_text_or_none(f"{root}/sys/class/dmi/id/{name}") or ""):
            return provider
    return None


def system_vendor(root: Path = Path("/")) -> str | None:
    """Vendor and model, by the firmware."""
    parts = [read_text_or_none(f"{root}/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in parts if part) or None


def count_cpu_sockets(root: Path = Path("/")) -> int | None:
    """The number of CPU chips."""
    packages = {path.read_text() for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/topology/physical_package_id")}
    return len(packages) or None


def count_numa_nodes(root: Path = Path("/")) -> int | None:
    return len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or None


def huge_page_mode(root: Path = Path("/")) -> str | None:
    """The mode of transparent huge pages: always, madvise, never."""
    match = re.search(r"\[(\w+)\]", read_text_or_none(f"{root}/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return match[1] if match else None


def describe_storage(location: str | Path, root: Path = Path("/")) -> dict[str, Any]:
    """The storage of a folder or bucket URI. kind: file system or object store; network: whether bytes come over a
    network; rotational: whether it is a hard disk, None if no disk is visible."""
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
    """The result, or `default` if there is none within QUERY_TIMEOUT_S."""
    worker = TimeoutWorker(lambda: query, name="environment")
    answer = worker.call(QUERY_TIMEOUT_S)
    worker.stop()
    return default if answer is None else answer


def _find_mount(path: str, root: Path) -> tuple[str, str] | None:
    """(major:minor, kind) of the file system that contains a folder (proc_pid_mountinfo(5))."""
    best, best_length = None, 0
    for line in (read_text_or_none(f"{root}/proc/self/mountinfo") or "").splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        mount_point = fields[4].replace("\\040", " ")
        contains = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        if contains and len(mount_point) >= best_length:  # of two mounts on one point, the later one is visible
            best, best_length = (fields[2], source.split()[0]), len(mount_point)
    return best


def _is_rotational(device: str, root: Path) -> bool | None:
    device_dir = f"{root}/sys/dev/block/{device}"
    value = read_text_or_none(f"{device_dir}/queue/rotational") or read_text_or_none(
        f"{device_dir}/../queue/rotational"
    )  # a partition's is its disk's
    return None if value is None else value == "1"
