"""Looks at the batches that a DataLoader gives to the training thread: the same one in each step, samples in the order
of their classes, images with values up to 255. Only values of plain tensors in the memory of the host are read."""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

ALL_BATCHES, LOOK_BATCHES = 40, 16
"""So many batches are looked at, and after them each one of so many."""
MIN_EQUAL = 16
"""Batches in a row that are equal."""
MAX_PARTS, MAX_TENSORS, MAX_READ = 64, 8, 256
"""Parts of a batch that are looked at, the largest tensors among them, and values of each, that are read."""
MIN_SAMPLES, MIN_BATCHES, MIN_SINGLE = 8, 24, 0.9
"""Samples of a batch whose labels tell something; looks, and the fraction of them that saw a single class."""
MIN_CLASS_BATCHES, MAX_CLASSES = 3, 10_000
"""Looks at each of two classes or more; class from which a number is no class."""
MIN_PIXEL_LOOKS, PIXELS = 8, (100.0, 255.0)
"""Looks that saw images whose greatest value is in this range."""


class BatchFinder:
    """report, withdraw: of the finder of mistakes. line: FILE:LINE of the job that is executed."""

    def __init__(
        self, report: "Callable[..., None]", withdraw: "Callable[[str], None]", line: "Callable[[], str]"
    ) -> None:
        self._report, self._withdraw, self._line = report, withdraw, line
        self._fetched = 0
        self._newest: tuple[Any, ...] | None = None
        """A batch that no step has followed yet: values and other parts, None if one is not known; labels, its
        number in the epoch, size of the data set."""
        self._place = ""
        self._values: Any = None
        self._compared, self._equal = 0, 1
        self._single: dict[int, int] = {}
        self._label_looks = self._unsorted = self._pixel_looks = 0
        self._last: tuple[int, int] | None = None

    def note(self, iterator: "Any", batch: "Any") -> None:
        """The training thread got a batch from an iterator of a DataLoader."""
        self._fetched += 1
        self._newest = None
        if self._fetched > ALL_BATCHES and self._fetched % LOOK_BATCHES:
            return
        parts = list(_parts(batch))
        tensors = [part for part in parts if _is_readable(part)]
        if tensors:
            self._place = self._place or self._line()
            largest = sorted(tensors, key=lambda tensor: -tensor.numel())[:MAX_TENSORS]
            flat = [tensor.reshape(-1) for tensor in largest]
            read = [tuple(part[:: max(1, part.numel() // MAX_READ)][: 2 * MAX_READ].tolist()) for part in flat]
            values = tuple((tuple(tensor.shape), some) for tensor, some in zip(largest, read))  # noqa: B905 (Python 3.8)
            others = tuple(part for part in parts if isinstance(part, (str, bytes, int, float)) or part is None)
            is_known = len(tensors) + len(others) == len(parts) < MAX_PARTS  # all that may differ is seen
            number = getattr(iterator, "_num_yielded", 0)
            samples = _num_samples(iterator, tensors) if self._equal >= MIN_EQUAL - 1 else 0
            self._newest = ((*values, others) if is_known else None), _labels(tensors), number, samples
            if any(_are_pixels(tensor, read) for tensor, (_, read) in zip(largest, values)):  # noqa: B905 (Python 3.8)
                self._pixel_looks += 1

    def after_step(self) -> None:
        """An optimizer has stepped: the newest batch was one to train on."""
        if self._newest is None:
            return
        (values, labels, at, samples), self._newest = self._newest, None
        self._compare(values, samples)
        if self._pixel_looks >= MIN_PIXEL_LOOKS:
            self._report("unscaled_images", self._place)
        if labels is not None:
            self._look_at_labels(labels, at)

    def _compare(self, values: "tuple[Any, ...] | None", samples: int) -> None:
        is_equal = values is not None and values == self._values
        is_equal &= len({value for _, read in (values or ())[:-1] for value in read}) > 2  # no dummy
        follows = self._fetched == self._compared + 1  # others may be the same batch of a later epoch
        self._values, self._compared = values, self._fetched
        self._equal = 1 if not is_equal else self._equal + follows
        if not is_equal:
            self._withdraw("same_batch")
        elif self._equal == MIN_EQUAL and samples:
            self._report("same_batch", self._place, equal=self._equal, samples=samples)

    def _look_at_labels(self, labels: "tuple[int, int]", at: int) -> None:
        low, high = labels
        self._label_looks += 1
        if low == high:
            self._single[low] = self._single.get(low, 0) + 1
        before, self._last = self._last, (at, low)
        self._unsorted += before is not None and before[0] < at and low < before[1]
        num_single = sum(self._single.values())
        is_sorted = num_single >= MIN_SINGLE * self._label_looks and not self._unsorted
        often = sum(count >= MIN_CLASS_BATCHES for count in self._single.values())
        are_classes = 0 in self._single and max(self._single) < MAX_CLASSES
        if is_sorted and often >= 2 and are_classes and self._label_looks >= MIN_BATCHES:
            self._report("sorted_labels", self._place, batches=num_single, looks=self._label_looks)
        elif not is_sorted:
            self._withdraw("sorted_labels")


def _parts(batch: "Any", depth: int = 3) -> "Iterator[Any]":
    """What a batch consists of, the first of each sequence and mapping."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)) and depth:
        for part in batch[:MAX_PARTS]:
            yield from _parts(part, depth - 1)
    else:
        yield batch


def _is_readable(tensor: "Any") -> bool:
    """Whether it is a tensor whose values can be read without an effect on the job."""
    if type(tensor) is not sys.modules["torch"].Tensor:
        return False
    is_plain = tensor.device.type == "cpu" and str(tensor.layout) == "torch.strided" and not tensor.requires_grad
    return bool(is_plain and tensor.dim() and tensor.is_contiguous())


def _labels(tensors: "list[Any]") -> "tuple[int, int] | None":
    """The least and the greatest class of the samples; None if it is not known which tensor has them."""
    columns = [tensor for tensor in tensors if tensor.dim() == 1 and tensor.numel() >= MIN_SAMPLES]
    found = [tensor for tensor in columns if str(tensor.dtype)[6:] in ("int64", "int32", "int16", "uint8")]
    return (int(found[0].min()), int(found[0].max())) if len(found) == 1 else None


def _are_pixels(tensor: "Any", read: "tuple[Any, ...]") -> bool:
    """Whether these are images with numbers that are no longer whole, but still those of pixels."""
    is_image = tensor.dim() == 4 and tensor.is_floating_point() and {tensor.shape[1], tensor.shape[3]} & {1, 3}
    return bool(is_image and read) and min(read) >= 0 and PIXELS[0] < max(read) <= PIXELS[1]


def _num_samples(iterator: "Any", tensors: "list[Any]") -> int:
    """The size of the data set, if it has more than this batch; else 0: all of it may be one batch."""
    try:
        samples = len(iterator._dataset)
    except (TypeError, AttributeError, NotImplementedError):
        return 0
    return samples if samples > max(int(tensor.shape[0]) for tensor in tensors) else 0
