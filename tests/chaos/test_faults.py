"""The table of docs/faults.md, a row a test: a real `stoker train`, the fault injected for real, the end checked.

`make chaos` runs them and prints the time of each. Rows that have their proof elsewhere are named in the page.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from stoker.training.checkpoint import is_complete, list_checkpoints
from stoker_watch.runs.records import HANG, QUARANTINE
from tests.chaos.harness import Ended, assert_same_weights, cgroup, processes_of, small_disk, start, train
from tests.fixtures.chaos_faults import wait_for_checkpoint
from tests.trainer.training.metadata_server import metadata_server

pytestmark = pytest.mark.slow

EVALUATOR, LOADER = "stoker.training.evaluator", "stoker.data.loading.loader"
STEP, EVALUATION = "stoker.training.make_step:train_step", f"{EVALUATOR}:detect"
RESTARTS = ("--restarts", "3")


@pytest.mark.parametrize(
    ("target", "call", "fault", "reason"),
    [
        (STEP, 9, "kill", "SIGKILL"),
        ("stoker.training.checkpoint:write_atomic", 4, "kill", "SIGKILL"),
        (EVALUATION, 1, "kill", "SIGKILL"),
        (f"{EVALUATOR}:compute_coco_result", 0, "kill", "SIGKILL"),
        ("stoker.training.start:build_initial_model", 0, "kill", "SIGKILL"),
        (STEP, 9, "error", "exit code 1"),
    ],
    ids=["in a step", "while saving", "in an evaluation", "while scoring", "at the start", "a bug"],
)
def test_a_process_that_dies_is_restarted(
    target: str, call: int, fault: str, reason: str, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    ended = train(data, tmp_path, *RESTARTS, chaos={"target": target, "call": call, "fault": fault, "attempt": 1})
    assert ended.code == 0, ended.output
    assert f"{reason}" in ended.output
    resumed = [event for event in ended.events if "restart" in event.data]
    assert [event.data["restart"]["number"] for event in resumed] == [1]
    assert reason in resumed[0].text
    assert_same_weights(ended.run, undisturbed)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("fault", ["terminate", "user_signal"])
def test_a_signal_saves_and_passes_the_supervisor(fault: str, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    ended = train(data, tmp_path, *RESTARTS, chaos={"target": STEP, "call": 9, "fault": fault})
    assert ended.code == 75, ended.output
    assert ended.events[-1].kind == "preempted"
    assert processes_of(tmp_path) == []
    again = train(data, tmp_path)
    assert again.code == 0, again.output
    assert "continuing from step 10" in again.output
    assert_same_weights(again.run, undisturbed)


def test_sigterm_to_the_supervisor(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path, *RESTARTS)
    wait_for_checkpoint(process, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "everything is saved" in output
    assert processes_of(tmp_path) == []
    again = train(data, tmp_path)
    assert again.code == 0, again.output
    assert_same_weights(again.run, undisturbed)


def test_a_killed_supervisor_leaves_no_process_and_a_saved_run(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path, *RESTARTS)
    wait_for_checkpoint(process, tmp_path / "run")
    process.kill()
    process.communicate(timeout=60)  # until the child, which has the pipe too, has ended
    assert Ended(0, "", tmp_path / "run").events[-1].kind == "preempted"
    assert processes_of(tmp_path) == []
    again = train(data, tmp_path)
    assert again.code == 0, again.output
    assert_same_weights(again.run, undisturbed)


@pytest.mark.parametrize(
    ("target", "call", "hung"),
    [(STEP, 9, "device"), (f"{LOADER}:Loader._wait_for_next", 9, "loader"), (EVALUATION, 1, "evaluation")],
    ids=["the device", "the loader", "an evaluation"],
)
def test_a_hang_is_ended_recorded_and_restarted(
    target: str, call: int, hung: str, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    chaos = {"target": target, "call": call, "fault": "hang", "attempt": 1}
    ended = train(data, tmp_path, *RESTARTS, chaos=chaos, env={"STOKER_HANG_TIMEOUT_S": "3"})
    assert ended.code == 0, ended.output
    assert "exit code 7 (the training hung)" in ended.output
    (failed,) = [event for event in ended.events if event.kind == "failed"]
    assert (failed.data["hung"], failed.data["exit_code"]) == (hung, 7)
    assert "_hang" in (ended.run / HANG).read_text(), "the stack of the training thread"
    assert_same_weights(ended.run, undisturbed)
    assert processes_of(tmp_path) == []


def test_a_hang_without_restarts_is_exit_7(data: Path, tmp_path: Path) -> None:
    chaos = {"target": STEP, "call": 9, "fault": "hang"}
    ended = train(data, tmp_path, chaos=chaos, env={"STOKER_HANG_TIMEOUT_S": "3"})
    assert ended.code == 7, ended.output
    assert "The training hangs" in ended.output
    assert "--restarts" in ended.output


def test_out_of_memory_in_a_step(data: Path, tmp_path: Path) -> None:
    ended = train(
        data,
        tmp_path,
        chaos={"target": "stoker.training.optim:OptimizerStep.backward", "call": 9, "fault": "out_of_memory"},
    )
    assert ended.code == 0, ended.output
    (text,) = ended.texts("out_of_memory")
    assert "2 micro-batches of 2 images" in text
    assert ended.events[-1].data["metrics"]["ap"] is not None


def test_out_of_memory_in_an_evaluation(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    ended = train(data, tmp_path, chaos={"target": EVALUATION, "call": 0, "fault": "out_of_memory"})
    assert ended.code == 0, ended.output
    assert "evaluations run with 2 images at a time" in ended.texts("out_of_memory")[0]
    assert_same_weights(ended.run, undisturbed)


def test_a_spot_notice(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    with metadata_server() as server:
        env = {"GCE_METADATA_HOST": server.address}
        process = start(data, tmp_path, *RESTARTS, env=env)
        wait_for_checkpoint(process, tmp_path / "run")
        server.set("preempted", "TRUE")
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "spot VM is preempted" in output
    again = train(data, tmp_path)
    assert again.code == 0, again.output
    assert_same_weights(again.run, undisturbed)


def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_goes_on_later(
    data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A file takes all of the disk once there is a checkpoint; the end finds no room for the final weights."""
    with small_disk(tmp_path / "disk", "2200m"):  # less is refused before the start
        process = start(data, tmp_path / "disk")
        run = tmp_path / "disk" / "run"
        wait_for_checkpoint(process, run)
        process.send_signal(signal.SIGSTOP)
        with (tmp_path / "disk" / "filler").open("wb") as file:
            disk = os.statvfs(tmp_path / "disk")
            os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 3, output
        assert "could not save at step" in output
        assert "The final weights could not be saved" in output
        assert any(map(is_complete, list_checkpoints(run))), "the last good checkpoint stays"
        (tmp_path / "disk" / "filler").unlink()
        again = train(data, tmp_path / "disk")
        assert again.code == 0, again.output
        assert_same_weights(again.run, undisturbed)


