"""The hook in real jobs: they go on as without it, and it knows what they know of themselves."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_watch.report.explain import RunExplanation, explain_run
from stoker_watch.runs.records import EVENTS, RANKS, STEPS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from stoker_watch.watch.hook_reader import (
    HOOK_DIR,
    HookState,
    add_hook_env,
    cpu_by_phase,
    phase_seconds,
    read_hook_state,
)
from tests.needs import needs
from tests.timing import undisturbed_once
from tests.watch.watch import hook_jobs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="`stoker watch` is for Linux")

PEERS = os.environ.get("STOKER_PEERS_PYTHON", str(Path(__file__).parents[3] / ".peers/bin/python"))
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}


def ran(words: list[str], folder: Path, **variables: str) -> str:
    """The output of a job with the hook; its state files are in `folder`/state."""
    state_dir = folder / "state"
    state_dir.mkdir(exist_ok=True)
    environment = add_hook_env({**os.environ, **QUIET, **variables}, state_dir)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b"", done.stderr.decode()
    return done.stdout.decode()


def read_state(folder: Path) -> HookState:
    assert not list((folder / "state").glob("errors-*"))
    states = [state for path in (folder / "state").glob("*.state") if (state := read_hook_state(path)) is not None]
    (only,) = [state for state in states if state.values["steps"]]
    return only


def watched(words: list[str], folder: Path, **variables: str) -> RunExplanation:
    begin = [sys.executable, "-c", "from stoker_watch.cli.app import main; main()", "watch", "--run-dir", "run", "--"]
    environment = {**os.environ, **QUIET, **variables}
    done = subprocess.run([*begin, *words], cwd=folder, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    for window in read_lines(folder / "run", STEPS, StepWindow):
        assert sum(window.phases.values()) == pytest.approx(window.wall_s * window.devices)
    return explain_run(folder / "run")


def known(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / "known.json").read_bytes())
    return found


def seconds(why: RunExplanation, phase: str) -> float:
    return next((row.device_s for row in why.phases if row.phase == phase), 0.0)


def test_its_files_are_python_3_8_and_alone() -> None:
    for path in HOOK_DIR.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):  # an annotation there is run: only names and texts
                named = [word.annotation for word in (*node.args.args, *node.args.kwonlyargs)]
                assert all(isinstance(one, (ast.Name, ast.Constant, type(None))) for one in [*named, node.returns])
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] in {*sys.stdlib_module_names}, path
            if isinstance(node, ast.Import):
                assert {word.name.split(".")[0] for word in node.names} <= {
                    *sys.stdlib_module_names,
                    "stoker_hook",
                    "sitecustomize",
                }, path


def test_a_process_that_does_not_train_is_as_without_it(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("here = 'mine'")
    code = "import sys, sitecustomize, threading; print(sitecustomize.here, threading.active_count(), *sys.path)"
    out = ran([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(own))
    assert out.startswith("mine 1 ")
    assert str(HOOK_DIR) not in out
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["loaded"]
    (own / "sitecustomize.py").write_text("import no_such_module_of_mine")
    broken = subprocess.run(
        [sys.executable, "-c", ""],
        env=add_hook_env({"PYTHONPATH": str(own)}, tmp_path),
        capture_output=True,
        check=False,
    )
    assert b"no_such_module_of_mine" in broken.stderr  # as Python says it


def test_it_is_absent_where_python_is_told_to_ignore_the_environment(tmp_path: Path) -> None:
    ran([sys.executable, "-I", "-c", "pass"], tmp_path)
    assert not list((tmp_path / "state").iterdir())


def check_loop(state: HookState, itself: dict[str, float]) -> None:
    """itself: what the loop measured: its waits, with the time of its own clock around them, and its sleeps in them."""
    counts = {name: state.values[name] for name in ("steps", "batches", "num_images")}
    assert counts == {"steps": 1 + 8 + 2, "batches": 1 + 16 + 2, "num_images": 4 + 64 + 8}
    assert state.values["lr"] == 0.05
    assert state.values["workers"] == 1  # of the last loader
    phases = phase_seconds(state, None)
    assert sum(phases.values()) == pytest.approx(state.values["last_update"] - state.values["begin"])
    assert phases["eval"] >= itself["eval"] * 0.95  # and the model's work
    # the sleeps of training batches in the thread; at most the measured waits and the end of the workers
    assert phases["input_wait"] >= hook_jobs.TRAINING_NAPS * hook_jobs.WAIT_S


@needs("torch")
@pytest.mark.slow
def test_a_training_loop_is_counted_and_every_second_is_in_a_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, with the hook's patches applied to the imported torch: independent of load."""
    (tmp_path / "state").mkdir()
    monkeypatch.chdir(tmp_path)
    code = (
        "import torch.utils.data; from pathlib import Path; from tests.watch.watch import hook_jobs, test_hook; "
        "test_hook.run_patched(hook_jobs.LOOP, Path('state'))"
    )
    root = str(Path(__file__).parents[3])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": root})
    check_loop(read_state(tmp_path), known(tmp_path))


