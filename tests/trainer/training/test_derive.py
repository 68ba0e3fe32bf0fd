"""Derived settings: from the data, the device and the recipe; never over the user's."""

import dataclasses
import math
import statistics
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.settings import Config, from_fields, read_recipes
from stoker.data.index import Index, open_index
from stoker.data.loading import device_decoder
from stoker.hardware.device import Device, DeviceMemory
from stoker.models import MODELS, build, load_weights, unset_fields
from stoker.training.defaults import derive as deriving
from stoker.training.defaults import dry_run
from stoker.training.defaults.derive import (
    AUGMENTATIONS,
    Derivation,
    choose_warmup_steps,
    derive,
    derive_compile,
    derive_data,
    derive_for_plan,
    derive_lr,
    missing_for_compile,
    total_steps,
)
from stoker.training.defaults.model_choice import estimate_images_per_second
from stoker_watch.durations import parse_duration
from stoker_watch.errors import ConfigError, WeightsError
from tests.drawn import draw
from tests.trainer.models.samples import settings_of

CPU = Device(torch.device("cpu"))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return open_index(draw(tmp_path_factory.mktemp("drawn"), train=60, val=12))


def test_everything_gets_a_value_and_a_reason(index: Index):
    config, reasons = derive(Config(), index, CPU)
    assert unset_fields(config) == ["data"]
    assert set(reasons) == set(config.set_fields())
    assert config.model.model == "retinanet_tiny_fpn"
    assert config.data.image_size == (64, 64)
    assert "1,500" in reasons["max_duration"]


def test_user_settings_are_kept(index: Index):
    asked = from_fields(
        {
            "batch_size": 6,
            "lr": 0.5,
            "optimizer": "sgd",
            "image_size": (96, 32),
            "ema_decay": 0.0,
            "max_duration": "3ep",
            "anchor_sizes": (5.0, 6.0, 7.0),
            "backbone_norm": "frozen_bn",
            "seed": 7,
        }
    )
    config, reasons = derive(asked, index, CPU)
    for name, value in asked.set_fields().items():
        assert dict(config.items())[name] == value
        assert name not in reasons


@pytest.mark.slow
def test_the_model_follows_the_weights_file(index: Index, real_data: Path):
    weights = real_data / "weights" / "mobilenet_v2_imagenet.pth"
    config, reasons = derive(from_fields({"weights": str(weights), "image_size": (64, 64)}), index, CPU)
    assert config.model.model == "ember_mobilenet_v2"
    assert "weights file" in reasons["model"]
    assert config.model.backbone_norm == "frozen_bn"


def test_unknown_model_names_the_nearest(index: Index):
    with pytest.raises(ConfigError, match="did you mean 'retinanet_tiny_fpn'"):
        derive(from_fields({"model": "retinanet_tinny_fpn"}), index, CPU)


@pytest.mark.parametrize(
    ("kind", "length", "step_s", "missing", "compiled", "why"),
    [
        ("cpu", "100000", 1.0, None, False, "on a CPU"),
        ("mps", "100000", 1.0, None, False, "untested on mps"),
        ("cuda", "100000", 1.0, "there is no C compiler (gcc or clang)", False, "there is no C compiler"),
        (
            "cuda",
            "1500",
            0.1,
            None,
            False,
            "too short for minutes of compiling to pay (2 minutes by a trial of 0.1 s a",
        ),
        ("cuda", "3001", 0.1, None, True, "long enough for minutes of compiling to pay (5 minutes by a trial of 0.1"),
        ("cuda", "10ep", 40.0, None, True, "(50 minutes by a trial of 40 s a step)"),  # 60 images, 8 a step
        ("cuda", "4min", 1.0, None, False, "(4 minutes)"),
        ("cuda", "6min", 1.0, None, True, "not confirmed on a GPU yet"),
    ],
)
def test_a_long_run_on_cuda_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    length: str,
    step_s: float,
    missing: str | None,
    compiled: bool,
    why: str,
):
    monkeypatch.setattr("stoker.training.defaults.derive.missing_for_compile", lambda: missing)
    config = from_fields({"max_duration": length, "batch_size": 8})
    known = object.__new__(Derivation)
    known.config, known.num_images, known.device, known.step_s = config, 60, Device(torch.device(kind)), step_s
    chosen, reason = derive_compile(known)
    assert chosen is compiled
    assert why in reason


