"""Operators of a training step and the bytes that they move, without a GPU: eager and compiled, with separate operators
and with the fused kernels of `training/defaults/kernel_choice.py`.

eager: a dispatch mode counts what each operator reads and writes while the step runs on the fake accelerator
(`planning/fake_accelerator.py`). A convolution's bias, and its gradient, are passes of their own, as in ATen
(native/Convolution.cpp). compiled: forward, loss and backward are traced there by torch.compile and AOTAutograd with
Inductor's decompositions and min-cut partition; both graphs are then moved to fake CUDA tensors, and Inductor's own
passes, lowering and scheduler fuse them for an H200 (sm_90) whose properties are mocked. The bytes are the scheduler's
(`get_read_write_buffers_sizes`). Not part of it: code generation, autotuning, Inductor's joint-graph passes, caches of
the GPU (every read counts), and augmentation and optimizer, which a run does not compile.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.processes import ROOT
from benchmarks.report import Bar, Report, options, publish

SPEC = {"model": "retinanet_resnet50_fpn", "batch": 32, "slots": 100, "image_size": (800, 800)}
QUICK = {"model": "retinanet_tiny_fpn", "batch": 4, "slots": 16, "image_size": (128, 192)}
KERNELS = {False: "separate", True: "fused"}
TIMEOUT_S = 1800
GOALS = {"all": 0.56, "loss": 0.18}
"""Predicted before the kernels were written: 39.5 of 70 GB, and 2.5 of 14 GB."""
LARGE_BYTES = 5e8
"""Kernels of the compiler that move more are printed, with what they write."""

H200 = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 * 10**9, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=227 * 2**10, L2_cache_size=50 * 2**20,
    gcnArchName="",
)  # fmt: skip
"""What Inductor asks a device for. From NVIDIA's "H100 Tensor Core GPU Architecture", whose chip the H200 has."""


def count_eager(spec: dict[str, Any]) -> list[dict[str, Any]]:
    from stoker.planning.trace import _moved_bytes
    from tests import fakes

    class Counts(fakes.OperatorCounts):
        def __init__(self) -> None:
            super().__init__()
            self.moved: dict[tuple[str, str], float] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = sum(self.by_phase.values())
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if sum(self.by_phase.values()) > before:
                packet = func.overloadpacket
                is_conv = "conv" in str(packet)
                self.add("conv" if is_conv else "other", _moved_bytes(func, packet, args, kwargs or {}, result))
                if str(func) == "aten.convolution.default" and args[2] is not None:
                    self.add("other", 2 * result.nbytes)
                if str(func) == "aten.convolution_backward.default" and args[-1][2]:
                    self.add("other", args[0].nbytes)
            return result

        def add(self, kind: str, moved_bytes: float) -> None:
            self.moved[self.phase, kind] = self.moved.get((self.phase, kind), 0.0) + moved_bytes

    counts = Counts()
    fakes.OperatorCounts = lambda: counts  # type: ignore[assignment,misc]
    outcome = fakes.try_step(fakes.Trial(**spec))
    if outcome.error is not None:
        raise RuntimeError(outcome.error)
    return [
        {
            "part": phase,
            "operators": number,
            "convolutions GB": counts.moved.get((phase, "conv"), 0.0) / 1e9,
            "others GB": counts.moved.get((phase, "other"), 0.0) / 1e9,
            "peak GiB": outcome.peak / 2**30,
        }
        for phase, number in outcome.operators.items()
    ]


