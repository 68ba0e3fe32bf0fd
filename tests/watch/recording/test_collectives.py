"""Waits for other ranks, in a process group of one whose all-reduce ends only after a wait for it has begun."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stoker_watch.recording.hook.stoker_hook.instruments import patch_collectives

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
nn = torch.nn
DistributedDataParallel = torch.nn.parallel.DistributedDataParallel


SLOW_S = 0.02


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Waits:
    """Records how long each wait took."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        self.ours = True
        self.begun = threading.Event()
        self.exchanges = 0

    def begins(self) -> Callable[[], None]:
        start_s = time.perf_counter()
        self.begun.set()
        return lambda: self.took_s.append(time.perf_counter() - start_s)

    def clear(self) -> None:
        self.took_s.clear()
        self.begun.clear()


@pytest.fixture
def waits(group: None) -> Iterator[Waits]:  # noqa: ARG001
    waits = Waits()
    before = (dist.Work.wait, dist._broadcast_coalesced, torch.autograd.backward)
    replaced = patch_collectives(lambda: waits.begins() if waits.ours else None, lambda: waits.ours, waits.begins)
    yield waits
    for one in reversed(replaced):
        one.restore()
    assert (dist.Work.wait, dist._broadcast_coalesced, torch.autograd.backward) == before


def slow_model(waits: Waits) -> DistributedDataParallel:
    """Its all-reduce ends SLOW_S after a wait has begun, in another thread."""

    def exchange(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        waits.exchanges += 1

        def finish() -> None:
            if waits.ours:
                assert waits.begun.wait(60)
                time.sleep(SLOW_S)
            future.set_result(bucket.buffer())

        threading.Thread(target=finish).start()
        return future

    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model.register_comm_hook(None, exchange)
    return model


def test_the_exchange_at_the_end_of_the_backward_pass(waits: Waits) -> None:
    model = slow_model(waits)
    loss = model(torch.randn(8, 4)).sum()
    waits.clear()
    loss.backward()
    (took_s,) = waits.took_s
    assert took_s >= SLOW_S
    assert waits.exchanges == 1
    assert all(one.grad is not None for one in model.parameters())


def test_without_sync_nothing_is_exchanged(waits: Waits) -> None:
    model = slow_model(waits)
    with model.no_sync():
        loss = model(torch.randn(8, 4)).sum()
        waits.clear()
        loss.backward()
    assert len(waits.took_s) == 1, "the end of the backward pass, with nothing to wait for"
    assert waits.exchanges == 0


def test_each_collective_that_is_called(waits: Waits) -> None:
    tensor = torch.ones(2)
    for call in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, async_op=True).wait(),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_gather([torch.zeros(2)], tensor),
        lambda: dist.all_gather_object([None], "a"),
        dist.barrier,
        dist.monitored_barrier,
    ):
        waits.took_s.clear()
        call()
        assert waits.took_s
    assert tensor.tolist() == [1, 1]


def test_buffers_before_the_forward_pass(waits: Waits) -> None:
    model = slow_model(waits)
    waits.took_s.clear()
    model(torch.randn(8, 4))
    assert len(waits.took_s) == 1


def test_other_threads_and_other_backward_passes_are_left_alone(waits: Waits) -> None:
    waits.ours = False
    dist.barrier()
    slow_model(waits)(torch.randn(8, 4)).sum().backward()
    assert waits.took_s == []
    waits.ours = True
    x = torch.ones(2, requires_grad=True)
    torch.autograd.backward([x.sum(), (2 * x).sum()])
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1).backward()


def test_an_exchange_that_fails_ends_its_wait(waits: Waits) -> None:
    def fails(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG001
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_exception(ConnectionError("the other rank is gone"))
        return future

    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(None, fails)
    waits.took_s.clear()
    with pytest.raises(RuntimeError, match="the other rank is gone"):
        model(torch.randn(8, 4)).sum().backward()
    assert len(waits.took_s) == 1