def test_a_quota_that_no_checkpoint_fits(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """`ulimit -f`: state.pt is larger, the weights are not. Training goes on without checkpoints, and says so."""
    ended = train(data, tmp_path, prefix=["prlimit", "--fsize=4000000"])
    assert ended.code == 0, ended.output
    assert "File too large" in ended.texts("checkpoint_failed")[0]
    assert_same_weights(ended.run, undisturbed)


def test_a_full_tmp_and_a_read_only_home(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "tmp", "8k"), small_disk(tmp_path / "home", "1m"):
        (tmp_path / "tmp" / "filler").write_bytes(b"\0" * 4096)
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "home"], check=True)
        env = {
            "HOME": str(tmp_path / "home"),
            "TMPDIR": str(tmp_path / "tmp"),
            "XDG_CACHE_HOME": "",
            "STOKER_CACHE_DIR": "",
        }
        ended = train(data, tmp_path, env=env)
    assert ended.code in (0, 3), ended.output
    if ended.code == 0:
        assert_same_weights(ended.run, undisturbed)
    else:
        assert "fix:" in ended.output


def test_no_shared_memory(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """A mount namespace in which /dev/shm is an empty read-only folder."""
    script = 'mount -t tmpfs -o ro,size=4k tmpfs /dev/shm && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", "true"], capture_output=True).returncode != 0:
        pytest.skip("no mount namespace")
    ended = train(data, tmp_path, "--worker-processes", "1", prefix=["unshare", "-m", "sh", "-c", script, "sh"])
    assert ended.code == 0, ended.output
    assert_same_weights(ended.run, undisturbed)


def test_a_clock_that_jumps(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    ended = train(data, tmp_path, env={"STOKER_CHAOS_CLOCK": "1"})
    assert ended.code == 0, ended.output
    assert_same_weights(ended.run, undisturbed)


def test_a_closed_pipe_and_no_terminal(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """`stoker train … | head -1`, in a session without a terminal."""
    process = start(data, tmp_path, prefix=["setsid"])
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    events = Ended(process.returncode, "", tmp_path / "run").events
    assert events[-1].kind == "finished"
    assert_same_weights(tmp_path / "run", undisturbed)


def test_two_processes_in_one_run(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path)
    try:
        wait_for_checkpoint(process, tmp_path / "run")
        process.send_signal(signal.SIGSTOP)  # so that it does not end meanwhile
        second = train(data, tmp_path)
        assert second.code == 2, second.output
        assert f"process {process.pid} of " in second.output
    finally:
        process.kill()
        process.communicate()


def test_corrupt_images_above_the_limit(data: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(data, damaged)
    for path in sorted((damaged / "train").glob("*.jpg"))[:6]:
        path.write_bytes(path.read_bytes()[:300])
    ended = train(damaged, tmp_path, *RESTARTS)
    assert ended.code == 4, ended.output
    assert "restart 1" not in ended.output
    assert (ended.run / QUARANTINE).exists() or not ended.run.exists()
    assert ".jpg" in ended.output


def test_host_memory_near_the_limit_of_a_real_cgroup(data: Path, tmp_path: Path) -> None:
    """Version 1 or 2. The limit is lowered, while the run trains, to a little more than what it
    uses without the page cache."""
    with cgroup("memory") as group:
        process = start(data, tmp_path, "--steps", "400", prefix=group.join)
        wait_for_checkpoint(process, tmp_path / "run")
        stat = dict(line.split() for line in (group.path / "memory.stat").read_text().splitlines())
        page_cache = int(stat["active_file"]) + int(stat["inactive_file"])  # the first to use a file is charged for it
        group.memory_limit.write_text(str(int((group.memory_used() - page_cache) * 1.03)))
        run = Ended(0, "", tmp_path / "run")
        while process.poll() is None and not run.texts("low_host_memory"):
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()[0]
        (event,) = [event for event in run.events if event.kind == "low_host_memory"][:1]
        process.terminate()
        process.communicate(timeout=60)
    assert event.data["limit"] == "the cgroup"
    assert event.data["used_bytes"] > 0.9 * event.data["limit_bytes"]
