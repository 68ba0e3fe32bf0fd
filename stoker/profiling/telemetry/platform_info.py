"""Where a run runs: whose machine it is, how its processors are laid out, and on what its folders lie.

From files of /sys and /proc, once at the start (`environment`); nobody is asked over the network. What is not said is
None: containers often hide it.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.profiling.telemetry.procfs import text_or_none
from stoker.profiling.telemetry.timeouts import Beside

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

NETWORK_KINDS = re.compile(
    r"nfs|cifs|smb|9p$|virtiofs$|ceph|lustre|gpfs|beegfs|glusterfs|afs|fuse\.(?!fuse-overlayfs)|gcsfuse"
)
"""File systems whose bytes come over a network, or through a program that may fetch them from one."""

ANSWER_WITHIN_S = 20.0
"""How long a start waits for one of these questions: a driver or a storage may hang."""


def cloud(root: Path = Path("/")) -> str | None:
    """Whose machine this is, by what its firmware says."""
    for name, begins, whose in CLOUDS:
        if re.match(begins, text_or_none(f"{root}/sys/class/dmi/id/{name}") or ""):
            return whose
    return None


def board(root: Path = Path("/")) -> str | None:
    """Maker and model, as the firmware says them."""
    words = [text_or_none(f"{root}/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return " ".join(word for word in words if word) or None


def sockets(root: Path = Path("/")) -> int | None:
    """Processors in the sense of chips."""
    packages = {path.read_text() for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/topology/physical_package_id")}
    return len(packages) or None


def numa_nodes(root: Path = Path("/")) -> int | None:
    return len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or None


def huge_pages(root: Path = Path("/")) -> str | None:
    """When the kernel gives processes huge pages: always, madvise, never."""
    found = re.search(r"\[(\w+)\]", text_or_none(f"{root}/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return found[1] if found else None


def storage(folder: str | Path, root: Path = Path("/")) -> dict[str, Any]:
    """On what a folder, or an address in a bucket, lies. kind: of file system, or the store; network: bytes come over
    one; rotational: of a disk with platters, None where no disk shows."""
    if "://" in str(folder):
        return {"kind": str(folder).partition("://")[0], "network": True, "rotational": None}
    found = answered(lambda: _mount(os.path.realpath(folder), root), None)
    if found is None:
        return {"kind": None, "network": None, "rotational": None}
    device, kind = found
    return {"kind": kind, "network": NETWORK_KINDS.match(kind) is not None, "rotational": _rotational(device, root)}


def answered(question: Callable[[], Any], otherwise: Any) -> Any:
    """What it says, or `otherwise` when it says nothing for ANSWER_WITHIN_S."""
    beside = Beside(lambda: question, name="environment")
    told = beside.ask(ANSWER_WITHIN_S)
    beside.end()
    return otherwise if told is None else told


def _mount(folder: str, root: Path) -> tuple[str, str] | None:
    """(major:minor, kind) of the file system that holds a folder (proc_pid_mountinfo(5))."""
    found, length = None, 0
    for line in (text_or_none(f"{root}/proc/self/mountinfo") or "").splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        point = fields[4].replace("\\040", " ")
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= length:  # of two on one point, the later one is seen
            found, length = (fields[2], source.split()[0]), len(point)
    return found


def _rotational(device: str, root: Path) -> bool | None:
    own = f"{root}/sys/dev/block/{device}"
    said = text_or_none(f"{own}/queue/rotational") or text_or_none(
        f"{own}/../queue/rotational"
    )  # a partition's is its disk's
    return None if said is None else said == "1"
