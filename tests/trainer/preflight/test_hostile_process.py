"""The names of processes on a GPU, of processes that have made them long."""

import subprocess
import sys

import pytest

from stoker.preflight import gpu_rules
from tests.bounded import bounded
from tests.watch.recording.test_hostile_process import ENDLESS


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_command_of_a_terabyte_is_read_within_bounds() -> None:
    job = subprocess.Popen([sys.executable, "-S", "-c", ENDLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout is not None
    if job.stdout.readline() != b"ready\n":
        job.communicate()
        pytest.skip("this kernel does not let a process set where its command is")
    try:
        with bounded(seconds=20, megabytes=256):
            assert gpu_rules._command(job.pid).endswith(")")
    finally:
        job.communicate(b"\n")
