"""What users of other tools type is accepted, or answered with what to do.

The lists are the options of the other tools, as their own files have them: Ultralytics `cfg/default.yaml` (train
settings and hyperparameters), torchvision `references/detection/train.py`, TensorFlow's `model_main_tf2.py`, and the
`TrainingArguments` of Hugging Face that detection examples use. None is taken from stoker's table.
"""

import functools
import shlex
from pathlib import Path

import pytest

import stoker
from stoker.cli.commands import find_flags
from stoker.config.flag_names import translate as translate_arguments
from stoker.config.flag_names import translate_keywords
from stoker.config.settings import from_fields, from_toml
from stoker.knowledge import read_toml
from stoker_watch.cli.app import app
from stoker_watch.errors import ConfigError, StokerError, UsageError


def translate(arguments: list[str]) -> tuple[list[str], list[str]]:
    return translate_arguments(arguments, functools.partial(find_flags, app))


ULTRALYTICS = [
    "task=detect",
    "mode=train",
    "model=retinanet_resnet50_fpn",
    "data=coco8.yaml",
    "epochs=100",
    "time=2",
    "patience=100",
    "batch=16",
    "imgsz=640",
    "save=True",
    "save_period=5",
    "cache=ram",
    "device=0",
    "workers=8",
    "project=p",
    "name=n",
    "exist_ok=False",
    "pretrained=True",
    "optimizer=AdamW",
    "verbose=True",
    "seed=0",
    "deterministic=True",
    "single_cls=False",
    "rect=False",
    "cos_lr=True",
    "close_mosaic=10",
    "amp=False",
    "fraction=1.0",
    "profile=False",
    "freeze=10",
    "multi_scale=0.0",
    "overlap_mask=True",
    "mask_ratio=4",
    "dropout=0.0",
    "val=True",
    "save_json=False",
    "plots=True",
    "lr0=0.01",
    "lrf=0.01",
    "momentum=0.937",
    "weight_decay=0.0005",
    "warmup_epochs=3.0",
    "warmup_momentum=0.8",
    "warmup_bias_lr=0.1",
    "box=7.5",
    "cls=0.5",
    "dfl=1.5",
    "nbs=64",
    "hsv_h=0.015",
    "hsv_s=0.7",
    "hsv_v=0.4",
    "degrees=0.0",
    "translate=0.1",
    "scale=0.5",
    "shear=0.0",
    "perspective=0.0",
    "flipud=0.0",
    "fliplr=0.5",
    "bgr=0.0",
    "mosaic=1.0",
    "cutmix=0.0",
    "cutmix=0.0",
    "copy_paste=0.0",
    "erasing=0.4",
    "cfg=my.yaml",
    "classes=car",
]
TORCHVISION = """
--data-path /d|--dataset coco|--model retinanet_resnet50_fpn|--device cuda|-b 2|--batch-size 2|--epochs 26|
-j 4|--workers 4|--lr 0.02|--momentum 0.9|--wd 1e-4|--weight-decay 1e-4|--lr-step-size 8|--lr-steps 16|
--lr-gamma 0.1|--print-freq 20|--output-dir out|--resume run|--start_epoch 0|--aspect-ratio-group-factor 3|
--test-only|--pretrained|--world-size 1|--dist-url env://|--opt sgd|--lr-scheduler multistep|
--trainable-backbone-layers 3|--data-augmentation hflip|--sync-bn|--weights coco|--weights-backbone imagenet|
--amp
""".replace("\n", "").split("|")
TENSORFLOW = """
--pipeline_config_path=p.config|--num_train_steps=10000|--eval_on_train_data|--sample_1_of_n_eval_examples=1|
--sample_1_of_n_eval_on_train_examples=5|--hparams_overrides=a|--model_dir=m|--checkpoint_dir=c|
--eval_timeout=3600|--num_workers=4|--alsologtostderr|--checkpoint_every_n=1000|--use_tpu=true|--tpu_name=t
""".replace("\n", "").split("|")
HUGGING_FACE = """
--output_dir o|--do_train|--do_eval|--eval_strategy epoch|--per_device_train_batch_size 8|
--gradient_accumulation_steps 2|--eval_steps 500|--learning_rate 5e-5|--weight_decay 1e-4|--adam_beta1 0.9|
--adam_beta2 0.999|--max_grad_norm 1.0|--num_train_epochs 3|--max_steps 100|--lr_scheduler_type cosine|
--warmup_ratio 0.1|--warmup_steps 100|--save_strategy epoch|--save_steps 500|--save_total_limit 2|--seed 1|
--bf16|--fp16|--dataloader_num_workers 4|--run_name r|--load_best_model_at_end|--metric_for_best_model map|
--optim adamw|--gradient_checkpointing|--auto_find_batch_size|--torch_compile|--resume_from_checkpoint run|
--report_to wandb|--dataset_name d|--image_square_size 640|--overwrite_output_dir
""".replace("\n", "").split("|")


