"""The device is out of memory: the same work again in smaller parts, so that the batch of a step stays as it is.

A step is repeated in micro-batches of half the size, an evaluation in batches of half the size. The event
`out_of_memory` has the new sizes, and every later attempt of the run takes them from there. What fits is measured
before the start (`defaults/dry_run.py`); this is for what comes later: another process on the GPU, fragmentation, an
unusual batch.

Memory of the host is given back before the kernel kills the run (`HostMemoryGuard`): prefetched batches first, then the
cache of decoded images, if less than LOW_FRACTION of the limit, or LOW_BYTES, is free of what the kernel cannot
reclaim. What was given back is not taken again in this attempt.
"""

import time
from collections.abc import Callable
from typing import Literal, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stoker.data.loading.loader import Loader
from stoker.hardware.memory_errors import is_out_of_memory
from stoker.training.parallel import LoopContext
from stoker.training.state import BatchSizes, EventLogger, count_micro_batches
from stoker_watch.errors import OutOfMemoryError, make_error
from stoker_watch.hardware.cgroup import HostLimit, nearest_memory_limit

Result = TypeVar("Result")
Activity = Literal["training", "evaluation"]

LOW_FRACTION, LOW_BYTES = 0.05, 2**30
POLL_S = 1.0
SETTLE_POLLS = 3
"""Polls after giving something back, in which buffers in use become free."""


def retry_in_smaller_batches(context: LoopContext, activity: Activity, work: Callable[[], Result]) -> Result:
    """The result of `work`, repeated with fewer images at a time for as long as memory is exhausted. With several ranks
    the next attempt of the run does so: the others are in the middle of the same step."""
    while True:
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            message = read_message(error)  # the error ends here: its traceback keeps activations alive
        shrink_batches(context, activity, message)


def read_message(error: MemoryError | RuntimeError) -> str:
    """The first line of an error that says that memory is exhausted. Raises any other."""
    if not is_out_of_memory(error):
        raise error
    return str(error).partition("\n")[0] or type(error).__name__


def halve(sizes: BatchSizes, activity: Activity, *, batch_size: int, model: nn.Module) -> BatchSizes:
    """The next smaller sizes; `sizes` if there are none. batch_size: images of a step on this device."""
    if activity == "evaluation":
        return sizes._replace(eval=max(1, sizes.eval // 2))
    # With one image, a trained norm has no variance where a feature map has a single position.
    min_size = 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1
    smaller = batch_size // count_micro_batches(batch_size, max(1, sizes.train // 2))
    return sizes if smaller < min_size else sizes._replace(train=smaller)


def shrink_batches(context: LoopContext, activity: Activity, message: str) -> None:
    """Makes the sizes of the state smaller, writes the event, and undoes what the failed attempt left. Raises
    OutOfMemoryError where nothing smaller is left; after a failure in the middle of an update; and if there are several
    ranks, as the others wait in an exchange: the next attempt of the run continues with the smaller sizes."""
    setup, state, before = context.setup, context.state, context.state.sizes
    context.hang_detector.allow_silence()  # new shapes: kernels are chosen or compiled again
    setup.optimizer.discard_gradients()
    setup.device.empty_cache()
    state.sizes = halve(before, activity, batch_size=setup.rank_batch_size, model=setup.model)
    if state.sizes == before:
        images = before.train if activity == "training" else before.eval
        raise OutOfMemoryError(
            f"Out of memory in {activity}, also with {images} {'image' if images == 1 else 'images'} at a time.",
            cause=message,
            fix="end what else uses the GPU (`nvidia-smi`), or use --activation-checkpointing, a smaller --image-size "
            "or --model, or a device with more memory",
        )
    what = f"evaluations run with {state.sizes.eval} images at a time instead of {before.eval}"
    if activity == "training":
        what = f"a step runs as {setup.micro_batches} micro-batches of {state.sizes.train} images instead of "
        what += f"{before.train}; its batch stays {setup.config.run.batch_size}"
    context.parallel.micro_batches = setup.micro_batches
    context.log_event(
        "out_of_memory",
        f"out of memory in {activity}: {message}; {what}",
        activity=activity,
        micro_batch_size=state.sizes.train,
        eval_batch_size=state.sizes.eval,
    )
    is_half_applied = activity == "training" and setup.optimizer.is_updated
    if is_half_applied or not setup.ranks.alone:
        reason = "while the weights were updated" if is_half_applied else f"in {activity}, on one of several ranks"
        raise make_error(OutOfMemoryError, "out-of-memory-in-a-step", setup.folder.path, cause=message, reason=reason)


class HostMemoryGuard:
    """Watches the memory of one loader's process. read: the nearest limit; clock: seconds."""

    def __init__(
        self,
        loader: Loader,
        log_event: EventLogger,
        *,
        read: Callable[[], HostLimit] = nearest_memory_limit,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._releases = [loader.release_batches, loader.release_cache]
        self._log_event, self._read, self._clock = log_event, read, clock
        self._next_poll_s = clock()

    def poll(self) -> None:
        """Frees memory if little is left, at most once a second."""
        if not self._releases or self._clock() < self._next_poll_s:
            return
        self._next_poll_s = self._clock() + POLL_S
        try:
            memory = self._read()
        except OSError:  # no free descriptor for /proc: an event of telemetry says so
            return
        free_bytes = memory.limit_bytes - memory.used_bytes
        if free_bytes >= min(LOW_FRACTION * memory.limit_bytes, LOW_BYTES):
            return
        released = None
        while self._releases and released is None:
            released = self._releases.pop(0)()
        self._next_poll_s += SETTLE_POLLS * POLL_S
        self._log_event(
            "low_host_memory",
            f"host memory is nearly used up: {memory.used_bytes / 2**20:,.0f} of {memory.limit_bytes / 2**20:,.0f} MiB "
            f"of {memory.name}; " + (released or "nothing is left to give back"),
            used_bytes=memory.used_bytes,
            limit_bytes=memory.limit_bytes,
            limit=memory.name,
            released=released is not None,
        )
