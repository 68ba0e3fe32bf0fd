"""State files in, phases of each rank out."""

import dataclasses
import errno
import fcntl
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.recording.hook.stoker_hook import clock as hook
from stoker_watch.recording.hook.stoker_hook import growth
from stoker_watch.runs.records import EVENTS, PHASES, STEPS, RunFolder, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from stoker_watch.storage.local_files import temporary_folder
from stoker_watch.watch import hook_reader
from stoker_watch.watch.hook_reader import (
    SLOT_PHASES,
    HookReader,
    HookState,
    IdleTime,
    RankTimeBreakdown,
    add_hook_env,
    cpu_by_phase,
    hook_state_dir,
    phase_seconds,
    read_hook_state,
)
from stoker_watch.watch.recorder import JobRecorder
from tests.bounded import bounded
from tests.fixtures.special_files import replace_by

BEGIN_S = 1000.0


def make_state(
    name: str = "1.state",
    *,
    running: str = "compute",
    begin_s: float = BEGIN_S,
    cpu: dict[str, float] | None = None,
    **values: float,
) -> HookState:
    """A process of which `values` are known; its last mark follows from them."""
    unknown = {"rank": -1.0, "lr": -1.0, "workers": -1.0, "recompiles": -1.0}
    filled = dict.fromkeys(hook.SLOTS, 0.0) | unknown | {"begin": begin_s} | values
    seconds = sum(filled[slot] for slot in (*SLOT_PHASES, "graph"))
    filled |= {"last_update": begin_s + seconds, "current_slot": float(hook.SLOTS.index(running))}
    input_fraction = filled.pop("input_fraction", None)
    computed = dict.fromkeys(hook.SLOTS[hook.STARTUP :], 0.0) | (cpu or {})
    return HookState(
        name=name,
        pid=1,
        frameworks=("torch 2",),
        slots=hook.SLOTS,
        values=filled,
        cpu=computed,
        input_fraction=input_fraction,
    )


def write_state(folder: Path, one: HookState, *, pid: int) -> None:
    head = {"pid": pid, "frameworks": one.frameworks, "slots": one.slots}
    doubles = [*(one.values[slot] for slot in one.slots), *(one.cpu[slot] for slot in one.slots[hook.STARTUP :])]
    values = struct.pack(f"{len(doubles)}d", *doubles)
    (folder / one.name).write_bytes(json.dumps(head).encode().ljust(hook.HEADER_BYTES) + values)


def test_every_slot_of_time_is_a_phase() -> None:
    assert {*SLOT_PHASES, "graph"} == set(hook.SLOTS[hook.STARTUP :])
    assert set(SLOT_PHASES.values()) <= set(PHASES)


def test_what_runs_since_the_last_mark_is_still_running() -> None:
    one = make_state(running="input_wait", compute=3.0, input_wait=1.0, batches=1.0, maybe_work=0.5)
    assert phase_seconds(one, BEGIN_S + 6.5)["input_wait"] == pytest.approx(3.0)
    assert phase_seconds(one, None)["input_wait"] == 1.0
    assert phase_seconds(one, None)["compute"] == 3.5


def test_time_after_the_last_step_is_unattributed_until_a_batch_makes_it_the_host_s() -> None:
    assert phase_seconds(make_state(work=3.0, after_step=1.0), None)["unattributed"] == 4.0
    ended = phase_seconds(make_state(compute=3.0, after_step=1.0, host=2.0, batches=1.0), None)
    assert (ended["unattributed"], ended["host"]) == (1.0, 2.0)


def test_recompilations_are_counted_by_window_and_absent_if_not_measured() -> None:
    breakdown = RankTimeBreakdown(BEGIN_S)
    found = []
    for at_s, recompiles in ((1.0, -1.0), (2.0, 0.0), (3.0, 3.0), (4.0, 4.0)):
        seconds = 0.5 * max(0.0, recompiles)
        counted = make_state(compute=at_s, steps=at_s, recompiles=recompiles, recompiled_s=seconds)
        breakdown.update([counted], [], BEGIN_S + at_s)
        window = breakdown.next_window(BEGIN_S + at_s, 1.0, devices=1)
        found.append((window.recompiles, window.recompiled_s))
    assert found == [(None, 0.0), (0, 0.0), (3, 1.5), (1, 0.5)]


