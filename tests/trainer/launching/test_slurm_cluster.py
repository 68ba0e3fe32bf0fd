"""`stoker launch slurm` on a real Slurm of two nodes: what loses a job there, and that it goes on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.launching.jobs import last_job, read_jobs
from stoker.launching.slurm import Slurm
from stoker.launching.spec import Job, JobStatus, LaunchSpec, PlaceOptions, open_place
from stoker_watch.errors import PreflightError
from stoker_watch.runs.records import CHECKPOINTS, EVENTS, FINAL, read_lines
from stoker_watch.runs.schemas import Event
from tests.chaos.harness import FOLDER_VARIABLE, assert_same_weights, merge_flags, train
from tests.drawn import draw
from tests.trainer.launching.slurm_cluster import require_slurm, slurm_cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = ("--steps", "160", "--eval-every", "80", "--batch-size", "8", "--mosaic", "0", "--device", "cpu")
NODES = ("--nodes", "2", "--cpus", "2", "--memory", "3", "--grace", "25s", "--env", "STOKER_CORES=1")
"""With one core each, as `--devices 2` gives its processes: sums of more threads are rounded differently."""
WAIT_S = 180


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    require_slurm()
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "c") as env:
        yield env


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ended = train(data, tmp_path_factory.mktemp("undisturbed"), *STEPS, "--devices", "2")
    assert ended.code == 0, ended.output
    return ended.run


class Launched:
    """`stoker launch` as a user runs it, for one run."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.run, self._env, self._folder = folder / "run", env, folder

    def command(self, *arguments: str | Path) -> str:
        """What it prints. Fails if it fails."""
        variables = {**os.environ, **self._env, "OMP_NUM_THREADS": "1", FOLDER_VARIABLE: str(self._folder)}
        done = subprocess.run(
            [sys.executable, "-m", "stoker", "launch", *map(str, arguments)],
            env=variables, cwd=self._folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        print(f"$ stoker launch {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, data: Path, *flags: str) -> str:
        """Submits; returns the id of the job."""
        self.command("slurm", data, *merge_flags(STEPS), *NODES, "--run-dir", self.run, "--mount", "/", *flags)
        return read_jobs(str(self.run))[-1].id

    def wait_for_checkpoint(self, after: int = 0) -> None:
        wait_for(lambda: self.newest_checkpoint() > after or self.has_ended(), WAIT_S)
        assert not self.has_ended(), self.log

    def newest_checkpoint(self) -> int:
        return max((int(path.name[5:]) for path in (self.run / CHECKPOINTS).glob("step-*")), default=0)

    def has_ended(self) -> bool:
        return bool(self.kinds() & {"finished", "failed"})

    def kinds(self) -> set[str]:
        return {event.kind for event in self.events()}

    def events(self) -> list[Event]:
        return list(read_lines(self.run, EVENTS, Event)) if (self.run / EVENTS).exists() else []

    @property
    def log(self) -> str:
        return (self.run / "launch.log").read_text()

    def wait_until(self, state: str) -> str:
        """Until the place says so; returns what `status` prints then."""
        job, deadline_s = last_job(str(self.run)), time.monotonic() + WAIT_S
        while (status := open_place(job.place).status(job)).state != state:
            assert time.monotonic() < deadline_s, f"{status}\n{self.log}"
            time.sleep(1)
        return self.command("status", self.run)

    def slurm(self, *command: str) -> str:
        return subprocess.run(
            command, env={**os.environ, **self._env}, capture_output=True, text=True, check=True
        ).stdout  # fmt: skip


@pytest.fixture
def job(cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    launched = Launched(cluster, tmp_path)
    yield launched
    launched.slurm("scancel", "--user=root")
    wait_for(lambda: not launched.slurm("squeue", "-h"), 60)


def test_preempted_by_a_higher_partition_requeued_resumed_and_finished(
    job: Launched, data: Path, undisturbed: Path
) -> None:
    number = job.submit(data, "--spot", "--partition", "spot")
    job.wait_for_checkpoint()
    job.slurm("sbatch", "--partition=ondemand", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=srun sleep 3")
    text = job.wait_until("succeeded")
    assert "requeued 1 times" in text
    print(job.log)
    assert f"job {number} on n[1-2], requeued 1 times" in job.log
    assert "the training stopped and saved: requeued" in job.log
    (stop,) = [event for event in job.events() if event.kind == "preempted"]
    (resumed,) = [event for event in job.events() if event.kind == "resumed"]
    assert stop.step is not None
    assert 0 < stop.step < 160
    assert resumed.data["ranks"] == 2
    assert_same_weights(job.run, undisturbed)


def test_cancelled_in_slurm_and_continued_here(job: Launched, data: Path, undisturbed: Path) -> None:
    job.submit(data)
    job.wait_for_checkpoint()
    job.command("cancel", job.run)
    assert not (job.run / FINAL).exists()
    job.command("local", "--resume", job.run, "--devices", "2")
    job.wait_until("succeeded")
    assert [entry.place for entry in read_jobs(str(job.run))] == ["slurm", "local"]
    assert_same_weights(job.run, undisturbed)


TRAINER = """#!/bin/bash
trap 'sleep 1; echo saved; exit 75' TERM
for second in $(seq "$SECONDS_TO_TRAIN"); do
    [ "$SLURM_PROCID" = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$FAILURES" ] && exit 9
    sleep 1 &
    wait $!
done
"""
"""Stands for `stoker train` where what counts is what Slurm and the script do."""


@pytest.fixture
def submit(cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Submits TRAINER on both nodes; returns the job."""
    trainer = tmp_path / "trainer"
    trainer.write_text(TRAINER)
    trainer.chmod(0o755)
    monkeypatch.setattr("stoker.launching.slurm.sys.executable", str(trainer))
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)

    def submit_trainer(*, seconds: int, failures: int = 0, **changes: object) -> Job:
        fields = {"cpus": 2, "memory_gib": 3.0, "min_nodes": 2, "max_nodes": 2, "grace_s": 25, **changes}
        env = {"SECONDS_TO_TRAIN": str(seconds), "FAILURES": str(failures)}
        log = str(tmp_path / "job.log")
        spec = LaunchSpec(arguments=("train",), name="trainer", run_dir=str(tmp_path), env=env, log=log, **fields)
        return Job(place="slurm", id=Slurm().submit(spec), name="trainer", run=str(tmp_path), t=0.0, log=log)

    yield submit_trainer
    subprocess.run(["scancel", "--user=root"], check=True)
    wait_for(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout, 60)


def wait_for_state(job: Job, state: str, restarts: int = 0) -> JobStatus:
    slurm = Slurm()
    wait_for(lambda: slurm.status(job).state == state and (slurm.status(job).restarts or 0) >= restarts, WAIT_S)
    return slurm.status(job)


def test_the_time_limit_warns_saves_and_requeues_and_cancel_is_for_good(submit: Callable[..., Job]) -> None:
    job = submit(seconds=3600, time_limit_s=60)
    wait_for_state(job, "running", restarts=1)
    log = "\n".join(Slurm().logs(job, follow=False))
    assert log.count("saved\n") >= 2, "both nodes saved"
    assert "the training stopped and saved: requeued" in log
    assert "DUE TO TIME LIMIT" not in log
    wait_for(lambda: Path(job.log).read_text().count("requeued 1 times"), WAIT_S)
    Slurm().cancel(job)
    assert wait_for_state(job, "cancelled").restarts == 1
    assert "is not requeued" in Path(job.log).read_text()
    Slurm().cancel(job)  # no error: it has ended


def test_failures_are_requeued_so_often_and_preemptions_do_not_count(submit: Callable[..., Job]) -> None:
    job = submit(seconds=1, failures=1, restarts=1)
    assert wait_for_state(job, "succeeded").restarts == 1
    assert "exit code 9, restart 1 of 1: requeued" in Path(job.log).read_text()
    job = submit(seconds=1, failures=2, restarts=1)
    status = wait_for_state(job, "failed")
    assert (status.restarts, status.exit_code) == (1, 9)


def test_elastic_nodes_are_those_that_can_share_the_batch(job: Launched, data: Path) -> None:
    """Five images cannot be divided between the two nodes that there are."""
    steps = ("--steps", "4", "--eval-every", "4", "--batch-size", "5", "--mosaic", "0", "--device", "cpu")
    nodes = ("--nodes", "1:2", "--cpus", "2", "--memory", "3", "--env", "STOKER_CORES=1")
    job.command("slurm", data, *merge_flags(steps), *nodes, "--run-dir", job.run, "--mount", "/")
    assert "succeeded" in job.wait_until("succeeded")
    assert "1 nodes train, as more devices cannot share the batch equally; idle: n2" in job.log


def test_elastic_nodes_take_what_there_is(submit: Callable[..., Job]) -> None:
    job = submit(seconds=1, min_nodes=2, max_nodes=8)
    assert wait_for_state(job, "succeeded").nodes == ("n[1-2]",)


def test_a_refusal_of_slurm_is_shown(submit: Callable[..., Job]) -> None:
    with pytest.raises(PreflightError, match="sbatch refused") as refused:
        submit(seconds=1, options=PlaceOptions(partition="nowhere"))
    assert "invalid partition" in str(refused.value)
    forgotten = Job(place="slurm", id="4711", name="x", run="/nowhere", t=0.0)
    assert Slurm().status(forgotten).state == "unknown"
    Slurm().cancel(forgotten)
