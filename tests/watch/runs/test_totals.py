"""What a run of several processes took: the sums of all ranks, and who waited for whom."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_watch.diagnosis.reader import read_run
from stoker_watch.runs.records import EVENTS, RANKS, STEPS
from stoker_watch.runs.schemas import Event, StepWindow
from stoker_watch.runs.totals import Totals, list_rank_dirs

T0 = 1_790_000_000.0


def line(end_s: float, wall_s: float = 1.0, *, attempt: int = 1, devices: int = 1, steps: int = 2, step: int = 0,
         **phases: float) -> StepWindow:  # fmt: skip
    """Times in device-seconds; what is left of the window is `compute`."""
    rest = {"compute": wall_s * devices - sum(phases.values())}
    return StepWindow(t=T0 + end_s, attempt=attempt, step=step or int(end_s) * 2, window_steps=steps, num_images=steps
    * 8,                   wall_s=wall_s, devices=devices, phases=phases | rest)  # fmt: skip


def write(run: Path, ranks: dict[int, list[StepWindow]], attempts: int = 1) -> Totals:
    encode = msgspec.json.encode
    run.mkdir(parents=True, exist_ok=True)
    events = [Event(t=T0, attempt=n + 1, kind="resumed" if n else "started") for n in range(attempts)]
    (run / EVENTS).write_bytes(b"".join(encode(event) + b"\n" for event in events))
    for rank, lines in ranks.items():
        folder = run / RANKS / f"{rank:04d}" if rank else run
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STEPS).write_bytes(b"".join(encode(window) + b"\n" for window in lines))
    return read_run(run).totals


def test_devices_pictures_and_phases_of_all_ranks_are_summed_and_steps_are_those_of_one(tmp_path: Path) -> None:
    one = [line(n + 1, comm=0.2, input_wait=0.1) for n in range(40)]
    two = [line(n + 1.3, comm=0.2, eval=0.5) for n in range(40)]
    found = write(tmp_path, {0: one, 1: two})
    assert (found.devices, found.steps, found.step, found.num_images, found.wall_s) == (2, 80, 80, 1280, 40)
    assert found.device_s == 80
    assert found.phases == pytest.approx({"compute": 40, "comm": 16, "input_wait": 4, "eval": 20})
    assert found.straggler_s == {}


def test_what_the_others_wait_more_than_the_one_that_waits_least_is_a_straggler(tmp_path: Path) -> None:
    """Rank 2 computes 0.3 s longer in each second; its exchanges take 0.1 s, those of the others 0.4 s."""
    ranks = {rank: [line(n + 1 + rank / 7, comm=0.1 if rank == 2 else 0.4) for n in range(100)] for rank in range(4)}
    found = write(tmp_path, ranks)
    assert found.phases["straggler"] == pytest.approx(90, rel=0.02)
    assert found.phases["comm"] == pytest.approx(40, rel=0.05)
    assert max(found.straggler_s, key=lambda rank: found.straggler_s[rank]) == 2
    assert found.straggler_s[2] == pytest.approx(90, rel=0.02)
    assert sum(found.phases.values()) == pytest.approx(found.device_s)


def test_windows_that_have_a_step_more_or_less_are_no_stragglers(tmp_path: Path) -> None:
    """Both wait 0.3 s a second, in windows of which every second one has it all."""
    ranks = {rank: [line(n + 1, comm=0.6 * ((n + rank) % 2)) for n in range(100)] for rank in range(2)}
    assert write(tmp_path, ranks).phases.get("straggler", 0.0) < 0.01 * 60


def test_a_slow_rank_is_named_while_it_is_slow(tmp_path: Path) -> None:
    def lines(rank: int) -> list[StepWindow]:
        return [line(n + 1, comm=0.1 if rank == (0 if n < 100 else 1) else 0.3) for n in range(300)]

    found = write(tmp_path, {0: lines(0), 1: lines(1)})
    assert found.straggler_s == pytest.approx({0: 20, 1: 40}, rel=0.1)


def test_a_rank_that_wrote_nothing_or_half_a_line_is_no_reason_to_fail(tmp_path: Path) -> None:
    ranks = {rank: [line(n + 1, comm=0.4) for n in range(30)] for rank in range(3)}
    write(tmp_path, ranks)
    (tmp_path / RANKS / "0001" / STEPS).unlink()
    (tmp_path / RANKS / "0007").mkdir()
    (tmp_path / RANKS / "notes").mkdir()
    with (tmp_path / RANKS / "0002" / STEPS).open("ab") as file:
        file.write(b'{"t": 179')
    found = read_run(tmp_path).totals
    assert (found.device_s, found.devices) == (60, 2)
    assert "straggler" not in found.phases
    assert list(list_rank_dirs(tmp_path)) == [0, 1, 2, 7]


def test_a_rank_that_ended_early_makes_nobody_slow(tmp_path: Path) -> None:
    alone = [line(n + 1, comm=0.9) for n in range(100)]
    found = write(tmp_path, {0: alone, 1: [line(n + 1, comm=0.9) for n in range(22)]})
    assert found.phases.get("straggler", 0.0) == pytest.approx(0, abs=1)


def test_attempts_join_and_what_is_done_again_is_recovery_on_every_rank(tmp_path: Path) -> None:
    """Killed at step 20, gone on from 10 an hour later with three ranks instead of two."""
    again = {"recovery": 0.9, "comm": 0.1}
    ranks = {rank: [line(n + 1, comm=0.1) for n in range(10)] for rank in range(2)}
    for rank in range(3):
        later = [
            line(3_600 + n + 1, attempt=2, step=12 + 2 * n, **(again if n < 5 else {"comm": 0.1})) for n in range(10)
        ]
        ranks[rank] = ranks.get(rank, []) + later
    found = write(tmp_path, ranks, attempts=2)
    assert (found.attempts, found.devices, found.wall_s, found.device_s) == (2, 3, 20, 50)
    assert (found.steps, found.step) == (40, 30)
    assert found.phases == pytest.approx({"compute": 31.5, "recovery": 13.5, "comm": 5})


parts = st.lists(st.tuples(st.floats(0.1, 30), st.floats(0, 1), st.integers(1, 8)), max_size=12)


@settings(deadline=None, max_examples=60)
@given(courses=st.dictionaries(st.integers(0, 5), parts, min_size=1, max_size=4), starts=st.floats(0, 50))
def test_the_phases_always_add_up_and_who_waited_is_within_the_exchanges(
    tmp_path_factory: pytest.TempPathFactory, courses: dict[int, list[tuple[float, float, int]]], starts: float
) -> None:
    ranks: dict[int, list[StepWindow]] = {}
    for rank, course in courses.items():
        at_s = starts * rank
        for wall_s, share, devices in course:
            at_s += wall_s
            ranks.setdefault(rank, []).append(line(at_s, wall_s, devices=devices, comm=wall_s * devices * share))
    found = write(tmp_path_factory.mktemp("run"), ranks)
    said = sum(window.phases["comm"] for lines in ranks.values() for window in lines)
    assert sum(found.phases.values()) == pytest.approx(found.device_s, abs=1e-6)
    assert found.phases.get("comm", 0.0) + found.phases.get("straggler", 0.0) == pytest.approx(said, abs=1e-6)
    assert min(found.phases.values(), default=0.0) >= -1e-9
    assert set(found.straggler_s) <= set(ranks)
    assert min(found.straggler_s.values(), default=1.0) > 0
    assert len(ranks) > 1 or found.straggler_s == {}


@pytest.mark.parametrize(("own_s", "waited_s"), [(0.5, 25.2), (0.13, 3.0)])
def test_a_wait_inside_the_backward_pass_is_for_the_rank_with_work_of_its_own(
    tmp_path: Path, own_s: float, waited_s: float
) -> None:
    """All waiting is recorded as compute, as no hook sees it; the other rank has input_wait too."""
    ranks = {
        0: [line(n + 1, input_wait=0.08) for n in range(60)],
        1: [line(n + 1, input_wait=own_s) for n in range(60)],
    }
    found = write(tmp_path, ranks)
    assert found.straggler_s == pytest.approx({1: waited_s}, rel=0.05)
    assert found.phases["straggler"] == pytest.approx(waited_s, rel=0.05)
    assert sum(found.phases.values()) == pytest.approx(found.device_s)


def test_ranks_that_compute_for_different_times_without_own_work_are_not_guessed(tmp_path: Path) -> None:
    ranks = {0: [line(n + 1, comm=0.1) for n in range(60)], 1: [line(n + 1, comm=0.1, idle=0.4) for n in range(60)]}
    assert "straggler" not in write(tmp_path, ranks).phases
