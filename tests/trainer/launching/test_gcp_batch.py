"""Batch of Google Cloud: what is rendered, also against Google's types, the start of a node run by a real shell, and
requests to a local server."""

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from stoker.launching import google_cloud
from stoker.launching.google_cloud import GcpBatch
from stoker.launching.jobs import submit
from stoker.launching.spec import Job, LaunchRequest, LaunchSpec, Mount, PlaceOptions
from stoker.training.cluster import find_place
from stoker_watch.errors import ConfigError, PreflightError, StokerError, UsageError
from tests.trainer.launching.cloud import FakeApi, make_spec, serving

PLACE = PlaceOptions(project="vision", region="europe-west4")
NAME = "projects/vision/locations/europe-west4/jobs/stoker-one"
JOB = Job(place="gcp-batch", id=NAME, name="stoker-one", run="gs://b/r", t=0.0)


def make_batch_spec(**changes: Any) -> LaunchSpec:
    return make_spec(**{"machine_type": "g2-standard-8", "options": PLACE} | changes)


SPECS = {
    "one GPU": make_batch_spec(),
    "spot nodes": make_batch_spec(
        machine_type="a2-highgpu-2g", gpus=2, devices=2, max_nodes=2, min_nodes=2, spot=True, time_limit_s=7200
    ),
    "n1": make_batch_spec(machine_type="n1-standard-8+v100", options=PlaceOptions(
        project="vision", region="europe-west4", service_account="trainer@vision.iam.gserviceaccount.com"
    )),
    "CPU": make_batch_spec(machine_type="n1-standard-8", gpus=0, env={"NCCL_DEBUG": "INFO"}),
    "secrets": make_batch_spec(
        secrets={"WANDB_API_KEY": ("wandb", "latest")}, options=PlaceOptions(
            project="vision", region="europe-west4", boot_disk="200"
        ),
    ),
    "mounts": make_batch_spec(mounts=(Mount("/data", "gs://bucket/coco"), Mount("/runs", "10.0.0.2:/export"))),
}  # fmt: skip


def render(spec: LaunchSpec) -> dict[str, Any]:
    GcpBatch().check(spec)
    job: dict[str, Any] = json.loads(GcpBatch().render(spec))
    return job


def container(spec: LaunchSpec) -> dict[str, Any]:
    found: dict[str, Any] = render(spec)["taskGroups"][0]["taskSpec"]["runnables"][-1]["container"]
    return found


def test_machines_with_their_gpus():
    instances = {name: render(spec)["allocationPolicy"]["instances"][0] for name, spec in SPECS.items()}
    assert instances["one GPU"] == {
        "policy": {"machineType": "g2-standard-8", "provisioningModel": "STANDARD"}, "installGpuDrivers": True,
    }  # fmt: skip
    assert instances["n1"]["policy"]["accelerators"] == [{"type": "nvidia-tesla-v100", "count": "1"}]
    assert instances["spot nodes"]["policy"]["provisioningModel"] == "SPOT"
    assert "installGpuDrivers" not in instances["CPU"]


def test_the_version_of_the_driver():
    """Accelerator.driver_version of the API; of a machine that has its GPU, the accelerator is named for it."""
    options = PlaceOptions(project="vision", region="europe-west4", gpu_driver="550.90.07")
    for machine, gpu in (("g2-standard-8", "nvidia-l4"), ("n1-standard-8+v100", "nvidia-tesla-v100")):
        instance = render(make_batch_spec(machine_type=machine, options=options))["allocationPolicy"]["instances"][0]
        assert instance["installGpuDrivers"] is True
        assert instance["policy"]["accelerators"] == [{"type": gpu, "count": "1", "driverVersion": "550.90.07"}]
    for refused in (
        make_batch_spec(options=dataclasses.replace(options, gpu_driver="latest")),
        make_batch_spec(machine_type="n1-standard-8", gpus=0, options=options),
    ):
        with pytest.raises(ConfigError, match="--gpu-driver"):
            render(refused)


def test_secrets_and_the_disk_of_the_machine():
    job = render(SPECS["secrets"])
    variables = {"WANDB_API_KEY": "projects/vision/secrets/wandb/versions/latest"}
    assert job["taskGroups"][0]["taskSpec"]["environment"] == {"secretVariables": variables}
    assert job["allocationPolicy"]["instances"][0]["policy"]["bootDisk"] == {"sizeGb": "200"}


