"""Error messages of storage: bucket, object, credentials, missing permission, fix."""

import contextlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from stoker_watch.errors import Conflict, ObjectMissing, StorageError
from stoker_watch.storage.clients import Credentials
from stoker_watch.storage.failures import Failure, FailureKind, Timeouts, to_storage_error
from stoker_watch.storage.store import Store
from stoker_watch.storage.uri import parse_uri
from tests.watch.storage.servers import KEYS, NO_CREDENTIALS, Server, apply


@contextlib.contextmanager
def refusing(status: int, body: str, headers: dict[str, str] | None = None) -> Iterator[str]:
    """A server that answers all alike."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = b"" if self.command == "HEAD" else body.encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        do_HEAD = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False  # obstore keeps its connections
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def error(code: str, message: str = "", details: str = "") -> str:
    text = f"<Message>{message}</Message>" + (f"<Details>{details}</Details>" if details else "")
    return f"<Error><Code>{code}</Code>{text}</Error>"


@pytest.mark.parametrize("kind", ["name", "bucket"])
def test_the_fix_without_a_command(kind: FailureKind) -> None:
    uri = parse_uri("https://host/sets/a")
    found = to_storage_error(
        Failure(kind, "x", "x"),
        uri=uri,
        credentials=Credentials("none", anonymous=True),
        action="read",
        attempts_text="",
    )
    assert "on its server" in str(found.fix)


def read(store: Store) -> None:
    store.read("train/1.jpg")


def listing(store: Store) -> None:
    list(store.list("train"))


def write(store: Store) -> None:
    store.write("train/1.jpg", b"x")


S3: list[tuple[str, int, str, Callable[[Store], None], str]] = [
    ("read", 403, error("AccessDenied", "Access Denied"), read, """No permission to read objects of the bucket bucket.
  where:  s3://bucket/train/1.jpg
  why:    credentials: access key AKIA…MPLE (AWS_ACCESS_KEY_ID); missing permission: s3:GetObject (without \
s3:ListBucket the response is the same for an object that does not exist); response: 403 AccessDenied, Access Denied
  fix:    Add to a policy of this identity: {"Effect": "Allow", "Action": "s3:GetObject", "Resource": \
"arn:aws:s3:::bucket/*"}; for a bucket whose readers pay: export AWS_REQUEST_PAYER=true"""),
    ("list", 403, error("AccessDenied", "Access Denied"), listing,
     """No permission to list objects of the bucket bucket.
  where:  s3://bucket/train
  why:    credentials: access key AKIA…MPLE (AWS_ACCESS_KEY_ID); missing permission: s3:ListBucket; response: 403 \
AccessDenied, Access Denied
  fix:    Add to a policy of this identity: {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": \
"arn:aws:s3:::bucket"}; for a bucket whose readers pay: export AWS_REQUEST_PAYER=true"""),
    ("write", 403, error("AccessDenied", "Access Denied"), write,
     """No permission to write objects of the bucket bucket.
  where:  s3://bucket/train/1.jpg
  why:    credentials: access key AKIA…MPLE (AWS_ACCESS_KEY_ID); missing permission: s3:PutObject; response: 403 \
AccessDenied, Access Denied
  fix:    Add to a policy of this identity: {"Effect": "Allow", "Action": "s3:PutObject", "Resource": \
"arn:aws:s3:::bucket/*"}"""),
    ("clock", 403, error("RequestTimeTooSkewed", "The difference is too large."), read,
     """The clock of this machine is wrong: the store rejects the time of the signature.
  where:  s3://bucket/train/1.jpg
  why:    response: 403 RequestTimeTooSkewed, The difference is too large.
  fix:    Set it: sudo chronyc makestep, or timedatectl set-ntp true"""),
    ("expired", 400, error("ExpiredToken", "The provided token has expired."), read,
     """The bucket bucket rejects the credentials.
  where:  s3://bucket/train/1.jpg
  why:    credentials: access key AKIA…MPLE (AWS_ACCESS_KEY_ID); response: 400 ExpiredToken, The provided token has \
expired.
  fix:    the session has expired: aws sso login, or fetch new temporary keys; AWS_PROFILE=NAME (aws configure \
list-profiles), or AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…"""),
    ("region", 400, error("AuthorizationHeaderMalformed", "the region 'us-east-1' is wrong; expecting 'eu-west-1'"),
     read, """The bucket bucket is in another region.
  where:  s3://bucket/train/1.jpg
  why:    it is in eu-west-1; response: 400 AuthorizationHeaderMalformed, the region 'us-east-1' is wrong; \
expecting 'eu-west-1'
  fix:    export AWS_REGION=eu-west-1"""),
    ("bucket", 404, error("NoSuchBucket", "The specified bucket does not exist"), read,
     """There is no bucket bucket.
  where:  s3://bucket/train/1.jpg
  why:    response: 404 NoSuchBucket, The specified bucket does not exist; credentials: access key AKIA…MPLE \
(AWS_ACCESS_KEY_ID)
  fix:    Correct the name, or create it: aws s3 mb s3://bucket"""),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "action", "message"), [case[1:] for case in S3], ids=[c[0] for c in S3])
