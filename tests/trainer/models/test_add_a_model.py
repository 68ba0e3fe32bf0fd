"""docs/add-a-model.md, followed step by step: its file, its row, its checks; then saved, loaded and recognized."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.config.architectures import make_architecture
from stoker.knowledge import read_toml
from stoker.models import MODELS, build, detect_architecture, table
from stoker.models.layers.boxes import iou
from stoker.models.weights import model_file
from tests.trainer.models import test_boxes, test_no_waits
from tests.trainer.models.samples import make_batch, settings_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "add-a-model.md").read_text()
FILE, CHECK = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(ROW,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
NAME = "spot_tiny"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the page, as it would be in the package and in the table."""
    path = tmp_path / "spot.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("stoker.models.spot", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stoker.models.spot", module)
    spec.loader.exec_module(module)
    (family,) = re.findall(r"`\"spot\": (.*?)`", PAGE)
    monkeypatch.setitem(table.FAMILIES, "spot", eval(family, {**vars(table), "Spot": module.Spot}))
    ((name, row),) = tomllib.loads(ROW)["models"].items()
    monkeypatch.setitem(MODELS, name, make_architecture(row, read_toml("models.toml")["defaults"]))


@pytest.mark.usefixtures("added")
def test_the_checks_of_the_page_pass() -> None:
    torch.manual_seed(0)
    space: dict[str, Any] = {}
    exec(compile(CHECK, "docs/add-a-model.md", "exec"), space)
    assert len(space["history"]) == 20


@pytest.mark.usefixtures("added")
def test_the_tests_of_every_row_pass() -> None:
    test_boxes.test_the_table_says_what_is_built(NAME)
    test_no_waits.test_a_step_on_the_cpu_makes_no_host_sync(NAME, "l1", "adamw")


def test_the_page_names_the_tests_of_every_row() -> None:
    over_models = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests/trainer/models").glob("test_*.py")
        if re.search(r"^@pytest.mark.parametrize\([^\n]*\bMODELS\b", path.read_text(), re.MULTILINE)
    ]
    assert "tests/trainer/models/test_no_waits.py" in over_models
    assert [path for path in over_models if f"`{path}`" not in PAGE] == []


@pytest.mark.slow
@pytest.mark.usefixtures("added")
def test_it_finds_what_it_has_learned() -> None:
    """Overfitted to a batch, it puts a box where each box is; the random pixels tell the images apart."""
    torch.manual_seed(0)
    model = build(settings_of(NAME), 2).train()
    batch = make_batch((2, 1), (64, 64), 2, seed=2, slots=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        sum(model.loss(model(batch.images), batch).values()).backward()
        optimizer.step()
    found = model.decode(model(batch.images), batch.resized_size, batch.scale, batch.original_size, score_threshold=0.3)
    for image in range(2):
        of_image = batch.valid[image]
        overlap = iou(batch.boxes[image, of_image], found.boxes[image][found.valid[image]])
        assert (overlap.amax(1) > 0.5).all()


@pytest.mark.slow
@pytest.mark.usefixtures("added")
def test_it_is_saved_loaded_and_recognized(tmp_path: Path) -> None:
    settings = settings_of(NAME)
    model = build(settings, 2).eval()
    metadata = model_file.ModelMetadata(
        settings=settings, class_names=("a", "b"), image_size=(64, 96), resize="letterbox"
    )
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "best.safetensors", metadata.header())
    save_file(tensors, tmp_path / "bare.safetensors")
    again, its_metadata = model_file.load_model(tmp_path / "best.safetensors")
    assert its_metadata == metadata
    images = make_batch((0,), (64, 96), 2).images
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(model(images)[:3], again(images)[:3], strict=True))
    assert detect_architecture(tmp_path / "bare.safetensors") == NAME
