"""Worker processes of the loader need no room in /dev/shm, which containers limit (docs/launch.md)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 77
"$@" || exit 1
test "$(df --output=used /dev/shm | tail -n 1 | tr -d ' ')" = 0
"""


@pytest.mark.slow
def test_worker_processes_train_with_a_small_dev_shm(tmp_path: Path) -> None:
    train = [sys.executable, "-m", "stoker", "train", "demo", "--model", "retinanet_tiny_fpn", "--device", "cpu"]
    train += ["--steps", "2", "--batch-size", "16", "--worker-processes", "2", "--run-dir", str(tmp_path / "run")]
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", COMMAND, "sh", *train]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("no namespace of mounts may be made here")
    assert done.returncode == 0, done.stderr