def test_time_in_a_step_in_which_the_process_did_nothing_is_unattributed() -> None:
    hung = dataclasses.replace(make_state(compute=3.0, batches=1.0, steps=1.0), idle={"compute": 8.0})
    phases = phase_seconds(hung, BEGIN_S + 12.0)
    assert (phases["compute"], phases["unattributed"]) == (4.0, 8.0)
    device = dataclasses.replace(hung, values={**hung.values, "device": 1.0, "busy": 2.0})
    phases = phase_seconds(device, BEGIN_S + 12.0)
    assert (phases["compute"], phases["host"], phases["unattributed"]) == (2.0, 2.0, 8.0)


def poll(idle: IdleTime, state: HookState, *times: float, cpu_s: float = 0.0, is_asleep: bool = True) -> float:
    """Seconds so far in which the process did nothing in `compute`, after these times."""
    for now_s in times:
        idle.update(state, cpu_s, now_s, is_asleep=is_asleep)
    return idle.seconds.get("compute", 0.0)


def test_a_process_is_idle_if_it_sleeps_in_a_step_for_long_and_uses_no_core() -> None:
    state, later = make_state(compute=3.0), make_state(compute=4.0)
    assert poll(IdleTime(), state, 0.0, 4.9) == 0.0
    idle = IdleTime()
    assert poll(idle, state, 0.0, 6.0, 7.0) == 7.0
    assert poll(idle, later, 8.0, 12.0) == 7.0, "its clock went on"
    assert poll(idle, later, 14.0) == 7.0 + 6.0
    assert poll(IdleTime(), make_state(running="comm"), 0.0, 9.0) == 0.0, "this wait is known"
    assert poll(IdleTime(), state, 0.0, 9.0, is_asleep=False) == 0.0, "it waits for a core"
    busy = IdleTime()
    poll(busy, state, 0.0)
    assert poll(busy, state, 6.0, cpu_s=1.0) == 0.0, "other threads of it compute"


def test_cpu_time_of_the_process_is_that_of_the_window() -> None:
    def window(cpu_s: float, at_s: float) -> float | None:
        state = dataclasses.replace(make_state(compute=at_s, steps=1.0), process_cpu_s=cpu_s)
        breakdown.update([state], [], BEGIN_S + at_s)
        return breakdown.next_window(BEGIN_S + at_s, 1.0, devices=2).process_cpu_s

    breakdown = RankTimeBreakdown(BEGIN_S)
    assert breakdown.next_window(BEGIN_S, 1.0, devices=2).process_cpu_s is None
    assert [window(cpu_s, at_s) for cpu_s, at_s in ((3.0, 2.0), (4.5, 3.0))] == [3.0, 1.5]
    ended = dataclasses.replace(make_state(compute=3.0, steps=1.0), process_cpu_s=5.0)
    breakdown.update([], [ended], BEGIN_S + 4.0)
    assert breakdown.next_window(BEGIN_S + 4.0, 1.0, devices=2).process_cpu_s == 0.5


def test_the_processes_that_train_are_known_while_they_live(tmp_path: Path) -> None:
    reader = HookReader(tmp_path, devices=1, now_s=0.0)
    write_state(tmp_path, make_state("launcher.state"), pid=os.getppid())
    write_state(tmp_path, make_state("rank.state", steps=1.0), pid=os.getpid())
    reader.poll()
    assert reader.training_ranks == {os.getpid(): 0}
    write_state(tmp_path, make_state("rank.state", steps=1.0, ended=1.0), pid=os.getpid())
    reader.poll()
    assert reader.training_ranks == {}


def test_a_graph_is_split_as_the_profiler_saw_it_and_unknown_before() -> None:
    assert phase_seconds(make_state(graph=10.0), None)["unattributed"] == 10.0
    split = phase_seconds(make_state(graph=10.0, input_fraction=0.9), None)
    assert (split["input_wait"], split["compute"]) == (pytest.approx(9.0), pytest.approx(1.0))


