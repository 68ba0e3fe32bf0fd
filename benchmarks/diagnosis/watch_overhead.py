"""What `stoker watch` costs a job: the same job with it and without, at the same time, on five frameworks.

CPU-seconds are those of all processes: the job and its children, and for `stoker watch` also the watcher and the relays
of the output. They exclude other load, but not its effect on caches and clock rates, which changes from one minute to
the next by more than what is measured. So both of a pair run at the same time, each bound to one core, and change
cores from one pair to the next. Bytecode of stoker is compiled before, as at an installation. Keras on TensorFlow needs
`make peers` (or a Python that has it in STOKER_PEERS_PYTHON), Ultralytics a Python that has it in
STOKER_ULTRALYTICS_PYTHON. Linux only.
"""

import argparse
import compileall
import concurrent.futures
import ctypes
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import python_path
from benchmarks.report import Bar, Report, options, publish, spread

RATIO, FIXED_S = 0.02, 1.5
"""The bar: this fraction of the job's CPU-seconds, and this time for the start of the watcher."""

ROOT = Path(__file__).resolve().parents[2]
PEERS = os.environ.get("STOKER_PEERS_PYTHON", str(ROOT / ".peers/bin/python"))
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1",
         "KERAS_BACKEND": "tensorflow", "PYTHONWARNINGS": "ignore"}  # fmt: skip

DATA = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
steps = int(sys.argv[1])
net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3), torch.nn.ReLU(),
                          torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10))
"""

TORCH = (
    DATA
    + """
optimizer = torch.optim.AdamW(net.parameters())
data = TensorDataset(torch.randn(8 * steps, 3, 32, 32), torch.randint(0, 10, (8 * steps,)))
for number, (x, y) in enumerate(DataLoader(data, 8)):
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number % 100 == 0:
        print(f"step {number} loss: {loss.item():.4f}", flush=True)
"""
)

TRAINER = (
    DATA
    + """
import tempfile
import transformers

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * steps
    def __getitem__(self, i):
        return {"x": torch.full((3, 32, 32), i / len(self)), "labels": torch.tensor(i % 10)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

settings = transformers.TrainingArguments(tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=8,
                                          use_cpu=True, report_to=[], save_strategy="no", logging_steps=100)
transformers.Trainer(Model(), settings, train_dataset=Rows()).train()
"""
)

LIGHTNING = (
    DATA
    + """
import pytorch_lightning

class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch, number):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = TensorDataset(torch.randn(8 * steps, 3, 32, 32), torch.randint(0, 10, (8 * steps,)))
trainer = pytorch_lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Module(), DataLoader(data, 8))
"""
)

KERAS = """
import sys
import keras, numpy
steps = int(sys.argv[1])
layers = [keras.layers.Input((32, 32, 3)), keras.layers.Conv2D(32, 3), keras.layers.Conv2D(32, 3)]
model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = numpy.zeros((8 * steps, 32, 32, 3), "float32"), numpy.zeros(8 * steps)
model.fit(x, y, batch_size=8, verbose=2)
"""

ULTRALYTICS = """
import os, sys, tempfile
os.chdir(tempfile.mkdtemp())
import cv2, numpy
from ultralytics import YOLO
for split, count in (("train", 4 * int(sys.argv[1])), ("val", 8)):
    for kind in ("images", "labels"):
        os.makedirs(f"data/{kind}/{split}")
    for i in range(count):
        cv2.imwrite(f"data/images/{split}/{i}.jpg", numpy.full((64, 64, 3), i % 255, "uint8"))
        open(f"data/labels/{split}/{i}.txt", "w").write("0 0.5 0.5 0.5 0.5\\n")
