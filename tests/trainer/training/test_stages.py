"""`--stages`: ranks with a stage each train what one process trains, and their checkpoints are those of one process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker.config.settings import from_fields
from stoker.data.index import open_index
from stoker.hardware.selection import select_device
from stoker.models import MODELS, build
from stoker.models.weights.load import shapes_only
from stoker.training.cluster import Devices
from stoker.training.defaults.derive import choose_micro_batches, derive
from stoker.training.local_ranks import choose_devices, find_free_port
from stoker.training.ranks import Ranks
from stoker.training.stages import Pipeline, Stages, _merge, cut, list_parts
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.errors import ConfigError
from stoker_watch.runs.records import EVENTS, STEPS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from tests.drawn import draw, run_stoker, stoker
from tests.fixtures.training_ranks import (  # noqa: F401
    arguments,
    assert_same_training,
    in_float64,
    start,
    train,
    wait_for_checkpoint,
)
from tests.trainer.models.samples import make_batch, settings_of
from tests.trainer.training.stage_step import CASES

FAST = ["--steps", "20", "--backbone-norm", "bn", "--grad-accum-steps", "3"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn"), train=30)


def make_model(name: str, **changes: Any) -> Any:
    with shapes_only():
        return build(settings_of(name, **changes), 3)


def test_cuts_make_the_largest_cost_as_small_as_possible() -> None:
    for costs, count, cuts in (
        ([3, 1, 1, 1], 2, (0, 1, 4)),
        ([1, 1, 1, 5], 3, (0, 1, 3, 4)),
        ([0, 0, 1], 3, (0, 1, 2, 3)),
        ([2, 2, 2, 2], 1, (0, 4)),
    ):
        assert cut([(cost,) for cost in costs], count) == cuts
    flop, size = [1, 1, 1, 7], [1, 8, 8, 3]
    assert cut(list(zip(flop, size, strict=True)), 2) == (0, 2, 4), "by FLOPs alone the last part would be a stage"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_each_tensor_of_each_model_is_in_one_part(name: str) -> None:
    model = make_model(name)
    parts = list_parts(model)
    assert len(parts) >= 6
    owners = {key: [part.name for part in parts if key.startswith(part.prefixes)] for key in model.state_dict()}
    for key, names in owners.items():
        assert len(names) == (1 if key.startswith("backbone.") else 0), key


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("retinanet_tiny_fpn", 64),
        ("retinanet_mobilenet_v2_fpn", 64),
        ("ember_n", 64),
        ("fcos_resnet18_fpn", 64),
        ("ssdlite320_mobilenet_v3_large", 64),
        ("ssd300_vgg16", 64),
        ("faster_rcnn_resnet18_fpn", 64),
    ],
)
def test_parts_one_after_the_other_are_the_forward_pass(name: str, size: int) -> None:
    torch.manual_seed(0)
    model = build(settings_of(name), 3).eval()
    images = make_batch((0, 0), (size, size), 3).images
    with torch.no_grad():
        flow = [model.normalize(images)]
        for number in range(len(model.backbone.parts())):  # type: ignore[operator]
            flow = model.backbone.run(flow, number, number + 1)  # type: ignore[operator]
        for found, expected in zip(flow, model.backbone(model.normalize(images)), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_costs_of_all_parts_are_known() -> None:
    torch.manual_seed(0)
    model = build(settings_of("retinanet_tiny_fpn"), 3)
    stages = Stages.of(model, Ranks(), torch.device("cpu"))
    assert stages.owner("backbone.body.stem.0.weight") == stages.owner("head.x") == 0
    flop = [part.flop for part in stages.parts]
    assert all(flop)
    assert model.training


def test_the_cut_is_the_same_on_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Winograd's convolution, where there is no AVX-512, has fewer FLOPs; the ranks may have different processors."""
    flop = []
    for capability in ("AVX512", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        flop.append([part.flop for part in list_parts(build(settings_of("ssd300_vgg16"), 3))])
    assert flop[0] == flop[1]


def test_merged_trees_have_all_tensors_and_the_order_of_one_process() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    merged = _merge([({"a": one, "b": None}, {1: {"x": one}}, None), ({"a": None, "b": two}, {0: {"x": two}}, 3)])
    assert merged == ({"a": one, "b": two}, {0: {"x": two}, 1: {"x": one}}, 3)
    assert list(merged[1]) == [0, 1]


def test_micro_batches_fill_the_stages() -> None:
    assert choose_micro_batches(16, 2, 1) == (8, "2 stages of equal speed would wait 11 % of a step")
    assert choose_micro_batches(12, 3, 1)[0] == 6
    assert choose_micro_batches(2, 4, 2)[0] == 2
    assert choose_micro_batches(1, 2, 1)[0] == 1


def test_as_many_devices_as_stages_unless_a_launcher_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [choose_devices(None, n) for n in (None, 1, 3)] == [None, None, 3]
    assert choose_devices(2, 3) == 2
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert choose_devices(None, 3) is None


@pytest.mark.parametrize(
    ("settings", "devices", "words"),
    [
        ({}, 1, ["run is on one", "--devices 2"]),
        ({"stages": 3}, 2, ["--stages 3", "the run has 2", "--devices 3", "--stages 2"]),
        ({"stages": 9}, 9, ["has 7 parts", "2 … 7"]),
        ({"shard": True}, 2, ["--stages and --shard"]),
        ({"sync": "bf16"}, 2, ["--stages and --sync bf16"]),
        ({"compile": True}, 2, ["--stages and --compile"]),
        ({"auto_batch": True, "batch_size": None}, 2, ["--stages and --auto-batch"]),
        ({"cuda_graph": True}, 2, ["--stages and --cuda-graph"]),
    ],
)
def test_what_cannot_be_combined_is_refused(
    data: Path, settings: dict[str, object], devices: int, words: list[str]
) -> None:
    fields = {"data": str(data), "model": "retinanet_tiny_fpn", "batch_size": 12, "device": "cpu", "stages": 2}
    with pytest.raises(ConfigError) as caught:
        derive(from_fields(fields | settings), open_index(data), select_device("cpu"), Devices(devices, devices))
    for word in words:
        assert word in str(caught.value)


def test_a_batch_need_not_be_a_multiple_of_the_stages(data: Path) -> None:
    fields = {"data": str(data), "model": "retinanet_tiny_fpn", "batch_size": 10, "device": "cpu", "stages": 3}
    config, reasons = derive(from_fields(fields), open_index(data), select_device("cpu"), Devices(3, 3))
    assert (config.run.batch_size, config.optim.grad_accum_steps) == (10, 5)
    assert "3 stages" in reasons["grad_accum_steps"]


def test_the_error_of_a_stage_is_not_hidden() -> None:
    """torch raises RuntimeError from it; out of memory has an exit code of its own."""

    class Schedule:
        def step(self, *_: object, **__: object) -> None:
            raise RuntimeError("failed to run forward") from torch.OutOfMemoryError("of the stage")

    pipeline = object.__new__(Pipeline)
    pipeline.ranks, pipeline._group = SimpleNamespace(rank=1), None  # type: ignore[assignment]
    pipeline._last, pipeline._schedule, pipeline.micro_batches = 2, Schedule(), 1
    batch = make_batch((0, 0), (64, 64), 3)
    with pytest.raises(torch.OutOfMemoryError, match="of the stage"):
        pipeline.forward_backward(batch)


def run_ranks(count: int, *words: str) -> dict[str, dict[str, float]]:
    """What `stage_step.py` prints in rank 0."""
    port = find_free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.training.stage_step", *words],
            cwd=Path(__file__).resolve().parents[3],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=850)[0] for rank in ranks]
    print(outputs[0])
    assert [rank.returncode for rank in ranks] == [0] * count
    found: dict[str, dict[str, float]] = json.loads(outputs[0].splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("count", "cases"), [(2, [*CASES][:3]), (2, [*CASES][3:]), (3, ["frozen", "few"])])
