"""Weights: every kind of file that is understood, and the messages for those that are not."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import mobilenet_v2, resnet50, squeezenet1_1
from torchvision.models.detection import (
    RetinaNet_ResNet50_FPN_Weights,
    fasterrcnn_resnet50_fpn_v2,
    retinanet_resnet50_fpn,
)
from torchvision.models.detection._utils import overwrite_eps
from torchvision.ops import FrozenBatchNorm2d

from stoker.models import MODELS, build, detect_architecture, load_weights
from stoker.models.weights.hub import fetch_weights
from stoker.models.weights.model_file import ModelMetadata
from stoker_watch.errors import WeightsError
from tests.trainer.models.samples import settings_of

CLASS_HEAD = ("head.classification_head.cls_logits.weight", "head.classification_head.cls_logits.bias")
RESNET50, MOBILENET, TINY = "retinanet_resnet50_fpn", "retinanet_mobilenet_v2_fpn", "retinanet_tiny_fpn"
COCO = RetinaNet_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
COCO_URL = RetinaNet_ResNet50_FPN_Weights.COCO_V1.url


@pytest.fixture(autouse=True)
def _no_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.delenv("STOKER_WEIGHTS_DIR", raising=False)


@pytest.fixture(scope="module")
def coco_state() -> dict[str, Tensor]:
    """A state_dict like torchvision's COCO file: 91 channels, the names it had before version 0.13."""
    torch.manual_seed(0)
    oracle = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
    state = {}
    for name, tensor in oracle.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        parts = name.split(".")
        if "fpn" in parts and "_blocks" in name and "extra" not in name:
            parts.remove("0") if parts[3] != "0" else parts.pop(4)
        if parts[2] == "conv" and parts[0] == "head":
            parts[3:5] = [str(2 * int(parts[3]))]
        state[".".join(parts)] = torch.rand_like(tensor) + 0.5 if tensor.dim() == 1 else tensor
    return state


def test_none_leaves_the_model_as_it_is() -> None:
    settings = settings_of(TINY, weights="none")
    model = build(settings, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert load_weights(model, settings, class_names=("a", "b", "c")) == ["none: every layer starts with random values"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("norm", "wrapped"),
    [
        ("frozen_bn", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("frozen_bn", True), ("bn", False), ("bn", True))),
    ],
)
def test_a_classifier_fills_the_backbone(tmp_path: Path, norm: str, wrapped: bool) -> None:
    path = tmp_path / "any_name.pth"
    classifier = mobilenet_v2(weights=None)
    for module in classifier.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean)
    state = classifier.state_dict()
    torch.save({"model": {f"module.{k}": v for k, v in state.items()}} if wrapped else state, path)
    assert detect_architecture(path) == "ember_mobilenet_v2"  # the first on this backbone
    settings = settings_of(MOBILENET, weights=str(path), backbone_norm=norm)
    model = build(settings, 3)
    heads = {name: t.clone() for name, t in model.state_dict().items() if not name.startswith("backbone.body.")}
    sentences = load_weights(model, settings, class_names=("a", "b", "c"))
    assert sentences == ["backbone from any_name.pth", "neck and heads are random"]
    filled = model.state_dict()
    for name in ("0.0.weight", "0.1.running_mean", "14.conv.0.0.weight", "18.1.bias"):
        assert torch.equal(filled[f"backbone.body.{name}"], state[f"features.{name}"])
    assert all(torch.equal(tensor, filled[name]) for name, tensor in heads.items())


