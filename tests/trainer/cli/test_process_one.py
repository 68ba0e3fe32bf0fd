"""`stoker` as process 1 of a container without an init: a SIGTERM ends it also before the training handles signals."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

WAIT_S = 60


def test_an_early_sigterm_ends_process_one(tmp_path: Path):
    """While torch is imported, which takes seconds: here for ever."""
    unshare = shutil.which("unshare")
    command = [str(unshare), "--pid", "--fork", "--mount-proc"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root and unshare, to make a process 1")
    (tmp_path / "torch.py").write_text("import pathlib, time\npathlib.Path('reached').touch()\ntime.sleep(600)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    arguments = [*command, sys.executable, "-m", "stoker", "train", "demo"]
    starter = subprocess.Popen(arguments, cwd=tmp_path, env=env)
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not (tmp_path / "reached").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        (process,) = psutil.Process(starter.pid).children()
        process.send_signal(signal.SIGTERM)
        assert starter.wait(WAIT_S) == 75
    finally:
        for process in psutil.Process(starter.pid).children() if starter.poll() is None else ():
            process.kill()
        starter.kill()
        starter.wait()