def count_compiled(spec: dict[str, Any]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, (graph, inputs) in zip(("forward", "backward"), trace(spec), strict=True):
        for node in schedule(graph, inputs, is_backward=name == "backward"):
            kernel = str(getattr(node.node, "op_overload", None) or getattr(node.node, "python_kernel_name", None))
            is_extern = type(node).__name__ == "ExternKernelSchedulerNode"
            is_conv = is_extern and "conv" in kernel
            moved_bytes = node.get_read_write_buffers_sizes()
            if is_extern and not moved_bytes:  # the outputs of an operator that has several
                continue
            row = rows.setdefault(
                "loss" if is_loss(node) and not is_conv else name,
                {"operators": 0, "convolutions GB": 0.0, "others GB": 0.0},
            )
            row["operators"] += 1
            row["convolutions GB" if is_conv else "others GB"] += moved_bytes / 1e9
            if moved_bytes > LARGE_BYTES and not is_conv:
                print(f"{name} {moved_bytes / 1e9:.2f} GB: {kernel if is_extern else describe(node)}", file=sys.stderr)
    return [{"part": part, **row} for part, row in rows.items()]


def is_loss(node: Any) -> bool:
    """Whether a kernel computes something of matching and loss, also in the backward pass."""
    parts = node.get_nodes()
    origins = [origin for part in parts if part.node is not None for origin in part.node.get_origins()]
    return any(", in loss\n" in (origin.meta.get("stack_trace") or "") for origin in origins)


def describe(node: Any) -> str:
    layouts = [out.node.get_layout() for out in node.get_outputs() if hasattr(out.node, "get_layout")]
    return ", ".join(f"{layout.dtype} {[int(size) for size in layout.size]}" for layout in layouts[:4])


def trace(spec: dict[str, Any]) -> list[tuple[Any, list[Any]]]:
    """(graph, inputs) of forward with losses, and of backward."""
    import torch
    import torch._inductor.compile_fx
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from stoker.config.settings import ModelSettings
    from stoker.models import MODELS, build
    from stoker.models.layers.convolutions import use_fused_convs
    from stoker.planning.fake_accelerator import Autocast, fake_tensors, to_fake
    from tests import fakes

    trial = fakes.Trial(**spec)
    model = build(ModelSettings(**{**MODELS[trial.model].defaults, "model": trial.model}), trial.classes).train()
    use_fused_convs(model, trial.kernels)
    model.fused_loss = trial.kernels  # type: ignore[assignment]
    graphs: list[tuple[Any, list[Any]]] = []

    def keep(graph: Any, inputs: list[Any]) -> Any:
        graphs.append((graph, inputs))
        return graph.forward

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    with fake_tensors():
        to_fake(model)
        batch = fakes.fake_batch(trial)
        with torch.no_grad():
            model(batch.images)  # makes the anchors
        compiled = torch.compile(
            lambda: model.loss(model(batch.images), batch), fullgraph=True, backend=backend, dynamic=False
        )
        with Autocast(trial.precision):
            losses = compiled()
        torch.stack(list(losses.values())).sum().backward()
    return graphs


def schedule(graph_module: Any, inputs: list[Any], *, is_backward: bool) -> list[Any]:
    """The kernels that Inductor makes of a graph on an H200."""
    import torch
    from torch import Tensor
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    from torch.utils import _pytree

    from stoker.planning.fake_accelerator import DEVICE

    class Mode(FakeTensorMode):
        avoid_device_init = property(lambda _: True)

    def to_cuda(value: Any) -> Any:
        return torch.device("cuda", 0) if isinstance(value, torch.device) and value.type == DEVICE else value

    mode = Mode()
    with mode:
        on_cuda = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=to_cuda(value.device))
            if isinstance(value, Tensor)
            else value
            for value in inputs
        ]
    for node in graph_module.graph.nodes:
        node.args, node.kwargs = _pytree.tree_map(to_cuda, (node.args, dict(node.kwargs)))
    graph_module.recompile()
    FakeTensorProp(graph_module, mode).propagate_dont_convert_inputs(*on_cuda)
    with mocked_cuda(), V.set_fake_mode(mode):
        post_grad_passes(graph_module, False)
        graph = GraphLowering(graph_module, example_inputs=on_cuda, is_backward=is_backward, is_inference=False)
        with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
            graph.run(*on_cuda)
            graph.init_wrapper_code()
            graph._update_scheduler()
            nodes = list(graph.scheduler.nodes)
            for node in nodes:
                node.get_read_write_buffers_sizes()  # cached, as it needs this context
            return nodes


@contextlib.contextmanager
def mocked_cuda() -> Iterator[None]:
    import torch
    from torch._dynamo.device_interface import CudaInterface

    def properties(*_: Any, **__: Any) -> Any:
        return H200

    with contextlib.ExitStack() as stack:
        for owner in (CudaInterface, CudaInterface.Worker):
            stack.enter_context(mock.patch.object(owner, "get_device_properties", staticmethod(properties)))
        for name, value in {
            "get_device_properties": properties,
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_capability": lambda *_: (H200.major, H200.minor),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", return_value=True))
        yield


def run(arguments: argparse.Namespace) -> Report:
    spec = QUICK if arguments.quick else SPEC
    report = Report(
        f"Operators and bytes of a training step, counted: {json.dumps(spec)}, bf16, 80 classes",
        1,
        packages=("torch", "triton"),
    )
    for mode in ("eager", "compiled"):
        for kernels, name in KERNELS.items():
            rows = in_child(mode, {**spec, "kernels": kernels})
            peak = rows[0].pop("peak GiB", None)
            for row in rows:
                row.pop("peak GiB", None)
            total = {key: sum(row[key] for row in rows) for key in ("operators", "convolutions GB", "others GB")}
            for row in (*rows, {"part": "all", **total} | ({} if peak is None else {"peak GiB": peak})):
                part = row.pop("part")
                report.rows.append({"what": f"{mode}, {name} kernels: {part}", **row})
    others = {row["what"]: row["others GB"] for row in report.rows}
    for what, goal in GOALS.items():
        ratio = others[f"compiled, fused kernels: {what}"] / others[f"compiled, separate kernels: {what}"]
        report.bars.append(Bar.at_most(f"compiled, bytes outside convolutions, {what}: fused / separate", ratio, goal))
    return report


def in_child(mode: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Counting changes the whole process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", mode, json.dumps(spec)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        from stoker.planning.fake_accelerator import install

        install()
        given = json.loads(sys.argv[3])
        given["image_size"] = tuple(given["image_size"])
        print(json.dumps((count_eager if sys.argv[2] == "eager" else count_compiled)(given)))
    else:
        publish(run, options(__doc__))