def test_a_wait_that_the_queue_of_the_device_outlasts_costs_nothing() -> None:
    host = {"input_wait": 4.0, "compute": 5.0, "host": 1.0, "eval": 2.0, "batches": 9.0, "device": 1.0}
    idle = phase_seconds(make_state(**host, busy=5.0), None)
    assert (idle["compute"], idle["input_wait"], idle["host"], idle["eval"]) == (5.0, 4.0, 1.0, 2.0)
    hidden = phase_seconds(make_state(**host, busy=9.0, device_comm=2.0), None)
    assert (hidden["compute"], hidden["comm"], hidden["input_wait"]) == (7.0, 2.0, 1.0)
    waiting = phase_seconds(make_state(**host, busy=5.0, steps=9.0, syncs=9.0), None)
    assert waiting["sync"] == 1.0


def test_cpu_time_is_that_of_the_thread_also_if_a_device_computes() -> None:
    def used(state: HookState) -> dict[str, float]:
        return {name: cpu_s for name, cpu_s in cpu_by_phase(state).items() if cpu_s}

    cpu = {"input_wait": 3.0, "compute": 2.0, "after_step": 0.5, "graph": 4.0}
    host = make_state(cpu=cpu, batches=1.0, input_fraction=0.25)
    assert used(host) == {"input_wait": 4.0, "compute": 5.0, "unattributed": 0.5}
    device = make_state(cpu=cpu, batches=1.0, device=1.0, busy=9.0)
    assert used(device) == {"input_wait": 3.0, "host": 2.0, "unattributed": 4.5}


def write_trace(folder: Path, number: int, *, waited_s: float, graph_s: float) -> None:
    """As the hook does: the seconds of the traced steps, and a Trace with one event (tsl's trace_events.proto)."""

    def varint(value: int) -> bytes:
        low, rest = value & 127, value >> 7
        return bytes([low | 128]) + varint(rest) if rest else bytes([low])

    name = b"IteratorGetNextOp::DoCompute"
    event = b"\x1a" + varint(len(name)) + name + b"\x48" + varint(1) + b"\x50" + varint(round(waited_s * 1e12))
    trace = b"\x22" + varint(len(event)) + event
    (folder / f"{os.getpid()}-{number}.trace").write_bytes(f"{graph_s}\n".encode() + trace)


def test_the_first_trace_of_a_tensorflow_job_counts_until_there_are_others(tmp_path: Path) -> None:
    """Its steps took what had been prefetched while their graph was built."""
    reader = HookReader(tmp_path, devices=1, now_s=BEGIN_S)
    waits = []
    for number, waited_s in enumerate((0.1, 1.2, 0.8), start=1):
        write_trace(tmp_path, number, waited_s=waited_s, graph_s=2.0)
        write_state(tmp_path, make_state("1.state", steps=1.0, graph=10.0 * number), pid=os.getpid())
        reader.poll()
        (state,) = reader._states.values()
        waits.append(state.input_fraction)
    assert waits == [pytest.approx(0.05), pytest.approx(0.6), pytest.approx(0.5)]


def test_how_many_processes_load_is_what_a_training_process_says(tmp_path: Path) -> None:
    reader = HookReader(tmp_path, devices=1, now_s=0.0)
    for values in ({"workers": 4.0}, {"steps": 1.0}):
        write_state(tmp_path, make_state(**values), pid=os.getpid())
        reader.poll()
        assert reader.num_loader_workers() is None
    write_state(tmp_path, make_state(steps=1.0, workers=0.0), pid=os.getpid())
    reader.poll()
    assert reader.num_loader_workers() == 0


seconds = st.floats(0.0, 100.0)


@given(st.dictionaries(st.sampled_from([*SLOT_PHASES, "graph"]), seconds), seconds, seconds, st.booleans(), seconds)
def test_phases_add_up_to_the_time(slots: dict[str, float], busy: float, comm: float, device: bool, on: float) -> None:
    one = make_state(**slots, busy=busy, device_comm=comm, device=float(device), batches=1.0)
    now_s = one.values["last_update"] + on
    phases = phase_seconds(one, now_s)
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(now_s - BEGIN_S)


