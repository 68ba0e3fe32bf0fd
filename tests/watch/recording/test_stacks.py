"""Stacks of real jobs: windows, selection of processes, and the reason if stacks cannot be read."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker_watch.recording import own_stacks, stacks
from stoker_watch.recording.frames import HELPER, Frame, Samples, find_role, find_trainer, make_window, working_threads
from stoker_watch.recording.telemetry.machine import read_life
from stoker_watch.runs.records import STACKS, RunFolder, read_lines
from stoker_watch.runs.schemas import StackWindow

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
    values = {"WINDOW_S": 0.5, "FIRST_WINDOW_S": 0.5, "PROCESS_POLL_S": 0.2, "MAX_CPU_FRACTION": 100.0}
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
    with stacks.StackSampler(folder, pid, on_status=reasons.append):
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


def test_a_shell_that_becomes_python_is_sampled(tmp_path: Path) -> None:
    """As pyenv's `python` does, after some work of its own."""
    (tmp_path / "train.py").write_text(WAITS)
    shim = 'i=0; while [ $i -lt 300000 ]; do i=$((i + 1)); done; read -r line; exec "$0" -S train.py'
    process = subprocess.Popen(["sh", "-c", shim, sys.executable], cwd=tmp_path, stdin=subprocess.PIPE)
    until((life := read_life(process.pid)) is not None and life.cpu_s > 0.05 for _ in range(3000))
    folder, reasons = RunFolder(tmp_path, 4), list[str]()
    sampler = stacks.StackSampler(folder, process.pid, on_status=reasons.append)
    assert sampler._find_targets(time.monotonic()) == []
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    with sampler:
        until(bool(reasons) or (tmp_path / STACKS).exists() for _ in range(3000))
    folder.close()
    process.communicate(b"\n")
    assert reasons == []
    assert next(read_lines(tmp_path, STACKS, StackWindow)).pid == process.pid


def test_a_job_without_python_has_a_reason(tmp_path: Path) -> None:
    folder, reasons = RunFolder(tmp_path, 1), []
    process = subprocess.Popen(["sleep", "60"])
    with stacks.StackSampler(folder, process.pid, on_status=reasons.append):
        pass
    process.kill()
    process.wait()
    folder.close()
    assert reasons == ["not recorded: no Python process of the job was seen"]


def test_a_process_that_may_not_be_read_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(stacks, "RemoteStacks", refuse)
    with job(WAITS, tmp_path) as process:
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
        RunFolder(tmp_path, 1), os.getpid(), on_status=print, training_ranks=lambda: trainers,
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
        ([Frame(own_stacks.record.__name__, own_stacks.__file__, 1)], HELPER),
        ([Frame(own_stacks.record_training.__name__, own_stacks.__file__, 1)], HELPER),
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


def test_threads_that_work_or_block_in_the_jobs_code_are_samples_and_those_that_wait_for_work_are_not() -> None:
    """A function that a pipeline of TensorFlow calls, a thread that waits for a lock, one that blocks in a socket, one
    that has ended, and one of a library."""
    wait = Frame("wait", "/usr/lib/python3.11/threading.py", 327)
    inner = Frame("denoise.<locals>.<listcomp>", "/job/set.py", 9)
    denoise, pulls, logs = (Frame(name, "/job/set.py", 9) for name in ("denoise", "pulls", "logs"))
    library = Frame("run", SITE + "tensorboard/writer.py", 4)
    others = {2: [([inner, denoise], 60), ([wait, denoise], 40)], 3: [([wait, pulls], 100)], 4: [([logs], 100)],
              5: [([pulls], 100)], 6: [([library], 100)]}  # fmt: skip
    found = working_threads(others, 100, {2: 0.6, 3: 0.0, 4: 0.01, 5: None, 6: 1.0}.get)
    assert found == [("thread", [([inner, denoise], 60), ([], 40)], 0.6), ("thread", [([logs], 100)], 0.0)]
    window = window_of(found[0][1], role="thread", cwd="/job")
    assert [(p.line, p.function, p.kind, p.samples) for p in window.places] == [
        ("set.py:9", "denoise", "python", 60), ("", "", "other", 40)
    ]  # fmt: skip
    blocked = window_of(found[1][1], role="thread", runnable=0.0, cwd="/job")
    assert [(p.line, p.function, p.kind) for p in blocked.places] == [("set.py:9", "logs", "idle")]
    assert working_threads({3: others[3]}, 100, {3: 1.0}.get) == []


