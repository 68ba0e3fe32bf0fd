"""What ended a job is found in what it really prints, with the line quoted; what nothing proves is not reported."""

import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_watch.diagnosis.endings import UNEXPLAINED, endings, find_tracebacks, line_patterns, strip_rank_prefix
from stoker_watch.diagnosis.engine import diagnose
from stoker_watch.diagnosis.postmortem import _find_matches, explain, explain_unknown
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.diagnosis.run_data import HangInfo, LogLine, Termination
from stoker_watch.diagnosis.termination import MAX_OUTPUT_BYTES, read_output, split_log_lines
from stoker_watch.findings.finding import Finding
from stoker_watch.runs.records import (
    DEVICES,
    OUTPUT,
    STACKS,
    STEPS,
    RunFolder,
    locked,
)
from stoker_watch.runs.schemas import DeviceSample, GpuSample, StackWindow, StepWindow
from tests.needs import needs

LINES = {id: [sample.text for sample in ending.samples] for id, ending in endings().items()}
"""Ending → lines that such jobs printed."""

KILLED, BY_TERM = -int(signal.SIGKILL), -int(signal.SIGTERM)
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'


def died(text: str, exit_code: int | None = 1, **known: Any) -> list[Finding]:
    return explain(Termination(exit_code=exit_code, output=split_log_lines(text.encode(), "job.log"), **known))


def quoted(finding: Finding) -> list[tuple[str, str]]:
    return [(evidence.text, evidence.source) for evidence in finding.evidence]


def texts(finding: Finding) -> str:
    return "\n".join(evidence.text for evidence in finding.evidence)


def test_no_space_for_a_multiprocessing_lock_is_full_shared_memory() -> None:
    """The error names no file; the stack frames show what it was for."""
    frames = (
        'Traceback (most recent call last):\n  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in '
        "__init__\n    sl = self._semlock = _multiprocessing.SemLock(\n                         ^^^^^^^^^^^^^^^^^^^\n"
    )
    full, forbidden = "OSError: [Errno 28] No space left on device", "PermissionError: [Errno 13] Permission denied"
    (found,) = died(frames + full)
    assert found.id == "shared_memory_full"
    assert [evidence.text for evidence in found.evidence[:2]] == [
        full,
        "sl = self._semlock = _multiprocessing.SemLock(",
    ]
    assert [finding.id for finding in died(frames + forbidden)] == ["permission_denied"]
    assert [finding.id for finding in died(f"{TRACEBACK}{full}\nlater: {frames.splitlines()[2]}")] == ["disk_full"]


HARMLESS = "W tensorflow] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.2GiB with freed_by_count=0."


@pytest.mark.parametrize(
    ("line", "shm", "free_gib", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", 0.99, 50, "shared_memory_full"),
        ("OSError: [Errno 28] No space left on device: '/psm_e2a4c9f1'", 0.1, 50, "shared_memory_full"),
        ("OSError: [Errno 28] No space left on device", 0.5, 50, "disk_full"),
        ("OSError: [Errno 28] No space left on device", 0.99, 0, "disk_full"),
        ("OSError: [Errno 28] No space left on device: '/data/last.pt'", 0.99, 50, "disk_full"),
    ],
)
def test_a_full_shm_is_told_from_a_full_disk(line: str, shm: float, free_gib: int, cause: str) -> None:
    assert died(line, shm_fraction=shm, disk_free_bytes=free_gib << 30)[0].id == cause


def test_harmless_lines_are_shown_and_decide_nothing() -> None:
    assert died(f"{HARMLESS}\nstep 90\n", exit_code=0) == []
    (unknown,) = died(f"{HARMLESS}\n", exit_code=KILLED)
    assert unknown.id == "killed"
    assert f"may be harmless: {HARMLESS}" in texts(unknown)
    assert [finding.id for finding in died(f"{HARMLESS}\n")] == ["ended_by_error"]
    (memory,) = died(f"{HARMLESS}\n{LINES['gpu_out_of_memory'][1]}\n")
    assert [place for _, place in quoted(memory)] == ["job.log:2", "job.log:1", ""]


def run_python(code: str, *, address_space: int | None = None) -> subprocess.CompletedProcess[bytes]:
    """A real job that fails. address_space: bytes that it may have."""

    def limit() -> None:
        if address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    return subprocess.run([sys.executable, "-c", code], capture_output=True, preexec_fn=limit, check=False)


