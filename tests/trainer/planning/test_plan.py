"""`stoker plan` from the data to the screen. A stand-in of known speed predicts steps, except in the slow test."""

import functools
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stoker
from stoker.cli.commands import find_flags
from stoker.config.flag_names import translate
from stoker.config.settings import Config, from_fields
from stoker.data.index import Index
from stoker.planning import plan as plan_module
from stoker.planning.machines import Accelerator
from stoker.planning.plan import Plan, make_plan, to_dict, train_command
from stoker.planning.predict import StepPrediction
from stoker.planning.recommend import Limits
from stoker.planning.views import MAX_ROWS, choose_rows, print_plan
from stoker_watch.cli.app import app
from stoker_watch.durations import join_length, parse_time_s
from stoker_watch.errors import ConfigError, UsageError
from tests.trainer.planning.jobs import demand, step

SPEED = {"t4": 40.0, "l4": 80.0, "a100-40": 300.0, "cpu": 0.5}
"""Images per second of the stand-in; 200 of other accelerators."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """40 images in YOLO's layout."""
    import cv2
    import numpy as np

    for split, count in (("train", 40), ("val", 8)):
        for n in range(count):
            image = tmp_path / "images" / split / f"{n}.jpg"
            image.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(image), np.full((64, 64, 3), n, np.uint8))
            label = tmp_path / "labels" / split / f"{n}.txt"
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text("0 0.5 0.5 0.4 0.4\n")
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [thing]\n")
    return tmp_path


@pytest.fixture(autouse=True)
def known_speed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "slow" in request.keywords:
        return

    def predict(
        _config: Config, _index: Index, accelerators: Sequence[Accelerator], *, batch_size: Sequence[int]
    ) -> list[StepPrediction]:
        pairs = [(a.key, size) for a, size in zip(accelerators, batch_size, strict=True)]
        assert len(set(pairs)) == len(pairs)
        return [step(accelerator=key, batch_size=size, step_s=size / SPEED.get(key, 200.0)) for key, size in pairs]

    monkeypatch.setattr(plan_module, "predict_steps", predict)
    monkeypatch.setattr(plan_module, "loader_demand", lambda *_: demand(2e-3))


def plan(data: Path, settings: dict[str, Any] | None = None, **options: Any) -> Plan:
    return make_plan(from_fields({"data": data, "epochs": 1000, **(settings or {})}), **options)


def by_label(result: Plan) -> dict[str, Any]:
    return {f"{row.label}/{row.gpus}": row for row in result.rows}


def test_named_machines(data: Path) -> None:
    result = plan(data, on=["a2-highgpu-1g", "g2-standard-8"])
    assert [row.machine for row in result.rows] == ["a2-highgpu-1g", "g2-standard-8"]
    assert (result.model, result.num_images, result.batch_size) == ("dfine_s", 40, 8)
    assert result.steps * 8 == pytest.approx(40_000, abs=8)
    assert result.rows[0].img_per_s.expected > result.rows[1].img_per_s.expected
    assert result.recommendation.choice is not None
    assert result.command == f"stoker train {data} --epochs 1000"


def test_without_names_all_and_this(data: Path) -> None:
    result = plan(data)
    names = {row.machine for row in result.rows}
    assert {"this", "p5.4xlarge", "n1-standard-8+t4", "g6e.xlarge"} <= names
    assert all(row.gpus == 1 for row in result.rows)
    assert by_label(result)["this/1"].cost is None
    chosen = choose_rows(result)
    assert len(chosen) == MAX_ROWS
    assert result.recommendation.choice in chosen
    assert "this" in {result.rows[k].machine for k in chosen}


def test_gpus_and_batches(data: Path) -> None:
    rows = by_label(plan(data, {"batch_size": 16}, on=["g2-standard-96", "g2-standard-8"], gpus=[1, 2, 8]))
    assert set(rows) == {
        "g2-standard-96/1", "g2-standard-96/2", "g2-standard-96/8", "g2-standard-8/1", "2 × g2-standard-8/2",
        "8 × g2-standard-8/8",
    }  # fmt: skip
    assert {row.batch_size for row in rows.values()} == {16}, "the total stays"
    assert rows["g2-standard-96/8"].device_img_per_s.expected > 4 * rows["g2-standard-96/1"].device_img_per_s.expected
    assert rows["8 × g2-standard-8/8"].step_s.expected > rows["g2-standard-96/8"].step_s.expected
    result = plan(data, on=["g2-standard-96"], gpus=[8])
    assert result.command.endswith(" --devices 8")
    assert all(row.gpus == 8 for row in plan(data, gpus=[8]).rows)


