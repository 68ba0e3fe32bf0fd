"""Worker processes on a GPU: their memory is pinned, and the batches are those of threads."""

import pytest
import torch

from stoker.data.loading.processes import WorkerProcesses
from stoker.hardware.selection import select_device
from tests.trainer.data.loading import assert_same, make, take
from tests.trainer.data.memory_index import InMemoryIndex

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_batches_of_processes_come_from_pinned_memory(tmp_path):
    index, device = InMemoryIndex(tmp_path, 13), select_device("cuda")
    processes = WorkerProcesses(2, device)
    with make(index, device=device, processes=processes) as loader:
        assert processes.pin_failure is None
        assert all(tensor.is_pinned() for buffer in loader._buffers for tensor in buffer.tensors)
        actual = take(loader, 12)
    with make(index, device=device) as loader:
        assert_same(actual, take(loader, 12))
    torch.cuda.synchronize()
    processes.close()