@pytest.mark.parametrize(
    ("code", "cause", "line"),
    [
        ("bytearray(10**10)", "host_out_of_memory", "MemoryError"),
        pytest.param("import numpy; numpy.ones(10**10)", "host_out_of_memory",
                     "Unable to allocate 74.5 GiB for an array", marks=needs("numpy")),
        pytest.param("import torch; torch.empty(1 << 45)", "host_out_of_memory",
                     "DefaultCPUAllocator: can't allocate memory", marks=(pytest.mark.slow, needs("torch"))),
        ("open('/dev/full', 'w').write('x' * 100000)", "disk_full", "OSError: [Errno 28] No space left on device"),
        ("import ctypes; ctypes.CDLL('libcudnn_cnn_infer.so.8')", "library_missing", "libcudnn_cnn_infer.so.8"),
        ("import no_such_package", "package_missing", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("open('/nowhere/labels.txt')", "path_not_found", "FileNotFoundError: [Errno 2]"),
        ("import socket\na = socket.create_server(('localhost', 0))\nsocket.socket().bind(a.getsockname())",
         "port_in_use", "Address already in use"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", "ended by SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "preempted", "ended by SIGTERM"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "ended by SIGSEGV"),
        ("raise ValueError('seven')", "ended_by_error", "ValueError: seven"),
        ("raise SystemExit(9)", "ended_by_error", "ended with exit code 9"),
    ],
)  # fmt: skip
def test_real_jobs_that_fail(code: str, cause: str, line: str) -> None:
    job = run_python(code, address_space=None if "torch" in code else 2**31)
    (finding,) = explain(Termination(exit_code=job.returncode, output=split_log_lines(job.stderr, "stderr")))
    assert finding.id == cause
    assert line in quoted(finding)[0][0]


def test_the_last_traceback_decides() -> None:
    earlier = TRACEBACK + LINES["gpu_out_of_memory"][0] + "\nbatch halved, continuing\n"
    first, *rest = died(earlier + TRACEBACK + "ValueError: seven\n")
    assert (first.id, quoted(first)[0]) == ("ended_by_error", ("ValueError: seven", "job.log:9"))
    assert [(f.id, f.severity) for f in rest] == [("gpu_out_of_memory", "info")]
    first, *rest = died(earlier + TRACEBACK + LINES["disk_full"][0])
    assert (first.id, [f.id for f in rest]) == ("disk_full", ["gpu_out_of_memory"])


def test_a_traceback_about_the_end_of_another_process_does_not_decide() -> None:
    ranks = "".join(f"[rank0]: {line}\n" for line in (TRACEBACK + LINES["gpu_out_of_memory"][0]).splitlines())
    end = TRACEBACK + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    (finding,) = died(ranks + end)
    assert (finding.id, quoted(finding)[0][1]) == ("gpu_out_of_memory", "job.log:4")


def test_chained_tracebacks_are_one_and_their_most_specific_line_decides() -> None:
    chain = (
        "\0"  # as torch writes it
        + TRACEBACK
        + LINES["shared_memory_full"][1]
        + "\n\nDuring handling of the above exception, another exception "
        "occurred:\n\n" + TRACEBACK + "RuntimeError: DataLoader worker (pid(s) 71) exited unexpectedly\n"
    )
    assert [f.id for f in died(chain)] == ["shared_memory_full"]


LOADER = """
import os, signal, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): os.kill(os.getpid(), signal.{signal})
list(torch.utils.data.DataLoader(Data(), num_workers=1))
"""
GLOO = """
import datetime, signal, torch, torch.distributed as dist
from torch.multiprocessing.spawn import spawn
STORE = STORE_ADDRESS
def work(rank):
    dist.init_process_group("gloo", init_method=STORE, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=2))
    dist.all_reduce(torch.ones(2)) if rank == 0 else signal.pause()
if __name__ == "__main__":
    spawn(work, nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (LOADER.format(signal="SIGKILL"), "loader_worker_killed"),
        (LOADER.format(signal="SIGBUS"), "shared_memory_full"),
        ("import datetime, torch.distributed as dist\ndist.init_process_group('gloo', init_method='tcp://127.0.0.1:1', "
         "rank=1, world_size=2, timeout=datetime.timedelta(seconds=2))", "rendezvous_failed"),
        (GLOO, "collective_timeout"),
    ],
    ids=["worker", "bus", "rendezvous", "collective"],
)  # fmt: skip
def test_real_torch_jobs_that_fail(code: str, cause: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(code.replace("STORE_ADDRESS", repr(f"file://{tmp_path}/store")))
    job = subprocess.run([sys.executable, script], capture_output=True, check=False)
    assert explain(Termination(exit_code=job.returncode, output=split_log_lines(job.stderr, "stderr")))[0].id == cause


def test_a_kill_decides_over_lines_before_it() -> None:
    found = died(TRACEBACK + LINES["gpu_out_of_memory"][0] + "\nhandled\nstep 9\n", exit_code=137, oom_kills=2)
    assert [(f.id, f.severity) for f in found] == [("oom_killed", "critical"), ("gpu_out_of_memory", "info")]
    assert quoted(found[0])[0] == ("the kernel killed 2 processes of the job's cgroup for memory",
                                   "memory.events: oom_kill")  # fmt: skip


def test_a_kill_while_memory_filled_faster_than_it_is_sampled() -> None:
    cases = ((0.9, 0.15, "oom_killed"), (0.86, 0.13, "oom_killed"), (0.7, 0.15, "ended_without_record"))
    for fraction, growth, cause in cases:
        found = explain(Termination(memory_fraction=fraction, memory_growth=growth))
        assert found[0].id == cause
    assert "15 points more" in explain(Termination(memory_fraction=0.9, memory_growth=0.15))[0].evidence[0].text


@pytest.mark.parametrize(("fraction", "oom_kills", "cause", "severity"), [
    (0.97, None, "oom_killed", "warning"),
    (0.97, 0, "killed", "critical"),  # the kernel counted no kill
    (0.80, None, "killed", "critical"),
    (None, None, "killed", "critical"),
])  # fmt: skip
def test_a_kill_with_memory_nearly_full(
    fraction: float | None, oom_kills: int | None, cause: str, severity: str
) -> None:
    (finding,) = died("step 9", KILLED, memory_fraction=fraction, oom_kills=oom_kills, samples_source="devices.jsonl:7")
    assert (finding.id, finding.severity) == (cause, severity)
    assert (("host memory was 97 % full in the last sample", "devices.jsonl:7") in quoted(finding)) == (
        fraction == 0.97
    )


def test_an_unexplained_kill_lists_what_is_not_known() -> None:
    (finding,) = explain(Termination(exit_code=KILLED))
    assert finding.id in UNEXPLAINED
    assert quoted(finding)[-1][0] == "not known: its output, whether the kernel killed it for memory"


OOM_LINE = "[91.2] Memory cgroup out of memory: Killed process 812 (python) total-vm:9kB, anon-rss:9kB"


@pytest.mark.parametrize(("pid", "cause"), [(812, "oom_killed"), (813, "killed")])
def test_the_kernel_log_counts_if_it_names_the_job(pid: int, cause: str) -> None:
    found = died("step 9", KILLED, kernel_log=split_log_lines(OOM_LINE.encode(), "dmesg"), pids=frozenset({pid}))
    assert [finding.id for finding in found] == [cause]


XID = "[91.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus."


@pytest.mark.parametrize(("pid", "severity"), [(812, "critical"), (813, "warning")])
def test_an_xid_belongs_to_the_job_if_it_names_it(pid: int, severity: str) -> None:
    kernel = split_log_lines(XID.encode(), "dmesg")
    _, fault = died(TRACEBACK + "RuntimeError: lost\n", kernel_log=kernel, pids=frozenset({pid}))
    assert (fault.id, fault.severity, quoted(fault)[0]) == ("gpu_fault", severity, (XID, "dmesg:1"))


DIVERGED = [
    "{'loss': 'nan', 'rate': '0.1'}",
    "Step 100: loss=nan",
    "INFO:tensorflow:{'Loss/total_loss': nan,\n 'Loss/regularization_loss': 0.1}",
    "196/196 [==============================] - 16s 59ms/step - loss: nan - accuracy: 0.1037 - val_loss: nan",
    "Training loss (for one batch) at step 10: nan",
    "epoch 3 loss: tf.Tensor(nan, shape=(), dtype=float32)",
    "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-4, 'epoch': 0.01}",
    "Epoch 0:  75%|███████▌  | 3/4 [00:00<00:00, 25.43it/s, loss=nan, v_num=49]",
    "Epoch: [0][200/518]\tBatch Time 0.9 (0.9)\tData Time 0.1 (0.1)\tLoss nan (nan)\t",
    "epoch 3, loss=inf",
    "step=40 loss=Array(nan, dtype=float32)",
    "iter: 80 / 70000, total loss: nan",
    'train_inner | {"epoch": 1, "loss": "inf", "num_updates": "9"}',
    "      1/100      2.67G        nan        nan        nan        140       1024: 100%|████| 20/20 [00:13<00:00]",
    "2025-06-23 16:34:10.173313: train_loss nan",
]
"""Lines that programs print whose loss is NaN or infinite; most are those of watch/test_log_lines.py."""
FINITE = [
    "9/30 - box_loss: 0.3 - loss: nan\nloss: 0.5",  # it recovered
    "loss: 0.3 nan_steps: 2",
    "nan",
    "all   128   929   nan   0.61   nan   0.4",  # a metric of a class without boxes
    "AP of class boat: nan, loss: 0.4",
    "Epoch 3: loss: 0.4, val_loss: nan",
    "Epoch 3: train loss: 0.4, val loss: nan",
    "step 1 loss: 0.5\nstep 2 loss: inf",  # loss scaling skips a single infinite step
    "Epoch(train) [1][50/99] grad_norm: nan  loss: 59.1782  loss_cls: 21.0711",
    "step 2 loss: 0.5 loss_mask: nan",  # no image has a mask
    "step 1/21479 | loss 11.007906 (+nanz)| norm 16.3 (+nanz)",
    "loss_scale: inf loss: 0.4",
    "Loss NaN is what we look for in step 3 of this guide",
]


@pytest.mark.parametrize(("text", "nan"), [(text, True) for text in DIVERGED] + [(text, False) for text in FINITE])
def test_a_nan_loss_at_the_end_is_found_with_exit_code_0(text: str, nan: bool) -> None:
    found = died(text, exit_code=0)
    assert [finding.id for finding in found] == (["diverged"] if nan else [])
    if nan:
        assert quoted(found[0]) == [(text.partition("\n")[0].strip(), "job.log:1")]


SSD_LOSSES = [41.4, 22.8, "inf", 20.9, "inf", "inf", 34.5, 14.8, "inf", "inf", 13.2, 11.0]
"""Of ssd.pytorch with boxes without width in every eighth file."""


@pytest.mark.parametrize(("losses", "text"), [
    (SSD_LOSSES, "the loss was not finite in 5 of 12 lines"),
    (SSD_LOSSES + [5.0] * 39, ""),
    ([*SSD_LOSSES[:9], 11.0], ""),
    (["nan"] * 5 + [5.0] * 35, ""),
    ([5.0] * 2 + ["inf"] * 8 + [5.0] * 40, ""),
])  # fmt: skip
def test_a_loss_that_is_infinite_again_and_again_is_found(losses: list[object], text: str) -> None:
    lines = [f"iter {10 * n} || Loss: {loss} || timer: 0.1 sec.\n" for n, loss in enumerate(losses)]
    found = died("".join(lines), exit_code=0)
    assert [(f.id, f.severity, f.evidence[0].text) for f in found] == ([("diverged", "warning", text)] if text else [])
    for other in ("best_loss", "val loss"):
        assert died("".join(lines).replace("Loss", other), exit_code=0) == []


STALE = """Traceback (most recent call last):
  File "train.py", line 181, in train
    dataloader, dataset = create_dataloader(train_path)
  File "utils/datasets.py", line 448, in __init__
    {}
{}
"""


@pytest.mark.parametrize(("line", "error", "id"), [
    ("labels, shapes = zip(*cache.values())", "TypeError: 'float' object is not iterable", "stale_cache"),
    ("nf, nm, ne, nc, n = cache.pop('results')", "ValueError: not enough values to unpack", "stale_cache"),
    ("return self.cache.pop(key)", "KeyError: 'image-7'", "key_error"),
])  # fmt: skip
def test_a_cache_of_labels_of_another_version(line: str, error: str, id: str) -> None:
    assert died(STALE.format(line, error))[0].id == id


SURVIVED = "step {} loss: 0.5\n"


@pytest.mark.parametrize("line", [
    'Lmod has detected the following error: The following module(s) are unknown: "cuda/11.3"',
    "/home/a" + "/very_long_name" * 8 + "/io/image.py:13: UserWarning: [WinError 127] The specified procedure could "
    "not be found",
    "You requested 1 GPU but your machine has 8 GPUs; only 1 GPU will be used",
    "image size should be divisible by 32, resizing to 640", "Cannot load image data/obj/a.jpg",
    "Wrong annotation: x = 1.2, y = 0.5, < 0 or > 1, file: a.txt",
    "skipping a.tif: Could not find a backend to open it",
    "W tensorflow/core/x.cc:9] No OpKernel was registered to support Op 'A'",
])  # fmt: skip
def test_lines_of_jobs_that_go_on_do_not_decide(line: str) -> None:
    """Neither directly before an error that is not known, nor long before it."""
    end = TRACEBACK + "RuntimeError: some unknown thing\n"
    for between in ("", "".join(SURVIVED.format(n) for n in range(7))):
        found = died(f"{line}\n{between}{end}", exit_code=None)
        assert [(finding.id, quoted(finding)[0][0]) for finding in found[:1]] == [
            ("ended_by_error", "RuntimeError: some unknown thing")
        ], between


EXPLODED = ["0.727", "0.633", "0.619", "3.812", "5.212", "550625.562", "3951414016.000", "3848328704.000", "3.7e9"]
"""Of a detector of the TensorFlow Object Detection API with a learning rate of 0.8."""


@pytest.mark.parametrize(("losses", "lines"), [
    (EXPLODED, [4, 5, 8]),
    ([f"{value}." for value in EXPLODED], [4, 5, 8]),
    ([*EXPLODED[:7], "0.7", "0.6"], []),
    (EXPLODED[:7], []),
    (["0.7", "0.6", "0.5", "300.0", "320.0", "310.0", "330.0"], []),
    (["0.0", "0.0", "0.0", "5.0", "5.0", "5.0"], []),
    (["1e-9", "800000", "800001", "800002", "800003"], []),
])  # fmt: skip
def test_a_loss_that_explodes_in_a_log_is_found(losses: list[str], lines: list[int]) -> None:
    text = "".join(f"INFO:tensorflow:Step {100 * n} per-step time 0.7s loss={loss}\n" for n, loss in enumerate(losses))
    found = [finding for finding in died(text, exit_code=None) if finding.id == "diverged"]
    assert [[source for _, source in quoted(finding)] for finding in found] == (
        [[f"job.log:{n + 1}" for n in lines]] if lines else []
    )
    assert not [f for f in died(text, exit_code=None, source="events.jsonl:3") if f.id == "diverged"], "a run has rules"


def test_a_traceback_behind_a_line_that_has_not_ended_is_one() -> None:
    """As in https://github.com/amdegroot/ssd.pytorch/issues/214."""
    text = """iter 1030 || Loss: 8.1139 || Traceback (most recent call last):
  File "train.py", line 255, in <module>
    train()
  File "train.py", line 165, in train
    images, targets = next(batch_iterator)
  File "/home/han/.local/lib/python3.5/site-packages/torch/utils/data/dataloader.py", line 326, in __next__
    raise StopIteration
StopIteration
"""
    (finding,) = died(text)
    assert (finding.id, finding.place) == ("loader_exhausted", "train.py:165")
    assert find_tracebacks(tuple(LogLine(line, "") for line in text.splitlines())) == [(0, 7)]
    logged = '2024-01-01 ERROR Traceback (most recent call last):\n2024-01-01 ERROR   File "a.py", line 1, in f\n'
    assert find_tracebacks(tuple(LogLine(line, "") for line in logged.splitlines())) == []
    ranks = text.replace("|| Trace", "|| [rank0]: Trace").replace("\n", "\n[rank0]: ").removesuffix("[rank0]: ")
    assert find_tracebacks(tuple(LogLine(line, "") for line in ranks.splitlines())) == [(0, 7)]
    for before in ("wandb: upload failed: ", "Exception ignored in: <f> "):
        other = text.replace("iter 1030 || Loss: 8.1139 || ", before)
        assert find_tracebacks(tuple(LogLine(line, "") for line in other.splitlines())) == []


@pytest.mark.parametrize("code", ["next(module.parameters())", "next(csv.reader(file))", "next(iter([]))"])
def test_not_every_iterator_that_ends_is_a_loader(code: str) -> None:
    text = (
        f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    a = {code}\nStopIteration\n'
    )
    assert died(text)[0].id == "ended_by_error"


@pytest.mark.parametrize("exit_code", [KILLED, BY_TERM, -int(signal.SIGINT), 143, 130])
@pytest.mark.parametrize("line", DIVERGED, ids=range(len(DIVERGED)))
def test_a_stop_by_a_signal_never_comes_before_a_divergence(line: str, exit_code: int) -> None:
    end = TRACEBACK + "KeyboardInterrupt\n" if exit_code in (-int(signal.SIGINT), 130) else ""
    found = died("".join(f"step {n} took 0.2 s\n{line}\n" for n in range(9)) + end, exit_code=exit_code)
    assert found[0].id == "diverged"


@pytest.mark.parametrize(("gpu_used", "count"), [(None, 1), (False, 1), (True, 0)])
def test_training_on_the_cpu_without_a_gpu_is_reported(gpu_used: bool | None, count: int) -> None:
    text = "Cannot dlopen some GPU libraries.\nCould not find cuda drivers on your machine, GPU will not be used."
    found = died(text, exit_code=0, gpu_used=gpu_used)
    assert [(f.id, f.severity) for f in found] == [("trained_on_cpu", "warning"), ("no_gpu_driver", "info")][
        : 2 * count
    ]


def test_a_spinning_job_with_an_empty_shard_and_a_bus_error_with_a_full_shm() -> None:
    (finding,) = explain(Termination(exit_code=KILLED, empty_inputs=("train-00003.tfrecord",)))
    assert finding.id == "empty_shard"
    assert ("0 bytes", "train-00003.tfrecord") in quoted(finding)
    for fraction, cause in ((0.99, "shared_memory_full"), (0.2, "crashed"), (None, "crashed")):
        assert explain(Termination(exit_code=-signal.SIGBUS, shm_fraction=fraction))[0].id == cause


def test_a_spinning_job_that_was_stopped() -> None:
    def first(seconds: float | None, exit_code: int) -> str:
        hang = None if seconds is None else HangInfo(duration_s=seconds, source="", cpu_cores=1.0)
        termination = Termination(exit_code=exit_code, empty_inputs=("a.tfrecord",), hang=hang)
        return explain(termination)[0].id

    assert [first(seconds, 143) for seconds in (None, 10.0, 60.0)] == ["preempted", "preempted", "empty_shard"]
    assert first(60.0, 130) == "empty_shard"
    assert [first(seconds, 137) for seconds in (None, 10.0, 60.0)] == ["empty_shard", "killed", "empty_shard"]


@pytest.mark.parametrize(
    ("hang", "hangs"),
    [
        ({"duration_s": 400.0, "cpu_cores": 0.0}, True),
        ({"duration_s": 400.0, "cpu_cores": 0.9}, False),
        ({"duration_s": 400.0, "cpu_cores": 2.0, "main_thread_state": "comm"}, True),  # a collective of NCCL spins
        ({"duration_s": 20.0, "cpu_cores": 0.0}, False),
        ({"duration_s": 400.0}, False),
    ],
)
@pytest.mark.parametrize("exit_code", [KILLED, 143, 130])
def test_a_job_that_was_stopped_during_a_hang(hang: dict[str, Any], hangs: bool, exit_code: int) -> None:
    known = HangInfo(source="steps.jsonl:3", frame="wait (train.py:9)", stacks_source="stacks.jsonl:2", **hang)
    (finding,) = explain(Termination(exit_code=exit_code, oom_kills=0, hang=known))
    assert (finding.id == "hang") is hangs
    if hangs:
        assert quoted(finding)[0] == ("no step and no line of output in its last 400 s", "steps.jsonl:3")
        assert ("the main thread was in wait (train.py:9)", "stacks.jsonl:2") in quoted(finding)


def test_xid_errors_of_the_driver() -> None:
    def causes(*xids: int) -> list[str]:
        lines = tuple(split_log_lines(f"Xid {xid} of GPU 0".encode(), "devices.jsonl")[0] for xid in xids)
        return [
            f.id for f in explain(Termination(exit_code=1, output=split_log_lines(b"ValueError: 7", "log"), xids=lines))
        ]

    assert causes() == causes(43, 45) == ["ended_by_error"], "those two only report that a program ended"
    assert causes(45, 79) == ["ended_by_error", "gpu_fault"]


def test_a_kill_that_the_kernel_did_not_count_is_unexplained() -> None:
    (finding,) = explain(Termination(exit_code=KILLED, oom_kills=0))
    assert finding.id == "killed"
    assert "the kernel counted no kill for memory" in texts(finding)


@pytest.mark.parametrize("exit_code", [BY_TERM, 143, 75])
def test_a_request_to_stop_is_a_preemption(exit_code: int) -> None:
    assert died("step 9", exit_code)[0].id == "preempted"


def test_an_end_without_an_exit_code() -> None:
    (finding,) = died("step 9 of 90", exit_code=None)
    assert (finding.id, quoted(finding)[0]) == ("ended_without_record", ("step 9 of 90", "job.log:1"))
    assert "not known: its exit code or signal" in texts(finding)
    assert died(TRACEBACK + LINES["disk_full"][0], exit_code=None)[0].id == "disk_full"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(
        [TRACEBACK.encode(), b"loss: nan", b"\r", b"[rank99999999999]: Watchdog caught collective operation timeout",
         b"During handling of the above exception", b"NVRM: Xid (", b"Killed process 99999999999999", b"\n"]))),
    st.one_of(st.none(), st.integers(-300, 600)),
)  # fmt: skip
def test_any_bytes_and_any_exit_code_are_explained(parts: list[bytes], exit_code: int | None) -> None:
    lines = split_log_lines(b"".join(parts), "job.log")
    found = explain(Termination(exit_code=exit_code, output=lines, kernel_log=lines, pids=frozenset({1})))
    assert found or exit_code == 0
    assert all(finding.evidence for finding in found)


