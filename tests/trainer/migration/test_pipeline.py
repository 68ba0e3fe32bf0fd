"""`stoker import`: every field of a pipeline.config has exactly one row, and the settings are valid ones."""

import collections
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from stoker.config import settings
from stoker.config.settings import Config, from_toml
from stoker.migration.pipeline import ImportReport, import_pipeline, print_import, write_config
from stoker.migration.text_format import read_message
from stoker.models.table import check_image_size, check_settings, get_architecture
from stoker_watch.cli.app import app
from stoker_watch.errors import ConfigError, UsageError
from tests.trainer.migration import configs
from tests.trainer.migration.configs import zoo

REAL = (
    "dice/models/ssd_mobilenet_fpn.config",
    "dice/models/ssd_mobilenet_qnt.config",
    "microcontroller/training/ssd_efficientdet_d0_512x512_coco17_tpu-8.config",
)
NEAREST = {
    "ssd_mobilenet_v1": "ssdlite320_mobilenet_v3_large",
    "ssd_mobilenet_v2_keras": "ssdlite320_mobilenet_v3_large",
    "ssd_mobiledet_gpu": "ssdlite320_mobilenet_v3_large",
    "embedded_ssd_mobilenet_v1": "ssdlite320_mobilenet_v3_large",
    "ssd_inception_v2": "ssd300_vgg16",
    "ssd_mobilenet_v1_fpn": "retinanet_mobilenet_v2_fpn",
    "ssd_mobilenet_v2_fpn_keras": "retinanet_mobilenet_v2_fpnlite",
    "ssd_resnet50_v1_fpn_keras": "retinanet_resnet50_fpn",
    "ssd_resnet152_v1_fpn_keras": "retinanet_resnet101_fpn",
    "ssd_efficientnet-b0_bifpn_keras": "retinanet_mobilenet_v2_fpnlite",
    "ssd_efficientnet-b7_bifpn_keras": "retinanet_resnet101_fpn",
    "faster_rcnn_resnet50_fpn_keras": "faster_rcnn_resnet50_fpn",
    "faster_rcnn_nas": "faster_rcnn_resnet50_fpn",
    "hourglass_104": "fcos_resnet50_fpn",
    "mobilenet_v2_fpn": "fcos_resnet18_fpn",
}


def import_text(tmp_path: Path, text: str, *, data: str | None = None) -> tuple[Config, ImportReport]:
    file = tmp_path / "pipeline.config"
    file.write_text(text)
    return import_pipeline(file, data=data)


def check_import(file: Path, tmp_path: Path) -> ImportReport:
    """Imports a file, and checks what must hold for every one."""
    config, report = import_pipeline(file)
    wanted = collections.Counter(
        owner.join(name) if name else owner.path for owner, name in read_message(file).leaves()
    )
    found = collections.Counter(row.field for row in report.fields)
    assert wanted - found == collections.Counter()
    assert max(found.values()) == 1
    assert [row.field for row in report.fields if row.is_unknown] == []
    assert all(row.note for row in report.fields if row.status != "exact")
    settings.check_config(config)
    check_settings(config.model)
    check_image_size(config)
    arch = get_architecture(config.model.model)
    assert config.model.weights in ("none", *arch.urls)
    if config.model.anchor_sizes is not None:
        assert len(config.model.anchor_sizes) == len(arch.defaults["anchor_sizes"])
    out = tmp_path / "config.toml"
    write_config(config, report, out)
    assert from_toml(out) == (config, {})
    return report


@pytest.mark.parametrize("name", zoo())
def test_a_pipeline_is_accounted_for(tmp_path: Path, name: str):
    file = tmp_path / "pipeline.config"
    file.write_text(zoo()[name])
    report = check_import(file, tmp_path)
    kind = name.partition("-")[2]
    assert report.architecture == kind
    assert report.model == NEAREST.get(kind, report.model)
    assert (kind == "one_of_my_own") is any("does not know" in row.note for row in report.fields)
    assert {trap.name for trap in report.traps} >= {"batch-per-job", "text-over-label", "max-number-of-boxes"}


def test_there_are_at_least_forty():
    assert len(zoo()) >= 40
    text = " ".join(zoo().values())
    parts = (configs.RESIZERS, configs.SSD_ANCHORS, configs.RCNN_ANCHORS, configs.CLASS_LOSSES, configs.BOX_LOSSES,
             configs.SCHEDULES, configs.AUGMENTATIONS)  # fmt: skip
    assert all(part in text for group in parts for part in group)


