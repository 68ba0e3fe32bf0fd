"""Access to the run folder, on real servers that refuse as the clouds do."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.preflight import access
from stoker.preflight.access import check_writable
from tests.watch.storage.object_server import GoogleXml, ObjectServer
from tests.watch.storage.servers import NO_CREDENTIALS, Server, apply, google_server, s3_server


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with s3_server() as s3, google_server() as google:
        yield {"s3": s3, "gs": google}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers answer, however busy this machine is."""
    apply(monkeypatch, NO_CREDENTIALS)
    monkeypatch.setattr(access, "TIMEOUT_S", 30.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are repeated all this time where no answer comes."""
    monkeypatch.setattr(access, "TIMEOUT_S", 0.6)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_bucket_in_order(servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    served = servers[scheme].bucket()
    apply(monkeypatch, served.environment)
    written = check_writable(f"{served.uri}/runs/x")
    assert written.severity == "ok", written
    assert list(access.Store(access.parse_uri(served.uri)).list()) == []  # what was written is gone


@pytest.mark.parametrize(
    ("denied", "severity", "says", "fix"),
    [
        ("PUT", "blocker", "no permission to write", "application-default login"),
        ("PUT", "blocker", "no permission to write", "roles/storage.objectUser"),
        ("DELETE", "warning", "old checkpoints pile up", "roles/storage.objectUser"),
    ],
)
def test_permission_that_is_missing(
    servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch, denied: str, severity: str, says: str, fix: str
) -> None:
    served = servers["gs"].bucket()
    apply(monkeypatch, served.environment)
    if "roles" in fix:  # an emulator has no identities
        identity = access.Store(access.parse_uri(served.uri)).credentials
        monkeypatch.setattr(
            "stoker_watch.storage.store.find_credentials",
            lambda _: type(identity)("service account a@p (test)", iam_member="serviceAccount:a@p"),
        )
    objects = servers["gs"].objects
    objects.denied.add(denied)
    try:
        finding = check_writable(f"{served.uri}/set")
    finally:
        objects.denied.clear()
    assert finding.severity == severity
    assert says in finding.title.lower()
    assert fix in finding.fix


class Busy(GoogleXml):
    def _allowed(self) -> bool:
        self._error(503, "ServiceUnavailable", "Try again.")
        return False


@pytest.mark.usefixtures("impatient")
def test_busy_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer(Busy) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, "STORAGE_EMULATOR_HOST": server.url})
        finding = check_writable("gs://busy/runs")
    assert finding.severity == "warning"
    assert "status page" in finding.fix


@pytest.mark.usefixtures("impatient")
def test_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    apply(monkeypatch, {**NO_CREDENTIALS, "STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"})
    finding = check_writable("gs://bucket/set")
    assert finding.severity == "blocker"
    assert "no connection" in finding.evidence_text


def test_local_folders(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("{}")
    assert check_writable(str(tmp_path / "runs/new")).severity == "ok"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json"]
    assert check_writable(str(tmp_path / "data.json" / "runs")).severity == "blocker"
    proc = check_writable("/proc/self/runs")  # refuses root, too
    assert proc.severity == "blocker"
    assert "shows the kernel and keeps no files" in proc.evidence_text
    assert proc.fix == "name another --run-dir"
    assert check_writable("https://host/runs").severity == "blocker"
    assert check_writable("gs:/one-slash/set").severity == "blocker"


@pytest.mark.parametrize(
    ("options", "why", "fix"),
    [
        ("ro,size=64k", "is mounted read-only", "sudo mount -o remount,rw"),
        ("size=64k,nr_inodes=1", "No space left", "make room (df -h"),
    ],
)
def test_a_file_system_that_takes_no_file(tmp_path: Path, options: str, why: str, fix: str) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        finding = check_writable(str(tmp_path / "runs"))
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
    assert finding.severity == "blocker"
    assert why in finding.evidence_text
    assert fix in finding.fix
    assert "chown" not in finding.fix


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user, and is refused by no folder")
def test_a_folder_of_another_user_and_one_without_permission() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's are readable by root alone
        theirs, mine = Path(folder, "theirs"), Path(folder, "mine")
        theirs.mkdir(mode=0o755)
        mine.mkdir(mode=0o555)
        os.chown(mine, 4242, -1)
        os.chmod(folder, 0o755)
        os.setresuid(4242, 4242, 0)
        try:
            fixes = [check_writable(str(path)).fix for path in (theirs, mine)]
        finally:
            os.setresuid(0, 0, 0)
    assert fixes == [f"name another --run-dir, or: sudo chown $(id -u) {theirs}",
                     f"name another --run-dir, or: chmod u+wx {mine}"]  # fmt: skip
