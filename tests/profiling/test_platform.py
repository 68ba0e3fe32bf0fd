"""Whose machine, and on what its folders lie: from trees of files as kernels and firmwares show them."""

import os
import threading
from pathlib import Path

import pytest

from stoker.profiling.telemetry import environment
from stoker.profiling.telemetry.environment import (
    count_cpu_sockets,
    count_numa_nodes,
    describe_storage,
    detect_cloud,
    huge_page_mode,
    system_vendor,
)

MOUNTS = """22 1 8:2 / / rw,relatime - ext4 /dev/sda2 rw
23 22 0:21 / /proc rw - proc proc rw
30 22 259:3 / /scratch rw - xfs /dev/nvme0n1p3 rw
31 22 0:50 / /scratch/shared rw shared:5 - nfs4 server:/export rw
32 22 0:51 / /data\\040sets ro - fuse.gcsfuse bucket ro
33 22 0:52 / /layers rw - overlay overlay rw
34 22 0:53 / /rootless rw - fuse.fuse-overlayfs fuse-overlayfs rw
35 22 0:54 / /twice rw - tmpfs tmpfs rw
36 35 0:55 / /twice rw - lustre mds:/fs rw
"""


def put(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("folder", "kind", "network", "rotational"),
    [
        ("/home/me", "ext4", False, True),
        ("/scratch", "xfs", False, False),
        ("/scratch/runs/x", "xfs", False, False),
        ("/scratchy", "ext4", False, True),
        ("/scratch/shared/runs", "nfs4", True, None),
        ("/data sets/coco", "fuse.gcsfuse", True, None),
        ("/layers/x", "overlay", False, None),
        ("/rootless", "fuse.fuse-overlayfs", False, None),
        ("/twice/x", "lustre", True, None),
        ("s3://bucket/x", "s3", True, None),
    ],
)
def test_a_folder_lies_on_the_innermost_mount(
    folder: str, kind: str, network: bool, rotational: bool | None, tmp_path: Path
) -> None:
    put(tmp_path, proc__self__mountinfo=MOUNTS, devices__sda__queue__rotational="1\n")
    put(
        tmp_path,
        devices__nvme0n1__queue__rotational="0\n",
        devices__nvme0n1__p3__size="5",
        devices__sda__sda2__size="5",
    )
    links = tmp_path / "sys/dev/block"
    links.mkdir(parents=True)
    (links / "8:2").symlink_to(tmp_path / "devices/sda/sda2")  # a partition, inside the folder of its disk
    (links / "259:3").symlink_to(tmp_path / "devices/nvme0n1/p3")
    assert describe_storage(folder, tmp_path) == {"kind": kind, "network": network, "rotational": rotational}


def test_this_machines_storage_shows(tmp_path: Path) -> None:
    if not Path("/proc/self/mountinfo").exists():
        pytest.skip("this system has no /proc")
    assert describe_storage(tmp_path)["kind"]
    assert describe_storage("/proc") == {"kind": "proc", "network": False, "rotational": None}


def test_a_storage_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(environment, "QUERY_TIMEOUT_S", 0.001)
    monkeypatch.setattr(os.path, "realpath", lambda _: go.wait() and "/")
    assert describe_storage("/net/gone") == {"kind": None, "network": None, "rotational": None}
    go.set()


@pytest.mark.parametrize(
    ("files", "whose"),
    [
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "none"}, None),
        ({"sys_vendor": "QEMU", "chassis_asset_tag": "OracleCloud.com"}, "oracle"),
        ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge XE9680"}, None),
        ({}, None),
    ],
)
def test_clouds_are_known_by_their_firmware(files: dict[str, str], whose: str | None, tmp_path: Path) -> None:
    put(tmp_path, **{f"sys__class__dmi__id__{name}": text + "\n" for name, text in files.items()})
    assert detect_cloud(tmp_path) == whose
    words = [files[name] for name in ("sys_vendor", "product_name") if name in files]
    assert system_vendor(tmp_path) == (" ".join(words) or None)


def test_processors_and_huge_pages(tmp_path: Path) -> None:
    assert (count_cpu_sockets(tmp_path), count_numa_nodes(tmp_path), huge_page_mode(tmp_path)) == (None, None, None)
    for core in range(4):
        put(tmp_path, **{f"sys__devices__system__cpu__cpu{core}__topology__physical_package_id": f"{core // 2}\n"})
    put(tmp_path, sys__devices__system__node__node0__x="", sys__devices__system__node__node1__x="")
    put(tmp_path, sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never\n")
    assert (count_cpu_sockets(tmp_path), count_numa_nodes(tmp_path), huge_page_mode(tmp_path)) == (2, 2, "madvise")