@pytest.mark.parametrize("name", REAL)
def test_the_files_of_others(tmp_path: Path, real_data: Path, name: str):
    report = check_import(real_data / name, tmp_path)
    row = {row.field: row for row in report.fields}
    assert row["train_config.batch_size"].settings == {"batch_size": 64 if "dice" in name else 16}
    assert row["model.ssd.loss.classification_loss.weighted_sigmoid_focal.gamma"].settings == {
        "focal_gamma": 2.0 if "dice" in name else 1.5
    }
    assert {trap.name for trap in report.traps} >= {"fine-tune-checkpoint", "max-number-of-boxes", "text-over-label"}
    assert ("tpu" in {trap.name for trap in report.traps}) is ("tpu" in name)


PIPELINE = """model {{ ssd {{ num_classes: 2 image_resizer {{ fixed_shape_resizer {{ height: 320 width: 320 }} }}
  feature_extractor {{ type: "ssd_resnet50_v1_fpn_keras" }} {model} }} }}
train_config {{ batch_size: 8 num_steps: {steps} optimizer {{ {optimizer} }} {train} }}
train_input_reader {{ label_map_path: "m.pbtxt" tf_record_input_reader {{ input_path: "{records}" }} }} {rest}"""


def make(
    *,
    model: str = "",
    steps: int = 9000,
    optimizer: str = "",
    train: str = "",
    records: str = "t.record",
    rest: str = "",
) -> str:
    return PIPELINE.format(model=model, steps=steps, optimizer=optimizer, train=train, records=records, rest=rest)


def momentum(schedule: str) -> str:
    momentum = f"momentum_optimizer {{ learning_rate {{ {schedule} }} momentum_optimizer_value: 0.8 }}"
    return f"{momentum} use_moving_average: false"


def steps(*entries: tuple[int, float], initial: float, warmup: bool = False) -> str:
    listed = " ".join(f"schedule {{ step: {step} learning_rate: {lr} }}" for step, lr in entries)
    return (
        f"manual_step_learning_rate {{ initial_learning_rate: {initial} {listed} {'warmup: true' if warmup else ''} }}"
    )


def exponential(every: int, factor: float) -> str:
    return f"exponential_decay_learning_rate {{ initial_learning_rate: 1 decay_steps: {every} decay_factor: {factor} }}"


def cosine(total: int, warmup: int = 0) -> str:
    return f"cosine_decay_learning_rate {{ learning_rate_base: 1 total_steps: {total} warmup_steps: {warmup} }}"


@pytest.mark.parametrize(
    ("schedule", "scheduler", "lr", "warmup", "status"),
    [
        ("constant_learning_rate { learning_rate: 0.5 }", "constant", 0.5, 0, "exact"),
        (cosine(9000, 900), "cosine", 1, 900, "substitute"),
        (cosine(5000), "cosine", 1, 0, "substitute"),
        (cosine(300_000), "constant", 1, 0, "substitute"),
        (cosine(9000, 20_000), "constant", 1, 900, "substitute"),
        (exponential(900, 0.6), "exponential", 1, 0, "substitute"),
        (exponential(3000, 0.95), "constant", 1, 0, "substitute"),
        (exponential(800_000, 0.1), "constant", 1, 0, "exact"),
        (steps((6000, 0.1), (8000, 0.01), initial=1), "multistep", 1, 0, "substitute"),
        (steps((3000, 0.1), (8000, 0.01), initial=1), "multistep", 1, 0, "substitute"),
        (steps((3000, 0.8), initial=1), "constant", 1, 0, "substitute"),
        (steps((90_000, 0.1), initial=1), "constant", 1, 0, "exact"),
        (steps((500, 2), (6000, 0.2), (8000, 0.02), initial=0.1, warmup=True), "multistep", 2, 500, "substitute"),
    ],
)  # fmt: skip
def test_the_schedule_that_is_nearest(
    tmp_path: Path, schedule: str, scheduler: str, lr: float, warmup: int, status: str
):
    """`status` is that of the row that decides the shape."""
    config, report = import_text(tmp_path, make(optimizer=momentum(schedule)))
    optim = config.optim
    assert (optim.optimizer, optim.momentum, optim.ema_decay) == ("sgd", 0.8, 0.0)
    assert (optim.lr_scheduler, optim.lr, optim.warmup_steps) == (scheduler, lr, warmup)
    assert {row.status for row in report.fields if "lr_scheduler" in row.settings} == {status}


@pytest.mark.parametrize(
    ("optimizer", "name", "decay"),
    [
        ("adam_optimizer { learning_rate { constant_learning_rate { } } }", "adamw", 0.9999),
        ("adam_optimizer { } use_moving_average: false", "adamw", 0.0),
        ("rms_prop_optimizer { } moving_average_decay: 0.99", "sgd", 0.99),
        ("rms_prop_optimizer { epsilon: 1e-7 }", "adamw", 0.9999),
        ("momentum_optimizer { }", "sgd", 0.9999),
    ],
)
def test_optimizers_with_the_defaults_of_the_api(tmp_path: Path, optimizer: str, name: str, decay: float):
    config, report = import_text(tmp_path, make(optimizer=optimizer))
    assert (config.optim.optimizer, config.optim.ema_decay, config.optim.lr) == (name, decay, 0.002)
    assert ("substitute" in {row.status for row in report.fields if "optimizer" in row.settings}) is (
        "momentum" not in optimizer
    )


