"""A step, a training and a machine as the tests of a plan need them."""

from typing import Any

import msgspec

from stoker.data.loading.device_decoder import HostDecode
from stoker.planning.duration import TrainingJob
from stoker.planning.machines import Machine
from stoker.planning.predict import StepPrediction
from stoker_watch.durations import Duration

STEP = StepPrediction(
    accelerator="a100-40",
    model="retinanet_resnet50_fpn",
    image_size=(800, 800),
    batch_size=16,
    precision="bf16",
    peak_bytes=12 * 2**30,
    peak_error=0.1,
    memory_bytes=39 * 2**30,
    fits=True,
    step_s=0.1,
    step_error=0.3,
    error_of="gpu",
    limited_by="compute",
    parameters=34_000_000,
    gradient_bytes=136_000_000,
    source="a test",
)
JOB = TrainingJob(
    num_images=10_000,
    num_val_images=1_000,
    images_seen=120_000.0,
    num_evaluations=12.0,
    checkpoint_every=Duration(2, "minutes"),
    demand=HostDecode(2e-3, 100e3, 16, 0.0),
)
MACHINE = Machine(
    name="test-1g", cloud="GCP", accelerator="a100-40", gpus=1, vcpus=64, memory_gib=256, network_gbit=100, link="none",
    price=3.6,
)  # fmt: skip


def step(**changes: Any) -> StepPrediction:
    return msgspec.structs.replace(STEP, **changes)


def job(**changes: Any) -> TrainingJob:
    return msgspec.structs.replace(JOB, **changes)


def machine(**changes: Any) -> Machine:
    return msgspec.structs.replace(MACHINE, **changes)


def demand(decode_core_s: float, bytes_per_image: float = 100e3) -> HostDecode:
    return HostDecode(decode_core_s, bytes_per_image, 16, 0.0)