def test_what_compiling_needs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else object())
    assert missing_for_compile() == "triton is not installed"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in str(missing_for_compile())
    (tmp_path / "clang").touch(0o755)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h is missing" in str(missing_for_compile())
    (tmp_path / "Python.h").touch()
    assert missing_for_compile() is None


def test_a_cuda_graph_needs_cuda(index: Index):
    with pytest.raises(ConfigError, match="--cuda-graph needs an NVIDIA GPU, and the run is on cpu"):
        derive(from_fields({"cuda_graph": True}), index, CPU)
    assert derive(Config(), index, CPU)[0].run.cuda_graph is False


@pytest.mark.parametrize(("text", "steps"), [("12ep", 90), ("77", 77), ("0.5ep", 4), ("3min", None)])
def test_lengths(text: str, steps: int | None):
    assert total_steps(parse_duration(text), 60, 8) == steps


@pytest.mark.parametrize("model", ["retinanet_tiny_fpn", "retinanet_mobilenet_v2_fpn", "retinanet_resnet50_fpn"])
def test_augmentation_can_be_switched_off_and_single_ones_on(index: Index, model: str):
    asked = from_fields({"augment": "none", "model": model, "hue": 0.1})
    config, reasons = derive_data(asked, index, CPU)
    found = {name: value for name, value in config.items() if name in AUGMENTATIONS}
    assert found == {**dict.fromkeys(AUGMENTATIONS, 0.0), "hue": 0.1}
    assert reasons["hflip"] == "--augment none"
    assert "hue" not in reasons
    usual = derive_data(from_fields({"model": model}), index, CPU)[0].data
    assert usual.hflip > 0
    assert usual.mosaic == usual.hue == 0  # never by default


def test_derive_data_equals_derive(index: Index):
    data, _ = derive_data(Config(), index, CPU)
    assert derive(Config(), index, CPU)[0].data == data.data


def test_mosaics_need_a_batch_of_whole_groups(index: Index):
    with pytest.raises(ConfigError, match="multiple of 4"):
        derive(from_fields({"mosaic": 0.5, "batch_size": 6}), index, CPU)
    config, _ = derive(from_fields({"mosaic": 0.5}), index, CPU)
    assert config.run.batch_size % 4 == 0


def test_a_derived_batch_has_whole_mosaic_groups_also_for_few_images(tmp_path: Path):
    for num_images, batch in ((2, 4), (3, 4), (7, 4)):
        few = open_index(draw(tmp_path / str(num_images), train=num_images, val=2))
        config, reasons = derive(from_fields({"mosaic": 0.5}), few, CPU)
        assert config.run.batch_size == batch
        assert f"{num_images} images" in reasons["batch_size"]
        assert derive(Config(), few, CPU)[0].run.batch_size == num_images


@pytest.mark.parametrize("length", ["0.0001min", "0.001min", "30min", "300h", "90000h"])
def test_a_length_in_minutes_has_twelve_evaluations(index: Index, length: str):
    config, _ = derive(from_fields({"max_duration": length}), index, CPU)
    every, whole = (parse_duration(text) for text in (config.run.eval_every, length))
    assert every.unit == "minutes"
    assert every.value == pytest.approx(max(0.001, whole.value / 12), rel=1e-3)


def test_patience_needs_evaluations(index: Index):
    for changes in ({"eval_every": "0"}, {"max_duration": "1ep"}):
        with pytest.raises(ConfigError, match="--patience 2 counts evaluations") as caught:
            derive(from_fields({"patience": 2, **changes}), index, CPU)
        assert "--eval-every" in (caught.value.fix or "")
    derive(from_fields({"patience": 2}), index, CPU)