def test_anchors_are_those_of_the_api(tmp_path: Path):
    """The formula of multiscale_grid_anchor_generator.py, and the ratio of the other way round."""
    grid = "multiscale_anchor_generator { anchor_scale: 3 aspect_ratios: [1, 4] scales_per_octave: 2 }"
    config, _ = import_text(tmp_path, make(model=f"anchor_generator {{ {grid} }}"))
    assert config.model.anchor_sizes == tuple(3.0 * 2**level for level in range(3, 8))
    assert config.model.anchor_scales == pytest.approx((1, math.sqrt(2)), rel=1e-5)
    assert config.model.aspect_ratios == (0.25, 1.0)


@pytest.mark.parametrize(
    ("train", "weights"),
    [
        ("", "none"),
        ("fine_tune_checkpoint: 'x' fine_tune_checkpoint_type: 'detection'", "coco"),
        ("fine_tune_checkpoint: 'x' from_detection_checkpoint: true", "coco"),
        ("fine_tune_checkpoint: 'x' fine_tune_checkpoint_type: 'classification'", "imagenet"),
    ],
)
def test_the_checkpoint_is_replaced(tmp_path: Path, train: str, weights: str):
    config, report = import_text(tmp_path, make(train=train))
    assert config.model.weights == weights
    assert ("fine-tune-checkpoint" in {trap.name for trap in report.traps}) is (weights != "none")


def test_augmentation_that_is_not_asked_for_is_off(tmp_path: Path):
    config, _ = import_text(tmp_path, make())
    assert config.data.augment == "none"
    assert config.data.hflip is None
    options = "data_augmentation_options { random_horizontal_flip { } } data_augmentation_options { %s }"
    config, _ = import_text(tmp_path, make(train=options % "random_scale_crop_and_pad_to_square { scale_min: 0.5 }"))
    assert (config.data.hflip, config.data.scale_jitter_prob, config.data.scale_range) == (0.5, 1.0, (0.5, 2.0))


def test_names_of_the_files_decide_nothing_if_there_is_one_per_split(tmp_path: Path):
    rest = 'eval_input_reader { tf_record_input_reader { input_path: "d/e/eval.record" } }'
    config, report = import_text(tmp_path, make(records="d/a/first.record", rest=rest))
    assert (config.data.data, config.data.train, config.data.val) == ("d", "a/first.record", "e/eval.record")
    rows = {row.field: row.status for row in report.fields}
    assert rows["eval_input_reader.tf_record_input_reader.input_path"] == "exact"


@pytest.mark.parametrize(
    ("evaluated", "status", "trap"),
    [
        ("val.record-*", "exact", None),
        ("test.record-*", "substitute", "eval-is-test"),
        ("eval.record-*", "exact", None),
        ("held.record-*", "not carried", "eval-is-trained-on"),
    ],
)
def test_several_files_of_a_split_are_told_by_their_names(
    tmp_path: Path, evaluated: str, status: str, trap: str | None
):
    rest = f'eval_input_reader {{ tf_record_input_reader {{ input_path: "/elsewhere/{evaluated}" }} }}'
    _, report = import_text(tmp_path, make(records="/elsewhere/train.record-*", rest=rest), data=str(tmp_path))
    rows = {row.field: row for row in report.fields}
    assert rows["train_input_reader.tf_record_input_reader.input_path"].status == "exact"
    assert rows["eval_input_reader.tf_record_input_reader.input_path"].status == status
    traps = {trap.name for trap in report.traps} & {"eval-is-test", "eval-is-trained-on"}
    assert traps == ({trap} if trap else set())