moves = st.lists(st.tuples(st.sampled_from(sorted(SLOT_PHASES)), st.floats(0.01, 5.0), st.booleans()), min_size=1)


@given(moves)
def test_windows_add_up_also_after_a_correction(done: list[tuple[str, float, bool]]) -> None:
    breakdown, total_s, computed_s, phases = RankTimeBreakdown(BEGIN_S), 0.0, 0.0, dict.fromkeys(PHASES, 0.0)
    values: dict[str, float] = {"batches": 1.0, "steps": 1.0}
    for slot, took_s, corrected in done:
        values[slot] = values.get(slot, 0.0) + took_s
        if corrected:  # what may have been training was evaluation
            values["eval"] = values.get("eval", 0.0) + values.pop("maybe_work", 0.0)
        total_s += took_s
        cpu = {slot: seconds / 2 for slot, seconds in values.items() if slot in SLOT_PHASES}
        breakdown.update([make_state(cpu=cpu, **values)], [], BEGIN_S + total_s)
        seen = breakdown.next_window(BEGIN_S + total_s, took_s, devices=2)
        assert min(seen.thread_cpu_s.values(), default=0.0) >= 0
        computed_s += sum(seen.thread_cpu_s.values())
        assert computed_s == pytest.approx(total_s / 2)
        assert sum(seen.phases.values()) == pytest.approx(took_s * 2)
        assert min(seen.phases.values()) >= 0
        phases = {name: phases[name] + seen.phases.get(name, 0.0) for name in phases}
    assert sum(phases.values()) == pytest.approx(total_s * 2)
    if not any(corrected for _, _, corrected in done):
        for slot, phase in SLOT_PHASES.items():
            assert phases[phase] + 1e-6 >= values.get(slot, 0.0) * 2


def test_a_second_training_is_followed_and_a_helper_is_not() -> None:
    breakdown = RankTimeBreakdown(BEGIN_S)
    first = make_state("a", compute=4.0, batches=1.0, steps=4.0, num_images=8.0)
    helper = make_state("h", startup=9.0, begin_s=BEGIN_S - 5.0)
    breakdown.update([helper, first], [], BEGIN_S + 4.0)
    assert breakdown.next_window(BEGIN_S + 4.0, 4.0, devices=1).phases == {"compute": 4.0}
    breakdown.update([helper], [first], BEGIN_S + 5.0)
    assert breakdown.next_window(BEGIN_S + 6.0, 2.0, devices=1).phases == {"unattributed": 2.0}
    second = make_state("b", begin_s=BEGIN_S + 6.0, running="startup", startup=1.0)
    breakdown.update([helper, second], [first], BEGIN_S + 7.0)
    assert breakdown.next_window(BEGIN_S + 7.0, 1.0, devices=1).phases == pytest.approx({"startup": 1.0})
    assert breakdown.steps == 4


def test_a_process_that_was_killed_was_in_its_last_phase_until_then() -> None:
    breakdown = RankTimeBreakdown(BEGIN_S)
    hung = make_state(running="comm", compute=1.0, comm=1.0, batches=1.0, steps=1.0)
    breakdown.update([hung], [], BEGIN_S + 9.0)
    breakdown.update([], [hung], BEGIN_S + 10.0)
    assert breakdown.next_window(BEGIN_S + 10.0, 10.0, devices=1).phases == pytest.approx(
        {"compute": 1.0, "comm": 8.0, "unattributed": 1.0}
    )


