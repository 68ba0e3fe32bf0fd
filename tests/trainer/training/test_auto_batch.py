"""Which batch is chosen: the one that fits, and with --auto-batch the fastest; by real steps on a CPU, and by a device
whose memory and time are what a test says."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.config.settings import Config, from_fields
from stoker.data.index import Index, open_index
from stoker.hardware.device import Device, DeviceMemory
from stoker.training.defaults import dry_run
from stoker.training.defaults.derive import derive
from stoker.training.defaults.dry_run import BatchTrial, DryRun, PeakMemoryMode
from stoker_watch.errors import ConfigError, OutOfMemoryError
from tests.drawn import draw

CPU = Device(torch.device("cpu"))
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn"), train=60, val=12)


@pytest.fixture(scope="module")
def index(folder: Path) -> Index:
    return open_index(folder)


@pytest.fixture(scope="module")
def derived(index: Index) -> Config:
    """Everything but the batch, of a model without norms that learn."""
    asked = from_fields({"model": "retinanet_mobilenet_v2_fpn", "weights": "none", "backbone_norm": "frozen_bn"})
    config, _ = derive(asked.replace(image_size=(64, 64), precision="fp32"), index, CPU)
    return config.replace(batch_size=None, grad_accum_steps=None)


class SmallDevice(Device):
    """An accelerator of 10 GiB, of which nine tenths may be used."""

    @property
    def is_cpu(self) -> bool:
        return False

    def memory(self) -> DeviceMemory:
        return DeviceMemory(total=10 * GIB, free=10 * GIB, peak=0)


SMALL = SmallDevice(torch.device("cpu"))
Cost = Callable[[int], float]


def fake_costs(monkeypatch: pytest.MonkeyPatch, *, gib: Cost, seconds: Cost = lambda _: 1.0) -> list[int]:
    """Steps of n images take `gib(n)` GiB at their peak and `seconds(n)` of time. Returns what is tried."""
    tried: list[int] = []
    errors = itertools.cycle(
        (torch.OutOfMemoryError("out of memory"), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    )  # torch's allocator, and what does not use it

    def peak(_: DryRun, count: int) -> int:
        tried.append(count)
        if gib(count) > 10:
            raise next(errors)
        return int(gib(count) * GIB)

    monkeypatch.setattr(DryRun, "measure_peak_bytes", peak)
    monkeypatch.setattr(DryRun, "measure_step_s", lambda _, count: seconds(count))
    return tried


@pytest.mark.parametrize(
    ("fixed_gib", "image_gib", "batch", "tries"),
    [
        (1.0, 0.2, 16, [16]),
        (1.0, 0.9, 16, [16, 8]),
        (1.0, 3.0, 16, [16, 8, 4, 2]),
        (4.0, 4.0, 16, [16, 8, 4, 2, 1]),
        (1.0, 1.0, 15, [15, 5]),
    ],
)
def test_a_batch_that_does_not_fit_is_split(
    index: Index,
    derived: Config,
    monkeypatch: pytest.MonkeyPatch,
    fixed_gib: float,
    image_gib: float,
    batch: int,
    tries: list[int],
):
    """The largest part that fits, and nothing else is tried: cuDNN would choose convolutions for each size."""
    tried = fake_costs(monkeypatch, gib=lambda n: fixed_gib + image_gib * n)
    for config in (derived, derived.replace(batch_size=batch)):
        tried.clear()
        chosen = dry_run.find_batch_size(config, index, SMALL, recipe_batch_size=batch, num_images=60)
        assert chosen[:2] == (batch, batch // tries[-1])
        assert tried == tries


@pytest.mark.parametrize("less", [False, True])
def test_not_even_one_image_fits(index: Index, derived: Config, monkeypatch: pytest.MonkeyPatch, less: bool):
    fake_costs(monkeypatch, gib=lambda _: 11.0)
    with pytest.raises(OutOfMemoryError) as caught:
        dry_run.find_batch_size(
            derived.replace(activation_checkpointing=less), index, SMALL, recipe_batch_size=16, num_images=60
        )
    assert caught.value.exit_code == 5
    assert "64x64" in str(caught.value)
    assert ("--activation-checkpointing" in str(caught.value)) is not less


def saturating(count: int) -> float:
    """A device that is full at 8 images: 9, 5, 3, 2, 2 … ms per image."""
    return (8e-3 + 1e-3 * count) if count < 8 else 2e-3 * count


@pytest.mark.parametrize(
    ("gib", "seconds", "batch", "words"),
    [
        (lambda n: 0.1 * n, saturating, 8, ["1: 9 ms", "8: 2 ms", "32: 2 ms", "60 images"]),
        (lambda n: 0.1 * n, lambda n: n**0.95, 32, ["32: "]),  # always faster: the largest that the split has
        (lambda n: 0.1 * n, lambda n: n**0.99, 2, ["2: "]),  # 2.8 % slower than 32, and 1 is 3.5 % slower
        (lambda n: 1.0 * n, lambda n: n**0.5, 8, ["8: ", "16 do not fit"]),
        (lambda n: 6.0 * n, lambda n: n**0.5, 1, ["1: ", "2 do not fit"]),
    ],
)
def test_auto_batch_takes_the_smallest_batch_near_the_best_time(
    index: Index, derived: Config, monkeypatch: pytest.MonkeyPatch, gib: Cost, seconds: Cost, batch: int,
    words: list[str],
):  # fmt: skip
    fake_costs(monkeypatch, gib=gib, seconds=seconds)
    chosen, parts, reason = dry_run.find_batch_size(
        derived.replace(auto_batch=True), index, SMALL, recipe_batch_size=16, num_images=60
    )
    assert (chosen, parts) == (batch, 1)
    for word in words:
        assert word in reason


def test_the_reason_says_that_trials_are_not_compiled(index: Index, derived: Config, monkeypatch: pytest.MonkeyPatch):
    """Compiling for every size would take longer than --auto-batch may."""
    fake_costs(monkeypatch, gib=lambda n: 0.1 * n, seconds=saturating)
    reasons = [
        dry_run.find_batch_size(
            derived.replace(auto_batch=True, compile=compiled), index, SMALL, recipe_batch_size=16, num_images=60
        )[2]
        for compiled in (True, False)
    ]
    assert ["not compiled" in reason for reason in reasons] == [True, False]


def test_sizes_that_cannot_fit_are_not_tried(index: Index, derived: Config, monkeypatch: pytest.MonkeyPatch):
    tried = fake_costs(monkeypatch, gib=lambda n: 1.0 + n)
    dry_run.find_batch_size(derived.replace(auto_batch=True), index, SMALL, recipe_batch_size=16, num_images=60)
    assert max(tried) == 8


def test_trials_end_in_time(index: Index, derived: Config, monkeypatch: pytest.MonkeyPatch):
    """Each takes twice as long as the one before it, which is what is expected of the next."""
    now = [0.0]

    def seconds(count: int) -> float:
        now[0] += 7.0 * count
        return 1.0

    fake_costs(monkeypatch, gib=lambda n: 0.1 * n, seconds=seconds)
    monkeypatch.setattr(dry_run.time, "perf_counter", lambda: now[0])
    _, _, reason = dry_run.find_batch_size(
        derived.replace(auto_batch=True), index, SMALL, recipe_batch_size=16, num_images=60
    )
    assert now[0] == 7 + 14 + 28
    assert "trials end after 60 s" in reason


@pytest.mark.parametrize(
    ("changes", "least"),
    [({}, 1), ({"mosaic": 0.5}, 4), ({"mosaic": 0.5, "grad_accum_steps": 2}, 4), ({"backbone_norm": "bn"}, 2)],
)
def test_sizes_are_powers_of_two_in_whole_groups(index: Index, derived: Config, changes: dict[str, Any], least: int):
    """least: images of the smallest batch."""
    trial_run = DryRun(derived.replace(**changes), index, CPU)
    parts = changes.get("grad_accum_steps", 1)
    found = [size * parts for size in dry_run.candidate_sizes(trial_run, 60)]
    assert found == [n for n in (1, 2, 4, 8, 16, 32) if n >= least]


@pytest.mark.slow
def test_trainable_norms_are_never_tried_on_one_value(index: Index):
    """The coarsest map of SSDlite is 1 × 1 at its default image size, the tiny model's at 32 × 32."""
    asked = from_fields({"model": "retinanet_tiny_fpn", "image_size": (32, 32), "precision": "fp32"})
    assert derive(asked, index, CPU)[0].run.batch_size == 8
    assert derive(asked.replace(auto_batch=True), index, CPU)[0].run.batch_size >= 2


