"""Decodes on the device what the workers have left in `BatchTask.encoded`, batch by batch.

Runs on a thread of its own (`worker_pool.py`), because it waits for the device. Images that the workers have decoded
are copied into the same tensor; the training stream waits for both. An image that the device refuses is loaded again
by the host from the beginning. If that fails too, the result (quarantine, replacement) is the host's. The decoding
itself is in `images/decode_device.py`; `BatchTask.to_device` hands the batch over.
"""

import time
from collections.abc import Callable

import torch

from stoker.data.batch import PAD_COLOR
from stoker.data.images.decode_device import decode_into_batch, require_device_decoder
from stoker.data.loading.samples import BatchTask, SampleResult, SampleStream
from stoker.data.loading.stats import Counters
from stoker.hardware.device import Device


class DeviceBatchDecoder:
    """on_message is called once, when the device refuses an image that the
    host decodes.

    Takes as much memory on the device as the batch buffers take on the host. Raises PreflightError where the device
    cannot decode.
    """

    def __init__(self, samples: SampleStream, device: Device, on_message: Callable[[str], None] | None) -> None:
        require_device_decoder(device)
        self._samples, self._on_message = samples, on_message
        self._stream = device.make_stream()
        self._padding = torch.tensor(PAD_COLOR, dtype=torch.uint8, device=device.torch_device)

    def decode(self, batch_task: BatchTask, counters: Counters) -> None:
        """Sets `batch_task.device_images`. All samples of the batch are loaded; no other thread uses it meanwhile."""
        start_s = time.perf_counter()
        encoded, batch_task.encoded = batch_task.encoded or {}, None  # what is loaded again, the host decodes
        host_images = batch_task.buffer.tensors[0]
        with self._stream.activate():
            images = self._padding.expand(host_images.shape).contiguous()
            refused = decode_into_batch(images, encoded, self._stream)
            for k, reason in refused.items():
                previous = batch_task.results[k]
                self._samples.reload(batch_task, k, Counters())
                result = batch_task.results[k]
                if isinstance(result, SampleResult) and result == previous:
                    self._report_refusal(result.image_index, reason)
            for k in range(len(host_images)):
                if k not in encoded or k in refused:
                    images[k].copy_(host_images[k], non_blocking=True)
        batch_task.device_images = images, self._stream.record_ready()
        counters.device_decode_s += time.perf_counter() - start_s

    def _report_refusal(self, image_index: int, reason: str) -> None:
        on_message, self._on_message = self._on_message, None
        if on_message is not None:
            name = self._samples.index.display_source(image_index)
            on_message(f"loader: nvJPEG refuses {name} ({reason}); the CPU decodes such images")
