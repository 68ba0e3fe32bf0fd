"""Applies the results of the workers in the order of the stream: failures, quarantine, replacements.

Runs in the thread that asks for batches. So nothing depends on which worker was first.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from stoker.data.loading.samples import BatchTask, SampleResult, SampleStream
from stoker.data.loading.stats import Counters
from stoker.data.validation.problems import max_bad_images
from stoker.errors import DataError, StorageError


class QuarantinedImage(NamedTuple):
    """An image that could not be used, and its replacement: the content of a `schemas.Quarantined`."""

    image_index: int
    source: str
    """Path or URI of the image."""
    error: str
    sample_position: int
    """Position in the stream from which on the image is not used."""
    replaced_by: int
    """Index of the image used there instead; -1 in an evaluation, which leaves it out."""


class BatchFinalizer:
    """max_bad_fraction: fraction of the images that may be in quarantine; on_quarantine is called for each new one."""

    def __init__(
        self,
        samples: SampleStream,
        max_bad_fraction: float,
        on_quarantine: Callable[[QuarantinedImage], None] | None,
        counters: Counters,
    ) -> None:
        self._index, self._samples, self._max_bad_fraction = samples.index, samples, max_bad_fraction
        self._on_quarantine, self._counters = on_quarantine, counters
        self._errors: dict[int, str] = {}

    def is_noop(self, batch_task: BatchTask) -> bool:
        """Whether `finalize` would change nothing. All samples of the batch are loaded."""
        return all(
            isinstance(result, SampleResult)
            and not result.failures
            and (
                self._samples.is_usable(result.image_index, batch_task.start + k)
                if result.image_index >= 0
                else not self._samples.train
            )
            for k, result in enumerate(batch_task.results)
        )

    def finalize(self, batch_task: BatchTask) -> None:
        """Applies the results of a batch whose samples are all loaded.

        Workers run ahead, so one may have used an image that an earlier position has put into quarantine meanwhile (it
        failed once, then not again). That sample is loaded again here. So the stream is the one that a single worker
        would have made. Raises what a worker raised, and DataError when too many images cannot be used.
        """
        samples = self._samples
        for k, result in enumerate(batch_task.results):
            position = batch_task.start + k
            if isinstance(result, BaseException):
                raise result
            assert result is not None
            if result.image_index >= 0 and not samples.is_usable(result.image_index, position):
                samples.reload(batch_task, k, self._counters)
                batch_task.reloaded.append(k)
                result = batch_task.results[k]
                assert isinstance(result, SampleResult)
            for image_index, error in result.failures:
                if samples.is_usable(image_index, position):
                    self._quarantine(image_index, error, position, result.image_index)
            if samples.train and result.image_index < 0:
                raise self._make_data_error(f"None of the {len(samples.quarantined):,} images tried can be used.")
            self.check_limit(samples.quarantined)

    def check_limit(self, quarantined: Collection[int]) -> None:
        """Raises DataError if there are too many of these images."""
        samples = self._samples
        if len(quarantined) > max_bad_images(self._max_bad_fraction, len(samples)):
            raise self._make_data_error(
                f"{len(quarantined):,} of {len(samples):,} images cannot be used; "
                f"up to {100 * self._max_bad_fraction:.3g} % of them may be bad.",
                quarantined,
            )

    def _quarantine(self, image_index: int, error: Exception, position: int, replaced_by: int) -> None:
        message = _one_line_message(error)
        self._samples.quarantined[image_index] = position
        self._errors[image_index] = message
        if self._on_quarantine is not None:
            self._on_quarantine(
                QuarantinedImage(image_index, self._index.display_source(image_index), message, position, replaced_by)
            )

    def _make_data_error(self, message: str, quarantined: Collection[int] = ()) -> DataError:
        bad_indices = list(quarantined or self._samples.quarantined)
        examples = [
            f"{self._index.display_source(k)}: {self._errors.get(k, 'failed in an earlier attempt')}"
            for k in bad_indices[:5]
        ]
        more = [f"and {len(bad_indices) - len(examples):,} more"] if len(bad_indices) > len(examples) else []
        return DataError(
            message,
            location=self._index.source,
            cause="\n          ".join(examples + more),
            fix=f"`stoker data check {self._index.source}` lists all of them: repair them, remove them from the"
            " annotations, or allow more with --max-bad-fraction; if all are gone, check the path and the mount",
        )


def _one_line_message(error: Exception) -> str:
    if isinstance(error, DataError | StorageError):
        return error.what if error.cause is None else f"{error.what} {error.cause}"
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
