"""Stacks of real jobs by py-spy: windows, selection of processes, and the reason if stacks cannot be read."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.runs.records import STACKS, RunFolder, read_lines
from stoker.runs.schemas import StackWindow
from stoker.watch import stacks

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
    values = {"WINDOW_S": 0.3, "STARTUP_SAMPLE_INTERVAL_S": 0.02, "PROCESS_POLL_S": 0.02, "MAX_CPU_FRACTION": 100.0}
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
    monkeypatch.setattr(stacks, "WINDOW_S", 3.0)  # also beyond the start of the workers
    script = LOADER.format(**settings)
    (tmp_path / "loader.py").write_text(script)
    process = subprocess.Popen([sys.executable, tmp_path / "loader.py"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    lines, reasons = sampled(process.pid, tmp_path)
    process.kill()
    process.communicate()
    assert reasons == []
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
    assert {process.pid for process in sampler._busiest_processes()} >= {os.getpid(), *pids}
    trainers[children[1].pid] = 1
    assert {process.pid for process in sampler._busiest_processes()} == trainers.keys()
    assert {samples.rank for process, samples in sampler._windows.items() if process.pid in trainers} == {1}
    for child in children:
        child.communicate(b"\n")
    trainers[-1] = 0
    assert os.getpid() in {process.pid for process in sampler._busiest_processes()}, "they ended"


def test_a_window_of_stacks_has_the_cpu_time_of_all_threads() -> None:
    samples = stacks._StackSamples(1, 0, "", start_s=100.0, start_cpu_s=10.0)
    used: list[float | None] = []
    for now_s, cpu_s in ((110.0, 25.0), (114.0, 27.0), (116.0, None)):
        samples.main_thread["compute"] = 2
        window = samples.make_window(now_s, 1, cpu_s)
        assert window is not None
        used.append(window.process_cpu)
    assert used == [1.5, 0.5, None], "at last it had ended"
    assert samples.make_window(120.0, 1, None) is None, "without samples"


def test_samples_stay_within_their_budget_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 at once, then one in 1.5 s, of 15 ms each."""
    monkeypatch.setattr(stacks, "MAX_CPU_FRACTION", 0.01)
    assert stacks._affordable_after_s(20 * 0.015, elapsed_s=0.1) <= 0
    assert stacks._affordable_after_s(21 * 0.015, elapsed_s=0.1) == pytest.approx(1.4)
    assert stacks._affordable_after_s(21 * 0.015, elapsed_s=3.0) <= 0
    assert stacks._affordable_after_s(9.0, elapsed_s=10.0) == 60.0


def test_a_launcher_that_imports_the_framework_first_is_a_helper() -> None:
    def stack(file: str, function: str) -> list[stacks._PySpyThread]:
        return [stacks._PySpyThread(1, True, [stacks.Frame(function, file, 1)], 1)]

    imports = stack("<frozen importlib._bootstrap>", "_find_and_load")
    launches = stack("/lib/site-packages/torch/distributed/launcher/api.py", "launch_agent")
    trains = stack("/lib/site-packages/torch/optim/sgd.py", "step")
    launcher, trainer = (stacks._StackSamples(1, 0, "", 0.0) for _ in range(2))
    assert [launcher.add(one) for one in (imports, launches)] == [True, False]
    assert [trainer.add(one) for one in (imports, trains, launches)] == [True, True, True]