def test_a_long_output_is_read_from_its_end_with_the_files_line_numbers(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    count = MAX_OUTPUT_BYTES // 50
    log.write_bytes((b"x" * 99 + b"\n") * count + b"\x1b[31m 10%\r100% done\x1b[0m\nthe end")
    *_, above, last = read_output(log)
    assert (above.text, above.source) == ("100% done", f"job.log:{count + 1}")
    assert (last.text, last.source) == ("the end", f"job.log:{count + 2}")
    log.write_bytes(b"one\ntwo")
    assert [(line.text, line.source) for line in read_output(log)] == [("one", "job.log:1"), ("two", "job.log:2")]


TRAIN = """
import os, signal, sys, pathlib
from stoker_watch.runs.records import RunFolder, locked

from tests.needs import needs
run = pathlib.Path(sys.argv[1])
with locked(run):
    RunFolder(run, 2).event("resumed")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def make_killed_run(path: Path, *, used: float = 0.5) -> RunFolder:
    path.mkdir()
    folder = RunFolder(path, 1)
    folder.event("started")
    folder.event("failed", "an earlier end", exit_code=3)
    for fraction in (0.1, used):
        folder.append(DEVICES, DeviceSample(t=1.0, attempt=2, memory_used_bytes=int(fraction * 1000),
                                            memory_limit_bytes=1000))  # fmt: skip
    return folder


@pytest.mark.parametrize(("used", "cause"), [(0.5, "ended_without_record"), (0.98, "oom_killed")])
def test_a_native_run_that_was_killed(used: float, cause: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_killed_run(run, used=used).close()
    killed = subprocess.run([sys.executable, "-c", TRAIN, str(run)], check=False)
    assert killed.returncode == KILLED
    first = diagnose(run)[0]
    assert first.id == cause
    assert (("host memory was 98 % full in the last sample", "devices.jsonl:2") in quoted(first)) == (used == 0.98)
    with locked(run):
        assert read_run(run).termination is None, "it is alive"


def test_a_native_run_that_recorded_its_error(tmp_path: Path) -> None:
    folder = make_killed_run(tmp_path / "run")
    text = "The report cannot be written.\n  where:  /out\n  why:    No space left on device\n  fix:    make room"
    folder.event("failed", text, exit_code=3)
    first = diagnose(tmp_path / "run")[0]
    assert (first.id, quoted(first)[0]) == ("disk_full", ("why:    No space left on device", "events.jsonl:3"))
    folder.event("failed", "ValueError: seven")
    first = diagnose(tmp_path / "run")[0]
    assert (first.id, quoted(first)[0]) == ("ended_by_error", ("ValueError: seven", "events.jsonl:4"))
    assert "ended with exit code 1" in texts(first)
    folder.event("preempted", "SIGTERM", exit_code=75)
    assert [(f.id, f.severity) for f in diagnose(tmp_path / "run")] == [("preempted", "warning")]
    folder.event("finished")
    folder.close()
    assert read_run(tmp_path / "run").termination is None
    assert diagnose(tmp_path / "run") == []


def test_an_external_run_is_judged_by_its_output(tmp_path: Path) -> None:
    folder = make_killed_run(tmp_path / "run")
    (tmp_path / "run" / OUTPUT).write_text(f"step 1\nloss: nan\n{TRACEBACK}{LINES['path_not_found'][1]}\n")
    folder.event("failed", "train.py ended with exit code 1", exit_code=1)
    found = diagnose(tmp_path / "run")
    assert [finding.id for finding in found] == ["path_not_found", "diverged"]
    assert quoted(found[0])[:2] == [
        (LINES["path_not_found"][1], "output.log:6"),
        ("ended with exit code 1", "events.jsonl:3"),
    ]
    folder.event("failed", "train.py ended by signal 9", exit_code=137, signal=9, oom_kills=1)
    assert diagnose(tmp_path / "run")[0].id == "oom_killed"
    folder.event("finished", "train.py ended with exit code 0", exit_code=0)
    folder.close()
    # an exit code of 0 after a traceback that nothing follows: the job caught the exception and logged it
    assert [finding.id for finding in diagnose(tmp_path / "run")] == ["path_not_found", "diverged"]


def test_only_the_output_of_the_newest_attempt_counts(tmp_path: Path) -> None:
    """As `stoker watch` records it: the offset at which the attempt started, and a checksum of the file."""
    run = tmp_path / "run"
    run.mkdir()
    before = (
        b"".join(b"line %d of the attempt before\n" % n for n in range(300)) + LINES["disk_full"][0].encode() + b"\n"
    )
    (run / OUTPUT).write_bytes(before)
    folder = RunFolder(run, 1)
    folder.event("started", output_offset=0)
    folder.event("failed", "ended with exit code 1", exit_code=1)
    folder.close()
    folder = RunFolder(run, 2)
    folder.event("resumed", output_offset=len(before), output_head=zlib.crc32(before[:4096]))
    with (run / OUTPUT).open("ab") as file:
        file.write(b"ValueError: seven\n")
    folder.event("failed", "ended with exit code 1", exit_code=1)
    folder.close()

    def causes() -> list[str]:
        return [finding.id for finding in diagnose(run)]

    assert causes() == ["ended_by_error"]
    termination = read_run(run).termination
    assert termination is not None
    assert [(line.text, line.source) for line in termination.output if line.text] == [
        ("ValueError: seven", "output.log:302")
    ]
    (run / OUTPUT).rename(run / "output.1.log")
    (run / OUTPUT).write_bytes(b"and more\n")
    termination = read_run(run).termination
    assert termination is not None
    assert [line.text for line in termination.output if line.text] == ["ValueError: seven", "and more"]
    (run / "output.1.log").unlink()  # rotated again: all that is left is of this attempt
    assert causes() == ["ended_by_error"]


def test_what_is_read_of_the_end_of_an_external_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = make_killed_run(run)
    gpu = GpuSample(index=1, xids=[79])
    for name in ("a", "b"):
        folder.append(DEVICES, DeviceSample(t=5.0, attempt=2, gpus=[gpu] if name == "a" else [], shm_used_bytes=99,
                                            shm_total_bytes=100))  # fmt: skip
    folder.close()
    folder = RunFolder(run, 2)
    kernel = "[9.5] Memory cgroup out of memory: Killed process 812 (python)"
    folder.event("failed", "x ended by signal 9", exit_code=137, signal=9, kernel=[kernel], pids=[812],
                 empty_inputs=["/data/a.tfrecord"])  # fmt: skip
    folder.close()
    termination = read_run(run).termination
    assert termination is not None
    assert (termination.shm_fraction, termination.empty_inputs) == (0.99, ("/data/a.tfrecord",))
    assert [(line.text, line.source) for line in termination.xids] == [("Xid 79 of GPU 1", "devices.jsonl:3")]
    found = explain(termination)
    assert [finding.id for finding in found] == ["oom_killed", "gpu_fault"]
    assert quoted(found[0])[0] == (kernel, "events.jsonl:3")


def test_samples_after_the_end_of_a_job_do_not_hide_what_was_full(tmp_path: Path) -> None:
    """They show a host without the job; what the driver reports of a GPU comes late."""
    run = tmp_path / "run"
    folder = make_killed_run(run)
    for used, rss in ((970, 10), (985, 10), (120, 0), (110, None)):
        gpu = GpuSample(index=0, xids=[] if rss else [79])
        folder.append(DEVICES, DeviceSample(t=5.0, attempt=2, gpus=[gpu], rss_bytes=rss, memory_used_bytes=used,
                                            memory_limit_bytes=1000, shm_used_bytes=used if rss else None,
                                            shm_total_bytes=1000 if rss else None))  # fmt: skip
    folder.close()
    folder = RunFolder(run, 2)
    folder.event("failed", "x ended by signal 9", exit_code=137, signal=9)
    folder.close()
    termination = read_run(run).termination
    assert termination is not None
    assert (termination.memory_fraction, termination.shm_fraction) == (0.985, 0.985)
    assert termination.memory_growth == pytest.approx(0.015)
    assert termination.samples_source == "devices.jsonl:4"
    assert [line.source for line in termination.xids] == ["devices.jsonl:5", "devices.jsonl:6"]


def test_the_length_of_a_hang_is_read_from_steps_output_and_stacks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    folder = RunFolder(run, 1)
    folder.event("started", output_offset=0)
    now_s = time.time()
    begin_s = now_s - 1000
    for t, steps in ((begin_s, 5), (now_s - 500, 0)):
        folder.append(
            STEPS,
            StepWindow(t=t, attempt=1, step=5, window_steps=steps, num_images=0, wall_s=10.0, devices=1, phases={}),
        )
    for t, cpu in ((begin_s - 1, 1.0), (now_s - 800, 0.01), (now_s - 1, 0.03)):
        folder.append(DEVICES, DeviceSample(t=t, attempt=1, process_cpu=cpu))
    for t, kind in ((begin_s, "compute"), (now_s - 600, "comm"), (now_s - 590, "comm")):
        folder.append(STACKS, StackWindow(t=t, attempt=1, pid=1, wall_s=10.0, samples=5, main_thread={kind: 1.0},
                                          frames={f"{kind} (train.py:3)": 1.0}))  # fmt: skip
    (run / OUTPUT).write_text("step 5\n")
    os.utime(run / OUTPUT, (now_s - 900, now_s - 900))
    folder.event("failed", "x ended by signal 15", exit_code=143, signal=15)
    folder.close()
    termination = read_run(run).termination
    assert termination is not None
    assert termination.hang is not None
    assert termination.hang.duration_s == pytest.approx(900, abs=5)
    assert termination.hang.cpu_cores == pytest.approx(0.02)
    assert (termination.hang.main_thread_state, termination.hang.frame) == ("comm", "comm (train.py:3)")
    assert diagnose(run)[0].id == "hang"


PARTS = [line for lines in LINES.values() for line in lines] + [
    "DataLoader worker (pid(s) 12,",
    "13) exited unexpectedly",
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(PARTS),
            st.tuples(st.sampled_from(PARTS), st.integers(0, 60)).map(lambda both: both[0][both[1] :]),
            st.tuples(st.sampled_from(PARTS), st.integers(1, 60)).map(lambda both: both[0][: both[1]]),
            st.sampled_from(["", "  MemoryError", "[rank1]: MemoryError", "xMemoryError", "path", "step 3 loss=1"]),
            st.text(alphabet=st.characters(exclude_characters="\n"), max_size=20),
        ),
        max_size=8,
    )
)
def test_lines_are_recognized_together_as_each_one_alone(texts: list[str]) -> None:
    lines = split_log_lines("\n".join(texts).encode("utf-8", errors="replace"), "output.log")
    one_by_one = []
    for line in lines:
        text = strip_rank_prefix(line.text)
        known = (pattern.ending.id for pattern in line_patterns() if pattern.regex.search(text))
        if (first := next(known, None)) is not None:
            one_by_one.append((line, first))
    assert [(match.line, match.ending.id) for match in _find_matches(lines)] == one_by_one


FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\n'


@pytest.mark.parametrize(("between", "error"), [
    ("epoch 3 done in 12 s\n", "ValueError: seven"),
    ("[rank1]: waiting\nsaving the model ...\n 10%|█    | 1/10 [00:01<00:09]\n", "my.pkg.BadLabel: 12 is no class"),
    ("step 3 of 90 took 0.2 s\n", "KeyboardInterrupt"),
    ("step 3 of 90 took 0.2 s\n", "botocore.errorfactory.error: slow down"),
    ("", "AssertionError"),
    ("", "subprocess.TimeoutExpired: Command 'a' timed out after 3 seconds"),
])  # fmt: skip
def test_what_the_job_printed_within_a_traceback_is_not_its_error(between: str, error: str) -> None:
    lines = split_log_lines((FRAMES + between + error + "\nbye\n").encode(), "job.log")
    ((_, last),) = find_tracebacks(lines)
    assert lines[last].text == error


def test_a_traceback_without_a_line_of_an_exception_ends_at_its_first_line() -> None:
    lines = split_log_lines((FRAMES + "it went wrong\n" * 40).encode(), "job.log")
    assert find_tracebacks(lines) == [(0, 3)]


CAUGHT = """step 9 of 90
Traceback (most recent call last):

> File "/job/tools/train.py", line 12, in <module>
    main(exp)
    │    └ <exp>
  File "/job/core/trainer.py", line 83, in train
    self.train_one_iter()
  File "/env/lib/python3.11/site-packages/torch/_utils.py", line 750, in reraise
    raise exception
AssertionError: Caught AssertionError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/job/data/pairs.py", line 155, in __getitem__
    return self.load(index)
  File "/job/data/pairs.py", line 149, in load
    assert image is not None
AssertionError: a file is empty
"""


def test_an_exception_that_the_job_caught_and_printed_last_has_ended_it() -> None:
    """As loguru's `logger.catch` prints it: the exit code is 0. The place is that in the worker."""
    found = died(CAUGHT, exit_code=0)
    assert found[0].severity == "critical"
    assert found[0].place == "pairs.py:149"
    assert "raised at pairs.py:149 (load), called at pairs.py:155 (__getitem__)" in texts(found[0])


@pytest.mark.parametrize(
    "text", [CAUGHT + "step 10 of 90\n", "Exception in thread Thread-1:\n" + CAUGHT.partition("\n")[2]]
)
def test_an_exception_that_the_job_survived_has_not_ended_it(text: str) -> None:
    assert died(text, exit_code=0) == []


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (TRACEBACK + "KeyError: 'bird'\nafter\n", "key_error"),
        (TRACEBACK + "KeyError: 'bird'\n" + "later\n" * 30, None),
        (TRACEBACK.replace("<module>", "evaluate") + "KeyError: 'bird'\nafter\n", None),  # handled, and printed
        (TRACEBACK + "KeyError: 'bird'\nstep 10 of 90\n", None),
    ],
)
def test_an_exception_of_a_program_after_which_its_script_went_on_is_a_warning(text: str, id: str | None) -> None:
    found = died(text, exit_code=0)
    assert [finding.id for finding in found] == ([] if id is None else [id])
    if found:
        assert found[0].severity == "warning"
        assert "ended with exit code 0" in texts(found[0])


