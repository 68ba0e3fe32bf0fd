"""environment.json: what it tells, and what it must not."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stoker_watch.recording.telemetry import environment
from stoker_watch.recording.telemetry.environment import (
    describe,
    detect_container,
    detect_machine_type,
)

HIDDEN = "hunter2"


def test_it_is_json_and_says_what_a_run_ran_on(tmp_path: Path) -> None:
    told = json.loads(json.dumps(describe()))
    assert told["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert told["cores"] >= 1
    assert told["memory_limit_bytes"] > 2**20
    assert told["cpu"]
    assert "gpus" in told["gpu"]
    assert told["storage"] == {}
    assert describe(dirs={"run": tmp_path, "data": "gs://b/x"})["storage"]["data"]["network"] is True
    if sys.platform == "linux":
        assert told["swap_bytes"] is not None


def test_a_driver_that_hangs_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    class Hanging:
        def __init__(self, _: object) -> None:
            go.wait()

    monkeypatch.setattr(environment, "GpuSampler", Hanging)
    monkeypatch.setattr(environment, "QUERY_TIMEOUT_S", 0.01)
    told = describe()["gpu"]
    go.set()
    assert told["gpus"] == []
    assert told["reason"].startswith("the driver has not answered")


def test_variables_that_matter_are_told_and_secrets_never() -> None:
    variables = {
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "4",
        "NCCL_DEBUG": "INFO",
        "STOKER_CACHE_DIR": f"s3://me:{HIDDEN}@store/cache",
        "STOKER_API_KEY": HIDDEN,
        "TORCH_HUB_TOKEN": HIDDEN,
        "STOKER_ALERT_WEBHOOK": f"https://hooks.slack.com/services/{HIDDEN}",
        "AWS_SECRET_ACCESS_KEY": HIDDEN,
        "HOME": HIDDEN,
    }
    told = describe(variables, ["stoker", "train", f"https://store/x.zip?X-Amz-Signature={HIDDEN}&part=2"])
    assert told["variables"] == {
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "STOKER_CACHE_DIR": "s3://***@store/cache",
    }
    assert told["argv"] == ["stoker", "train", "https://store/x.zip?X-Amz-Signature=***&part=2"]
    assert HIDDEN not in json.dumps(told)


def test_containers_show(tmp_path: Path) -> None:
    assert detect_container({}, tmp_path) is None
    (tmp_path / ".dockerenv").touch()
    assert detect_container({}, tmp_path) == "docker"
    assert detect_container({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path) == "kubernetes"


def test_torch_is_described() -> None:
    torch = pytest.importorskip("torch")
    told = describe()
    assert told["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert told["torch"]["cuda"] == torch.version.cuda


def test_without_torch_it_tells_the_rest() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from stoker_watch.recording.telemetry.environment import describe\n"
        "told = describe(); assert told['torch'] is None and told['cores'] >= 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_machine_is_called_as_told_or_as_its_firmware_says(tmp_path: Path) -> None:
    assert detect_machine_type({}, tmp_path) is None
    firmware = tmp_path / "sys/class/dmi/id"
    firmware.mkdir(parents=True)
    (firmware / "product_name").write_text("g4dn.xlarge\n")
    assert detect_machine_type({}, tmp_path) == "g4dn.xlarge"
    assert detect_machine_type({"STOKER_MACHINE_TYPE": " n1-standard-8 "}, tmp_path) == "n1-standard-8"