def spot_prices(folder: Path) -> Path:
    """The table has none."""
    path = folder / "spot.toml"
    path.write_text('["a2-highgpu-1g"]\nspot_price = 1.8\n')
    return path


def test_spot(data: Path, tmp_path: Path) -> None:
    rows = by_label(plan(data, on=["a2-highgpu-1g"], spot=True, prices=spot_prices(tmp_path)))
    assert set(rows) == {"a2-highgpu-1g/1", "a2-highgpu-1g spot/1"}
    assert rows["a2-highgpu-1g spot/1"].cost.expected < rows["a2-highgpu-1g/1"].cost.expected


def test_own_prices(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(
        '["a2-highgpu-1g"]\nprice = 0.1\n[mine]\naccelerator = "t4"\ngpus = 1\nvcpus = 8\nmemory_gib = 32\nprice = 5'
    )
    result = plan(data, on=["a2-highgpu-1g", "mine"], prices=path)
    assert result.recommendation.choice == 0
    assert by_label(result)["a2-highgpu-1g/1"].price_per_hour.expected == 0.1
    assert str(path) in result.prices


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("90min", 5400), ("6h", 21600), ("2d", 172800), ("1.5h", 5400)]
)
def test_by(text: str, seconds: float) -> None:
    assert parse_time_s(text, "--by") == seconds


@pytest.mark.parametrize("text", ["6", "12ep", "0h", "-1h", "soon", "", "d"])
def test_by_that_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match="--by"):
        parse_time_s(text, "--by")


def test_a_length_in_minutes_cannot_be_planned(data: Path) -> None:
    with pytest.raises(ConfigError, match="as long on every machine"):
        plan(data, {"epochs": None, "max_time": "30min"}, on=["a2-highgpu-1g"])


def test_impossible_numbers(data: Path) -> None:
    with pytest.raises(UsageError, match="--gpus 0"):
        plan(data, gpus=[0])
    with pytest.raises(UsageError, match="did you mean 'a2-highgpu-1g'"):
        plan(data, on=["a2-highgpu-1"])


def test_command_has_the_users_settings() -> None:
    config = from_fields(
        {"data": "my data", "steps": 500, "image_size": (320, 480), "compile": False, "classes": ("a b",), "lr": 0.01,
         "price_per_device_hour": 2.0}
    )  # fmt: skip
    words = shlex.split(train_command(config))
    assert words[:3] == ["stoker", "train", "my data"]
    _, bound, _ = app.parse_args(words[1:])
    length = {"epochs": None, "steps": bound.arguments["steps"], "max_time": None}
    parsed = bound.arguments["config"].replace(data="my data", **join_length(length))
    assert parsed == config.replace(price_per_device_hour=None)


@pytest.mark.parametrize(("text", "length"), [("90s", "1.5min"), ("45 seconds", "0.75min"), ("2h", "2h"), (5, "5min")])
def test_a_time_may_be_in_seconds(text: object, length: str) -> None:
    assert join_length({"max_time": text}) == {"max_duration": length}