def test_the_exception_of_a_loader_worker_is_quoted() -> None:
    found = died(CAUGHT.replace("a file is empty", "no such row"))
    assert found[0].id == "data_function_failed"
    assert "AssertionError: no such row" in texts(found[0])


def test_an_error_inside_of_tensorflows_graph_has_its_line() -> None:
    """As TensorFlow 2.21 prints it: what is wrong stands far below the last line of the traceback."""
    keras = '  File "/env/lib/python3.11/site-packages/tf_keras/src/engine/training.py", line 1804, in fit\n'
    found = died(
        f"""Traceback (most recent call last):
  File "/job/train.py", line 106, in main
    model.fit(dataset)
{keras}    return step(iterator)
tensorflow.python.framework.errors_impl.InvalidArgumentError: Graph execution error:

Detected at node decoder/embedding_1/embedding_lookup defined at (most recent call last):
  File "/job/train.py", line 106, in main

{keras}
{keras * 20}
  File "/job/model.py", line 31, in call

indices[42,0] = 244 is not in [0, 244)
\t [[{{{{node decoder/embedding_1/embedding_lookup}}}}]] [Op:__inference_train_function_19218]
"""
    )
    assert (found[0].id, found[0].place) == ("index_out_of_range", "model.py:31")


def test_of_chained_exceptions_the_place_of_the_first_is_named() -> None:
    text = """Traceback (most recent call last):
  File "/job/rows.py", line 173, in parse
    return int(text)
ValueError: invalid literal for int() with base 10: 'left'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/job/train.py", line 182, in <module>
    main()
  File "/job/rows.py", line 160, in __init__
    raise ValueError(f"{name}: {error}")
ValueError: train.csv: invalid literal for int() with base 10: 'left'
"""
    (found,) = died(text)
    assert (found.id, found.place) == ("malformed_value", "rows.py:173")


