"""Recipe files of ember networks, and the shared weights that the search over them scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.trial import TrialState, create_trial

from stoker.config.architectures import model_name, parse_network, read_recipe
from stoker.config.settings import Config
from stoker.data.batch import Batch
from stoker.hardware.selection import select_device
from stoker.models import build, get_architecture
from stoker.search.architecture import BASE, PARTS, SuperNet, make_space, network_of, resize_batch
from stoker.search.space import Space, read_space
from stoker.search.study import StudySpec, propose
from stoker_watch.cli.app import main
from stoker_watch.errors import ConfigError

RECIPE = """family = "ember"
block = "inverted"
width = 8
depths = [1, 2, 1, 1]
channels = [16, 32, 64]
head_depth = 1
"""
SMALL: dict[str, Any] = {
    "block": ["csp", "inverted"], "width": [4, 8], "depth": [1, 2], "neck": [8, 32], "head_depth": [1, 2],
}  # fmt: skip


def config_of(name: str) -> Config:
    defaults = dict(get_architecture(name).defaults)
    return Config().replace(model=name, weights="none", activation_checkpointing=False, **defaults)


def test_a_recipe_file_is_a_model_whose_name_says_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "found.toml"
    path.write_text(RECIPE)
    name = model_name(str(path))
    assert name == "ember-inverted-w8-d1211-n16.32.64-b1-h1"
    assert parse_network(name) == read_recipe(path)
    path.unlink()
    model = build(config_of(name).model, 3)
    outputs = model.eval()(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    assert outputs.one_to_many.logits.shape == (1, 8 * 8 + 4 * 4 + 2 * 2, 3)
    assert len(model.get_submodule("head.many.classes.0")) == 2, "one convolution and the last layer"


def test_the_base_of_the_search_is_ember_n() -> None:
    name = network_of(BASE).name()
    base, found = (build(config_of(model).model, 3).state_dict() for model in ("ember_n", name))
    assert {k: v.shape for k, v in base.items()} == {k: v.shape for k, v in found.items()}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("width = 8", "widht = 8", "did you mean 'width'"),
        ('"ember"', '"retinanet"', "family 'retinanet'"),
        ("width = 8", "width = 2", "out of range"),
        ("width = 8", "width = 9", "even"),
        ("[1, 2, 1, 1]", "[1, 2, 1]", "4 numbers"),
        ("[16, 32, 64]", '["a"]', "wrong"),
        ("family", "=", "TOML"),
    ],
)
def test_a_wrong_recipe_file_names_the_file_and_the_fix(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "found.toml"
    path.write_text(RECIPE.replace(old, new, 1))
    with pytest.raises(ConfigError, match="(?s)" + message) as caught:
        get_architecture(str(path))
    assert "found.toml" in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        get_architecture(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wdth = [8]", "did you mean 'width'"), ("width = []", "no list"), ("", "empty"),
        ("width = [8, 8]", "different"), ("width = [7]", "even"), ("width = [2]", "not a part"),
        ("neck = [300]", "not a part"), ("image_size = [50]", "not a part"), ('block = ["vit"]', "csp, inverted"),
        ("width = [8]\n[limits]\nstep_s = 1", "no step_s"),
    ],
)  # fmt: skip
def test_a_wrong_space_of_networks_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="(?s)" + message):
        make_space(read_space(path, tuple(PARTS)), (128, 128), path)


def make_net() -> SuperNet:
    torch.manual_seed(0)
    return SuperNet(Space(SMALL), config_of("ember_n"), 3, select_device("cpu"))


def batch() -> Batch:
    boxes = torch.tensor([[[8.0, 8.0, 40.0, 40.0]] * 8] * 2)
    torch.manual_seed(1)
    fields: dict[str, Any] = {
        "images": torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8), "boxes": boxes,
        "labels": torch.ones(2, 8, dtype=torch.int64), "valid": torch.tensor([[True] + [False] * 7] * 2),
    }  # fmt: skip
    return Batch(**{name: fields.get(name) for name in Batch._fields})  # type: ignore[arg-type]


def test_every_network_uses_parts_of_the_shared_tensors_and_trains_them() -> None:
    net, some = make_net(), batch()
    for network in (*net.largest, *net.smallest, *net.networks[3::9]):
        own = net.parameters(network)
        assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in net.model(network).named_parameters()}
    optimizer = torch.optim.Adam(net.tensors.values(), lr=3e-3)
    losses = []
    for _ in range(24):
        loss = torch.stack([net.loss(network, some) for network in (net.largest[0], net.smallest[1])]).sum()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


def test_a_concatenated_map_keeps_its_own_weights_at_every_width() -> None:
    """The weights of the second map of a join are those of the second map in the largest network, too, not the columns
    that follow the first."""
    net = make_net()
    wide, narrow = (
        network_of({"width": 8, "neck": 8, "head_depth": 1}),
        network_of({"width": 4, "neck": 8, "head_depth": 1}),
    )
    name = "backbone.body.layer2.1.join.0.weight"
    a, b = (net.parameters(network)[name] for network in (wide, narrow))
    assert (a.shape[1], b.shape[1]) == (3 * 16, 3 * 8)
    for n in range(3):
        assert torch.equal(b[:, 8 * n : 8 * n + 8], a[: b.shape[0], 16 * n : 16 * n + 8])


def test_an_extracted_network_computes_what_the_shared_weights_do() -> None:
    net, some = make_net(), batch()
    network = net.networks[5]
    model = net.extract(network, [some])
    statistics = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert all(int(m.num_batches_tracked) == 1 for m in statistics)
    model.train()
    with torch.no_grad():
        own = sum(float(value) for value in model.loss(model(some.images), some).values())
        assert float(net.loss(network, some).detach()) == pytest.approx(own, rel=1e-4)


def test_shrunk_batches_keep_their_boxes_on_the_objects() -> None:
    small = resize_batch(batch(), 32)
    assert small.images.shape == (2, 3, 32, 32)
    assert small.boxes[0, 0].tolist() == [4.0, 4.0, 20.0, 20.0]


def test_generations_follow_from_seed_and_results() -> None:
    """Narrow networks are better in both objectives: later generations, whose parents are the best, are narrower."""
    space = Space({"width": list(range(4, 64, 2)), "neck": list(range(8, 128, 2))})
    first = later = 0.0
    for seed in (0, 1, 3):
        spec = StudySpec(
            data="d", digest="", settings={}, defaults={"width": 62, "neck": 8}, space=space, trials=40, round=10,
            objectives=["ap", "latency_ms"], pruner="none", evaluations=1, seed=seed, sampler="nsga2",
        )  # fmt: skip
        trials: list[Any] = []
        for number in range(40):
            params = propose(spec, trials, number)
            trial = create_trial(
                state=TrialState.COMPLETE, values=[1 - params["width"] / 64, float(params["width"])], params=params,
                distributions=space.distributions(),
            )  # fmt: skip
            trial.number = number
            trials.append(trial)
        assert propose(spec, trials, 25) == trials[25].params
        widths = [trial.params["width"] for trial in trials]
        first, later = first + sum(widths[:10]) / 10, later + sum(widths[10:]) / 30
    assert later < 0.8 * first, "half of the children have a random width, by mutation"


@pytest.mark.parametrize(("flags", "message"), [
    (["--parallel", "2"], "takes no --parallel"), (["--model", "ember_s"], "family ember"),
    (["--max-time", "5min"], "--steps"),
])  # fmt: skip
def test_flags_of_the_other_search_are_refused(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["stoker", "search", "demo", "--architecture", "--device", "cpu", *flags])
    with pytest.raises(SystemExit):
        main()
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_search_writes_recipes_that_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generations in miniature, then six steps of a found network, its evaluation and its continuation."""
    space, folder, run = tmp_path / "space.toml", tmp_path / "study", tmp_path / "run"
    space.write_text("width = [4, 8]\nneck = [8, 16]\nimage_size = [32, 64]\n")
    common = ["--device", "cpu", "--batch-size", "8", "--workers", "1"]

    def stoker(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["stoker", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code in (0, None)

    search = ["search", "demo", "--architecture", "--space", str(space), "--steps", "4", "--trials", "3"]
    stoker(*search, "--image-size", "64", "64", "--run-dir", str(folder), *common)
    recipe = next(folder.glob("network-*.toml"))
    assert json.loads((folder / "costs.json").read_text())
    stoker(
        "train",
        "demo",
        "--model",
        str(recipe),
        "--steps",
        "2",
        "--image-size",
        "64",
        "64",
        "--run-dir",
        str(run),
        *common,
    )
    recipe.unlink()
    stoker("eval", str(run))
