"""The hook's events on a device that is not there."""

import pytest

from stoker_watch.recording.hook.stoker_hook import torch_loop
from stoker_watch.recording.hook.stoker_hook.clock import BUSY


class Event:
    """Done at once; an event of a stream that records a graph may not be recorded or asked for."""

    capturing = False

    def record(self) -> None:
        assert not Event.capturing

    def query(self) -> bool:
        assert not Event.capturing
        return True

    def elapsed_time(self, other: "Event") -> float:
        assert self is not other
        return 20.0


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {BUSY: 0.0}
    monkeypatch.setattr(torch_loop.clock, "values", values)
    monkeypatch.setattr(Event, "capturing", False)
    events = torch_loop.DeviceEvents(Event, lambda: Event.capturing)
    for capturing in (False, True, True, False):
        Event.capturing = capturing
        events.begin(BUSY)
        events.end(BUSY)
    events.begin(BUSY)
    Event.capturing = True
    events.end(BUSY)  # the step of the capture
    Event.capturing = False
    events.end(BUSY)
    assert values[BUSY] == pytest.approx(3 * 0.02)


@pytest.mark.parametrize(
    ("variables", "world_size", "is_one"),
    [
        ({"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 4, True),  # mp.spawn in a task
        ({"SLURM_LOCALID": "0"}, 4, True),  # and in a batch script
        ({"RANK": "0"}, 4, False),
        ({"SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}, 4, False),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "LOCAL_RANK": "3"}, 8, False),  # torchrun in each task
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "1"}, 4, False),
    ],
)
def test_ranks_that_one_task_of_slurm_has_started_have_their_own_numbers(
    variables: dict[str, str], world_size: int, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert torch_loop._task_has_several_ranks(world_size) is is_one
