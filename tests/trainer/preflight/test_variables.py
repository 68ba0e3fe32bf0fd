"""Environment variables: each kind of wrong value is found, and a right one is not."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from stoker.preflight import variables
from stoker.preflight.variables import TABLE, check_variables
from stoker_watch.findings.finding import Finding
from tests import sources
from tests.watch.storage.servers import NO_CREDENTIALS, apply, google_server

CLUSTER = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
KEY = {"type": "service_account", "client_email": "a@p.iam.gserviceaccount.com", "private_key": "…"}


def found(env: dict[str, str]) -> list[tuple[str, str]]:
    return [(finding.id, finding.severity) for finding in check_variables(env, contact_stores=False)]


def only(env: dict[str, str]) -> Finding:
    """The one finding besides what is in order."""
    *wrong, fine = check_variables(env, contact_stores=False)
    assert fine.severity == "ok"
    assert len(wrong) <= 1
    return wrong[0] if wrong else fine


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C"},
        {"STOKER_MACHINE_TYPE": "g5.xlarge", "STOKER_NVTX": "1", "STOKER_STORAGE_TIMEOUT_S": "30"},
        {"TF_CONFIG": json.dumps(CLUSTER)},
        {"TF_CONFIG": json.dumps({**CLUSTER, "task": {"type": "evaluator", "index": 0}})},
        {"TF_CONFIG": '{"cluster": {}}', "CLUSTER_SPEC": " "},
        {"TF_CONFIG": '{"task": null}', "CLUSTER_SPEC": '{"cluster": "", "task": {}}'},
        {"TF_CONFIG": json.dumps(CLUSTER | {"task": None, "rate": float("nan"), "\ud800": "\ud800"})},
        {
            "CLUSTER_SPEC": json.dumps(
                {"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0", "index": 0}}
            )
        },
        {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "s"},
        {"AWS_ACCESS_KEY_ID": "ASIA1", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"},
        {"XDG_DATA_DIR": "/absent", "LD_LIBRARY_PATH": "/absent", "CUDA_PATH": "/absent"},
        {"DATASET": 5000 * "x"},
        {"DATA": "1", "DATASET": "coco", "TRAIN_DATA_DIR": ""},
        {"DATA_DIR": "gs://bucket/set", "AIP_MODEL_DIR": "gs://bucket/model/"},
        {"SM_CHANNELS": '["training"]', "SM_HPS": "{}"},
        {"TEST_PATH": "/absent:/absent2"},
    ],
)
def test_in_order(env: dict[str, str]) -> None:
    assert {severity for _, severity in found(env)} == {"ok"}


@pytest.mark.parametrize(
    ("env", "id", "severity", "says"),
    [
        ({"STOKER_CACHEDIR": "/x"}, "variable_unknown", "warning", "rename it to STOKER_CACHE_DIR"),
        ({"stoker_cache_dir": "/x"}, "variable_unknown", "warning", "rename it to STOKER_CACHE_DIR"),
        ({"STOKER_ZZZ": "1"}, "variable_unknown", "warning", "unset it"),
        ({"STOKER_STORAGE_TIMEOUT_S": "2min"}, "variable_number", "blocker", "a number from 0"),
        ({"STOKER_CACHE_LIMIT_GIB": "-5"}, "variable_number", "blocker", "a number from 0"),
        ({"TF_CONFIG": "{'cluster': {}}"}, "variable_json", "blocker", "correct the JSON"),
        ({"TF_CONFIG": "'{\"cluster\": {}}'"}, "variable_json", "blocker", "without quotes around it"),
        ({"SM_HPS": "{"}, "variable_json", "warning", "unset SM_HPS"),
        ({"TF_CONFIG": "[" * 100_000}, "variable_json", "blocker", "correct the JSON"),
        ({"AWS_ACCESS_KEY_ID": "AKIA1"}, "variable_aws_keys", "warning", "export AWS_SECRET_ACCESS_KEY"),
        ({"AWS_SECRET_ACCESS_KEY": "s"}, "variable_aws_keys", "warning", "export AWS_ACCESS_KEY_ID"),
        ({"AWS_ACCESS_KEY_ID": "AKIA1\n", "AWS_SECRET_ACCESS_KEY": "s"}, "variable_aws_keys", "blocker", "again"),
        ({"AWS_ACCESS_KEY_ID": "ASIA1", "AWS_SECRET_ACCESS_KEY": "s"}, "variable_aws_keys", "blocker", "SESSION_TOKEN"),
        ({"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"},
         "variable_aws_keys", "warning", "unset AWS_SESSION_TOKEN"),
        ({"AWS_CREDENTIAL_EXPIRATION": "2026-01-01T00:00:00+00:00"}, "variable_aws_keys", "blocker", "sso login"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/absent"}, "variable_credentials", "blocker", "existing file"),
        ({"GOOGLE_APPLICATION_CREDENTIALS": "/dev/zero"}, "variable_credentials", "blocker", "existing file"),
        ({"AWS_CA_BUNDLE": "~nobody-of-this-name/x"}, "variable_credentials", "warning", "existing file"),
        ({"DATA_DIR": "/" + 5000 * "y"}, "variable_input", "unknown", ""),
        ({"AWS_CONFIG_FILE": "/absent"}, "variable_credentials", "warning", "existing file"),
        ({"DATA_DIR": "/absent/set"}, "variable_input", "warning", "unset DATA_DIR"),
        ({"SM_CHANNEL_TRAINING": "/absent/set"}, "variable_input", "warning", "unset SM_CHANNEL_TRAINING"),
        ({"DATA_DIR": '"/data"'}, "variable_value", "warning", "--env-file"),
        ({"DATA_DIR": "/data\n"}, "variable_value", "warning", "line end"),
        ({"DATA_DIR": "$HOME/data"}, "variable_value", "warning", "let a shell set it"),
        ({"OUTPUT_DIR": "/proc/self/out"}, "variable_output", "warning", "unset OUTPUT_DIR"),
        ({"AIP_MODEL_DIR": "/proc/self/out"}, "variable_output", "blocker", "unset AIP_MODEL_DIR"),
        ({"STOKER_CACHE_DIR": "/proc/self/cache"}, "variable_output", "blocker", "unset STOKER_CACHE_DIR"),
        ({"AIP_MODEL_DIR": "gs:/bucket/model"}, "variable_uri", "blocker", "gs://bucket"),
        ({"DATA_DIR": "gcs://bucket/set"}, "variable_uri", "warning", "gs://"),
        ({"DATA_DIR": "https://user:hunter2@host/set"}, "variable_uri", "warning", ""),
    ],
)  # fmt: skip
def test_wrong_value(env: dict[str, str], id: str, severity: str, says: str) -> None:
    finding = only(env)
    assert (finding.id, finding.severity) == (id, severity), finding
    assert says in finding.fix
    assert finding.place in env
    assert "hunter2" not in repr(finding)


def test_session_that_ends() -> None:
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert "ends in 1.0 h" in only({"AWS_CREDENTIAL_EXPIRATION": soon}).title
    assert found({"AWS_CREDENTIAL_EXPIRATION": "tomorrow"}) == [("variables", "ok")]


@pytest.mark.parametrize(
    ("content", "severity"),
    [
        (json.dumps(KEY), "ok"),
        (json.dumps({"type": "authorized_user", "client_id": "1", "client_secret": "s", "refresh_token": "r"}), "ok"),
        (json.dumps({"type": "external_account", "audience": "…"}), "ok"),
        (json.dumps({**KEY, "private_key": ""}), "blocker"),
        ("not JSON", "blocker"),
        ("[]", "blocker"),
        ("", "blocker"),
    ],
)
def test_key_file_of_google(tmp_path: Path, content: str, severity: str) -> None:
    file = tmp_path / "key.json"
    file.write_text(content)
    assert only({"GOOGLE_APPLICATION_CREDENTIALS": str(file)}).severity == severity
    assert only({"GOOGLE_APPLICATION_CREDENTIALS": f"'{file}'"}).id == "variable_value"
    file.unlink()
    absent = only({"GOOGLE_APPLICATION_CREDENTIALS": str(file)})
    assert absent.severity == "blocker"
    assert "gcloud auth application-default login" in absent.fix


def test_buckets_are_contacted(monkeypatch: pytest.MonkeyPatch) -> None:
    with google_server() as google:
        served = google.bucket()
        apply(monkeypatch, {**NO_CREDENTIALS, **served.environment})
        env = {"DATA_DIR": f"{served.uri}/set", "AIP_CHECKPOINT_DIR": f"{served.uri}/run"}
        data, run = check_variables(env)
        assert (data.place, data.severity, run.severity) == ("DATA_DIR", "warning", "ok")
        assert "AIP_CHECKPOINT_DIR: the run folder can be written" in run.evidence_text
        google.objects.put(served.uri.removeprefix("gs://"), "set/a.jpg", b"image")
        google.objects.denied.add("PUT")
        run, data = check_variables(env)
        assert (run.place, run.severity, data.severity) == ("AIP_CHECKPOINT_DIR", "blocker", "ok")


def test_all_of_stokers_variables_are_known() -> None:
    """A variable that the code reads is in the table, or typing it right would be called an error."""
    texts = [path.read_text() for _, path in sources.python_files() if path != Path(variables.__file__)]
    named = {name for text in texts for name in re.findall(r"\bSTOKER_[A-Z][A-Z_]*[A-Z]\b", text)}
    assert named - {*TABLE.stoker, *TABLE.internal} == set()
    assert set(TABLE.stoker) <= named
