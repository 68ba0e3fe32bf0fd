"""One sample by itself: its plan depends on its position alone, and loading it once more gives the same bytes."""

from pathlib import Path

import numpy as np
import pytest

from stoker.data.loading.buffers import HostBatchBuffer
from stoker.data.loading.samples import BatchTask, LoaderSpec, SamplePlan, SampleStream, compute_max_boxes
from stoker.data.loading.stats import Counters
from tests.trainer.data.loading import CPU, IMAGE_SIZE, InMemoryIndex

COUNT, BATCH = 13, 8


@pytest.fixture
def index(tmp_path: Path) -> InMemoryIndex:
    made = InMemoryIndex(tmp_path, COUNT)
    made.original_size[::3] = 0
    made.path(6).write_bytes(b"")
    return made


def make_samples(index: InMemoryIndex, **changes: object) -> SampleStream:
    image_indices = np.arange(COUNT)
    fields = {"scale_jitter_prob": 0.8, "scale_range": (0.5, 2.0), "min_object_covered": 0.5} | changes
    max_boxes = compute_max_boxes(index, image_indices)  # type: ignore[arg-type]
    spec = LoaderSpec(
        device=CPU, batch_size=BATCH, image_size=IMAGE_SIZE, resize="letterbox", max_boxes=max_boxes, seed=3, **fields
    )  # type: ignore[arg-type]
    return SampleStream(index, image_indices, spec)  # type: ignore[arg-type]


def comparable(plan: SamplePlan | None) -> object:
    return None if plan is None else plan._replace(rand=plan.rand.tolist())  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"scale_jitter_prob": 0.0}, {"train": False}])
def test_a_plan_depends_on_its_position_alone(index: InMemoryIndex, changes: dict[str, object]) -> None:
    """Planned with others or by itself, by this stream or by another, before images failed or after."""
    samples, later = make_samples(index, **changes), make_samples(index, **changes)
    later.quarantined[4] = 0
    together = samples.plan(0, 3 * COUNT)
    assert [comparable(plan) for plan in together] == [comparable(later.plan(p, 1)[0]) for p in range(3 * COUNT)]
    images = [plan.image_index for plan in together if plan is not None]
    assert sorted(images) == sorted([*range(COUNT)] * (3 if samples.train else 1))


def test_a_sample_that_is_loaded_again_is_the_same(index: InMemoryIndex) -> None:
    samples = make_samples(index)
    buffer = HostBatchBuffer(CPU, BATCH, IMAGE_SIZE, samples._spec.max_boxes)
    for start in range(0, 3 * COUNT, BATCH):
        task = BatchTask(start, start, buffer, BATCH)
        task.plans = samples.plan(start, BATCH)
        for k in range(BATCH):
            list(samples.load(task, k, Counters()))
        samples.annotate(task, range(BATCH))
        expected, results = (
            [tensor.clone() for tensor in buffer.tensors],
            [result.image_index for result in task.results],
        )
        for k in range(BATCH):
            for tensor in buffer.tensors:
                tensor[k] = 1
            samples.reload(task, k, Counters())
        assert all(bool((a == b).all()) for a, b in zip(buffer.tensors, expected, strict=True))
        assert [result.image_index for result in task.results] == results
        assert 6 not in results
