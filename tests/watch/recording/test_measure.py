"""`stoker.measure` around real loops: what it writes, what it leaves alone, and how it ends."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stoker_watch
from stoker_watch.diagnosis.engine import diagnose
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.errors import ConfigError, DataError, UsageError
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.recording import measure as measure_module
from stoker_watch.recording.measure import PHASES
from stoker_watch.report.explain import explain_run
from stoker_watch.runs.records import (
    CONFIG,
    EVENTS,
    FINDINGS,
    STACKS,
    STEPS,
    locked,
    read_lines,
)
from stoker_watch.runs.schemas import Event, StackWindow, StepWindow


def events(run: Path) -> list[Event]:
    return list(read_lines(run, EVENTS, Event))


def windows(run: Path) -> list[StepWindow]:
    return list(read_lines(run, STEPS, StepWindow))


def pairs(count: int, wait_s: float = 0.0) -> Iterator[tuple[list[float], list[int]]]:
    for _ in range(count):
        time.sleep(wait_s)
        yield [0.5] * 4, [0] * 4


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_every_second_is_in_its_phase(run: Path) -> None:
    with stoker_watch.measure(run) as m:
        for _ in m.data(pairs(10, wait_s=0.02)):
            with m.step():
                time.sleep(0.01)
        with m.phase("eval"):
            time.sleep(0.06)
        with m.checkpoint():
            time.sleep(0.05)
    found = read_run(run).totals
    assert sum(found.phases.values()) == pytest.approx(found.device_s)
    floors = {"input_wait": 0.2, "compute": 0.1, "eval": 0.06, "checkpoint": 0.05}
    assert all(found.phases[name] >= min_s for name, min_s in floors.items())
    assert set(found.phases) == {*floors, "startup", "host"}
    assert (found.steps, found.step, found.num_images) == (10, 10, 40)
    assert (m.step_count, m.image_count, m.path) == (10, 40, run)
    assert [event.kind for event in events(run)] == ["started", "finished"]
    assert (run / FINDINGS).exists()


def test_a_loader_that_computes_in_the_thread_is_told_from_one_that_waits(run: Path) -> None:
    def batches(busy: bool) -> Iterator[list[int]]:
        for _ in range(10):
            start_s = time.thread_time()
            while busy and time.thread_time() - start_s < 0.01:
                pass
            time.sleep(0 if busy else 0.01)
            yield [1, 2]

    for name, busy in (("works", True), ("waits", False)):
        with stoker_watch.measure(run / name) as m:
            for _ in m.data(batches(busy)):
                with m.step():
                    pass
        found = read_run(run / name).totals
        assert (found.thread_cpu_s["input_wait"] > 0.09) == busy
        assert found.thread_cpu_s["input_wait"] < (0.05 if not busy else found.phases["input_wait"] + 0.01)
        assert set(found.thread_cpu_s) <= set(found.phases)


def test_why_explains_it_like_any_run(run: Path) -> None:
    with stoker_watch.measure(run) as m:
        assert explain_run(run).state == "running"
        for _ in m.data(pairs(20, wait_s=0.02)):
            with m.step():
                pass
    why = explain_run(run)
    assert why.state == "finished"
    assert {row.phase: row.device_s for row in why.phases}["input_wait"] >= 0.4
    assert why.productive_fraction is not None


def test_lines_are_written_while_it_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "WINDOW_S", 0.05)
    with stoker_watch.measure(run) as m:
        deadline_s = time.monotonic() + 60
        while not windows(run) and time.monotonic() < deadline_s:
            with m.step(num_images=2):
                time.sleep(0.01)
        (line,) = windows(run)
        assert line.wall_s >= 0.05
        assert line.num_images == 2 * line.window_steps == 2 * line.step


def test_batches_come_through_as_they_are(run: Path) -> None:
    source = [object(), object(), object()]
    with stoker_watch.measure(run, num_images=1) as m:
        data = m.data(source)
        assert len(data) == 3
        assert list(data) == list(data) == source
        with pytest.raises(TypeError):
            len(m.data(iter("ab")))
        for _ in m.data(source):
            break
        with m.step():
            pass
    assert read_run(run).totals.num_images == 7


@pytest.mark.parametrize(
    ("num_images", "infos"),
    [(None, 1), (lambda _: None, 1), (lambda _: 0, 0)],
    ids=["a batch without a length", "not known", "none"],
)
def test_batches_whose_images_are_not_known_are_reported_once(run: Path, num_images: Any, infos: int) -> None:
    with stoker_watch.measure(run, num_images=num_images) as m:
        for _ in m.data(["a", "b", "c"]):
            with m.step():
                pass
    found = [event for event in read_lines(run, EVENTS, Event) if "images are not counted" in event.text]
    assert len(found) == infos
    assert read_run(run).totals.num_images == 0


def test_exceptions_of_the_loop_and_its_data_propagate(run: Path) -> None:
    def torn() -> Iterator[int]:
        yield 1
        raise DataError("a bad image")

    with stoker_watch.measure(run) as m:
        with pytest.raises(DataError, match="bad image"):
            list(m.data(torn()))
        with pytest.raises(KeyError), m.step():
            raise KeyError
        assert m.step_count == 0
        with m.step():
            pass
    assert read_run(run).totals.step == 1


def test_nested_phases_of_a_step_are_taken_out_of_it(run: Path) -> None:
    with stoker_watch.measure(run) as m:
        waiting = iter(m.data(pairs(2, wait_s=0.03)))
        start_s = time.perf_counter()
        with m.step():
            next(waiting)
            next(waiting)
            with m.phase("sync"):
                time.sleep(0.02)
        step_s = time.perf_counter() - start_s
    found = read_run(run).totals
    assert found.phases["input_wait"] >= 0.06
    assert found.phases["sync"] >= 0.02
    assert found.phases["compute"] <= step_s - found.phases["input_wait"] - found.phases["sync"]
    assert (found.steps, found.num_images) == (1, 8)


def test_validation_data_is_evaluation_and_counts_no_images(run: Path) -> None:
    with stoker_watch.measure(run) as m:
        with m.phase("eval"):
            list(m.data(pairs(3, wait_s=0.02)))
            with m.phase("checkpoint"):
                time.sleep(0.01)
        with m.step():
            pass
    found = read_run(run).totals
    assert found.phases["eval"] >= 0.06
    assert "input_wait" not in found.phases
    assert found.num_images == 0


def test_losses_lr_and_norms_are_means_of_the_window(run: Path) -> None:
    torch = pytest.importorskip("torch")
    with stoker_watch.measure(run) as m:
        for loss in (1.0, torch.tensor(3.0, requires_grad=True), float("nan")):
            with m.step():
                pass
            m.log(loss=loss, boxes=1, lr=0.1, grad_norm=torch.tensor([2.0]), left_out=None)
        with pytest.raises(UsageError, match=r"m.log\(loss=…\)"):
            m.log(loss=torch.zeros(2))
    (line,) = (window for window in windows(run) if window.losses)
    assert line.losses == {"total": 2.0, "boxes": 1.0}
    assert (line.lr, line.grad_norm) == (0.1, 2.0)
    (warning,) = [event for event in events(run) if event.kind == "warning"]
    assert warning.text == warning.data["not_finite"] == "loss is nan"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("no"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(3), 3),
        (DataError("torn"), 4),
        (SystemExit(0), None),
    ],
)
def test_the_end_is_recorded(run: Path, error: BaseException, code: int | None) -> None:
    with pytest.raises(type(error)), stoker_watch.measure(run):
        raise error
    last = events(run)[-1]
    if code is None:
        assert last.kind == "finished"
    else:
        assert (last.kind, last.data["exit_code"]) == ("failed", code)
        assert last.text.startswith(type(error).__name__)
    with locked(run) as free:
        assert free


def test_the_same_folder_is_the_next_attempt(run: Path) -> None:
    for first_step in (None, None, 2):
        with stoker_watch.measure(run, first_step=first_step, price_per_device_hour=2.5) as m:
            for _ in range(3):
                with m.step(num_images=1):
                    time.sleep(0.01)
    assert [(event.kind, event.attempt) for event in events(run)][::2] == [
        ("started", 1),
        ("resumed", 2),
        ("resumed", 3),
    ]
    assert events(run)[0].data == {"measured": True, "ranks": 1, "price_per_device_hour": 2.5}
    last = {line.attempt: line for line in windows(run) if line.window_steps}
    assert [last[attempt].step for attempt in (1, 2, 3)] == [3, 6, 5]
    assert "recovery" not in last[2].phases
    assert last[3].phases["recovery"] >= 0.03


def test_folders_of_other_runs_are_refused(run: Path) -> None:
    run.mkdir()
    (run / CONFIG).touch()
    with pytest.raises(UsageError, match="run of a training by stoker"):
        stoker_watch.measure(run).__enter__()
    other = run.with_name("other")
    with stoker_watch.measure(other), pytest.raises(UsageError, match="is open"), stoker_watch.measure(run):
        pass
    other.mkdir(exist_ok=True)
    with locked(other) as free:
        assert free
        with pytest.raises(UsageError) as caught:
            stoker_watch.measure(other).__enter__()
    assert "after init_process_group" in str(caught.value)


def test_wrong_use_is_an_error(run: Path) -> None:
    with pytest.raises(UsageError, match="outside of its block"):
        stoker_watch.measure(run).data([])
    with stoker_watch.measure(run) as m:
        with pytest.raises(UsageError) as caught, m.phase("breakfast"):
            pass
        assert caught.value.choices == PHASES
        caught_errors: list[UsageError] = []

        def log_in_thread() -> None:
            try:
                m.log(loss=1.0)
            except UsageError as error:
                caught_errors.append(error)

        thread = threading.Thread(target=log_in_thread)
        thread.start()
        thread.join()
        assert "another thread" in caught_errors[0].what
    with pytest.raises(UsageError, match="outside of its block"), m.step():
        pass
    with pytest.raises(UsageError, match="used before"):
        m.__enter__()


def test_without_a_folder_it_takes_the_next_number(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.mkdir()
    monkeypatch.chdir(run)
    for number in (1, 2):
        with stoker_watch.measure(name="mine") as m:
            assert m.path == Path("runs") / f"mine-{number}"


def test_a_failure_of_the_recording_is_a_warning_and_the_loop_goes_on(run: Path) -> None:
    def broken(min_s: float) -> None:  # noqa: ARG001
        raise OSError("the driver is gone")

    with stoker_watch.measure(run) as m:
        m._ledger.window = broken  # type: ignore[assignment]
        m._window_start_s -= 10
        with pytest.warns(RuntimeWarning, match="nothing is recorded from here on: OSError: the driver"):
            list(m.data(pairs(3)))
        for _ in m.data(pairs(3)):
            with m.step(), m.phase("sync"):
                m.log(loss=1.0)
    assert [event.kind for event in events(run)] == ["started", "warning", "finished"]
    assert m.step_count == 3


def test_a_forked_process_writes_nothing_and_holds_nothing(run: Path) -> None:
    with stoker_watch.measure(run) as m:
        with m.step():
            pass
        handles = Path("/proc/self/fd")
        child = os.fork()
        if child == 0:
            try:
                with m.step():
                    pass
                m.log(loss=1.0)
                list(m.data(pairs(2)))
                m.close(ValueError("of the child"))
                os._exit(9 if any(str(run / ".lock") == str(handle.resolve()) for handle in handles.iterdir()) else 0)
            finally:
                os._exit(7)
        assert os.waitpid(child, 0)[1] == 0
        with m.step():
            pass
    assert read_run(run).totals.steps == 2
    assert [event.kind for event in events(run)] == ["started", "finished"]


def test_alerts_are_sent_and_a_forked_child_sends_none(run: Path) -> None:
    told = run.parent / "told"
    monitor = MonitoringOptions(alert=("loss > 5", "on finished"), alert_command=f"cat >> '{told}'", metrics_port=0)
    with stoker_watch.measure(run, monitor=monitor) as m:
        with m.step():
            m.log(loss=9.0)
        child = os.fork()
        if child == 0:
            try:
                m.close()
                del m
                gc.collect()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert [json.loads(line + "}")["rule"] for line in told.read_text().split("}")[:-1]] == ["loss > 5", "on finished"]
    with (
        pytest.raises(ConfigError, match="not a valid rule"),
        stoker_watch.measure(run, monitor=MonitoringOptions(alert=("x",))),
    ):
        raise AssertionError("entered")
    with stoker_watch.measure(run):
        pass  # the folder is free again


def test_loader_workers_record_nothing(run: Path) -> None:
    torch = pytest.importorskip("torch")
    with stoker_watch.measure(run) as m:
        loader = torch.utils.data.DataLoader(torch.arange(12).reshape(6, 2), batch_size=2, num_workers=1)
        with m.phase("eval"):
            for _ in m.data(torch.utils.data.DataLoader(torch.arange(6))):  # another one's workers
                pass
        for _ in range(2):
            for _ in m.data(loader):
                with m.step():
                    pass
    assert read_run(run).totals.num_images == 12
    assert [event.kind for event in events(run)] == ["started", "info", "finished"]
    note = events(run)[1]
    assert (note.text, note.data) == ("the loop's loader has 1 worker processes", {"workers": 1})


LOOP = """
import sys, time, stoker_watch
with stoker_watch.measure(sys.argv[1], num_images=lambda batch: batch) as m:
    for batch in m.data(range(10**9)):
        with m.step():
            time.sleep(0.001)
        if "torch" in sys.modules:
            raise SystemExit("torch was loaded")
        if sys.argv[2] == "end" and batch == 5:
            sys.exit(17)
