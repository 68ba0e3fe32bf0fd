"""The `train_config` of a pipeline.config: optimizer, schedule, length, initial weights, augmentation.

stoker's schedules have fixed shapes over the whole length (`training/optim.py: lr_at`), so a schedule of the API is
compared with them over the steps that the training really has. The API applies a list of augmentation steps in order;
stoker has one crop or zoom, a flip, and one change of colors. Numbers of the steps and their defaults are those of
object_detection/protos/preprocessor.proto and core/preprocessor.py.
"""

import math
from collections.abc import Callable
from typing import Any

from stoker.migration.fields import FieldAccount, Status
from stoker.migration.text_format import Message

API_MOVING_AVERAGE = 0.9999
END_OF_SCHEDULE = 0.01
"""Where cosine and exponential end in stoker, relative to the peak."""
NEAR_CONSTANT = 0.5
"""A cosine schedule that is above this fraction of its peak at the last step is nearer to a constant one."""


def read_training(account: FieldAccount, train: Message, model: Message) -> None:
    """Rows and settings of batch size, length, weights, optimizer, schedule and weight decay."""
    batch_size = int(train.number("batch_size", 32))
    account.exact(train, "batch_size", {"batch_size": batch_size}, "images per step of the whole job")
    text = f"batch_size {batch_size} is that of the whole job, in TensorFlow's MirroredStrategy and here; not per GPU"
    account.trap("batch-per-job", train.lines.get("batch_size"), text)
    steps = int(train.number("num_steps", 0))
    if steps:
        account.exact(train, "num_steps", {"max_duration": str(steps)})
    else:
        account.drop(train, "num_steps", "0 never ends; the length is derived from the data: --steps sets it")
    _read_weights(account, train)
    _read_optimizer(account, train.child("optimizer"), steps)
    clip = train.number("gradient_clipping_by_norm", 0.0)
    account.exact(train, "gradient_clipping_by_norm", {"clip_grad_norm": clip}, "" if clip else "0: gradients stay")
    _read_weight_decay(account, train, model)
    _read_augmentation(account, train)
    if not train.has("freeze_variables") and not train.has("update_trainable_variables"):
        account.exact(train, "freeze_variables", {"trainable_backbone_layers": 5}, "every layer is trained")
    is_tf2 = train.text("fine_tune_checkpoint_version") == "V2"
    if not is_tf2 and train.number("replicas_to_aggregate", 1) > 1 and train.flag("sync_replicas", False):
        replicas = int(train.number("replicas_to_aggregate", 1))
        text = (
            f"replicas_to_aggregate {replicas} is of TensorFlow 1: there, each of its workers had batch_size images "
            "(TPU jobs: all together). If the job ran on such workers, multiply --batch-size"
        )
        account.trap("replicas", train.lines.get("replicas_to_aggregate"), text)


def _read_weights(account: FieldAccount, train: Message) -> None:
    """The initial weights. TensorFlow's cannot be loaded."""
    checkpoint = train.text("fine_tune_checkpoint")
    if not checkpoint:
        note = "no checkpoint: the weights are random; --weights imagenet learns much faster"
        account.exact(train, "fine_tune_checkpoint", {"weights": "none"}, note)
        return
    kind = train.text("fine_tune_checkpoint_type")
    is_detector = kind in ("detection", "full") or (not kind and train.flag("from_detection_checkpoint", False))
    available = account.model.weights
    weights = next(
        (name for name in ("coco", "imagenet") if name in available and (is_detector or name != "coco")), "none"
    )
    what = {
        "coco": "torchvision's COCO weights of the whole detector",
        "imagenet": "the backbone's ImageNet weights; there are none for the whole detector here",
        "none": f"random weights: {account.model.name} has no pretrained ones",
    }[weights]
    if weights == "imagenet" and not is_detector:
        what = "the backbone's ImageNet weights"
    note = f"TensorFlow's checkpoints have other names and layouts and cannot be loaded; instead {what}"
    account.substitute(train, "fine_tune_checkpoint", {"weights": weights}, note)
    text = f"{checkpoint!r} is not loaded; training starts from {what}: expect another AP in the first epochs"
    account.trap("fine-tune-checkpoint", train.lines.get("fine_tune_checkpoint"), text)
    for name in ("fine_tune_checkpoint_type", "from_detection_checkpoint"):
        if train.has(name):
            account.substitute(train, name, {}, f"decides the choice of --weights {weights}")


