"""Ranks on GPUs: a step whose gradients pass through NCCL, and two GPUs against one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stoker.config.settings import OptimSettings
from stoker.config.sync_method import PLAIN
from stoker.data.batch import Batch
from stoker.hardware.device import Device
from stoker.hardware.selection import select_device
from stoker.models import Detector, build
from stoker.training.cluster import RankPlace
from stoker.training.ddp import Ddp
from stoker.training.fsdp import Fsdp, Sharding
from stoker.training.local_ranks import find_free_port
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import OptimizerStep
from stoker.training.ranks import joined
from stoker.training.state import Signals
from stoker.training.step import PlainStep, make_loss_fn, train_step
from stoker_watch.diagnosis.reader import read_run
from tests.drawn import draw, run_stoker
from tests.trainer.models.samples import make_batch, settings_of
from tests.trainer.training.parallels import ignore, make_setup, step_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
OPTIM = OptimSettings(
    optimizer="sgd", lr=0.01, backbone_lr_mult=1.0, momentum=0.9, weight_decay=0.0, lr_scheduler="constant",
    warmup_steps=0, clip_grad_norm=10.0, ema_decay=0.0, grad_accum_steps=1, max_skipped_steps=20,
)  # fmt: skip


def make_step(device: Device) -> tuple[Detector, OptimizerStep, LossAccumulator]:
    torch.manual_seed(0)
    model = build(settings_of("retinanet_tiny_fpn", backbone_norm="sync_bn"), 3).to(device.torch_device).train()
    optimizer = OptimizerStep(model, OPTIM, device, precision="fp32")
    return model, optimizer, LossAccumulator(device, max_skipped_steps=20)


def test_a_step_through_nccl_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "STOKER_CORES"):
        monkeypatch.setenv(name, "1")  # so that what `connect` sets is undone
    device = select_device("cuda")
    batch = Batch(*(tensor.to(device.torch_device) for tensor in make_batch((3, 0, 11, 1), (96, 96), 3)))
    autocast = device.autocast("fp32")
    plain, optimizer, sums = make_step(device)
    for step in range(4):
        optimizer.set_scalars(0.01, step)
        train_step(PlainStep(make_loss_fn(plain, compile=False), optimizer, sums, autocast, 2), batch)
    place = RankPlace(
        rank=0, world_size=1, local_rank=0, local_world_size=1, host="127.0.0.1", port=find_free_port(), source="test"
    )
    with joined(place) as ranks:
        model, own_optimizer, _ = make_step(device)
        setup = make_setup(model, own_optimizer, ranks, device, micro_batches=2)
        own_sums, ddp = setup.loss_accumulator, Ddp(setup, ignore, PLAIN)
        ddp.warm_up(lambda: Batch(*(tensor[:2] for tensor in batch)))
        seen = []
        for step in range(4):
            step_of(ddp, batch, 0.01, Signals(stop=step == 1))
            seen.append(ddp.agree(Signals()).stop)
        assert seen == [False] * 3 + [True]
        torch.distributed.destroy_process_group()
    for (name, one), (_, other) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4, msg=name)
    expected, actual = (s.read([t.cpu() for t in s.take()], 4).losses for s in (sums, own_sums))
    assert actual == pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU on this machine")
def test_two_gpus_train_what_one_trains(tmp_path: Path):
    data = draw(tmp_path / "data", train=30)
    flags = [
        "--device", "cuda", "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "12",
        "--precision", "fp32", "--optimizer", "sgd", "--lr", "1e-5", "--backbone-norm", "sync_bn", "--steps", "30",
    ]  # fmt: skip
    for devices, name, more in (("1", "1", []), ("2", "2", []), ("2", "sharded", ["--shard"])):
        code, output = run_stoker("train", data, *flags, *more, "--devices", devices, "--run-dir", name, cwd=tmp_path)
        assert code == 0, output
    assert read_run(tmp_path / "2").totals.devices == 2
    one, two, sharded = (load_file(tmp_path / name / "final.safetensors") for name in ("1", "2", "sharded"))
    for name, tensor in one.items():
        for other in (two, sharded):
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_one_rank_of_a_sharded_model_through_nccl(monkeypatch: pytest.MonkeyPatch):
    """FSDP's streams, contiguous weights under channels-last activations, rows that are moved to the device."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "STOKER_CORES"):
        monkeypatch.setenv(name, "1")
    device = select_device("cuda")
    batch = Batch(*(tensor.to(device.torch_device) for tensor in make_batch((3, 0, 11, 1), (96, 96), 3)))
    plain, optimizer, sums = make_step(device)
    for step in range(4):
        optimizer.set_scalars(0.01, step)
        train_step(PlainStep(make_loss_fn(plain, compile=False), optimizer, sums, device.autocast("fp32"), 2), batch)
    place = RankPlace(
        rank=0, world_size=1, local_rank=0, local_world_size=1, host="127.0.0.1", port=find_free_port(), source="test"
    )
    with joined(place) as ranks:
        torch.manual_seed(0)
        model = build(settings_of("retinanet_tiny_fpn", backbone_norm="sync_bn"), 3).train()
        sharding = Sharding.over(ranks, device.torch_device)
        own = OptimizerStep(model, OPTIM, device, precision="fp32", sharding=sharding)
        fsdp = Fsdp(make_setup(model, own, ranks, device, micro_batches=2), ignore)
        for _ in range(4):
            step_of(fsdp, batch, 0.01)
        weights = sharding.gather(model.state_dict())
        torch.distributed.destroy_process_group()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(weights[name], tensor.cpu(), rtol=1e-3, atol=1e-4, msg=name)
