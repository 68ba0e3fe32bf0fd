"""How fast the R50 step can be on an H200 by its arithmetic and its bytes, counted without a GPU: eager and compiled,
with separate operators and with the fused kernels of `training/make_step.py`.

A convolution takes the longer of its FLOPs and its bytes at the assumed rates, any other operator its bytes; nothing
overlaps, and the launch of a kernel costs nothing. The rates are arguments.

eager: a dispatch mode counts what each operator reads and writes while the step runs on the fake accelerator
(`planning/fake_accelerator.py`). A convolution's bias, and its gradient, are passes of their own, as in ATen
(native/Convolution.cpp). compiled: forward, loss and backward are traced there by torch.compile and AOTAutograd with
Inductor's decompositions and min-cut partition; both graphs are then moved to fake CUDA tensors, and Inductor's own
passes, lowering and scheduler fuse them for an H200 (sm_90) whose properties are mocked. The bytes are the scheduler's
(`get_read_write_buffers_sizes`). Not part of it: code generation, autotuning, Inductor's joint-graph passes, caches of
the GPU (every read counts). The augmentation is compiled, too; the casts of weights and of their gradients are outside
of the program. outside: what else a run does, counted as eager operators.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.processes import ROOT, python_path
from benchmarks.report import Report, options, publish

SPEC = {"model": "retinanet_resnet50_fpn", "batch": 32, "slots": 100, "image_size": (800, 800)}
QUICK = {"model": "retinanet_tiny_fpn", "batch": 4, "slots": 16, "image_size": (128, 192)}
KERNELS = {False: "separate", True: "fused"}
TIMEOUT_S = 1800
OUTSIDE = ("augmentation", "clip", "optimizer", "EMA", "log")
"""Parts of a step besides forward, losses and backward; only the first is compiled in a compiled run."""
LARGE_BYTES = 5e8
"""Kernels of the compiler that move more are printed, with what they write."""

H200 = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 * 10**9, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=227 * 2**10, L2_cache_size=50 * 2**20,
    gcnArchName="",
)  # fmt: skip
"""What Inductor asks a device for. From NVIDIA's "H100 Tensor Core GPU Architecture", whose chip the H200 has."""


@dataclasses.dataclass
class Part:
    """What a part of the step needs. other_bytes: of all operators but convolutions; convolutions: FLOP and bytes of
    each."""

    operators: int = 0
    other_bytes: float = 0.0
    convolutions: list[list[float]] = dataclasses.field(default_factory=list)

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.operators + other.operators,
            self.other_bytes + other.other_bytes,
            self.convolutions + other.convolutions,
        )

    def seconds(self, flop_per_s: float, bytes_per_s: float) -> float:
        convolutions = sum(max(flop / flop_per_s, moved / bytes_per_s) for flop, moved in self.convolutions)
        return convolutions + self.other_bytes / bytes_per_s

    def row(self, rates: list[tuple[float, float]]) -> dict[str, Any]:
        """rates: FLOP/s and bytes/s, the least and the most."""
        return {
            "operators": self.operators,
            "convolutions TFLOP": sum(flop for flop, _ in self.convolutions) / 1e12,
            "convolutions GB": sum(moved for _, moved in self.convolutions) / 1e9,
            "others GB": self.other_bytes / 1e9,
            **{f"{word} ms": 1e3 * self.seconds(*pair) for word, pair in zip(("most", "least"), rates, strict=True)},
        }


# The children, each of which changes its whole process by counting.


def flop_of(func: Any, args: Any) -> float | None:
    """Of a convolution; None for another operator."""
    from benchmarks.gpu.gpu_convolutions import read_call

    one = read_call(func, args)
    return None if one is None else float(one.flop * sum(one.calls))


def make_counts() -> Any:
    """A dispatch mode with the parts that were entered (`enter`), in `parts`."""
    from stoker.planning.trace import _moved_bytes
    from tests import fakes

    class Counts(fakes.OperatorCounts):
        def __init__(self) -> None:
            super().__init__()
            self.parts: dict[str, Part] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = sum(self.by_phase.values())
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if sum(self.by_phase.values()) == before:
                return result
            part = self.parts.setdefault(self.phase, Part())
            part.operators += 1
            moved_bytes, flop = _moved_bytes(func, func.overloadpacket, args, kwargs or {}, result), flop_of(func, args)
            if flop is None:
                part.other_bytes += moved_bytes
            else:
                part.convolutions.append([flop, moved_bytes])
            if str(func) == "aten.convolution.default" and args[2] is not None:
                part.other_bytes += 2 * result.nbytes
            if str(func) == "aten.convolution_backward.default" and args[-1][2]:
                part.other_bytes += args[0].nbytes
            return result

    return Counts()


