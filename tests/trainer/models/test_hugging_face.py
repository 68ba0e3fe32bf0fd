"""Weights on Hugging Face, fetched by its own library from a server on loopback that speaks the hub's protocol."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save
from torch import Tensor

from stoker.config.architectures import PRETRAINED_NAMES, make_architecture
from stoker.models import MODELS, Detector, build, load_weights
from stoker.models.table import FAMILIES
from stoker.models.weights.hub import HUB_URL, fetch_weights, file_name
from stoker.models.weights.load import COCO_CLASSES
from stoker_watch.errors import WeightsError
from tests.trainer.models.detr_oracle import make_oracle
from tests.trainer.models.samples import settings_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
URL = "https://huggingface.co/someone/some-model/resolve/main/model.safetensors"
DATA = save({"weight": torch.arange(40_000.0)})
DIGEST = hashlib.sha256(DATA).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """A repository `someone/some-model`: HEAD answers with commit, ETag and size and redirects to the storage."""

    protocol_version = "HTTP/1.1"
    requests: list[str]
    fault: str

    server: ThreadingHTTPServer

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if self.path == "/someone/some-model/resolve/main/model.safetensors" and self.fault != "missing":
            headers = {"Location": f"http://localhost:{self.server.server_port}/storage", "X-Repo-Commit": COMMIT}
            headers |= {"ETag": '"of-the-pointer"', "X-Linked-Etag": f'"{DIGEST}"', "X-Linked-Size": str(len(DATA))}
            self.reply(302, b"", headers)
        elif self.path == "/storage":
            body = bytes(len(DATA)) if self.fault == "damaged" else DATA
            start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
            if self.fault == "cut" and start == 0:
                self.reply(200, body[: len(body) // 2], {"Content-Length": str(len(body))})
                self.close_connection = True
            else:
                span = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
                self.reply(206 if start else 200, body[start:], span)
        else:
            kind = "EntryNotFound" if "some-model" in self.path else "RepoNotFound"
            self.reply(404, b"", {"X-Error-Code": kind, "X-Repo-Commit": COMMIT})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Hub.requests, Hub.fault = [], ""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("STOKER_WEIGHTS_DIR", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    use_endpoint(monkeypatch, "http://127.0.0.1:9")


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str, *, offline: bool = False) -> None:
    """As HF_ENDPOINT and HF_HUB_OFFLINE do, which the library reads once, when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)


def kept(tmp_path: Path) -> list[Path]:
    """What is in the cache, complete or not, but for its locks and markers."""
    return [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.stat().st_size > 1000]


def test_a_file_is_taken_from_a_mirror_once_and_offline_from_the_cache(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_endpoint(monkeypatch, address)
    path, where = fetch_weights(URL)
    assert path.read_bytes() == DATA
    assert path.is_relative_to(tmp_path / "hf" / "hub" / "models--someone--some-model")
    assert where == f"downloaded to {path.parent}"
    assert (
        f"Downloading {address}/someone/some-model/resolve/main/model.safetensors to {tmp_path}"
        in capsys.readouterr().err
    )
    count = len(Hub.requests)
    for offline in (True, False):
        use_endpoint(monkeypatch, address, offline=offline)
        assert fetch_weights(URL) == (path, f"found in {path.parent}")
    assert len(Hub.requests) == count


@pytest.mark.slow  # 10 s: a process, and torch
def test_the_variables_of_the_library_are_honoured(address: str, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from stoker.models.weights.hub import fetch_weights\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        f"print(fetch_weights({URL!r})[0])\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": address}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "home" / "hub")
    assert Path(done.stdout.strip()).read_bytes() == DATA


def test_a_cut_download_is_resumed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub.fault = "cut"
    use_endpoint(monkeypatch, address)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    assert fetch_weights(URL)[0].read_bytes() == DATA
    assert f"GET /storage bytes={len(DATA) // 2 // 10_000 * 10_000}-" in Hub.requests


