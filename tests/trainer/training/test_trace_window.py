"""Profiler windows as arithmetic: constructed records, the same course second by second."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from stoker.training.trace import Kind, TraceEvent, summarize_window
from stoker_watch.runs.schemas import TraceWindow


def course(*rows: tuple[Kind, str, float, float] | tuple[Kind, str, float, float, int]) -> list[TraceEvent]:
    return [TraceEvent(*row) for row in rows]


def line(moments: list[TraceEvent]) -> TraceWindow:
    found = summarize_window(moments, unix_time_zero=1000.0, attempt=1, step=54, steps=4)
    assert found is not None
    return found


def test_busy_is_the_union_of_kernels_and_copies_and_each_has_what_it_does_alone() -> None:
    found = line(
        course(
            ("kernel", "conv", 0, 4),
            ("kernel", "conv", 2, 4),  # on another stream: overlaps
            ("copy", "Memcpy HtoD (Pinned -> Device)", 5, 3),  # two seconds alone
            ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 5),
            ("kernel", "relu", 12, 1),
        )
    )
    assert (found.wall_s, found.busy_s) == (15, 13)
    assert (found.copy_s, found.comm_s) == (2, 4)
    assert (found.launches, found.kernel_median_s) == (4, 4)
    assert [(gap.duration_s, gap.host_op) for gap in found.gaps] == [(2, "")]


def test_the_window_begins_where_the_device_ends_what_was_issued_before_it() -> None:
    found = line(
        course(
            ("call", "cudaLaunchKernel", -2, 0.1, 1), ("kernel", "late", 1, 4, 1),  # of the step before
            ("call", "cudaLaunchKernel", 0.5, 0.1, 2), ("kernel", "conv", 7, 2, 2),
        )
    )  # fmt: skip
    assert (found.wall_s, found.busy_s, found.launches, found.t) == (4, 2, 1, 1009)
    assert [gap.duration_s for gap in found.gaps] == [2]


def test_a_gap_names_what_the_host_was_in_at_its_middle() -> None:
    found = line(
        course(
            ("kernel", "a", 0, 1), ("kernel", "b", 11, 1), ("kernel", "c", 16, 1), ("kernel", "d", 19, 1),
            ("op", "aten::item", 0, 10), ("call", "cudaStreamSynchronize", 2, 8),  # innermost
            ("op", "aten::add", 13, 1),  # one of four: the rest is Python
            ("op", "aten::index", 17, 2),
        )
    )  # fmt: skip
    assert [(gap.duration_s, gap.host_op) for gap in found.gaps] == [
        (10, "cudaStreamSynchronize"), (4, ""), (2, "aten::index"),
    ]  # fmt: skip


def test_tensor_cores_are_known_by_the_names_of_their_kernels() -> None:
    on = ["ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_nn", "volta_h884gemm_128x64_ldg8_nn",
          "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1",
          "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
          "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>"]  # fmt: skip
    off = ["void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "volta_sgemm_128x64_nn",
           "void cudnn::bn_fw_tr_1C11_singleread", "implicit_convolve_sgemm<float, float, 1024, 5, 5>"]  # fmt: skip
    found = line([TraceEvent("kernel", name, n, 1) for n, name in enumerate(on + off)])
    assert found.tensor_core_fraction == len(on) / len(on + off)
    assert line(course(("copy", "Memcpy DtoH", 0, 1))).tensor_core_fraction is None


def test_without_work_of_the_device_there_is_no_line() -> None:
    host = course(("op", "aten::conv2d", 0, 3))
    assert summarize_window(host, unix_time_zero=1, attempt=1, step=4, steps=4) is None


def test_a_line_stays_short() -> None:
    moments = [TraceEvent("kernel", "void " + "x" * 500 + str(n % 50), 2 * n, 1) for n in range(5_000)]
    found = line(moments)
    assert (len(found.gaps), found.launches) == (10, 5_000)


names = st.sampled_from(["conv", "ncclDevKernel_AllReduce", "Memcpy HtoD"])
works = st.lists(st.tuples(names, st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=12)
hosts = st.lists(st.tuples(st.sampled_from(["aten::a", "aten::b"]), st.integers(0, 30), st.integers(1, 8)), max_size=8)


@given(works, hosts)
def test_an_oracle_says_the_same_second_by_second(done: list[tuple], said: list[tuple]) -> None:
    device = [TraceEvent("copy" if n.startswith("Memcpy") else "kernel", n, s, t) for n, s, t in done]
    host = [TraceEvent("op", *row) for row in said]
    found = line([*host, *device])
    end = int(max(moment.end_s for moment in device))
    on = [{m.name for m in device if m.start_s <= second < m.end_s} for second in range(end)]
    assert found.wall_s == end
    assert found.busy_s == sum(map(bool, on))
    assert found.comm_s == sum(names == {"ncclDevKernel_AllReduce"} for names in on)
    assert found.copy_s == sum(names == {"Memcpy HtoD"} for names in on)
    idle = [len(list(run)) for nothing, run in itertools.groupby(on, key=lambda names: not names) if nothing]
    assert [gap.duration_s for gap in found.gaps] == sorted(idle, reverse=True)[:10]
    assert {gap.host_op for gap in found.gaps} <= {"", "aten::a", "aten::b"}