"""


def loop(run: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", LOOP, str(run), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_it_works_without_torch_and_leaves_the_exit_code(run: Path) -> None:
    job = loop(run, "end")
    assert job.wait() == 17, job.communicate()
    assert (events(run)[-1].kind, events(run)[-1].data["exit_code"]) == ("failed", 17)
    assert read_run(run).totals.num_images == 15


@pytest.mark.slow
def test_a_killed_loop_reads_as_a_dead_run(run: Path) -> None:
    job = loop(run, "kill")
    deadline_s = time.monotonic() + 60
    while job.poll() is None and time.monotonic() < deadline_s and not ((run / STEPS).exists() and windows(run)):
        time.sleep(0.02)
    assert explain_run(run).state == "running"
    job.kill()
    job.communicate()
    why = explain_run(run)
    assert why.state == "killed"
    assert why.steps > 0
    assert why.productive_fraction is not None


NOT_LEFT = """
import sys, stoker_watch
m = stoker_watch.measure(sys.argv[1]).__enter__()
with m.step():
    pass
raise ValueError("the block is not left")
"""


@pytest.mark.slow
def test_an_end_without_leaving_the_block_is_recorded(run: Path) -> None:
    job = subprocess.run([sys.executable, "-c", NOT_LEFT, str(run)], capture_output=True, check=False)
    assert job.returncode == 1
    assert events(run)[-1].text == "ValueError: the block is not left"


def test_the_loop_samples_its_own_stacks(tmp_path: Path) -> None:
    """By a child of this process."""
    deadline_s = time.monotonic() + 60
    lines: list[str] = []
    roles: set[str] = set()
    with stoker_watch.measure(tmp_path / "run") as m:
        # children of this process are sampled in turn with it, and a short window may see only the reading below
        while not any("test_measure.py" in line for line in lines) and time.monotonic() < deadline_s:
            with m.step():
                sum(range(1_000_000))
            windows = read_lines(tmp_path / "run", STACKS, StackWindow)
            own = [window for window in windows if window.pid == os.getpid()]
            lines = [place.line for window in own for place in window.places]
            roles = {window.role for window in own}
    assert {"training"} <= roles <= {"training", "thread"}, "other tests may have left threads"
    assert any("test_measure.py" in line for line in lines)
    assert not any("recording/measure.py" in line for line in lines), "it is not the loop's own code"


def test_the_samples_end_with_the_block_also_while_forked_workers_live(tmp_path: Path) -> None:
    """They have the other end of what tells the sampling process to end."""
    with stoker_watch.measure(tmp_path / "run") as m:
        with m.step():
            pass
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.close(writer)
            os.read(reader, 1)  # until the test closes it
            os._exit(0)
        os.close(reader)
        start_s = time.monotonic()
        m.close()
    assert time.monotonic() - start_s < 4
    os.close(writer)
    os.waitpid(child, 0)


def test_an_exception_is_recorded_with_where_it_was_raised(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"), stoker_watch.measure(tmp_path / "run"):
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    (failed,) = [event for event in events(tmp_path / "run") if event.kind == "failed"]
    assert failed.text == "OSError: [Errno 28] No space left on device"
    assert failed.data["traceback"][-1] == failed.text
    (finding, *_) = diagnose(tmp_path / "run")
    assert finding.id == "disk_full"
    assert (finding.place or "").startswith("test_measure.py:")


PACKAGES = Path(stoker_watch.__file__).parents[1]
HOSTILE = """
import fcntl, os, signal, sys, time
import stoker_watch
stoker_watch.measure  # imported now: Python 3.13.0 cannot import `socket` where its folder was removed
what, run = sys.argv[1:]
if what == "closes the standard descriptors":
    for fd in range(3):
        os.close(fd)
