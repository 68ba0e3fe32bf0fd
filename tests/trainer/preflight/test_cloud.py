"""The cloud machine, from metadata services on loopback: each finding where it must be, and absent where not."""

import socket
from pathlib import Path

import pytest

from stoker.preflight.cloud import CloudMachine, check_cloud, read_machine
from tests.trainer.preflight.metadata_server import NOWHERE, MetadataServer, amazon, google


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with a disk of its own and NFS below /mnt/shared."""
    (tmp_path / "proc/self").mkdir(parents=True)
    mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:50 / /mnt/shared rw - nfs4 server:/x rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    return tmp_path


def firmware(root: Path, vendor: str) -> None:
    (root / "sys/class/dmi/id").mkdir(parents=True)
    (root / "sys/class/dmi/id/sys_vendor").write_text(vendor)


def found(env: dict[str, str], root: Path, run_dir: str | None = None) -> dict[str, str]:
    return {finding.id: finding.severity for finding in check_cloud(env, run_dir=run_dir, root=root)}


def test_machine_of_google(root: Path) -> None:
    with MetadataServer(google()) as server:
        assert read_machine(server.google_env, root=root) == CloudMachine(
            provider="gcp",
            machine_type="a2-highgpu-1g",
            zone="us-central1-a",
            region="us-central1",
            spot=False,
        )
        assert found(server.google_env, root) == {"cloud_machine": "ok"}
        named = read_machine({**server.google_env, "STOKER_MACHINE_TYPE": "a2-ultragpu-1g"}, root=root)
        assert named is not None
        assert named.machine_type == "a2-ultragpu-1g"


@pytest.mark.parametrize(
    ("changes", "id", "severity", "says"),
    [
        ({"maintenance_event": "TERMINATE_ON_HOST_MAINTENANCE"}, "machine_notice", "warning", "TERMINATE_ON_HOST"),
        ({"preempted": "TRUE"}, "machine_notice", "warning", "preempted is TRUE"),
        ({"provisioning_model": "SPOT", "preemptible": "TRUE"}, "spot_run_folder", "warning", "preemption can lose"),
        ({"preemptible": "TRUE"}, "spot_run_folder", "warning", "preemption can lose"),
    ],
)
def test_notices_of_google(root: Path, changes: dict[str, str], id: str, severity: str, says: str) -> None:
    with MetadataServer(google(**changes)) as server:
        finding = next(f for f in check_cloud(server.google_env, run_dir="/runs", root=root) if f.id == id)
    assert finding.severity == severity
    assert says in finding.title
    assert finding.fix or severity == "ok"


@pytest.mark.parametrize(
    ("changes", "id", "severity"),
    [
        ({}, "cloud_machine", "ok"),
        ({"life_cycle": "spot"}, "spot_run_folder", "warning"),
        ({"action": '{"action": "terminate", "time": "2026-11-22T08:22:00Z"}'}, "machine_notice", "warning"),
        ({"rebalance": '{"noticeTime": "2026-11-22T08:22:00Z"}'}, "machine_notice", "warning"),
        ({"scheduled": '[{"Code": "instance-retirement", "NotBefore": "21 Jan 2027", "State": "active"}]'},
         "machine_notice", "warning"),
        ({"scheduled": "not JSON"}, "machine_notice", "warning"),
    ],
)  # fmt: skip
def test_notices_of_amazon(root: Path, changes: dict[str, str], id: str, severity: str) -> None:
    with MetadataServer(amazon(**changes)) as server:
        assert found(server.amazon_env, root, "/runs")[id] == severity


def test_past_events_of_amazon_are_no_notice(root: Path) -> None:
    events = '[{"Code": "system-reboot", "NotBefore": "21 Jan 2026", "State": "completed"}]'
    with MetadataServer(amazon(scheduled=events)) as server:
        machine = read_machine(server.amazon_env, root=root)
    assert machine == CloudMachine(
        provider="aws", machine_type="g5.xlarge", zone="us-east-1b", region="us-east-1", spot=False
    )


@pytest.mark.parametrize(
    ("run_dir", "severity"),
    [("gs://bucket/run", "ok"), ("/mnt/shared/run", "ok"), ("/runs", "warning"), (None, "warning")],
)
def test_run_folder_of_a_spot_machine(root: Path, run_dir: str | None, severity: str) -> None:
    with MetadataServer(google(provisioning_model="SPOT")) as server:
        assert found(server.google_env, root, run_dir)["spot_run_folder"] == severity
        vertex = {**server.google_env, "AIP_CHECKPOINT_DIR": "gs://bucket/checkpoints"}
        assert found(vertex, root)["spot_run_folder"] == "ok"
    with MetadataServer(google()) as server:
        assert "spot_run_folder" not in found(server.google_env, root, run_dir)


def test_no_cloud(root: Path) -> None:
    assert read_machine(NOWHERE, root=root) is None
    assert found(NOWHERE, root) == {"cloud_machine": "ok"}
    firmware(root, "Hetzner")
    assert found({}, root) == {"cloud_machine": "unknown"}


@pytest.mark.parametrize(("vendor", "says"), [("Google", "host's network"), ("Amazon EC2", "hop-limit 2")])
def test_service_that_does_not_answer(root: Path, vendor: str, says: str) -> None:
    firmware(root, vendor)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        env = {"GCE_METADATA_HOST": address} if vendor == "Google" else {"AWS_METADATA_ENDPOINT": f"http://{address}"}
        [finding] = check_cloud({**env, "NO_GCE_CHECK": "true"}, root=root)
    assert (finding.id, finding.severity) == ("metadata_unreachable", "unknown")
    assert says in finding.fix


def test_a_service_that_is_switched_off_is_not_asked(root: Path) -> None:
    firmware(root, "Google")
    [finding] = check_cloud({"NO_GCE_CHECK": "true"}, root=root)
    assert (finding.id, finding.severity, finding.fix) == ("metadata_unreachable", "unknown", "unset NO_GCE_CHECK")


def test_another_program_at_the_address(root: Path) -> None:
    with MetadataServer(google(), portal=True) as server:
        assert read_machine(server.google_env, root=root) is None
    with MetadataServer({}) as server:
        assert read_machine(server.google_env, root=root) is None
        assert read_machine(server.amazon_env, root=root) is None
        assert read_machine({**NOWHERE, "GCE_METADATA_HOST": "not a host:x"}, root=root) is None
