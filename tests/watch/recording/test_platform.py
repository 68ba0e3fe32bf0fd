"""Whose machine, and on what its folders lie: from trees of files as kernels and firmwares show them."""

import os
import threading
from pathlib import Path

import pytest

from stoker_watch.recording.telemetry import environment
from stoker_watch.recording.telemetry.environment import describe_storage, detect_cloud

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
    ("folder", "kind", "network"),
    [
        ("/home/me", "ext4", False),
        ("/scratch", "xfs", False),
        ("/scratch/runs/x", "xfs", False),
        ("/scratchy", "ext4", False),
        ("/scratch/shared/runs", "nfs4", True),
        ("/data sets/coco", "fuse.gcsfuse", True),
        ("/layers/x", "overlay", False),
        ("/rootless", "fuse.fuse-overlayfs", False),
        ("/twice/x", "lustre", True),
        ("s3://bucket/x", "s3", True),
    ],
)
def test_a_folder_lies_on_the_innermost_mount(folder: str, kind: str, network: bool, tmp_path: Path) -> None:
    put(tmp_path, proc__self__mountinfo=MOUNTS)
    assert describe_storage(folder, tmp_path) == {"kind": kind, "network": network}


def test_this_machines_storage_shows(tmp_path: Path) -> None:
    if not Path("/proc/self/mountinfo").exists():
        pytest.skip("this system has no /proc")
    assert describe_storage(tmp_path)["kind"]
    assert describe_storage("/proc") == {"kind": "proc", "network": False}


def test_a_storage_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(environment, "QUERY_TIMEOUT_S", 0.001)
    monkeypatch.setattr(os.path, "realpath", lambda _: go.wait() and "/")
    assert describe_storage("/net/gone") == {"kind": None, "network": None}
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