@pytest.mark.parametrize("typed", [*ULTRALYTICS, *TORCHVISION, *TENSORFLOW, *HUGGING_FACE])
def test_a_habit_is_accepted_or_answered(typed: str) -> None:
    names_data = typed.startswith(("data=", "--data-path", "--dataset_name"))
    positional = [] if names_data else ["images"]
    try:
        arguments, _ = translate(["train", *positional, *typed.split()])
    except UsageError as error:
        if not error.fix:
            pytest.fail(f"{typed} is refused without saying what to do")
        return
    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    assert bound.arguments["data"] in (("coco8.yaml", "/d", "d") if names_data else ("images",))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--imgsz 640", "--image-size 640 640"),
        ("--image-size 640", "--image-size 640 640"),
        ("--image-size 480 640", "--image-size 480 640"),
        ("imgsz=640", "--image-size 640 640"),
        ("--batch 16", "--batch-size 16"),
        ("--lr0 0.01", "--lr 0.01"),
        ("--learning_rate=0.01", "--lr 0.01"),
        ("--num-workers 8", "--workers 8"),
        ("--amp", "--precision bf16"),
        ("amp=False", "--precision fp32"),
        ("--weight_decay 0.01", "--weight-decay 0.01"),
        ("time=2", "--max-time 2h"),
        ("device=0", "--device cuda:0"),
        ("--device 1", "--device cuda:1"),
        ("--device gpu", "--device cuda"),
        ("device=0,1", "--devices 2"),
        ("imgsz=640,480", "--image-size 640 480"),
        ("--imgsz 640x480", "--image-size 640 480"),
        ("--batch-size 0.8", "--auto-batch"),
        ("batch=auto", "--auto-batch"),
        ("--batch -1", "--auto-batch"),
        ("workers=0", "--workers 1"),
        ("--weights RetinaNet_ResNet50_FPN_Weights.DEFAULT", "--weights coco"),
        ("--weights FCOS_ResNet50_FPN_Weights.COCO_V1", "--weights coco"),
        ("--weights ResNet50_Weights.IMAGENET1K_V2", "--weights imagenet"),
        ("--weights coco-mine.safetensors", "--weights coco-mine.safetensors"),
        ("--weights cocorun/best.safetensors", "--weights cocorun/best.safetensors"),
        ("--model rfdetr-small", "--model rf_detr_s"),
        ("--model rf-detr-nano.pth", "--model rf_detr_n"),
        ("deterministic=True", ""),
        ("val=False", "--eval-every 0"),
        ("resume=False", ""),
        ("multi_scale=False plots=True exist_ok=True name=n", "--run-dir runs/n"),
        ("--project p --name n", "--run-dir p/n"),
        ("SOLVER.IMS_PER_BATCH 2 SOLVER.BASE_LR 0.0025", "--batch-size 2 --lr 0.0025"),
        ("--cfg-options train_dataloader.batch_size=2", "--batch-size 2"),
        ("optimizer=SGD", "--optimizer sgd"),
        ("cache=True", "--cache ram"),
        ("save_period=5", "--checkpoint-every 5ep"),
        ("--output_dir runs/a", "--run-dir runs/a"),
    ],
)
def test_what_it_becomes(typed: str, expected: str) -> None:
    arguments, notes = translate(["train", *typed.split()])
    assert arguments == ["train", *expected.split()]
    is_same = expected.removeprefix("--") in (
        typed.replace("_", "-").removeprefix("--"),
        typed.lower().replace("=", " "),
    )
    assert bool(notes) is (not is_same and not typed.startswith("--image-size"))


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--pipeline_config_path=p", "config.toml"),
        ("--freeze 10", "--trainable-backbone-layers"),
        ("--world-size 2", "torchrun"),
        ("--device 2,3", "CUDA_VISIBLE_DEVICES=2,3"),
        ("model=yolo11n.pt", "--model ember_n"),
        ("--data", "it needs a value"),
        ("--use_tpu=true", "--device tpu"),
        ("--bach 4", "did you mean `--batch`?"),
        ("--weights rf-detr-small.pth", "rf_detr_s"),
    ],
)
def test_what_stoker_does_not_have_is_answered(typed: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        translate(["train", "images", *typed.split()])
    assert words in str(caught.value)


def test_tune_says_where_its_settings_come_from() -> None:
    with pytest.raises(UsageError, match="has no --image-size") as caught:
        translate(["tune", "images", "--image-size", "128"])
    assert "--config FILE, or of a run folder" in str(caught.value)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("predict RUN a --conf-thres 0.5 --overlap 0.2", "predict RUN a --conf 0.5 --tile-overlap 0.2"),
        ("export RUN --onnx --batch 1", "export RUN --format onnx --batch-size 1"),
        ("eval RUN --batch 4", "eval RUN --batch-size 4"),
        ("data preview D --imgsz 64", "data preview D --image-size 64 64"),
        ("import p.config --run --model_dir=m", "import p.config --run --run-dir m"),
    ],
)  # fmt: skip
def test_other_commands(command: str, expected: str) -> None:
    arguments, notes = translate(command.split())
    assert arguments == expected.split()
    assert notes


