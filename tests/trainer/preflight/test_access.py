"""Access to data and run folder, on real servers that refuse as the clouds do."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import pytest

from stoker.preflight import access
from stoker.preflight.access import check_access, check_readable, check_writable
from stoker_watch.findings.finding import Finding
from tests.watch.storage.object_server import Files, GoogleXml, ObjectServer
from tests.watch.storage.servers import KEYS, NO_CREDENTIALS, Server, apply, google_server, s3_server


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


def only(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_bucket_in_order(servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    served = servers[scheme].bucket()
    apply(monkeypatch, served.environment)
    empty = only(check_readable(f"{served.uri}/set"))
    assert empty.severity == "blocker"
    assert "no object" in empty.title
    written = only(check_writable(f"{served.uri}/runs/x"))
    assert written.severity == "ok", written
    assert only(check_readable(served.uri)).severity == "blocker"  # what was written is gone
    store = access.Store(access.parse_uri(served.uri))
    store.write("set/image.jpg", b"image")
    for data in (f"{served.uri}/set", f"{served.uri}/set/*.jpg", f"{served.uri}/set/image.jpg"):
        assert [finding.severity for finding in check_access(data, f"{served.uri}/runs/x")] == ["ok", "ok"]
    assert [info.key for info in store.list()] == ["set/image.jpg"]


@pytest.mark.parametrize(
    ("denied", "check", "severity", "says", "fix"),
    [
        ("GET", check_readable, "blocker", "No permission", "add-iam-policy-binding"),
        ("GET", check_readable, "blocker", "No permission", "application-default login"),
        ("PUT", check_writable, "blocker", "No permission to write", "roles/storage.objectUser"),
        ("DELETE", check_writable, "warning", "old checkpoints pile up", "roles/storage.objectUser"),
    ],
)
def test_permission_that_is_missing(
    servers: dict[str, Server],
    monkeypatch: pytest.MonkeyPatch,
    denied: str,
    check: Callable[[str], list[Finding]],
    severity: str,
    says: str,
    fix: str,
) -> None:
    served = servers["gs"].bucket()
    apply(monkeypatch, served.environment)
    if "iam" in fix or "roles" in fix:  # an emulator has no identities
        identity = access.Store(access.parse_uri(served.uri)).credentials
        monkeypatch.setattr(
            "stoker_watch.storage.store.find_credentials",
            lambda _: type(identity)("service account a@p (test)", iam_member="serviceAccount:a@p"),
        )
    objects = servers["gs"].objects
    objects.put(served.uri.removeprefix("gs://"), "set/a.jpg", b"image")
    objects.denied.add(denied)
    try:
        finding = only(check(f"{served.uri}/set"))
    finally:
        objects.denied.clear()
    assert finding.severity == severity
    assert says in finding.title
    assert fix in finding.fix


class Refusing(GoogleXml):
    """Refuses every request; the bucket's name says how."""

    answers: ClassVar = {
        "pays": (400, "UserProjectMissing", "Bucket is a requester pays bucket but no user project provided."),
        "scopes": (403, "AccessDenied", "Access denied.</Message><Message>Provided scope(s) are not authorized"),
        "revoked": (401, "AuthenticationRequired", "invalid_grant: Token has been expired or revoked."),
        "busy": (503, "ServiceUnavailable", "Try again."),
    }  # fmt: skip

    def _allowed(self) -> bool:
        status, code, message = self.answers[self.path.split("/")[1].partition("?")[0]]
        self._error(status, code, message)
        return False


class ListedOnly(GoogleXml):
    """Objects can be listed and not be read."""

    def do_GET(self) -> None:
        if unquote(self.path).endswith(".jpg"):
            self._error(403, "AccessDenied", "Access denied.")
        else:
            super().do_GET()

    do_HEAD = do_GET


class Expired(Files):
    """S3 with keys that have run out."""

    def do_GET(self) -> None:
        body = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        self._answer(400, body.encode())

    do_HEAD = do_PUT = do_GET


