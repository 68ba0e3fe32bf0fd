"""A real Slurm on this machine: munged, slurmctld, and a slurmd for each of two nodes that share its cores.

Needs root and Debian's packages, which are installed where apt can; else the tests are skipped. The nodes are `n1` and
`n2`; the partition `spot` is preempted by `ondemand`, with 20 seconds of grace.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
TEMPLATE = Path(__file__).with_name("slurm.conf")
START_S = 60


def require_slurm() -> None:
    """Skips where Slurm cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("needs root: slurmd starts jobs of others")
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "munged"))):
        if shutil.which("apt-get") is None:
            pytest.skip(f"needs Slurm: {' '.join(PACKAGES)}")
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            done = subprocess.run(["apt-get", *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"`apt-get install {' '.join(PACKAGES)}` failed: {done.stderr[-300:]}")


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Runs the cluster in a folder of its own; gives the variables with which Slurm's commands find it."""
    for name in ("state", "spool/n1", "spool/n2", "log", "munge"):
        (folder / name).mkdir(parents=True)
    for path in (folder, *folder.parents[:-1]):
        path.chmod(path.stat().st_mode | 0o111)  # munged, another user, passes through
    config = folder / "slurm.conf"
    text = TEMPLATE.read_text().replace("@DIR@", str(folder))
    for number, port in enumerate(_free_ports(3)):  # another test process may have a cluster of its own
        text = text.replace(f"@PORT{number}@", str(port))
    config.write_text(text)
    key = folder / "munge/munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for path in (folder / "munge", key):
        shutil.chown(path, "munge", "munge")
    env = {"SLURM_CONF": str(config)}
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{option}={folder}/munge/munge.{name}" for option, name in files.items()]
    commands = [
        ["runuser", "-u", "munge", "--", "munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-c", "-N", node] for node in ("n1", "n2")),
    ]
    with contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            output = stack.enter_context((folder / f"log/{number}-{command[0]}.out").open("wb"))
            process = subprocess.Popen(command, env={**os.environ, **env}, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(_end, process)
            if number == 0:
                wait_for(lambda: (folder / "munge/munge.socket").exists())
        stack.callback(_end_jobs, env)
        wait_for(lambda: _output(["sinfo", "-h", "-N", "-p", "spot", "-o", "%T"], env).split() == ["idle", "idle"])
        yield env


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _end_jobs(env: dict[str, str]) -> None:
    _output(["scancel", "--user=root"], env)
    wait_for(lambda: not _output(["squeue", "-h"], env), 40)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _output(command: list[str], env: dict[str, str]) -> str:
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False).stdout


def wait_for(condition: Callable[[], object], timeout_s: float = START_S) -> None:
    """Polls; fails after timeout_s."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.2)