def run_patched(job: str, directory: Path) -> None:
    """Runs a script in this process with the hook, as if the frameworks were imported now."""
    from stoker_watch.recording.hook import stoker_hook
    from stoker_watch.recording.hook.stoker_hook import clock

    stoker_hook.failures.STATE_DIR = clock.clock._directory = str(directory)
    clock.clock.publish()
    for name, (module, function, *args) in stoker_hook.PATCHES.items():
        if name in sys.modules:
            getattr(importlib.import_module(f"{stoker_hook.__name__}.{module}"), function)(sys.modules[name], *args)
    exec(compile(job, "job.py", "exec"), {"__name__": "__main__"})
    clock.clock._finish()


@needs("torch")
@pytest.mark.slow
@undisturbed_once
def test_a_training_loop_is_timed_as_it_times_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    out = ran([sys.executable, "-c", hook_jobs.LOOP], tmp_path)
    assert out.startswith("loss ")
    state, itself = read_state(tmp_path), known(tmp_path)
    check_loop(state, itself)
    assert phase_seconds(state, None)["checkpoint"] > 0
    assert phase_seconds(state, None)["input_wait"] == pytest.approx(itself["wait"], rel=0.15, abs=0.1)


SAVES_BY_PICKLE = (
    hook_jobs.DATA
    + """
import os, pickle

class SlowFile:  # of a disk that takes its time
    def __init__(self, file):
        self.file = file

    def write(self, data):
        nap(0.2)
        return self.file.write(data)


model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for x, y in DataLoader(Slow(32, 0), 4):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with open("state.pkl", "wb") as file:
        pickle.dump({"step": 1}, SlowFile(file))
        file.flush()
        os.fsync(file.fileno())
json.dump({"saved": known["naps"]}, open("known.json", "w"))
"""
)


@needs("torch")
@pytest.mark.slow
def test_saving_by_pickle_is_a_checkpoint(tmp_path: Path) -> None:
    ran([sys.executable, "-c", SAVES_BY_PICKLE], tmp_path)
    assert phase_seconds(read_state(tmp_path), None)["checkpoint"] >= 0.98 * known(tmp_path)["saved"]


BUSY = """
class Work(Slow):
    def __getitem__(self, i):
        begun = time.thread_time()
        while time.thread_time() - begun < 0.004:
            pass
        return torch.full((3, 16, 16), i / self.n), i % 10


for x, y in DataLoader(Slow(4), 4):  # the first step ends the start
    measure(model(x), y).backward()
    optimizer.step()
for x, y in DataLoader((Work if sys.argv[1] == "works" else Slow)(64), 4):
    measure(model(x), y).backward()
    optimizer.step()
"""


@needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["works", "sleeps"])
def test_a_loader_that_works_in_the_thread_is_told_from_one_that_waits(how: str, tmp_path: Path) -> None:
    begin, _, _ = hook_jobs.LOOP.partition("def detections")
    ran([sys.executable, "-c", begin + BUSY, how], tmp_path)
    state = read_state(tmp_path)
    cpu, waited_s = cpu_by_phase(state), phase_seconds(state, None)["input_wait"]
    assert waited_s > 0.25
    assert (cpu["input_wait"] > 0.25) == (how == "works")
    assert cpu["input_wait"] < (1.01 * waited_s if how == "works" else waited_s / 2)  # two clocks
    assert cpu["compute"] > 0
    assert state.values["workers"] == 0


def test_an_error_in_it_is_reported_and_the_job_goes_on(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import keras.src.models.model\n")
    (tmp_path / "keras/src/models").mkdir(parents=True)
    for name in ("keras", "keras/src", "keras/src/models"):
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "keras/src/models/model.py").write_text("done = 1\n")  # no Model in it
    assert ran([sys.executable, "-c", "import torch; print('on')"], tmp_path) == "on\n"
    (said,) = (tmp_path / "state").glob("errors-*")
    assert said.read_text().startswith("keras.src.models.model: AttributeError")


@needs("torch")
@pytest.mark.slow
@undisturbed_once
def test_a_watched_loop_and_its_explanation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    script = tmp_path / "train.py"
    script.write_text(hook_jobs.LOOP.replace("Slow(32), 4))", "Slow(256), 4))"))
    why = watched([sys.executable, "train.py"], tmp_path)
    assert why.coverage["inside the job"].startswith("recorded: torch 2")
    assert why.steps == 1 + 64 + 2
    assert why.num_images == 4 + 512 + 8
    assert seconds(why, "input_wait") == pytest.approx(known(tmp_path)["wait"], rel=0.1)
    assert seconds(why, "compute") > 0


