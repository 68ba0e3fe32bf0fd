"""The commands: help, errors and exit codes, and a model's way from training to pictures."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker_watch.cli.app import main
from stoker_watch.runs.records import RunFolder
from tests.drawn import draw, run_stoker

PHOTO = Path(__file__).parents[3] / "docs/images/demo.jpg"

TRAIN = [
    "--model",
    "retinanet_tiny_fpn",
    "--image-size",
    "64",
    "64",
    "--batch-size",
    "8",
    "--steps",
    "20",
    "--eval-every",
    "0",
]


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def stoker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: (exit code, output), as `run_stoker` without the seconds of imports."""

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output = "".join(capfd.readouterr())
        assert "Traceback" not in output
        assert isinstance(ended.value.code, int)
        return ended.value.code, output

    monkeypatch.chdir(tmp_path)
    return run


def test_help_names_the_commands(tmp_path: Path):
    code, output = run_stoker("--help", cwd=tmp_path)
    assert code == 0
    for command in ("train", "why", "eval", "predict", "report"):
        assert f"│ {command} " in output


def test_help_and_why_import_no_torch(tmp_path: Path):
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'torchvision'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from stoker_watch.cli.app import app\n"
        "import stoker_watch.report.explain, stoker.report.terminal, stoker_watch.diagnosis.engine\n"
        "assert not any(name.split('.')[0] == 'torch' for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train"], 2, ["What should be trained on?", "demo"]),
        (["trian", "demo"], 2, ['Did you mean "train"']),
        (["train", "demo", "--batch-sizes", "3"], 2, ["--batch-size"]),
        (["train", "nowhere"], 4, ["nowhere", "fix:"]),
        (["train", "empty"], 4, ["empty", "COCO JSON", "fix:"]),
        (["train", "demo", "--device", "warp"], 3, ["'warp'", "valid:", "cpu"]),
        # It draws the demo: ten CPU-seconds where the cache is empty.
        pytest.param(["train", "demo", "--image-size", "100", "100"], 2, ["multiples of 32"], marks=pytest.mark.slow),
        (["train", "demo", "--optimizer", "adam"], 2, ["sgd", "adamw"]),
        (["train", "--resume", "nowhere"], 2, ["'nowhere' is not a run"]),
        (["why", "nowhere"], 2, ["'nowhere' is not a run"]),
        (["report", "nowhere"], 2, ["'nowhere' is not a run"]),
        (["report", "nowhere", "--json", "--out", "x.html"], 2, ["--json prints", "> FILE"]),
        (["eval", "nowhere"], 3, ["nowhere"]),
        (["predict", "nowhere", str(PHOTO)], 3, ["nowhere"]),
        (["predict", "dfine_x", "x.jpg"], 2, ["no file or folder", "x.jpg"]),  # before weights are downloaded
    ],
)
def test_errors_say_what_to_do(tmp_path: Path, stoker: Run, arguments: list[str], code: int, words: list[str]):
    (tmp_path / "empty").mkdir()
    ended, output = stoker(*arguments)
    assert ended == code, output
    for word in words:
        assert word in output


@pytest.mark.parametrize("arguments", [["why", "run"], ["why", "run", "--json"]])
def test_a_reader_that_leaves_ends_a_command_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: list[str]
):
    """As `| head` does."""
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run", 1).event("started")
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stoker", *arguments])
    with os.fdopen(writes, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 141
    assert capfd.readouterr().err == ""


def test_a_command_without_an_output_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stoker: Run):
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run", 1).event("started")
    monkeypatch.setattr(sys, "stdout", None)
    assert stoker("why", "run") == (0, "")


@pytest.mark.parametrize("said", ["", "a second time"])
def test_an_interrupted_command_says_so(said: str, monkeypatch: pytest.MonkeyPatch, stoker: Run):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt(said)

    monkeypatch.setattr("stoker_watch.report.explain.explain_run", interrupted)
    assert stoker("why", "run") == (130, f"stoker: interrupted {said}".rstrip() + "\n")


def test_weights_that_are_not_there(tmp_path: Path, stoker: Run):
    data = draw(tmp_path / "data")
    code, output = stoker("train", data, *TRAIN, "--weights", "gone.pth")
    assert code == 3, output
    assert "gone.pth" in output


@pytest.mark.slow
def test_from_training_to_pictures(tmp_path: Path, stoker: Run):
    data = draw(tmp_path / "data")
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    code, output = run_stoker("train", data, *TRAIN, cwd=tmp_path)  # in a process of its own, as people do
    assert code == 0, output
    assert output.splitlines()[-1].startswith("AP50 0.")
    assert "other settings have their defaults: --verbose shows them, config.toml of the run keeps them" in output
    table = output.partition("setting ")[2].partition("other settings")[0]
    assert len(table.splitlines()) < 16, table
    assert "hflip" not in table
    run = Path("runs/data-retinanet_tiny_fpn-1")
    assert str(run) in output

    assert json.loads((run / "evaluation.json").read_text())["step"] == 20
    assert stoker("report", run) == (0, f"{run / 'report.html'}\n")

    code, output = stoker("eval", run, "--json")
    assert code == 0, output
    metrics = json.loads(output)
    finished = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    for name in ("ap", "ap50", "ar100"):
        assert metrics[name] == pytest.approx(finished["data"]["metrics"][name], abs=1e-6)

    code, output = stoker("predict", run, data / "valid", "--conf", "0.01", "--out", "found")
    assert code == 0, output
    answers = json.loads((tmp_path / "found" / "predictions.json").read_text())
    assert len(answers) == 6
    assert {Path(answer["path"]).suffix for answer in answers} == {".jpg"}
    assert any(answer["detections"] for answer in answers)

    code, output = stoker("why", run, "--price-per-device-hour", "3.6")
    assert code == 0, output
    for word in ("finished", "compute", "startup", "unattributed", "Most time was lost in"):
        assert word in output
    code, output = stoker("why", run, "--json")
    assert json.loads(output)["state"] == "finished"

    code, output = stoker("train", data, *TRAIN)
    assert code == 0, output
    assert "is finished: starting a new run" in output
    assert (tmp_path / "runs" / "data-retinanet_tiny_fpn-2" / "final.safetensors").exists()
    for path, content in before.items():
        assert path.read_bytes() == content

    other = draw(tmp_path / "other")
    for split in ("train", "valid"):
        path = other / split / "_annotations.coco.json"
        path.write_text(path.read_text().replace('"red"', '"pink"'))
    code, output = stoker("eval", run, other)
    assert code == 4, output
    assert "pink" in output