def test_a_misspelled_field_is_named(tmp_path: Path):
    _, report = import_text(tmp_path, make(train="batch_sise: 9"))
    assert [row.field for row in report.fields if row.is_unknown] == ["train_config.batch_sise"]
    assert any(trap.name == "unknown-field" and trap.line == 3 for trap in report.traps)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("item { id: 1 name: 'cat' }", "no model"),
        ("model { experimental_model { name: 'x' } }", "experimental_model"),
        ("model { ssd { } } train_config { batch_size: 'many' }", "train_config.batch_size is 'many'"),
        ("model { ssd { } } train_config { batch_size: 0 }", "out of range"),
    ],
)
def test_what_cannot_be_imported_is_refused(tmp_path: Path, text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        import_text(tmp_path, text)


@pytest.mark.parametrize(
    ("place", "status"),
    [("data/m.pbtxt", "exact"), ("m.pbtxt", "exact"), ("annotations/m.pbtxt", "exact"), ("a/b/m.pbtxt", "not carried"),
     (None, "substitute")],
)  # fmt: skip
def test_a_label_map_is_carried_over_only_if_it_is_near_the_records(tmp_path: Path, place: str | None, status: str):
    if place is not None:
        for path in (tmp_path / place, tmp_path / "data" / "t.record"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    _, report = import_text(tmp_path, make(records=str(tmp_path / "data" / "t.record")))
    assert {row.status for row in report.fields if row.field == "train_input_reader.label_map_path"} == {status}


def test_another_config_is_not_overwritten(tmp_path: Path):
    config, report = import_text(tmp_path, make())
    out = tmp_path / "new" / "config.toml"
    write_config(config, report, out)
    write_config(config, report, out)
    out.write_text("mine = 1\n")
    with pytest.raises(UsageError, match="Another file"):
        write_config(config, report, out)
    assert out.read_text() == "mine = 1\n"


def test_the_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    dropped = "keep_checkpoint_every_n_hours: 2"
    Path("pipeline.config").write_text(make(optimizer=momentum(cosine(300_000)), records="d/t.record", train=dropped))
    with pytest.raises(SystemExit) as end:
        app(["import", "pipeline.config"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for words in ("carried over exactly", "with a substitute", "not carried over", "batch-per-job", "schedule-length",
                  "stoker train --config config.toml"):  # fmt: skip
        assert words in text
    assert from_toml(Path("config.toml"))[0].run.batch_size == 8
    assert "(--all lists them)" in text
    assert "model.ssd.num_classes" not in text
    with pytest.raises(SystemExit):
        app(["import", "pipeline.config", "--all"])
    assert "model.ssd.num_classes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        app(["import", "pipeline.config", "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["settings"]["lr_scheduler"] == "constant"
    assert {row["status"] for row in document["fields"]} == {"exact", "substitute", "not carried"}


def test_classes_and_checkpoint_that_do_not_fit_are_traps(tmp_path: Path):
    zoo = 'fine_tune_checkpoint: "zoo/ssd_x_640x640_coco17_tpu-8/checkpoint/ckpt-0" fine_tune_checkpoint_type: '
    text = make(train=zoo + '"classification"')
    count = int(re.search(r"num_classes: (\d+)", text)[1])  # type: ignore[index]
    label_map = re.search(r'label_map_path: "([^"]+)"', text)
    name = "labels.pbtxt" if label_map is None else Path(label_map[1]).name
    text = (
        text
        if label_map is not None
        else text.replace("train_input_reader {", f'train_input_reader {{ label_map_path: "{name}"')
    )
    for items in (count, count + 1):
        (tmp_path / name).write_text("".join(f"item {{ id: {n} name: 'c{n}' }}\n" for n in range(1, items + 1)))
        names = {trap.name for trap in import_text(tmp_path, text)[1].traps}
        assert "checkpoint-type" in names
        assert ("num-classes" in names) == (items != count)
    detection = import_text(tmp_path, make(train=zoo + '"detection"'))[1]
    assert "checkpoint-type" not in {trap.name for trap in detection.traps}


def test_no_field_forges_a_line_of_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _, report = import_text(tmp_path, make(train=r'fine_tune_checkpoint: "a\nwritten: \033[31mb"'))
    print_import(report)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert not any(line.startswith("written") for line in out.splitlines())


@pytest.mark.slow
def test_dice_is_imported_and_trained(tmp_path: Path, real_data: Path, monkeypatch: pytest.MonkeyPatch):
    """The TFRecords and the pipeline of others, end to end: a few steps at a small size."""
    monkeypatch.chdir(tmp_path)
    text = (real_data / REAL[0]).read_text()
    for old, new in (("640", "128"), ("batch_size: 64", "batch_size: 4"), ("num_steps: 25000", "num_steps: 4"),
                     ("total_steps: 25000", "total_steps: 4"), ("warmup_steps: 2000", "warmup_steps: 1"),
                     ("gs://dice_detection/data/model.ckpt", "")):  # fmt: skip
        text = text.replace(old, new)
    Path("pipeline.config").write_text(text)
    with pytest.raises(SystemExit) as end:
        app(["import", "pipeline.config", "--data", str(real_data / "dice"), "--run", "--run-dir", "run"])
    assert end.value.code == 0
    trained, _ = from_toml(Path("run/config.toml"))
    imported, _ = from_toml(Path("config.toml"))
    for name, value in imported.set_fields().items():
        if name not in ("data", "train", "val"):  # these became absolute paths
            assert trained.set_fields()[name] == value, name
    assert Path(trained.data.val) == real_data / "dice" / "tfrecords" / "test.record"
    assert (trained.model.model, trained.run.max_duration) == ("retinanet_mobilenet_v2_fpn", "4")
    assert Path("run/best.safetensors").exists()