def _read_optimizer(account: FieldAccount, optimizer: Message, steps: int) -> None:
    kind = optimizer.kind() or "momentum_optimizer"
    chosen = optimizer.child(kind)
    momentum = chosen.number("momentum_optimizer_value", 0.9)
    if kind == "adam_optimizer":
        settings, note = {"optimizer": "adamw"}, "AdamW: weight decay is not scaled by the gradients"
    elif kind == "rms_prop_optimizer" and chosen.number("epsilon", 1.0) < 0.1:
        settings, note = {"optimizer": "adamw"}, "RMSProp does not exist here; AdamW divides by the same running mean"
    elif kind == "rms_prop_optimizer":
        settings = {"optimizer": "sgd"}
        note = "RMSProp does not exist here; with this epsilon it divides by about 1 and is SGD with momentum"
    else:
        settings, note = {"optimizer": "sgd"}, ""
    if kind == "momentum_optimizer":
        account.exact(chosen, "momentum_optimizer_value", {**settings, "momentum": momentum})
    elif kind == "rms_prop_optimizer":
        account.substitute(chosen, "momentum_optimizer_value", {**settings, "momentum": momentum}, note)
        for name in ("decay", "epsilon"):
            if chosen.has(name):
                account.drop(chosen, name, note)
    _read_schedule(account, chosen.child("learning_rate"), steps)
    if kind == "adam_optimizer":  # its fields may all be those of the schedule
        account.settings |= settings
        account.substitute(optimizer, kind, settings, note)
    if optimizer.flag("use_moving_average", True):
        decay = optimizer.number("moving_average_decay", API_MOVING_AVERAGE)
        for name in ("use_moving_average", "moving_average_decay"):
            account.exact(optimizer, name, {"ema_decay": decay}, "the averaged weights are evaluated and saved")
    else:
        account.exact(optimizer, "use_moving_average", {"ema_decay": 0.0})


def _read_schedule(account: FieldAccount, schedule: Message, steps: int) -> None:
    kind = schedule.kind()
    chosen = schedule.child(kind or "constant_learning_rate")
    readers: dict[str, Callable[[FieldAccount, Message, int], None]] = {
        "cosine_decay_learning_rate": _read_cosine,
        "exponential_decay_learning_rate": _read_exponential,
        "manual_step_learning_rate": _read_manual_steps,
        "constant_learning_rate": _read_constant,
    }
    readers.get(kind or "", _read_constant)(account, chosen, steps)


def _read_constant(account: FieldAccount, chosen: Message, _steps: int) -> None:
    settings = {"lr": chosen.number("learning_rate", 0.002), "lr_scheduler": "constant", "warmup_steps": 0}
    account.exact(chosen, "learning_rate", settings)


def _read_cosine(account: FieldAccount, chosen: Message, steps: int) -> None:
    total = int(chosen.number("total_steps", 4_000_000))
    warmup = int(chosen.number("warmup_steps", 10_000))
    account.exact(chosen, "learning_rate_base", {"lr": chosen.number("learning_rate_base", 0.002)})
    hold = int(chosen.number("hold_base_rate_steps", 0))
    progress = (steps - warmup - hold) / max(1, total - warmup - hold) if steps else 1.0
    final = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    if total < steps:
        note = f"there, the learning rate is 0 after step {total:,}; here the cosine reaches its end at step {steps:,}"
        account.substitute(chosen, "total_steps", {"lr_scheduler": "cosine"}, note)
        account.trap("schedule-length", chosen.lines.get("total_steps"), note)
    elif final > NEAR_CONSTANT:
        note = (
            f"the schedule is for {total:,} steps and the training has {steps:,}: its learning rate never falls below "
            f"{100 * final:.0f} % of the peak, so a constant one is nearer than a whole cosine"
        )
        account.substitute(chosen, "total_steps", {"lr_scheduler": "constant"}, note)
        better = "`--lr-scheduler cosine` would fit it to the length"
        account.trap("schedule-length", chosen.lines.get("total_steps"), f"{note}; {better}")
    else:
        note = "the cosine ends at 1 % of the peak instead of 0, and begins with the first step, not after the warm-up"
        account.substitute(chosen, "total_steps", {"lr_scheduler": "cosine"}, note)
    _read_warmup(account, chosen, "warmup_steps", warmup, steps)
    if warmup:
        note = "the warm-up begins at a thousandth of the peak"
        account.substitute(chosen, "warmup_learning_rate", {}, note)


