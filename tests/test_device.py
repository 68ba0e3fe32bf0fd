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
block = 10 * 2**20
torch.zeros(block)
torch.zeros(block)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.zeros(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_kept_for_the_next_step():
    """Each of four blocks of 40 MiB costs 10,240 faults of a page, or 20 of a huge one, where it is given back."""

    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    given_back = faults("give back")
    if given_back < 80:
        pytest.skip("this kernel does not count faults")
    assert faults("keep") < given_back / 3


def test_blocks_are_smaller_on_a_cpu():
    assert block_of(torch.zeros(1)) == CACHE_BLOCK < DEVICE_BLOCK == block_of(torch.zeros(1, device="meta"))