@pytest.mark.parametrize("fault", ["damaged", "wrong", "missing", "offline", "cut"])
def test_a_failed_download_leaves_nothing_and_says_what_to_do(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    Hub.fault = fault
    use_endpoint(monkeypatch, address, offline=fault == "offline")
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the library's attempts
    with pytest.raises(WeightsError) as caught:
        fetch_weights(f"{URL}#sha256={'0' * 64}" if fault == "wrong" else URL)
    message, folder = str(caught.value), tmp_path / "torch" / "hub" / "checkpoints"
    for part in (URL, "as someone--some-model.safetensors", str(folder), "STOKER_WEIGHTS_DIR", "--weights none"):
        assert part in message
    causes = {"damaged": DIGEST, "wrong": "0" * 64, "missing": "404", "offline": "HF_HUB_OFFLINE"}
    assert causes.get(fault, f"received {len(DATA) // 2} bytes") in message
    assert kept(tmp_path) == []
    if fault == "damaged":  # the next attempt downloads it again
        Hub.fault = ""
        assert fetch_weights(URL)[0].read_bytes() == DATA


def test_a_file_that_the_user_put_there_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_WEIGHTS_DIR", str(tmp_path))
    (tmp_path / "someone--some-model.safetensors").write_bytes(DATA)
    assert fetch_weights(URL) == (tmp_path / "someone--some-model.safetensors", f"found in {tmp_path}")


def test_rows_name_repositories() -> None:
    row: dict[str, Any] = {"family": "ember", "description": "", "num_params": 1, "recipe": "", "default_image_size": 1}
    row |= {"cost": {"gflop": 1, "training_gflop": 1, "memory_gib": 1}}
    row["weights"] = {"coco": "someone/some-model", "imagenet": "some-12345678.pth"}
    urls = make_architecture(row, {}, url="https://a.example/models").urls
    assert urls == {"coco": URL, "imagenet": "https://a.example/models/some-12345678.pth"}
    for name, architecture in MODELS.items():
        assert list(architecture.urls) == [choice for choice in PRETRAINED_NAMES if choice in architecture.urls], name
        on_hub = [url for url in architecture.urls.values() if HUB_URL.fullmatch(url)]
        assert all(url.endswith(".safetensors") for url in on_hub), name


@pytest.mark.parametrize("classes", ["coco", "other"])
def test_published_names_are_converted_and_other_classes_replaced(
    classes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A detector whose publisher names its tensors otherwise, with COCO's 80 channels and no names of classes."""
    name = "fcos_resnet18_fpn"
    settings = settings_of(name)
    published = {f"their.{key}": tensor for key, tensor in build(settings, 80).state_dict().items()}

    def convert(tensors: Any, model: Detector) -> dict[str, Tensor]:
        assert isinstance(model, Detector)
        return {key.removeprefix("their."): tensor for key, tensor in tensors.items()}

    monkeypatch.setitem(FAMILIES, "fcos", FAMILIES["fcos"]._replace(convert=convert))
    monkeypatch.setitem(MODELS, name, msgspec.structs.replace(MODELS[name], urls={"coco": URL}))
    monkeypatch.setenv("STOKER_WEIGHTS_DIR", str(tmp_path))
    (tmp_path / file_name(URL)).write_bytes(save({key: tensor.contiguous() for key, tensor in published.items()}))
    wanted = ("dog", "person") if classes == "coco" else ("nut", "screw")
    model = build(settings, len(wanted))
    sentences = load_weights(model, settings_of(name, weights="coco"), class_names=wanted)
    head = "head.classification_head.cls_logits.weight"
    assert torch.equal(model.state_dict()["backbone.body.conv1.weight"], published["their.backbone.body.conv1.weight"])
    if classes == "coco":  # a dog is COCO's 17th class, a person its first
        assert torch.equal(model.state_dict()[head], published[f"their.{head}"][[16, 0]])
        assert "kept, 80 -> 2 channels" in sentences[1]
    else:
        assert sentences[1] == "class head replaced: 80 -> 2 channels, random; not among the file's classes: nut, screw"


def test_a_file_of_weights_by_name_needs_a_model_that_has_them() -> None:
    with pytest.raises(WeightsError, match="no objects365 weights") as caught:
        load_weights(build(settings_of("ember_n"), 1), settings_of("ember_n", weights="objects365"), class_names=["a"])
    assert "none" in caught.value.choices


@pytest.mark.parametrize("name", ["dfine_n", "deimv2_atto"])
def test_published_transformers_are_loaded_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with transformers' names and COCO's 80 classes: all is loaded but the layers of other classes."""
    monkeypatch.setenv("STOKER_WEIGHTS_DIR", str(tmp_path))
    published = {key: tensor.float().contiguous() for key, tensor in make_oracle(name, 80, 300).state_dict().items()}
    published = {key: tensor.clone() for key, tensor in published.items()}  # no shared memory
    (tmp_path / file_name(MODELS[name].urls["coco"])).write_bytes(save(published))
    settings = settings_of(name, weights="coco")
    replaced = build(settings, 2)
    before = {key: tensor.clone() for key, tensor in replaced.state_dict().items()}
    sentences = load_weights(replaced, settings, class_names=("nut", "screw"))
    assert sentences[1].startswith("class head replaced: 80 -> 2 channels")
    unchanged = {key for key, tensor in replaced.state_dict().items() if torch.equal(tensor, before[key])}
    # Means are zeros in both.
    others = ("class_embed", "enc_score_head", "num_batches_tracked", "running_mean")
    left = {key for key in unchanged if before[key].numel() > 99 and not any(part in key for part in others)}
    assert left == set()
    kept = build(settings, 80)
    sentences = load_weights(kept, settings, class_names=COCO_CLASSES)
    assert sentences[1].startswith("class head kept, 80 -> 80 channels")
