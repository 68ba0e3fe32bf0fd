"""What a user sees at the first access to a bucket with a wrong key, bucket, region, endpoint or clock: the error names
the variable or the file, and the fix."""

import json
from typing import ClassVar, Literal

import pytest

from stoker_watch.errors import StorageError
from stoker_watch.storage.store import Store
from stoker_watch.storage.uri import parse_uri
from tests.watch.storage.object_server import Files, GoogleXml, ObjectServer
from tests.watch.storage.servers import KEYS, NO_CREDENTIALS, apply


class Refusing(GoogleXml):
    """Refuses every request; the bucket's name says how."""

    answers: ClassVar = {
        "pays": (400, "UserProjectMissing", "Bucket is a requester pays bucket but no user project provided."),
        "scopes": (403, "AccessDenied", "Access denied.</Message><Message>Provided scope(s) are not authorized"),
        "revoked": (401, "AuthenticationRequired", "invalid_grant: Token has been expired or revoked."),
    }  # fmt: skip

    def _allowed(self) -> bool:
        status, code, message = self.answers[self.path.split("/")[1].partition("?")[0]]
        self._error(status, code, message)
        return False


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


def refused(uri: str, action: Literal["read", "write"] = "read") -> StorageError:
    """The error of the first access."""
    store = Store(parse_uri(uri))
    with pytest.raises(StorageError) as caught:
        next(store.list("set"), None) if action == "read" else store.write("runs/x", b"")
    return caught.value


@pytest.mark.parametrize(
    ("bucket", "fix"),
    [
        ("pays", "--no-requester-pays"),
        ("scopes", "--scopes=cloud-platform"),
        ("revoked", "the login has expired or was revoked; gcloud auth application-default login"),
    ],
)
def test_refusals_of_google(monkeypatch: pytest.MonkeyPatch, bucket: str, fix: str) -> None:
    with ObjectServer(Refusing) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, "STORAGE_EMULATOR_HOST": server.url})
        assert fix in (refused(f"gs://{bucket}", "write").fix or "")


def test_refusals_of_amazon(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer(Expired) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": server.url})
        error = refused("s3://bucket", "write")
        assert error.what == "The bucket bucket rejects the credentials."
        assert (error.fix or "").startswith("the session has expired: aws sso login")
    with ObjectServer(ReadersPay) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": server.url})
        assert "AWS_REQUEST_PAYER=true" in (refused("s3://bucket").fix or "")
        assert "AWS_REQUEST_PAYER=true" not in (refused("s3://bucket", "write").fix or "")
        monkeypatch.setenv("AWS_REQUEST_PAYER", "true")
        assert next(Store(parse_uri("s3://bucket")).list("set")).key == "set/a"


SERVICE_ACCOUNT = {"type": "service_account", "client_email": "a@p"}


@pytest.mark.parametrize(
    ("uri", "env", "says"),
    [
        ("s3://b", {"AWS_ACCESS_KEY_ID": "AKIA1\n", "AWS_SECRET_ACCESS_KEY": "s"}, "AWS_ACCESS_KEY_ID has a space or"),
        ("s3://b", {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": " s"}, "export AWS_SECRET_ACCESS_KEY again"),
        ("s3://b", {"AWS_ACCESS_KEY_ID": "AKIA1"}, "export AWS_SECRET_ACCESS_KEY=…"),
        ("s3://b", {"AWS_SECRET_ACCESS_KEY": "s"}, "export AWS_ACCESS_KEY_ID=…"),
        ("s3://b", {**KEYS, "AWS_ENDPOINT_URL": "minio:9000"}, "AWS_ENDPOINT_URL=minio:9000 is not an address"),
        ("s3://b", {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "http://127.0.0.1:1 (AWS_ENDPOINT_URL)"),
        ("s3://b", {"AWS_WEB_IDENTITY_TOKEN_FILE": "/absent", "AWS_ROLE_ARN": "arn:x", "AWS_REGION": "us-east-1"},
         "AWS_WEB_IDENTITY_TOKEN_FILE"),
        ("gs://b", {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"}, "STORAGE_EMULATOR_HOST"),
        ("gs://b", {"GOOGLE_APPLICATION_CREDENTIALS": "/absent"}, "Set GOOGLE_APPLICATION_CREDENTIALS to a key file"),
        ("gs://b", {"GOOGLE_SERVICE_ACCOUNT_KEY": "{'a'"}, "GOOGLE_SERVICE_ACCOUNT_KEY"),
        ("gs://b", {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(SERVICE_ACCOUNT)}, "without private_key"),
        ("gs://b", {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(SERVICE_ACCOUNT | {"private_key": "x"})},
         "GOOGLE_SERVICE_ACCOUNT_KEY"),
        ("gs://b", {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({"type": "authorized_user"})}, "without client_id"),
        ("gs://b", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"type": []}'}, "its type is no text"),
        ("gs://b", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"a":' * 100_000}, "not a JSON object"),
        ("gs://b", {"GOOGLE_APPLICATION_CREDENTIALS": "~no-such-user/k"}, "Set GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs://b", {"GOOGLE_APPLICATION_CREDENTIALS": "/dev/zero"}, "Set GOOGLE_APPLICATION_CREDENTIALS to a key file"),
    ],
)  # fmt: skip
def test_a_variable_that_is_wrong(monkeypatch: pytest.MonkeyPatch, uri: str, env: dict[str, str], says: str) -> None:
    """The error names the variable, before anything is requested where that is possible."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    apply(monkeypatch, {**NO_CREDENTIALS, "STOKER_STORAGE_TIMEOUT_S": "2", **env})
    with pytest.raises(StorageError) as caught:
        next(Store(parse_uri(uri)).list("set"), None)
    assert says in str(caught.value)
    assert caught.value.fix or caught.value.choices or "token file" in str(caught.value)


def test_the_key_of_an_emulator_has_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    with ObjectServer(Refusing) as server:
        key = {"gcs_base_url": server.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        apply(monkeypatch, {**NO_CREDENTIALS, "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key | {"private_key_id": ""})})
        assert "incomplete" not in str(refused("gs://scopes"))


@pytest.mark.parametrize(
    ("status", "code", "says", "fix"),
    [
        (404, "NoSuchBucket", "There is no bucket bucket", "aws s3 mb s3://bucket"),
        (403, "InvalidAccessKeyId", "rejects the credentials", "AWS_PROFILE=NAME"),
        (403, "SignatureDoesNotMatch", "rejects the credentials", "AWS_SECRET_ACCESS_KEY is wrong"),
        (400, "InvalidToken", "rejects the credentials", "AWS_SESSION_TOKEN belongs to other keys"),
        (400, "IllegalLocationConstraintException", "is in another region", "export AWS_REGION="),
        (403, "RequestTimeTooSkewed", "The clock of this machine is wrong", "chronyc makestep"),
    ],
)
def test_an_answer_of_amazon(monkeypatch: pytest.MonkeyPatch, status: int, code: str, says: str, fix: str) -> None:
    class Answering(Files):
        def do_GET(self) -> None:
            self._answer(status, f"<Error><Code>{code}</Code><Message>No.</Message></Error>".encode())

        do_HEAD = do_GET

    with ObjectServer(Answering) as server:
        apply(monkeypatch, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": server.url})
        error = refused("s3://bucket")
    assert says in error.what
    assert fix in (error.fix or "")
