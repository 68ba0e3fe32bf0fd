"""The device's seam, as far as a CPU shows it."""

import subprocess
import sys

import pytest
import torch

from stoker.device import CACHE_BLOCK, DEVICE_BLOCK, block_of

FAULTS = """
import resource, sys
import torch
from stoker.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()


def step():
    return [torch.zeros(side * 2**20) for side in range(9, 14)]


for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_kept_for_the_next_step():
    """A step's 220 MiB cost 56,320 faults of a page, or 110 of a huge one, where they are given back after it."""

    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    given_back = faults("give back")
    if given_back < 1000:
        pytest.skip("this kernel does not count faults")
    assert faults("keep") < given_back / 2


def test_blocks_are_smaller_on_a_cpu():
    assert block_of(torch.zeros(1)) == CACHE_BLOCK < DEVICE_BLOCK == block_of(torch.zeros(1, device="meta"))
