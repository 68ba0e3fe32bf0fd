"""What the lines of a job add up to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.watch.output import MAX_FIRST_STEP, Progress, ProgressWindows, parse_progress


def after(*lines: str) -> ProgressWindows:
    meter = ProgressWindows(attempt=1, devices=1, start_s=100.0)
    for line in lines:
        found = parse_progress(line)
        assert found is not None, line
        meter.add(found)
    return meter


def test_epochs_add_up_however_they_are_counted() -> None:
    restarting = [
        f"Epoch: [{epoch}]  [ {step}/12]  eta: 0:00:01  loss: 1.0 (1.0)" for epoch in (0, 1) for step in (0, 10)
    ]
    assert after(*restarting).step == 12 + 11
    on = [f"epoch {epoch} step {step} loss: 0.5" for epoch, step in ((0, 10), (0, 20), (1, 30), (1, 40))]
    assert after(*on).step == 40
    bars = ["Epoch 1/2", "30/30 ━━━━ 1s 20ms/step - loss: 1.1", "Epoch 2/2", "4/30 ━━━━ 1s 20ms/step - loss: 1.1"]
    assert after(*bars).step == 34


def test_lines_that_come_twice_or_late_count_once() -> None:
    twice = ["Step 100 per-step time 0.5s", "Step 100 per-step time 0.5s", "Step 200 per-step time 0.5s"]
    assert after(*twice, "Step 200 per-step time 0.5s").window(200.0).window_steps == 200
    ranks = [
        "epoch 0 step 9 loss: 1.0",
        "epoch 1 step 1 loss: 1.0",
        "epoch 0 step 9 loss: 1.0",
        "epoch 1 step 2 loss: 1.0",
    ]
    assert after(*ranks).step == 11


def test_a_job_that_continues_does_not_begin_at_zero() -> None:
    window = after(f"step {MAX_FIRST_STEP + 900} loss: 1.0", f"step {MAX_FIRST_STEP + 910} loss: 3.0").window(110.0)
    assert (window.step, window.window_steps, window.losses) == (MAX_FIRST_STEP + 910, 11, {"total": 2.0})


def test_bars_count_when_a_loss_says_that_they_train() -> None:
    assert after("100%|███| 7/7 [00:01<00:00,  7.00it/s]").step == 0
    hugging = ["  5%|▌  | 5/100 [00:10<03:10,  2.00s/it]", "{'loss': 0.5}", "100%|███| 7/7 [00:01<00:00,  7.00it/s]"]
    assert after(*hugging).step == 5
    assert after(*hugging, "  9%|▌  | 9/100 [00:10<03:10,  2.00s/it]").step == 9
    assert after(*hugging, "{'loss': 0.5}").step == 5, "the bar of 7 is of an evaluation inside the training"
    whole = [*hugging, "100%|███| 100/100 [00:10<03:10,  2.00s/it]"]
    assert after(*whole, " 10%|▌  | 1/10 [00:10<03:10,  2.00s/it]", "{'loss': 0.5}").step == 101, "another training"


def test_a_line_without_a_loss_adds_none() -> None:
    assert after("Epoch 1/2", "4/30 ━━━━ 1s 20ms/step - loss: 2.0", "Epoch 2/2").window(9.0).losses == {"total": 2.0}


def test_the_header_names_the_losses() -> None:
    window = after(
        "Epoch  GPU_mem  box_loss  cls_loss  Instances  Size", "1/2  0G  1.5  2.5  16  320: 100% ━━━ 6/6 1.0it/s 5.8s"
    )
    assert window.window(101.0).losses == {"box_loss": 1.5, "cls_loss": 2.5, "total": 4.0}


def test_the_wait_for_images_is_input_wait_if_the_job_prints_it() -> None:
    meter = after("Epoch: [0]  [ 9/12]  eta: 0:00:01  loss: 1.0 (1.0)  img/s: 8.0  time: 0.4  data: 0.3")
    window = meter.window(104.0)
    assert window.phases == pytest.approx({"input_wait": 3.0, "unattributed": 1.0})
    assert window.num_images == 32
    assert meter.window(106.0).phases == {"unattributed": 2.0}  # no steps: nothing is known of this one


def test_losses_that_are_not_finite_are_noted_and_not_averaged() -> None:
    meter = after("step 1 loss: nan", "step 2 loss: 0.5")
    assert meter.non_finite_loss == "total is nan"
    assert meter.window(101.0).losses == {"total": 0.5}


@given(st.lists(st.builds(Progress, step=st.none() | st.integers(0, 50), total_steps=st.none() | st.integers(1, 50),
                          epoch=st.none() | st.integers(0, 5), is_bare_bar=st.booleans(),
                          step_s=st.none() | st.floats(0, 9), input_wait_s=st.none() | st.floats(0, 9))))  # fmt: skip
def test_windows_are_consistent_for_any_progress(said: list[Progress]) -> None:
    meter, now_s, total, first = ProgressWindows(attempt=1, devices=2, start_s=0.0), 0.0, 0, 0
    for progress in said:
        meter.add(progress)
        now_s += 1.5
        window = meter.window(now_s)
        assert sum(window.phases.values()) == pytest.approx(window.wall_s * 2)
        assert window.window_steps >= 0
        first = window.step - window.window_steps if not total and window.window_steps else first
        total += window.window_steps
    assert not total or total == meter.step - first