if what == "removes its folder":
    os.chdir(run)
    os.rmdir(run)
with stoker_watch.measure(run) as m:
    with m.step():
        pass
    m._write()
    sampler = m._stacks.process
    if what == "closes all":
        os.closerange(3, 4096)
        opened = [os.open(os.devnull, os.O_RDWR) for _ in range(64)]
        own = os.open(f"{run}-own", os.O_RDWR | os.O_CREAT)
        for fd in opened:
            os.dup2(own, fd)
    elif what.startswith("fills the pipe"):
        os.kill(sampler.pid, signal.SIGSTOP)
        try:
            while True:
                os.write(m._stacks._fd, bytes(65536))
        except BlockingIOError:
            m._stacks.send("steps")
    elif what == "forges the pipe":
        os.write(m._stacks._fd, b"\\xff" * 1000)
        sampler.wait()
    elif what == "kills it and reaps it":
        os.kill(sampler.pid, signal.SIGKILL)
        os.waitpid(sampler.pid, 0)
    with m.step():
        pass
if what == "closes all":
    assert os.fstat(own).st_size == 0, "records are in a file of the program"
    assert all(os.path.samestat(os.fstat(fd), os.fstat(own)) for fd in opened), "its files are closed"
open(f"{run}-ended", "w").close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="stacks are for Linux")
@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        ("nothing", ["started", "finished"]),
        ("closes all", ["started"]),
        pytest.param("fills the pipe", ["started", "finished"], marks=pytest.mark.slow),
        ("forges the pipe", ["started", "info", "finished"]),
        ("kills it and reaps it", ["started", "info", "finished"]),
        ("closes the standard descriptors", ["started", "finished"]),
        ("removes its folder", ["started", "finished"]),
        ("has an odd environment", ["started", "finished"]),
    ],
)
def test_whatever_the_program_does_to_its_descriptors_it_goes_on(tmp_path: Path, what: str, kinds: list[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    odd = {"RANK": "9" * 5000, "WORLD_SIZE": "\u00b2", "A\udcff": "\udcff", "PYTHONPATH": f"{PACKAGES}:/\udcff"}
    environment = os.environ | (odd if what == "has an odd environment" else {})
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, what, run],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "run-ended").exists()
    assert [event.kind for event in events(run)] == kinds