@pytest.mark.parametrize(("argument", "id"), [("cur_loss", "diverged"), ("length", "ended_by_error")])
def test_the_exponential_of_a_loss_that_overflows_is_divergence(argument: str, id: str) -> None:
    frame = f'  File "/job/main.py", line 6, in train\n    print(math.exp({argument}))\n'
    text = f"step 9 of 90\nTraceback (most recent call last):\n{frame}OverflowError: math range error\n"
    assert died(text)[0].id == id


def told(log: str) -> list[str]:
    """What `stoker why LOG` says of the end: a log without a reason has none."""
    return [found.id for found in died(log, exit_code=None) if found.id != "ended_without_record"]


def test_memory_that_other_processes_hold_is_said() -> None:
    """Both forms of torch's message; github.com/raoyongming/DenseCLIP/issues/52: others had taken the GPU of 40 GiB."""
    old = (
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 39.59 GiB total capacity; 1.49 GiB "
        "already allocated; 12.19 MiB free; 1.52 GiB reserved in total by PyTorch)"
    )
    new = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of "
        "39.39 GiB of which 14.06 MiB is free. Process 3 has 37.00 GiB memory in use. Including non-PyTorch memory, "
        "this process has 1.70 GiB memory in use. Of the allocated memory 1.2 GiB is allocated by PyTorch"
    )
    for text in (old, new):
        (found,) = died(TRACEBACK + text)
        assert found.id == "gpu_out_of_memory"
        assert "other processes" in found.title
        assert "nvidia-smi" in found.fix
    misspelt = new.replace("capacity", "capacty").replace("14.06 MiB is free", "0 bytes is free")
    (found,) = died(TRACEBACK + misspelt)
    assert "other processes" in found.title
    own = new.replace("Process 3 has 37.00 GiB memory in use. ", "").replace("1.70 GiB", "39.30 GiB")
    (found,) = died(TRACEBACK + own)
    assert "other processes" not in found.title