def test_what_stoker_has_is_left_alone() -> None:
    arguments = ["train", "images", "--image-size", "320", "320", "--lr", "0.01", "--epochs", "3", "--no-compile"]
    assert translate(arguments) == (arguments, [])
    arguments = ["watch", "--run-dir", "r", "--", "python", "a.py", "--batch", "4", "lr=2"]
    assert translate(arguments) == (arguments, [])
    with pytest.raises(StokerError):
        translate(["train", "--pipeline-config-path", "x"])


def test_each_row_of_the_table_means_one_thing() -> None:
    table = read_toml("flags.toml")
    for command, rows in {"": table["commands"], **table["flags"]}.items():
        names = [name for row in rows for name in row["names"]]
        assert len(set(names)) == len(names), command
        kinds = {"flag", "arguments", "place", "drop", "folder", "answer"}
        assert all(len(row.keys() & kinds) == 1 for row in rows), command


def test_all_bad_flags_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        translate(shlex.split("train D --epochz 3 --lrf 0.1 --cutmix 0.1 degrees=3 --device 2,3 --nonsense"))
    text = str(caught.value)
    for words in (
        "--epochz: did you mean `--epochs`?",
        "--cutmix, degrees: ",
        "--lrf: ",
        "--device 2,3: ",
        "--nonsense",
    ):
        assert words in text


@pytest.mark.parametrize(
    "line",
    [
        "train images --batch-size 3.7",
        "train images --seed 1.5",
        "train images --image-size 64 64.5",
        "train images --workers 2.5",
        "train images --devices 1.5",
        "data preview D --image-size 64 1.5",
        "eval RUN --batch-size 3.7",
        "plan D --gpus 1 2.5",
    ],
)
def test_a_fraction_for_a_whole_number_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, _ = translate(line.split())
    with pytest.raises(SystemExit) as ended:
        app.parse_args(arguments)
    assert ended.value.code == 2
    assert "is not a whole number" in capsys.readouterr().err


def test_whole_numbers_stay_what_they_are() -> None:
    _, bound, _ = app.parse_args("train D --seed 2 --workers auto --epochs 1.5 --grad-accum-steps 2.0")
    assert bound.arguments["config"].set_fields() == {"seed": 2, "workers": "auto", "grad_accum_steps": 2}
    assert bound.arguments["epochs"] == 1.5


def test_python_takes_what_the_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """`stoker.check` reports the size that was asked for; what a training would get is asked of the translation."""
    fields = translate_keywords(
        "train",
        {"imgsz": 640, "batch": -1, "lr0": 0.01, "cos_lr": True, "plots": True, "name": "n", "classes": ("car",)},
        data="d", run_dir=None, devices=None, device=[0, 1],
    )  # fmt: skip
    found = {name: value for name, value in fields.items() if value is not None}
    assert found.pop("run_dir") == "runs/n"
    assert found.pop("devices") == 2
    assert from_fields(found).set_fields() == {
        "data": "d", "image_size": (640, 640), "classes": ("car",), "lr": 0.01, "lr_scheduler": "cosine",
        "auto_batch": True,
    }  # fmt: skip
    assert len(capsys.readouterr().err.splitlines()) == 7
    with pytest.raises(UsageError, match="has no cutmix, bath_size") as caught:
        stoker.train("nowhere", imgsz=64, cutmix=1.0, bath_size=3)  # type: ignore[call-arg]
    assert "did you mean `--batch-size`?" in str(caught.value)
    for wrong in ({"batch_size": 3.7}, {"seed": 1.5}, {"workers": 2.5}, {"steps": 1.5}, {"devices": 1.5}):
        with pytest.raises(ConfigError):
            stoker.train("nowhere", **wrong)  # type: ignore[arg-type]
    with pytest.raises(StokerError, match="'nowhere' does not exist"):
        stoker.train("nowhere", imgsz=64)  # type: ignore[call-arg]
    assert "imgsz is `--image-size` here" in capsys.readouterr().err


def test_a_fraction_in_a_config_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[run]\nbatch_size = 3.7\n")
    with pytest.raises(ConfigError, match=r"--batch-size 3.7 is of the wrong kind"):
        from_toml(path)
