"""How long one prediction takes: the network and the choice of boxes, measured on the device."""

import statistics
import time
from collections.abc import Callable

import torch

from stoker.config.settings import Config
from stoker.hardware.device import Device
from stoker.models import build

REPEATS = 5


def make_latency_meter(config: Config, num_classes: int, device: Device) -> Callable[[tuple[int, int]], float]:
    """A function of the image size (height, width) that gives milliseconds: the median, with random weights, of one
    image, from its tensor to boxes after NMS. config: complete for its model."""
    model = build(config.model, num_classes).to(device.torch_device).eval()

    def measure(image_size: tuple[int, int]) -> float:
        images = torch.full((1, 3, *image_size), 124, dtype=torch.uint8, device=device.torch_device)
        sizes = torch.tensor([image_size], dtype=torch.int32, device=device.torch_device)
        scale = torch.ones((1, 2), device=device.torch_device)
        times = []
        for _ in range(REPEATS + 2):
            device.synchronize()
            start_s = time.perf_counter()
            with torch.no_grad():
                model.decode(model(images), sizes, scale, sizes)
            device.synchronize()
            times.append(time.perf_counter() - start_s)
        return 1e3 * statistics.median(times[2:])

    return measure