def test_a_kernels_assertion_decides_where_the_log_ends_within_a_traceback() -> None:
    """github.com/ultralytics/ultralytics/issues/14522: the bar is drawn again after the assertion."""
    assertion = (
        "../aten/src/ATen/native/cuda/IndexKernel.cu:92: operator(): block: [12243,0,0], thread: [95,0,0] Assertion "
        '`-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.\n'
    )
    bar = "2/300 4.09G 0.5756 0.8225 0.8351 251 736:  56%|█████▋    | 1033/1833 [02:24<01:51,  7.15it/s]\n"
    assert told(assertion + bar + TRACEBACK) == ["device_assert"]
    assert told(assertion + bar * 4) == []


def test_a_fault_of_a_rank_comes_before_what_the_others_report() -> None:
    """github.com/EveryVoiceTTS/EveryVoice/issues/178: the other ranks still draw their bars."""
    fault = "OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 2 has a\n"
    bars = "Loading modules: 100%|##########| 4/4 [00:15<00:00,  3.85s/it]\n" * 3
    ends = "srun: error: ib12gpu-002: task 4: Exited with exit code 1\n"
    assert told(fault + bars + ends)[:1] == ["gpu_out_of_memory"]
    assert told(fault + bars * 30 + ends)[:1] == ["peer_ended"]