def _read_warmup(account: FieldAccount, chosen: Message, name: str, warmup: int, steps: int) -> None:
    if steps and warmup >= steps:
        shorter = steps // 10
        note = f"the warm-up is as long as the training of {steps:,} steps; here a tenth of it"
        account.substitute(chosen, name, {"warmup_steps": shorter}, note)
        account.trap("warm-up", chosen.lines.get(name), note)
    else:
        account.exact(chosen, name, {"warmup_steps": warmup})


def _read_exponential(account: FieldAccount, chosen: Message, steps: int) -> None:
    peak = chosen.number("initial_learning_rate", 0.002)
    account.exact(chosen, "initial_learning_rate", {"lr": peak})
    every, factor = chosen.number("decay_steps", 4_000_000), chosen.number("decay_factor", 0.95)
    periods = (steps or every) / max(1.0, every)
    if chosen.flag("staircase", True):
        periods = math.floor(periods)
    final = factor**periods
    scheduler = "exponential" if final < math.sqrt(END_OF_SCHEDULE) else "constant"
    status: Status = "exact" if final == 1.0 and steps else "substitute"
    note = f"the first decay is after the training's {steps:,} steps"
    if status == "substitute":
        ending = "falls to 1 % of the peak over the length" if scheduler == "exponential" else "does not fall"
        note = f"there, the learning rate falls to {100 * final:.3g} % of the peak in this training; here it {ending}"
    for name in ("decay_steps", "decay_factor"):
        account.carry(chosen, name, status, {"lr_scheduler": scheduler}, note)
    if chosen.has("staircase"):
        if final == 1.0:
            account.exact(chosen, "staircase", note="no decay within the training")
        else:
            account.substitute(chosen, "staircase", {}, "the learning rate falls smoothly")
    burn_in = int(chosen.number("burnin_steps", 0))
    if burn_in:
        note = "a linear warm-up instead of a constant lower learning rate"
        account.substitute(chosen, "burnin_steps", {"warmup_steps": burn_in}, note)
        account.substitute(chosen, "burnin_learning_rate", {}, note)
    else:
        account.exact(chosen, "burnin_steps", {"warmup_steps": 0})