def test_a_file_is_recognized_without_torchs_compiler(tmp_path: Path) -> None:
    """Its import takes a second of the start of a training."""
    torch.save(mobilenet_v2(weights=None).state_dict(), tmp_path / "mobilenet.pth")
    script = f"""
import sys
from stoker.cli.quick_import import quick_imports
with quick_imports():
    from stoker.config.settings import ModelSettings
    from stoker.models import MODELS, build, detect_architecture
    from stoker.models.weights.load import shapes_only
for name, arch in MODELS.items():
    with shapes_only():
        model = build(ModelSettings(**{{**arch.defaults, "model": name}}), 3)
    assert all(parameter.is_meta for parameter in model.parameters())
assert detect_architecture({str(tmp_path / "mobilenet.pth")!r}) == "ember_mobilenet_v2"
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_resnet50_and_old_files_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "resnet.pth"
    classifier = resnet50(weights=None)
    torch.save(classifier.state_dict(), path, _use_new_zipfile_serialization=False)
    assert detect_architecture(path) == RESNET50
    settings = settings_of(RESNET50, weights=str(path))
    model = build(settings, 1)
    load_weights(model, settings, class_names=("a",))
    assert torch.equal(model.get_parameter("backbone.body.layer4.2.conv3.weight"), classifier.layer4[2].conv3.weight)


@pytest.mark.slow
def test_coco_weights_are_found_and_kept_for_coco_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coco_state: dict[str, Tensor]
) -> None:
    monkeypatch.setenv("STOKER_WEIGHTS_DIR", str(tmp_path))
    torch.save(coco_state, tmp_path / COCO_URL.rsplit("/", 1)[1])
    settings = settings_of(RESNET50, weights="coco")
    names = ("zebra", "Person")
    model = build(settings, len(names)).eval()
    backbone, head = load_weights(model, settings, class_names=names)
    assert backbone.startswith("backbone, neck and heads from retinanet_resnet50_fpn_coco-eeacb38b.pth (found in ")
    assert head == "class head kept, 91 -> 2 channels; every class is one of the file's, matched by name"
    theirs = coco_state[CLASS_HEAD[0]].view(9, 91, 256, 3, 3)
    ours = model.state_dict()[CLASS_HEAD[0]].view(9, 2, 256, 3, 3)
    assert torch.equal(ours, theirs[:, [COCO.index("zebra"), COCO.index("person")]])

    # The same numbers come out as from torchvision's model with this file, whose norms have an epsilon of 0.
    oracle = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
    _freeze_norms(oracle)
    oracle.load_state_dict(coco_state)
    overwrite_eps(oracle, 0.0)
    images = torch.randint(0, 256, (1, 3, 64, 96), dtype=torch.uint8)
    with torch.no_grad():
        pixels = oracle.eval().transform.normalize(images[0].float() / 255)[None]
        expected = oracle.head(list(oracle.backbone(pixels).values()))
        found = model(images)
    torch.testing.assert_close(found.deltas, expected["bbox_regression"], rtol=1e-3, atol=1e-4)
    wanted = expected["cls_logits"][..., [COCO.index("zebra"), COCO.index("person")]]
    torch.testing.assert_close(found.logits, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_file_of_another_precision_is_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    name, path = "retinanet_tiny_fpn", tmp_path / "detector.pth"
    theirs = build(settings_of(name), 2).state_dict()
    torch.save({key: tensor.to(dtype) for key, tensor in theirs.items()}, path)
    settings = settings_of(name, weights=str(path))
    model = build(settings, 2)
    load_weights(model, settings, class_names=("a", "b"))
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, theirs[key].to(dtype).to(tensor.dtype), rtol=0, atol=0)


def _freeze_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, FrozenBatchNorm2d(child.num_features))
        else:
            _freeze_norms(child)


@pytest.mark.slow
def test_a_class_of_the_file_keeps_its_channels_and_another_one_gets_new_ones(
    tmp_path: Path, coco_state: dict[str, Tensor]
) -> None:
    path = tmp_path / "detector.pth"
    torch.save(coco_state, path)
    assert detect_architecture(path) == RESNET50
    settings = settings_of(RESNET50, weights=str(path))
    model = build(settings, 2)
    before = model.state_dict()[CLASS_HEAD[0]].clone()
    _, head = load_weights(model, settings, class_names=("person", "platelet"))
    assert head == "class head kept, 91 -> 2 channels; 1 of 2 classes matched by name, random: platelet"
    theirs = coco_state[CLASS_HEAD[0]].view(9, 91, 256, 3, 3)
    ours, random = (weight.view(9, 2, 256, 3, 3) for weight in (model.state_dict()[CLASS_HEAD[0]], before))
    assert torch.equal(ours[:, 0], theirs[:, 1])  # a person has id 1
    assert torch.equal(ours[:, 1], random[:, 1])
    tower = "head.classification_head.conv.{}.weight"
    assert torch.equal(model.state_dict()[tower.format("3.0")], coco_state[tower.format("6")])


def save(model: nn.Module, path: Path, header: dict[str, str] | None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path, header)


@pytest.mark.slow
@pytest.mark.parametrize("with_header", [True, False])
def test_a_file_by_stoker_says_its_model_and_classes(tmp_path: Path, with_header: bool) -> None:
    path = tmp_path / "best.safetensors"
    settings = settings_of(TINY)
    trained = build(settings, 3)
    metadata = ModelMetadata(
        settings=settings, class_names=("cat", "dog", "owl"), image_size=(64, 64), resize="letterbox"
    )
    save(trained, path, metadata.header() if with_header else None)
    assert detect_architecture(path) == TINY
    settings = settings_of(TINY, weights=str(path))
    model = build(settings, 3)
    _, head = load_weights(model, settings, class_names=("owl", "cat", "dog"))
    order = [2, 0, 1] if with_header else [0, 1, 2]
    assert ("matched by name" if with_header else "without names") in head
    theirs, ours = (some.state_dict()[CLASS_HEAD[1]].view(2, 3) for some in (trained, model))
    assert torch.equal(ours, theirs[:, order])
    for name, tensor in trained.state_dict().items():
        if name not in CLASS_HEAD and not name.endswith("num_batches_tracked"):
            assert torch.equal(model.state_dict()[name], tensor)


def test_a_run_stands_for_its_best_weights(tmp_path: Path) -> None:
    save(build(settings_of(TINY), 2), tmp_path / "best.safetensors", {})
    assert detect_architecture(tmp_path) == TINY
    settings = settings_of(TINY, weights=str(tmp_path))
    load_weights(build(settings, 2), settings, class_names=("a", "b"))


@pytest.mark.parametrize("norm", ["frozen_bn", "bn"])
def test_weights_trained_with_either_norm_fill_a_model_with_the_other(tmp_path: Path, norm: str) -> None:
    path = tmp_path / "some.safetensors"
    other = "bn" if norm == "frozen_bn" else "frozen_bn"
    save(build(settings_of(TINY, backbone_norm=other), 2), path, {})
    settings = settings_of(TINY, backbone_norm=norm, weights=str(path))
    load_weights(build(settings, 2), settings, class_names=("a", "b"))


@pytest.mark.slow
def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    def failure(weights: object, *, name: str = MOBILENET, **changes: object) -> str:
        settings = settings_of(name, weights=str(weights), **changes)
        model = build(settings, 2)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        with pytest.raises(WeightsError) as caught:
            load_weights(model, settings, class_names=("a", "b"))
        assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
        return str(caught.value)

    mobilenet = tmp_path / "mobilenet.pth"
    torch.save(mobilenet_v2(weights=None).state_dict(), mobilenet)

    assert "did you mean imagenet?" in failure("imagnet")
    assert "did you mean mobilenet.pth?" in failure(tmp_path / "mobilenet.pt")
    assert f"belongs to ember_mobilenet_v2, not to {RESNET50}" in failure(mobilenet, name=RESNET50)
    assert f"no coco weights for {MOBILENET}" in failure("coco")
    assert f"with coco weights: {RESNET50}" in failure("coco")

    torch.save(squeezenet1_1(weights=None).state_dict(), tmp_path / "squeezenet.pth")
    assert "nor to another model" in failure(tmp_path / "squeezenet.pth")
    with torch.device("meta"):  # names and shapes alone
        other = fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    assert detect_architecture(tmp_path / "other.pth") is None

    cut = tmp_path / "cut.pth"
    cut.write_bytes(mobilenet.read_bytes()[:100_000])
    assert "cannot be read" in failure(cut)
    assert str(cut) in failure(cut)
    (tmp_path / "page.safetensors").write_text("<html>not found</html>")
    assert "cannot be read" in failure(tmp_path / "page.safetensors")
    for name in ("pointer.safetensors", "pointer.pth"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
        assert "a pointer of Git LFS instead of the file, which `git lfs pull` gets" in failure(tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pth")
    assert "does not hold a state_dict" in failure(tmp_path / "list.pth")
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch")
    assert "no file of torch.save(), by its first bytes" in failure(tmp_path / "model.onnx")
    assert "neither best.safetensors" in failure(tmp_path)
    torch.save({"model": build(settings_of(TINY), 1)}, tmp_path / "module.pth")
    assert "more than tensors" in failure(tmp_path / "module.pth")

    incomplete = mobilenet_v2(weights=None).state_dict()
    del incomplete["features.3.conv.1.0.weight"]
    torch.save(incomplete, tmp_path / "incomplete.pth")
    assert "lacks tensor backbone.body.3.conv.1.0.weight." in failure(tmp_path / "incomplete.pth")

    save(build(settings_of(TINY), 2), tmp_path / "tiny.safetensors", {})
    message = failure(tmp_path / "tiny.safetensors", name=TINY, aspect_ratios=(0.5, 1.0))
    assert "tensor head.regression_head.bbox_reg." in message
    assert "[8] in the file, [16] in the model" in message
    assert "--aspect-ratios" in message


class Server(BaseHTTPRequestHandler):
    """Serves CONTENT under any name; cuts it short under /cut/."""

    data = b""
    requested: list[str]

    def do_GET(self) -> None:
        self.requested.append(self.path)
        if self.path.startswith("/missing/"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.end_headers()
        self.wfile.write(self.data[:1000] if self.path.startswith("/cut/") else self.data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Server.data, Server.requested = json.dumps(list(range(10_000))).encode(), []
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_download_is_checked_and_kept(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"some-{hashlib.sha256(Server.data).hexdigest()[:8]}.pth"
    path, where = fetch_weights(f"{address}/a/{name}")
    assert path == tmp_path / "torch" / "hub" / "checkpoints" / name
    assert path.read_bytes() == Server.data
    assert where == f"downloaded to {path.parent}"
    assert fetch_weights(f"{address}/a/{name}") == (path, f"found in {path.parent}")
    assert len(Server.requested) == 1

    own = tmp_path / "own"
    monkeypatch.setenv("STOKER_WEIGHTS_DIR", str(own))
    assert fetch_weights(f"{address}/a/{name}")[0] == path  # torch's cache is still looked into
    path.unlink()
    assert fetch_weights(f"{address}/a/{name}")[0] == own / name
    assert [p.name for p in own.iterdir()] == [name]


@pytest.mark.parametrize("fault", ["wrong", "cut", "missing", "refused"])
def test_a_failed_download_leaves_nothing_and_says_what_to_do(address: str, tmp_path: Path, fault: str) -> None:
    digest = "00000000" if fault == "wrong" else hashlib.sha256(Server.data).hexdigest()[:8]
    host = "http://127.0.0.1:9" if fault == "refused" else address
    url = f"{host}/{fault}/some-{digest}.pth"
    with pytest.raises(WeightsError) as caught:
        fetch_weights(url)
    message = str(caught.value)
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    for part in (url, f"some-{digest}.pth", str(folder), "STOKER_WEIGHTS_DIR", "--weights none", "--weights FILE"):
        assert part in message
    assert list(folder.iterdir()) == []


def test_the_addresses_are_those_of_torchvision() -> None:
    assert MODELS[RESNET50].urls["coco"] == COCO_URL
    hosts = ("https://download.pytorch.org/", "https://huggingface.co/")
    assert all(url.startswith(hosts) for row in MODELS.values() for url in row.urls.values())
