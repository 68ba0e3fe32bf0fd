"""Batches whose pictures the device decodes: made on a thread of the loader's own, since that waits for the device.

What the threads of the crew left in `Slot.encoded` becomes pixels here, what they decoded is copied beside it, and the
training stream waits for the event of both. A picture that the device refuses is loaded again by the host, from the
beginning: if that fails too, the outcome (its quarantine, what stands in for it) is the host's. The decoding itself:
`decode_device.py`; who calls: `worker_pool.py`, and `loader.py` when it hands a batch over.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.data.images.decode_device import fill, require
from stoker.data.loading.counters import Counters
from stoker.data.loading.samples import PADDING, Samples
from stoker.data.loading.wait_breakdown import DECODING, DONE
from stoker.data.loading.worker_pool import Work
from stoker.hardware.device import Device, Ready, SideStream


class Made(NamedTuple):
    """The pictures of a batch, on the device."""

    images: Tensor
    """uint8 [B, H, W, 3]."""
    ready: Ready

    def hand_over(self, work: Work, stream: SideStream) -> tuple[list[Tensor], Ready]:
        """`SideStream.to_device` of the batch: `stream` waits for the pictures, and copies the rest of it, with those
        that the host has loaded anew meanwhile."""
        pixels, *rest = work.slot.tensors
        stream.join(self.images, self.ready, [(self.images[k], pixels[k]) for k in work.again])
        tensors, ready = stream.to_device(rest)
        return [self.images, *tensors], ready


class DeviceBatches:
    """samples: the stream as the host decodes it. on_said is told once that the device refuses what the host decodes.

    On the device it takes as much memory as the ring on the host. Raises PreflightError where the device cannot decode.
    """

    def __init__(self, samples: Samples, device: Device, on_said: Callable[[str], None] | None) -> None:
        require(device)
        self._samples, self._device, self._on_said = samples, device, on_said
        self._stream = device.make_stream()
        self._padding = torch.tensor(PADDING, dtype=torch.uint8, device=device.torch_device)

    def make(self, work: Work, counters: Counters) -> None:
        """Sets `work.made`. All samples of the batch are there; nobody else touches it meanwhile."""
        began_s = time.perf_counter()
        slot = work.slot
        encoded = {k: picture for k, picture in enumerate(slot.encoded) if picture is not None}
        for k in encoded:
            work.marks[k].append((began_s, DECODING))
        host = slot.tensors[0]
        with self._stream.issue():
            images = self._padding.expand(host.shape).contiguous()
            refused = fill(images, encoded, self._stream)
            for k, why in refused.items():
                before = work.outcomes[k]
                outcome = work.outcomes[k] = self._samples.load(slot, k, work.start + k, Counters(), [])
                if outcome == before:
                    self._say(outcome.row, why)
            for k in range(len(host)):
                if k not in encoded or k in refused:
                    images[k].copy_(host[k], non_blocking=True)
        work.made = Made(images, self._stream.ready())
        slot.encoded = [None] * len(host)
        ended_s = time.perf_counter()
        for k in encoded:
            work.marks[k].append((ended_s, DONE))
        counters.decode_s += ended_s - began_s
        counters.device_s += ended_s - began_s

    def _say(self, row: int, why: str) -> None:
        on_said, self._on_said = self._on_said, None
        if on_said is not None:
            on_said(f"loader: nvJPEG refuses {self._samples.index.place(row)} ({why}); the host decodes such pictures")