@pytest.mark.slow
def test_a_larger_batch_has_a_higher_lr_and_a_longer_warm_up_with_reasons(index: Index):
    usual = {"model": "retinanet_resnet18_fpn", "weights": "none", "max_duration": "90000", "image_size": (64, 64)}
    found = {n: derive(from_fields(usual | {"batch_size": n}), index, CPU) for n in (4, 16, 64, 256)}
    assert [config.optim.lr for config, _ in found.values()] == [0.0025, 0.01, 0.04, 0.16]
    assert [config.optim.warmup_steps for config, _ in found.values()] == [500, 500, 1000, 2000]
    assert found[64][1]["lr"] == "recipe standard: 0.01 at 16 images, linear rule (Goyal et al. 2017)"
    assert found[64][1]["warmup_steps"] == (
        "10 % of the length, at most 1,000 steps; longer, as the batch size is 4 times the reference "
        "(Goyal et al. 2017)"
    )
    assert found[16][1]["warmup_steps"] == "5 % of the length, at most 500 steps"
    tiny = derive(from_fields({"batch_size": 64}), index, CPU)[1]["lr"]
    assert tiny == "recipe tiny: 0.0021 at 8 images, square root rule (Malladi et al. 2022)"


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_ember_has_the_lr_of_its_recipe_with_muon_and_with_adamw(optimizer: str | None, index: Index) -> None:
    asked = {"model": "ember_n", "weights": "none", "batch_size": 8, "image_size": (64, 64), "optimizer": optimizer}
    config, _ = derive(from_fields({name: value for name, value in asked.items() if value}), index, CPU)
    assert (config.optim.optimizer, config.optim.lr) == (optimizer or "muon", 0.004)


def test_a_divided_ember_has_adamw_for_muon() -> None:
    arch = MODELS["ember_n"]
    config = from_fields({"shard": True})
    known: Any = types.SimpleNamespace(config=config, recipe=read_recipes()[arch.recipe], arch=arch)
    assert deriving.derive_optimizer(known) == ("adamw", "muon needs whole kernels, which --shard divides")


def test_a_tried_batch_size_scales_the_lr_but_not_the_users(index: Index, monkeypatch):
    monkeypatch.setattr(deriving, "find_batch_size", lambda *_, **__: (64, 1, "tried"))
    assert derive(Config(), index, CPU)[0].optim.lr == pytest.approx(8**0.5 * 2.1e-3, rel=1e-2)
    config, reasons = derive(from_fields({"lr": 0.123, "warmup_steps": 7}), index, CPU)
    assert (config.optim.lr, config.optim.warmup_steps) == (0.123, 7)
    assert not {"lr", "warmup_steps"} & set(reasons)


@pytest.mark.slow
def test_the_cache_is_chosen_if_it_pays_or_is_set(tmp_path: Path, index: Index):
    config, reasons = derive(Config(), index, CPU)
    assert config.run.cache == "none"
    assert "decoding takes only about" in reasons["cache"]
    large = open_index(draw(tmp_path / "large", train=8, val=2, side=800))
    config, reasons = derive(from_fields({"scale_range": (0.7, 1.5)}), large, CPU)
    assert config.run.cache == "disk"
    assert "as a file that stays in memory" in reasons["cache"]
    assert derive(from_fields({"max_duration": "2ep"}), large, CPU)[1]["cache"].startswith("the run has 2 epochs")
    assert (
        "zoom in up to 3 times"
        in derive(from_fields({"scale_jitter_prob": 0.5, "scale_range": (1.0, 3.0)}), large, CPU)[1]["cache"]
    )
    assert "cache" not in derive(from_fields({"cache": "ram"}), index, CPU)[1]


def test_the_cpu_decodes_without_a_gpu_and_with_a_cache(index: Index):
    config, reasons = derive(Config(), index, CPU)
    assert (config.run.jpeg_decoder, reasons["jpeg_decoder"]) == ("cpu", "training is on the CPU")
    reasons = derive(from_fields({"cache": "ram"}), index, CPU)[1]
    assert reasons["jpeg_decoder"] == "decoded images are cached; the CPU decodes each once"
    assert "jpeg_decoder" not in derive(from_fields({"jpeg_decoder": "cpu"}), index, CPU)[1]