def build_model(trial: Any) -> Any:
    from stoker.config.settings import ModelSettings
    from stoker.models import MODELS, build
    from stoker.models.layers.convolutions import use_fused_convs

    model = build(ModelSettings(**{**MODELS[trial.model].defaults, "model": trial.model}), trial.classes).train()
    use_fused_convs(model, trial.kernels)
    model.fused_loss = trial.kernels  # type: ignore[assignment]
    return model


def count_eager(trial: Any, *, outside: bool) -> dict[str, Part]:
    """outside: only what a run does besides forward, losses and backward, which are left out."""
    import torch

    from benchmarks.gpu.gpu_case import DATA
    from stoker.config.settings import OptimSettings
    from stoker.data.augment import augment_batch
    from stoker.hardware.device import Device
    from stoker.planning.fake_accelerator import DEVICE, Autocast, fake_tensors, to_fake
    from stoker.training.loss_sums import LossAccumulator
    from stoker.training.optim import OptimizerStep
    from stoker.training.step import PlainStep, make_loss_fn
    from tests import fakes

    optim = OptimSettings(
        optimizer=trial.optimizer, backbone_lr_mult=1.0, momentum=0.9, weight_decay=1e-4, clip_grad_norm=1.0,
        ema_decay=0.999,
    )  # fmt: skip
    device, counts, model = Device(torch.device(DEVICE)), make_counts(), build_model(trial)
    counts.watch(model)
    with fake_tensors():
        to_fake(model)
        stepper = OptimizerStep(model, optim, device, precision=trial.precision)
        meter = LossAccumulator(device, max_skipped_steps=20)
        step = PlainStep(make_loss_fn(model, compile=False), stepper, None, Autocast(trial.precision))
        batch = fakes.fake_batch(trial)
        for is_counted in (False, True):  # the first one makes anchors and other constants
            with counts if is_counted else contextlib.nullcontext():
                counts.enter("augmentation")
                augmented = augment_batch(batch, DATA, 0.0)
                if outside:
                    losses = {name: torch.empty((), device=DEVICE) for name in ("classification", "box")}
                    for parameter in stepper.weights():
                        parameter.grad = torch.empty_like(parameter)
                else:
                    counts.enter("casts")  # of all weights, before the model's own operators
                    losses = step.forward_backward(augmented)
                counts.enter("clip")
                clipped = stepper.clip()
                counts.enter("optimizer")
                stepper.set_scalars(1e-5, 1)
                stepper.update(clipped)
                counts.enter("EMA")
                stepper.update_ema()
                counts.enter("log")
                meter.add(losses, clipped.grad_norm, clipped.found_inf, stepper.completed_steps, clipped.tensor_norms)
    return {name: part for name, part in counts.parts.items() if (name in OUTSIDE) is outside}


def count_compiled(trial: Any) -> dict[str, Part]:
    parts = {"casts": count_casts(trial)}
    for name, (graph, inputs) in zip(("augmentation", "forward", "backward"), trace(trial), strict=True):
        part = parts.setdefault(name, Part())
        for node in schedule(graph, inputs, is_backward=name == "backward"):
            is_extern = type(node).__name__ == "ExternKernelSchedulerNode"
            kernel = str(getattr(node.node, "op_overload", None) or getattr(node.node, "python_kernel_name", None))
            moved_bytes = node.get_read_write_buffers_sizes()
            if is_extern and "conv" in kernel:
                part.operators += 1
            elif moved_bytes or not is_extern:  # not the outputs of an operator that has several
                into = parts.setdefault("loss", Part()) if is_loss(node) else part
                into.operators += 1
                into.other_bytes += moved_bytes
                if moved_bytes > LARGE_BYTES:
                    what = kernel if is_extern else describe(node)
                    print(f"{name} {moved_bytes / 1e9:.2f} GB: {what}", file=sys.stderr)
        part.convolutions += list(convolutions(graph))
    return parts


def count_casts(trial: Any) -> Part:
    """Of what one operator casts for the program, and another in its backward pass."""
    from stoker.models.layers.weight_casts import WeightCasts
    from stoker.planning.fake_accelerator import DEVICE, Autocast, fake_tensors, to_fake

    counts, model = make_counts(), build_model(trial)
    with fake_tensors():
        to_fake(model)
        casts = WeightCasts(model, folds=False)
        with counts, Autocast(trial.precision):
            counts.enter("casts")
            with casts.apply(DEVICE):
                pass
    (forward,) = counts.parts.values()
    return Part(2 * forward.operators, 2 * forward.other_bytes)


def convolutions(graph: Any) -> Iterator[list[float]]:
    """FLOP and bytes of each convolution of a graph."""
    from torch.utils import _pytree

    from stoker.planning.trace import _moved_bytes

    for node in graph.graph.nodes:
        if node.op == "call_function":
            args = _pytree.tree_map_only(type(node), lambda one: one.meta["val"], node.args)
            if (flop := flop_of(node.target, args)) is not None:
                yield [flop, _moved_bytes(node.target, node.target.overloadpacket, args, {}, node.meta["val"])]