class ReadersPay(Files):
    """S3's requester pays: without the header, access is denied."""

    def do_GET(self) -> None:
        if self.headers.get("x-amz-request-payer") != "requester":
            self._answer(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
        elif "list-type" in self.path:
            entry = "<Key>set/a</Key><Size>0</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            self._answer(200, f"<ListBucketResult><Contents>{entry}</Contents></ListBucketResult>".encode())
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_HEAD = do_GET


@pytest.mark.parametrize(
    ("bucket", "severity", "fix"),
    [
        ("pays", "blocker", "--no-requester-pays"),
        ("scopes", "blocker", "--scopes=cloud-platform"),
        ("revoked", "blocker", "the login has expired or was revoked; gcloud auth application-default login"),
    ],
)
def test_refusals_of_google(monkeypatch: pytest.MonkeyPatch, bucket: str, severity: str, fix: str) -> None:
    with ObjectServer(Refusing) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, "STORAGE_EMULATOR_HOST": server.url})
        finding = only(check_writable(f"gs://{bucket}/runs"))
    assert finding.severity == severity
    assert fix in finding.fix


@pytest.mark.usefixtures("impatient")
def test_busy_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer(Refusing) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, "STORAGE_EMULATOR_HOST": server.url})
        finding = only(check_writable("gs://busy/runs"))
    assert finding.severity == "warning"
    assert "status page" in finding.fix


def test_objects_that_are_listed_and_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer(ListedOnly) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, "STORAGE_EMULATOR_HOST": server.url})
        server.objects.put("bucket", "set/a.jpg", b"image")
        finding = only(check_readable("gs://bucket/set"))
    assert finding.severity == "blocker"
    assert finding.title == "No permission to read objects of the bucket bucket"


def test_refusals_of_amazon(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer(Expired) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": server.url})
        finding = only(check_writable("s3://bucket/runs"))
        assert finding.severity == "blocker"
        assert finding.title == "The bucket bucket rejects the credentials"
        assert finding.fix.startswith("the session has expired: aws sso login")
    with ObjectServer(ReadersPay) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": server.url})
        assert "AWS_REQUEST_PAYER=true" in only(check_readable("s3://bucket/set")).fix
        monkeypatch.setenv("AWS_REQUEST_PAYER", "true")
        assert only(check_readable("s3://bucket/set")).severity == "ok"


@pytest.mark.usefixtures("impatient")
def test_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    apply(monkeypatch, {**NO_CREDENTIALS, "STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"})
    finding = only(check_readable("gs://bucket/set"))
    assert finding.severity == "blocker"
    assert "no connection" in finding.evidence_text


def test_credentials_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    finding = only(check_readable("gs://bucket/set"))
    assert finding.severity == "blocker"
    assert "GOOGLE_APPLICATION_CREDENTIALS" in finding.title


def test_local_folders(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(json.dumps({}))
    found = check_access(str(tmp_path), str(tmp_path / "runs/new"))
    assert [finding.severity for finding in found] == ["ok", "ok"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json"]
    assert only(check_readable(str(tmp_path / "*.json"))).severity == "ok"
    assert only(check_readable(str(tmp_path / "absent"))).severity == "blocker"
    assert only(check_writable(str(tmp_path / "data.json" / "runs"))).severity == "blocker"
    proc = only(check_writable("/proc/self/runs"))  # refuses root, too
    assert proc.severity == "blocker"
    assert "shows the kernel and keeps no files" in proc.evidence_text
    assert proc.fix == "name another --run-dir"
    assert only(check_writable("https://host/runs")).severity == "blocker"
    assert only(check_readable("gs:/one-slash/set")).severity == "blocker"


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
        finding = only(check_writable(str(tmp_path / "runs")))
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
    assert (finding.severity, finding.place) == ("blocker", str(tmp_path))
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
            fixes = [only(check_writable(str(path))).fix for path in (theirs, mine)]
        finally:
            os.setresuid(0, 0, 0)
    assert fixes == [f"name another --run-dir, or: sudo chown $(id -u) {theirs}",
                     f"name another --run-dir, or: chmod u+wx {mine}"]  # fmt: skip


def test_vertex_folder_is_the_run_folder(tmp_path: Path) -> None:
    [finding] = check_access("demo", None, env={"AIP_CHECKPOINT_DIR": str(tmp_path)})
    assert (finding.severity, finding.place) == ("ok", str(tmp_path))