def test_a_thread_that_computes_gradients_trains_while_the_main_one_waits() -> None:
    """A learner in a thread of its own, as of IMPALA; a thread that only plays, with a forward pass."""
    backward = Frame("_engine_run_backward", SITE + "torch/autograd/graph.py", 5)
    learn, play, wait = (Frame(name, "/job/train.py", 9) for name in ("learn", "play", "main"))
    forward = Frame("_call_impl", SITE + "torch/nn/modules/module.py", 1)
    sleeps = Frame("wait", "/usr/lib/python3.11/threading.py", 327)
    main, learner, player = ([([sleeps, wait], 40)], [([backward, learn], 30)], [([forward, play], 10), ([play], 30)])
    assert find_trainer(main, {5: player, 6: learner}) == 6
    assert find_trainer(main, {5: player}) is None
    assert find_trainer(main, {5: [([forward, play], 40)]}) == 5
    assert find_trainer(learner, {5: player, 6: learner}) is None
    assert find_trainer(main, {5: player, 6: main}, known=6) == 6, "it waits for the players"
    assert find_trainer(learner, {5: player, 6: main}, known=6) is None


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
    assert found == [
        ("worker", [([*reads, item], 50), ([sleeps], 10), (decodes, 20), ([], 20)], 0.2),
        ("thread", [(decodes, 5), ([], 95)], 0.05),
    ]
    window = window_of(found[0][1], role="worker", runnable=0.2, cwd="/job")
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
    """A stack does not say whether a thread waits in a C function that no rule knows."""
    unknown, trains = [Frame("train", "/job/train.py", 1)], [TRAINS]
    assert window_of([(unknown, 50), (trains, 50)], runnable=0.6).main_thread == {"idle": 0.5, "compute": 0.5}
    assert window_of([(unknown, 50), (trains, 50)], runnable=0.9).main_thread == {"python": 0.5, "compute": 0.5}
    assert window_of([(unknown, 50)], runnable=None).main_thread == {"python": 1.0}


def test_the_rate_follows_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fraction of 0.01 of a core, whatever a sample costs, with what else is done, but for the lowest rate; at the
    start, the samples of the next minute are taken as well."""
    monkeypatch.setattr(stacks, "MAX_CPU_FRACTION", 0.01)
    monkeypatch.setattr(stacks, "PROCESS_POLL_S", 2.0)

    def spent(cost_s: float, other_s: float = 0.0, length_s: int = 1000) -> list[float]:
        """CPU-seconds so far, at each second."""
        sampler = stacks.StackSampler(RunFolder(Path(os.devnull).parent, 1), 1, on_status=print)
        so_far, found = other_s, list[float]()
        for second in range(length_s):
            sampler._follow_cost(cost_s, so_far, float(second))
            so_far += cost_s * sampler._rate_hz
            found.append(so_far)
        return found

    for cost_s in (0.0011, 0.002, 0.009):
        so_far = spent(cost_s)
        assert so_far[-1] == pytest.approx(10.3, abs=0.2), "the rest of the advance"
        assert so_far[29] == pytest.approx(0.3 + 0.19, abs=0.1), "a short job has most of it at once"
        assert all(cpu_s <= 0.01 * (60 + second + 1) for second, cpu_s in enumerate(so_far))
    assert spent(0.0001)[-1] == pytest.approx(5.0, rel=0.01), "no more than 50 a second"
    assert spent(0.1)[-1] == pytest.approx(100, rel=0.01), "no less than one"
    assert spent(0.002, other_s=0.5)[-1] == pytest.approx(10.3, abs=0.2), "source files at the start"


def test_samples_that_are_expensive_because_they_are_rare_are_tried_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "MAX_CPU_FRACTION", 0.01)
    sampler = stacks.StackSampler(RunFolder(tmp_path, 1), 1, on_status=print)
    so_far, rates, cost_s = 0.4, list[float](), 0.01
    for second in range(20, 140, 2):
        sampler._follow_cost(cost_s, so_far, float(second))
        rates.append(sampler._rate_hz)
        cost_s = 0.003 if rates[-1] < 10 else 0.00025
        so_far += 2 * cost_s * sampler._rate_hz
        assert so_far <= 0.01 * (60 + second + 2)
    assert max(rates[:5]) < 10
    assert min(rates[-20:]) > 20


def test_a_process_that_imports_is_sampled_half_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_CPU_FRACTION", 0.01)
    sampler = stacks.StackSampler(RunFolder(Path(os.devnull).parent, 1), 1, on_status=print)
    rates = []
    for starting in (True, False):
        sampler._follow_cost(0.002, 0.1, 2.0, starting=starting)
        rates.append(sampler._rate_hz)
    assert rates == pytest.approx([2.5, 8.7], rel=0.05)


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

    with stacks.StackSampler(folder, process.pid, on_status=print):
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
    sampler = stacks.StackSampler(folder, process.pid, on_status=print)
    with sampler:
        until(any(target.window for target in list(sampler._processes.values())) for _ in range(6000))
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
    if ending == "exits":  # a sample may see it decode the line, and end
        assert line.main_thread["idle"] > 0.9
    else:
        assert line.main_thread == {"idle": 1.0}
