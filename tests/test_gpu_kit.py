"""What the commands of the GPU kit leave behind: figures up to a kill, and failures whose cause can be read."""

import contextlib
import importlib
import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stoker.hardware.device import Device
from stoker.models.layers.convolutions import ConvReLU

ROOT = Path(__file__).resolve().parent.parent
IMPORT = f"import os, signal, sys, threading, time\nsys.path.insert(0, {str(ROOT)!r})\n"


@pytest.fixture
def gpu() -> ModuleType:
    return importlib.import_module("benchmarks.gpu.gpu")


@pytest.fixture
def gpu_results() -> ModuleType:
    return importlib.import_module("benchmarks.gpu.gpu_results")


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(importlib.import_module("benchmarks.processes").LINES, str(tmp_path / "A.jsonl"))
    return tmp_path / "A.jsonl"


def run_part(folder: Path, script: str, limit_s: float = 60) -> dict[str, Any]:
    """What is recorded of a part that runs a script."""
    (folder / "part.py").write_text(IMPORT + script)
    processes = importlib.import_module("benchmarks.processes")
    found: dict[str, Any] = processes.run_part([sys.executable, str(folder / "part.py")], limit_s, folder / "part.log")
    return found


CUDA_MESSAGE = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def test_an_error_of_cuda_is_recorded_with_its_type_message_and_frames(tmp_path: Path) -> None:
    found = run_part(
        tmp_path,
        f"""
print("step 3")
class AcceleratorError(RuntimeError): pass
def backward(): raise AcceleratorError({CUDA_MESSAGE!r})
def train_step(): backward()
train_step()
""",
    )
    assert found["exit"] == 1
    assert found["error"] == "AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert [frame.rpartition(" in ")[2] for frame in found["frames"]] == ["<module>", "train_step", "backward"]
    assert all(re.search(r"part\.py:\d+ in ", frame) for frame in found["frames"])
    assert "step 3" in found["output"]


def test_the_first_error_is_kept_where_others_follow(tmp_path: Path) -> None:
    found = run_part(
        tmp_path,
        """
class Freed:
    def __del__(self): raise RuntimeError("of a destructor")
freed = Freed()
try:
    raise ValueError("no algorithm was found")
except ValueError as error:
    del freed
    raise RuntimeError("the capture failed") from error
""",
    )
    assert found["error"] == "RuntimeError: the capture failed"
    assert found["earlier errors"] == ["ValueError: no algorithm was found"]


def test_a_hang_leaves_the_stacks_of_all_threads(tmp_path: Path) -> None:
    found = run_part(
        tmp_path,
        """
def wait_for_the_device(): time.sleep(600)
def load_images(): time.sleep(600)
threading.Thread(target=load_images, daemon=True).start()
print("Traceback (most recent call last):\\n  File 'x', line 1\\nValueError: was handled", file=sys.stderr)
print("began", file=sys.stderr, flush=True)
wait_for_the_device()
""",
        limit_s=4,
    )
    assert found["exit"] == "limit"
    assert found["error"] == "not done in 4 s"
    assert found["earlier errors"] == ["ValueError: was handled"]
    stack = "\n".join(found["stack"])
    assert "wait_for_the_device" in stack
    assert "load_images" in stack
    assert found["frames"][-1].endswith("in wait_for_the_device")
    assert "began" in (tmp_path / "part.log").read_text()
    assert found["s"] < 60


def test_of_a_hang_in_a_child_the_frames_are_those_of_the_child() -> None:
    def dump(thread: str, *frames: str) -> str:
        return f"{thread} 0x1 (most recent call first):\n" + "".join(f'  File "{one}\n' for one in frames)

    processes = importlib.import_module("benchmarks.processes")
    waits = dump("Current thread", 'subprocess.py", line 9 in communicate', 'run.py", line 1 in run_child')
    works = dump("Thread", 'pool.py", line 3 in decode') + dump("Current thread", 'step.py", line 7 in train_step')
    both = waits + processes.FATAL + " Aborted\n\n" + works, works + processes.FATAL + " Aborted\n\n" + waits
    for text in both:
        found = processes.failure(processes.FATAL + " Aborted\n\n" + text)
        assert found["frames"] == ["step.py:7 in train_step"]
    alone = processes.failure(processes.FATAL + " Aborted\n\n" + waits)
    assert alone["frames"] == ["run.py:1 in run_child", "subprocess.py:9 in communicate"]