def test_nvjpeg_needs_a_gpu_and_no_cache(tmp_path: Path):
    class Other(Device):
        is_cpu = False  # but for this a CPU

    large = open_index(draw(tmp_path / "large", train=8, val=2, side=800))
    with pytest.raises(ConfigError, match="--jpeg-decoder nvjpeg needs a GPU"):
        derive(from_fields({"jpeg_decoder": "nvjpeg"}), large, CPU)
    with pytest.raises(ConfigError, match="--jpeg-decoder nvjpeg cannot be combined with --cache disk"):
        derive_with_trial(from_fields({"jpeg_decoder": "nvjpeg", "cache": "disk"}), large, Other(CPU.torch_device))
    config, reasons = derive_with_trial(from_fields({"jpeg_decoder": "nvjpeg"}), large, Other(CPU.torch_device))
    assert (config.run.jpeg_decoder, config.run.cache) == ("nvjpeg", "none")
    assert reasons["cache"] == "--jpeg-decoder nvjpeg: images for a cache are decoded on the CPU"


def test_the_decoder_is_chosen_with_a_step_of_the_chosen_batch_size(index: Index, monkeypatch: pytest.MonkeyPatch):
    class Other(Device):
        is_cpu = False

    steps: list[float] = []

    def decide(*_, measure_step_s, **__) -> tuple[str, str]:
        steps.append(measure_step_s())
        return "nvjpeg", "measured"

    monkeypatch.setattr(device_decoder, "measure_and_choose_decoder", decide)
    asked = {"model": "retinanet_tiny_fpn", "batch_size": 4, "grad_accum_steps": 2, "cache": "none"}
    config, reasons = derive_with_trial(from_fields(asked), index, Other(CPU.torch_device))
    assert (config.run.jpeg_decoder, reasons["jpeg_decoder"]) == ("nvjpeg", "measured")
    assert steps[0] > 0