def test_what_is_tried_again():
    """With FAIL_TASK, all codes that are not listed are retried: 75, 50001 (a preempted VM), a crash."""
    for name, retries in (("one GPU", 3), ("spot nodes", 10)):
        task = render(SPECS[name])["taskGroups"][0]["taskSpec"]
        assert task["lifecyclePolicies"] == [{"action": "FAIL_TASK", "actionCondition": {"exitCodes": [2, 3, 4, 6]}}]
        assert task["maxRetryCount"] == retries


def test_shared_memory_and_driver_of_the_container():
    assert container(SPECS["one GPU"])["options"] == "--shm-size=1024m --privileged"
    assert "/var/lib/nvidia/lib64:/usr/local/nvidia/lib64" in container(SPECS["one GPU"])["volumes"]
    assert container(SPECS["CPU"])["options"] == "--shm-size=1024m"
    assert container(SPECS["mounts"])["volumes"][:2] == ["/mnt/disks/mount-0:/data", "/mnt/disks/mount-1:/runs"]
    assert render(SPECS["mounts"])["taskGroups"][0]["taskSpec"]["volumes"] == [
        {"gcs": {"remotePath": "bucket/coco"}, "mountPath": "/mnt/disks/mount-0"},
        {"nfs": {"server": "10.0.0.2", "remotePath": "/export"}, "mountPath": "/mnt/disks/mount-1"},
    ]


def test_nodes_find_their_place(tmp_path: Path):
    """A real shell starts `stoker` with the variables that Batch sets; arguments with spaces stay whole."""
    spec = make_batch_spec(max_nodes=2, min_nodes=2, arguments=("train", "gs://bucket/my images", "--lr", "$HOME"))
    task = render(spec)["taskGroups"][0]
    started = container(spec)
    program = tmp_path / "stoker"
    program.write_text('#!/bin/sh\nenv\nprintf "argument=%s\\n" "$@"\n')
    program.chmod(0o755)
    assert (task["taskCount"], task["parallelism"], task["taskCountPerNode"]) == ("2", "2", "1")
    assert task["requireHostsFile"] is True
    for node in range(2):
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "BATCH_NODE_INDEX": str(node),
            "BATCH_MAIN_NODE_HOSTNAME": "stoker-one-group0-0",
            **task["taskSpec"]["environment"]["variables"],
        }
        done = subprocess.run([started["entrypoint"], *started["commands"]], env=env, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        place = find_place(dict(line.split("=", 1) for line in lines if not line.startswith("argument=")))
        assert place is not None
        assert (place.rank, place.world_size, place.host) == (node, 2, "stoker-one-group0-0")
        assert [line[9:] for line in lines if line.startswith("argument=")] == list(spec.arguments)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"machine_type": None}, "needs a machine type"),
        ({"machine_type": "p4d.24xlarge"}, "has no p4d.24xlarge"),
        ({"gpu": "1g.10gb"}, "has no MIG slices"),
        ({"restarts": 11}, "at most 10 times"),
        ({"max_nodes": 4}, "a fixed number of nodes"),
        ({"mounts": (Mount("/data"),)}, "cannot mount that"),
        ({"options": PlaceOptions(project="vision")}, "Which region"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_sent(
    changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
):
    for name in google_cloud.REGION_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError) as raised:
        GcpBatch().check(make_batch_spec(**changes))
    assert expected in str(raised.value)


def test_an_unknown_field_is_refused_by_googles_types():
    types = pytest.importorskip("google.cloud.batch_v1.types", reason="uv pip install google-cloud-batch")
    from google.protobuf.json_format import ParseError

    for spec in SPECS.values():
        types.Job.from_json(GcpBatch().render(spec))
    text = GcpBatch().render(SPECS["spot nodes"])
    for old, new in (("maxRetryCount", "maxRetries"), ('"SPOT"', '"CHEAP"')):
        with pytest.raises((ParseError, ValueError)):
            types.Job.from_json(text.replace(old, new))


# From here on a local server.


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with serving(lambda *_: (200, {"name": NAME, "uid": "uid-1"})) as api:
        monkeypatch.setattr(google_cloud, "_open_session", requests.Session)
        monkeypatch.setattr(GcpBatch, "api", f"{api.address}/v1")
        yield api


def test_what_is_sent_is_what_dry_run_prints(server: FakeApi):
    for spec in SPECS.values():
        assert GcpBatch().submit(spec) == NAME
        sent = server.requests[-1]
        assert "entrypoint" not in container(SPECS["one GPU"]), "the image's own has an init"
        assert sent.path == "/v1/projects/vision/locations/europe-west4/jobs?jobId=stoker-one"
        assert sent.body == json.loads(GcpBatch().render(spec))