def test_steps_of_every_family_are_those_of_one_process(count: int, cases: list[str]) -> None:
    """In float64, two steps of four micro-batches: weights, EMA, moments, losses; clipped; a skipped step; activation
    checkpointing; frozen stages; two optimizers."""
    found = run_ranks(count, *cases)
    assert list(found) == cases
    for case, numbers in found.items():
        for name in ("state", "ema", "restored", "skipped"):
            assert numbers[name] < 1e-12, (case, name, numbers)
        assert numbers["losses"] < 1e-6, (case, numbers)  # they are summed in fp32
        assert numbers["all_bytes"] == pytest.approx(1.0), (case, "each tensor is in one rank", numbers)
        assert numbers["own_bytes"] < 0.95, (case, numbers)
        assert numbers["peak"] < 0.95, (case, "one process would need a larger device", numbers)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [["ember"], ["fcos", "faster_rcnn"]], ids=",".join)
def test_a_model_too_big_for_one_device_trains_in_stages(cases: list[str]) -> None:
    """Out of memory in one process of such a device although its micro-batches are single images."""
    found = run_ranks(2, "--limited", *cases)
    assert list(found) == cases
    for case, numbers in found.items():
        assert numbers["stage_bytes"] < 0.9 * numbers["whole_bytes"], (case, numbers)
        assert numbers["steps_whole"] < numbers["steps_stages"] == 2, (case, numbers)
        assert numbers["losses"] < 1e-6, (case, numbers)


