"""A bucket's region against the machine's, and the price of the traffic between them."""

import json
from collections.abc import Iterator

import boto3
import pytest

from stoker.preflight.cloud import CloudMachine, check_region
from stoker_watch.storage.uri import parse_uri
from tests.watch.storage.object_server import GoogleXml, ObjectServer
from tests.watch.storage.servers import KEYS, NO_CREDENTIALS, apply, s3_server

GPU_MACHINE = CloudMachine(provider="gcp", zone="us-central1-a", region="us-central1")
EC2_MACHINE = CloudMachine(provider="aws", zone="us-east-1b", region="us-east-1")


class GoogleWithLayouts(GoogleXml):
    """Also the JSON API's storageLayout; the bucket's name is its location."""

    def do_GET(self) -> None:
        if self.path.startswith("/storage/v1/b/") and self.path.endswith("/storageLayout"):
            location = self.path.split("/")[4]
            body = {"kind": "storage#storageLayout", "location": location.upper()}
            self._answer(404 if location == "secret" else 200, json.dumps(body).encode())
        else:
            super().do_GET()


@pytest.fixture(scope="module")
def google_url() -> Iterator[str]:
    with ObjectServer(GoogleWithLayouts) as server:
        yield server.url


@pytest.mark.parametrize(
    ("location", "severity", "says"),
    [
        ("us-central1", "ok", "in the machine's region"),
        ("nam4", "ok", "in the machine's region"),
        ("us", "warning", "slower and billed"),
        ("europe-west4", "warning", "slower and billed"),
        ("secret", "unknown", "could not be read"),
    ],
)
def test_bucket_of_google(
    google_url: str, monkeypatch: pytest.MonkeyPatch, location: str, severity: str, says: str
) -> None:
    apply(monkeypatch, {**NO_CREDENTIALS, "STORAGE_EMULATOR_HOST": google_url})
    [finding] = check_region(parse_uri(f"gs://{location}/set"), GPU_MACHINE, epoch_bytes=100 * 2**30)
    assert (finding.id, finding.severity) == ("bucket_region", severity)
    assert says in finding.title
    if severity == "warning":
        assert "a pass over the data reads 100.0 GiB" in finding.evidence_text
        assert ("rent the machine in" in finding.fix) == ("-" in location)


def test_token_of_the_machine_is_needed_for_googles_own_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a metadata server there is no token, and nothing is requested."""
    apply(monkeypatch, NO_CREDENTIALS)
    env = {"GCE_METADATA_HOST": "127.0.0.1:1"}
    [finding] = check_region(parse_uri("gs://bucket/set"), GPU_MACHINE, epoch_bytes=None, env=env)
    assert finding.severity == "unknown"
    assert "gcloud storage buckets describe gs://bucket" in finding.fix


@pytest.mark.parametrize(("region", "severity"), [("us-east-1", "ok"), ("eu-west-1", "warning")])
def test_bucket_of_amazon(monkeypatch: pytest.MonkeyPatch, region: str, severity: str) -> None:
    with s3_server() as s3:
        apply(monkeypatch, {**NO_CREDENTIALS, **KEYS, "AWS_ENDPOINT_URL": s3.url})
        place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        boto3.client("s3", endpoint_url=s3.url, region_name=region).create_bucket(Bucket=f"in-{region}", **place)
        [finding] = check_region(parse_uri(f"s3://in-{region}/set"), EC2_MACHINE, epoch_bytes=None)
    assert finding.severity == severity
    assert region in finding.title


@pytest.mark.parametrize(("uri", "machine"), [("s3://b/x", GPU_MACHINE), ("gs://b/x", EC2_MACHINE)])
def test_bucket_of_another_cloud(monkeypatch: pytest.MonkeyPatch, uri: str, machine: CloudMachine) -> None:
    apply(monkeypatch, NO_CREDENTIALS)
    [finding] = check_region(parse_uri(uri), machine, epoch_bytes=None)
    assert finding.severity == "warning"
    assert "another cloud" in finding.title
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert check_region(parse_uri("s3://b/x"), GPU_MACHINE, epoch_bytes=None) == []


def test_nothing_to_compare() -> None:
    assert check_region(parse_uri("https://host/x"), GPU_MACHINE, epoch_bytes=None) == []
    assert check_region(parse_uri("gs://b/x"), None, epoch_bytes=None) == []
