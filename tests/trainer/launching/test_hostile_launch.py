"""What a launch is given cannot run or read anything else: values with control characters, a launch.json of others."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from stoker_watch.cli.app import main
from stoker_watch.runs.records import LAUNCH
from tests.fixtures.special_files import replace_by

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def stoker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", "launch", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return int(str(ended.value.code)), captured.out + captured.err

    return run


LINE = "x\n#SBATCH --wrap=id\ntouch /tmp/ran\n"
SLURM = ("slurm", "demo", "--dry-run", "--mount", "/")
PLACES = {
    "slurm": SLURM,
    "k8s": ("k8s", "demo", "--dry-run", "--image", "r/i:1", "--run-dir", "gs://b/run"),
    "vertex": ("vertex", "demo", "--dry-run", "--image", "r/i:1", "--run-dir", "gs://b/run", "--region", "us-east1",
               "--project", "p", "--machine-type", "g2-standard-8"),
}  # fmt: skip


@pytest.mark.parametrize("bad", [LINE, "a\rb", "a\x1b[31mb", "a\x00b", "a\x85b", "a\u2028b"])
@pytest.mark.parametrize(
    ("place", "flag"),
    [("slurm", flag) for flag in ("--run-dir", "--partition", "--account", "--gpu", "--name", "--epochs")]
    + [
        ("k8s", flag)
        for flag in ("--namespace", "--queue", "--gpu", "--image", "--mount", "--env", "--service-account")
    ]
    + [("vertex", flag) for flag in ("--region", "--project", "--service-account", "--gpu")],
)
def test_a_value_with_a_control_character_is_refused_at_its_flag(
    stoker: Command, place: str, flag: str, bad: str
) -> None:
    value = f"A={bad}" if flag == "--env" else f"/{bad}" if flag in ("--mount", "--run-dir") else bad
    words = [*PLACES[place], "--run-dir", "run"] if place == "slurm" else list(PLACES[place])
    if flag in words:
        del words[words.index(flag) : words.index(flag) + 2]
    code, output = stoker(*words, flag, value)
    assert code == 2, output
    assert flag in output
    assert not any(ord(c) < 32 and c != "\n" for c in output)


def test_each_option_of_sbatch_is_one_line(stoker: Command) -> None:
    code, output = stoker(*SLURM, "--run-dir", "a run; with 'quotes' $(id) `id`", "--partition", "x --wrap=id")
    assert code == 0, output
    lines = [line for line in output.splitlines() if line.startswith("#SBATCH")]
    assert len(lines) == len({line.partition("=")[0] for line in lines})
    assert all(line.startswith("#SBATCH --") for line in lines)
    script = output[output.index("#!") :]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_document_that_is_shown_has_no_bidirectional_controls(stoker: Command) -> None:
    code, output = stoker(*SLURM, "--run-dir", "run\u202e\u2066x")
    assert code == 0, output
    assert all(character.isprintable() or character == "\n" for character in output)


def kept(path: Path, **fields: object) -> Path:
    job = {"place": "local", "id": "1@0", "name": "n", "run": str(path), "t": 0.0, **fields}
    path.mkdir(exist_ok=True)
    (path / LAUNCH).write_text(json.dumps([job]))
    return path


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
@pytest.mark.parametrize(
    ("place", "id"),
    [
        ("slurm", "--user=root"), ("slurm", "1 2"), ("slurm", ""), ("slurm", "-1"), ("slurm", "12_[1-5]"),
        ("local", "--user=root"), ("local", "1"), ("local", "x@y"), ("local", "-1@0"), ("local", "9" * 20 + "@0"),
        ("local", "1@nan"), ("k8s", "--all"), ("k8s", "../secrets/x"), ("k8s", "a/b/c/d"),
        ("vertex", "--x"), ("vertex", "../../x"), ("gcp-batch", "https://evil.example/x"), ("ray", "../../x"),
        ("nowhere", "1"), ("slurm", "1" * 100_000), ("slurm", "1\n2"),
    ],
)  # fmt: skip
def test_an_id_that_the_place_never_gave_is_refused_before_a_client_runs(
    stoker: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, id: str, command: str
) -> None:
    clients = tmp_path / "bin"
    clients.mkdir()
    for name in ("scancel", "scontrol", "squeue", "sbatch", "kubectl"):
        (clients / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/called\n")
        (clients / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{clients}:{os.environ['PATH']}")
    options = {"namespace": "n", "kind": "job", "address": "http://127.0.0.1:9", "region": "r", "project": "p"}
    run = kept(tmp_path / "run", place=place, id=id, options=options)
    code, output = stoker(command, str(run))
    assert code == 2, output
    assert not (tmp_path / "called").exists()
    assert LAUNCH in output or "place" in output


def test_cancel_ends_no_process_of_another_command(stoker: Command, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            started_s = psutil.Process(process.pid).create_time()
            run = kept(tmp_path / "run", id=f"{process.pid}@{started_s:.0f}")
            code, output = stoker("cancel", str(run))
            assert process.poll() is None, output
            assert "running" not in stoker("status", str(run))[1]
            assert code == 0
        finally:
            process.kill()


@pytest.mark.parametrize("log", ["/etc/passwd", "../../etc/passwd", "/dev/zero", "/proc/self/environ"])
def test_a_log_outside_the_run_folder_is_not_printed(stoker: Command, tmp_path: Path, log: str) -> None:
    run = kept(tmp_path / "run", log=log)
    code, output = stoker("logs", str(run))
    assert code == 2, output
    assert "root:" not in output


@pytest.mark.parametrize(
    ("name", "command", "target"),
    [(LAUNCH, "status", target) for target in ("zero", "fifo", "folder", "large")]
    + [("launch.log", "logs", target) for target in ("zero", "fifo", "folder")],
)
def test_launch_json_and_log_that_are_no_files_end_at_once(
    stoker: Command, tmp_path: Path, name: str, command: str, target: str
) -> None:
    run = kept(tmp_path / "run", log=str(tmp_path / "run" / "launch.log"))
    replace_by(target, run / name, size_bytes=1 << 34)
    began = time.monotonic()
    code, output = stoker(command, str(run))
    assert code == 2, output
    assert name in output
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("way", ["a link", "dots"])
def test_a_process_is_that_of_a_run_that_is_named_in_another_way(stoker: Command, tmp_path: Path, way: str) -> None:
    run, named = tmp_path / "run", tmp_path / "other" / ".." / "run"
    run.mkdir()
    (tmp_path / "other").mkdir()
    if way == "a link":
        named = tmp_path / "link"
        named.symlink_to(run)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--run-dir", str(run)]) as process:
        try:
            kept(run, id=f"{process.pid}@{psutil.Process(process.pid).create_time():.0f}")
            assert "running" in stoker("status", str(named))[1]
        finally:
            process.kill()


@pytest.mark.parametrize("text", ["[1]", '[{"place": "local"}]', '{"a": 1}', "[" * 100_000, '[{"t": 1e999}]', "\x00"])
def test_a_launch_json_that_is_no_list_of_jobs_is_an_error_with_its_place(
    stoker: Command, tmp_path: Path, text: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / LAUNCH).write_text(text)
    code, output = stoker("status", str(run))
    assert code == 2
    assert LAUNCH in output


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_kubernetes_expands_nothing_in_arguments_and_variables(stoker: Command, nodes: str) -> None:
    words = [*PLACES["k8s"], "--nodes", nodes, "--env", "A=$(HOME) $$(B) $C", "--classes", "$(PATH)", "a$$b"]
    code, output = stoker(*words)
    assert code == 0, output
    documents = [one for one in yaml.safe_load_all(output[output.index("apiVersion") :]) if one]
    containers = [c for document in documents for c in find(document, "containers") for c in c]
    assert containers
    seen = [entry["value"] for c in containers for entry in c.get("env", ()) if entry["name"] == "A"]
    assert set(seen) == {"$$(HOME) $$$$(B) $$C"}
    words = [word for c in containers for word in (*c.get("command", ()), *c.get("args", ()))]
    assert any("$$(PATH)" in word for word in words)
    assert not any(expands(word) for word in words)


def expands(text: str) -> bool:
    """Whether Kubernetes would put the value of a variable into the text: `$(` after an even number of `$`."""
    count = 0
    for at, char in enumerate(text):
        if char == "(" and count % 2 and "SHELL_ONLY" not in text[at:]:
            return True
        count = count + 1 if char == "$" else 0
    return False


def find(node: object, name: str) -> list[list[dict[str, object]]]:
    if isinstance(node, dict):
        own = [node[name]] if name in node else []
        return own + [found for value in node.values() for found in find(value, name)]
    if isinstance(node, list):
        return [found for value in node for found in find(value, name)]
    return []
