"""What only a real accelerator can show. Skipped without one; `pytest -m gpu tests/trainer/gpu` where there is one."""

import dataclasses
from pathlib import Path

import pytest
import torch

from stoker.config.settings import DataSettings, OptimSettings, from_fields
from stoker.data.augment import augment_batch
from stoker.data.batch import Batch
from stoker.hardware.device import Device
from stoker.hardware.selection import select_device
from stoker.models import build
from stoker.training.defaults.dry_run import make_worst_case_batch
from stoker.training.local_ranks import TrainOptions
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import OptimizerStep
from stoker.training.run import train
from stoker.training.step import PlainStep, make_augment_fn, make_loss_fn
from stoker_watch.recording.ledger import Ledger
from stoker_watch.recording.telemetry.gpu import GpuSampler
from stoker_watch.runs.records import DEVICES, STEPS, read_lines
from stoker_watch.runs.schemas import DeviceSample, StepWindow
from tests.drawn import draw
from tests.trainer.models.samples import settings_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
OPTIM = OptimSettings(
    optimizer="adamw",
    lr=1e-3,
    backbone_lr_mult=1.0,
    momentum=0.9,
    weight_decay=0.01,
    clip_grad_norm=1.0,
    ema_decay=0.9,
    max_skipped_steps=5,
)


@pytest.fixture(scope="module")
def device() -> Device:
    return select_device("cuda")


def case(count: int, side: int, device: Device) -> Batch:
    return make_worst_case_batch(count, image_size=(side, side), max_boxes=8, num_classes=4, device=device)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_whole_step_never_synchronizes(device: Device, optimizer: str, precision: str):
    model = build(settings_of("retinanet_mobilenet_v2_fpn"), 4).to(device.torch_device).train()
    stepper = OptimizerStep(model, dataclasses.replace(OPTIM, optimizer=optimizer), device, precision=precision)
    meter = LossAccumulator(device, max_skipped_steps=5)
    batch = case(2, 128, device)
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            losses = PlainStep(
                make_loss_fn(model, compile=False), stepper, None, device.autocast(precision)
            ).forward_backward(batch)
            norm, bad = stepper.step(1e-3, step)
            meter.add(losses, norm, bad, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    reading = meter.read([tensor.cpu() for tensor in meter.take()], 3)
    assert reading.losses["total"] > 0


def test_losses_are_those_of_the_cpu(device: Device):
    torch.manual_seed(0)
    model = build(settings_of("retinanet_resnet50_fpn"), 4).train()
    on_cpu = case(2, 128, Device(torch.device("cpu")))
    on_gpu = Batch(*(tensor.to(device.torch_device) for tensor in on_cpu))
    expected = model.loss(model(on_cpu.images), on_cpu)
    model = model.to(device.torch_device)
    found = model.loss(model(on_gpu.images), on_gpu)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_augmentation_never_synchronizes_and_is_that_of_the_cpu(device: Device, is_compiled: bool):
    settings = DataSettings(hflip=0.5, brightness=0.3, contrast=0.3, saturation=0.3, hue=0.1, mosaic=0.5, mixup=0.0)
    on_cpu = case(8, 128, Device(torch.device("cpu")))
    noise = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (8, 128, 128, 3), dtype=torch.uint8, generator=noise).permute(0, 3, 1, 2)
    on_cpu = on_cpu._replace(images=pixels, rand=torch.rand(on_cpu.rand.shape, generator=noise))
    on_gpu = Batch(*(tensor.to(device.torch_device) for tensor in on_cpu))
    augment = make_augment_fn(settings, compile=is_compiled)
    augment(on_gpu, 0.0)  # what happens once
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = augment(on_gpu, 0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = augment_batch(on_cpu, settings, 0.0)
    assert torch.equal(found.valid.cpu(), expected.valid)
    torch.testing.assert_close(found.boxes.cpu(), expected.boxes, rtol=1e-4, atol=1e-3)
    apart = (found.images.cpu().int() - expected.images.int()).abs()
    assert apart.max() <= 2, "gray levels; bilinear sampling rounds differently"
    assert not torch.equal(expected.images, on_cpu.images)


def test_side_stream_copies_arrive_whole(device: Device):
    stream = device.make_stream()
    host = device.empty_host((64, 1024, 1024), torch.uint8)
    for value in range(5):
        host.fill_(value)
        (copy,), ready = stream.to_device([host])
        ready.block_main_stream()
        total = copy.long().sum()
        (back,), there = stream.to_host([copy])
        there.synchronize()
        assert int(total) == value * host.numel()
        assert bool((back == value).all())


def test_the_host_waits_for_what_was_issued_before_and_for_no_more(device: Device):
    torch.cuda._sleep(10**8)  # cycles
    before = device.record_issued()
    torch.cuda._sleep(10**10)
    after = device.record_issued()
    assert not before.done()
    before.synchronize()
    assert before.done()
    assert not after.done()


def test_the_average_moves_by_its_weight_on_the_device(device: Device):
    model = build(settings_of("retinanet_mobilenet_v2_fpn"), 4).to(device.torch_device)
    stepper = OptimizerStep(model, OPTIM, device, precision="fp32")
    before = [average.double() for average in stepper.ema_model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    weights = [parameter.clone() for parameter in model.parameters()]
    stepper.set_scalars(1e-3, 0)  # a decay of 0.1
    stepper.update_ema()
    named = zip(model.named_parameters(), stepper.ema_model.parameters(), before, weights, strict=True)
    for (name, parameter), average, old, weight in named:
        assert torch.equal(parameter, weight), name
        if parameter.requires_grad:
            torch.testing.assert_close(average.double(), old + 0.9 * (weight.double() - old), rtol=1e-6, atol=1e-6)


def test_the_ledger_sees_computation_and_starvation(device: Device):
    import time

    ledger = Ledger(device.make_clock(), start_s=time.perf_counter())
    matrix = torch.randn(4096, 4096, device=device.torch_device)
    for _ in range(5):
        with ledger.phase("input_wait"):
            time.sleep(0.1)
        with ledger.compute():
            for _ in range(20):
                matrix = torch.tanh(matrix @ matrix)
    device.synchronize()
    account = ledger.finish()
    assert account is not None

    assert sum(account.phases.values()) == pytest.approx(account.wall_s, rel=1e-6)
    assert min(account.phases.values()) >= 0
    assert 0.2 < account.phases["input_wait"] <= 0.55
    assert account.phases["compute"] > 0


def test_nvml_sees_the_device():
    gpus = GpuSampler()
    samples = gpus.sample()
    assert samples, gpus.reason
    assert samples[0].memory_total_bytes


def test_a_training_on_the_device(tmp_path: Path):
    config = from_fields({"data": str(draw(tmp_path / "data", train=64)), "model": "retinanet_tiny_fpn",
                          "image_size": (64, 64), "batch_size": 8,
                          "max_duration": "200", "device": "cuda"})  # fmt: skip
    result = train(config, TrainOptions(run_dir=str(tmp_path / "run")))
    windows = list(read_lines(result.run, STEPS, StepWindow))
    assert sum(window.window_steps for window in windows) == 200
    for window in windows:
        assert sum(window.phases.values()) == pytest.approx(window.wall_s, rel=1e-6)
    assert any(sample.gpus for sample in read_lines(result.run, DEVICES, DeviceSample))