def is_loss(node: Any) -> bool:
    """Whether a kernel computes something of matching and loss, also in the backward pass."""
    parts = node.get_nodes()
    origins = [origin for part in parts if part.node is not None for origin in part.node.get_origins()]
    return any(", in loss\n" in (origin.meta.get("stack_trace") or "") for origin in origins)


def describe(node: Any) -> str:
    layouts = [out.node.get_layout() for out in node.get_outputs() if hasattr(out.node, "get_layout")]
    return ", ".join(f"{layout.dtype} {[int(size) for size in layout.size]}" for layout in layouts[:4])


def trace(trial: Any) -> list[tuple[Any, list[Any]]]:
    """(graph, inputs) of augmentation, forward with losses, and backward, as a run compiles them."""
    import torch
    import torch._inductor.compile_fx
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    from benchmarks.gpu.gpu_case import DATA
    from stoker.planning.fake_accelerator import Autocast, fake_tensors, to_fake
    from stoker.training import step
    from tests import fakes

    model = build_model(trial)
    graphs: list[tuple[Any, list[Any]]] = []

    def keep(graph: Any, inputs: list[Any]) -> Any:
        graphs.append((graph, inputs))
        return graph.forward

    step.COMPILE_BACKEND = aot_autograd(  # type: ignore[assignment]
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    with fake_tensors():
        to_fake(model)
        batch = fakes.fake_batch(trial)
        with torch.no_grad():
            step.make_augment_fn(DATA, compile=True)(batch, 0.0)
            model(batch.images)  # makes the anchors
        with Autocast(trial.precision):
            losses = step.make_loss_fn(model, compile=True)(batch)
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


# The report.


def run(arguments: argparse.Namespace) -> Report:
    spec = QUICK if arguments.quick else SPEC
    rates = [(1e12 * t, 1e12 * b) for t, b in zip(sorted(arguments.tflops), sorted(arguments.tbps), strict=True)]
    assumed = " to ".join(f"{flop / 1e12:g} TFLOP/s and {moved / 1e12:g} TB/s" for flop, moved in rates)
    report = Report(
        f"Roofline of a training step, counted: {json.dumps(spec)}, bf16, 80 classes; assumed {assumed}",
        1,
        packages=("torch", "triton"),
    )
    names = [name for name in ("outside", *MODES) if arguments.only in name or name == "outside"]
    counted = {name: in_child(name, spec) for name in names}
    for name, parts in counted.items():
        others = [part for what, part in counted["outside"].items() if what not in parts]
        both = parts if name == "outside" else {**parts, "outside": sum(others, Part())}
        total = sum(both.values(), Part())
        for part, needs in {**both, "all": total}.items():
            report.rows.append({"what": f"{name}: {part}", **needs.row(rates)})
        if name != "outside":
            for word, (flop_per_s, bytes_per_s) in zip(("least", "most"), rates, strict=True):
                report.rows[-1][f"{word} img/s"] = float(spec["batch"]) / total.seconds(flop_per_s, bytes_per_s)
    return report


MODES = {
    f"{mode}, {kernels} kernels": (mode, fused) for mode in ("eager", "compiled") for fused, kernels in KERNELS.items()
}


def in_child(name: str, spec: dict[str, Any]) -> dict[str, Part]:
    mode, kernels = MODES.get(name, ("outside", False))
    command = [sys.executable, str(Path(__file__).resolve()), "--child", mode, json.dumps({**spec, "kernels": kernels})]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return {part: Part(**fields) for part, fields in json.loads(done.stdout.splitlines()[-1]).items()}


def child(mode: str, given: dict[str, Any]) -> dict[str, Part]:
    from stoker.planning.fake_accelerator import install
    from tests.fakes import Trial

    install()
    trial = Trial(**{**given, "image_size": tuple(given["image_size"])})
    return count_compiled(trial) if mode == "compiled" else count_eager(trial, outside=mode == "outside")


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--only", default="", metavar="TEXT", help="of what is counted, what has this text in its name: "
                      "outside, or eager or compiled with separate or fused kernels; outside always")  # fmt: skip
    made.add_argument("--tflops", type=float, nargs=2, default=(550.0, 650.0), help="of convolutions: least, most")
    made.add_argument("--tbps", type=float, nargs=2, default=(3.6, 4.0), help="of memory: least, most")
    return made


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        found = child(sys.argv[2], json.loads(sys.argv[3]))
        print(json.dumps({name: dataclasses.asdict(part) for name, part in found.items()}))
    else:
        publish(run, parser())
