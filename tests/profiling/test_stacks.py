"""Stacks of real jobs by py-spy: windows, selection of processes, and the reason if stacks cannot be read."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.profiling import stacks
from stoker.profiling.frames import HELPER, Frame, Samples, add_failed, find_role, make_window, weigh, working_threads
from stoker.runs.records import STACKS, RunFolder, read_lines
from stoker.runs.schemas import StackWindow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="`stoker watch` is for Linux")

WAITS = """
import sys
def wait_for_input():
    sys.stdin.readline()
print("ready", flush=True)
wait_for_input()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines after a few samples; the cost is measured by hand, and on a shared machine by nothing."""
    values = {"WINDOW_S": 0.5, "FIRST_WINDOW_S": 0.5, "PROCESS_POLL_S": 0.2, "TICK_S": 0.02, "MAX_CPU_FRACTION": 100.0}
    for name, value in values.items():
        monkeypatch.setattr(stacks, name, value)


def job(code: str, folder: Path, **variables: str) -> "subprocess.Popen[bytes]":
    script = folder / "train.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, "-S", script], cwd=folder, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, env={**os.environ, **variables})  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def until(what: Iterator[bool]) -> None:
    for is_so in what:
        if is_so:
            return
        time.sleep(0.01)
    raise AssertionError("did not happen")


def sampled(pid: int, run: Path, name: str = STACKS) -> tuple[list[StackWindow], list[str]]:
    """(the lines of at least one window, what was said)"""
    folder, reasons = RunFolder(run, 4), []
    with stacks.StackSampler(folder, pid, on_unavailable=reasons.append):
        until(bool(reasons) or (run / name).exists() for _ in range(3000))
    folder.close()
    return list(read_lines(run, name, StackWindow)), reasons


@pytest.mark.parametrize(("rank", "name"), [("0", STACKS), ("3", f"ranks/0003/{STACKS}")])
def test_a_python_job_has_windows(rank: str, name: str, tmp_path: Path) -> None:
    process = job(WAITS, tmp_path, RANK=rank)
    lines, reasons = sampled(process.pid, tmp_path, name)
    process.communicate(b"\n")
    assert reasons == []
    window = lines[0]
    assert (window.attempt, window.pid) == (4, process.pid)
    assert window.main_thread == {"idle": 1.0}
    assert window.frames == {"wait_for_input (train.py:4)": 1.0}
    assert window.samples >= 1


def test_a_job_without_python_has_a_reason(tmp_path: Path) -> None:
    folder, reasons = RunFolder(tmp_path, 1), []
    process = subprocess.Popen(["sleep", "60"])
    with stacks.StackSampler(folder, process.pid, on_unavailable=reasons.append):
        pass
    process.kill()
    process.wait()
    folder.close()
    assert reasons == ["not recorded: no Python process of the job was seen"]


def test_without_py_spy_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    lines, reasons = sampled(os.getpid(), tmp_path)
    assert (lines, reasons) == ([], ["not recorded: py-spy is not installed"])


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs to become somebody else")
def test_a_process_that_may_not_be_read_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text(f'#!/bin/sh\nexec setpriv --reuid=65534 --clear-groups {stacks.find_py_spy()} "$@"\n')
    spy.chmod(0o755)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: str(spy))
    process = job(WAITS, tmp_path)
    lines, reasons = sampled(process.pid, tmp_path)
    process.communicate(b"\n")
    assert lines == []
    assert len(reasons) == 1
    assert reasons[0].startswith("not recorded: reading another process is not permitted here (")


LOADER = """
import time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, i):
        time.sleep({wait})
        return torch.rand(64)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range({layers})])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("ready", flush=True)
