"""What `stoker launch` decides and refuses before anything is submitted, and what it would submit."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.config.settings import Config, to_toml
from stoker.launching import jobs, ray_cluster
from stoker.launching.elastic import choose_nodes
from stoker.launching.jobs import last_job, read_jobs, remember, submit
from stoker.launching.request import check_launch, make_spec, parse_nodes
from stoker.launching.spec import (
    PLACES,
    Job,
    JobStatus,
    LaunchPlace,
    LaunchRequest,
    LaunchSpec,
    PlaceOptions,
    open_place,
)
from stoker.planning.machines import find_machine
from stoker_watch.cli.app import main
from stoker_watch.durations import parse_time_s
from stoker_watch.errors import ConfigError, StokerError
from stoker_watch.runs.records import LAUNCH, RunFolder
from stoker_watch.runs.schemas import Event

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def stoker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", "launch", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(str(ended.value.code)), captured.out + captured.err

    return run


class Cloud(LaunchPlace):
    """A place with the limits of a cloud that runs containers."""

    name, cloud = "cloud", "GCP"
    options = frozenset({"region"})
    spot_grace_s = 30

    def check(self, spec: LaunchSpec) -> list[str]:
        return [f"{spec.name} is checked"]


def decide(place: object = None, **flags: object) -> tuple[LaunchSpec, list[str]]:
    request = {"run_dir": "gs://bucket/run", "image": "registry/stoker:1", **flags}
    options = {name: request.pop(name) for name in PlaceOptions.__dataclass_fields__ if name in request}
    data, on_cpu = request.pop("data", "gs://bucket/data"), bool(request.pop("on_cpu", False))
    batch = request.pop("batch", None)
    where = Cloud() if place is None else place
    spec = make_spec(
        LaunchRequest(**request), where, PlaceOptions(**options), data=data, settings=("--epochs", "3"), on_cpu=on_cpu,
        batch=batch,
    )  # fmt: skip
    return spec, check_launch(spec, where)


def test_what_is_not_set_is_derived_from_the_machine() -> None:
    spec, warnings = decide(machine_type="a2-highgpu-2g")
    assert (spec.devices, spec.gpus, spec.cpus, spec.memory_gib, spec.shm_gib) == (2, 2, 24, 0.9 * 170, 2.0)
    assert spec.arguments == (
        "train", "gs://bucket/data", "--epochs", "3", "--run-dir", "gs://bucket/run", "--devices", "2",
    )  # fmt: skip
    assert spec.name == "stoker-run"
    assert warnings == ["stoker-run is checked"]


@pytest.mark.parametrize(("flags", "named"), [
    ({"run_dir": "runs/a"}, "The nodes of cloud cannot reach the run folder"),
    ({"data": "/data/coco"}, "The nodes of cloud cannot reach the data set"),
    ({"data": "/data/coco", "mount": ("claim:/dat",)}, "cannot reach the data set"),
    ({"image": None}, "which image?"),
    ({"machine_type": "a2-highgpu-3g"}, "did you mean 'a2-highgpu-"),
    ({"machine_type": "g5.xlarge"}, "There is no machine 'g5.xlarge'"),
    ({"machine_type": "a2-highgpu-1g", "devices": 2, "cpus": 8}, "--devices 2: a a2-highgpu-1g has 1"),
    ({"machine_type": "a2-highgpu-1g", "cpus": 13}, "--cpus 13: a a2-highgpu-1g has 12"),
    ({"namespace": "team"}, "cloud has no --namespace"),
    ({"nodes": "8:2"}, "--nodes '8:2' is not a number"),
    ({"gpu": "1g.10gb", "devices": 2}, "A training on the MIG slice 1g.10gb has one device"),
    ({"gpu": "t4", "on_cpu": True}, "--gpu t4 and --device cpu contradict"),
    ({"devices": 4, "cpus": 3}, "--cpus 3: fewer than the 4 processes"),
    ({"devices": 4, "memory": 7.9}, "need 8 GiB of memory"),
    ({"devices": 4, "shm": 0.06}, "NCCL would fail with a bus error"),
    ({"devices": 1, "memory": 4.0, "shm": 5.0}, "--shm 5 is more than --memory 4"),
    ({"name": "My Job"}, "'My Job' is not a name for a job"),
    ({"time_limit": "soon"}, "--time-limit 'soon' is not a time"),
    ({"grace": "0s"}, "--grace '0s' is not a time"),
    ({"env": ("A-B=1",)}, "--env 'A-B=1' is not a variable"),
    ({"mount": ("claim:data",)}, "is not an absolute path"),
    ({"devices": 0}, "--devices 0 is out of range"),
    ({"devices": -1}, "--devices -1 is out of range"),
    ({"restarts": -1}, "--restarts -1 is not a number"),
    ({"nodes": "2:3"}, "--nodes 2:3 needs a --batch-size"),
    ({"nodes": "3", "batch": {"batch_size": 8}}, "cannot be divided equally among 3 devices"),
    ({"nodes": "2:3", "batch": {"batch_size": 8, "mosaic": 0.5}, "devices": 2}, "among 4 to 6 devices"),
    ({"resume": "gs://bucket/run"}, "What should be trained on?"),
    ({"secret": ("KEY=wandb/key",)}, "cloud has no secrets for --secret"),
    ({"secret": ("KEY=value",)}, "'KEY' is not a variable, a secret and a key of it"),
])  # fmt: skip
def test_what_would_fail_is_refused(flags: dict[str, object], named: str) -> None:
    with pytest.raises(StokerError) as refused:
        decide(**flags)
    assert named in str(refused.value)
    assert refused.value.exit_code == 2
    assert "fix:" in str(refused.value) or "valid:" in str(refused.value)


def test_a_mounted_folder_is_reached(tmp_path: Path) -> None:
    spec, _ = decide(data="/data/coco", run_dir="/data/runs/a", mount=("server:/export:/data/",))
    assert [(mount.source, mount.path) for mount in spec.mounts] == [("server:/export", "/data")]
    slurm = open_place("slurm")
    with pytest.raises(StokerError, match="nodes of slurm cannot reach the run folder"):
        decide(slurm, image=None, data="demo", run_dir=str(tmp_path / "a"))
    at = {"image": None, "data": "demo", "run_dir": str(tmp_path / "a")}
    with pytest.raises(StokerError, match="cannot reach the interpreter") as refused:
        decide(slurm, **at, mount=(str(tmp_path),))
    assert f"--mount {sys.prefix}" in str(refused.value)
    decide(slurm, **at, mount=(str(tmp_path), sys.prefix))


def test_few_cores_for_a_gpu_are_a_warning() -> None:
    _, warnings = decide(devices=2, cpus=4)
    assert "`stoker check` wants 4 for each" in warnings[0]


@pytest.mark.parametrize(("save_s", "flags", "ends"), [
    (29.0, {}, ""), (31.0, {}, "warning"), (61.0, {}, "--grace 183s"), (31.0, {"spot": True}, "30 s is shorter"),
    (61.0, {"grace": "5min"}, ""),
])  # fmt: skip
def test_the_grace_period_against_what_a_save_took(
    save_s: float, flags: dict[str, object], ends: str, tmp_path: Path
) -> None:
    with RunFolderOf(tmp_path / "run") as folder:
        folder.event("checkpoint_saved", "saved", write_s=save_s)
        folder.event("checkpoint_saved", "saved", write_s=1.0)
    at = {"run_dir": str(tmp_path / "run"), "mount": (f"claim:{tmp_path}",), **flags}
    if ends in ("", "warning"):
        _, warnings = decide(**at)
        assert any("a save of this run took 31 s" in warning for warning in warnings) == (ends == "warning")
        return
    with pytest.raises(StokerError, match=ends) as refused:
        decide(**at)
    assert refused.value.exit_code == 3


class RunFolderOf:
    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._folder = RunFolder(path, 1)

    def __enter__(self) -> RunFolder:
        return self._folder

    def __exit__(self, *_: object) -> None:
        self._folder.close()


def test_a_finished_run_is_not_launched(tmp_path: Path) -> None:
    with RunFolderOf(tmp_path / "run") as folder:
        folder.event("finished", "done")
    with pytest.raises(StokerError, match="The run is finished"):
        decide(run_dir=str(tmp_path / "run"))


@pytest.mark.parametrize(("words", "named"), [
    ((), "Where should it be launched?"),
    (("slrum", "demo"), "did you mean 'slurm'?"),
    (("local",), "What should be trained on?"),
    (("local", "demo", "--epoch", "3"), "did you mean `--epochs`?"),
    (("local", "demo", "--model", "resnet", "--epochs", "x"), 'Invalid value for --epochs: unable to convert'),
    (("local", "demo", "--nodes", "2"), "local has 1 node"),
    (("local", "nowhere"), "There is no data set 'nowhere'"),
    (("local", "demo", "--cpus", "0"), "--cpus 0: fewer than the 1 processes"),
    (("local", "demo", "--memory", "0"), "--memory 0:"),
    (("local", "demo", "--image", "a"), "local has no --image"),
    (("slurm", "demo", "--run-dir", "gs://b/r", "--spot"), "Which partition of the cluster can be preempted?"),
    (("slurm", "demo", "--run-dir", "gs://b/r", "--time-limit", "2min"), "leaves no time to train"),
    (("slurm", "demo", "--run-dir", "gs://b/r", "--namespace", "x"), "valid:  --partition, --account"),
    (("ray", "demo", "--run-dir", "gs://b/r", "--gpu", "1g.10gb"), "ray has no --gpu 1g.10gb"),
    (("status", "nothing"), "No job was launched for this run"),
    (("slurm", "s3://b/coco", "extra", "--devices", "4", "--run-dir", "s3://b/r/1", "--dry-run"), "arguments: extra"),
    (("slurm", "demo", "--model", "ember_x", "--run-dir", "s3://b/r/1", "--dry-run"), "no model called 'ember_x'; did"),
    (("k8s", "demo", "--model", "ember_s", "--queries", "3", "--run-dir", "gs://b/r", "--image", "a"), "no --queries"),
    (("local", "demo", "--model", "retinanet_resnet50_fpn", "--image-size", "100"), "must be multiples of 32"),
    (("local", "demo", "--model", "ssd300_vgg16", "--anchor-sizes", "1", "2"), "--anchor-sizes has 2 numbers"),
    (("local", "demo", "--epochs", "3", "--steps", "5"), "both set the length of training"),
    (("local", "demo", "--lr", "-1"), "--lr -1.0 is out of range"),
    (("local", "demo", "--shard"), "the run is on one"),
    (("local", "demo", "--batch-size", "8", "--devices", "4", "--grad-accum-steps", "4"), "does not divide the 2 im"),
    (("local", "demo", "--metrics-port", "99999"), "--metrics-port 99999 is not a valid port"),
    (("local", "demo", "--config", "nowhere.toml"), "The configuration file does not exist"),
    (("local", "demo", "--run-dir", "https://b/r"), "A run cannot be written there"),
    (("local", "--device", "cpu", "demo"), "DATA comes before the settings, and 'demo' is behind one"),
    (("local", "--resume", "run", "--batch-size", "4"), "--resume takes its settings from the run"),
    (("local", "--resume", "nowhere", "--workers", "2"), "nowhere"),
])  # fmt: skip
def test_the_command_line_refuses(words: tuple[str, ...], named: str, stoker: Command) -> None:
    code, text = stoker(*words)
    assert code == 2
    assert named in text
    assert not Path("runs").exists()


@pytest.mark.parametrize(("flag", "value", "named"), [
    ("--weights", "imagenett", "did you mean imagenet?"), ("--device", "cpuu", "no device called 'cpuu'"),
])  # fmt: skip
def test_what_training_refuses_as_a_failed_preflight(flag: str, value: str, named: str, stoker: Command) -> None:
    code, text = stoker("local", "demo", flag, value)
    assert code == 3
    assert named in text
    assert not Path("runs").exists()


def test_files_that_only_the_image_has_are_not_looked_for(stoker: Command) -> None:
    words = ("k8s", "demo", "--run-dir", "gs://b/r", "--image", "a", "--dry-run")
    code, text = stoker(*words, "--config", "/image/c.toml", "--weights", "/image/w.pt")
    assert code == 0, text
    code, text = stoker(*words, "--model", "/image/m.toml")  # a model is a row of the table, never a file
    assert code == 2
    assert "There is no model" in text


def test_a_run_that_has_begun_has_its_own_settings(stoker: Command, tmp_path: Path) -> None:
    with RunFolderOf(tmp_path / "run") as folder:
        folder.event("started", "started")
    (tmp_path / "run/config.toml").write_text(to_toml(Config().replace(data="demo", shard=True), {}))
    code, text = stoker("local", "demo", "--shard", "--run-dir", "run", "--dry-run")
    assert code == 0, text
    assert "--shard" in text
    code, text = stoker("local", "demo", "--epochs", "3", "--run-dir", "run", "--dry-run")
    assert code == 2
    assert "it was started with --shard without --max-duration; now it is --epochs 3 without --shard" in text, text
    assert "stoker launch local --resume" in text
    code, text = stoker("local", "--resume", "run", "--workers", "2", "--dry-run")
    assert code == 0, text
    assert "train --workers 2 --resume" in text


def test_a_launch_where_torch_is_absent_says_what_is_not_checked(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from stoker_watch.cli.app import main; main()"
    words = ("slurm", "demo", "--model", "ember_x", "--run-dir", "s3://b/r", "--dry-run")
    done = subprocess.run(
        [sys.executable, "-c", code, "launch", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "warning: the settings of the training are checked there only: torch is not installed here" in done.stderr


def test_the_script_for_slurm(stoker: Command) -> None:
    code, text = stoker(
        "slurm", "demo", "--batch", "16", "--run-dir", "gs://b/o'r", "--devices", "4", "--nodes", "2:8", "--gpu",
        "h100", "--spot", "--partition", "preempt", "--account", "vision", "--time-limit", "90min", "--env", "A=it's",
        "--env", "B=@restarts@", "--dry-run",
    )  # fmt: skip
    assert code == 0
    for line in (
        "#SBATCH --nodes=2-8", "#SBATCH --cpus-per-task=32", "#SBATCH --mem=131072M",
        "#SBATCH --gres=gpu:h100:4", "#SBATCH --time=90", "#SBATCH --signal=B:USR1@120", "#SBATCH --requeue",
        "#SBATCH --open-mode=append", "#SBATCH --partition=preempt", "#SBATCH --account=vision",
        """export A='it'"'"'s'""", "export B=@restarts@",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert """train demo --batch-size 16 --run-dir 'gs://b/o'"'"'r' --devices 4 &""" in text
    assert "--batch is `--batch-size` here" in text, "flags of other tools are translated, with a note"


def test_the_log_for_slurm_of_a_run_in_a_bucket(stoker: Command, tmp_path: Path) -> None:
    words = ("slurm", "demo", "--run-dir", "s3://b/r/1", "--dry-run")
    code, text = stoker(*words)
    assert code == 0
    assert "#SBATCH --output=stoker-1.log" in text.splitlines(), "in the folder of sbatch"
    assert (
        f"warning: the log stoker-1.log is written into the folder from which the job is submitted, and {tmp_path}"
        in (text)
    )
    shared = ("--mount", str(tmp_path), "--mount", sys.prefix)
    _, text = stoker(*words, *shared)
    assert "warning: the log" not in text
    code, text = stoker("slurm", "demo", "--run-dir", str(tmp_path / "run"), *shared, "--dry-run")
    assert f"#SBATCH --output={tmp_path}/run/launch.log" in text.splitlines()
    assert "warning: the log" not in text


def test_the_script_is_one_that_bash_accepts(stoker: Command) -> None:
    words = ("slurm", "demo", "--run-dir", "gs://b/r", "--gpu", "1g.10gb", "--mount", "/")
    _, text = stoker(*words, "--dry-run")
    assert "#SBATCH --gres=gpu:1g.10gb:1" in text
    script = text.partition("#!")[2].partition("\n# ")[0]
    assert subprocess.run(["bash", "-n"], input=f"#!{script}", text=True, check=False).returncode == 0


def test_the_job_for_ray(stoker: Command) -> None:
    code, text = stoker(
        "ray", "demo", "--run-dir", "gs://b/r", "--nodes", "2:4", "--devices", "2", "--gpu", "A100",
        "--batch-size", "8", "--dry-run",
    )  # fmt: skip
    assert code == 0
    job = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert job["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "60"
    assert '"resources":{"CPU":16,"GPU":2,"accelerator_type:A100":0.001}' in job["entrypoint"]


def test_launching_works_where_torch_is_absent() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib; from stoker.launching.spec import PLACES\n"
        "for path in PLACES.values():\n"
        "    try: importlib.import_module(path.partition(':')[0])\n"
        "    except ModuleNotFoundError as error: assert 'stoker.launching' in str(error), error\n"
        "import stoker.launching.request, stoker.launching.jobs\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("stored", "batch", "nodes", "chosen"), [
    (None, {"batch_size": 8}, 3, 2), (None, {"batch_size": 12}, 3, 3), (None, {"batch_size": 12, "mosaic": 0.5}, 2, 1),
    (None, {"batch_size": 7}, 3, 1), ("8\nmosaic = 0", {"batch_size": 12}, 3, 2),
    ("8", {}, 7, 4), (None, {}, 3, 3),
])  # fmt: skip
def test_the_most_nodes_that_can_share_the_batch(
    stored: str | None, batch: dict[str, object], nodes: int, chosen: int, tmp_path: Path
) -> None:
    if stored is not None:
        with RunFolderOf(tmp_path) as folder:
            folder.event("started", "started")
        (tmp_path / "config.toml").write_text(
            f"[run]\nbatch_size = {stored}\n[reasons]\nshard = 'each device has the whole model'\n"
        )
    assert choose_nodes(str(tmp_path), batch, devices=1, least=1, nodes=nodes) == chosen


@given(st.integers(1, 9_999), st.integers(0, 90_000))
def test_numbers_of_nodes(low: int, more: int) -> None:
    assert parse_nodes(f"{low}:{low + more}") == (low, low + more)
    assert parse_nodes(str(low)) == (low, low)


@given(st.text(max_size=8))
def test_any_text_is_a_time_or_an_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_time_s(text, "--grace") >= 1


def test_jobs_are_remembered_in_the_run_folder(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert read_jobs(run) == []
    jobs = [
        Job(place="slurm", id=str(number), name="n", run=run, t=float(number), options={"account": "x"})
        for number in range(3)
    ]
    for job in jobs:
        remember(job)
    assert read_jobs(run) == jobs
    assert last_job(run) == jobs[-1]
    (tmp_path / "run" / LAUNCH).write_text('[{"place": 3}]')
    with pytest.raises(StokerError, match="list of launched jobs"):
        read_jobs(run)


def test_a_running_job_is_not_launched_again(stoker: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    remember(Job(place="local", id="1@1", name="n", run=str(run), t=0.0))
    monkeypatch.setattr(
        "stoker.launching.local.Local.status", lambda *_: JobStatus(state="running", text="process 1"), raising=True
    )
    code, text = stoker("local", "demo", "--run-dir", str(run))
    assert code == 2
    assert "The run has a job already: local job 1@1 is running" in text


@pytest.mark.parametrize(("kind", "state", "code"), [
    ("finished", "succeeded", 0), ("preempted", "cancelled", 75), ("failed", "failed", 5), ("resumed", "failed", None),
    (None, "unknown", None),
])  # fmt: skip
def test_how_a_local_job_ended_is_read_from_the_run(
    kind: str | None, state: str, code: int | None, tmp_path: Path
) -> None:
    events = [Event(t=5.0, attempt=1, kind="failed", data={"exit_code": 3})]  # of an earlier job
    if kind is not None:
        events.append(
            Event(t=20.0, attempt=2, kind=kind, text="why", data={"exit_code": 5} if kind == "failed" else {})
        )
    (tmp_path / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    job = Job(place="local", id="999999999@1", name="n", run=str(tmp_path), t=10.0)
    status = open_place("local").status(job)
    assert (status.state, status.exit_code) == (state, code)


@pytest.mark.parametrize(("event", "code", "state"), [
    (None, 2, "failed"), ("started", 2, "failed"), ("resumed", 137, "failed"), ("started", 0, "succeeded"),
    ("failed", 1, "failed"), ("preempted", 75, "cancelled"),
])  # fmt: skip
def test_the_exit_code_of_a_local_job_is_the_end_of_its_log(
    event: str | None, code: int, state: str, tmp_path: Path
) -> None:
    if event is not None:
        written = Event(t=20.0, attempt=1, kind=event, text="why")
        (tmp_path / "events.jsonl").write_bytes(msgspec.json.encode(written) + b"\n")
    log = tmp_path / "launch.log"
    log.write_text(
        "old\nstoker: process 7 ended with exit code 6\n"
        f"new\n  where: here\nstoker: process 999999999 ended with exit code {code}\n"
    )
    job = Job(place="local", id="999999999@1", name="n", run=str(tmp_path), t=10.0, log=str(log))
    status = open_place("local").status(job)
    assert (status.state, status.exit_code) == (state, code)
    if event == "preempted":
        assert status.text == "stopped and saved: why", "the run has this end"
    else:
        assert status.text == f"its log, {log}, ends with\nnew\n  where: here"
    other = open_place("local").status(msgspec.structs.replace(job, id="99@1"))
    assert other.exit_code == (75 if event == "preempted" else None), "the line is of another process"


def test_a_local_job_that_ends_at_once_tells_its_exit_code(stoker: Command, tmp_path: Path) -> None:
    run, place = tmp_path / "run", open_place("local")
    spec = LaunchSpec(
        arguments=("train", "--run-dir", str(run), "--wrong", "1"), name="n", run_dir=str(run), restarts=0
    )
    job = submit(dataclasses.replace(spec, log=str(run / "launch.log")), place, LaunchRequest())
    os.waitpid(int(job.id.partition("@")[0]), 0)
    code, text = stoker("status", str(run))
    assert code == 0
    assert f"failed, exit code 2: its log, {run}/launch.log, ends with\n  stoker: `stoker train` has no --wrong" in text
    _, text = stoker("status", str(run), "--json")
    assert json.loads(text)["status"]["exit_code"] == 2


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_a_text_of_several_lines_is_printed_as_lines(command: str, stoker: Command, tmp_path: Path) -> None:
    text = "Stopped by SIGTERM.\n  where:  here\nlocal job 2@2: running"
    written = Event(t=20.0, attempt=1, kind="preempted", text=text)
    (tmp_path / "events.jsonl").write_bytes(msgspec.json.encode(written) + b"\n")
    remember(Job(place="local", id="999999999@1", name="n", run=str(tmp_path), t=10.0))
    _, printed = stoker(command, str(tmp_path))
    assert printed.splitlines()[0].endswith("stopped and saved: Stopped by SIGTERM.")
    assert printed.splitlines()[1:3] == ["  where:  here", "  local job 2@2: running"]


def test_every_place_is_named_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/launch.md").read_text()
    for place in PLACES:
        assert f"`{place}`" in page, place


@pytest.mark.parametrize(("codes", "ended"), [([75, 75, 0], 0), ([75, 6], 6), ([137, 75, 0], 0), ([137, 137], 137)])
def test_a_preempted_training_on_ray_is_started_again(
    codes: list[int], ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = iter(codes)
    monkeypatch.setattr(ray_cluster, "_run_attempt", lambda *_: next(attempts))
    monkeypatch.setattr(ray_cluster.time, "sleep", lambda _: None)
    monkeypatch.setattr(ray_cluster.signal, "signal", lambda *_: None)
    training = ray_cluster.RayTraining(
        arguments=(), min_nodes=1, max_nodes=1, resources={}, grace_s=1, restarts=1,
        run="", devices=1, batch={},
    )  # fmt: skip
    assert ray_cluster.drive(training) == ended
    assert next(attempts, None) is None


@pytest.mark.parametrize(
    ("machine_type", "gpu", "found"),
    [
        ("n1-standard-8", "nvidia-tesla-t4", "n1-standard-8+t4"),
        ("n1-standard-16", "t4", "n1-standard-16+2xt4"),
        ("n1-standard-8", "v100", "n1-standard-8+v100"),
        ("n1-standard-8", None, None),
        ("n1-standard-64", "t4", None),
        ("g2-standard-8", None, "g2-standard-8"),
        ("g2-standard-8", "l4", "g2-standard-8"),
    ],
)
def test_a_machine_without_its_gpu_in_the_name(machine_type: str, gpu: str | None, found: str | None) -> None:
    machine = find_machine(machine_type, gpu)
    assert (None if machine is None else machine.name) == found


def test_resources_of_an_n1_are_those_of_the_machine() -> None:
    spec, _ = decide(machine_type="n1-standard-16", gpu="t4")
    assert (spec.devices, spec.cpus) == (2, 16)
    with pytest.raises(StokerError, match="a n1-standard-4 has 4"):
        decide(machine_type="n1-standard-4", gpu="t4", cpus=8)


def test_a_bucket_without_a_path_is_no_mount() -> None:
    with pytest.raises(StokerError, match="is not an absolute path"):
        decide(mount=("gs://bucket",), place=open_place("k8s"))


def test_all_jobs_of_one_launch_are_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stoker: Command) -> None:
    """A search at a place without arrays has a job for each worker."""
    run = tmp_path / "study"
    for id, t in (("old", 1.0), ("a", 2.0), ("b", 2.0)):
        remember(Job(place="ray", id=id, name="n", run=str(run), t=t))
    cancelled: list[str] = []
    monkeypatch.setattr(jobs, "cancel", lambda job: cancelled.append(job.id) or JobStatus(state="cancelled", text=""))
    code, output = stoker("cancel", str(run))
    assert (code, cancelled) == (0, ["a", "b"])
    assert output.count("ray job") == 2
