"""The time of a step: bounds that hold for any step, and the fit to measured ones."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.planning.machines import GPUS, Accelerator
from stoker.planning.predict import CPU, GPU, Efficiency, TimedTrace, fit, step_time
from stoker.planning.trace import StepTrace, Work

HOST = Accelerator(key="cpu", name="a CPU", flops={"fp32": 1e11}, bandwidth=1e10, memory_bytes=2**34, is_cpu=True,
                   source="made up")  # fmt: skip

WORKS = st.lists(
    st.builds(
        Work,
        st.sampled_from(["convolution", "grouped", "matmul", "other"]),
        st.floats(0, 1e12),
        st.floats(0, 1e9),
        st.integers(1, 50),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
)


def make_trace(works: list[Work], batch_size: int = 4) -> StepTrace:
    return StepTrace(batch_size=batch_size, peak_bytes=0, resting_bytes=0, image_bytes=0, parameters=0,
                     gradient_bytes=0, works=works)  # fmt: skip


@given(works=WORKS)
def test_a_step_takes_as_long_as_its_parts_and_no_less_than_its_bounds(works: list[Work]) -> None:
    trace = make_trace(works)
    for accelerator, efficiency in ((HOST, CPU), (GPUS["l4"], GPU)):
        time = step_time(trace, accelerator, efficiency, precision="fp32")
        assert time.total_s == pytest.approx(time.compute_s + time.memory_s + time.launch_s)
        assert time.total_s >= sum(work.moved_bytes * work.count for work in works) / (
            accelerator.bandwidth * efficiency.bandwidth
        ) * (1 - 1e-9)
        peak = max(accelerator.peak_flops("fp32", is_convolution=kind) for kind in (True, False))
        best = max(efficiency.convolution, efficiency.grouped, efficiency.matmul)
        assert time.total_s >= trace.flops / (peak * best) * (1 - 1e-9)
        assert getattr(
            time, {"compute": "compute_s", "memory": "memory_s", "launches": "launch_s"}[time.limited_by]
        ) == (max(time.compute_s, time.memory_s, time.launch_s))


@given(works=WORKS, parts=st.integers(2, 8))
def test_micro_batches_repeat_all_but_the_optimizer(works: list[Work], parts: int) -> None:
    trace = make_trace(works)
    once = make_trace([work for work in works if work.once])
    one, several, update = (
        step_time(some, HOST, CPU, precision="fp32", micro_batches=n).total_s
        for some, n in ((trace, 1), (trace, parts), (once, 1))
    )
    assert several == pytest.approx(parts * (one - update) + update)


def test_a_step_of_many_small_operators_is_limited_by_launches_on_a_gpu() -> None:
    trace = make_trace([Work("other", 0.0, 1e3, 1000, False)])
    time = step_time(trace, GPUS["h100"], GPU, precision="bf16")
    assert time.limited_by == "launches"
    assert time.total_s == pytest.approx(1000 * GPU.issue_s)


LARGE = make_trace([Work("convolution", 5e9, 1e7, 100, False), Work("other", 0.0, 5e7, 100, False)])
SMALL = make_trace([Work("grouped", 1e8, 1e6, 50, False), Work("other", 0.0, 1e4, 2000, True)])
MATRICES = make_trace([Work("matmul", 2e10, 1e6, 10, False), Work("other", 0.0, 1e5, 20, True)])
MOVES = make_trace([Work("other", 0.0, 2e8, 30, False), Work("convolution", 1e8, 1e5, 10, False)])


def samples(truth: Efficiency) -> list[TimedTrace]:
    return [
        TimedTrace(trace, HOST, "fp32", 1, step_time(trace, HOST, truth, precision="fp32").total_s)
        for trace in (LARGE, SMALL, MATRICES, MOVES)
    ]


@given(
    convolution=st.floats(0.2, 0.9),
    grouped=st.floats(0.02, 0.3),
    bandwidth=st.floats(0.3, 1.5),
    kernel_s=st.floats(2e-6, 40e-6),
)
def test_a_fit_explains_steps_that_follow_the_model(
    convolution: float, grouped: float, bandwidth: float, kernel_s: float
) -> None:
    truth = msgspec.structs.replace(
        CPU, convolution=convolution, grouped=grouped, bandwidth=bandwidth, kernel_s=kernel_s
    )
    fitted = fit(samples(truth), CPU)
    for sample in samples(truth):
        time = step_time(sample.trace, HOST, fitted, precision="fp32").total_s
        assert time == pytest.approx(sample.step_s, rel=0.1)


def test_what_the_samples_do_not_show_stays_as_it_was() -> None:
    (sample, *_) = samples(msgspec.structs.replace(CPU, convolution=0.3, matmul=0.3))
    fitted = fit([sample], CPU)
    assert fitted.convolution == pytest.approx(0.3, rel=0.15)
    assert fitted.matmul == pytest.approx(CPU.matmul)  # no such operator was measured
    assert fitted.grouped == pytest.approx(CPU.grouped)
