"""Vertex AI: what is rendered means to `training/cluster.py` and `training/bucket_run.py` what it should, and is what
Google's types accept; requests to a local server."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from stoker.launching import google_cloud
from stoker.launching.google_cloud import Vertex
from stoker.launching.spec import Job, LaunchSpec, Mount, PlaceOptions
from stoker.training.bucket_run import vertex_folders
from stoker.training.cluster import find_place
from stoker_watch.errors import PreflightError, StokerError, UsageError
from tests.trainer.launching.cloud import FakeApi, make_spec, serving

PLACE = PlaceOptions(project="vision", region="europe-west4")


def make_vertex_spec(**changes: Any) -> LaunchSpec:
    return make_spec(**{"machine_type": "g2-standard-8", "options": PLACE} | changes)


SPECS = {
    "one GPU": make_vertex_spec(),
    "spot nodes": make_vertex_spec(
        machine_type="a2-highgpu-4g", gpus=4, devices=4, cpus=48, max_nodes=3, min_nodes=3, spot=True, time_limit_s=7200
    ),
    "n1": make_vertex_spec(machine_type="n1-standard-8+v100"),
    "CPU": make_vertex_spec(machine_type="n1-standard-8", gpus=0),
    "mounts": make_vertex_spec(
        run_dir="/gcs/runs/one",
        mounts=(Mount("/gcs/runs", "gs://runs"), Mount("/mnt/nfs/data", "10.0.0.2:/export")),
        env={"NCCL_DEBUG": "INFO"},
        options=dataclasses.replace(PLACE, boot_disk="200", service_account="trainer@vision.iam.gserviceaccount.com"),
    ),
}


def render(spec: LaunchSpec) -> dict[str, Any]:
    Vertex().check(spec)
    job: dict[str, Any] = json.loads(Vertex().render(spec))["jobSpec"]
    return job


def test_machines_with_their_gpus():
    machines = {name: render(spec)["workerPoolSpecs"][0]["machineSpec"] for name, spec in SPECS.items()}
    assert machines["one GPU"] == {
        "machineType": "g2-standard-8", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 1,
    }  # fmt: skip
    assert machines["n1"] == {
        "machineType": "n1-standard-8", "acceleratorType": "NVIDIA_TESLA_V100", "acceleratorCount": 1,
    }  # fmt: skip
    assert machines["CPU"] == {"machineType": "n1-standard-8"}
    assert render(make_vertex_spec(machine_type="a3-megagpu-8g", gpus=8))["workerPoolSpecs"][0]["machineSpec"][
        "acceleratorType"
    ] == "NVIDIA_H100_MEGA_80GB"  # fmt: skip


def test_nodes_find_their_place():
    """In CLUSTER_SPEC, as Vertex AI makes it of the worker pools (docs "Distributed training")."""
    pools = render(SPECS["spot nodes"])["workerPoolSpecs"]
    cluster = {
        f"workerpool{number}": [
            f"cmle-workerpool{number}-{replica}:2222" for replica in range(int(pool["replicaCount"]))
        ]
        for number, pool in enumerate(pools)
    }
    tasks = [{"type": pool, "index": index} for pool, hosts in cluster.items() for index in range(len(hosts))]
    places = [find_place({"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": task})}) for task in tasks]

    assert [(place.rank, place.world_size, place.host) for place in places if place] == [
        (rank, 3, "cmle-workerpool0-0") for rank in range(3)
    ]


def test_results_go_below_the_run():
    prefix = render(SPECS["one GPU"])["baseOutputDirectory"]["outputUriPrefix"]
    folders = vertex_folders({"AIP_MODEL_DIR": f"{prefix}/model/", "AIP_TENSORBOARD_LOG_DIR": f"{prefix}/logs/"})
    assert (folders.model, folders.tensorboard) == ("gs://bucket/runs/one/model", "gs://bucket/runs/one/logs")
    assert "baseOutputDirectory" not in render(SPECS["mounts"])


def test_preempted_nodes_start_again_together():
    assert render(SPECS["spot nodes"])["scheduling"] == {
        "strategy": "SPOT", "disableRetries": False, "restartJobOnWorkerRestart": True, "timeout": "7200s",
    }  # fmt: skip
    assert render(SPECS["one GPU"])["scheduling"]["restartJobOnWorkerRestart"] is False
    assert render(make_vertex_spec(restarts=0))["scheduling"]["disableRetries"] is True


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"machine_type": None}, "needs a machine type"),
        ({"machine_type": "g2-standard-9"}, "has no g2-standard-9"),
        ({"machine_type": "g2-standard-8", "gpu": "t4"}, "has no g2-standard-8 with t4"),
        ({"machine_type": "n1-standard-8"}, "has no n1-standard-8 with a GPU"),
        ({"machine_type": "n1-standard-4", "gpu": "NVIDIA_TESLA_V100"}, "has no n1-standard-4 with NVIDIA_TESLA_V100"),
        ({"gpu": "1g.10gb"}, "has no MIG slices"),
        ({"max_nodes": 4}, "a fixed number of nodes"),
        ({"mounts": (Mount("/data", "claim"),)}, "cannot mount that"),
        ({"mounts": (Mount("/data", "gs://bucket"),)}, "mounts every bucket at /gcs/BUCKET"),
        ({"mounts": (Mount("/data", "10.0.0.2:/export"),)}, "below /mnt/nfs/"),
        ({"env": {"MASTER_ADDR": "x"}}, "--env MASTER_ADDR"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_sent(changes: dict[str, Any], expected: str):
    with pytest.raises(UsageError) as raised:
        Vertex().check(make_vertex_spec(**changes))
    assert expected in str(raised.value)


@pytest.mark.parametrize("name", ["t4", "NVIDIA_TESLA_T4", "nvidia-tesla-t4"])
def test_a_gpu_may_be_named_in_several_ways(name: str):
    machine = render(make_vertex_spec(machine_type="n1-standard-4", gpu=name))["workerPoolSpecs"][0]["machineSpec"]
    assert machine["acceleratorType"] == "NVIDIA_TESLA_T4"


def test_project_and_region_come_from_flags_or_gcloud(monkeypatch: pytest.MonkeyPatch):
    for name in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "GOOGLE_CLOUD_REGION", "CLOUDSDK_COMPUTE_REGION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="Which project"):
        Vertex().check(make_vertex_spec(options=PlaceOptions()))
    monkeypatch.setenv("CLOUDSDK_CORE_PROJECT", "vision")
    with pytest.raises(UsageError, match="Which region"):
        Vertex().check(make_vertex_spec(options=PlaceOptions()))
    monkeypatch.setenv("GOOGLE_CLOUD_REGION", "us-central1")
    Vertex().check(make_vertex_spec(options=PlaceOptions()))


def test_paid_gpus_that_idle_are_a_warning():
    assert "3 of the 4 GPUs" in Vertex().check(make_vertex_spec(machine_type="g2-standard-48"))[0]


def test_a_missing_client_names_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", None)
    with pytest.raises(PreflightError, match="needs the package google-auth"):
        Vertex().submit(make_vertex_spec())


def test_an_unknown_field_is_refused_by_googles_types():
    types = pytest.importorskip("google.cloud.aiplatform_v1.types", reason="uv pip install google-cloud-aiplatform")
    from google.protobuf.json_format import ParseError

    for spec in SPECS.values():
        types.CustomJob.from_json(Vertex().render(spec))
    text = Vertex().render(SPECS["one GPU"])
    for old, new in (("replicaCount", "replicas"), ("NVIDIA_L4", "NVIDIA_L5")):
        with pytest.raises((ParseError, ValueError)):
            types.CustomJob.from_json(text.replace(old, new))


# From here on a local server.

JOB = Job(
    place="vertex", id="projects/1/locations/europe-west4/customJobs/42", name="stoker-one", run="gs://b/r", t=0.0
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with serving(lambda *_: (200, {"name": JOB.id, "state": "JOB_STATE_RUNNING"})) as api:
        monkeypatch.setattr(google_cloud, "_open_session", requests.Session)
        monkeypatch.setattr(Vertex, "api", f"{api.address}/{{region}}/v1")
        yield api


def test_what_is_sent_is_what_dry_run_prints(server: FakeApi):
    for spec in SPECS.values():
        assert Vertex().submit(spec) == JOB.id
        sent = server.requests[-1]
        assert sent.path == "/europe-west4/v1/projects/vision/locations/europe-west4/customJobs"
        assert sent.body == json.loads(Vertex().render(spec))
        assert "command" not in json.dumps(sent.body), "the image's own entry point has an init"


@pytest.mark.parametrize(
    ("code", "error", "expected"),
    [
        (400, UsageError, "Machine type is not supported in region"),
        (403, PreflightError, "aiplatform.customJobs.create denied"),
        (429, PreflightError, "quota custom_model_training_nvidia_l4_gpus"),
        (503, PreflightError, "try again"),
    ],
)
def test_a_refusal_is_named(server: FakeApi, code: int, error: type[StokerError], expected: str):
    server.answer = lambda *_: (code, {"error": {"code": code, "message": expected}})
    with pytest.raises(error, match=expected):
        Vertex().submit(SPECS["one GPU"])


def test_status_and_cancel(server: FakeApi):
    for state, expected in (("JOB_STATE_PENDING", "queued"), ("JOB_STATE_CANCELLED", "cancelled")):
        server.answer = lambda *_, state=state: (200, {"state": state})
        assert Vertex().status(JOB).state == expected
    message = "The replica workerpool0-0 exited with code 4"
    server.answer = lambda *_: (200, {"state": "JOB_STATE_FAILED", "error": {"code": 3, "message": message}})
    found = Vertex().status(JOB)
    assert (found.state, found.text) == ("failed", f"JOB_STATE_FAILED: {message}")
    Vertex().cancel(JOB)  # a job that has ended is no error
    assert {request.method for request in server.requests} == {"GET"}

    ended = {"error": {"code": 400, "message": "not in a cancellable state", "status": "FAILED_PRECONDITION"}}
    server.answer = lambda method, *_: (200, {"state": "JOB_STATE_RUNNING"}) if method == "GET" else (400, ended)
    Vertex().cancel(JOB)
    assert (server.requests[-1].method, server.requests[-1].path) == ("POST", f"/europe-west4/v1/{JOB.id}:cancel")
    server.answer = lambda *_: (404, {"error": {"code": 404, "message": "no such job"}})
    assert Vertex().status(JOB).state == "unknown"


def test_without_credentials_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    google_cloud._open_session.cache_clear()
    with pytest.raises(PreflightError, match="no credentials for Google Cloud"):
        Vertex().submit(make_vertex_spec())