def test_the_same_command_continues_where_a_job_that_ended_holds_its_name(server: FakeApi, tmp_path: Path):
    names: list[str] = []

    def answer(method: str, _path: str, _body: Any) -> tuple[int, Any]:
        if method == "GET":
            return 200, {"status": {"state": "FAILED"}}
        name = server.requests[-1].path.partition("jobId=")[2]
        if name in names:
            return 409, {"error": {"code": 409, "message": "already exists"}}
        names.append(name)
        return 200, {"name": NAME.replace("stoker-one", name)}

    server.answer = answer
    spec = make_batch_spec(run_dir=str(tmp_path / "run"))
    for _ in range(3):
        submit(spec, GcpBatch(), LaunchRequest())
    assert names == ["stoker-one", "stoker-one-a2", "stoker-one-a3"]
    assert server.requests[-1].body["labels"] == {"app": "stoker", "run": "stoker-one"}


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        (409, "ALREADY_EXISTS", UsageError),
        (400, "INVALID_ARGUMENT", UsageError),
        (403, "PERMISSION_DENIED", PreflightError),
        (429, "RESOURCE_EXHAUSTED", PreflightError),
    ],
)
def test_a_refusal_is_named(server: FakeApi, code: int, status: str, error: type[StokerError]):
    server.answer = lambda *_: (code, {"error": {"code": code, "message": "why it is refused", "status": status}})
    with pytest.raises(error) as raised:
        GcpBatch().submit(SPECS["one GPU"])
    assert "why it is refused" in str(raised.value)


def test_status_and_cancel(server: FakeApi):
    event = {"type": "STATUS_CHANGED", "description": "Task failed with exit code 4.", "taskExecution": {"exitCode": 4}}
    for state, expected in (("SCHEDULED", "queued"), ("RUNNING", "running"), ("CANCELLED", "cancelled")):
        server.answer = lambda *_, state=state: (200, {"name": NAME, "status": {"state": state}})
        assert GcpBatch().status(JOB).state == expected
    GcpBatch().cancel(JOB)  # a job that has ended is no error
    assert {request.method for request in server.requests} == {"GET"}

    server.answer = lambda *_: (200, {"name": NAME, "status": {"state": "FAILED", "statusEvents": [event]}})
    found = GcpBatch().status(JOB)
    assert (found.state, found.exit_code) == ("failed", 4)
    assert "exit code 4" in found.text

    server.answer = lambda *_: (200, {"name": NAME, "status": {"state": "RUNNING"}})
    GcpBatch().cancel(JOB)
    assert (server.requests[-1].method, server.requests[-1].path.partition("?")[0]) == ("POST", f"/v1/{NAME}:cancel")
    server.answer = lambda *_: (404, {"error": {"code": 404, "message": "not found", "status": "NOT_FOUND"}})
    assert GcpBatch().status(JOB).state == "unknown"


def test_logs_are_read_page_by_page(server: FakeApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(google_cloud, "LOGGING", f"{server.address}/v2/entries:list")
    monkeypatch.setattr(google_cloud, "FOLLOW_S", 0.0)

    def entry(number: int) -> dict[str, str]:
        return {"insertId": str(number), "timestamp": f"2026-11-22T12:00:0{number}Z", "textPayload": f"line {number}\n"}

    def answer(_method: str, path: str, body: Any) -> tuple[int, Any]:
        if not path.startswith("/v2/"):
            asked = sum(request.path.startswith("/v1/") for request in server.requests)
            return 200, {"name": NAME, "uid": "uid-1", "status": {"state": "RUNNING" if asked < 3 else "SUCCEEDED"}}
        if "timestamp>=" in body["filter"]:
            return 200, {"entries": [entry(2), entry(3)]}
        if "pageToken" in body:
            return 200, {"entries": [entry(2)]}
        return 200, {"entries": [entry(1)], "nextPageToken": "next"}

    server.answer = answer
    assert list(GcpBatch().logs(JOB, follow=True)) == ["line 1", "line 2", "line 3"]
    first = next(request.body for request in server.requests if request.path.startswith("/v2/"))
    assert first["resourceNames"] == ["projects/vision"]
    assert 'labels.job_uid="uid-1"' in first["filter"]

    server.answer = lambda _method, path, _body: (403, "denied") if path.startswith("/v2/") else (200, {"uid": "uid-1"})
    with pytest.raises(PreflightError, match="The log cannot be read"):
        list(GcpBatch().logs(JOB, follow=False))