def test_the_lr_follows_the_batch_of_auto_batch(index: Index, monkeypatch: pytest.MonkeyPatch):
    fake_costs(monkeypatch, gib=lambda n: 0.1 * n, seconds=saturating)
    asked = from_fields({"auto_batch": True, "optimizer": "sgd", "model": "retinanet_tiny_fpn"})
    chosen, reasons = derive(asked, index, SMALL)
    assert chosen.run.batch_size == 8
    assert "8: 2 ms" in reasons["batch_size"]
    assert chosen.optim.lr == derive(asked.replace(auto_batch=None, batch_size=8), index, SMALL)[0].optim.lr


def test_auto_batch_and_batch_size_exclude_each_other(index: Index):
    with pytest.raises(ConfigError, match="--auto-batch and --batch-size 8 exclude each other"):
        derive(from_fields({"auto_batch": True, "batch_size": 8}), index, CPU)


@pytest.mark.slow
def test_auto_batch_on_a_cpu(index: Index, monkeypatch: pytest.MonkeyPatch):
    """Real steps."""
    monkeypatch.setattr(dry_run, "MAX_TRIALS_S", 3.0)
    config, reasons = derive(from_fields({"auto_batch": True, "image_size": (32, 32)}), index, CPU)
    assert config.run.batch_size in (1, 2, 4, 8, 16, 32)
    assert f"{config.run.batch_size}: " in reasons["batch_size"]
    assert " ms" in reasons["batch_size"]