def test_a_killed_part_keeps_its_lines_and_leaves_no_process(tmp_path: Path, lines: Path) -> None:
    found = run_part(
        tmp_path,
        """
import subprocess
from benchmarks.processes import record
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for rate in (411.0, 409.0):
    record(what="model", how="compiled", child=child.pid, **{"img/s": rate})
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert found["exit"] == "SIGKILL"
    measured = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["img/s"] for line in measured] == [411.0, 409.0]
    with contextlib.suppress(ProcessLookupError):
        ended, _, _ = select.select([os.pidfd_open(measured[0]["child"])], [], [], 60)
        assert ended


def test_a_crash_in_native_code_leaves_a_stack(tmp_path: Path) -> None:
    found = run_part(
        tmp_path,
        """
import ctypes
def launch_kernel(): ctypes.string_at(0)
launch_kernel()
""",
    )
    assert found["exit"] == "SIGSEGV"
    assert found["error"] == "Fatal Python error: Segmentation fault"
    assert any("launch_kernel" in line for line in found["stack"])


@pytest.mark.slow
def test_failing_tests_are_recorded_by_name(tmp_path: Path, lines: Path) -> None:
    (tmp_path / "test_inside.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad():\n    rate = 295\n    assert rate >= 500, 'too slow'\n"
        "@pytest.mark.skip(reason='no CUDA device')\ndef test_skipped(): pass\n"
        "@pytest.fixture\ndef broken(): raise RuntimeError('no device')\n"
        "def test_setup(broken): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-vv", "--tb=short", "-n", "1", "-c", str(ROOT / "pyproject.toml")]
    subprocess.run([*command, "-p", "benchmarks.gpu.gpu_tests", str(tmp_path)], cwd=ROOT, capture_output=True)
    found = {line["test"].rpartition("::")[2]: line for line in map(json.loads, lines.read_text().splitlines())}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_skipped": "skipped",
        "test_setup": "failed",
    }
    assert found["test_bad"]["error"] == "AssertionError: too slow"
    assert any("assert rate >= 500" in line for line in found["test_bad"]["traceback"])
    assert found["test_setup"]["error"] == "RuntimeError: no device"
    assert found["test_skipped"]["reason"] == "no CUDA device"


@pytest.mark.slow
def test_the_tests_of_the_kit_are_collected_and_skipped_with_reasons(
    gpu: ModuleType, tmp_path: Path, lines: Path
) -> None:
    parts = [part for part in gpu.plan("C", "cpu", tiny=True, work=tmp_path, bccd=tmp_path) if "tests" in part.name]
    for part in parts:
        subprocess.run([sys.executable, *part.command], cwd=ROOT, check=True, capture_output=True)
    found = list(map(json.loads, lines.read_text().splitlines()))
    assert {line["test"].partition("::")[0] for line in found} == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "trainer" / "gpu").glob("test_*.py")
    }
    if not torch.cuda.is_available():
        assert all(line["outcome"] == "skipped" and line["reason"] for line in found)


@pytest.mark.slow
def test_predicted_memory_is_a_line_for_each_case(tmp_path: Path, lines: Path) -> None:
    case = {"model": "retinanet_tiny_fpn", "classes": 3, "batch": 2, "image_size": (64, 64)}
    request = {"how": "predicted", "device": "cpu", "tiny": True, "cases": [case]}
    found = run_part(tmp_path, f"import runpy\nsys.argv = ['', {json.dumps(request)!r}]\n"
                     f"runpy.run_path({str(ROOT / 'benchmarks/gpu/gpu_case.py')!r}, run_name='__main__')")  # fmt: skip
    assert found["exit"] == 0, found
    assert isinstance(found["output"], list)
    (line,) = map(json.loads, lines.read_text().splitlines())
    assert (line["what"], line["how"]) == ("retinanet_tiny_fpn", "predicted")
    assert line["predicted bytes"] > 1e6


@pytest.mark.parametrize("kit", ["A", "B", "C"])
def test_the_limits_of_a_command_fit_its_nine_minutes(gpu: ModuleType, kit: str, tmp_path: Path) -> None:
    parts = gpu.plan(kit, "cuda", tiny=False, work=tmp_path, bccd=tmp_path)
    assert sum(part.limit_s for part in parts if not part.rest) + gpu.SETUP_S <= gpu.KIT_S == 9 * 60
    assert len({part.name for part in parts}) == len(parts)


def test_the_first_command_begins_with_what_decides(gpu: ModuleType, tmp_path: Path) -> None:
    names = [part.name for part in gpu.plan("A", "cuda", tiny=False, work=tmp_path, bccd=tmp_path)]
    hows = ["convolutions", "compiled", "compiled fused", "choice", "profile", "eager", "eager fused", "graph"]
    assert names[:9] == ["machine", *(f"retinanet_resnet50_fpn, {how}" for how in hows)]
    case = gpu.CASES["retinanet_resnet50_fpn"]
    assert case == {"classes": 80, "batch": 32, "image_size": (800, 800), "goal": 500}
    assert not [part for part in gpu.plan("C", "cuda", tiny=False, work=tmp_path, bccd=tmp_path / "none")
                if "bccd" in part.name]  # fmt: skip


def write(path: Path, *lines: dict[str, Any], torn: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return path


def test_without_results_the_table_says_what_to_run(gpu_results: ModuleType) -> None:
    text = gpu_results.goals(gpu_results.read([]))
    assert "gpu-first.sh A" in text
    assert all(word in text for word in ("312", "428", "500", "295 (265–317)", "415 (355–457)", "420"))


def test_the_documents_have_the_table_of_the_committed_results(gpu_results: ModuleType) -> None:
    table = gpu_results.goal_table(gpu_results.read(sorted(gpu_results.RESULTS.glob("gpu-*.jsonl"))))
    assert table in (ROOT / "docs" / "benchmarks.md").read_text()


def test_what_falls_short_is_named_with_its_part_of_the_step(gpu_results: ModuleType, tmp_path: Path) -> None:
    model, case = "retinanet_resnet50_fpn", {"case": {"batch": 32, "goal": 500}}
    rates = [{"what": model, "how": "compiled", "img/s": rate, "eager img/s": 200.0} for rate in (390.0, 400.0, 410.0)]
    groups = {"convolutions": 60.0, "compiled": 15.0, "other": 4.0}
    path = write(
        tmp_path / "A.jsonl",
        {"what": model, "how": "compiled", "compile_s": 70.0, **case},
        *rates,
        {"what": model, "how": "profile", "compiled": {"ms by group": groups, "idle": 0.02, "kernels": [], "gaps": []}},
        {"what": model, "how": "convolutions", "TFLOP of the step": 27.0, **case},
        *(
            {"what": model, "how": "convolutions", "convolution": "x", "benchmark": on, "step_ms": ms, "tflop": 20.0}
            for on, ms in ((True, 50.0), (False, 60.0))
        ),
        {"part": f"{model}, graph", "exit": "limit", "s": 70.0, "error": "not done in 70 s", "frames": []},
        torn='{"what": "retinanet_resnet50_fpn", "how": "comp',
    )
    results = gpu_results.read([path])
    text = gpu_results.goals(results)
    assert "| 400 (390–410, n = 3) | 415 (355–457) |" in text
    assert "| 500 | 100 img/s |" in text
    assert "takes 80.0 ms a step; 500 img/s allow 64.0 ms: 16.0 ms too long (80% of the goal)" in text
    assert text.index("convolutions: 60.0 ms") < text.index("compiled: 15.0 ms") < text.index("other: 4.0 ms")
    assert "compiled 2.00 times as fast as eager" in text
    assert "take 50.0 ms a step with cudnn.benchmark on, 400 TFLOP/s; all at that rate 67.5 ms" in text
    assert text.count("out of reach") == 1
    assert "**retinanet_resnet50_fpn, graph** ended with limit: not done in 70 s" in text
    rows, bars = gpu_results.rows(results)
    assert [row["what"] for row in rows][:2] == [model, f"{model}, graph: failed"]
    assert [(bar.value, bar.goal, bar.ok) for bar in bars] == [(400.0, 500, False)]


def test_the_kernels_that_a_training_chooses_count(gpu_results: ModuleType, tmp_path: Path) -> None:
    model, case = "retinanet_resnet50_fpn", {"case": {"batch": 32, "goal": 500}}
    measured = {"compiled": 400.0, "compiled fused": 450.0, "graph": 420.0}
    rates = [{"what": model, "how": how, "img/s": rate, **case} for how, rate in measured.items()]
    choice = {"what": model, "how": "choice", "choice": "convs: fused, 31 ms separate, 26 ms fused; loss: fused"}

    def read(*more: dict[str, Any]) -> tuple[str, list[str], list[str]]:
        """The text; of rows and bars, what counts."""
        results = gpu_results.read([write(tmp_path / "A.jsonl", *rates, *more)])
        text = gpu_results.goals(results)
        counted = [line for line in text.splitlines() if line.endswith("img/s |") or line.endswith("met |")]
        return text, [line.split(" | ")[1][:3] for line in counted], [bar.name for bar in gpu_results.rows(results)[1]]

    text, counted, bars = read({**choice, "kernels": {"convs": True, "loss": True}})
    assert counted == ["450", "420"]
    assert bars == [f"{model}, compiled fused: img/s", f"{model}, graph: img/s"]
    assert "compiled 400 img/s, compiled fused 450 img/s. **compiled fused** counts." in text
    assert "convs: fused, 31 ms separate, 26 ms fused" in text
    assert text.count("too long (") == 2

    text, counted, bars = read({**choice, "kernels": {"convs": True, "loss": False}})
    assert counted == ["400", "420"]
    assert "**compiled** counts. compiled fused convs was not measured." in text
    both = {"what": model, "how": "compiled fused convs", "img/s": 440.0, **case}
    text, counted, bars = read({**choice, "kernels": {"convs": True, "loss": False}}, both)
    assert counted == ["440", "420"]
    assert "450 img/s" in text

    text, counted, bars = read()
    assert counted == ["400", "420"]
    assert bars == [f"{model}, compiled: img/s", f"{model}, graph: img/s"]
    assert "not measured, so separate operators count" in text


def test_what_all_engines_of_cudnn_gain_is_said(gpu_results: ModuleType, tmp_path: Path) -> None:
    model, how, case = "retinanet_resnet50_fpn", "compiled all engines", {"case": {"batch": 32, "goal": 500}}
    some = {"what": model, "how": "compiled", "img/s": 400.0, **case}
    every = {"what": model, "how": how, "img/s": 431.0, "first_s": 97.0, **case}
    results = gpu_results.read([write(tmp_path / "A.jsonl", some, every)])
    text = gpu_results.goals(results)
    assert "all of cuDNN's engines tried, the compiled step reaches 431 img/s, with at most 10 of them 400" in text
    assert "takes 97 s" in text
    rows, bars = gpu_results.rows(results)
    assert rows[0]["compiled all engines img/s"] == 431.0
    assert [bar.value for bar in bars] == [400.0]  # no training computes so


@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize(("how", "limit"), [("compiled all engines", 0), ("compiled fused", 10)])
def test_a_step_with_all_engines_sets_no_limit_to_them(
    how: str, limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu, gpu_case = (importlib.import_module(f"benchmarks.gpu.{name}") for name in ("gpu", "gpu_case"))
    found: list[tuple[str, int]] = []

    class Work:
        def __init__(self, *_: object, **__: object) -> None: ...

        def use_kernels(self, suffix: str) -> None:
            found.append((suffix, torch.backends.cudnn.benchmark_limit))

    monkeypatch.setattr(torch.backends.cudnn, "benchmark_limit", 10)
    monkeypatch.setattr(importlib.import_module("stoker.training.step"), "COMPILE_BACKEND", "inductor")
    monkeypatch.setattr(gpu_case, "Work", Work)
    monkeypatch.setitem(gpu_case.MEASURES, "compiled", lambda _: found.append(("measured", 0)))
    (part,) = [
        part
        for part in gpu.plan("A", "cpu", tiny=True, work=tmp_path, bccd=tmp_path)
        if part.name == f"retinanet_resnet50_fpn, {how}"
    ]
    gpu_case.main(json.loads(part.command[1]))
    assert found == [(how.removeprefix("compiled").removesuffix(" all engines"), limit), ("measured", 0)]


STEP_AND_LOOP = """
import dataclasses, json, tempfile
from pathlib import Path
import torch
graphs, compile = [], torch.compile
def keep(graph, inputs):
    graphs.append((graph.code, [(tuple(one.shape), one.stride(), one.dtype, one.requires_grad) for one in inputs]))
    return graph
torch.compile = lambda call, backend, **options: compile(call, backend=keep, **options)
from benchmarks.gpu.gpu_case import Case, Work
from benchmarks.steps import end_to_end
from stoker.hardware.device import Device
training = end_to_end.Training("retinanet_resnet18_fpn", 128, 8, 1, 1, 1)
work = Work(Case(training.model, 80, training.batch, (training.side, training.side)), Device(torch.device("cpu")))
work.train(work.eagerly, work.batch)
for _ in range(2):
    work.step(work.compiled)
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary) / "drawn"
    folder.mkdir()
    end_to_end.draw(folder, 16, 480, 640, 42)
    options = [*end_to_end.train_options(training), "--device", "cpu", "--workers", "1", "--compile"]
    options += ["--precision", "bf16"]
    command = {"training": dataclasses.asdict(training), "options": options}
    (folder / "command.json").write_text(json.dumps(command))
    end_to_end.train(folder, training.first, training.lead, training.steps, 1)
