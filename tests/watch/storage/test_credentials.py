"""Search for credentials in the order of the clouds' own tools, and their descriptions."""

import json
from pathlib import Path

import pytest

from stoker_watch.errors import StorageError
from stoker_watch.storage.clients import find_credentials
from stoker_watch.storage.store import Store
from stoker_watch.storage.uri import parse_uri
from tests.watch.storage.servers import Server, apply


def test_no_credentials() -> None:
    assert (
        find_credentials("s3").description
        == "anonymous (no AWS credentials in the environment, in ~/.aws or of an instance)"
    )
    assert (
        find_credentials("gs").description
        == "anonymous (no Google credentials in the environment, of gcloud or of an instance)"
    )
    assert find_credentials("https").anonymous
    assert find_credentials("s3").options == find_credentials("gs").options == {"skip_signature": True}


def test_keys_of_the_environment_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = AKIAFROMAFILE1234\naws_secret_access_key = s\n")
    config = tmp_path / "config"
    config.write_text("[default]\nregion = eu-west-1\n[profile sso]\nsso_session = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    found = find_credentials("s3")
    assert found.description == "access key AKIA…1234 (profile default of ~/.aws)"
    assert found.options["region"] == "eu-west-1"
    assert found.options["credential_provider"]()["secret_access_key"] == "s"
    monkeypatch.setenv("AWS_REGION", "us-east-2")
    assert "region" not in find_credentials("s3").options
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert find_credentials("s3").description == "access key AKIA…MPLE (AWS_ACCESS_KEY_ID)"
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert find_credentials("s3").description == "anonymous (AWS_SKIP_SIGNATURE)"


def test_profile_keys_sign_requests(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = s3.bucket()
    credentials = tmp_path / "credentials"
    credentials.write_text("[mine]\naws_access_key_id = AKIAFROMAFILE1234\naws_secret_access_key = s\n")
    environment = {
        n: v for n, v in served.environment.items() if n not in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    }
    apply(monkeypatch, {**environment, "AWS_SHARED_CREDENTIALS_FILE": str(credentials), "AWS_PROFILE": "mine"})
    store = Store(parse_uri(served.uri))
    assert store.credentials.description == "access key AKIA…1234 (profile mine of ~/.aws)"
    store.write("k", b"signed")
    assert store.read("k") == b"signed"


def test_profile_that_boto3_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(StorageError, match="profile absent cannot be used") as caught:
        find_credentials("s3")
    assert "aws sso login --profile absent" in (caught.value.fix or "")


USER = {"client_id": "1", "client_secret": "s", "refresh_token": "r"}


def test_key_files_of_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "application_default_credentials.json"
    file.write_text(json.dumps({"type": "authorized_user", "account": "me@example.org", **USER}))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    assert find_credentials("gs").description == "user me@example.org (gcloud auth application-default login)"
    key = tmp_path / "key.json"
    key.write_text(
        json.dumps({"type": "service_account", "client_email": "a@p.iam.gserviceaccount.com", "private_key": "…"})
    )
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    found = find_credentials("gs")
    assert found.description == "service account a@p.iam.gserviceaccount.com (GOOGLE_APPLICATION_CREDENTIALS)"
    assert found.iam_member == "serviceAccount:a@p.iam.gserviceaccount.com"
    key.unlink()
    with pytest.raises(StorageError) as caught:
        find_credentials("gs")
    assert caught.value.what == "The key file of GOOGLE_APPLICATION_CREDENTIALS cannot be read."
    assert caught.value.location == str(key)


def test_identity_of_an_instance(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata service, as a server on loopback."""
    web.bucket()
    web.objects.put("", "computeMetadata/v1/instance/service-accounts/default/email", b"vm@p.iam.gserviceaccount.com")
    monkeypatch.delenv("NO_GCE_CHECK")
    monkeypatch.setenv("GCE_METADATA_HOST", web.url.removeprefix("http://"))
    assert find_credentials("gs").description == "the instance's service account vm@p.iam.gserviceaccount.com"
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", web.url)
    assert find_credentials("s3").anonymous  # it grants no token: no instance of Amazon's
