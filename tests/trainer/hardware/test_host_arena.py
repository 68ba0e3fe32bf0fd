"""Pinned memory of snapshots is allocated once and used again only when nothing refers to it."""

import contextlib

import pytest
import torch
from torch import Tensor

from stoker.hardware import host_arenas
from stoker.hardware.device import Device, SideStream
from stoker.hardware.host_arenas import HostArenas
from tests.fixtures.hardware_host_arena import pinning_device


def pinned_bytes(nbytes: int) -> int:
    """What torch's allocator takes for a block (c10's CachingHostAllocator.h): a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def like(*sizes: int) -> list[Tensor]:
    return [torch.arange(size, dtype=torch.float32) for size in sizes]


def test_views_do_not_overlap_and_have_the_shapes_and_types_of_the_tensors() -> None:
    tensors = [
        torch.rand(3, 5),
        torch.tensor(7),
        torch.zeros(0, 4),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.rand(5).to(torch.bfloat16),
    ]
    views, _lease = HostArenas(pinning_device()).take(tensors)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(views, tensors, strict=True):
        assert (view.dtype, view.shape, view.is_contiguous()) == (tensor.dtype, tensor.shape, True)
        assert torch.equal(view, tensor)


def test_hundreds_of_tensors_take_a_few_allocations_once() -> None:
    device = pinning_device()
    arenas, tensors = HostArenas(device), like(*[1000] * 500)
    arenas.reserve(tensors)
    assert len(device.allocated) == 1
    for _ in range(5):
        arenas.take(tensors)
        arenas.take(tensors[:300])
    assert len(device.allocated) == 1


def test_chunks_are_not_rounded_up_to_twice_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arenas, "CHUNK_BYTES", 2**16)
    device = pinning_device()
    tensors = like(*[1000] * 270)  # 1.03 MiB: alone it would take 2 MiB
    HostArenas(device).reserve(tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    assert max(device.allocated) <= 2**16
    assert pinned_bytes(total) > 1.9 * total
    assert sum(map(pinned_bytes, device.allocated)) < 1.1 * total


def test_a_tensor_larger_than_a_chunk_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arenas, "CHUNK_BYTES", 4096)
    device = pinning_device()
    arenas, tensors = HostArenas(device), like(10, 5000, 10, 2000, 0, 1024, 1)
    views, _lease = arenas.take(tensors)
    assert device.allocated == [40, 20000, 40, 8000, 4096, 4]
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))


def test_memory_in_use_is_not_given_out_again() -> None:
    device = pinning_device()
    arenas, tensors = HostArenas(device), like(100, 200)
    first, lease = arenas.take(tensors)
    second, _second_lease = arenas.take(tensors)
    assert len(device.allocated) == 2
    assert {view.data_ptr() for view in first}.isdisjoint(view.data_ptr() for view in second)
    pointers = [view.data_ptr() for view in first]
    del lease
    third, _third_lease = arenas.take(tensors)
    assert [view.data_ptr() for view in third] == pointers
    assert len(device.allocated) == 2


def test_tensors_that_do_not_fit_get_an_arena_of_their_own() -> None:
    device = pinning_device()
    arenas = HostArenas(device)
    arenas.reserve(like(100))
    arenas.reserve(like(100, 200))
    arenas.reserve(like(300))
    assert device.allocated == [400, 448 + 800]


def test_a_thread_that_waits_for_a_cuda_stream_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cudaStreamSynchronize` spins; an event made with `blocking` sleeps."""
    done: list[object] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            done.append(("event", blocking))

        def record(self) -> None:
            done.append("recorded")

        def synchronize(self) -> None:
            done.append("slept")

    class Stream(contextlib.nullcontext[None]):
        device_index = 0

        def __enter__(self) -> None:
            done.append("in the stream")

        def synchronize(self) -> None:
            done.append("spun")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    stream = SideStream(Device(torch.device("cpu")))
    monkeypatch.setattr(stream, "_device", Device(torch.device("cuda", 0)))
    monkeypatch.setattr(stream, "_stream", Stream())
    stream.synchronize()
    assert done == ["in the stream", ("event", True), "recorded", "slept"]
