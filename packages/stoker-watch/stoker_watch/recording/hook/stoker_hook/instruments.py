"""Times functions of torch, for any recorder: the clock of a watched job (`clock.py`) and the ledger of a measured loop
(`stoker_watch/recording/ledger.py`).

A recorder gives functions `begin`: called before the timed work, they return what to call after it, or None if it is
not to be timed (another thread, a phase inside the same phase). Nothing here imports torch: its modules are loaded.

Waits for other ranks (torch 2.0 to 2.15): `Work.wait` of all collectives, sends and receives that are called from
Python (with gloo the thread waits in it, with NCCL the stream does); `ProcessGroup.monitored_barrier`, which waits in
C++; `_broadcast_coalesced`, by which DistributedDataParallel copies its buffers in C++ before each forward pass; and in
`torch.autograd.backward`, where it waits for its buckets in a callback of the autograd engine. Callbacks run in the
order in which they were queued: one that is queued with the first gradient runs before that wait, and one that it
queues in turn after it: between the two is the communication that no computation hid. Not measured: communication
inside compiled graphs, and FSDP, which waits between streams.
"""

from functools import wraps
from sys import modules
from typing import Any, Callable, TypeVar  # noqa: UP035 (Python 3.8)

Call = TypeVar("Call", bound=Callable[..., Any])
OnEnd = Callable[[], None]
Begin = Callable[[], Any]


def timed(original: "Call", begin: "Begin") -> "Call":
    """The function, timed."""

    @wraps(original)
    def wrapper(*args: "Any", **kwargs: "Any") -> "Any":
        on_end = begin()
        if on_end is None:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            on_end()

    return wrapper  # type: ignore[return-value, unused-ignore]


def replacing(owner: "Any", name: str) -> "Callable[[Call], Call]":
    """Decorates a function that takes the place of `owner.name`, and calls what was there."""

    def replace(function: "Call") -> "Call":
        setattr(owner, name, wraps(getattr(owner, name))(function))
        return function

    return replace


class Patch:
    """Replaces `owner.name` by `wrap(original)` until `restore`."""

    def __init__(self, owner: "Any", name: str, wrap: "Callable[[Any], Any]") -> None:
        self._owner, self._name = owner, name
        self._original = getattr(owner, name)
        self._wrapped = wrap(self._original)
        setattr(owner, name, self._wrapped)

    def restore(self) -> None:
        """Does nothing if other code has wrapped the function since: then this wrapper stays below that one."""
        if getattr(self._owner, self._name) is self._wrapped:
            setattr(self._owner, self._name, self._original)


def patch_collectives(
    begin_wait: "Begin", is_training_thread: "Callable[[], bool]", begin_exchange: "Begin | None" = None
) -> "list[Patch]":
    """Times waits for other ranks until the patches are restored. Needs torch.distributed.

    begin_exchange: for the wait at the end of a backward pass, default `begin_wait`; it may be called in a thread of
    autograd, for which the training thread waits meanwhile. is_training_thread: whether a backward pass is timed.
    """
    dist, begin = modules["torch.distributed"], begin_exchange or begin_wait
    waits = ((dist.Work, "wait"), (dist.ProcessGroup, "monitored_barrier"), (dist, "_broadcast_coalesced"))
    patches = [Patch(owner, name, lambda original: timed(original, begin_wait)) for owner, name in waits]
    backward = Patch(modules["torch.autograd"], "backward", lambda f: _time_exchange(f, begin, is_training_thread))
    return [*patches, backward]


def _time_exchange(original: "Any", begin: "Begin", is_training_thread: "Callable[[], bool]") -> "Any":
    engine: Any = modules["torch.autograd"].Variable._execution_engine  # type: ignore[attr-defined, unused-ignore]

    @wraps(original)
    def backward(tensors: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        root: Any = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else tensors
        if not getattr(root, "requires_grad", False) or not is_training_thread():
            return original(tensors, *args, **kwargs)
        open_waits: list[Any] = []

        def gradients_done() -> None:
            open_waits.append(begin())
            engine.queue_callback(exchange_done)

        def exchange_done() -> None:
            on_end = open_waits.pop()
            if on_end is not None:
                on_end()

        hook = root.register_hook(lambda _: engine.queue_callback(gradients_done))
        try:
            return original(tensors, *args, **kwargs)
        finally:
            hook.remove()
            if open_waits:  # the communication raised
                exchange_done()

    return backward


def time_compilations(handler: "Any", begin: "Begin") -> "OnEnd":
    """Times compilations, also those of the backward. handler: `callback_handler` of torch._dynamo.callback. Returns
    what ends it."""
    open_ends: list[Any] = []

    def on_start(*_: "Any") -> None:
        open_ends.append(begin())

    def on_end(*_: "Any") -> None:
        end = open_ends.pop() if open_ends else None
        if end is not None:
            end()

    def remove() -> None:
        for callbacks, callback in ((handler.start_callbacks, on_start), (handler.end_callbacks, on_end)):
            if callback in callbacks:  # torch._dynamo.reset() may have dropped it
                callbacks.remove(callback)

    handler.register_start_callback(on_start)
    handler.register_end_callback(on_end)
    return remove


def count_images(batch: "Any") -> int:
    """Samples in a batch, 0 if not known: the length of its first tensor, array or list.

    A tuple, list or mapping holds columns (images, targets); a tuple or list may also hold samples (`_are_samples`).
    """
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    if hasattr(batch, "values") and hasattr(batch, "keys"):
        return _first_length(batch.values())
    if isinstance(batch, (list, tuple)) and batch:
        return len(batch) if _are_samples(batch) else _first_length(batch)
    return 0


def _first_length(columns: "Any") -> int:
    lengths = (len(column) if isinstance(column, (list, tuple)) else count_images(column) for column in columns)
    return next((length for length in lengths if length), 0)


def _are_samples(batch: "Any") -> bool:
    """Whether the entries are samples: mappings alike, tuples of different things, or images (heuristic)."""
    first = batch[0]
    if all(hasattr(entry, "keys") for entry in batch):  # two without a common key: inputs and targets
        return len(batch) != 2 or not set(first).isdisjoint(batch[1])
    if all(isinstance(entry, (list, tuple)) for entry in batch):
        kinds = set(map(_kind, first))
        if len(kinds) > 1:  # a column holds things of one kind
            return True
        return isinstance(batch, list) and isinstance(first, tuple) and kinds == set(map(_kind, batch[-1]))
    shapes: list[Any] = [getattr(entry, "shape", None) or () for entry in batch]
    dims = set(map(len, shapes))
    if len(batch) < 3 or dims not in ({2}, {3}):
        return all(_kind(entry) == "PIL" for entry in batch)
    if len({shape[0] for shape in shapes}) > 1:  # columns are of one length
        return True
    channels_last = {shape[-1] for shape in shapes} in ({1}, {3}, {4}) and min(shapes[0][:2]) >= 64
    return dims == {3} and (shapes[0][0] in (1, 3, 4) or channels_last)


def _kind(value: "Any") -> "Any":
    shape = getattr(value, "shape", None)
    return len(shape) if shape is not None else "PIL" if hasattr(value, "getbands") else type(value)
