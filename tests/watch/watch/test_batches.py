"""Looks at batches: the same in each step, sorted by class; and near ones that are neither."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker_watch.recording.hook.stoker_hook.batches import BatchFinder
from tests.watch.watch.test_hook import ran
from tests.watch.watch.test_mistakes import reported

torch = pytest.importorskip("torch")
DataLoader, IterableDataset = torch.utils.data.DataLoader, torch.utils.data.IterableDataset
Subset, TensorDataset = torch.utils.data.Subset, torch.utils.data.TensorDataset

IMAGES = torch.rand(1200, 3, 4, 4, generator=torch.Generator().manual_seed(0))
Loaders = Iterator[tuple[Any, Any]]


def found(batches: Loaders, steps: int = 300) -> dict[str, dict[str, Any]]:
    """What is reported at the end of a training. batches: (iterator, batch) of each step."""
    kinds: dict[str, dict[str, Any]] = {}

    def report(kind: str, _place: str, **values: Any) -> None:
        kinds[kind] = values

    def withdraw(kind: str) -> None:
        kinds.pop(kind, None)

    finder = BatchFinder(report, withdraw, lambda: "job.py:1")
    for _, (iterator, batch) in zip(range(steps), batches, strict=False):
        finder.note(iterator, batch)
        finder.after_step()
    return kinds


def first_of(loader: DataLoader[Any]) -> Loaders:
    while True:
        iterator = iter(loader)
        yield iterator, next(iterator)


def epochs(loader: DataLoader[Any]) -> Loaders:
    while True:
        iterator = iter(loader)
        for batch in iterator:
            yield iterator, batch


def data(labels: torch.Tensor, images: torch.Tensor = IMAGES) -> TensorDataset:
    return TensorDataset(images, labels)


SORTED = torch.arange(1200) // 200
MIXED = SORTED[torch.randperm(1200, generator=torch.Generator().manual_seed(1))]


def test_the_first_batch_of_a_new_iterator_each_time() -> None:
    kinds = found(first_of(DataLoader(data(MIXED), 16)))
    assert kinds == {"same_batch": {"equal": 16, "samples": 1200}}


@pytest.mark.parametrize(
    "collate", [lambda b: {"x": torch.stack([i for i, _ in b]), "y": torch.tensor([int(k) for _, k in b])}, None]
)
def test_samples_in_the_order_of_their_classes(collate: Callable[[Any], Any] | None) -> None:
    kinds = found(epochs(DataLoader(data(SORTED), 16, collate_fn=collate)))
    assert list(kinds) == ["sorted_labels"]
    assert kinds["sorted_labels"]["looks"] >= 24


def test_images_that_were_not_scaled() -> None:
    assert list(found(epochs(DataLoader(data(MIXED, IMAGES * 255), 16)))) == ["unscaled_images"]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from zip(IMAGES, MIXED, strict=True)


@pytest.mark.parametrize(
    "batches",
    [
        first_of(DataLoader(data(MIXED), 16, shuffle=True)),
        epochs(DataLoader(data(MIXED), 16)),
        epochs(DataLoader(data(MIXED), 1200)),  # all of it in each step
        epochs(DataLoader(data(MIXED * 0, IMAGES * 0), 16)),  # a dummy, to measure speed
        epochs(DataLoader(Endless(), 16)),
        epochs(DataLoader(data((torch.rand(1200, generator=torch.Generator().manual_seed(2)) < 0.02).long()), 16)),
        epochs(DataLoader(data(MIXED * 0), 16)),  # one class
        epochs(DataLoader(data(torch.arange(1200) // 16 % 2), 16)),  # two tasks in turn
        epochs(DataLoader(data(5 + torch.arange(1200) // 32), 16)),  # lengths
        epochs(DataLoader(data(torch.arange(1200) // 4 % 8), 16)),  # four of each of four persons
        epochs(DataLoader(TensorDataset(IMAGES, SORTED, MIXED), 16)),  # which one are the labels?
        epochs(DataLoader(data(SORTED), 4)),
        epochs(DataLoader(Subset(data(MIXED), range(256)), 16)),  # epochs as long as it is from look to look
        epochs(DataLoader(Subset(data(MIXED), range(32)), 16)),
        epochs(DataLoader(data(MIXED, (IMAGES * 255).byte()), 16)),  # scaled on the device
        epochs(DataLoader(data(MIXED, IMAGES * 255 - 117), 16)),
    ],
)
def test_batches_without_a_mistake(batches: Loaders) -> None:
    assert found(batches) == {}


def beside_constants(batch: Any) -> dict[Any, Any]:
    """As of monodepth2: matrices of the camera, the same in all samples, before the images."""
    cameras = {("K", scale): torch.arange(16.0).view(4, 4).repeat(len(batch), 1, 1) for scale in range(9)}
    return cameras | {"color": torch.stack([image for image, _ in batch])}


def with_an_object(batch: Any) -> tuple[Any, ...]:
    return torch.arange(12.0).view(4, 3), frozenset(int(label) for _, label in batch)


def with_names(batch: Any) -> tuple[Any, ...]:
    return torch.arange(12.0).view(4, 3), [f"{image.sum()}.jpg" for image, _ in batch]


@pytest.mark.parametrize("collate", [beside_constants, with_an_object, with_names])
def test_constants_beside_what_differs(collate: Callable[[Any], Any]) -> None:
    loader = DataLoader(data(MIXED), 16, shuffle=True, collate_fn=collate)
    assert found(epochs(loader)) == {}
    first = found(first_of(DataLoader(data(MIXED), 16, collate_fn=collate)))
    assert list(first) == (["same_batch"] if collate is not with_an_object else [])


def test_a_first_batch_that_is_overfitted_before_the_training() -> None:
    loader = DataLoader(data(MIXED), 16)
    first = first_of(loader)

    def batches() -> Loaders:
        yield from (next(first) for _ in range(30))
        yield from epochs(loader)

    assert found(batches(), steps=30)
    assert found(batches()) == {}


def test_what_cannot_be_read_is_left_out() -> None:
    batch = [torch.rand(4, 3).T, torch.rand(4).requires_grad_(), torch.eye(3).to_sparse(), "text", None, 3]
    assert found(iter([(object(), batch)] * 40)) == {}


def test_a_watched_loop(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(TensorDataset(torch.randn(640, 8), torch.randint(0, 4, (640,))), 16)
for step in range(60):
    x, y = next(iter(loader))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
""")
    ran([sys.executable, "job.py"], tmp_path)
    (mistake,) = reported(tmp_path)
    assert (mistake["kind"], mistake["place"]) == ("same_batch", "job.py:9")