def test_terminal(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(data, on=["a2-highgpu-1g", "g2-standard-8", "p4d.24xlarge"], limits=Limits(by_s=7200.0, budget=5.0))
    print_plan(result)
    text = capsys.readouterr().out
    assert re.search(r"^recommended: \S+.*\d+ min \(", text, re.MULTILINE)
    assert "p4d.24xlarge, 8 GPUs" in text
    assert f"stoker train {data} --epochs 1000" in text
    assert "list prices of" in text
    assert "time of a step on a100-40, l4: a test" in text


def test_sync_is_planned_and_the_method_of_auto_is_named(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machines = ["a2-highgpu-8g", "n1-standard-8+t4"]
    plain, auto = (plan(data, settings, on=machines, gpus=[8]) for settings in ({}, {"sync": "auto"}))
    assert {row.sync for row in plain.rows} == {"plain"}
    slow, fast = (next(row for row in result.rows if row.machines == 8) for result in (plain, auto))
    assert fast.sync not in ("plain", "auto", None)
    assert fast.img_per_s.expected > slow.img_per_s.expected
    print_plan(auto, width=200)
    printed = capsys.readouterr().out
    choice = auto.rows[auto.recommendation.choice or 0]
    assert f"{choice.label}: --sync {choice.sync}; auto: " in printed
    sharded = plan(data, {"sync": "auto", "shard": True}, on=machines, gpus=[8])
    assert {row.sync for row in sharded.rows} == {"plain"}, "--shard has an exchange of its own"


def test_json_round_trip(data: Path) -> None:
    result = plan(data, on=["a2-highgpu-1g"])
    fields = json.loads(msgspec.json.encode(to_dict(result)))
    assert fields["recommended"] == "a2-highgpu-1g"
    assert fields["rows"][0]["duration_s"]["low"] < fields["rows"][0]["duration_s"]["high"]
    assert msgspec.convert({k: v for k, v in fields.items() if k != "recommended"}, Plan) == result


def test_from_python(data: Path) -> None:
    result = stoker.plan(data, on=["a2-highgpu-1g"], by="2h", budget=9.0, epochs=1000)
    assert result.limits == Limits(by_s=7200.0, budget=9.0)
    assert [row.machine for row in result.rows] == ["a2-highgpu-1g"]


def test_flags() -> None:
    arguments, _ = translate(
        ["plan", "images", "--imgsz", "640", "--machine", "g5.xlarge", "--gpus", "1", "2", "--batch", "8"],
        functools.partial(find_flags, app),
    )
    _, bound, _ = app.parse_args(arguments)
    assert bound.arguments["on"] == ("g5.xlarge",)
    assert bound.arguments["gpus"] == (1, 2)
    assert bound.arguments["config"].data.image_size == (640, 640)
    with pytest.raises(UsageError, match="--max-time") as caught:
        translate(["plan", "images", "--max-time", "2h"], functools.partial(find_flags, app))
    assert "--by" in str(caught.value)


def test_without_a_recommendation_no_command_and_exit_code_1(data: Path, capsys: Any) -> None:
    words = ["plan", str(data), "--epochs", "1000", "--on", "g5.xlarge"]

    def run(*limits: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            app([*words, *limits])
        return ended.value.code, capsys.readouterr().out

    code, text = run("--by", "1min")
    assert code == 1
    assert "no machine trains this within 60 s" in text
    assert f"stoker train {data}" not in text
    code, text = run("--by", "1min", "--json")
    assert (code, json.loads(text)["command"], json.loads(text)["recommended"]) == (1, None, None)
    code, text = run("--by", "10h")
    assert not code
    assert f"stoker train {data} --epochs 1000" in text


def test_a_gpu_is_not_rented_for_its_cpu(data: Path) -> None:
    for on in (["g5.xlarge"], ["this", "g5.xlarge"]):
        with pytest.raises(UsageError, match="would leave the GPU of g5") as refused:
            plan(data, {"device": "cpu"}, on=on)
        assert "--on this" in str(refused.value.fix)
    result = plan(data, {"device": "cpu"})
    assert [row.machine for row in result.rows] == ["this"]
    assert result.command == f"stoker train {data} --epochs 1000 --device cpu"
    assert result.notes[0].startswith("--device cpu: only this machine is planned")
    assert plan(data, {"device": "cpu"}, on=["this"]).notes[0].startswith("time of a step")


@pytest.mark.slow
def test_five_machines_with_predicted_steps(data: Path) -> None:
    """With a small model; how long that of a GPU takes is measured by benchmarks/diagnosis/plan.py."""
    command = ["plan", str(data), "--on", "a2-highgpu-1g", "g2-standard-8", "n1-standard-8+t4", "p3.2xlarge", "this",
               "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--by", "2h", "--json"]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "stoker", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {row["machine"]: row for row in result["rows"]}
    assert set(rows) == {"a2-highgpu-1g", "g2-standard-8", "n1-standard-8+t4", "p3.2xlarge", "this"}
    speed = {name: row["img_per_s"]["expected"] for name, row in rows.items()}
    assert speed["a2-highgpu-1g"] >= speed["g2-standard-8"] > speed["this"]


def test_a_tpu_has_a_machine_and_a_price_and_no_prediction(data: Path):
    result = plan(data, on=["v6e-4", "g2-standard-8"])
    assert [(tpu.machine_type, tpu.price) for tpu in result.tpus] == [("ct6e-standard-4t", 10.8)]
    assert [row.machine for row in result.rows] == ["g2-standard-8"]
    text = io.StringIO()
    print_plan(result, text, width=300)
    (line,) = [line for line in text.getvalue().splitlines() if line.strip().startswith("v6e-4")]
    assert "not predicted" in line
    assert "10.8" in line
    with pytest.raises(UsageError):
        plan(data, on=["v6e-3"])