def test_retries_decide_where_the_output_ends_with_them() -> None:
    """github.com/hiyouga/LlamaFactory/issues/8045."""
    line = "zgiot:1183664 [0] NCCL INFO socketPollConnect: connect returned No route to host, retrying (26/34) after\n"
    assert told(line * 6) == ["rendezvous_failed"]
    assert told(line * 3) == []
    assert told(line * 6 + "Epoch 1 loss 0.5\n" * 3) == []


def test_an_error_of_the_shell_after_which_the_script_went_on_is_none() -> None:
    """github.com/spoonsso/dannce/issues/107: that training ended well."""
    error = "/var/spool/slurmd/job424078/slurm_script: line 13: activate: No such file or directory\n"
    later = "I tensorflow: Successfully opened dynamic library libcudart.so.11.0\n"
    assert told(error + later * 3) == []
    assert told(error) == ["path_not_found"]


@pytest.mark.parametrize(
    ("lines", "id"),
    [
        (  # github.com/tensorflow/models/issues/5417
            TRACEBACK + '  File "utils/dataset_util.py", line 26, in int64_list_feature\n'
            "    return tf.train.Feature(int64_list=tf.train.Int64List(value=value))\n"
            "TypeError: None has type NoneType, but expected one of: int, long",
            "class_not_in_label_map",
        ),
        (  # github.com/mdhmz1/Auto-Annotate/issues/13
            TRACEBACK + '  File "keras/engine/topology.py", line 3114, in load_weights_from_hdf5_group_by_name\n'
            "    original_keras_version = f.attrs['keras_version'].decode('utf8')\n"
            "AttributeError: 'str' object has no attribute 'decode'",
            "str_has_no_decode",
        ),
        (  # github.com/keras-team/keras-applications/issues/43
            "Exception: URL fetch failure on https://github.com/fchollet/deep-learning-models/releases/download/v0.5/"
            "inception_v3.h5: None -- [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed (_ssl.c:833)",
            "tls_failed",
        ),
        (  # github.com/google-research/multinerf/issues/12: JAX uses the GPU
            "I0808 20:59:00.964296 139857030612800 xla_bridge.py:328] Unable to initialize backend 'tpu': module "
            "'jaxlib.xla_extension' has no attribute 'get_tpu_client'",
            None,
        ),
        (  # github.com/DeepLabCut/DeepLabCut/issues/2455
            "E tensorflow/stream_executor/cuda/cuda_blas.cc:2981] Unable to register cuBLAS factory: Attempting to "
            "register factory for plugin cuBLAS when one has already been registered",
            None,
        ),
    ],
)
def test_lines_of_threads_that_were_read_wrongly(lines: str, id: str | None) -> None:
    assert told(lines) == ([id] if id else [])


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        ("cv2", "pip install opencv-python-headless`"),
        ("pycocotools", "pip install pycocotools`"),
        ("tensorflow.keras", "tensorflow is there, tensorflow.keras is not in it"),
        ("google.cloud", "pip install google-cloud-storage`"),
        ("official.vision", "official is a folder of the program's repository"),
    ],
)
def test_a_missing_package_is_named_in_the_fix(module: str, fix: str) -> None:
    (found,) = died(f"{TRACEBACK}ModuleNotFoundError: No module named '{module}'")
    assert fix in found.fix
    assert "NAME" not in found.fix