@pytest.mark.slow
def test_one_process_two_stages_one_process(data: Path, tmp_path: Path) -> None:
    """With trained norms, against one process with the same micro-batches; checkpoints have the same layout."""
    whole = train(data, tmp_path / "whole", 1, *FAST)
    folder, run = tmp_path / "moved", tmp_path / "moved" / "run"
    process = start(data, folder, 1, *FAST)
    wait_for_checkpoint(process, run)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    process = stoker("train", "--resume", "run", "--stages", "2", cwd=folder)
    wait_for_checkpoint(process, run)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    code, output = run_stoker("train", "--resume", "run", cwd=folder)
    assert code == 0, output
    attempts = [event.data for event in read_lines(run, EVENTS, Event) if event.kind in ("started", "resumed")]
    assert [(data.get("ranks", 1), data.get("stages", 1)) for data in attempts] == [(1, 1), (2, 2), (1, 1)]
    assert_same_training(whole, run)


@pytest.mark.slow
def test_killed_and_continued_is_bit_identical(data: Path, tmp_path: Path) -> None:
    """With AdamW, and checkpoints by the clock, which only rank 0 reads. The files are laid out as those of one
    process."""
    flags = [*FAST, "--stages", "2", "--optimizer", "adamw", "--checkpoint-every", "0.02min"]
    whole = train(data, tmp_path / "whole", 2, *flags)
    totals = read_run(whole).totals
    assert (totals.devices, totals.steps, totals.num_images) == (2, 20, 20 * 12)
    assert sum(totals.phases.values()) == pytest.approx(totals.device_s)
    assert totals.phases["comm"] > 0
    windows = list(read_lines(whole / "ranks" / "0001", STEPS, StepWindow))
    assert sum(window.window_steps for window in windows) == 20
    process = start(data, tmp_path / "killed", 2, *flags)
    wait_for_checkpoint(process, tmp_path / "killed" / "run")
    process.kill()
    process.communicate(timeout=120)
    killed = train(data, tmp_path / "killed", 2, *flags)
    for name in ("final.safetensors", "best.safetensors"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    one = train(data, tmp_path / "one", 1, *(flag for flag in flags if flag not in ("--stages", "2")))
    newest = [sorted(run.glob("checkpoints/step-*"))[-1] for run in (whole, one)]
    states = [torch.load(folder / "state.pt", weights_only=True) for folder in newest]
    assert layout(states[0]) == layout(states[1])


def layout(tree: Any) -> Any:
    """The tree with types and shapes for values."""
    if isinstance(tree, torch.Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, dict):
        return {key: layout(value) for key, value in tree.items() if key not in ("lr", "quarantined")}
    if isinstance(tree, list | tuple):
        return [layout(value) for value in tree]
    return type(tree)


@pytest.mark.slow
def test_three_stages_evaluate_what_one_process_does(data: Path, tmp_path: Path) -> None:
    flags = [
        "--steps",
        "6",
        "--eval-every",
        "3",
        "--ema-decay",
        "0",
        "--backbone-norm",
        "bn",
        "--grad-accum-steps",
        "6",
    ]
    one, three = train(data, tmp_path / "one", 1, *flags), tmp_path / "three"
    three.mkdir()
    words = arguments(data, 3, *flags, "--stages", "3")
    code, output = run_stoker(*words[: words.index("--devices")], cwd=three)
    assert code == 0, output
    assert_same_training(one, three / "run")
    assert (three / "run" / "best.safetensors").exists() == (one / "best.safetensors").exists()