@pytest.mark.slow
def test_without_the_hook_or_python_there_is_a_reason(tmp_path: Path) -> None:
    assert watched(["sh", "-c", "exit 0"], tmp_path).coverage["inside the job"].startswith("not recorded: no Python")
    words = [
        sys.executable,
        "-c",
        "from stoker_watch.cli.app import main; main()",
        "watch",
        "--run-dir",
        "off",
        "--no-hook",
        "--",
    ]
    done = subprocess.run([*words, "env"], cwd=tmp_path, capture_output=True, check=True)
    assert b"STOKER_HOOK" not in done.stdout
    event = next(iter(read_lines(tmp_path / "off", EVENTS, Event)))
    assert event.data["coverage"]["inside the job"] == "not recorded: --no-hook"


@needs("torch")
@pytest.mark.slow
@undisturbed_once
def test_validations_by_hand_are_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    ran([sys.executable, "-c", hook_jobs.VALIDATIONS], tmp_path)
    state, itself = read_state(tmp_path), known(tmp_path)
    phases = phase_seconds(state, None)
    assert (state.values["steps"], state.values["batches"], state.values["num_images"]) == (12, 24, 192)
    assert phases["eval"] == pytest.approx(itself["eval"], rel=0.05)
    assert phases["host"] >= itself["between"]
    assert phases["unattributed"] >= 0.5, "the end of the job"
    a_batch = itself["naps"] / state.values["batches"]  # the one that ends a validation may count as part of it
    assert phases["input_wait"] >= itself["naps"] - itself["naps_before"] - a_batch


PRETRAINED = """
import torch


class PreTrainedModel(torch.nn.Module):
    def eval(self):  # as of transformers 5
        return self.train(False)
"""
GENERATES = """
import time
import torch
from transformers.modeling_utils import PreTrainedModel


class Model(PreTrainedModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)


model, known_s = Model(), 0.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    model.layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        begun = time.perf_counter()
        model.eval()
        time.sleep(0.1)
        model.train()
        known_s += time.perf_counter() - begun
open("known.txt", "w").write(str(known_s))
"""


@pytest.mark.slow
@needs("torch")
def test_eval_of_a_model_that_has_its_own_begins_an_evaluation(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    (tmp_path / "transformers" / "modeling_utils.py").write_text(PRETRAINED)
    (tmp_path / "job.py").write_text(GENERATES)
    ran([sys.executable, "job.py"], tmp_path)
    known_s = float((tmp_path / "known.txt").read_text())
    assert phase_seconds(read_state(tmp_path), None)["eval"] == pytest.approx(known_s, rel=0.1)


@needs("torch")
def test_workers_that_are_started_again_are_counted(tmp_path: Path) -> None:
    """Not the first start, before the first step; once more for the loader that keeps its own."""
    (tmp_path / "job.py").write_text(hook_jobs.RESTARTS)
    ran([sys.executable, "job.py"], tmp_path)
    state = read_state(tmp_path)
    assert (state.values["steps"], state.values["worker_starts"]) == (12, 3)
    phases = phase_seconds(state, None)
    assert 0 < state.values["worker_start_s"] <= phases["input_wait"] + phases["unattributed"]


@needs("pytorch_lightning", "transformers")
@pytest.mark.slow
@pytest.mark.parametrize(("job", "steps"), [(hook_jobs.LIGHTNING, 16), (hook_jobs.TRANSFORMERS, 8)])
@undisturbed_once
def test_lightning_and_transformers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # noqa: ARG001
    job: str,
    steps: int,
) -> None:
    (tmp_path / "job.py").write_text(job)
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    environment = add_hook_env({**os.environ, **QUIET}, state_dir)
    done = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == f"steps {steps}".encode()
    assert b"stoker" not in done.stderr
    state = read_state(tmp_path)
    assert (state.values["steps"], state.values["batches"], state.values["num_images"]) == (steps, 16, 128)
    phases = phase_seconds(state, None)
    itself = known(tmp_path)
    naps = itself["naps"] - itself["naps_before"]  # waits before the first step are startup
    assert naps <= phases["input_wait"] <= 1.3 * naps + 0.2
    assert itself["eval"] <= phases["eval"] <= 1.3 * itself["eval"] + 0.2
    assert phases["checkpoint"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
@undisturbed_once
def test_fit_of_keras_with_a_slow_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:  # noqa: ARG001
    python = sys.executable if backend == "torch" else PEERS
    if not Path(python).exists():
        pytest.skip("TensorFlow is not here: `make peers`, or name a Python that has it: STOKER_PEERS_PYTHON")
    (tmp_path / "auto_batch.py").write_text(hook_jobs.KERAS)
    why = watched([python, "auto_batch.py"], tmp_path, KERAS_BACKEND=backend)
    assert f"on {backend}" in why.coverage["inside the job"]
    assert why.steps == 80
    naps = known(tmp_path)["naps"]
    # TensorFlow prefetches the next batch during a step, which is slow if the cores are busy.
    assert (0.85 if backend == "torch" else 0.5) * naps < seconds(why, "input_wait") < 1.25 * naps
    assert seconds(why, "eval") > 0
    assert seconds(why, "checkpoint") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "images", "cause"),
    [("storage", 160, "slow_|input_bound|heavy_place"), ("decode", 160, "slow_decode|heavy_place"),
     ("retraces", 64, "recompiles")],
)  # fmt: skip
@undisturbed_once
def test_a_custom_loop_of_tensorflow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # noqa: ARG001
    how: str,
    images: int,
    cause: str,
) -> None:
    """cause: on a machine whose cores others keep busy, a slow storage and decoding look alike; the line that sleeps or
    computes is a finding once stacks show it often enough, which a job of some seconds may be too short for."""
    if not Path(PEERS).exists():
        pytest.skip("TensorFlow is not here: `make peers`, or name a Python that has it: STOKER_PEERS_PYTHON")
    (tmp_path / "train.py").write_text(hook_jobs.TENSORFLOW)
    why = watched([PEERS, "train.py", how, str(images)], tmp_path)
    assert "TensorFlow 2." in why.coverage["inside the job"]
    assert "errors" not in why.coverage["inside the job"]
    itself = known(tmp_path)
    assert (why.steps, why.num_images) == (itself["steps"], 2 * images)
    assert seconds(why, "input_wait") == pytest.approx(itself["wait"], rel=0.15, abs=0.3)
    if how == "retraces":  # and the first trace of the evaluation
        assert seconds(why, "compile") == pytest.approx(itself["compile"], rel=0.15)
    assert seconds(why, "eval") > 0
    assert seconds(why, "checkpoint") > 0
    found = [finding.id for finding in why.findings]
    assert any(re.match(cause, name) for name in found), found
    assert ("recompiles" in found) == (how == "retraces")


