"""Environment variables: each kind of wrong value is found, and a right one is not."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from stoker.hardware.device import Device
from stoker.preflight import variables
from stoker.preflight.short import quick_findings
from stoker.preflight.variables import TABLE, check_variables
from stoker_watch.findings.finding import Finding
from tests import sources
from tests.watch.storage.servers import NO_CREDENTIALS, apply, google_server


def found(env: dict[str, str]) -> list[tuple[str, str]]:
    return [(finding.id, finding.severity) for finding in check_variables(env)]


def only(env: dict[str, str]) -> Finding:
    """The one finding besides what is in order."""
    *wrong, fine = check_variables(env)
    assert fine.severity == "ok"
    assert len(wrong) <= 1
    return wrong[0] if wrong else fine


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C"},
        {"STOKER_MACHINE_TYPE": "g5.xlarge", "STOKER_NVTX": "1", "STOKER_STORAGE_TIMEOUT_S": "30"},
        {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "s"},
        {"AWS_ACCESS_KEY_ID": "ASIA1", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"},
        {"DATA_DIR": "/absent"},
        {"AWS_CONFIG_FILE": "/dev/null", "STOKER_CACHE_DIR": ""},
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
        ({"AWS_CREDENTIAL_EXPIRATION": "2026-01-01T00:00:00+00:00"}, "variable_aws_keys", "blocker", "sso login"),
        ({"AWS_CA_BUNDLE": "~nobody-of-this-name/x"}, "variable_credentials", "warning", "readable file"),
        ({"AWS_CONFIG_FILE": "/absent"}, "variable_credentials", "warning", "readable file"),
        ({"AWS_CONFIG_FILE": "'/etc/passwd'"}, "variable_value", "warning", "--env-file"),
        ({"STOKER_CACHE_DIR": '"/data"'}, "variable_value", "warning", "--env-file"),
        ({"STOKER_CACHE_DIR": "/data\n"}, "variable_value", "warning", "line end"),
        ({"STOKER_CACHE_DIR": "$HOME/data"}, "variable_value", "warning", "let a shell set it"),
        ({"AIP_MODEL_DIR": "/proc/self/out"}, "variable_output", "blocker", "unset AIP_MODEL_DIR"),
        ({"STOKER_CACHE_DIR": "/proc/self/cache"}, "variable_output", "blocker", "unset STOKER_CACHE_DIR"),
        ({"AIP_MODEL_DIR": "gs:/bucket/model"}, "variable_output", "blocker", "gs://bucket"),
        ({"AIP_MODEL_DIR": "https://user:hunter2@host/set"}, "variable_output", "blocker", "before the @"),
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


def test_buckets_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with google_server() as google:
        served = google.bucket()
        apply(monkeypatch, {**NO_CREDENTIALS, **served.environment})
        env = {"AIP_CHECKPOINT_DIR": f"{served.uri}/run"}
        [fine] = check_variables(env)
        assert "AIP_CHECKPOINT_DIR: the run folder can be written" in fine.evidence_text
        google.objects.denied.add("PUT")
        run, _ = check_variables(env)
        assert (run.place, run.severity) == ("AIP_CHECKPOINT_DIR", "blocker")


def test_all_of_stokers_variables_are_known() -> None:
    """A variable that the code reads is in the table, or typing it right would be called an error."""
    texts = [path.read_text() for _, path in sources.python_files() if path != Path(variables.__file__)]
    named = {name for text in texts for name in re.findall(r"\bSTOKER_[A-Z][A-Z_]*[A-Z]\b", text)}
    assert named - {*TABLE.stoker, *TABLE.internal} == set()
    assert set(TABLE.stoker) <= named


@pytest.mark.parametrize(("change", "is_told"), [
    ({}, True), ({"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}, True), ({"SLURM_NTASKS": "1"}, False),
    ({"SLURM_JOB_ID": ""}, False), ({"SLURM_STEP_NUM_TASKS": "4"}, False), ({"WORLD_SIZE": "4", "RANK": "0"}, False),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, False), ({"TF_CONFIG": "{}"}, False), ({"SLURM_NTASKS": "x"}, False),
])  # fmt: skip
def test_the_shell_of_a_batch_script(change: dict[str, str], is_told: bool, tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", **change}
    assert (("rank_of_batch_shell", "warning") in found(env)) is is_told
    told = [finding.id for finding in quick_findings(Device(torch.device("cpu")), tmp_path, env=env)]
    assert ("rank_of_batch_shell" in told) is is_told, "also at the start of a training"