def test_ranks_share_the_devices_from_their_first_step_on(tmp_path: Path) -> None:
    now_s = time.monotonic()
    reader = HookReader(tmp_path, devices=4, now_s=now_s)
    for rank in (0, 1):
        starts = make_state(f"{rank}.state", running="startup", begin_s=now_s, rank=float(rank), world=2.0)
        write_state(tmp_path, starts, pid=os.getpid())
    reader.poll()
    alone = reader.next_windows(now_s + 2.0, 2.0)
    assert [(rank, one.devices, one.phases) for rank, one in alone.items()] == [(0, 4, {"startup": 8.0})]
    for rank in (0, 1):
        steps = make_state(
            f"{rank}.state", begin_s=now_s, startup=2.0, compute=1.0, rank=float(rank), steps=3.0, batches=3.0
        )
        write_state(tmp_path, steps, pid=os.getpid())
    reader.poll()
    assert [(rank, one.devices, one.window_steps) for rank, one in reader.next_windows(now_s + 3.0, 1.0).items()] == [
        (0, 2, 3),
        (1, 2, 3),
    ]
    assert reader.status() == "recorded: torch 2 in 2 processes"


def test_missing_data_has_a_reason(tmp_path: Path) -> None:
    reader = HookReader(tmp_path, devices=1, now_s=0.0)
    assert "no Python process of the job" in reader.status()
    (tmp_path / "loaded").touch()
    assert "has loaded torch or Keras" in reader.status()
    write_state(tmp_path, make_state(), pid=os.getpid())
    reader.poll()
    assert reader.status() == "not recorded: torch 2 was loaded, but no optimizer has stepped"
    (tmp_path / "errors-1").write_text("step: ValueError: x\n")
    assert reader.status().endswith("; errors: step: ValueError: x")
    (tmp_path / "half.state").write_bytes(b'{"pid": 1')
    assert read_hook_state(tmp_path / "half.state") is None


def test_the_folder_of_state_files_is_removed_with_the_watcher() -> None:
    with hook_state_dir(False) as none:
        assert none is None
    with hook_state_dir(True) as folder:
        assert folder is not None
        assert folder.is_dir()
        assert add_hook_env({"PYTHONPATH": "/x", "A": "b"}, folder)["PYTHONPATH"].endswith("/hook:/x")
        assert ":" not in add_hook_env({}, folder)["PYTHONPATH"]  # an empty entry would be the current folder
    assert not folder.exists()


def test_hostile_files_next_to_the_states_are_bounded_or_skipped(tmp_path: Path) -> None:
    good = make_state(steps=3.0, compute=3.0, batches=3.0)
    write_state(tmp_path, dataclasses.replace(good, name="good.state"), pid=os.getpid())
    data = (tmp_path / "good.state").read_bytes()
    for kind in ("zero", "fifo", "folder"):
        for suffix in ("state", "trace"):
            replace_by(kind, tmp_path / f"1-{kind}.{suffix}", size_bytes=0)
        replace_by(kind, tmp_path / f"errors-{kind}", size_bytes=0)
    replace_by("sparse", tmp_path / "1-a.state", size_bytes=20 << 30)
    replace_by("sparse", tmp_path / "1-a.trace", size_bytes=20 << 30)
    replace_by("sparse", tmp_path / "errors-a", size_bytes=20 << 30)
    (tmp_path / "header.state").write_bytes(data)
    os.truncate(tmp_path / "header.state", 20 << 30)
    for number, change in enumerate((b'"x"', b"-1", b"1e400", b"null", b"9" * 400)):
        (tmp_path / f"{number}-pid.state").write_bytes(data.replace(str(os.getpid()).encode(), change, 1))
    for number, value in enumerate((float("nan"), float("inf"), 1e300, -1e300)):
        for slot in range(len(hook.SLOTS)):
            at = hook.HEADER_BYTES + 8 * slot
            (tmp_path / f"{number}-{slot}.state").write_bytes(data[:at] + struct.pack("d", value) + data[at + 8 :])
    reader = HookReader(tmp_path, devices=1, now_s=BEGIN_S)
    with bounded(seconds=60, megabytes=200):
        reader.poll()
        windows = reader.next_windows(BEGIN_S + 10, 10.0)
        assert "errors-zero" in reader.status()
    assert windows[0].step == 3