@needs("torch")
@pytest.mark.slow
@undisturbed_once
def test_the_slow_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    (tmp_path / "ddp.py").write_text(hook_jobs.RANKS)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ddp.py"]
    why = watched([sys.executable, *words], tmp_path)
    assert (why.devices, why.steps, why.num_images) == (2, 40, 640)
    assert "2 processes" in why.coverage["inside the job"]
    waits = [
        sum(window.phases.get("comm", 0.0) for window in read_lines(tmp_path / "run" / folder, STEPS, StepWindow))
        for folder in (".", f"{RANKS}/0001")
    ]
    assert waits[0] > 4 * waits[1]  # rank 0 waits for rank 1
    assert (waits[0] - waits[1]) / 2 < seconds(why, "straggler") <= waits[0]
    for finding in why.findings:  # where other jobs take the machine there may be none
        if finding.id == "straggler":
            assert "rank 1 is the slow one" in finding.evidence[0].text


@pytest.mark.slow
@needs("torch")
@pytest.mark.parametrize(("trained", "without"), [("copy", 12), ("model", 0)])
def test_steps_of_an_optimizer_without_gradients_are_counted(trained: str, without: int, tmp_path: Path) -> None:
    """A copy of the model is trained, and the optimizer has the parameters of the original."""
    job = f"""
import copy, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
copy = copy.deepcopy(model)
for _ in range(12):
    optimizer.zero_grad()
    {trained}(torch.zeros(2, 4)).sum().backward()
    optimizer.step()
"""
    ran([sys.executable, "-c", job], tmp_path)
    state = read_state(tmp_path)
    assert (state.values["steps"], state.values["steps_without_gradients"]) == (12, without)


def test_loader_workers_have_no_state_file_also_of_spawn(tmp_path: Path) -> None:
    """A worker of spawn or forkserver imports the job's modules before multiprocessing says what it is."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "job.py").write_text(
        "import multiprocessing, sys, torch\n"
        "def work():\n"
        "    import torch\n"
        "if __name__ == '__main__':\n"
        "    workers = [multiprocessing.get_context(sys.argv[1]).Process(target=work) for _ in range(2)]\n"
        "    [worker.start() for worker in workers]\n"
        "    [worker.join() for worker in workers]\n"
    )
    for method in ("fork", "spawn", "forkserver"):
        folder = tmp_path / method
        folder.mkdir()
        ran([sys.executable, str(tmp_path / "job.py"), method], folder)
        assert len(list((folder / "state").glob("*.state"))) == 1, method
