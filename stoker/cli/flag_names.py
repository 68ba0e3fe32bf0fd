"""Flags that users of other tools and of older versions type: translated, or answered with the right one.

`translate` runs on the arguments before they are parsed. What it changes is printed as a note, so that a
user notices when a setting means something else. Sources: Ultralytics `cfg/default.yaml`, torchvision
`references/detection/train.py`, TensorFlow Object Detection API `model_main_tf2.py`, Hugging Face `TrainingArguments`.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stoker.config import old_names
from stoker.errors import UsageError


class _Value(NamedTuple):
    """A flag that takes one value and becomes `flag` with the value changed by `change`."""

    flag: str
    change: Callable[[str], str] = str
    note: str = ""


class _Switch(NamedTuple):
    """A flag that is on or off, and the arguments that it becomes; `=False` becomes `off`."""

    arguments: tuple[str, ...]
    off: tuple[str, ...] = ()


class _Answer(NamedTuple):
    """A flag that stoker does not have: what to do instead."""

    text: str


def _hours(value: str) -> str:
    return value if re.search(r"[a-z]", value) else f"{value}h"


def _cuda_device(value: str) -> str:
    if value.partition(":")[0].lower() in ("tpu", "xla"):
        raise UsageError(f"--device {value} does not exist.", fix=_NO_TPU)
    return f"cuda:{value}" if value.isdecimal() else value


_NO_TPU = "stoker does not train on TPUs (TPUStrategy): take a machine with an NVIDIA GPU, `--device cuda`"
_TOTAL = "it is the total of an optimizer step, over all devices"

_TRAIN: dict[str, _Value | _Switch | _Answer] = {
    # Image size
    **dict.fromkeys(("imgsz", "img-size", "img", "input-size", "image-square-size", "size"), _Value("image-size")),
    **dict.fromkeys(("min-size", "max-size"), _Answer("the input has a fixed size: `--image-size HEIGHT WIDTH`")),
    "rect": _Switch(("--resize", "letterbox")),
    # Batch and loader
    **dict.fromkeys(("batch", "b", "train-batch-size", "ims-per-batch"), _Value("batch-size")),
    "per-device-train-batch-size": _Value("batch-size", note=_TOTAL),
    **dict.fromkeys(("gradient-accumulation-steps", "accumulation-steps"), _Value("grad-accum-steps")),
    **dict.fromkeys(("num-workers", "j", "dataloader-num-workers", "nw"), _Value("workers")),
    "auto-find-batch-size": _Switch(("--auto-batch",)),
    # Learning rate and optimizer
    **dict.fromkeys(("lr0", "learning-rate", "base-lr", "learning-rate-base"), _Value("lr")),
    "lrf": _Answer("the schedule decides the last learning rate: `--lr-scheduler`"),
    **dict.fromkeys(("lr-schedule", "lr-scheduler-type", "scheduler", "sched"), _Value("lr-scheduler")),
    "cos-lr": _Switch(("--lr-scheduler", "cosine")),
    "warmup-epochs": _Answer("the warm-up is counted in steps: `--warmup-steps N`"),
    **dict.fromkeys(("opt", "optim"), _Value("optimizer")),
    "wd": _Value("weight-decay"),
    **dict.fromkeys(("max-grad-norm", "grad-clip", "gradient-clipping-by-norm"), _Value("clip-grad-norm")),
    **dict.fromkeys(("model-ema-decay", "moving-average-decay"), _Value("ema-decay")),
    "model-ema": _Answer("stoker keeps an average of the weights by default; `--ema-decay 0` switches it off"),
    # Length
    **dict.fromkeys(("num-epochs", "num-train-epochs", "e", "max-epochs"), _Value("epochs")),
    **dict.fromkeys(("max-steps", "num-steps", "num-train-steps", "iterations", "max-iter", "iters"), _Value("steps")),
    "time": _Value("max-time", _hours),
    # Precision and device
    "amp": _Switch(("--precision", "bf16"), off=("--precision", "fp32")),
    "no-amp": _Switch(("--precision", "fp32")),
    "bf16": _Switch(("--precision", "bf16")),
    **dict.fromkeys(("fp16", "half"), _Switch(("--precision", "fp16"))),
    "torch-compile": _Switch(("--compile",)),
    **dict.fromkeys(("gpu", "gpu-id"), _Value("device", _cuda_device)),
    **dict.fromkeys(("gpus", "num-gpus", "ngpus", "nproc-per-node"), _Value("devices")),
    # Model, weights, data
    "pretrained": _Value("weights", lambda value: {"true": "coco", "false": "none"}.get(value.lower(), value)),
    **dict.fromkeys(("fine-tune-checkpoint", "pretrained-weights", "init-checkpoint"), _Value("weights")),
    "arch": _Value("model"),
    "weights-backbone": _Answer("`--weights imagenet` loads a pretrained backbone only"),
    "freeze": _Answer("the number of trained stages is set: `--trainable-backbone-layers 0` freezes the backbone"),
    "sync-bn": _Switch(("--backbone-norm", "sync_bn")),
    "gradient-checkpointing": _Switch(("--activation-checkpointing",)),
    **dict.fromkeys(
        ("data-path", "dataset", "data", "train-data", "dataset-name"),
        _Answer("the data set is the argument: `stoker train DATA`"),
    ),
    **dict.fromkeys(
        ("cfg", "hyp"),
        _Answer("set flags, or `--config config.toml`; every run's values are in its config.toml"),
    ),
    "config-file": _Value("config"),
    "pipeline-config-path": _Answer("`stoker import pipeline.config` writes a config.toml: `stoker train --config`"),
    **dict.fromkeys(("use-tpu", "tpu-name", "tpu", "num-tpu-cores", "gcp-project", "tpu-zone"), _Answer(_NO_TPU)),
    **dict.fromkeys(("nc", "num-classes"), _Answer("classes come from the data set; `--classes NAME …` trains some")),
    "single-cls": _Answer("stoker trains the classes of the data set; `--classes NAME …` trains some of them"),
    # Augmentation
    **dict.fromkeys(("fliplr", "hflip-prob"), _Value("hflip")),
    "flipud": _Answer("images are flipped from left to right only: `--hflip 0.5`"),
    "hsv-h": _Value("hue"),
    "hsv-s": _Value("saturation"),
    "hsv-v": _Value("brightness"),
    "data-augmentation": _Value("augment", lambda _: "default", note="its presets are not here"),
    "close-mosaic": _Answer("the last tenth of training has no mosaics by itself: `--mosaic 0` switches them off"),
    **dict.fromkeys(
        (
            "mixup",
            "copy-paste",
            "degrees",
            "shear",
            "perspective",
            "translate",
            "multi-scale",
            "cutmix",
            "bgr",
            "scale",
        ),
        _Answer("stoker does not have this augmentation; it has `--scale-jitter-prob`, `--mosaic` and colors"),
    ),
    # Run folder, checkpoints, evaluation
    **dict.fromkeys(("output-dir", "save-dir", "model-dir", "out-dir"), _Value("run-dir")),
    **dict.fromkeys(("project", "name"), _Answer("the run's folder is one path: `--run-dir runs/NAME`")),
    **dict.fromkeys(("save-period", "save-every-epochs"), _Value("checkpoint-every", lambda value: f"{value}ep")),
    **dict.fromkeys(("save-steps", "checkpoint-every-n"), _Value("checkpoint-every")),
    **dict.fromkeys(("eval-steps", "eval-interval", "val-interval", "val-check-interval"), _Value("eval-every")),
    **dict.fromkeys(("early-stopping-patience", "early-stop"), _Value("patience")),
    "resume-from-checkpoint": _Value("resume"),
    "random-seed": _Value("seed"),
    "test-only": _Answer("`stoker eval RUN` scores a trained model"),
    **dict.fromkeys(
        (
            "task",
            "mode",
            "save",
            "verbose",
            "plots",
            "profile",
            "print-freq",
            "logging-steps",
            "alsologtostderr",
            "do-train",
            "do-eval",
        ),
        _Answer("it is not needed: leave it out"),
    ),
    "exist-ok": _Answer("the same command continues an unfinished run, and starts a new one after a finished one"),
    "fraction": _Answer(
        "stoker trains on the whole training split; make a smaller data set with `stoker data convert`"
    ),
    **dict.fromkeys(
        ("overlap-mask", "mask-ratio", "pose", "kobj"), _Answer("stoker trains boxes only, no masks or keypoints")
    ),
    **dict.fromkeys(
        ("dropout", "label-smoothing", "erasing", "auto-augment"), _Answer("it is an option of classifiers")
    ),
    **dict.fromkeys(
        ("val", "eval-strategy", "evaluation-strategy"),
        _Answer("`--eval-every 1ep` sets the interval; 0 evaluates at the end only"),
    ),
    **dict.fromkeys(
        ("save-strategy", "save-total-limit"),
        _Answer("`--checkpoint-every` sets the interval; the last two checkpoints are kept"),
    ),
    "save-json": _Answer("`stoker eval RUN --json` prints the metrics, `stoker predict` writes predictions.json"),
    **dict.fromkeys(
        ("warmup-momentum", "warmup-bias-lr", "warmup-ratio", "warmup-factor"),
        _Answer("the warm-up is linear in the learning rate: `--warmup-steps N`"),
    ),
    **dict.fromkeys(
        ("box", "cls", "dfl"),
        _Answer("the loss weights are those of the model's paper; `--box-loss` and `--focal-alpha` can be set"),
    ),
    "nbs": _Answer("the learning rate follows the batch size by itself"),
    **dict.fromkeys(
        ("lr-step-size", "lr-steps", "lr-gamma"),
        _Answer("`--lr-scheduler multistep` multiplies by 0.1 at 2/3 and 8/9 of the length"),
    ),
    "start-epoch": _Answer("a resumed run knows its position: `--resume RUN`"),
    **dict.fromkeys(
        ("world-size", "dist-url", "dist-backend", "local-rank", "ddp-find-unused-parameters"),
        _Answer("`--devices N` trains on the devices of a machine; torchrun and srun start ranks on several"),
    ),
    **dict.fromkeys(
        ("eval-on-train-data", "sample-1-of-n-eval-examples", "sample-1-of-n-eval-on-train-examples", "eval-timeout"),
        _Answer(
            "the whole validation split is evaluated in the background; `stoker eval RUN --split train` "
            "evaluates another"
        ),
    ),
    "hparams-overrides": _Answer("set flags: every setting has one (docs/settings.md)"),
    "checkpoint-dir": _Answer("`stoker eval RUN` evaluates a run; `--resume RUN` continues one"),
    **dict.fromkeys(("report-to", "wandb", "run-name"), _Answer("`--track wandb` or `--track mlflow`")),
    **dict.fromkeys(("adam-beta1",), _Value("momentum")),
    **dict.fromkeys(("adam-beta2", "adam-epsilon"), _Answer("they are those of torch.optim.AdamW")),
    **dict.fromkeys(
        ("load-best-model-at-end", "metric-for-best-model"),
        _Answer("best.safetensors has the weights with the best AP"),
    ),
    "overwrite-output-dir": _Answer("a finished run is never overwritten: the next one gets a new folder"),
    "aspect-ratio-group-factor": _Answer("batches have a fixed size; images are not grouped by aspect"),
    "deterministic": _Answer(
        "a resumed run has the same images in the same order and the same state; on a CPU it is bit-identical, on a "
        "GPU kernels may round differently; `--seed N` decides the rest"
    ),
}
_NO_RUN = _Answer("a plan trains nothing; `stoker train` has this flag")
_PLAN: dict[str, _Value | _Switch | _Answer] = {
    **dict.fromkeys(("run", "run-dir", "resume", "dry-run", "output-dir", "save-dir", "model-dir"), _NO_RUN),
    "max-time": _Answer("it is as long on every machine; `--by 2h` names the time in which a training has to be done"),
    **dict.fromkeys(("machine", "instance", "instance-type", "machine-type"), _Value("on")),
    **dict.fromkeys(("num-gpus", "ngpus"), _Value("gpus")),
    **dict.fromkeys(("deadline", "within"), _Value("by")),
    "max-cost": _Value("budget"),
}
_PREDICT: dict[str, _Value | _Switch | _Answer] = {
    **dict.fromkeys(("conf-thres", "conf-threshold", "confidence", "score-threshold", "threshold"), _Value("conf")),
    **dict.fromkeys(("iou-thres", "iou-threshold", "nms-threshold", "nms-thresh"), _Value("iou")),
    **dict.fromkeys(("overlap", "overlap-ratio", "overlap-height-ratio"), _Value("tile-overlap")),
    **dict.fromkeys(("slice-height", "slice-width", "slice-size"), _Value("tile")),
    **dict.fromkeys(("output-dir", "save-dir", "project"), _Value("out")),
    **dict.fromkeys(("source", "weights", "model"), _Answer("`stoker predict RUN IMAGES…`: both are arguments")),
    "imgsz": _Answer("the model's own input size is used; `--tile 640` helps with small objects in large images"),
}
_EXPORT: dict[str, _Value | _Switch | _Answer] = {
    "onnx": _Switch(("--format", "onnx")),
    **dict.fromkeys(("max-det", "max-dets"), _Value("max-detections")),
    **dict.fromkeys(("batch", "b"), _Value("batch-size")),
    "dynamic": _Switch(("--batch-size", "dynamic")),
    "pictures": _Value("images"),
    **dict.fromkeys(("conf-thres", "score-threshold"), _Value("conf")),
    **dict.fromkeys(("iou-thres", "nms-threshold"), _Value("iou")),
    "simplify": _Answer("the graph is written as small as onnxruntime needs it"),
}
_EVAL: dict[str, _Value | _Switch | _Answer] = {
    **dict.fromkeys(("batch", "b", "per-device-eval-batch-size"), _Value("batch-size")),
    "data": _Answer("the data set is the second argument: `stoker eval RUN DATA`"),
}
_OLD_FLAGS = {
    old.replace("_", "-"): _Value(new.replace("_", "-"), lambda value, old=old: str(old_names.setting(old, value)[1]))  # type: ignore[misc]
    for old, new in old_names.SETTINGS.items()
    if old not in ("for", "for_", "tail", "eager", "fit", "checkpoint_activations", "threads")
}
_OLD_TRAIN: dict[str, _Value | _Switch | _Answer] = {
    **_OLD_FLAGS,
    "for": _Value("max-duration"),
    "eager": _Switch(("--no-compile",)),
    "no-eager": _Switch(("--compile",)),
    "fit": _Switch(("--auto-batch",)),
    "checkpoint-activations": _Switch(("--activation-checkpointing",)),
    "threads": _Value("workers", lambda value: "auto" if value == "0" else value),
    "run": _Value("run-dir"),
    "log": _Value("log-format"),
}
_DATA: dict[str, _Value | _Switch | _Answer] = {
    "no-pictures": _Switch(("--annotations-only",)),
    "link": _Switch(("--hardlink",)),
    **{name: _TRAIN[name] for name in ("imgsz", "img-size", "num-workers", "batch", "fliplr")},
    **_OLD_FLAGS,
    "threads": _Value("workers"),
}

_VALUES: dict[str, Callable[[str], str]] = {
    "augment": lambda value: "default" if value == "recipe" else value,
    "device": _cuda_device,
    "cache": lambda value: {"true": "ram", "false": "none", "memory": "ram"}.get(value.lower(), value),
    "optimizer": str.lower,
}
"""Flag of stoker → how a value of Ultralytics is written here."""

HABITS: dict[str, dict[str, _Value | _Switch | _Answer]] = {
    "train": {**_OLD_TRAIN, **_TRAIN},
    "check": {**_OLD_TRAIN, **_TRAIN},
    "plan": {name: meaning for name, meaning in {**_OLD_TRAIN, **_TRAIN, **_PLAN}.items() if name != "gpus"},
    "eval": _EVAL,
    "predict": _PREDICT,
    "export": _EXPORT,
    "data": _DATA,
    "watch": {"run": _Value("run-dir")},
    "import": {
        "model-dir": _Value("run-dir"),
        "pipeline-config-path": _Answer("the file is the argument: `stoker import pipeline.config`"),
        "num-train-steps": _Answer("`stoker train --config config.toml --steps N` trains for another length"),
        **dict.fromkeys(("use-tpu", "tpu-name"), _Answer(_NO_TPU)),
    },
    "why": {"price": _Value("price-per-device-hour")},
    "report": {"price": _Value("price-per-device-hour")},
}
"""Command → flag as people type it, without `--`, with `-` → what it means here."""


def translate(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the arguments with the flags of stoker, a note for each that was changed).

    `name=value` behind `stoker train` becomes `--name value`, underscores in flags become dashes. Raises UsageError
    for a flag of another tool that has no counterpart; it says what to do instead.
    """
    if not arguments or arguments[0] not in HABITS:
        return list(arguments), []
    command, table = arguments[0], HABITS[arguments[0]]
    out, notes = [command], []
    rest = list(arguments[1:])
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            out += [argument, *rest]
            break
        if match := re.fullmatch(r"([a-z][a-z0-9_]*)=(.*)", argument):
            if command not in ("train", "plan", "check", "predict", "export", "eval"):
                out.append(argument)
                continue
            if match[1] == "data" and command in ("train", "plan", "check"):
                out.append(match[2])
                notes.append(f"{argument}: the data set is the argument `{match[2]}`")
                continue
            argument = f"--{match[1]}={match[2]}"
        short = re.fullmatch(r"-([a-z])", argument)
        if not argument.startswith("--") and not (short and short[1] in table):
            out.append(argument)
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        name = name.replace("_", "-")
        meaning = table.get(name)
        next_value = value or "".join(rest[:1])
        if (
            command in ("train", "plan", "check")
            and name == "val"
            and not re.fullmatch(r"(?i)(true|false|-.*)?", next_value)
        ):
            meaning = None  # an annotation file; Ultralytics' `val` is a switch
        if name == "tail" and command == "train":  # a choice of two that became a switch
            value = value or (rest.pop(0) if rest else "")
            out.append("--reduced-tail" if value == "half" else "--no-reduced-tail")
            notes.append(f"--tail {value} is `{out[-1]}` here")
            continue
        if meaning is None:
            change = _VALUES.get(name) if command in ("train", "plan", "check") else None
            if change is not None and not equals and rest:
                equals, value = "=", rest.pop(0)
            out += [f"--{name}", change(value) if change else value] if equals else [f"--{name}"]
        elif isinstance(meaning, _Answer):
            raise UsageError(f"`stoker {command}` has no {argument.partition('=')[0]}.", fix=meaning.text)
        elif isinstance(meaning, _Switch):
            is_off = value.lower() in ("false", "0", "no")
            arguments = meaning.off if is_off else meaning.arguments
            out += arguments
            notes.append(
                f"{argument} is `{' '.join(arguments)}` here" if arguments else f"{argument} is left out: it is off"
            )
        else:
            values = [value] if equals else ([rest.pop(0)] if rest and not rest[0].startswith("--") else [])
            if name == "pretrained" and not values:
                values = ["true"]
            changed = [meaning.change(v) for v in values]
            out += [f"--{meaning.flag}", *changed]
            note = f"--{name} is `--{meaning.flag}` here"
            notes.append(note + (f": {meaning.note}" if meaning.note else ""))
    return _square(out), notes


def _square(arguments: list[str]) -> list[str]:
    """`--image-size 640` is 640 × 640."""
    out: list[str] = []
    for k, argument in enumerate(arguments):
        out.append(argument)
        is_single = not any(following.isdecimal() for following in arguments[k + 1 : k + 2])
        if k and arguments[k - 1] == "--image-size" and argument.isdecimal() and is_single:
            out.append(argument)
    return out