def test_special_files_with_the_name_of_a_state_folder_do_not_stop_a_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = time.time() - 3600
    os.mkfifo(tmp_path / "a-fifo")
    (tmp_path / "a-link").symlink_to("/dev/zero")
    kept = tmp_path / "a-other"
    for folder in (tmp_path / "a-left", kept):
        folder.mkdir()
        (folder / "x.state").write_bytes(b"x")
    for path in tmp_path.iterdir():
        os.utime(path, (old, old), follow_symlinks=False)
    with bounded(seconds=60), temporary_folder("a-", tmp_path) as first:
        os.utime(first, (old, old))
        assert not (tmp_path / "a-left").exists()
        with temporary_folder("a-", tmp_path):
            assert first.is_dir()  # its process lives
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-fifo", "a-link"]
    kept.mkdir()
    os.utime(kept, (old, old))
    monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    with temporary_folder("a-", tmp_path):
        assert kept.is_dir()  # of another user


def test_a_file_system_without_locks_has_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folder("a-", tmp_path) as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_what_the_hook_wrote_of_growing_memory_is_read(tmp_path: Path) -> None:
    """As its own function writes it; the newest process counts, and a damaged file is left out."""
    row = growth._describe("train.py:main", "losses", [1.0] * 70, 10, 70)
    for number, name in enumerate(("old", "losses")):
        path = tmp_path / f"{number}.growth"
        path.write_text(json.dumps([{**row, "name": name, "seconds": 60.0, "line": 3, "grown": 10**6}]))
        os.utime(path, (number + 1, number + 1))
    (tmp_path / "2.growth").write_text("[{")
    (found,) = HookReader(tmp_path, devices=1, now_s=0.0).growing()
    assert "losses" in found["text"]
    assert found["graph"] is False