def test_a_loss_scale_that_is_halved_in_each_step_down_to_a_low_one_is_divergence() -> None:
    """facebookresearch/fairseq/issues/512 and ymcui/Chinese-LLaMA-Alpaca/issues/534. One overflow is normal
    (fairseq/issues/2404), and so are those of the first steps."""
    fairseq = "| WARNING: overflow detected, setting loss scale to: {}\n"
    deepspeed = (
        "[INFO] [loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: "
        "{}, reducing to {}\n"
    )
    assert told("".join(fairseq.format(0.25 / 2**n) for n in range(6))) == ["diverged"]
    assert told("".join(deepspeed.format(64 // 2**n, 32 // 2**n) for n in range(5))) == ["diverged"]
    assert told("".join(deepspeed.format(65536 // 2**n, 32768 // 2**n) for n in range(8))) == []
    assert told("".join(fairseq.format(scale) for scale in (8, 4, 8, 4, 8, 4))) == []
    apex = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}\n"
    assert told("".join(apex.format(64 / 2**n) for n in range(6))) == ["diverged"]
    assert told("".join(apex.format(64 / 2**n) for n in range(6)) + "step 9 loss 0.5\n" * 9) == []
    assert told("setting loss scale to: 64.0. overflow\n" * 9) == []


def test_what_no_pattern_explains_is_quoted_as_info() -> None:
    def unknown(text: str) -> list[tuple[str, str]]:
        found = explain_unknown(split_log_lines(text.encode(), "job.log"))
        return [(one.id, one.severity) for one in found]

    blocked = "tao: Error response from daemon: the container has gone\n"  # after NVIDIA-AI-IOT/nvidia-tao/issues/6
    assert unknown("loading\n" + blocked) == [("error_lines", "info")]
    assert unknown(blocked + "Epoch 1 loss 0.5\n") == []
    assert unknown(blocked + "Training complete\n") == []
    not_built = "TensorFlow was not built with CUDA kernel binaries compatible with compute capability 12.0.\n"
    assert unknown(not_built) == [("gpu_not_supported", "info")]
    assert unknown("all is well\n") == []


@pytest.mark.parametrize(
    ("lines", "id"),
    [
        (  # github.com/nicknochnack/TFODCourse/issues/70
            TRACEBACK + '  File "generate_tfrecord.py", line 101, in class_text_to_int\n'
            "    return label_map_dict[row_label]\nKeyError: 'kursi'",
            "class_not_in_label_map",
        ),
        (  # github.com/sglvladi/TensorFlowObjectDetectionTutorial/issues/51: the path was wrong
            TRACEBACK + '  File "tensorflow/python/lib/io/file_io.py", line 78, in _preread_check\n'
            "    self._read_buf = _pywrap_file_io.BufferedInputStream(\n"
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xc1 in position 132: invalid start byte",
            "path_not_found",
        ),
        ("./train.sh:  60: 11880 killed              python3 model_main.py", "killed"),
    ],
)
def test_lines_of_less_known_threads(lines: str, id: str) -> None:
    assert told(lines) == [id]


@pytest.mark.parametrize(
    "line",
    [
        "model_checkpoint.py:384: `ModelCheckpoint(monitor='val_loss')` could not find the monitored key in the "
        "returned metrics: ['loss']",
        "W xla/gpu/asm_compiler.cc:231] ptxas too old. Falling back to the driver to compile.",
        "WARNING[XFORMERS]: xFormers can't load C++/CUDA extensions. xFormers was built for:",
        "Could not load dynamic library 'libcudart.so.11.0'; dlerror: cannot open shared object file",
    ],
)
def test_warnings_of_jobs_that_go_on_are_no_reasons(line: str) -> None:
    assert told(line + "\nEpoch 1 loss 0.5\n") in ([], ["checkpoint_not_saved"])


def test_what_the_kernel_says_comes_before_the_error_that_it_leads_to() -> None:
    """github.com/Megvii-BaseDetection/YOLOX/issues/1161."""
    assertion = "cuda/Loss.cu:102: block: [10,0,0] Assertion `input_val >= zero && input_val <= one` failed.\n"
    error = TRACEBACK + "RuntimeError: CUDA error: device-side assert triggered"
    assert told(assertion + error)[0] == "loss_input_not_probability"
    assert told(error) == ["device_assert"]


def test_errors_of_a_shell_are_found_in_linear_time() -> None:
    def cpu_s(lines: int) -> float:
        text = "x.sh: line 3: y: No such file or directory\n" * lines
        start = time.process_time()
        died(text, exit_code=None)
        return time.process_time() - start

    cpu_s(10)  # compiles the patterns
    assert cpu_s(4000) < 24 * cpu_s(500), "8 times as many lines"


def test_a_fault_long_before_an_unfinished_traceback_is_not_its_reason() -> None:
    fault, epochs = "CUDA_ERROR_OUT_OF_MEMORY: out of memory\n", "Epoch 1 loss 0.5\n" * 50
    assert told(fault + epochs + TRACEBACK) == []


FRAME = '  File "/job/heads.py", line 31, in assign\n    '


@pytest.mark.parametrize(
    ("source", "error", "id"),
    [
        ("row = self.cat_ids[label]", "IndexError: list index out of range", "label_out_of_range"),
        ("row = self.rows[label]", "IndexError: list index out of range", "index_error"),
        ("cost = -prob[:, tgt_ids]", "IndexError: index 12 is out of bounds for dimension 1 with size 7",
         "label_out_of_range"),
        ("cost = -prob[:, tgt_ids]", "IndexError: tensors used as indices must be long, int, byte or bool tensors",
         "empty_labels"),
        ("masks = [one['segmentation'] for one in anns]", "KeyError: 'segmentation'", "polygons_missing"),
        ("areas = [one['segmentation'] for one in anns]", "KeyError: 'area'", "annotations_invalid"),
        ("raise ValueError('Loss is nan, stopping training')", "ValueError: no batch", "ended_by_error"),
        ("number = class_to_idx[name]", "KeyError: 'lorry'", "class_name_unknown"),
        ("number = class_to_idx[name]", "KeyError: 17", "label_out_of_range"),
        ("number = names.index(class_name)", "ValueError: 'lorry' is not in list", "class_name_unknown"),
        ("x = x + self.pos_embed", "RuntimeError: The size of tensor a (196) must match the size of tensor b (256) at "
         "non-singleton dimension 1", "position_embedding_size"),
        ("x = x + y", "RuntimeError: The size of tensor a (196) must match the size of tensor b (256) at "
         "non-singleton dimension 1", "shape_mismatch"),
        ("a, b = zip(*found)", "ValueError: not enough values to unpack (expected 2, got 0)", "unpacked_nothing"),
    ],
)  # fmt: skip
def test_a_line_of_the_traceback_tells_what_the_last_one_does_not(source: str, error: str, id: str) -> None:
    """Source lines that a traceback quotes are no evidence by themselves, and the most exact row wins."""
    findings = died(f"{TRACEBACK}{FRAME}{source}\n{error}\n")
    assert findings[0].id == id
    assert error in texts(findings[0])


def test_an_error_of_a_replica_is_one_of_data_parallel() -> None:
    replica = "IndexError: Caught IndexError in replica 1 on device 1.\nOriginal " + TRACEBACK
    error = "IndexError: index 4 is out of bounds for dimension 0 with size 4"
    assert died(f"{TRACEBACK}{replica}{error}\n")[0].id == "targets_of_replicas"
    assert died(f"{TRACEBACK}{error}\n")[0].id == "index_out_of_range"


@pytest.mark.parametrize(
    ("shown", "failure", "fix"),
    [
        ("NCCL INFO NCCL_SOCKET_IFNAME set by environment to ib0", "NCCL WARN Bootstrap : no socket interface found",
         "Unset NCCL_SOCKET_IFNAME"),
        ("", "NCCL WARN Bootstrap : no socket interface found", "Name the interface"),
        ("device: Tesla T4", "Loss is nan, stopping training", "lower learning rate"),
        ("device: NVIDIA GeForce GTX 1650 amp=True", "Loss is nan, stopping training", "full precision"),
        ("device: NVIDIA GeForce GTX 1650 amp=False", "Loss is nan, stopping training", "lower learning rate"),
        ("initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/4", "slurmstepd: *** JOB 7 CANCELLED DUE TO TIME LIMIT",
         "srun"),
        ("initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/2\ninitializing ddp: GLOBAL_RANK: 1, MEMBER: 2/2",
         "slurmstepd: *** JOB 7 CANCELLED DUE TO TIME LIMIT", "Ask for more time"),
        ("", "SizeMismatchError: Mismatched (W,H) for image a.jpg, got (30, 40), expect (40, 30)", "EXIF"),
        ("", "SizeMismatchError: Mismatched (W,H) for image a.jpg, got (30, 40), expect (60, 30)", "Correct width"),
        ("srun: error: node7: tasks 1-3: Exited with exit code 1", "OSError: [Errno 98] Address already in use",
         "ntasks-per-node=1"),
        ("", "OSError: [Errno 98] Address already in use", "--master-port"),
        ("", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "device plugin"),
        ("", "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 Insufficient cpu.", "Ask for what a node has"),
    ],
)  # fmt: skip
def test_advice_is_none_that_the_output_shows_to_be_followed(shown: str, failure: str, fix: str) -> None:
    (first, *_) = died(f"{shown}\n{failure}\n")
    assert fix in first.fix
    assert first.fix == endings()[first.id].fix or shown in texts(first)


def test_an_error_in_a_graph_of_tensorflow_is_told_whole() -> None:
    error = "tensorflow.python.framework.errors_impl.InvalidArgumentError: Graph execution error:\n\n"
    rest = "Detected at node Box/Reshape defined at (most recent call last):\n\nInput has 12 values, 16 are wanted\n"
    (first, *_) = died(f"{TRACEBACK}{error}{rest}\t [[{{{{node Box/Reshape}}}}]] [Op:__inference_step_7]\n")
    assert "Input has 12 values, 16 are wanted" in texts(first)
    assert "node Box/Reshape" in texts(first)


def test_a_job_that_stood_still_for_ten_usual_steps_hung() -> None:
    for seconds, usual, found in ((45.0, 2.0, "hang"), (45.0, 20.0, "preempted"), (20.0, 0.5, "preempted")):
        hang = HangInfo(duration_s=seconds, source="steps.jsonl:9", usual_s=usual, cpu_cores=0.01)
        assert died("", BY_TERM, hang=hang)[0].id == found