def derive_with_trial(asked: Config, index: Index, device: Device) -> tuple[Config, dict[str, str]]:
    """`derive` on a CPU that passes for another device: its memory is not that of one, so no batch is tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            deriving,
            "find_batch_size",
            lambda config, *_, **__: (config.run.batch_size or 4, config.optim.grad_accum_steps or 1, ""),
        )
        patch.setattr(dry_run, "STEPS_PER_ROUND", 1)
        patch.setattr(dry_run, "ROUNDS", 1)
        patch.setattr(Device, "synchronize", lambda _: None)
        patch.setattr(Device, "memory", lambda _: DeviceMemory(2**32, 2**32, 0))
        return derive(asked, index, device)


@given(total=st.none() | st.integers(1, 10**6), times=st.floats(0.01, 1000), more=st.floats(1, 1000))
def test_the_warm_up_grows_with_the_batch_up_to_a_tenth_of_the_length(total: int | None, times: float, more: float):
    steps = choose_warmup_steps(total, times)[0]
    assert steps <= choose_warmup_steps(total, times * more)[0]
    assert total is None or steps <= max(1, total / 10)


def test_the_lr_follows_the_batch_size(index: Index):
    small, _ = derive(from_fields({"batch_size": 4}), index, CPU)
    large, _ = derive(from_fields({"batch_size": 16}), index, CPU)
    assert large.optim.lr == pytest.approx(2 * small.optim.lr, rel=0.01)
    sgd = [derive(from_fields({"batch_size": n, "optimizer": "sgd"}), index, CPU)[0].optim.lr for n in (4, 16)]
    assert sgd[1] == pytest.approx(4 * sgd[0], rel=0.01)


@pytest.mark.slow
def test_random_weights_are_trained_longer_with_a_reason(index: Index, monkeypatch):
    monkeypatch.setattr("stoker.training.defaults.derive.MIN_STEPS", 1)

    def found(model: str, **asked: Any) -> tuple[float, str]:
        config, reasons = derive(from_fields({"model": model, "batch_size": 6, **asked}), index, CPU)
        return parse_duration(config.run.max_duration).value * 6 / 60, reasons["max_duration"]

    assert found("ember_n") == (36, "36 epochs of 60 images from random weights")
    assert found("retinanet_mobilenet_v2_fpn", weights="none")[0] == 36
    assert found("retinanet_tiny_fpn") == (10, "10 epochs of 60 images")
    pretrained, _ = derive_data(from_fields({"model": "ember_mobilenet_v2"}), index, CPU)
    assert pretrained.model.weights == "imagenet"
    monkeypatch.setattr("stoker.training.defaults.derive.MAX_IMAGES_SEEN", 60 * 6)
    steps, why = found("ember_n")
    assert (steps * 60 / 6, why) == (
        180,
        "36 epochs of 60 images from random weights would be 360 steps; at most 180",
    )


def test_many_views_per_image_strengthen_the_augmentation(index: Index):
    def found(**asked: Any) -> tuple[float, tuple[float, float], str]:
        config, reasons = derive_data(from_fields({"model": "ember_n", "batch_size": 8, **asked}), index, CPU)
        return config.data.scale_jitter_prob, config.data.scale_range, reasons.get("scale_range", "")

    num_images = len(index.image_indices("train"))
    usual, more = (0.5, (0.7, 1.5)), (0.8, (0.5, 2.0))
    assert found(max_duration=f"{80 - 1:g}ep")[:2] == usual
    crop, zoom, why = found(max_duration=f"{80:g}ep")
    assert (crop, zoom) == more
    assert f"seen about {80:.0f} times" in why
    assert found()[:2] == more  # the least steps, of few num_images
    assert found(max_duration=str(math.ceil(80 * num_images / 8)))[:2] == more
    a_second = estimate_images_per_second(MODELS["ember_n"], (64, 64))
    minutes = 80 * num_images / a_second / 60
    assert found(max_duration=f"{0.9 * minutes:.4f}min")[:2] == usual
    assert found(max_duration=f"{1.1 * minutes:.4f}min")[:2] == more
    assert found(max_duration="100ep", model="retinanet_mobilenet_v2_fpn")[:2] == usual
    assert found(max_duration="100ep", scale_range=(1.0, 1.2))[1] == (1.0, 1.2)
    assert found(max_duration="100ep", augment="none") == (
        0.0,
        (0.7, 1.5),
        "mild: object sizes stay like those of the data",
    )
    assert found(max_duration="100ep", scale_jitter_prob=0.0)[1] == (0.7, 1.5)


def test_views_count_a_batch_size_above_the_number_of_images(tmp_path: Path):
    index = open_index(draw(tmp_path / "data", train=3, val=1))
    _, reasons = derive_data(from_fields({"model": "ember_n", "max_duration": "300"}), index, CPU)
    assert "about 300 times" in reasons["scale_range"]
    _, reasons = derive_data(from_fields({"model": "ember_n", "max_duration": "30", "batch_size": 9}), index, CPU)
    assert "about 90 times" in reasons["scale_range"]


@pytest.mark.parametrize(
    ("side", "why"), [(0, "the image sizes"), (200, "no more pixels"), (700, "on a CPU 320² pixels")]
)
def test_the_image_size_reason_names_the_cpu(index: Index, side: int, why: str):
    sized = dataclasses.replace(index, original_size=np.full_like(index.original_size, side), boxes=index.boxes * 10)
    _, reasons = derive_data(from_fields({"model": "ember_n"}), sized, CPU)
    assert reasons["image_size"].startswith(why)


@pytest.mark.parametrize(
    ("model", "weights", "lr_mult"),
    [("ember_mobilenet_v2", "imagenet", 0.3), ("ember_mobilenet_v2", "none", 1.0), ("ember_n", "none", 1.0),
     ("retinanet_mobilenet_v2_fpn", "imagenet", 1.0)],
)  # fmt: skip
def test_a_frozen_pretrained_backbone_of_ember_has_a_lower_lr(index: Index, model: str, weights: str, lr_mult: float):
    config, _ = derive_for_plan(from_fields({"model": model, "weights": weights}), index, CPU)
    assert config.optim.backbone_lr_mult == lr_mult
    config, _ = derive_for_plan(from_fields({"model": model, "weights": weights, "backbone_norm": "bn"}), index, CPU)
    assert config.optim.backbone_lr_mult == 1.0


# Peterande/D-FINE at 4a1f73a, configs/dfine/custom/dfine_hgnetv2_n_custom.yml and custom/objects365/*_obj2custom.yml:
# images of a batch, lr, that of the backbone, weight decay.
DFINE_FINE_TUNING = {
    "dfine_n": (128, 0.0008, 0.0004, 0.0001),
    "dfine_s": (32, 0.00025, 0.000125, 0.000125),
    "dfine_m": (32, 0.00025, 0.000025, 0.000125),
    "dfine_l": (32, 0.00025, 0.0000125, 0.000125),
    "dfine_x": (32, 0.00025, 0.0000025, 0.000125),
}


@pytest.mark.parametrize("model", DFINE_FINE_TUNING)
def test_d_fine_is_fine_tuned_at_the_learning_rates_of_its_authors(index: Index, model: str):
    batch_size, lr, backbone_lr, weight_decay = DFINE_FINE_TUNING[model]
    asked = from_fields({"model": model, "batch_size": batch_size})
    config, _ = derive_for_plan(asked, index, CPU)
    optim = derive_lr(Derivation(config, index, CPU))[0], config.optim.backbone_lr_mult, config.optim.weight_decay
    assert optim == (pytest.approx(lr), pytest.approx(backbone_lr / lr), weight_decay)
    assert config.model.weights == ("coco" if model == "dfine_n" else "objects365+coco")  # of N there are no others
    random, _ = derive_for_plan(asked.replace(weights="none"), index, CPU)
    assert random.optim.backbone_lr_mult == 1.0  # nothing of a random backbone is to be kept


def test_rf_detr_is_fine_tuned_at_the_mean_learning_rate_of_its_authors(index: Index):
    """roboflow/rf-detr at 35ac6ab: 1e-4 at 16 images; lr_encoder 1.5e-4, lr_component_decay 0.7, squared,
    lr_vit_layer_decay 0.8 for each of the 12 layers, the last of which has it twice."""
    config, _ = derive_for_plan(from_fields({"model": "rf_detr_n", "batch_size": 16}), index, CPU)
    assert derive_lr(Derivation(config, index, CPU))[0] == pytest.approx(1e-4, rel=0.01)
    of_layers = [1.5 * 0.7**2 * 0.8**power for power in range(2, 14)]
    assert config.optim.backbone_lr_mult == pytest.approx(statistics.geometric_mean(of_layers), rel=0.02)


@pytest.mark.parametrize("weights", ["coco", pytest.param("imagenet", marks=pytest.mark.slow)])
def test_missing_pretrained_weights_are_named(index: Index, weights: str):
    with pytest.raises(WeightsError, match=f"There are no {weights} weights for ember_n"):
        derive(from_fields({"model": "ember_n", "weights": weights, "batch_size": 2}), index, CPU)
    config, _ = derive(from_fields({"model": "ember_n", "weights": "none", "batch_size": 2}), index, CPU)
    settings = dataclasses.replace(config.model, weights=weights)
    with pytest.raises(WeightsError, match=f"There are no {weights} weights for ember_n"):
        load_weights(build(settings, 3), settings, class_names=("a", "b", "c"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"nms_free": True}, *(pytest.param(other, marks=pytest.mark.slow) for other in ({"depthwise": True}, {}))],
)
def test_a_file_of_ember_weights_decides_its_options(index: Index, tmp_path: Path, options: dict[str, bool]):
    file = tmp_path / "ember.pth"
    torch.save(build(settings_of("ember_n", **options), 80).state_dict(), file)
    config, reasons = derive(from_fields({"weights": str(file), "batch_size": 2}), index, CPU)
    assert config.model.model == "ember_n"
    assert "weights file" in reasons["model"]
    model = build(config.model, 3)
    said = load_weights(model, config.model, class_names=("a", "b", "c"))
    assert "backbone, neck and heads" in said[0]
    for name in ("nms_free", "depthwise"):
        assert getattr(config.model, name) is options.get(name, False)
        other = not options.get(name, False)
        with pytest.raises(ConfigError, match=f"--(no-)?{name.replace('_', '-')} does not fit --weights"):
            derive(from_fields({"weights": str(file), "batch_size": 2, name: other}), index, CPU)
