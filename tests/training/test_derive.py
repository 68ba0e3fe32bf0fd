"""What stoker chooses for settings left open: from the data, the device, the recipe; never over the user."""

from pathlib import Path

import pytest
import torch

from stoker.config import SECTION_OF, Config, from_fields, parse_duration
from stoker.data.index import Index, open_index
from stoker.device import Device, Memory
from stoker.errors import ConfigError, OutOfMemoryError
from stoker.training import fit
from stoker.training.derive import AUGMENTATIONS, derive, derive_data, total_steps
from tests.drawn import draw

CPU = Device(torch.device("cpu"))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return open_index(draw(tmp_path_factory.mktemp("drawn"), train=60, val=12))


def test_everything_gets_a_value_and_a_reason(index: Index):
    config, reasons = derive(Config(), index, CPU)
    assert set(config.set_fields()) == set(SECTION_OF) - {"data"}
    assert set(reasons) == set(config.set_fields())
    assert config.model.model == "retinanet_tiny_fpn"
    assert config.data.canvas == (64, 64)
    assert "1,500" in reasons["for_"]


def test_what_the_user_set_stays(index: Index):
    asked = from_fields({"batch": 6, "rate": 0.5, "optimizer": "sgd", "canvas": (96, 32), "ema": 0.0, "for_": "3ep",
                         "anchor_sizes": (5.0, 6.0, 7.0), "norm": "frozen", "seed": 7})  # fmt: skip
    config, reasons = derive(asked, index, CPU)
    for name, value in asked.set_fields().items():
        assert dict(config.items())[name] == value
        assert name not in reasons


def test_the_model_follows_the_weights_file(index: Index, real_data: Path):
    weights = real_data / "weights" / "mobilenet_v2_imagenet.pth"
    config, reasons = derive(from_fields({"weights": str(weights)}), index, CPU)
    assert config.model.model == "retinanet_mobilenet_v2_fpn"
    assert "weights file" in reasons["model"]
    assert config.model.norm == "frozen"


def test_unknown_model_names_the_nearest(index: Index):
    with pytest.raises(ConfigError, match="did you mean 'retinanet_tiny_fpn'"):
        derive(from_fields({"model": "retinanet_tinny_fpn"}), index, CPU)


@pytest.mark.parametrize(("text", "steps"), [("12ep", 90), ("77", 77), ("0.5ep", 4), ("3min", None)])
def test_lengths(text: str, steps: int | None):
    assert total_steps(parse_duration(text), 60, 8) == steps


@pytest.mark.parametrize("model", ["retinanet_tiny_fpn", "retinanet_mobilenet_v2_fpn", "retinanet_resnet50_fpn"])
def test_augmentation_can_be_switched_off_and_single_ones_on(index: Index, model: str):
    asked = from_fields({"augment": "none", "model": model, "hue": 0.1})
    config, reasons = derive_data(asked, index, CPU)
    found = {name: value for name, value in config.items() if name in AUGMENTATIONS}
    assert found == {**dict.fromkeys(AUGMENTATIONS, 0.0), "hue": 0.1}
    assert reasons["flip"] == "--augment none"
    assert "hue" not in reasons
    usual = derive_data(from_fields({"model": model}), index, CPU)[0].data
    assert usual.flip > 0
    assert usual.mosaic == usual.hue == 0  # never by default


def test_what_is_derived_for_the_data_alone_is_what_training_uses(index: Index):
    data, _ = derive_data(Config(), index, CPU)
    assert derive(Config(), index, CPU)[0].data == data.data


def test_mosaics_need_a_batch_of_whole_groups(index: Index):
    with pytest.raises(ConfigError, match="multiple of 4"):
        derive(from_fields({"mosaic": 0.5, "batch": 6}), index, CPU)
    config, _ = derive(from_fields({"mosaic": 0.5}), index, CPU)
    assert config.run.batch % 4 == 0