step, loop = graphs
assert step == loop
assert any(shape == (8, 96, 4) for shape, *_ in step[1])
print("the same program")
"""


@pytest.mark.slow
def test_the_loader_in_the_loop_trains_with_the_program_of_the_step(tmp_path: Path) -> None:
    found = run_part(tmp_path, STEP_AND_LOOP, limit_s=1200)
    assert found["exit"] == 0, found
    assert found["output"][-1] == "the same program"


def test_kernels_of_a_compiler_are_not_taken_for_convolutions() -> None:
    gpu_case = importlib.import_module("benchmarks.gpu.gpu_case")
    names = ["triton_poi_fused_add_convolution_relu_3", "cudnn_infer_ampere_conv_relu", "_focal_sums_kernel", "Memset"]
    assert [gpu_case.group_of(name) for name in names] == ["compiled", "convolutions", "matching and loss", "copies"]


def test_the_table_of_convolutions_has_the_arithmetic_of_the_step() -> None:
    gpu_convolutions = importlib.import_module("benchmarks.gpu.gpu_convolutions")
    first, second = nn.Conv2d(3, 8, 3, stride=2, padding=1), ConvReLU(nn.Conv2d(8, 8, 5, padding=2))
    images = torch.randn(2, 3, 15, 16)

    def step() -> None:
        second(second(first(images))).sum().backward()

    found = gpu_convolutions.largest(step)
    assert [(one.weight[2], one.calls) for one in found] == [(5, (2, 2, 2)), (3, (1, 0, 1))]
    with FlopCounterMode(display=False) as counter:
        step()
    assert gpu_convolutions.total_tflop(found) * 1e12 == pytest.approx(counter.get_total_flops())
    second.fused_convs = True
    assert gpu_convolutions.largest(step) == found


def test_a_gpu_chooses_its_convolutions_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    Device(torch.device("cpu")).prepare_for_fixed_shapes()
    assert not torch.backends.cudnn.benchmark
    Device(torch.device("cuda", 0)).prepare_for_fixed_shapes()
    assert torch.backends.cudnn.benchmark