def test_a_trial_run_moves_no_weight_and_counts_its_memory(index: Index, derived: Config):
    trial_run = DryRun(derived, index, CPU)
    before = [parameter.clone() for parameter in trial_run.optimizer.model.parameters()]
    trial_run.measure_peak_bytes(1)  # makes the optimizer's state
    two, four = trial_run.measure_peak_bytes(2), trial_run.measure_peak_bytes(4)
    weights = sum(parameter.numel() * 4 for parameter in before)
    assert two > 5 * weights  # themselves, their average, gradients, two moments
    image_bytes = (four - two) / 2
    assert image_bytes > 64 * 64 * 3 * 4  # its pixels in fp32, at least
    for parameter, old in zip(trial_run.optimizer.model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old)


@pytest.mark.parametrize(("mosaic", "count", "is_mosaic"), [(0.0, 2, False), (1.0, 4, True), (1.0, 2, False)])
def test_trials_are_of_random_images_with_augmentation(
    index: Index, derived: Config, monkeypatch: pytest.MonkeyPatch, mosaic: float, count: int, is_mosaic: bool
):
    trial_run = DryRun(derived.replace(hflip=1.0, mosaic=mosaic), index, CPU)
    torch.manual_seed(3)
    batch, again = trial_run.make_batch(count), trial_run.make_batch(count)
    assert torch.equal(batch.images, again.images), "the same in each trial"
    assert batch.images.float().std() > 70  # uniform bytes: 73.9
    assert (batch.images[0] != batch.images[1]).any()
    assert len(batch.rand.unique()) == batch.rand.numel()
    trained: list[torch.Tensor] = []
    compute_loss = DryRun.compute_loss

    def record(self: DryRun, augmented: Any) -> torch.Tensor:
        trained.append(augmented.images)
        return compute_loss(self, augmented)

    monkeypatch.setattr(DryRun, "compute_loss", record)
    trial_run.step(batch)
    made: list[Config] = []
    monkeypatch.setattr(dry_run, "augment_batch", lambda batch, settings, _: (made.append(settings), batch)[1])
    trial_run.step(batch)
    assert not torch.equal(trained[0], batch.images)
    assert torch.equal(trained[1], batch.images)
    assert (made[0].mosaic > 0) == is_mosaic


@pytest.mark.slow
def test_activation_checkpointing_fits_more_images_on_a_cpu(index: Index, derived: Config):
    kept = []
    for less in (False, True):
        trial_run = DryRun(derived.replace(activation_checkpointing=less, image_size=(256, 256)), index, CPU)
        kept.append(dry_run._max_size_on_cpu(trial_run, 1)[0])
    assert kept[1] > 1.2 * kept[0]


def test_live_bytes_are_counted_per_storage():
    with PeakMemoryMode("cpu") as live:
        a = torch.zeros(256)
        b = a.view(16, 16)
        assert live.current_bytes == 1024
        c = a + 1
        assert live.current_bytes == live.peak_bytes == 2048
        del a, c
        assert live.current_bytes == 1024  # the view keeps it
        del b
    assert (live.current_bytes, live.peak_bytes) == (0, 2048)


def test_pick_fastest():
    tried = [BatchTrial(1, 0, 2.0), BatchTrial(2, 0, 1.029), BatchTrial(4, 0, 1.0), BatchTrial(8, 0, 1.1)]
    assert dry_run.pick_fastest(tried).micro_batch_size == 2
    assert dry_run.pick_fastest(tried[2:]).micro_batch_size == 4