def test_a_batch_that_is_derived_is_of_whole_groups_also_for_few_pictures(tmp_path: Path):
    for pictures, batch in ((2, 4), (7, 4), (14, 12)):
        few = open_index(draw(tmp_path / str(pictures), train=pictures, val=2))
        config, reasons = derive(from_fields({"mosaic": 0.5}), few, CPU)
        assert config.run.batch == batch
        assert f"{pictures} pictures" in reasons["batch"]
        assert derive(Config(), few, CPU)[0].run.batch == pictures


@pytest.mark.parametrize("length", ["0.0001min", "0.001min", "30min", "300h", "90000h"])
def test_any_time_has_its_evaluations(index: Index, length: str):
    config, _ = derive(from_fields({"for_": length}), index, CPU)
    every, whole = (parse_duration(text) for text in (config.run.eval_every, length))
    assert every.unit == "minutes"
    assert every.value == pytest.approx(max(0.001, whole.value / 12), rel=1e-3)


def test_patience_needs_evaluations(index: Index):
    for changes in ({"eval_every": "0"}, {"for_": "1ep"}):
        with pytest.raises(ConfigError, match="--patience 2 counts evaluations") as caught:
            derive(from_fields({"patience": 2, **changes}), index, CPU)
        assert "--eval-every" in (caught.value.fix or "")
    derive(from_fields({"patience": 2}), index, CPU)


def test_rate_follows_the_batch(index: Index):
    small, _ = derive(from_fields({"batch": 4}), index, CPU)
    large, _ = derive(from_fields({"batch": 16}), index, CPU)
    assert large.optim.rate == pytest.approx(2 * small.optim.rate, rel=0.01)
    sgd = [derive(from_fields({"batch": n, "optimizer": "sgd"}), index, CPU)[0].optim.rate for n in (4, 16)]
    assert sgd[1] == pytest.approx(4 * sgd[0], rel=0.01)


class SmallDevice(Device):
    """An accelerator whose memory is what a test says."""

    @property
    def is_cpu(self) -> bool:
        return False

    def memory(self) -> Memory:
        return Memory(total=10 * 2**30, free=10 * 2**30, peak=0)


@pytest.mark.parametrize(
    ("fixed_gib", "picture_gib", "batch", "parts"),
    [(1.0, 0.2, 16, 1), (1.0, 0.9, 16, 2), (1.0, 3.0, 16, 8), (4.0, 4.0, 16, 16)],
)
def test_a_batch_that_does_not_fit_is_split(
    index: Index, monkeypatch: pytest.MonkeyPatch, fixed_gib: float, picture_gib: float, batch: int, parts: int
):
    """Nine of ten GiB may be used; the trial's peak is a line, beyond the device's memory it raises."""

    def trial(*arguments: object) -> int:
        used = (fixed_gib + picture_gib * arguments[-1]) * 2**30  # type: ignore[operator]
        if used > 10 * 2**30:
            raise torch.OutOfMemoryError("out of memory")
        return int(used)

    monkeypatch.setattr(fit, "_trial", trial)
    monkeypatch.setattr(Device, "release_cache", lambda _: None)
    monkeypatch.setattr(Device, "reset_peak", lambda _: None)
    config, _ = derive(Config(), index, CPU)
    open_batch = config.replace(batch=None)
    device = SmallDevice(torch.device("cpu"))
    assert fit.batch(open_batch, index, device, wanted=16, pictures=60)[:2] == (batch, parts)


def test_not_even_one_picture(index: Index, monkeypatch: pytest.MonkeyPatch):
    def trial(*_: object) -> int:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(fit, "_trial", trial)
    monkeypatch.setattr(Device, "release_cache", lambda _: None)
    monkeypatch.setattr(Device, "reset_peak", lambda _: None)
    config, _ = derive(Config(), index, CPU)
    with pytest.raises(OutOfMemoryError) as caught:
        fit.batch(config, index, SmallDevice(torch.device("cpu")), wanted=16, pictures=60)
    assert caught.value.exit_code == 5
    assert "64x64" in str(caught.value)


def test_the_trial_itself_runs(index: Index):
    """On a CPU, where its figure means nothing: two steps and an evaluation of the worst case."""
    config, _ = derive(Config(), index, CPU)
    assert fit._trial(config, 3, 8, CPU, 2) > 0
