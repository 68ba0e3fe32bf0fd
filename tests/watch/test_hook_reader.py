"""Cells in, phases of each rank out."""

import json
import os
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.runs.records import PHASES
from stoker.watch.hook.stoker_hook import clock as hook
from stoker.watch.hook_reader import HookReader, RankTimeBreakdown, add_hook_env, hook_state_dir
from stoker.watch.hook_state import SLOT_PHASES, HookState, cpu_by_phase, phase_seconds, read_hook_state

BEGIN_S = 1000.0


def cell(
    name: str = "1.state",
    *,
    running: str = "compute",
    begin_s: float = BEGIN_S,
    cpu: dict[str, float] | None = None,
    **values: float,
) -> HookState:
    """A process of which `values` are known; its last mark follows from them."""
    unknown = {"rank": -1.0, "lr": -1.0, "workers": -1.0}
    filled = dict.fromkeys(hook.SLOTS, 0.0) | unknown | {"begin": begin_s} | values
    seconds = sum(filled[slot] for slot in (*SLOT_PHASES, "graph"))
    filled |= {"last_update": begin_s + seconds, "current_slot": float(hook.SLOTS.index(running))}
    share = filled.pop("share", None)
    computed = dict.fromkeys(hook.SLOTS[hook.STARTUP :], 0.0) | (cpu or {})
    return HookState(
        name=name, pid=1, frameworks=("torch 2",), slots=hook.SLOTS, values=filled, cpu=computed, input_fraction=share
    )


def written(folder: Path, one: HookState, *, pid: int) -> None:
    head = {"pid": pid, "frameworks": one.frameworks, "slots": one.slots}
    doubles = [*(one.values[slot] for slot in one.slots), *(one.cpu[slot] for slot in one.slots[hook.STARTUP :])]
    values = struct.pack(f"{len(doubles)}d", *doubles)
    (folder / one.name).write_bytes(json.dumps(head).encode().ljust(hook.HEADER_BYTES) + values)


def test_every_slot_of_time_is_a_phase() -> None:
    assert {*SLOT_PHASES, "graph"} == set(hook.SLOTS[hook.STARTUP :])
    assert set(SLOT_PHASES.values()) <= set(PHASES)


def test_what_runs_since_the_last_mark_is_still_running() -> None:
    one = cell(running="input_wait", compute=3.0, input_wait=1.0, batches=1.0, maybe_work=0.5)
    assert phase_seconds(one, BEGIN_S + 6.5)["input_wait"] == pytest.approx(3.0)
    assert phase_seconds(one, None)["input_wait"] == 1.0
    assert phase_seconds(one, None)["compute"] == 3.5


def test_without_a_loader_nobody_knows_what_is_done_between_steps() -> None:
    assert phase_seconds(cell(work=3.0, after_step=1.0), None)["unattributed"] == 4.0
    assert phase_seconds(cell(compute=3.0, after_step=1.0, batches=1.0), None)["host"] == 1.0


def test_a_graph_is_split_as_the_profiler_saw_it_and_unknown_before() -> None:
    assert phase_seconds(cell(graph=10.0), None)["unattributed"] == 10.0
    split = phase_seconds(cell(graph=10.0, share=0.9), None)
    assert (split["input_wait"], split["compute"]) == (pytest.approx(9.0), pytest.approx(1.0))


def test_a_wait_that_the_queue_of_the_device_outlasts_costs_nothing() -> None:
    host = {"input_wait": 4.0, "compute": 5.0, "after_step": 1.0, "eval": 2.0, "batches": 9.0, "device": 1.0}
    idle = phase_seconds(cell(**host, busy=5.0), None)
    assert (idle["compute"], idle["input_wait"], idle["host"], idle["eval"]) == (5.0, 4.0, 1.0, 2.0)
    hidden = phase_seconds(cell(**host, busy=9.0, device_comm=2.0), None)
    assert (hidden["compute"], hidden["comm"], hidden["input_wait"]) == (7.0, 2.0, 1.0)
    waiting = phase_seconds(cell(**host, busy=5.0, steps=9.0, syncs=9.0), None)
    assert waiting["sync"] == 1.0


def test_processor_time_is_the_thread_s_own_also_where_a_device_computes() -> None:
    cpu = {"input_wait": 3.0, "compute": 2.0, "after_step": 0.5, "graph": 4.0}
    assert {name: value for name, value in cpu_by_phase(cell(cpu=cpu, batches=1.0, share=0.25)).items() if value} == {
        "input_wait": 4.0, "compute": 5.0, "host": 0.5,
    }  # fmt: skip
    device = cell(cpu=cpu, batches=1.0, device=1.0, busy=9.0)
    assert {name: value for name, value in cpu_by_phase(device).items() if value} == {
        "input_wait": 3.0, "host": 2.5, "unattributed": 4.0,
    }  # fmt: skip


def test_how_many_processes_load_is_what_a_training_process_says(tmp_path: Path) -> None:
    inside = HookReader(tmp_path, devices=1, now_s=0.0)
    for values in ({"workers": 4.0}, {"steps": 1.0}):
        written(tmp_path, cell(**values), pid=os.getpid())
        inside.poll()
        assert inside.num_loader_workers() is None
    written(tmp_path, cell(steps=1.0, workers=0.0), pid=os.getpid())
    inside.poll()
    assert inside.num_loader_workers() == 0


seconds = st.floats(0.0, 100.0)