def test_a_trace_is_read_without_numpy() -> None:
    """The watcher is charged to the job: numpy alone would cost it 0.2 CPU-seconds."""
    code = (
        "import sys\n"
        "from stoker_watch.watch.hook_reader import input_wait_s\n"
        "assert input_wait_s(b'') == 0\n"
        "assert 'google.protobuf' in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_process_that_replaces_itself_by_another_program_is_followed(tmp_path: Path) -> None:
    """exec keeps the PID and runs no exit handler: the first file stays as it was."""
    begin_s = time.monotonic()
    reader = HookReader(tmp_path, devices=1, now_s=begin_s)
    write_state(tmp_path, make_state("1-a.state", begin_s=begin_s, compute=5.0, steps=10.0), pid=os.getpid())
    reader.poll()
    assert reader.next_windows(begin_s + 5, 5.0)[0].step == 10
    write_state(tmp_path, make_state("1-b.state", begin_s=begin_s + 6, compute=2.0, steps=3.0), pid=os.getpid())
    reader.poll()
    after = reader.next_windows(begin_s + 10, 5.0)[0]
    assert (after.step, after.window_steps) == (13, 3)


def test_the_steps_of_an_ended_process_are_not_counted_again_when_another_has_its_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_s = time.monotonic()
    reader = HookReader(tmp_path, devices=1, now_s=begin_s)
    write_state(tmp_path, make_state(begin_s=begin_s, compute=5.0, steps=100.0), pid=os.getpid())
    lives = hook_reader.read_life
    steps = []
    for second, life in enumerate((lives, lambda _: None, lives, lives), start=5):
        monkeypatch.setattr(hook_reader, "read_life", life)
        reader.poll()
        steps.append(reader.next_windows(begin_s + second, 1.0)[0].step)
    assert steps == [100] * 4
    assert reader.training_ranks == {}


def test_the_file_of_an_ended_process_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that starts thousands of short trainings leaves as many."""
    begin_s = time.monotonic()
    reader = HookReader(tmp_path, devices=1, now_s=begin_s)
    for number in range(5):
        ended = make_state(f"{number}.state", begin_s=begin_s, compute=1.0, steps=1.0)
        write_state(tmp_path, dataclasses.replace(ended, values={**ended.values, "ended": 1.0}), pid=os.getpid())
    reader.poll()
    monkeypatch.setattr(hook_reader, "read_hook_state", lambda path: pytest.fail(f"{path.name} is read again"))
    reader.poll()


FORGED = [
    "", "[", "{}", "[{}]", "[5]", "[" * 60_000, '[{"kind":5}]', '[{"kind":{"a":[1]}}]', '[{"kind":"x","place":null}]',
    '[{"file":5,"name":[],"items":1,"type":2,"before":"x"}]',
    json.dumps([{**growth._describe("/dev/zero:main", "losses", [1.0] * 70, 10, 70), "seconds": 1e300, "grown": 1}]),
    json.dumps([{"kind": f"{number}", "place": "a.py:1"} for number in range(2000)]),
]  # fmt: skip


@pytest.mark.parametrize("text", FORGED, ids=lambda text: text[:20])
@pytest.mark.parametrize("ending", [".growth", ".mistakes", ".exit", ".trace"])
def test_a_forged_report_does_not_end_the_record_of_the_steps(tmp_path: Path, ending: str, text: str) -> None:
    state_dir, run = tmp_path / "state", tmp_path / "run"
    for folder in (state_dir, run):
        folder.mkdir()
    (run / "environment.json").write_text('{"gpu": {"gpus": []}}')
    write_state(state_dir, make_state(steps=3.0, compute=3.0, batches=3.0), pid=os.getpid())
    for number in range(300):
        (state_dir / f"{number}{ending}").write_text(text)
    folder = RunFolder(run, 1)
    recorder = JobRecorder(folder, ["python"], output=lambda: iter([]), hook_dir=state_dir)
    recorder._stop.set()
    with bounded(seconds=20, megabytes=256):
        recorder._thread_main()
        recorder.write_end(1)
    folder.close()
    assert [window.step for window in read_lines(run, STEPS, StepWindow)] == [3]
    events = list(read_lines(run, EVENTS, Event))
    assert not [event.text for event in events if "steps.jsonl ends here" in event.text or "damaged" in event.data]


def test_any_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_STATES", "MAX_RANKS", "MAX_REPORTS"):
        monkeypatch.setattr(hook_reader, name, {"MAX_STATES": 30, "MAX_RANKS": 5, "MAX_REPORTS": 7}[name])
    for number in range(60):
        state = make_state(f"{number}.state", rank=float(number), steps=1.0, compute=1.0)
        write_state(tmp_path, state, pid=4_000_000 + number)
        (tmp_path / f"errors-{number}").write_text("".join(f"{number} {line}\n" for line in range(3000)))
    (tmp_path / "1-1.trace").write_bytes(b"1.0\n" + b'"\0' * (8 << 20))
    (tmp_path / "1-2.trace").write_bytes(b"1.0\n" + b'"\0' * (32 << 20))
    reader = HookReader(tmp_path, devices=1, now_s=0.0)
    with bounded(seconds=20, megabytes=700):
        for _ in range(3):
            reader.poll()
    assert len(reader._states) == 30
    assert len(reader.next_windows(10.0, 10.0)) == 5
    assert reader.status().count("; ") == 7 * hook_reader.MAX_FAILURES
    assert not list(tmp_path.glob("*.trace"))


def test_a_link_to_another_folder_in_place_of_the_states_is_not_followed(tmp_path: Path) -> None:
    state_dir, other = tmp_path / "state", tmp_path / "other"
    state_dir.mkdir()
    other.mkdir()
    for name in ("1.state", "1-1.trace", "errors-1", "1.exit"):
        (other / name).write_text("secret")
    reader = HookReader(state_dir, devices=1, now_s=0.0)
    state_dir.rename(tmp_path / "moved")
    state_dir.symlink_to(other)
    (tmp_path / "moved" / "errors-2").symlink_to(other / "errors-1")
    reader.poll()
    assert "secret" not in reader.status()
    assert reader.handled_error(1) == []
    assert len(list(other.iterdir())) == 4


def test_a_state_file_is_read_only_for_all_but_its_process(tmp_path: Path) -> None:
    """Who truncates a file ends the processes that have mapped it."""
    clock = hook.PhaseClock(str(tmp_path))
    clock.publish("torch 2")
    (path,) = tmp_path.glob("*.state")
    assert path.stat().st_mode & 0o777 == 0o400
    clock.update()
    path.unlink()
    clock.update()
    assert clock.enabled
