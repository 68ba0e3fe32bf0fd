"""The work of a loader in progress: a batch (`BatchTask`) and one sample of it (`SampleTask`).

Made by `loader.py`, filled by `worker_pool.py` and `device_batches.py`, checked by `finalize.py`.
"""

from typing import TYPE_CHECKING, NamedTuple

from stoker.data.loading.samples import HostBatchBuffer, PendingRead, SampleResult
from stoker.data.loading.wait_breakdown import Transitions

if TYPE_CHECKING:  # worker processes do without torch
    from torch import Tensor

    from stoker.hardware.device import ReadyEvent, SideStream


class BatchTask:
    """A batch in progress: its place in the stream, its buffer, and the result of each of its samples."""

    def __init__(self, global_start: int, start: int, buffer: HostBatchBuffer, batch_size: int) -> None:
        """global_start: first position of the batch over all ranks; start: first position of this rank."""
        self.global_start, self.start, self.buffer = global_start, start, buffer
        self.results: list[SampleResult | BaseException | None] = [None] * batch_size
        self.transitions: list[Transitions] = [[] for _ in range(batch_size)]
        self.num_loading = batch_size
        """Samples whose pixels are not loaded yet."""
        self.num_missing = batch_size
        """The same, plus one while their annotations are written, plus one while the device decoder has not finished
        the batch."""
        self.is_prepared = False
        """`SampleStream.prepare` was called for the buffer in this process; worker processes do it for themselves."""
        self.reloaded: list[int] = []
        """Places that were loaded again after the device decoder had finished."""
        self.device_images: tuple[Tensor, ReadyEvent] | None = None
        """uint8 [B, H, W, 3] on the device and when they are complete, where the device decodes."""

    def to_device(self, stream: "SideStream") -> "tuple[list[Tensor], ReadyEvent]":
        """Copies the batch to the device: tensors in the order of Batch, and when they are complete."""
        if self.device_images is None:
            return stream.to_device(self.buffer.tensors)
        images, images_ready = self.device_images
        pixels, *rest = self.buffer.tensors
        stream.join(images, images_ready, [(images[k], pixels[k]) for k in self.reloaded])
        tensors, ready = stream.to_device(rest)
        return [images, *tensors], ready


class SampleTask(NamedTuple):
    """A sample to load. Ordered by its position, which no other task of the queue has."""

    position: int
    batch_task: BatchTask
    k: int
    """Its place in the batch."""
    pending_read: PendingRead | None