def test_s3(
    status: int, body: str, action: Callable[[Store], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing(status, body) as url:
        apply(monkeypatch, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": url})
        with pytest.raises(StorageError) as caught:
            action(Store(parse_uri("s3://bucket")))
    assert str(caught.value) == message
    assert caught.value.exit_code == 3


def test_region_of_a_redirect_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing(301, error("PermanentRedirect"), {"x-amz-bucket-region": "eu-north-1"}) as url:
        apply(monkeypatch, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": url})
        with pytest.raises(StorageError, match="another region") as caught:
            read(Store(parse_uri("s3://bucket")))
    assert caught.value.fix == "export AWS_REGION=eu-north-1"


def test_google(google: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    served = google.bucket()
    apply(monkeypatch, served.environment)
    monkeypatch.setattr(google.objects, "denied", {"GET"})
    store = Store(parse_uri(served.uri))
    with pytest.raises(StorageError) as caught:
        read(store)
    assert str(caught.value) == (
        f"""No permission to read objects of the bucket {store.uri.bucket}.
  where:  {served.uri}/train/1.jpg
  why:    credentials: anonymous (STORAGE_EMULATOR_HOST={google.url}); missing permission: storage.objects.get; \
response: 403 AccessDenied, Access denied.; \
somebody@example.org does not have access to the Google Cloud Storage object.
  fix:    gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS=KEY_FILE"""
    )
    google.objects.denied = set()
    with pytest.raises(StorageError, match=r"no bucket nobodys"):
        Store(parse_uri("gs://nobodys")).read("x")
    with pytest.raises(StorageError, match=r"no bucket nobodys"):
        Store(parse_uri("gs://nobodys")).stat("x")


def test_fix_grants_to_the_account() -> None:
    account = "train@project.iam.gserviceaccount.com"
    told = to_storage_error(
        Failure("denied", "403 AccessDenied", "Access denied.", status=403),
        uri=parse_uri("gs://bucket/run/1"),
        credentials=Credentials(f"service account {account}", iam_member=f"serviceAccount:{account}"),
        action="write",
        attempts_text="",
    )
    assert told.fix == (
        f"gcloud storage buckets add-iam-policy-binding gs://bucket --member=serviceAccount:{account} "
        "--role=roles/storage.objectUser"
    )


def test_missing_and_conflict(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    served = s3.bucket()
    apply(monkeypatch, served.environment)
    store = Store(parse_uri(served.uri))
    with pytest.raises(ObjectMissing) as missing:
        read(store)
    assert missing.value.what == "There is no object 1.jpg."
    assert missing.value.fix == f"List the objects that exist: aws s3 ls {served.uri}/train/"
    write(store)
    with pytest.raises(Conflict) as conflict:
        store.write("train/1.jpg", b"y", if_absent=True)
    assert conflict.value.location == f"{served.uri}/train/1.jpg"
    with pytest.raises(StorageError) as short:
        store.read("train/1.jpg", start=0, length=5)
    assert "it has 1 bytes; requested were those from 0 to 5" in str(short.value)


def test_missing_endpoint_is_reported_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing(200, "") as url:
        pass  # no server listens there now
    apply(monkeypatch, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": url})
    store = Store(parse_uri("s3://bucket"), timeouts=Timeouts(total_s=6.0))
    with pytest.raises(StorageError, match=r"tried \d+ times in [01] s: \d+ × no connection"):
        read(store)
