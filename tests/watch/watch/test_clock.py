"""The clock of the hook: which time is whose."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker_watch.recording.hook.stoker_hook import clock as hook
from stoker_watch.recording.hook.stoker_hook import jax_loop, torch_loop
from stoker_watch.recording.hook.stoker_hook.clock import BatchSource
from stoker_watch.watch.hook_reader import read_hook_state
from tests.fixtures.watch_clock import Optimizer, Timed


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Timed:
    return Timed(monkeypatch, tmp_path)


def started(timed: Timed) -> BatchSource:
    """After the first step, which ends the start."""
    source = BatchSource()
    timed.takes(5.0)
    timed.batch(source)
    timed.step()
    assert timed.seconds() == {"startup": 8.0}
    return source


def test_wait_work_and_what_comes_after_the_step(timed: Timed) -> None:
    source = started(timed)
    timed.takes(0.5)
    timed.batch(source, waits=3.0, works=1.0)
    timed.step(works=2.0)
    timed.takes(0.25)
    assert timed.seconds() == {"startup": 8.0, "host": 0.5, "input_wait": 3.0, "compute": 3.0, "after_step": 0.25}
    assert (timed.count(hook.STEPS), timed.count(hook.BATCHES), timed.count(hook.IMAGES)) == (2, 2, 16)


def test_cpu_time_is_in_the_same_slots_as_the_time(timed: Timed) -> None:
    source, other = started(timed), BatchSource()
    timed.clock.begin_wait(source, False)
    timed.computes(3.0)  # decodes
    timed.takes(1.0)  # waits for the storage
    timed.clock.end_wait(source, 8)
    timed.computes(0.5)
    timed.step(works=2.0)
    timed.clock.begin_wait(other, False)
    timed.computes(4.0)
    timed.clock.end_wait(other, 8)
    timed.computes(1.0)
    assert timed.computed() == {"input_wait": 3.0, "compute": 0.5, "maybe_wait": 4.0, "maybe_work": 1.0}
    timed.end(other)  # no backward came: it was an evaluation
    assert timed.computed() == {"input_wait": 3.0, "compute": 0.5, "eval": 5.0}


def test_the_cpu_clock_of_another_thread_does_not_count(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    timed.clock.publish()
    timed.computes(5.0)
    monkeypatch.setattr(hook, "get_ident", lambda: -1)  # the first to step is another thread
    monkeypatch.setattr(hook, "thread_time", lambda: 100.0)
    timed.step()
    (path,) = timed._folder.glob("*.state")
    state = read_hook_state(path)
    assert state is not None
    assert sum(state.cpu.values()) == 0.0


def test_the_header_of_a_state_file_fits(timed: Timed) -> None:
    timed.clock._frameworks = ["torch 2.15.0.dev20261120+cu999", "keras 3.99.99 on tensorflow", "tensorflow 2.99.99"]
    timed.clock._recompiled = 80 * "f"
    assert len(timed.clock._header()) == hook.HEADER_BYTES
    assert 80 * "f" in timed.clock._header().decode()
    timed.clock._recompiled = 80 * "é"
    assert len(timed.clock._header()) == hook.HEADER_BYTES
    assert hook.HEADER_BYTES + 8 * len(timed.clock.values) <= hook.STATE_BYTES


def test_the_workers_are_those_of_the_loader_that_trains(timed: Timed) -> None:
    for workers, trains in ((3, True), (7, False), (-1, True)):
        source = BatchSource(workers)
        timed.batch(source)
        if trains:
            timed.step()
        else:
            timed.end(source)
        assert timed.count(hook.WORKERS) == 3


def test_accumulated_batches_are_one_step(timed: Timed) -> None:
    source = started(timed)
    for _ in range(4):
        timed.batch(source, works=1.0)
        timed.clock.confirm_training()
    timed.step(works=0.0)
    assert timed.seconds() == {"startup": 8.0, "input_wait": 4.0, "compute": 4.0}
    assert (timed.count(hook.STEPS), timed.count(hook.BATCHES)) == (2, 5)


def test_evaluation_is_a_loader_of_which_no_backward_comes(timed: Timed) -> None:
    source = started(timed)
    evaluation = BatchSource()
    for _ in range(5):
        timed.batch(evaluation, works=1.0)
    timed.end(evaluation)
    timed.takes(2.0)  # the scores
    timed.batch(source)
    timed.step()
    assert timed.seconds() == {"startup": 8.0, "eval": 12.0, "input_wait": 1.0, "compute": 2.0}
    assert timed.count(hook.BATCHES) == 2


def test_without_gradients_it_is_evaluation_at_once(timed: Timed) -> None:
    started(timed)
    timed.batch(BatchSource(), works=1.0, is_evaluating=True)
    assert timed.seconds() == {"startup": 8.0, "eval": 2.0}


def test_a_new_epoch_s_loader_that_fetches_ahead_is_training(timed: Timed) -> None:
    started(timed)
    ahead = BatchSource()
    timed.batch(ahead, waits=4.0)
    timed.batch(ahead)
    timed.step()
    assert timed.seconds() == {"startup": 8.0, "input_wait": 5.0, "compute": 2.0}


def test_batches_that_are_passed_over_first_do_not_make_it_evaluation_for_good(timed: Timed) -> None:
    started(timed)
    source = BatchSource()
    for _ in range(6):
        timed.batch(source)
    timed.step()
    timed.batch(source)
    timed.step()
    seconds = timed.seconds()
    assert seconds["input_wait"] == 1.0
    assert (timed.count(hook.STEPS), source.is_training) == (3, True)


def test_two_optimizers_are_one_step_and_what_is_between_them_is_work(timed: Timed) -> None:
    source = started(timed)
    other = Optimizer()
    for _ in range(3):
        timed.batch(source)
        timed.step()
        timed.step(works=3.0, optimizer=other)
    assert timed.count(hook.STEPS) == 4
    assert timed.seconds() == {"startup": 8.0, "input_wait": 3.0, "compute": 15.0}


def test_a_job_that_changes_its_weights_itself_steps_with_each_backward(timed: Timed) -> None:
    """Once no optimizer has stepped for longer than any job accumulates; from the first step of one on, these count."""
    module, source = Optimizer(), BatchSource()
    for _ in range(hook.MAX_BACKWARDS + 3):
        timed.batch(source)
        timed.clock.confirm_training()
        timed.takes(2.0)
        timed.clock.count_backward(module)
    assert timed.count(hook.STEPS) == 3
    assert timed.seconds() == {"startup": 3.0 * (hook.MAX_BACKWARDS + 1), "input_wait": 2.0, "compute": 4.0}
    for _ in range(hook.MAX_BACKWARDS + 3):
        timed.batch(source)
        timed.clock.count_backward(module)
        timed.step()
    assert timed.count(hook.STEPS) == 4 + hook.MAX_BACKWARDS + 3


def test_phases_inside_others_count_once(timed: Timed) -> None:
    source = started(timed)
    timed.batch(source, works=1.0)
    assert timed.clock.enter(hook.COMM)
    timed.takes(1.0)
    assert not timed.clock.enter(hook.COMM)
    assert timed.clock.enter(hook.COMPILE)
    timed.takes(3.0)
    timed.clock.leave()
    timed.clock.leave()
    timed.step()
    assert timed.seconds() == {"startup": 8.0, "input_wait": 1.0, "compute": 3.0, "comm": 1.0, "compile": 3.0}


def test_steps_without_a_loader_are_unknown_work(timed: Timed) -> None:
    timed.step(works=1.0)
    timed.step(works=2.0)
    assert timed.seconds() == {"startup": 1.0, "work": 2.0}


def test_a_loader_that_fails_leaves_the_clock_in_order(timed: Timed) -> None:
    source = started(timed)
    timed.clock.begin_wait(source, False)
    timed.takes(1.0)
    timed.clock.end_source(source, failed=True)
    assert timed.clock.is_outside_phases()
    assert timed.seconds() == {"startup": 8.0, "input_wait": 1.0}


def test_a_job_that_only_evaluates_is_not_starting_for_ever(timed: Timed) -> None:
    timed.clock.publish()
    timed.takes(1.0)
    timed.batch(BatchSource(), works=1.0, is_evaluating=True)
    assert timed.seconds() == {"startup": 1.0, "eval": 2.0}


def test_an_evaluation_without_a_loader_lasts_from_eval_to_the_next_train(timed: Timed) -> None:
    source = started(timed)
    timed.takes(0.5)
    assert timed.clock.is_after_step()
    timed.clock.set_evaluating(True)
    timed.takes(3.0)
    timed.batch(BatchSource(), works=1.0, is_evaluating=True)  # some of it has a loader
    timed.clock.set_evaluating(False)
    timed.takes(0.25)
    timed.batch(source)
    timed.step()
    assert timed.seconds() == {"startup": 8.0, "host": 0.75, "eval": 5.0, "input_wait": 1.0, "compute": 2.0}


def test_a_batch_of_the_open_loader_ends_an_evaluation_without_train(timed: Timed) -> None:
    """Fine-tuning with norms in their mode for evaluation: `.eval()` once, `.train()` never."""
    source = started(timed)
    timed.clock.set_evaluating(True)
    timed.takes(3.0)
    for _ in range(2):
        timed.batch(source, works=1.0)
        timed.clock.confirm_training()
    timed.step()
    assert timed.seconds() == {"startup": 8.0, "eval": 3.0, "input_wait": 2.0, "compute": 4.0}


def test_only_between_steps_a_mode_of_the_model_means_something(timed: Timed) -> None:
    assert not timed.clock.is_after_step(), "before the first step"
    source = started(timed)
    timed.batch(source)
    assert not timed.clock.is_after_step(), "in a step: a frozen part, a teacher"
    timed.step()
    assert timed.clock.enter(hook.CHECKPOINT)
    assert not timed.clock.is_after_step(), "in a phase"


def test_a_part_of_the_model_is_not_the_model(timed: Timed) -> None:
    parameters = [object() for _ in range(5)]
    timed.optimizer = Optimizer(*parameters)
    assert not timed.clock.is_of_training(parameters), "no optimizer has stepped"
    started(timed)
    assert timed.clock.is_of_training(parameters[:3])
    assert not timed.clock.is_of_training(parameters[:2])
    assert not timed.clock.is_of_training([object() for _ in range(9)]), "frozen, or another model"


def test_batches_that_are_accumulated_before_the_first_backward_are_training_if_the_framework_says_so(
    timed: Timed,
) -> None:
    """transformers fetches all batches of a step, then does their backwards."""
    started(timed)
    source = BatchSource()
    timed.clock.is_fetching_for_training = True
    for _ in range(2 * hook.MAX_UNPROVEN_BATCHES):
        timed.batch(source)
    timed.clock.is_fetching_for_training = False
    timed.step()
    assert timed.seconds() == {"startup": 8.0, "input_wait": 2.0 * hook.MAX_UNPROVEN_BATCHES, "compute": 2.0}
    assert timed.count(hook.BATCHES) == 1 + 2 * hook.MAX_UNPROVEN_BATCHES


def test_a_batch_on_which_the_model_is_evaluated_is_no_training(timed: Timed) -> None:
    """As samples of a GAN: a batch of another loader, `.eval()`, forward passes with gradients, and no backward."""
    source, samples = started(timed), BatchSource()
    timed.batch(samples)
    assert timed.clock.may_evaluate()
    timed.clock.set_evaluating(True)
    timed.takes(3.0)
    timed.batch(source)
    timed.step()
    assert timed.seconds() == {"startup": 8.0, "eval": 4.0, "input_wait": 1.0, "compute": 2.0}


def test_a_batch_that_was_fetched_before_an_evaluation_trains(timed: Timed) -> None:
    """The first batch of an epoch, fetched before the validation of the epoch before."""
    started(timed)
    prefetched = BatchSource()
    timed.batch(prefetched)
    timed.clock.set_evaluating(True)
    timed.takes(3.0)
    timed.clock.set_evaluating(False)
    timed.step()
    before = timed.seconds()
    timed.batch(prefetched)
    timed.clock.confirm_training()
    timed.step()
    timed.batch(prefetched)
    timed.step()
    assert timed.seconds()["eval"] <= before["eval"] + 1.0, "one wait at most is taken for evaluation"
    assert prefetched.is_training


def test_batches_of_a_job_of_jax_are_no_evaluation(timed: Timed) -> None:
    """JAX has no optimizer that steps; without it, a loader of which no backward comes is one of evaluation."""
    timed.clock.publish("jax 0.10.2")
    training, evaluation = BatchSource(), BatchSource()
    for source, count in ((training, 6), (evaluation, 2)):
        for _ in range(count):
            timed.batch(source, works=1.0)
        timed.end(source)
    assert set(timed.seconds()) == {"startup"}


def test_functions_that_jax_compiles_again_are_counted_and_timed(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its listener, with the durations that it reports: of "step" 4 s come after its first compilation."""
    listeners: list[Callable[..., None]] = []
    monkeypatch.setattr(jax_loop, "clock", timed.clock)
    monkeypatch.setattr(jax_loop.atexit, "register", lambda *_: None)
    jax_loop.patch_monitoring(SimpleNamespace(register_event_duration_secs_listener=listeners.append))
    durations = {"init": [2.0], "add": [0.5, 0.25, 0.25], "step": [3.0, 2.0, 2.0]}
    for name, seconds in durations.items():
        for duration in seconds:
            timed.takes(duration + 1.0)
            listeners[0](jax_loop.COMPILE_EVENT, duration, fun_name=name)
            listeners[0]("/jax/core/compile/jaxpr_trace_duration", 9.0, fun_name=name)
    assert timed.seconds() == {"startup": 7.0, "compile": 10.0}
    assert (timed.count(hook.RECOMPILES), timed.count(hook.RECOMPILED_S)) == (4, 4.0)


def test_an_optimizer_that_steps_each_group_by_itself_counts_once(timed: Timed) -> None:
    """DeepSpeed's ZeRO: stage_1_and_2.py, `_optimizer_step`. Loading a state replaces the groups meanwhile."""
    decayed, others = SimpleNamespace(grad=None), SimpleNamespace(grad=None)
    optimizer = Optimizer()
    timed.batch(BatchSource())
    for _ in range(5):
        timed.clock.confirm_training()
        for groups in ([{"params": [decayed]}], [{"params": [others]}]):
            optimizer.param_groups = groups
            timed.clock.count_optimizer_step(optimizer, 0.1, group=torch_loop._read_groups(optimizer.param_groups)[2])
    assert timed.count(hook.STEPS) == 5
    for _ in range(102):  # the first group is frozen from here on
        timed.clock.count_optimizer_step(optimizer, 0.1, group=torch_loop._read_groups([{"params": [others]}])[2])
    assert timed.count(hook.STEPS) > 5
    assert torch_loop._read_groups("no groups") == (None, True, 0)