open("data.yaml", "w").write(f"path: {os.getcwd()}/data\\ntrain: images/train\\nval: images/val\\nnames: {{0: box}}\\n")
YOLO("yolov8n.yaml").train(data="data.yaml", epochs=1, imgsz=64, batch=4, workers=0, device="cpu", plots=False)
"""


@dataclass
class Job:
    """steps: some 30 CPU-seconds of training; with --quick a fifth of it."""

    name: str
    python: str
    code: str
    steps: int
    cpu_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    wall_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})


def find_jobs() -> list[Job]:
    jobs = [Job("torch loop", sys.executable, TORCH, 1500), Job("transformers Trainer", sys.executable, TRAINER, 1500)]
    jobs.append(Job("Lightning", sys.executable, LIGHTNING, 1500))
    jobs.append(Job("Keras on TensorFlow", PEERS, KERAS, 2500))
    if python := os.environ.get("STOKER_ULTRALYTICS_PYTHON"):
        jobs.append(Job("Ultralytics", python, ULTRALYTICS, 150))
    return jobs


def adopt_orphans() -> None:
    """Make this process the parent of what outlives its own parent, so that its time is counted here."""
    pr_set_child_subreaper = 36  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def measure(job: Job, steps: int, *, watched: bool, core: int) -> tuple[float, float]:
    """(CPU-seconds of all processes, wall seconds) of a job, in a process that runs nothing else meanwhile.

    Raises RuntimeError if the job fails.
    """
    os.sched_setaffinity(0, {core})
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.py").write_text(job.code)
        watch = [sys.executable, "-m", "stoker", "watch", "--run-dir", f"{folder}/run", "--"] if watched else []
        words = [*watch, job.python, "job.py", str(steps)]
        environment = {**os.environ, **QUIET, "PYTHONPATH": python_path(ROOT)}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, check=False)
        wall_s = time.monotonic() - start_s
        if done.returncode:
            raise RuntimeError(f"{words[0]} … ended with exit code {done.returncode}: {done.stderr.decode()[-1000:]}")
        try:
            while True:
                os.wait()
        except ChildProcessError:
            pass  # none is left
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def run(arguments: argparse.Namespace) -> Report:
    rounds, divisor = (2, 5) if arguments.quick else (6, 1)
    rounds = arguments.rounds or rounds
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this benchmark needs two cores: one for the watched job, one for the same job without")
    compileall.compile_dir(ROOT / "stoker", quiet=2)
    report = Report("Cost of `stoker watch`: CPU-seconds of a job with it and without, of all processes", rounds)
    report.packages = ("stoker", "torch", "transformers", "pytorch-lightning")
    jobs = [job for job in find_jobs() if arguments.only in (None, job.name)]
    pool = concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), adopt_orphans)
    with pool:
        for number in range(rounds):
            for job in jobs:
                if not Path(job.python).exists():
                    continue
                steps = round(arguments.length * job.steps / divisor)
                pair = {
                    watched: pool.submit(measure, job, steps, watched=watched, core=cores[(number + watched) % 2])
                    for watched in (True, False)
                }
                for watched, result in pair.items():
                    cpu_s, wall_s = result.result()
                    job.cpu_s[watched].append(cpu_s)
                    job.wall_s[watched].append(wall_s)
                    print(
                        f"{job.name}, {'with' if watched else 'without'}: {cpu_s:.2f} CPU-s, {wall_s:.1f} s",
                        file=sys.stderr,
                    )
    for job in jobs:
        if not job.cpu_s[True]:
            report.rows.append({"job": job.name, "": "n/a: `make peers`"})
            continue
        added_s = [with_s - without_s for without_s, with_s in zip(job.cpu_s[False], job.cpu_s[True], strict=True)]
        without_s, with_s = (statistics.median(job.cpu_s[on]) for on in (False, True))
        walls = [statistics.median(job.wall_s[on]) for on in (False, True)]
        report.rows.append({
            "job": job.name, "CPU-s without": without_s, "with": with_s,
            **{f"added CPU-s, {name}": value for name, value in spread(added_s).items()},
            "added": f"{statistics.median(added_s) / without_s:.1%}",
            "wall s without": walls[0], "wall s with": walls[1],
        })  # fmt: skip
        allowed_s = RATIO * without_s + FIXED_S
        report.bars.append(Bar.at_most(f"{job.name}: added CPU-s", statistics.median(added_s), allowed_s))
    return report


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--only", metavar="JOB", help="only this job, by its name in the table")
    parser.add_argument(
        "--length", type=float, default=1.0, help="of each job, as a multiple: over longer ones a start counts less"
    )
    parser.add_argument("--rounds", type=int, help="pairs of each job")
    publish(run, parser)