for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers={workers}):
    loss = model(batch).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"wait": 0.05, "layers": 1, "workers": 2}, "input_wait"),
        ({"wait": 0.0, "layers": 1500, "workers": 0}, "compute"),
    ],
)
def test_real_torch_jobs_wait_or_compute(
    settings: dict[str, float], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "FIRST_WINDOW_S", 3.0)  # also beyond the start of the workers
    script = LOADER.format(**settings)
    (tmp_path / "loader.py").write_text(script)
    process = subprocess.Popen([sys.executable, tmp_path / "loader.py"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    lines, reasons = sampled(process.pid, tmp_path)
    process.kill()
    process.communicate()
    assert reasons == []
    lines = [line for line in lines if line.role == "training"]
    assert {line.pid for line in lines} == {process.pid}, "workers are no trainers"
    assert max(lines[0].main_thread, key=lambda name: lines[0].main_thread[name]) == kind
    assert lines[0].main_thread[kind] > 0.6


def test_of_a_job_with_the_hook_only_processes_that_train_are_sampled(tmp_path: Path) -> None:
    """A launcher (this process) with two Python children, of which the hook knows one."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    children = [job(WAITS, folder) for folder in folders]
    trainers: dict[int, int] = {}
    sampler = stacks.StackSampler(
        RunFolder(tmp_path, 1), os.getpid(), on_unavailable=print, training_ranks=lambda: trainers,
    )  # fmt: skip
    pids = {child.pid for child in children}
    assert {target.pid for target in sampler._find_targets(0.0)} >= {os.getpid(), *pids}
    trainers[children[1].pid] = 1
    assert {(target.pid, target.rank) for target in sampler._find_targets(0.0)} == {(children[1].pid, 1)}
    for child in children:
        child.communicate(b"\n")
    assert os.getpid() in {target.pid for target in sampler._find_targets(0.0)}, "they ended"


SITE = "/lib/site-packages/"
IMPORTS = Frame("_find_and_load", "<frozen importlib._bootstrap>", 1)
LAUNCHES = Frame("launch_agent", SITE + "torch/distributed/launcher/api.py", 1)
TRAINS = Frame("step", SITE + "torch/optim/sgd.py", 1)
WORKS = Frame("_worker_loop", SITE + "torch/utils/data/_utils/worker.py", 1)
TRACKS = Frame("main", "/lib/python3.11/multiprocessing/resource_tracker.py", 1)


@pytest.mark.parametrize(
    ("frames", "role"),
    [
        ([IMPORTS], ""),
        ([IMPORTS, LAUNCHES], HELPER),
        ([IMPORTS, TRAINS, LAUNCHES], "training"),
        ([IMPORTS, WORKS], "worker"),
        ([TRACKS], HELPER),
    ],
)
def test_the_role_of_a_process_is_known_by_its_stacks(frames: list[Frame], role: str) -> None:
    assert find_role([([frame], 1) for frame in frames]) == role


RAW = """\
thread (12): MainThread;<module> (train.py:9);read (a; b).py:3) 1
thread (12): MainThread;<module> (train.py:9);load (/data (old)/set.py:3) 4
thread (12): MainThread;<module> (train.py:9);_find_and_load (<frozen importlib._bootstrap>:1360) 2
thread (13): pin_memory;run (/usr/lib/python3.11/threading.py:9) 6
nonsense
"""


def test_the_main_thread_is_told_from_the_others_in_the_raw_format() -> None:
    samples, others = stacks.parse_samples(RAW, 12, "/job")
    assert list(others) == [13]
    assert [(stack[0], count) for stack, count in samples[1:]] == [
        (Frame("load", "/data (old)/set.py", 3), 4),
        (Frame("_find_and_load", "<frozen importlib._bootstrap>", 1360), 2),
    ]
    assert samples[1][0][1] == Frame("<module>", "/job/train.py", 9)


def test_samples_that_failed_are_of_code_whose_frames_change(tmp_path: Path) -> None:
    """py-spy fails to read a stack that changes meanwhile: counted with those, else a long call seems longer."""
    (tmp_path / "train.py").write_text("import cv2\n\ndef load():\n    return cv2.fastNlMeansDenoising(image)\n")
    train = str(tmp_path / "train.py")
    long_call = [Frame("load", train, 4), Frame("<module>", train, 9)]
    wait = [Frame("wait", "/usr/lib/python3.11/threading.py", 327), Frame("<module>", train, 9)]
    model = [Frame("conv2d", "/x/site-packages/torch/nn/functional.py", 9), Frame("<module>", train, 10)]
    step = [Frame("step", "/x/site-packages/torch/optim/adam.py", 5), Frame("<module>", train, 11)]
    samples = [(long_call, 30), (model, 10), (wait, 20), (step, 5)]
    assert [count for _, count in add_failed(samples, 0)] == [30, 10, 20, 5]
    assert [count for _, count in add_failed(samples, 8)] == [30, 14, 20, 9]
    assert [count for _, count in add_failed(samples[::2], 8)] == [30, 20], "nothing that could have failed"


def test_samples_that_failed_are_of_python_rather_than_of_a_forward_pass() -> None:
    """Recorded of a job (MTGNN, a window of 10 s): pandas took 3.1 s of each 10 s by the job's clock, and had 6 of 87
    samples; 23 failed, and one has the inner frames alone."""
    train, torch = Frame("<module>", "/job/train.py", 220), SITE + "torch/"
    engine = Frame("_engine_run_backward", torch + "autograd/graph.py", 9)
    backward = [engine, Frame("backward", torch + "autograd/__init__.py", 353), Frame("train", "/job/train.py", 85)]
    convolution = Frame("_conv_forward", torch + "nn/modules/conv.py", 543)
    forward = [([convolution, Frame("forward", "/job/layer.py", line), train], 1) for line in range(23)]
    apply = [Frame("apply", SITE + "pandas/core/frame.py", 9), Frame("get_batches", "/job/util.py", 86)]
    pandas = [[Frame("get_loc", SITE + "pandas/core/indexes/range.py", line), *apply] for line in range(6)]
    samples = [([*backward, train], 57), *forward, *(([*stack, train], 1) for stack in pandas), (pandas[0][:2], 1)]
    found = add_failed(samples, 23)
    assert [count for stack, count in found if stack[1].function == "backward"] == [57]
    assert sum(count for stack, count in found if stack[1].function == "apply") == 18, "three times as many at most"
    assert len(found) == len(samples) - 1, "the one without the outer frames"
    called = [Frame("_call_impl", torch + "nn/modules/module.py", 1775), Frame("train", "/job/train.py", 81), train]
    inside = [(stack[:-1] + called, count) for stack, count in samples[1:-1]]
    found = add_failed([samples[0], *inside], 23)
    assert sum(count for stack, count in found if stack[1].function == "apply") == 18, "also in a forward pass"
    threading_py = "/usr/lib/python3.11/threading.py"
    ends = ([Frame("wait", threading_py, 327), Frame("_shutdown", threading_py, 1553)], 30)
    assert add_failed([*samples[:-1], ends, ([], 2)], 0)[-1] == ends, "another thread's end is awaited"
    assert add_failed([([], 27), (pandas[0], 3)], 0) == [([], 27), (pandas[0], 3)], "Python has ended"


STACK_PARTS = [
    Frame("_conv_forward", SITE + "torch/nn/modules/conv.py", 543), Frame("forward", "/job/layer.py", 3),
    Frame("get_loc", SITE + "pandas/core/frame.py", 5), Frame("load", "/job/data.py", 7),
    Frame("load", "/job/data.py", 8), Frame("wait", "/usr/lib/python3.11/threading.py", 327),
    Frame("<module>", "/job/train.py", 9),
]  # fmt: skip


@given(
    st.lists(st.tuples(st.lists(st.sampled_from(STACK_PARTS), max_size=4), st.integers(0, 50)), max_size=12),
    st.integers(0, 100),
)
def test_no_stack_loses_samples_to_those_that_failed(samples: Samples, num_failed: int) -> None:
    found = add_failed(samples, num_failed)
    assert sum(count for _, count in found) <= sum(count for _, count in samples) + num_failed
    kept = iter(samples)
    for stack, count in found:
        before = next(old for old_stack, old in kept if old_stack == stack and old <= count)
        assert count <= 3 * before + 1, "a few samples never count as many"
        assert count == before or not stack or stack[0].function != "wait", "py-spy reads a wait"


def test_samples_are_as_many_as_the_clock_in_the_process_says() -> None:
    """Recorded of a job (U²-Net, 40 s): 7 s of samples in the loader, 12 by its clock."""
    torch, train = "/x/site-packages/torch", Frame("<module>", "/job/train.py", 9)
    decode = [Frame("load", "/x/site-packages/PIL/ImageFile.py", 3), Frame("__getitem__", "/job/data.py", 5)]
    other = [Frame("__getitem__", "/job/data.py", 6)]
    loader = [Frame("fetch", f"{torch}/utils/data/_utils/fetch.py", 52),
              Frame("_BaseDataLoaderIter.__next__", f"{torch}/utils/data/dataloader.py", 734), train]  # fmt: skip
    engine = [Frame("_engine_run_backward", f"{torch}/autograd/graph.py", 841),
              Frame("backward", f"{torch}/autograd/__init__.py", 353), train]  # fmt: skip
    forward = [Frame("conv2d", f"{torch}/nn/functional.py", 9), train]
    samples = [([*decode, *loader], 12), ([*other, *loader], 6), (engine, 50), (forward, 32)]

    def weighed(**known_s: float) -> list[int]:
        return [count for _, count in weigh(samples, known_s, 40.0)]

    assert weighed(input_wait=12.0, backward=14.0) == [20, 10, 35, 35]
    assert weighed(input_wait=12.0) == [20, 10, 43, 27]
    assert weighed(input_wait=12.0, backward=14.0, eval=0.1) == [16, 7, 35, 42], "waits of an evaluation are not told"
    assert weighed() == weighed(input_wait=0.0) == [12, 6, 50, 32]
    assert weighed(input_wait=39.0) == [36, 18, 28, 18], "at most three times as many"
    assert sum(weighed(input_wait=0.1, backward=1.0)) == 100
    assert weigh(samples[2:3], {"backward": 3.0}, 40.0) == samples[2:3], "the rest has no samples"
    few = [*samples[2:], ([*decode, *loader], 4)]
    assert weigh(few, {"input_wait": 12.0}, 40.0) == few, "four samples that count as many would be certain"


def test_py_spy_says_how_many_samples_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int | None] = []
    original = stacks.find_failed

    def find_failed(text: str) -> int | None:
        found.append(original(text))
        return found[-1]

    assert find_failed("py-spy> Wrote raw flamegraph data to 'o.raw'. Samples: 47 Errors: 8\n") == 8
    monkeypatch.setattr(stacks, "find_failed", find_failed)
    with job(WAITS, tmp_path) as process:
        sampled(process.pid, tmp_path / "run")
        process.kill()
    assert len(found) >= 2
    assert None not in found


def test_threads_that_work_in_the_jobs_code_are_samples_and_those_that_wait_are_not() -> None:
    """A function that a pipeline of TensorFlow calls, a thread that waits for a lock, one that blocks in a socket, one
    that has ended, and one of a library."""
    wait = Frame("wait", "/usr/lib/python3.11/threading.py", 327)
    inner = Frame("denoise.<locals>.<listcomp>", "/job/set.py", 9)
    denoise, pulls, logs = (Frame(name, "/job/set.py", 9) for name in ("denoise", "pulls", "logs"))
    library = Frame("run", SITE + "tensorboard/writer.py", 4)
    others = {2: [([inner, denoise], 60), ([wait, denoise], 40)], 3: [([wait, pulls], 100)], 4: [([logs], 100)],
              5: [([pulls], 100)], 6: [([library], 100)]}  # fmt: skip
    found = working_threads(others, 100, {2: 0.6, 3: 0.0, 4: 0.01, 5: None, 6: 1.0}.get)
    assert found == {"thread": ([([inner, denoise], 60), ([], 40)], 0.6)}
    window = window_of(found["thread"][0], role="thread", cwd="/job")
    assert [(p.line, p.function, p.kind, p.samples) for p in window.places] == [
        ("set.py:9", "denoise", "python", 60), ("", "", "other", 40)
    ]  # fmt: skip
    assert working_threads({3: others[3]}, 100, {3: 1.0}.get) == {}


def test_threads_of_a_loader_are_workers_also_where_they_wait_or_have_ended() -> None:
    """Keras's pool of threads in an HTTP request, a py_function of TensorFlow that sleeps, one that has ended in a
    decoder, a pool without a task, a thread of the job's own that has ended in a decoder."""
    pool = [Frame("worker", "/usr/lib/python3.11/multiprocessing/pool.py", 125),
            Frame("run", "/usr/lib/python3.11/threading.py", 982)]  # fmt: skip
    keras = Frame("get_index", SITE + "keras/src/trainers/data_adapters/py_dataset_adapter.py", 9)
    py_function = Frame("__call__", SITE + "tensorflow/python/ops/script_ops.py", 145)
    python = "/usr/lib/python3.11/"
    reads = [Frame("readinto", python + "socket.py", 7), Frame("urlopen", python + "urllib/request.py", 9)]
    item, sleeps = Frame("__getitem__", "/job/set.py", 9), Frame("load", "/job/set.py", 12)
    decodes = [Frame("load", SITE + "PIL/ImageFile.py", 293), Frame("open_image", "/job/set.py", 20)]
    idle_pool = [Frame("get", "/usr/lib/python3.11/multiprocessing/queues.py", 9), *pool]
    others = {2: [([*reads, item, keras, *pool], 50), (idle_pool, 50)], 3: [([sleeps, py_function], 10)],
              4: [([*decodes, py_function], 20)], 5: [(idle_pool, 100)], 6: [(decodes, 5)]}  # fmt: skip
    found = working_threads(others, 100, {2: 0.0, 3: 0.0, 5: 0.0}.get)
    assert found["worker"] == ([([*reads, item], 50), ([sleeps], 10), (decodes, 20), ([], 20)], 0.2)
    assert found["thread"] == ([(decodes, 5), ([], 95)], 0.05)
    window = window_of(found["worker"][0], role="worker", runnable=0.2, cwd="/job")
    assert [(p.line, p.kind, p.samples) for p in window.places if p.line] == [
        ("set.py:9", "idle", 50), ("set.py:20", "decode", 20), ("set.py:12", "idle", 10)
    ]  # fmt: skip


def window_of(samples: Samples, **fields: object) -> StackWindow:
    values = {"role": "training", "t": 1.0, "attempt": 1, "pid": 7, "wall_s": 10.0}
    window = make_window(samples, **{**values, **fields})  # type: ignore[arg-type]
    assert window is not None
    assert sum(place.samples for place in window.places) == window.samples
    return window


def test_the_places_of_a_window(tmp_path: Path) -> None:
    """Own line, call and innermost frame; of a worker without the frames of the process from which it was forked."""
    script = tmp_path / "train.py"
    script.write_text("import copy, time\nimport pandas as pd\ncopy.deepcopy(1)\npd.read_csv('x')\ntime.sleep(9)\n")
    main = [Frame("<module>", str(script), line) for line in range(1, 6)]
    copies = Frame("deepcopy", "/usr/lib/python3.11/copy.py", 128)
    parses = Frame("read", SITE + "pandas/io/parsers/c_parser.py", 5)
    reads_csv = Frame("read_csv", SITE + "pandas/io/parsers/readers.py", 9)
    fetch = Frame("fetch", SITE + "torch/utils/data/_utils/fetch.py", 9)
    forked = Frame("<module>", str(script), 1)
    installed = Frame("run", SITE + "yolo/train.py", 4)
    found = [
        window_of([([copies, main[2]], 30), ([parses, reads_csv, main[3]], 9), ([main[4]], 1)], cwd=str(tmp_path)),
        window_of([([parses, reads_csv, main[3], fetch, WORKS, forked], 2), ([fetch, WORKS, forked], 1)],
                  role="worker", cwd=str(tmp_path)),
        window_of([([reads_csv, installed, Frame("main", "/bin/yolo", 8)], 1)]),
    ]  # fmt: skip
    assert [[(p.line, p.call, p.leaf, p.kind, p.samples) for p in window.places] for window in found] == [
        [("train.py:3", "copy.deepcopy", "", "python", 30),
         ("train.py:4", "pandas.read_csv", "read (parsers/c_parser.py)", "python", 9),
         ("train.py:5", "time.sleep", "", "idle", 1)],
        [("train.py:4", "pandas.read_csv", "read (parsers/c_parser.py)", "python", 2), ("", "", "", "other", 1)],
        [("site-packages/yolo/train.py:4", "pandas.io.parsers.readers.read_csv", "", "python", 1)],
    ]  # fmt: skip


def test_a_thread_without_cpu_time_waits() -> None:
    """py-spy does not say whether a thread waits in a C function that no rule knows."""
    unknown, trains = [Frame("train", "/job/train.py", 1)], [TRAINS]
    assert window_of([(unknown, 50), (trains, 50)], runnable=0.6).main_thread == {"idle": 0.5, "compute": 0.5}
    assert window_of([(unknown, 50), (trains, 50)], runnable=0.9).main_thread == {"python": 0.5, "compute": 0.5}
    assert window_of([(unknown, 50)], runnable=None).main_thread == {"python": 1.0}


def test_the_rate_follows_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fraction of 0.01 of a core, whatever the processes and their cost, with the thread that reads the samples."""
    monkeypatch.setattr(stacks, "MAX_CPU_FRACTION", 0.01)
    monkeypatch.setattr(stacks, "WINDOW_S", 10.0)
    sampler = stacks.StackSampler(RunFolder(Path(os.devnull).parent, 1), 1, on_unavailable=print)
    costs = ((0.05, 2), (0.05, 3), (0.05, 4), (0.05, 9), (0.2, 2))

    def windows(own_fraction: float) -> list[tuple[int, float]]:
        sampler._own_fraction = own_fraction
        found = []
        for sampler._cost_s, targets in costs:
            rate_hz, window_s = sampler._window(targets)
            found.append((rate_hz, round(window_s, 1)))
        return found

    assert windows(0.0) == [(10, 10.0), (4, 10.0), (4, 20.0), (1, 23.4), (1, 20.8)]
    assert windows(0.003) == [(4, 10.0), (4, 20.0), (2, 20.0), (1, 33.4), (1, 29.7)]
    assert {rate_hz for rate_hz, _ in windows(0.02)} == {1}
    sampler._overspent_s = 0.6  # half of the budget of 120 s
    assert windows(0.0)[0] == (4, 20.0)


@pytest.mark.slow
def test_workers_are_sampled_in_turn(tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text(LOADER.format(wait=0.05, layers=1, workers=2))
    process = subprocess.Popen([sys.executable, tmp_path / "loader.py"], stdout=subprocess.PIPE)
    folder = RunFolder(tmp_path, 1)
    workers: dict[int, StackWindow] = {}

    def both_are_seen() -> bool:
        lines = read_lines(tmp_path, STACKS, StackWindow) if (tmp_path / STACKS).exists() else []
        workers.update({line.pid: line for line in lines if line.role == "worker" and line.places[0].line})
        return len(workers) == 2

    with stacks.StackSampler(folder, process.pid, on_unavailable=print):
        until(both_are_seen() for _ in range(12000))
    process.kill()
    process.communicate()
    folder.close()
    assert process.pid not in workers
    assert {line.places[0].call for line in workers.values()} == {"time.sleep"}


@pytest.mark.parametrize("ending", ["exits", "is stopped"])
def test_the_samples_of_the_last_seconds_are_not_lost(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a window the job ends, or the watcher does while the job does nothing at all."""
    for name in ("WINDOW_S", "FIRST_WINDOW_S"):
        monkeypatch.setattr(stacks, name, 3600.0)
    process = job(WAITS, tmp_path)
    folder = RunFolder(tmp_path, 1)
    sampler = stacks.StackSampler(folder, process.pid, on_unavailable=print)
    with sampler:
        until(bool(sampler._recordings) for _ in range(6000))
        if ending == "exits":
            time.sleep(1.0)  # some samples; how many does not matter
            process.communicate(b"\n")
            until((tmp_path / STACKS).exists() for _ in range(6000))
        else:
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
    process.kill()
    process.wait()
    folder.close()
    (line,) = read_lines(tmp_path, STACKS, StackWindow)
    assert line.places[0].line == "train.py:4"
    assert line.main_thread == {"idle": 1.0}
