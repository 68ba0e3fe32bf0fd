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

from stoker.data.images.decode_device import decode_into_batch, require_device_decoder
from stoker.data.loading.counters import Counters
from stoker.data.loading.samples import PAD_COLOR, SampleStream
from stoker.data.loading.wait_breakdown import DECODING, DONE
from stoker.data.loading.worker_pool import BatchTask
from stoker.hardware.device import Device, ReadyEvent, SideStream


class DeviceBatch(NamedTuple):
    """The pictures of a batch, on the device."""

    images: Tensor
    """uint8 [B, H, W, 3]."""
    ready: ReadyEvent

    def hand_over(self, batch_task: BatchTask, stream: SideStream) -> tuple[list[Tensor], ReadyEvent]:
        """`SideStream.to_device` of the batch: `stream` waits for the pictures, and copies the rest of it, with those
        that the host has loaded anew meanwhile."""
        pixels, *rest = batch_task.buffer.tensors
        stream.join(self.images, self.ready, [(self.images[k], pixels[k]) for k in batch_task.reloaded])
        tensors, ready = stream.to_device(rest)
        return [self.images, *tensors], ready


class DeviceBatchDecoder:
    """samples: the stream as the host decodes it. on_said is told once that the device refuses what the host decodes.

    On the device it takes as much memory as the ring on the host. Raises PreflightError where the device cannot decode.
    """

    def __init__(self, samples: SampleStream, device: Device, on_message: Callable[[str], None] | None) -> None:
        require_device_decoder(device)
        self._samples, self._device, self._on_message = samples, device, on_message
        self._stream = device.make_stream()
        self._padding = torch.tensor(PAD_COLOR, dtype=torch.uint8, device=device.torch_device)

    def decode(self, batch_task: BatchTask, counters: Counters) -> None:
        """Sets `work.made`. All samples of the batch are there; nobody else touches it meanwhile."""
        start_s = time.perf_counter()
        buffer = batch_task.buffer
        encoded = {k: image for k, image in enumerate(buffer.encoded) if image is not None}
        for k in encoded:
            batch_task.transitions[k].append((start_s, DECODING))
        host_images = buffer.tensors[0]
        with self._stream.activate():
            images = self._padding.expand(host_images.shape).contiguous()
            refused = decode_into_batch(images, encoded, self._stream)
            for k, reason in refused.items():
                previous = batch_task.results[k]
                result = batch_task.results[k] = self._samples.load(buffer, k, batch_task.start + k, Counters(), [])
                if result == previous:
                    self._report_refusal(result.image_index, reason)
            for k in range(len(host_images)):
                if k not in encoded or k in refused:
                    images[k].copy_(host_images[k], non_blocking=True)
        batch_task.device_batch = DeviceBatch(images, self._stream.record_ready())
        buffer.encoded = [None] * len(host_images)
        end_s = time.perf_counter()
        for k in encoded:
            batch_task.transitions[k].append((end_s, DONE))
        counters.decode_s += end_s - start_s
        counters.device_decode_s += end_s - start_s

    def _report_refusal(self, image_index: int, reason: str) -> None:
        on_message, self._on_message = self._on_message, None
        if on_message is not None:
            on_message(
                f"loader: nvJPEG refuses {self._samples.index.display_source(image_index)} ({reason}); the host decodes such pictures"
            )