@given(st.dictionaries(st.sampled_from([*SLOT_PHASES, "graph"]), seconds), seconds, seconds, st.booleans(), seconds)
def test_phases_add_up_to_the_time(slots: dict[str, float], busy: float, comm: float, device: bool, on: float) -> None:
    one = cell(**slots, busy=busy, device_comm=comm, device=float(device), batches=1.0)
    now_s = one.values["last_update"] + on
    phases = phase_seconds(one, now_s)
    assert min(phases.values()) >= 0
    assert sum(phases.values()) == pytest.approx(now_s - BEGIN_S)


moves = st.lists(st.tuples(st.sampled_from(sorted(SLOT_PHASES)), st.floats(0.01, 5.0), st.booleans()), min_size=1)


@given(moves)
def test_windows_add_up_also_when_what_was_said_is_corrected(done: list[tuple[str, float, bool]]) -> None:
    account, total_s, computed_s, phases = RankTimeBreakdown(BEGIN_S), 0.0, 0.0, dict.fromkeys(PHASES, 0.0)
    values: dict[str, float] = {"batches": 1.0, "steps": 1.0}
    for slot, took_s, corrected in done:
        values[slot] = values.get(slot, 0.0) + took_s
        if corrected:  # what may have been training was evaluation
            values["eval"] = values.get("eval", 0.0) + values.pop("maybe_work", 0.0)
        total_s += took_s
        cpu = {slot: seconds / 2 for slot, seconds in values.items() if slot in SLOT_PHASES}
        account.update([cell(cpu=cpu, **values)], [], BEGIN_S + total_s)
        seen = account.next_window(BEGIN_S + total_s, took_s, rank=0, devices=2)
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
    account = RankTimeBreakdown(BEGIN_S)
    first = cell("a", compute=4.0, batches=1.0, steps=4.0, num_images=8.0)
    helper = cell("h", startup=9.0, begin_s=BEGIN_S - 5.0)
    account.update([helper, first], [], BEGIN_S + 4.0)
    assert account.next_window(BEGIN_S + 4.0, 4.0, rank=0, devices=1).phases == {"compute": 4.0}
    account.update([helper], [first], BEGIN_S + 5.0)
    assert account.next_window(BEGIN_S + 6.0, 2.0, rank=0, devices=1).phases == {"unattributed": 2.0}
    second = cell("b", begin_s=BEGIN_S + 6.0, running="startup", startup=1.0)
    account.update([helper, second], [first], BEGIN_S + 7.0)
    assert account.next_window(BEGIN_S + 7.0, 1.0, rank=0, devices=1).phases == pytest.approx({"startup": 1.0})
    assert account.steps == 4


def test_a_process_that_was_killed_was_in_its_last_phase_until_then() -> None:
    account = RankTimeBreakdown(BEGIN_S)
    hung = cell(running="comm", compute=1.0, comm=1.0, batches=1.0, steps=1.0)
    account.update([hung], [], BEGIN_S + 9.0)
    account.update([], [hung], BEGIN_S + 10.0)
    assert account.next_window(BEGIN_S + 10.0, 10.0, rank=0, devices=1).phases == pytest.approx(
        {"compute": 1.0, "comm": 8.0, "unattributed": 1.0}
    )


def test_ranks_share_the_devices_from_their_first_step_on(tmp_path: Path) -> None:
    now_s = time.monotonic()
    inside = HookReader(tmp_path, devices=4, now_s=now_s)
    for rank in (0, 1):
        starts = cell(f"{rank}.state", running="startup", begin_s=now_s, rank=float(rank), world=2.0)
        written(tmp_path, starts, pid=os.getpid())
    inside.poll()
    (alone,) = inside.next_windows(now_s + 2.0, 2.0)
    assert (alone.rank, alone.devices, alone.phases) == (0, 4, {"startup": 8.0})
    for rank in (0, 1):
        steps = cell(f"{rank}.state", begin_s=now_s, startup=2.0, compute=1.0, rank=float(rank), steps=3.0, batches=3.0)
        written(tmp_path, steps, pid=os.getpid())
    inside.poll()
    assert [(one.rank, one.devices, one.steps) for one in inside.next_windows(now_s + 3.0, 1.0)] == [
        (0, 2, 3),
        (1, 2, 3),
    ]
    assert inside.status() == "recorded: torch 2 in 2 processes"


def test_what_is_missing_is_said_with_its_reason(tmp_path: Path) -> None:
    inside = HookReader(tmp_path, devices=1, now_s=0.0)
    assert "no Python process of the job" in inside.status()
    (tmp_path / "loaded").touch()
    assert "has loaded torch or Keras" in inside.status()
    written(tmp_path, cell(), pid=os.getpid())
    inside.poll()
    assert inside.status() == "not recorded: torch 2 was loaded, but no optimizer has stepped"
    (tmp_path / "errors-1").write_text("step: ValueError: x\n")
    assert inside.status().endswith("; errors: step: ValueError: x")
    (tmp_path / "half.state").write_bytes(b'{"pid": 1')
    assert read_hook_state(tmp_path / "half.state") is None


def test_the_folder_of_the_cells_goes_with_the_watcher() -> None:
    with hook_state_dir(False) as none:
        assert none is None
    with hook_state_dir(True) as folder:
        assert folder is not None
        assert folder.is_dir()
        assert add_hook_env({"PYTHONPATH": "/x", "A": "b"}, folder)["PYTHONPATH"].endswith("/hook:/x")
        assert ":" not in add_hook_env({}, folder)["PYTHONPATH"]  # an empty entry would be the current folder
    assert not folder.exists()
