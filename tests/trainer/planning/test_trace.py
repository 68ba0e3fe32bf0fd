"""What is counted on tensors without memory is what is counted on real ones."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stoker.hardware.selection import select_device
from stoker.planning.trace import FLOP, CountedStep, StepTrace, TracedStep, trace_steps
from stoker.training.defaults.dry_run import make_worst_case_batch
from tests import fakes
from tests.trainer.planning.samples import make_spec

CPU = select_device("cpu")


def count(*, is_fake: bool, size: int = 4, **changes: object) -> StepTrace:
    spec = make_spec(**changes)
    step = CountedStep(spec, CPU, is_fake=is_fake)
    try:
        if is_fake:
            return step.count(step.empty_batch(size))
        side, _ = spec.settings["image_size"]
        return step.count(make_worst_case_batch(size, image_size=(side, side), max_boxes=8, num_classes=3, device=CPU))
    finally:
        step.close()


def by_work(trace: StepTrace) -> dict[tuple[object, ...], int]:
    return {(work.kind, work.flops, work.moved_bytes, work.once): work.count for work in trace.works}


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sgd", "mosaic": 0.5}, {"ema_decay": 0.0}])
def test_a_step_without_memory_needs_what_a_real_one_needs(changes: dict[str, object]) -> None:
    fake, real = (count(is_fake=is_fake, **changes) for is_fake in (True, False))
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)
    assert fake.resting_bytes == pytest.approx(real.resting_bytes, rel=0.01)
    assert (fake.parameters, fake.gradient_bytes) == (real.parameters, real.gradient_bytes)
    assert fake.flops == real.flops
    assert by_work(fake) == by_work(real)


@pytest.mark.slow
def test_what_was_counted_before_changes_nothing() -> None:
    step = CountedStep(make_spec(mosaic=0.5), CPU, is_fake=True)
    try:
        first, second, again = (step.count(step.empty_batch(size)) for size in (4, 8, 4))
    finally:
        step.close()
    alone = count(is_fake=True, size=8, mosaic=0.5)
    for one, other in ((first, again), (second, alone)):
        assert by_work(one) == by_work(other)
        assert (one.peak_bytes, one.resting_bytes) == pytest.approx((other.peak_bytes, other.resting_bytes), rel=1e-3)


def test_average_weights_are_counted() -> None:
    with_average, without = (count(is_fake=True, ema_decay=decay) for decay in (0.99, 0.0))
    assert with_average.resting_bytes - without.resting_bytes >= with_average.gradient_bytes


@pytest.mark.slow
def test_between_two_batch_sizes_the_peak_is_at_most_on_their_line() -> None:
    """It is the maximum, over the moments of a step, of what grows in proportion to the batch: convex."""
    peaks = {size: count(is_fake=True, size=size).peak_bytes for size in (4, 16, 32)}
    on_line = peaks[4] + (peaks[32] - peaks[4]) / 28 * 12
    assert 0.9 * on_line < peaks[16] <= on_line


def test_operations_are_those_that_torch_counts() -> None:
    spec = make_spec()
    step = CountedStep(spec, CPU, is_fake=False)
    batch = make_worst_case_batch(4, image_size=(64, 64), max_boxes=8, num_classes=3, device=CPU)
    trace = step.count(batch)
    with FlopCounterMode(display=False, custom_mapping=FLOP) as counter:
        step.run(batch)
    assert trace.flops == counter.get_total_flops() > 0
    assert sum(work.flops * work.count for work in trace.works if work.once) == 0


def test_bytes_are_counted_once_for_each_tensor_that_is_read_or_written() -> None:
    from stoker.planning.trace import _StepCounter

    a, b = torch.ones(100, 10), torch.ones(10)
    for work, expected in (
        (lambda: a + b, 4 * (1000 + 10 + 1000)),
        (lambda: a.add_(b), 4 * (1000 + 10 + 1000)),
        (lambda: a.copy_(b), 4 * (10 + 1000)),
        (lambda: a + b.expand(100, 10), 4 * (1000 + 10 + 1000)),
        (lambda: a[:, :5].sum(), 4 * (500 + 1)),
        (lambda: a.index_select(0, torch.arange(2)), None),
        (lambda: a.view(10, 100), 0),
        (lambda: torch.empty(1000), 0),
    ):
        counter = _StepCounter("cpu", 1)
        counter.start()
        with counter:
            work()
        moved = sum(work.moved_bytes * work.count for work in counter.works())
        if expected is None:  # the indices are made, then read
            assert moved < 4 * 1000
        else:
            assert moved == expected


@pytest.mark.parametrize(("device", "copies"), [("cuda", 2 + 4), ("cpu", 0)])
def test_copies_around_the_group_norm_of_a_gpu_are_counted(device: str, copies: int) -> None:
    """Its kernels take and give contiguous maps, its convolutions channels-last ones; a CPU keeps the memory format."""
    from stoker.planning.trace import _StepCounter

    counter = _StepCounter(device, 1)
    with fakes.fake_tensors():
        x = torch.empty(2, 64, 10, 10, dtype=torch.bfloat16, device=device)
        weight = torch.empty(64, dtype=torch.bfloat16, device=device)
        shape = (2, 64, 100, 32)
        counter.start()
        with counter:
            y, mean, rstd = torch.native_group_norm(x, weight, weight, *shape, 1e-5)
            torch.ops.aten.native_group_norm_backward(y, x, mean, rstd, weight, *shape, [True, True, True])
    moved = sum(work.moved_bytes * work.count for work in counter.works())
    num_maps = 2 + 3 + 2 * copies
    assert num_maps <= moved / x.nbytes < num_maps + 0.1  # and parameters and statistics


@pytest.mark.slow
def test_the_process_traces_steps_of_both_kinds() -> None:
    on_gpu = make_spec(on_cpu=False, precision="bf16")
    cpu, gpu, again, broken, cpu_again = trace_steps([
        TracedStep(make_spec(), 4, 0), TracedStep(on_gpu, 4, 16 * 2**30), TracedStep(on_gpu, 8, 16 * 2**30),
        TracedStep(make_spec(precision="of another version"), 4, 0), TracedStep(make_spec(), 4, 0),
    ])  # fmt: skip
    assert cpu == cpu_again
    assert isinstance(broken, str)
    assert "of another version" in broken
    assert isinstance(cpu, StepTrace)
    assert isinstance(gpu, StepTrace)
    assert isinstance(again, StepTrace)
    assert cpu.peak_bytes == count(is_fake=True).peak_bytes
    assert gpu.flops == pytest.approx(cpu.flops, rel=0.2)  # the first convolution has more channels
    assert gpu.gradient_bytes == cpu.gradient_bytes
    assert gpu.peak_bytes < again.peak_bytes < 2 * gpu.peak_bytes
    assert sum(work.count for work in again.works) == sum(work.count for work in gpu.works)


def test_a_process_that_dies_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    ended = "the process ended with exit code 1"
    assert trace_steps([TracedStep(make_spec(), 4, 0)] * 2) == [ended, ended]