def _read_manual_steps(account: FieldAccount, chosen: Message, steps: int) -> None:
    entries = [
        (entry, int(entry.number("step", 0)), entry.number("learning_rate", 0.002))
        for entry in chosen.children("schedule")
    ]
    initial = chosen.number("initial_learning_rate", 0.002)
    is_warmup = chosen.flag("warmup", False) and bool(entries)
    reached = [(entry, step, lr) for entry, step, lr in entries if not steps or step < steps]
    if not is_warmup:
        peak = max([initial, *(lr for _, _, lr in reached)])
    else:
        peak = max(lr for _, _, lr in reached) if reached else initial
    from_peak = next((k for k, (_, _, lr) in enumerate(reached) if lr == peak), 0)
    falling = [(step, lr) for _, step, lr in reached[from_peak:] if lr < peak]
    drops, rates = [step for step, _ in falling], [lr for _, lr in falling]
    same_shape = (
        bool(steps)
        and len(drops) == 2
        and all(abs(step - steps * part) <= 1 for step, part in zip(drops, (2 / 3, 8 / 9), strict=True))
        and all(math.isclose(lr, peak * part, rel_tol=0.01) for lr, part in zip(rates, (0.1, 0.01), strict=True))
    )
    status: Status = "exact"
    settings, note = {"lr_scheduler": "constant"}, f"no step within the training's {steps:,}"
    if same_shape:
        settings, note = {"lr_scheduler": "multistep"}, "times 0.1 at 2/3 and 8/9 of the length"
    elif drops:
        listed = ", ".join(f"{lr:g} from step {step:,}" for step, lr in zip(drops, rates, strict=True))
        status, settings = "substitute", {"lr_scheduler": "multistep"}
        note = f"there: {listed}; here times 0.1 at 2/3 and 8/9 of the length"
        if rates[-1] > peak * math.sqrt(0.1):
            settings = {"lr_scheduler": "constant"}
            note = f"there: {listed}; nearer to a constant learning rate than to times 0.1"
    account.exact(
        chosen, "initial_learning_rate", {"lr": peak}, "" if peak == initial else "the highest of the schedule"
    )
    if is_warmup:
        warmup = entries[0][1] if not steps else min(entries[0][1], steps // 10)
        account.substitute(chosen, "warmup", {"warmup_steps": warmup}, "it begins at a thousandth of the peak")
    else:
        account.exact(chosen, "warmup", {"warmup_steps": 0})
    for entry, _, _ in entries:
        for name in ("step", "learning_rate"):
            account.carry(entry, name, status, settings, note)
    if not entries:
        account.settings |= settings


def _read_weight_decay(account: FieldAccount, train: Message, model: Message) -> None:
    """The L2 regularizer: TF's gradient of weight · w² / 2 is the weight decay of SGD."""
    found = [
        (owner, name) for owner, name in model.leaves() if ".l2_regularizer" in f".{owner.path}" and name == "weight"
    ]
    if train.has("add_regularization_loss"):
        if train.flag("add_regularization_loss", True):
            account.exact(train, "add_regularization_loss")
        else:
            account.exact(train, "add_regularization_loss", {"weight_decay": 0.0})
            for owner, name in found:
                account.exact(owner, name, note="not used: add_regularization_loss is false")
            return
    if not found:
        return
    values = {owner.path: owner.number(name, 0.0) for owner, name in found}
    chosen = next((value for path, value in values.items() if "feature_extractor" in path), max(values.values()))
    coupled = account.settings.get("optimizer") == "sgd"
    for owner, name in found:
        value = values[owner.path]
        settings = {"weight_decay": chosen}
        if value == chosen and coupled:
            account.exact(owner, name, settings, "not applied to biases and norms")
        elif value == chosen:
            account.substitute(owner, name, settings, "AdamW applies it to the weights, not to the gradients")
        else:
            account.substitute(owner, name, {}, f"stoker has one weight decay for all layers: {chosen:g}")


SCALE_LIMITS = (0.05, 20.0)
"""Of `--scale-range`."""
DISTORT_COLOR = {"brightness": 0.125, "contrast": 0.5, "saturation": 0.5, "hue": 0.2}
"""random_distort_color: brightness 32 of 255, contrast and saturation 0.5 to 1.5, hue 0.2."""
SSD_CROP_COVERED, SSD_CROP_AREA, SSD_CROP_SKIPPED = 0.1, 0.1, 0.15
"""ssd_random_crop without operations: the lowest coverage above 0, the smallest area, probability to skip the crop."""
SCALE_NOTE = "one scale per image, with its aspect ratio kept, instead of a window of random shape"


def _read_augmentation(account: FieldAccount, train: Message) -> None:
    """Rows and settings of all steps. What the file does not ask for is switched off."""
    account.settings["augment"] = "none"
    for option in train.children("data_augmentation_options"):
        for name, steps in option.messages.items():
            for step in steps:
                _read_step(account, name, step)


def _read_step(account: FieldAccount, name: str, step: Message) -> None:
    if name == "random_horizontal_flip":
        account.exact(step, "probability", {"hflip": step.number("probability", 0.5)})
    elif name in COLOR_STEPS:
        _read_color(account, name, step)
    elif (settings := _scale_settings(name, step)) is not None:
        account.whole(step, "substitute", _merge(account, settings), SCALE_NOTE)


COLOR_STEPS = {
    "random_adjust_brightness": ("brightness", "a factor on the image instead of a number added to it"),
    "random_adjust_contrast": ("contrast", "a range around 1 of the larger of the two distances"),
    "random_adjust_saturation": ("saturation", "a range around 1 of the larger of the two distances"),
    "random_adjust_hue": ("hue", "rotated in YIQ, which keeps the brightness, instead of HSV"),
    "random_pixel_value_scale": ("brightness", "one factor per image instead of one per pixel"),
    "random_distort_color": ("", "brightness, contrast, saturation and hue once, in a fixed order"),
}


def _read_color(account: FieldAccount, name: str, step: Message) -> None:
    setting, note = COLOR_STEPS[name]
    if name == "random_distort_color":
        settings: dict[str, Any] = dict(DISTORT_COLOR)
    elif name == "random_adjust_brightness":
        settings = {setting: step.number("max_delta", 0.2)}
    elif name == "random_adjust_hue":
        settings = {setting: min(0.5, step.number("max_delta", 0.02))}
    else:
        names, defaults = ("minval", "maxval"), (0.9, 1.1)
        if name != "random_pixel_value_scale":
            names, defaults = ("min_delta", "max_delta"), (0.8, 1.25)
        low, high = step.number(names[0], defaults[0]), step.number(names[1], defaults[1])
        settings = {setting: max(1 - low, high - 1)}
    settings = {key: float(f"{min(1.0, max(0.0, value)):.4g}") for key, value in settings.items()}
    account.whole(step, "substitute", settings, note)


def _scale_settings(name: str, step: Message) -> dict[str, Any] | None:
    """Crop and zoom as a range of scales and its probability; None: the step does not crop or zoom.

    A window with the fraction a of the image's area shows it at the scale 1/√a."""
    if name in ("random_crop_image", "random_crop_pad_image"):
        low = 1 / math.sqrt(max(1e-4, step.number("max_area", 1.0)))
        high = 1 / math.sqrt(max(1e-4, step.number("min_area", 0.1)))
        if name == "random_crop_pad_image":
            low /= max([2.0, *step.numbers("max_padded_size_ratio")])
        return {
            "scale_jitter_prob": 1 - step.number("random_coef", 0.0),
            "scale_range": (low, high),
            "min_object_covered": step.number("min_object_covered", 1.0),
        }
    if name.startswith("ssd_random_crop"):
        operations = step.children("operations")
        areas = [op.number("min_area", SSD_CROP_AREA) for op in operations] or [SSD_CROP_AREA]
        covered = [op.number("min_object_covered", 0.0) for op in operations]
        skipped = [op.number("random_coef", 0.0) for op in operations] or [SSD_CROP_SKIPPED]
        padded = [2.0] if "pad" in name else [1.0]
        padded += [ratio for op in [step, *operations] for ratio in op.numbers("max_padded_size_ratio")]
        return {
            "scale_jitter_prob": 1 - sum(skipped) / len(skipped),
            "scale_range": (1 / max(padded), 1 / math.sqrt(max(1e-4, min(areas)))),
            "min_object_covered": min([value for value in covered if value > 0] or [SSD_CROP_COVERED]),
        }
    if name == "random_scale_crop_and_pad_to_square":
        scales = step.number("scale_min", 0.1), step.number("scale_max", 2.0)
    elif name == "random_image_scale":
        scales = step.number("min_scale_ratio", 0.5), step.number("max_scale_ratio", 2.0)
    elif name == "random_square_crop_by_scale":
        scales = 1 / step.number("scale_max", 1.3), 1 / step.number("scale_min", 0.6)
    elif name in ("random_pad_image", "random_absolute_pad_image"):
        scales = 0.5, 1.0
    else:
        return None
    return {"scale_jitter_prob": 1.0, "scale_range": scales}


def _merge(account: FieldAccount, settings: dict[str, Any]) -> dict[str, Any]:
    """With the crops and zooms of earlier steps: the wider range, the higher probability."""
    before = account.settings
    low, high = settings["scale_range"]
    if "scale_range" in before:
        low, high = min(low, before["scale_range"][0]), max(high, before["scale_range"][1])
    low, high = max(SCALE_LIMITS[0], low), min(SCALE_LIMITS[1], max(low, high))
    probability = max(settings["scale_jitter_prob"], before.get("scale_jitter_prob", 0.0))
    merged = {
        "scale_jitter_prob": float(f"{min(1.0, max(0.0, probability)):.4g}"),
        "scale_range": (float(f"{low:.4g}"), float(f"{high:.4g}")),
    }
    if "min_object_covered" in settings:
        merged["min_object_covered"] = min(
            settings["min_object_covered"], before.get("min_object_covered", settings["min_object_covered"])
        )
    return merged
