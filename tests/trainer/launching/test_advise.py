"""`stoker launch advise`: each rule at work, no change, what is refused, and figures that must agree."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.launching.advise import LaunchAdvice, advise, print_advice
from stoker.launching.jobs import remember
from stoker.launching.spec import Job
from stoker_watch.cli.app import app
from stoker_watch.errors import UsageError
from tests.fixtures.launching_advise import make_run
from tests.watch.report.runs import write_run


def by_kind(advice: LaunchAdvice) -> dict[str, Any]:
    return {change.id: change for change in advice.changes}


def test_devices_that_the_loader_cannot_feed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"compute": 0.6, "input_wait": 0.4}, devices=4, busy=0.6, used_cores=11.5)
    advice = advise(run)
    assert (advice.now.devices, advice.now.img_per_s, advice.now.price_per_hour) == (4, 40.0, 12.0)
    change = by_kind(advice)["fewer_devices"]
    assert (change.after.devices, change.after.img_per_s, change.after.price_per_hour) == (3, 40.0, 9.0)
    assert change.relative_cost == pytest.approx(0.75)
    assert change.flags == {"devices": "3"}
    assert change.command == f"stoker launch local --resume {run} --devices 3"
    assert "input_wait 40 % of the training time" in [evidence.text for evidence in change.evidence]


def test_waiting_for_input_with_free_cores_is_no_matter_of_devices(tmp_path: Path) -> None:
    advice = advise(make_run(tmp_path / "run", {"compute": 0.6, "input_wait": 0.4}, devices=4, used_cores=4.0))
    assert advice.changes == []
    assert "they wait for input" in advice.summary


def test_communication(tmp_path: Path) -> None:
    (fewer,) = advise(
        make_run(tmp_path / "run", {"compute": 0.6, "comm": 0.4}, devices=4, busy=0.6, memory=0.4)
    ).changes
    assert (fewer.id, fewer.after.devices) == ("fewer_devices", 2)
    assert fewer.after.img_per_s == pytest.approx(40 / 1.6)
    (fewer,) = advise(make_run(tmp_path / "full", {"compute": 0.6, "comm": 0.4}, devices=2, memory=0.8)).changes
    assert fewer.after.img_per_s == pytest.approx(40 / 1.2)


def test_a_job_too_small_for_its_gpu_is_no_matter_of_devices(tmp_path: Path) -> None:
    advice = advise(make_run(tmp_path / "run", {"compute": 0.8, "host": 0.2}, busy=0.1, memory=0.1))
    assert advice.changes == []
    assert "no change of devices: most time is lost in host" in advice.summary


def test_a_deadline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"compute": 0.95, "host": 0.05}, gpu="NVIDIA Unknown")
    left_s = (10_000 - 200) * 48 / 40
    (change,) = advise(run, by_s=left_s / 2).changes
    assert (change.id, change.flags) == ("more_devices", {"devices": "3"})  # 2 / 0.9
    assert change.after.img_per_s >= 80
    (change,) = advise(run, by_s=left_s / 12).changes
    assert change.flags == {"devices": "8", "nodes": "2"}, "14 get no equal parts of 48 images"
    advice = advise(run, by_s=2 * left_s)
    assert advice.changes == []
    assert "ends before the deadline" in advice.summary


def test_devices_that_cannot_share_the_batch_are_not_proposed(tmp_path: Path) -> None:
    """Three would do in both cases; the batch is 16."""
    waits = make_run(
        tmp_path / "waits", {"compute": 0.6, "input_wait": 0.4}, devices=4, busy=0.6, used_cores=11.5, batch_size=16
    )
    assert advise(waits).changes == []
    late = make_run(tmp_path / "late", {"compute": 0.95, "host": 0.05}, gpu="NVIDIA Unknown", batch_size=16)
    (change,) = advise(late, by_s=(10_000 - 200) * 16 / 40 / 2).changes
    assert change.flags == {"devices": "4"}


def test_several_nodes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"compute": 0.5, "comm": 0.5}, devices=8, gpus=4, memory=0.9)
    assert advise(run).changes[0].flags == {"devices": "4", "nodes": "1"}
    run = make_run(tmp_path / "large", {"compute": 0.5, "comm": 0.5}, devices=16, gpus=4, memory=0.9)
    assert advise(run).changes[0].flags == {"devices": "4", "nodes": "2"}


def test_a_cheaper_run_that_would_miss_the_deadline_is_not_proposed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"compute": 0.6, "comm": 0.4}, devices=4, memory=0.9)
    left_s = (10_000 - 200) * 48 / 40
    assert by_kind(advise(run, by_s=1.1 * left_s)) == {}
    assert list(by_kind(advise(run, by_s=2 * left_s))) == ["fewer_devices"]


def test_a_run_that_computes_all_the_time_stays_as_it_is(tmp_path: Path) -> None:
    advice = advise(make_run(tmp_path / "run", {"compute": 0.97, "host": 0.03}, gpu="NVIDIA Unknown"))
    assert advice.changes == []
    assert "no change: the devices compute 97 % of the training time" in advice.summary


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too short"):
        advise(write_run(tmp_path / "short", phases={"compute": 10.0}, samples=60, gpu={"utilization": 0.5}))
    with pytest.raises(UsageError):
        advise(tmp_path / "absent")


@pytest.mark.parametrize(("end", "what", "fix"), [
    ("finished", "The run is finished, and was too short", "start a new one that trains for longer"),
    ("preempted", "The run is too short", "let it train for 1 min 00 s"),
])  # fmt: skip
def test_a_finished_run_cannot_be_let_train(end: str, what: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        advise(write_run(tmp_path / "short", phases={"compute": 10.0}, end=end))
    assert what in str(refused.value)
    assert f"fix:    {fix}" in str(refused.value)


def test_the_command_cancels_the_job_and_continues_at_its_place(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"compute": 0.6, "input_wait": 0.4}, devices=4, used_cores=11.5)
    remember(Job(place="slurm", id="7", name="stoker-run", run=str(run), t=0.0, options={"partition": "spare"}))
    command = by_kind(advise(run))["fewer_devices"].command
    assert command == f"stoker launch cancel {run} && stoker launch slurm --resume {run} --partition spare --devices 3"


@given(
    fractions=st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    devices=st.sampled_from([1, 2, 4, 8]),
    busy=st.floats(0.0, 1.0),
    memory=st.floats(0.01, 1.0),
    used_cores=st.floats(0.0, 12.0),
    by_s=st.none() | st.floats(1.0, 1e5),
)
def test_figures_agree(
    fractions: list[float],
    devices: int,
    busy: float,
    memory: float,
    used_cores: float,
    by_s: float | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    phases = dict(zip(("compute", "input_wait", "comm", "host"), (f / sum(fractions) for f in fractions), strict=True))
    run = make_run(
        tmp_path_factory.mktemp("any") / "run", phases, devices=devices, busy=busy, memory=memory, used_cores=used_cores
    )
    advice = advise(run, by_s=by_s)
    assert advice.summary.startswith("no change") == (not advice.changes)
    for change in advice.changes:
        before, after = advice.now, change.after
        assert after.img_per_s > 0
        assert change.evidence
        assert before.price_per_hour is not None
        assert after.price_per_hour is not None
        image_cost = after.price_per_hour / after.img_per_s / (before.price_per_hour / before.img_per_s)
        assert change.relative_cost == pytest.approx(image_cost)
        assert change.relative_cost < 1 or after.img_per_s > before.img_per_s


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(
        tmp_path / "run", {"compute": 0.6, "input_wait": 0.4}, devices=4, gpu="NVIDIA Unknown", used_cores=11.5
    )
    text = io.StringIO()
    print_advice(advise(run), text, width=120)
    assert "3 devices instead of 4: the loader feeds no more" in text.getvalue()
    assert f"stoker launch local --resume {run} --devices 3" in text.getvalue()
    app(["launch", "advise", str(run), "--by", "2h", "--json"], result_action="return_value")
    document = json.loads(capsys.readouterr().out)
    assert document["now"]["devices"] == 4
